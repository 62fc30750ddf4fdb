"""What our stages cost beside tuned Spark SQL and plain DuckDB: wall and CPU seconds of the whole process tree.

    python -m tests.benchmarks.native_stages --tables ~/.cache/ebbflow/tpch/sf5 --out docs/benchmarks
    python -m tests.benchmarks.native_stages --systems duckdb,alone --rounds 3 --tables ...    (no JVM)

Systems take turns within each query: plain Spark as its user would tune it (8 shuffle partitions, broadcasts up to
64 MB, adaptive), our plans on Spark SQL, the same with native stages, the embedded engine, and DuckDB ``alone``: the
same text over views of the same files, with the embedded engine's threads and memory. All of them run in one process
and, where Spark is used, one JVM, with all cores; each writes its result as Parquet. A round that warms up comes
first, in which the tables' statistics are collected too, and each round begins with another system. Answers are
compared with those of the first system named.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pyarrow.parquet as pq

from ebbflow.infra.query.comparison import same_rows
from ebbflow.infra.storage.files import write_text
from ebbflow.tasks.query.opening import OpenedEngine, opened_engine
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import execute
from tests.benchmarks.sql.rig import TUNED_SETTINGS

SYSTEMS = ("tuned", "spark", "native", "duckdb", "alone")
LONG = 1.0  # s of DuckDB alone: of longer queries the ratio counts, of shorter ones what comes on top


@dataclass(frozen=True)
class Answer:
    """What a system has done."""

    rows: Callable[[], Any]  # reads a pyarrow table
    notes: Sequence[str] = ()  # of its stages


Run = Callable[[int], Answer]


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all below it, ended ones included."""
    total = 0.0
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it ended: from now on its parent counts it
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def main() -> None:
    """Run and write ``native-stages.json`` into ``--out``, anew after each query."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", required=True, help="folder of TPC-H tables (ebbflow data makes one)")
    parser.add_argument("--queries", default=",".join(map(str, range(1, 23))))
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="of the ratios, over those named later")
    parser.add_argument("--rounds", type=int, default=3, help="how many times each pair is measured")
    parser.add_argument("--minutes", type=float, default=20.0, help="begin no query after so long")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    systems = arguments.systems.split(",")
    if unknown := set(systems) - set(SYSTEMS):
        parser.error(f"--systems must be of {', '.join(SYSTEMS)}; got {', '.join(sorted(unknown))}")
    end = time.monotonic() + 60 * arguments.minutes
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ebbflow-bench-") as folder, ExitStack() as leaving:
        runs = _systems(systems, arguments.tables, Path(folder), leaving)
        for number in map(int, arguments.queries.split(",")):
            if time.monotonic() > end:
                print(f"{arguments.minutes:g} minutes are over: Q{number} and what follows it are left out")
                break
            rows.append(_query(number, runs, arguments.rounds))
            print(json.dumps(rows[-1]), flush=True)
            result = _result(arguments, systems, rows)
            write_text(arguments.out / "native-stages.json", json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("geometric_mean_ratio", "over_alone")}, indent=1))
    raise SystemExit(not all(row["equal"] for row in rows))


def over_alone(rows: Sequence[Mapping[str, Any]], system: str) -> dict[str, Any]:
    """Return how ``system`` compares with DuckDB alone: ratios of CPU, ratios of wall for queries that take that
    more than ``LONG`` seconds, and for the others the seconds on top. Of no query a figure is ``None``."""

    def figures(ratios: Mapping[int, float]) -> dict[str, Any]:
        if not ratios:
            return {"geometric_mean": None, "worst": None, "worst_query": None}
        worst = max(ratios, key=lambda query: ratios[query])
        mean = statistics.geometric_mean(ratios.values())
        return {"geometric_mean": round(mean, 3), "worst": round(ratios[worst], 3), "worst_query": worst}

    long = [row for row in rows if row["wall"]["alone"] > LONG]
    more = {r["query"]: r["wall"][system] - r["wall"]["alone"] for r in rows if r not in long}
    latest = max(more, key=lambda query: more[query], default=None)
    return {
        "cpu": figures({r["query"]: r["cpu"][system] / r["cpu"]["alone"] for r in rows}),
        "wall_long": figures({r["query"]: r["wall"][system] / r["wall"]["alone"] for r in long}),
        "more_short": {
            "median": round(statistics.median(more.values()), 4) if more else None,
            "worst": None if latest is None else round(more[latest], 4),
            "worst_query": latest,
        },
    }


def _result(
    arguments: argparse.Namespace, systems: Sequence[str], rows: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    def mean(what: str, one: str, other: str) -> float:
        return round(statistics.geometric_mean(r[what][one] / r[what][other] for r in rows), 3)

    return {
        "benchmark": "native_stages",
        "tables": Path(arguments.tables).name,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "rounds": arguments.rounds,
        "systems": systems,
        "geometric_mean_ratio": {
            what: {one: {other: mean(what, one, other) for other in systems} for one in systems}
            for what in ("wall", "cpu")
        },
        "over_alone": {
            one: over_alone(rows, one) for one in systems if "alone" in systems and one != "alone"
        },
        "queries": rows,
    }


def _systems(names: Sequence[str], tables: str, folder: Path, leaving: ExitStack) -> Mapping[str, Run]:
    @cache
    def opened(engine: str) -> OpenedEngine:
        request = QueryRequest("SELECT 1", tables=tables, engine=engine)  # type: ignore[arg-type]
        return leaving.enter_context(opened_engine(request))

    def ours(engine: str, **options: Any) -> Run:
        running = opened(engine)

        def run(number: int) -> Answer:
            # results are not reused; statistics of the tables are, as they are collected once for each version
            request = QueryRequest(
                _sql(number),
                tables=tables,
                store=str(folder / "store"),
                reuse=False,
                engine=engine,
                **options,
            )  # type: ignore[arg-type]
            outcome = execute(request, opened=running)
            return Answer(outcome.to_arrow, [stage.note for stage in outcome.report.stages])

        return run

    made: dict[str, Callable[[], Run]] = {
        "tuned": lambda: _tuned(opened("spark"), tables, folder),
        "spark": lambda: ours("spark", stages="spark"),
        "native": lambda: ours("spark", stages="native"),
        "duckdb": lambda: ours("duckdb"),
        "alone": lambda: _alone(opened("duckdb"), tables, folder, leaving),
    }
    return {name: made[name]() for name in names}


def _tuned(opened: OpenedEngine, tables: str, folder: Path) -> Run:
    from pyspark.sql import SparkSession

    assert opened.engine.name == "spark"
    session = SparkSession.builder.getOrCreate().newSession()
    for key, value in TUNED_SETTINGS.items():
        session.conf.set(key, value)
    for path in Path(tables).glob("*.parquet"):
        session.read.parquet(str(path)).createOrReplaceTempView(path.stem)

    def run(number: int) -> Answer:
        session.sql(_sql(number)).write.mode("overwrite").parquet(str(folder / "tuned"))
        return Answer(lambda: pq.read_table(folder / "tuned"))

    return run


def _alone(opened: OpenedEngine, tables: str, folder: Path, leaving: ExitStack) -> Run:
    """Return plain DuckDB with the threads and the memory of the embedded engine."""
    (node,) = opened.source.capacity().nodes
    limits = {"threads": str(int(node.cores)), "memory_limit": f"{node.memory * 1024:.0f}MiB"}
    connection = leaving.enter_context(
        duckdb.connect(config={**limits, "temp_directory": str(folder / "spills")})
    )
    for path in Path(tables).glob("*.parquet"):
        connection.execute(f"CREATE VIEW {path.stem} AS SELECT * FROM read_parquet('{path}')")

    def run(number: int) -> Answer:
        file = folder / "alone.parquet"
        connection.execute(f"COPY ({_sql(number).strip().rstrip(';')}) TO '{file}' (FORMAT parquet)")
        return Answer(lambda: pq.read_table(file))

    return run


def _sql(number: int) -> str:
    return files("ebbflow.flows").joinpath("tpch", f"q{number}.sql").read_text()


def _rest() -> None:
    """Wait, bounded, until the JVM has compiled what the turn before had it compile: no system pays for another."""
    for _ in range(20):
        before = cpu_seconds()
        time.sleep(0.25)
        if cpu_seconds() - before <= 0.02:
            return


def _query(number: int, runs: Mapping[str, Run], rounds: int) -> dict[str, Any]:
    cpu: dict[str, list[float]] = {system: [] for system in runs}
    wall: dict[str, list[float]] = {system: [] for system in runs}
    notes: dict[str, list[str]] = {}
    equal = True
    for turn in range(rounds + 1):
        right = None
        # another begins each time: of two in one process the second has the memory that the first has left
        order = [*runs.items()]
        for system, run in order[turn % len(order) :] + order[: turn % len(order)]:
            _rest()
            began, before = time.perf_counter(), cpu_seconds()
            answer = run(number)
            wall[system].append(time.perf_counter() - began)
            cpu[system].append(cpu_seconds() - before)
            if turn:
                continue
            rows = answer.rows()
            right = rows if right is None else right
            equal = equal and same_rows(rows.rename_columns(right.column_names), right) is None
            notes[system] = list(answer.notes)
    return {
        "query": number,
        "wall": {system: round(statistics.median(values[1:]), 4) for system, values in wall.items()},
        "cpu": {system: round(statistics.median(values[1:]), 4) for system, values in cpu.items()},
        "equal": equal,
        "load": os.getloadavg()[0],
        "stages": {system: said for system, said in notes.items() if any(said)},
    }


if __name__ == "__main__":
    main()
