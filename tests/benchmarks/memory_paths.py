"""What a client on the daemon's own machine would gain by shared memory instead of TCP.

``python -m tests.benchmarks.memory_paths`` starts a daemon and reads and writes blocks of several sizes over TCP.
Beside it stands what shared memory could do at best: a round trip without a payload, by which the daemon would say
that a slab is still the client's, and a copy of the block. Medians, in ms.
"""

import argparse
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ebbflow.infra.memory.hosting import ask
from ebbflow.infra.memory.peer import PeerLink
from ebbflow.infra.memory.protocol import Frame, Kind
from ebbflow.infra.memory.registry import MemoryRegistry
from tests.infra.memory.lenders import Lender

SLAB = 16 << 20
SIZES = (4 << 10, 256 << 10, 1 << 20, 4 << 20)


def median(work: Callable[[], object], times: int) -> float:
    """Return the median of the milliseconds that ``work`` takes."""
    found = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        found.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(found)


def row(link: PeerLink, lent: Frame, shared: mmap.mmap, size: int, times: int) -> str:
    """Return what was measured with blocks of ``size`` bytes."""
    data = bytes(size)

    def tcp(kind: Kind, count: int, payload: bytes = b"") -> float:
        frame = Frame(kind, slab=lent.slab, generation=1, size=count, payload=payload)
        return median(lambda: ask(link, frame), times)

    def put() -> None:
        shared[:size] = data

    read, write, trip = tcp(Kind.READ, size), tcp(Kind.WRITE, size, data), tcp(Kind.READ, 1)
    copy_out, copy_in = median(lambda: shared[:size], times), median(put, times)
    return (
        f"{size >> 10:5} KiB: TCP read {read:7.3f}, write {write:7.3f}; shared read {trip + copy_out:7.3f}, "
        f"write {trip + copy_in:7.3f}, of which the round trip {trip:.3f}"
    )


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=100)
    times = parser.parse_args().times
    with tempfile.TemporaryDirectory() as name:
        registry = MemoryRegistry(Path(name))
        token = registry.token(create=True)
        lender = Lender(registry, "node-1", slab_bytes=SLAB, max_bytes=4 * SLAB)
        link = PeerLink(lender.address, token, "benchmark", lambda peer, frame: None, lambda peer: None)
        shared = mmap.mmap(-1, SLAB)
        shared[:] = bytes(SLAB)
        try:
            while not (lent := ask(link, Frame(Kind.MAP, generation=1))) or not lent.size:
                time.sleep(0.1)

            for size in SIZES:
                print(row(link, lent, shared, size, times), flush=True)
        finally:
            link.close()
            lender.close()
            shared.close()


if __name__ == "__main__":
    main()
