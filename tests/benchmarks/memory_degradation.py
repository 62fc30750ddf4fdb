"""Reads of a working set of which a part is resident: the rest from a slow store, one remote server, nodes' memory.

``python -m tests.benchmarks.memory_degradation`` reads blocks by a Zipf law and by scans, with 100, 75 and 50 % of
them in a cache of the reading process (least recently used goes first). What is not there comes from the store alone
(20 ms to the first byte, 50 MB/s), from one daemon with room for everything and no second copy elsewhere ("static"),
or from six daemons with the store behind ("nodes"). Told is the throughput in blocks/s, and that of the last two
over the store's. Goals: at 50 % at least 4 times the store's throughput, never under 0.95 of it. With ``--disk`` the
store is the local disk, where runs switch the tier off; what they measure to decide so is told.
"""

import argparse
import json
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ebbflow.infra.memory.blocks import BlockSettings
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.memory.session import MemorySession
from ebbflow.infra.storage.files import write_text
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.memory.slab_table import BlockRange
from ebbflow.planners.memory.tiers import peer_tier_enabled
from ebbflow.tasks.memory.measuring import measure_store
from tests.benchmarks.slow_store import BANDWIDTH, FIRST_BYTE
from tests.infra.memory.lenders import FileBehind, Lender

BLOCK, SLAB = 256 << 10, 4 << 20
SKEW = 0.99  # of the Zipf law, as YCSB has it


class Store(FileBehind):
    """A store behind that takes its time, if it is slow."""

    def __init__(self, path: Path, slow: bool) -> None:
        super().__init__(path, SLAB, BLOCK)
        self.slow = False  # while it is filled
        self.will_be = slow

    def read(self, blocks: BlockRange, offset: int, size: int) -> bytes:
        """Return bytes, slowly."""
        if self.slow:
            time.sleep(FIRST_BYTE + size / BANDWIDTH)
        return super().read(blocks, offset, size)


class Resident:
    """A cache of blocks of which the least recently used goes first."""

    def __init__(self, count: int, fetch: Callable[[int], bytes]) -> None:
        self._count, self._fetch = count, fetch
        self._kept: OrderedDict[int, bytes] = OrderedDict()

    def read(self, number: int) -> bytes:
        """Return a block."""
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        data = self._kept[number] = self._fetch(number)
        if len(self._kept) > self._count:
            self._kept.popitem(last=False)
        return data


def load(name: str, blocks: int, reads: int) -> NDArray[np.int64]:
    """Return the numbers of the blocks that are read, one after the other."""
    if name == "scan":
        return np.arange(reads) % blocks
    rng = np.random.default_rng(0)
    weights = 1.0 / np.arange(1, blocks + 1) ** SKEW
    return np.asarray(rng.permutation(blocks)[rng.choice(blocks, reads, p=weights / weights.sum())])


@contextmanager
def session(folder: Path, daemons: int, store: Store, blocks: int) -> Iterator[MemorySession]:
    """Give a session on so many daemons, with all blocks written and stored."""
    registry = MemoryRegistry(folder)
    registry.token(create=True)
    slabs = -(-blocks * BLOCK // SLAB)
    room = (slabs if daemons == 1 else -(-slabs // daemons) + 2) * SLAB
    lenders = [
        Lender(registry, f"node-{n}", slab_bytes=SLAB, max_bytes=max(room, SLAB), period=0.2)
        for n in range(daemons)
    ]
    made = MemorySession(registry, store, BlockSettings(slabs, SLAB, BLOCK, request_blocks=4), period=0.5)
    try:
        for slab in range(slabs):
            end = time.monotonic() + 30
            while not made.blocks.slabs.map(slab) and time.monotonic() < end:
                time.sleep(0.2)
        for number in range(blocks):
            made.blocks.write(number * BLOCK, number.to_bytes(4, "little") * (BLOCK // 4))
        for slab in range(slabs):
            made.blocks.flush(slab)
        store.slow = store.will_be
        yield made
    finally:
        store.slow = False
        made.close()
        for lender in lenders:
            lender.close()


def measured(fetch: Callable[[int], bytes], numbers: NDArray[np.int64], resident: int) -> float:
    """Return blocks/s; each block is compared by its first bytes."""
    cache = Resident(resident, fetch)
    begun = time.monotonic()
    for number in numbers.tolist():
        if cache.read(number)[:4] != number.to_bytes(4, "little"):
            raise SystemExit(f"block {number} is not what was written")
    return len(numbers) / (time.monotonic() - begun)


def main() -> None:
    """Measure as the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=512, help="of 256 KiB")
    parser.add_argument("--reads", type=int, default=2000)
    parser.add_argument("--disk", action="store_true", help="the store is the local disk, as it is")
    parser.add_argument("--out", type=Path, help="folder for a file of the results")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = Store(folder / "store", not options.disk)
        slabs_of = SLAB // BLOCK

        def from_store(number: int) -> bytes:
            slab, first = divmod(number, slabs_of)
            return store.read(BlockRange(slab, first, 1), 0, BLOCK)

        for way, daemons in (("static", 1), ("nodes", 6)):
            with session(folder / way, daemons, store, options.blocks) as made:
                if options.disk and (peer := made.measure(1 << 20)) is not None:
                    decision = peer_tier_enabled(peer, measure_store(StorageLocation(folder)), 1 << 20)
                    print(f"memory tier {'on' if decision.enabled else 'off'}: {decision.reason}")

                def from_nodes(number: int, made: MemorySession = made) -> bytes:
                    return made.blocks.read(number * BLOCK, BLOCK)

                for pattern in ("zipf", "scan"):
                    numbers = load(pattern, options.blocks, options.reads)
                    for share in (1.0, 0.75, 0.5):
                        resident = int(share * options.blocks)
                        alone = measured(from_store, numbers, resident)
                        there = measured(from_nodes, numbers, resident)
                        rows.append(
                            {
                                "way": way, "load": pattern, "resident": share,
                                "store": round(alone, 1), "memory": round(there, 1), "ratio": round(there / alone, 2),
                            }
                        )  # fmt: skip
                        print(json.dumps(rows[-1]), flush=True)
        store.close()
    if options.out:
        write_text(options.out / "memory-degradation.json", json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
