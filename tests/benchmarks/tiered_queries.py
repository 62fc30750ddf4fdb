"""TPC-H with stages on nodes' memory, on the store alone and uncut, undisturbed and with a kill half-way.

``python -m tests.benchmarks.tiered_queries --tables DIR`` starts emulated S3 behind a proxy that waits 20 ms for
each request and passes 50 MB/s, and two daemons. Each query runs, in a process of its own on DuckDB, uncut, with
stages where the planner puts them on the store, and the same with nodes' memory before it; then again, killed at
half of the time that this way took undisturbed, and taken up. Goals: on the tier never slower than on the store,
within 5 % of uncut where undisturbed, at most 0.8 of uncut after a kill where stages take more than 30 s. Seconds
hold start-up: ``--queries 6`` of small tables measures little else. ``--cores 0.25`` (as root) holds a query to a
part of a core by a control group: stages take long without tables of that size.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.machine import cgroups
from ebbflow.infra.memory.registry import DIRECTORY, MemoryRegistry
from ebbflow.infra.storage.files import write_text
from ebbflow.tasks.query.request import QueryRequest
from tests.benchmarks.slow_proxy import SlowProxy
from tests.infra.memory.lenders import Lender, until
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
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    controller = cgroups.find_controller() if options.cores else None
    if options.cores and controller is None:
        parser.error("--cores needs a control group, which root can make")
    group = cgroups.create(controller, f"tiered-{os.getpid()}", options.cores) if controller else None
    options.group = group
    port = _free_port()
    emulator = subprocess.Popen([sys.executable, "-m", "tests.aws.server", "--port", str(port)])
    lenders: list[Lender] = []
    try:
        until(lambda: _answers(port), 120)
        httpx.put(f"http://127.0.0.1:{port}/{_BUCKET}", timeout=20).raise_for_status()
        with SlowProxy("127.0.0.1", port) as proxy, tempfile.TemporaryDirectory() as folder:
            registry = MemoryRegistry(Path(folder) / "memory")
            lenders += [
                Lender(registry, f"node-{n}", slab_bytes=16 << 20, max_bytes=512 << 20) for n in (1, 2)
            ]
            environment = {
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
                "AWS_REGION": "us-east-1",
                "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": "testing",
                "AWS_EC2_METADATA_DISABLED": "true",
                DIRECTORY: str(registry.folder),
            }
            os.environ.update(environment)
            rows = [_query(options, int(number)) for number in options.queries.split(",")]
    finally:
        for lender in lenders:
            lender.close()
        emulator.kill()
        emulator.wait(60)
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
            "queries": rows,
        }
        write_text(options.out / "tiered-queries.json", json.dumps(result, indent=1) + "\n")


def _query(options: argparse.Namespace, number: int) -> dict[str, Any]:
    plain: dict[str, list[float]] = {way: [] for way in WAYS}
    killed: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(options.rounds):
        for way in WAYS:
            store = f"{_BUCKET}/q{number}-{turn}-{way}-{time.time_ns()}"
            took = _run(options, _request(options, number, way, f"{store}-whole"))
            plain[way].append(took)
            again = _request(options, number, way, f"{store}-killed")
            killed[way].append(_killed(options, again, took / 2))
    row: dict[str, Any] = {"query": number}
    for name, found in (("undisturbed", plain), ("killed", killed)):
        medians = {way: statistics.median(seconds) for way, seconds in found.items()}
        row[name] = {way: round(seconds, 3) for way, seconds in medians.items()}
        row[f"{name} over uncut"] = {way: round(medians[way] / medians["uncut"], 3) for way in WAYS}
    print(json.dumps(row), flush=True)
    return row


def _request(options: argparse.Namespace, number: int, way: str, store: str) -> QueryRequest:
    return QueryRequest(
        (files("ebbflow.flows") / "tpch" / f"q{number}.sql").read_text(),
        tables=options.tables,
        engine="duckdb",
        materialize="none" if way == "uncut" else options.cut,
        store=f"{'memory+' if way == 'memory' else ''}s3://{store}",
        durable="behind" if way == "memory" else "before-commit",
    )


def _started(options: argparse.Namespace, request: QueryRequest) -> "subprocess.Popen[str]":
    child = process(request)
    if options.group is not None:
        cgroups.join(options.group, [child.pid])
    return child


def _run(options: argparse.Namespace, request: QueryRequest) -> float:
    begun = time.monotonic()
    finished(_started(options, request))
    return time.monotonic() - begun


def _killed(options: argparse.Namespace, request: QueryRequest, after: float) -> float:
    """Return the seconds of a query that is killed ``after`` seconds and run again."""
    begun = time.monotonic()
    child = _started(options, request)
    try:
        child.wait(after)
    except subprocess.TimeoutExpired:
        child.kill()
    child.communicate(timeout=_TIMEOUT)
    return time.monotonic() - begun + _run(options, request)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
