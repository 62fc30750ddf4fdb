"""How much longer ``ebbflow query`` takes on a warm cluster than a session of plain Spark with the same statement.

    python -m tests.benchmarks.query_start --pairs 9 --out docs/benchmarks

Two programs take turns on one local cluster whose workers run: ``ebbflow query`` over a table of 1,000 rows, and a
PySpark script that opens a session on the same master, with executors of the same size, and writes the result of the
same statement. Each is timed from the start of its process to its end; what one takes more than the other is
planning, the stage's checkpoint and the report. Three minutes.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
from ebbflow.infra.spark.java import find_java
from ebbflow.infra.spark.settings import executor_memory
from ebbflow.infra.storage.files import write_text

GOAL = 1.5  # s
MEMORY = 2  # GiB of a worker
SQL = "SELECT g, count(*) AS n, sum(v) AS s FROM t GROUP BY g ORDER BY g"
PLAIN = """
import sys
from pyspark.sql import SparkSession
master, heap, table, output, sql = sys.argv[1:]
session = SparkSession.builder.master(master).config("spark.executor.memory", heap).getOrCreate()
session.read.parquet(table).createOrReplaceTempView("t")
session.sql(sql).write.parquet(output)
session.stop()
"""
_PATIENCE = 300.0  # s for one program


def main() -> None:
    """Run and write ``query_start.json`` into ``--out``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    arguments = parser.parse_args()
    seconds: dict[str, list[float]] = {"ebbflow": [], "spark": []}
    with (
        tempfile.TemporaryDirectory(prefix="ebbflow-bench-") as scratch,
        LocalSparkCluster.start(
            f"start-{uuid.uuid4().hex[:6]}", workers=arguments.workers, memory=f"{MEMORY}g", cpu_limit=False
        ) as cluster,
    ):
        folder = Path(scratch)
        (folder / "tables").mkdir()
        rows = pa.table({"g": [i % 7 for i in range(1000)], "v": range(1000)})
        pq.write_table(rows, folder / "tables" / "t.parquet")
        for turn in range(arguments.pairs + 1):
            for system in ("ebbflow", "spark") if turn % 2 else ("spark", "ebbflow"):
                took = _timed(system, cluster, folder, turn)
                if turn:  # the first pair reads everything into memory
                    seconds[system].append(round(took, 3))
                print(f"{turn} {system} {took:.2f} s", flush=True)
    more = [ours - theirs for ours, theirs in zip(seconds["ebbflow"], seconds["spark"], strict=True)]
    result = {
        "benchmark": "query_start",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load": os.getloadavg()[0],
        "workers": arguments.workers,
        "pairs": arguments.pairs,
        "seconds": seconds,
        "more": {"median": round(statistics.median(more), 3), "worst": round(max(more), 3), "goal": GOAL},
    }
    write_text(arguments.out / "query_start.json", json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["more"]))


def _timed(system: str, cluster: LocalSparkCluster, folder: Path, turn: int) -> float:
    """Return the seconds that one process takes. Raises ``CalledProcessError``."""
    tables, output = folder / "tables", folder / f"{system}-{turn}"
    environment = dict(os.environ)
    if system == "ebbflow":
        command = [sys.executable, "-m", "ebbflow.flows.cli", "query", SQL, "--tables", str(tables)]
        command += ["--engine", "spark", "--master", cluster.master_url]
        command += ["--store", str(folder / "store"), "--no-reuse", "--output", f"{output}.parquet"]
    else:
        heap = executor_memory(MEMORY)
        command = [sys.executable, "-c", PLAIN, cluster.master_url, heap, str(tables), str(output), SQL]
        environment["JAVA_HOME"] = str(find_java().home)
        environment["PYSPARK_SUBMIT_ARGS"] = (
            f"--properties-file {shlex.quote(str(cluster.properties))} pyspark-shell"
        )
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=_PATIENCE, env=environment)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
