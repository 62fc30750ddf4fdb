"""Throughput of the WebHDFS gateway: nodes' memory before a slow store, that store alone, and a local directory.

``python -m tests.benchmarks.memory_gateway`` starts emulated S3 behind a proxy that waits 20 ms for each request and
passes 50 MB/s, two daemons, and one gateway after the other. One client, then four, each in a process of its own,
write files of 64 MiB and read them, then write files of 64 KiB and read pieces of that size at random places for as
long as ``--seconds`` says. Told are MB/s and requests/s of all clients together; what is read is compared.
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from ebbflow.infra.memory.registry import DIRECTORY, MemoryRegistry
from ebbflow.infra.storage.files import write_text
from tests.benchmarks.slow_s3 import slow_s3
from tests.infra.memory.gateway_client import Client
from tests.infra.memory.lenders import Lender

WAYS = ("memory", "store", "disk")
CLIENTS = (1, 4)
FILE, PIECE = 64 << 20, 64 << 10  # bytes
_BUCKET = "gateway"
_TIMEOUT = 300.0  # s
_SERVED = re.compile(r"webhdfs://127\.0\.0\.1:(\d+)/")


@cache
def content() -> bytes:
    """Return what each file of ``FILE`` bytes holds."""
    return random.Random(0).randbytes(FILE)


def write_file(port: int, key: str, name: str, seconds: float) -> int:
    """Write a large file."""
    found = Client(port, key).create(f"/{name}", content())
    assert found.status == 201, found
    return 1


def read_file(port: int, key: str, name: str, seconds: float) -> int:
    """Read it."""
    assert Client(port, key).read(f"/{name}") == content()
    return 1


def write_pieces(port: int, key: str, name: str, seconds: float) -> int:
    """Write small files for a while, and return how many."""
    client, end, done = Client(port, key), time.monotonic() + seconds, 0
    while time.monotonic() < end:
        found = client.create(f"/{name}-small/{done}", content()[:PIECE])
        assert found.status == 201, found
        done += 1
    return done


def read_pieces(port: int, key: str, name: str, seconds: float) -> int:
    """Read pieces of the large file for a while, and return how many."""
    client, end, done, rng = Client(port, key), time.monotonic() + seconds, 0, random.Random(name)
    while time.monotonic() < end:
        offset = rng.randrange(FILE - PIECE)
        assert client.read(f"/{name}", offset=offset, length=PIECE) == content()[offset : offset + PIECE]
        done += 1
    return done


Work = Callable[[int, str, str, float], int]
PHASES: dict[str, tuple[Work, int]] = {
    "write MB/s": (write_file, FILE),
    "read MB/s": (read_file, FILE),
    "small writes/s": (write_pieces, 0),
    "small reads/s": (read_pieces, 0),
}


@contextmanager
def served(store: str) -> Iterator[int]:
    """Serve a store by a gateway in a process of its own; give its port."""
    command = [str(Path(sys.executable).with_name("ebbflow")), "memory", "gateway"]
    child = subprocess.Popen(
        [*command, "--store", store, "--memory-tier", "always"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stderr is not None
        found = next(port for line in child.stderr if (port := _SERVED.search(line)))
        yield int(found[1])
    finally:
        child.terminate()
        child.communicate(timeout=_TIMEOUT)


def measured(pool: Executor, port: int, key: str, clients: int, seconds: float) -> dict[str, float]:
    """Return what so many clients reach together, by phase."""
    found = {}
    for phase, (work, size) in PHASES.items():
        begun = time.monotonic()
        names = [f"{clients}-{number}" for number in range(clients)]
        asked = [pool.submit(work, port, key, name, seconds) for name in names]
        done = sum(one.result(_TIMEOUT) for one in asked)
        rate = done / (time.monotonic() - begun)
        found[phase] = round(rate * size / 1e6 if size else rate, 1)
    return found


def main() -> None:
    """Measure, print a row for each way and number of clients, and write ``memory-gateway.json`` into ``--out``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", default=",".join(WAYS), help="what is served")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each phase of small requests")
    parser.add_argument("--out", type=Path, help="folder for a file of the results")
    options = parser.parse_args()
    rows, lenders = [], list[Lender]()
    spawn = multiprocessing.get_context("spawn")
    try:
        with (
            slow_s3(_BUCKET),
            tempfile.TemporaryDirectory() as folder,
            ProcessPoolExecutor(max(CLIENTS), spawn, content) as pool,
        ):
            os.environ[DIRECTORY] = str(Path(folder) / "memory")
            lenders += [
                Lender(MemoryRegistry(), f"node-{n}", slab_bytes=16 << 20, max_bytes=512 << 20)
                for n in (1, 2)
            ]
            key = MemoryRegistry().gateway_key()
            list(pool.map(time.sleep, [1.0] * max(CLIENTS)))  # all are there
            stores = dict(
                zip(
                    WAYS,
                    (f"memory+s3://{_BUCKET}/memory", f"s3://{_BUCKET}/store", f"{folder}/disk"),
                    strict=True,
                )
            )
            for way in options.ways.split(","):
                with served(stores[way]) as port:
                    for clients in CLIENTS:
                        row = {"way": way, "clients": clients}
                        rows.append(row | measured(pool, port, key, clients, options.seconds))
                        print(json.dumps(rows[-1]), flush=True)
    finally:
        for lender in lenders:
            lender.close()
    if options.out:
        result = {
            "benchmark": "memory-gateway",
            "machine": f"{os.cpu_count()} cores, {platform.machine()}",
            "load": os.getloadavg()[0],
            "rows": rows,
        }
        write_text(options.out / "memory-gateway.json", json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
