"""Are all 22 TPC-H answers right under every policy, and how do the policies compare in one run?

    python -m tests.benchmarks.tpch --tables DIR --engine spark --master 'local[2]' --out docs/benchmarks

Every answer is compared with DuckDB's on the same files (multisets; floats to 1e-9 relative). Policies take turns
within each query, in a fixed order; figures are ratios to policy ``single``. With one round on Spark the later
policies find a warmer JVM: then only the answers are a claim.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.storage.files import write_text
from ebbflow.tasks.drawing.charts import bars_svg
from ebbflow.tasks.query.opening import opened_engine
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute

POLICIES = ("single", "qoop", "clarinet", "volcano")


def main() -> None:
    """Run and write ``tpch-ENGINE.json`` and ``tpch-ENGINE.svg`` into ``--out``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", required=True, help="folder of TPC-H tables (ebbflow demo makes one)")
    parser.add_argument("--engine", default="spark", choices=("spark", "duckdb"))
    parser.add_argument("--master", default="local[2]")
    parser.add_argument("--queries", default=",".join(map(str, range(1, 23))))
    parser.add_argument("--rounds", type=int, default=1, help="how many times each pair is measured")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    result = run(arguments)
    name = f"tpch-{arguments.engine}"
    write_text(arguments.out / f"{name}.json", json.dumps(result, indent=1) + "\n")
    groups = [f"Q{row['query']}" for row in result["queries"]]
    series = {p: [row["ratio"][p] for row in result["queries"]] for p in POLICIES if p != "single"}
    title = f"TPC-H on {arguments.engine}: time over that of one plain statement"
    write_text(arguments.out / f"{name}.svg", bars_svg(title, groups, series, unit="×"))
    wrong = [(r["query"], p) for r in result["queries"] for p, ok in r["right"].items() if not ok]
    print("all answers right" if not wrong else f"WRONG: {wrong}")
    raise SystemExit(bool(wrong))


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return right answers, median seconds and ratios by query and policy."""
    clock = SystemClock()
    rows = []
    with tempfile.TemporaryDirectory(prefix="ebbflow-bench-") as store:
        base = QueryRequest("SELECT 1", tables=".", engine=arguments.engine, master=arguments.master)
        with opened_engine(base, clock) as opened:
            warm = _request(arguments, 1, "single", store)
            execute(warm, PlainOrchestrator(), clock, opened)
            for number in map(int, arguments.queries.split(",")):
                rows.append(_query(arguments, number, store, clock, opened))
                _say(rows[-1])
    return {
        "benchmark": "tpch",
        "engine": arguments.engine,
        "master": arguments.master,
        "tables": Path(arguments.tables).name,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load": os.getloadavg()[0],
        "rounds": arguments.rounds,
        "geometric_mean_ratio": {
            p: round(statistics.geometric_mean(r["ratio"][p] for r in rows), 3) for p in POLICIES
        },
        "queries": rows,
    }


def _query(
    arguments: argparse.Namespace, number: int, store: str, clock: SystemClock, opened: Any
) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {p: [] for p in POLICIES}
    right = dict.fromkeys(POLICIES, True)
    stages: dict[str, int] = {}
    for _ in range(arguments.rounds):
        for policy in POLICIES:
            request = _request(arguments, number, policy, store)
            report = execute(request, PlainOrchestrator(), clock, opened).report
            seconds[policy].append(report.seconds)
            right[policy] &= bool(report.verified)
            stages[policy] = len(report.stages)
    medians = {p: statistics.median(s) for p, s in seconds.items()}
    return {
        "query": number,
        "right": right,
        "seconds": {p: round(s, 3) for p, s in medians.items()},
        "ratio": {p: round(s / medians["single"], 3) for p, s in medians.items()},
        "stages": stages,
    }


def _request(arguments: argparse.Namespace, number: int, policy: str, store: str) -> QueryRequest:
    return QueryRequest(
        (files("ebbflow.flows") / "tpch" / f"q{number}.sql").read_text(),
        tables=arguments.tables,
        engine=arguments.engine,
        master=arguments.master,
        planner=policy,
        store=store,
        reuse=False,
        verify=True,
    )


def _say(row: dict[str, Any]) -> None:
    cells = "  ".join(
        f"{p} {row['seconds'][p]:6.2f} s ({row['stages'][p]} st){'' if row['right'][p] else ' WRONG'}"
        for p in POLICIES
    )
    print(f"Q{row['query']:<3} {cells}", flush=True)


if __name__ == "__main__":
    main()
