"""Does every query of TPC-H and TPC-DS run, give the oracle's result, and how much of each is planned?

    python -m tests.benchmarks.coverage --suite tpch,tpcds --engine duckdb,spark --scale 1

Every query goes the way of ``ebbflow query`` on an engine that is kept open, and its result is compared with that of
plain DuckDB on the same files (multisets; floats to 1e-9 relative). Results are kept per query in ``--work``, so that
the same command goes on where it was stopped; ``--again`` forgets what failed, ``--fresh`` everything.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from ebbflow.flows.runs.options import parse_settings
from ebbflow.flows.setup.data import tpcds_tables, tpch_tables
from ebbflow.infra.clock import SystemClock
from ebbflow.infra.storage.files import home, write_text
from ebbflow.infra.tables.benchmark_data import default_folder
from ebbflow.planners.errors import EbbflowError
from ebbflow.planners.model import Share
from ebbflow.planners.query.planner import CutPolicy
from ebbflow.tasks.query.opening import OpenedEngine, opened_engine
from ebbflow.tasks.query.report import QueryReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute, explain

SHARE = Share.uniform(2.0, 4.0, 2)  # what planning times and shared views are told for: two small nodes


@dataclass(frozen=True)
class Query:
    """One query of a suite."""

    suite: str
    number: int
    text: str
    tables: str
    dialect: str


def main() -> None:
    """Run what is missing, then write the JSON file and the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suite", default="tpch,tpcds")
    parser.add_argument("--engine", default="duckdb,spark")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--master", default="local[2]")
    parser.add_argument(
        "--conf", action="append", default=[], help="a Spark setting: key=value", metavar="K=V"
    )
    parser.add_argument("--policies", default="qoop")
    parser.add_argument("--cuts", default="cost,every-join", help="cost, every-join, none, or several")
    parser.add_argument("--queries", default="", help="numbers, such as 1,5,72; all when empty")
    parser.add_argument("--work", type=Path, default=None, help="where results are kept between runs")
    parser.add_argument("--again", action="store_true", help="run again what was wrong or failed")
    parser.add_argument("--fresh", action="store_true", help="run everything again")
    parser.add_argument("--out", type=Path, default=Path("docs"))
    parser.add_argument("--page-only", action="store_true", help="write the page from what is there")
    arguments = parser.parse_args()
    work = arguments.work or home() / "coverage"
    if not arguments.page_only:
        run(arguments, work)
    from tests.benchmarks.coverage_page import page

    data = arguments.out / "benchmarks" / "coverage.json"
    found = sorted((json.loads(p.read_text()) for p in work.glob("*.json")), key=_order)
    if not arguments.page_only:
        write_text(data, json.dumps({"benchmark": "coverage", "runs": found}, indent=1) + "\n")
    write_text(arguments.out / "coverage.md", page(json.loads(data.read_text())["runs"]))
    wrong = [r for r in found if not r["right"]]
    print(f"{len(found)} runs, {len(wrong)} not right: {[_key(r) for r in wrong]}")
    raise SystemExit(bool(wrong))


def _order(run_: dict[str, Any]) -> tuple[Any, ...]:
    return run_["suite"] != "tpch", run_["query"], run_["engine"], run_["scale"], run_["policy"], run_["cuts"]


def _key(run_: dict[str, Any]) -> str:
    return "-".join(str(run_[k]) for k in ("suite", "scale", "engine", "policy", "cuts", "query"))


def queries(suite: str, scale: float) -> Iterator[Query]:
    """Yield the queries of ``suite`` with the folder of their tables, which is made unless it is there."""
    folder = default_folder(home(), suite, scale)
    if suite == "tpch":
        tables = str(tpch_tables(scale, folder, Console()))
        for number in range(1, 23):
            text = (files("ebbflow.flows") / "tpch" / f"q{number}.sql").read_text()
            yield Query(suite, number, text, tables, "spark")
    else:
        tables = str(tpcds_tables(scale, folder, Console()))
        for number in range(1, 100):
            yield Query(suite, number, (folder / "queries" / f"q{number}.sql").read_text(), tables, "duckdb")


def run(arguments: argparse.Namespace, work: Path) -> None:
    """Run every pair of query and setting whose result is not in ``work``, an engine at a time."""
    wanted = {int(n) for n in arguments.queries.split(",") if n}
    asked = [q for s in arguments.suite.split(",") for q in queries(s, arguments.scale)]
    asked = [q for q in asked if not wanted or q.number in wanted]
    settings = [(p, c) for p in arguments.policies.split(",") for c in arguments.cuts.split(",")]
    clock = SystemClock()
    for engine in arguments.engine.split(","):
        todo = []
        for query in asked:
            for policy, cuts in settings:
                name = f"{query.suite}-sf{arguments.scale:g}-{engine}-{policy}-{cuts}-q{query.number}.json"
                known = json.loads((work / name).read_text()) if (work / name).exists() else None
                if arguments.fresh or known is None or (arguments.again and not known["right"]):
                    todo.append((query, policy, cuts, work / name))
        if not todo:
            continue
        conf = parse_settings(arguments.conf)
        base = QueryRequest("SELECT 1", tables=".", engine=engine, master=arguments.master, conf=conf)
        with (
            tempfile.TemporaryDirectory(prefix="ebbflow-coverage-") as store,
            opened_engine(base, clock) as opened,
        ):
            for query, policy, cuts, path in todo:
                result = _one(query, engine, arguments, policy, cast("CutPolicy", cuts), store, opened)
                write_text(path, json.dumps(result, indent=1) + "\n")
                state = "right" if result["right"] else f"NOT RIGHT: {result['verdict']}"
                print(f"{path.stem}: {state}, {result['seconds']:.1f} s", flush=True)


def _one(
    query: Query,
    engine: str,
    arguments: argparse.Namespace,
    policy: str,
    cuts: CutPolicy,
    store: str,
    opened: OpenedEngine,
) -> dict[str, Any]:
    clock = SystemClock()
    request = QueryRequest(
        query.text,
        tables=query.tables,
        engine=engine,
        master=arguments.master,
        planner=policy,
        materialize=cuts,
        dialect=query.dialect,
        store=store,
        reuse=False,
        store_budget=0.0,
        verify=True,
        name=f"{query.suite} q{query.number}",
    )
    started = clock.now()
    report: QueryReport | None = None
    try:
        report = execute(request, PlainOrchestrator(), clock, opened).report
        verdict = report.verification
    except EbbflowError as error:
        verdict = f"{type(error).__name__}: {error}"
    seconds = clock.now() - started
    planned = _planned(request) if report is not None else {}
    return {
        "suite": query.suite,
        "query": query.number,
        "engine": engine,
        "scale": arguments.scale,
        "policy": policy,
        "cuts": cuts,
        "right": bool(report is not None and report.verified),
        "verdict": verdict,
        "rows": report.rows if report else None,
        "seconds": round(seconds, 2),
        "stages": sum(s.status == "completed" for s in report.stages) if report else 0,
        "blocks": [
            {"view": b.view, "relations": b.relations, "planned": b.planned, "reason": b.reason}
            for b in (report.blocks if report else ())
        ],
        "notes": list(report.problems) if report else [],
        "conf": arguments.conf,
        "load": round(os.getloadavg()[0], 1),
        **planned,
    }


def _planned(request: QueryRequest) -> dict[str, Any]:
    """Return the processor seconds of planning (statistics known), and which views are read several times."""
    from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
    from ebbflow.tasks.query.planning import prepare

    before = time.process_time()
    explain(request, SHARE)
    spent = time.process_time() - before
    _, planner = prepare(
        request, ParquetCheckpointStore(request.store_place), SystemClock(), run_id="coverage"
    )
    chain = planner.analysis.chain
    uses = {view.name: chain.uses[view.name] for view in chain.views if chain.uses[view.name] > 1}
    plans = planner.candidates(SHARE)
    fingerprints = {v: planner.analysis.fingerprints.view(v) for v in uses}
    best = {s.output_fp for s in plans[0].stages}
    return {
        "planning_seconds": round(spent, 3),
        "read_again": uses,
        "shared": [v for v, fp in fingerprints.items() if fp in best],
    }


if __name__ == "__main__":
    main()
