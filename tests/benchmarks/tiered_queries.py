"""TPC-H with stages on nodes' memory, on the store alone and uncut, undisturbed and with a kill half-way.

``python -m tests.benchmarks.tiered_queries --tables DIR`` starts emulated S3 behind a proxy that waits 20 ms for
each request and passes 50 MB/s, and two daemons. Each query runs, in a process of its own on DuckDB, uncut, with
stages where the planner puts them on the store, and the same with nodes' memory before it; then again, killed at
half of the time that this way took undisturbed, and taken up. Goals: on the tier never slower than on the store,
within 5 % of uncut where undisturbed, at most 0.8 of uncut after a kill where stages take more than 30 s. Seconds
hold start-up: ``--queries 6`` of small tables measures little else. ``--cores 0.25`` (as root) holds a query to a
part of a core by a control group: stages take long without tables of that size. ``--interruption-rate 60`` states one
loss a minute, so that long stages are cut or divided where what a kill costs makes that worth it. Each run knows how
fast stages of those before it ran, and has the statistics of tables, as on a store that was used before, and reuses
no stage of theirs; the first of each query is not told.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.machine import cgroups
from ebbflow.infra.memory.registry import DIRECTORY, MemoryRegistry
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.storage.files import write_text
from ebbflow.tasks.query.planning import read_history, remember
from ebbflow.tasks.query.request import QueryRequest
from tests.benchmarks.slow_s3 import slow_s3
from tests.infra.memory.lenders import Lender
from tests.query_process import finished, process

WAYS = ("uncut", "store", "memory")
_TIMEOUT = 600.0  # s
_BUCKET = "tiered"


def main() -> None:
    """Run, print a row for each query, and write ``tiered-queries.json`` into ``--out`` where that is given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", required=True, help="folder of TPC-H tables (ebbflow demo makes one)")
    parser.add_argument("--queries", default="3,5,9,18")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cut", choices=("cost", "every-join"), default="cost")
    parser.add_argument("--cores", type=float, default=0.0, help="of a query's process (default: all)")
    parser.add_argument("--interruption-rate", type=float, help="losses per node-hour that plans expect")
    parser.add_argument("--out", type=Path, help="folder for a file of the results")
    options = parser.parse_args()
    controller = cgroups.find_controller() if options.cores else None
    if options.cores and controller is None:
        parser.error("--cores needs a control group, which root can make")
    group = cgroups.create(controller, f"tiered-{os.getpid()}", options.cores) if controller else None
    options.group, options.learned, options.known = group, [], {}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # programs that are installed are compiled
    lenders: list[Lender] = []
    try:
        with slow_s3(_BUCKET), tempfile.TemporaryDirectory() as folder:
            os.environ[DIRECTORY] = str(Path(folder) / "memory")
            lenders += [
                Lender(MemoryRegistry(), f"node-{n}", slab_bytes=16 << 20, max_bytes=512 << 20)
                for n in (1, 2)
            ]
            rows = [_query(options, int(number)) for number in options.queries.split(",")]
    finally:
        for lender in lenders:
            lender.close()
        if group is not None:
            cgroups.remove(group, SystemClock())
    if options.out:
        result = {
            "benchmark": "tiered-queries",
            "tables": Path(options.tables).name,
            "cut": options.cut,
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "load": os.getloadavg()[0],
            "rounds": options.rounds,
            "cores of a query": options.cores or os.cpu_count(),
            "losses expected per node-hour": options.interruption_rate or 0.0,
            "queries": rows,
        }
        write_text(options.out / "tiered-queries.json", json.dumps(result, indent=1) + "\n")


def _query(options: argparse.Namespace, number: int) -> dict[str, Any]:
    plain: dict[str, list[float]] = {way: [] for way in WAYS}
    killed: dict[str, list[float]] = {way: [] for way in WAYS}
    told: dict[str, Any] = {}  # of the last round: what became of stages
    _learn(options, _request(options, number, "memory", f"{_BUCKET}/q{number}-first"))
    for turn in range(options.rounds):
        for way in WAYS:
            store = f"{_BUCKET}/q{number}-{turn}-{way}-{time.time_ns()}"
            took, whole = _learn(options, _request(options, number, way, f"{store}-whole"))
            plain[way].append(took)
            seconds, again = _killed(options, _request(options, number, way, f"{store}-killed"), took / 2)
            killed[way].append(seconds)
            told[way] = {"undisturbed": whole, "run again": again}
    row: dict[str, Any] = {"query": number, "stages": told}
    for name, found in (("undisturbed", plain), ("killed", killed)):
        medians = {way: statistics.median(seconds) for way, seconds in found.items()}
        row[name] = {way: round(seconds, 3) for way, seconds in medians.items()}
        row[f"{name} over uncut"] = {way: round(medians[way] / medians["uncut"], 3) for way in WAYS}
    print(json.dumps(row), flush=True)
    return row


def _request(options: argparse.Namespace, number: int, way: str, store: str) -> QueryRequest:
    request = QueryRequest(
        (files("ebbflow.flows") / "tpch" / f"q{number}.sql").read_text(),
        tables=options.tables,
        engine="duckdb",
        materialize="none" if way == "uncut" else options.cut,
        store=f"{'memory+' if way == 'memory' else ''}s3://{store}",
        durable="behind" if way == "memory" else "before-commit",
        interruption_rate=options.interruption_rate,
    )
    remember(ParquetCheckpointStore(request.store_place), request, options.learned)
    for name, content in options.known.items():
        request.store_place.behind.write(name, content)
    return request


def _started(options: argparse.Namespace, request: QueryRequest) -> "subprocess.Popen[str]":
    child = process(request)
    if options.group is not None:
        cgroups.join(options.group, [child.pid])
    return child


def _learn(options: argparse.Namespace, request: QueryRequest) -> tuple[float, list[str]]:
    """Return as ``_run`` of a query that tells those after it how fast its stages were, and of its tables."""
    took, place = _run(options, request), request.store_place.behind
    options.learned = read_history(ParquetCheckpointStore(request.store_place), request)
    for info in place.entries("cache/statistics"):
        name = f"cache/statistics/{info.base_name}"
        options.known[name] = place.read(name)
    return took


def _run(options: argparse.Namespace, request: QueryRequest) -> tuple[float, list[str]]:
    """Return the seconds of a query, and what is told of its stages."""
    begun = time.monotonic()
    told = finished(_started(options, request))["told"]
    return time.monotonic() - begun, told


def _killed(options: argparse.Namespace, request: QueryRequest, after: float) -> tuple[float, list[str]]:
    """Return as ``_run`` of a query that is killed ``after`` seconds and run again; the seconds are of both."""
    begun = time.monotonic()
    child = _started(options, request)
    try:
        child.wait(after)
    except subprocess.TimeoutExpired:
        child.kill()
    child.communicate(timeout=_TIMEOUT)
    seconds = time.monotonic() - begun
    took, told = _run(options, request)
    return seconds + took, told


if __name__ == "__main__":
    main()
