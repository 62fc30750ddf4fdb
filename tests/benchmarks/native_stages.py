"""What stages of DuckDB's in Spark's tasks cost beside Spark SQL: CPU seconds of the whole process tree.

    python -m tests.benchmarks.native_stages --tables ~/.cache/ebbflow/tpch/sf1 --out docs/benchmarks

Systems take turns within each query: plain Spark as its user would tune it (8 shuffle partitions, broadcasts up to
64 MB, adaptive), our plans on Spark SQL, the same with native stages, and embedded DuckDB. All of them run in one
process and, but for DuckDB, one JVM with two cores; each writes its result as Parquet. A round that warms up comes
first, in which the tables' statistics are collected too: 1.3 s for those of Q9, once for each version of a table.
Answers of native stages are compared with those of plain Spark. Twenty minutes for all 22 at scale factor 1.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq

from ebbflow.infra.storage.files import write_text
from ebbflow.tasks.query.opening import OpenedEngine, opened_engine
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import QueryOutcome, execute
from tests.benchmarks.sql.rig import TUNED_SETTINGS

SYSTEMS = ("tuned", "spark", "native", "duckdb")


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
    """Run and write ``native-stages.json`` into ``--out``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", required=True, help="folder of TPC-H tables (ebbflow data makes one)")
    parser.add_argument("--queries", default="1,3,5,6,9,13,18,21")
    parser.add_argument("--rounds", type=int, default=3, help="how many times each pair is measured")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="ebbflow-bench-") as folder,
        opened_engine(QueryRequest("SELECT 1", tables=arguments.tables, engine="spark")) as spark,
        opened_engine(QueryRequest("SELECT 1", tables=arguments.tables, engine="duckdb")) as duckdb,
    ):
        runs = _systems(arguments.tables, Path(folder), spark, duckdb)
        for number in map(int, arguments.queries.split(",")):
            rows.append(_query(number, runs, arguments.rounds, Path(folder)))
            print(json.dumps(rows[-1]), flush=True)
    ratios = {
        system: {
            other: round(statistics.geometric_mean(r["cpu"][system] / r["cpu"][other] for r in rows), 3)
            for other in SYSTEMS
        }
        for system in SYSTEMS
    }
    result = {
        "benchmark": "native_stages",
        "tables": Path(arguments.tables).name,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load": os.getloadavg()[0],
        "rounds": arguments.rounds,
        "geometric_mean_cpu_ratio": ratios,
        "queries": rows,
    }
    write_text(arguments.out / "native-stages.json", json.dumps(result, indent=1) + "\n")
    print(json.dumps(ratios, indent=1))
    raise SystemExit(not all(row["equal"] for row in rows))


Run = Callable[[int], QueryOutcome | None]


def _systems(tables: str, folder: Path, spark: OpenedEngine, duckdb: OpenedEngine) -> Mapping[str, Run]:
    from pyspark.sql import SparkSession

    session = SparkSession.builder.getOrCreate().newSession()
    for key, value in TUNED_SETTINGS.items():
        session.conf.set(key, value)
    for path in Path(tables).glob("*.parquet"):
        session.read.parquet(str(path)).createOrReplaceTempView(path.stem)

    def tuned(number: int) -> None:
        session.sql(_sql(number)).write.mode("overwrite").parquet(str(folder / "tuned"))

    def ours(opened: OpenedEngine, **options: Any) -> Run:
        def run(number: int) -> QueryOutcome:
            # results are not reused; statistics of the tables are, as they are collected once for each version
            store = folder / "store"
            request = QueryRequest(_sql(number), tables=tables, store=str(store), reuse=False, **options)
            return execute(request, opened=opened)

        return run

    return {
        "tuned": tuned,
        "spark": ours(spark),
        "native": ours(spark, stages="native"),
        "duckdb": ours(duckdb, engine="duckdb"),
    }


def _sql(number: int) -> str:
    return files("ebbflow.flows").joinpath("tpch", f"q{number}.sql").read_text()


def _query(number: int, runs: Mapping[str, Run], rounds: int, folder: Path) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    notes: list[str] = []
    equal = True
    for turn in range(rounds + 1):
        for system in SYSTEMS:
            before = cpu_seconds()
            outcome = runs[system](number)
            if turn:
                seconds[system].append(cpu_seconds() - before)
            if system == "native" and outcome is not None:
                notes = [stage.note for stage in outcome.report.stages]
                equal = equal and _rows(outcome.to_arrow()) == _rows(pq.read_table(folder / "tuned"))
    cpu = {system: round(statistics.median(values), 3) for system, values in seconds.items()}
    return {"query": number, "cpu": cpu, "equal": equal, "stages": notes}


def _rows(table: Any) -> list[str]:
    return sorted(repr(row) for row in table.to_pylist())


if __name__ == "__main__":
    main()
