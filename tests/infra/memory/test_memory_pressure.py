"""A process that needs memory in the daemon's own memory group: the daemon gives way before anything is killed."""

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ebbflow.infra.memory.blocks import BlockSettings
from ebbflow.infra.memory.lending.counters import read
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.memory.session import MemorySession
from tests.infra.memory.lenders import FileBehind, Lender, until

MIB = 1 << 20
LIMIT, HUNGER = 512 * MIB, 288 * MIB  # of the group, and what the other process takes of it
SLAB, BLOCK = 16 * MIB, 256 << 10
RUNS = 3
GROUPS = Path("/sys/fs/cgroup/memory")  # version 1; of version 2 a process cannot be next to a limited child

# 96 MiB/s, one and a half times the headroom in each period; what its work takes is measured, not the pauses between
_HUNGRY = """
import json, sys, time
held, began, spent = [], time.perf_counter(), 0.0
for step in range(int(sys.argv[1]) // (4 << 20)):
    before = time.process_time()
    held.append(bytearray(4 << 20))
    for start in range(0, 4 << 20, 4096):
        held[-1][start] = 1
    total = sum(map(sum, (held[-1][:1 << 18],) * 4))
    spent += time.process_time() - before
    time.sleep(max(0.0, began + (step + 1) / 24 - time.perf_counter()))
print(json.dumps({"cpu": spent, "bytes": sum(map(len, held))}))
"""


def _own() -> Path | None:
    """Return this process' memory group, if others can be made below it."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            folder = GROUPS / path.lstrip("/")
            if "memory" in controllers.split(",") and os.access(folder, os.W_OK) and os.geteuid() == 0:
                return folder
    return None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(_own() is None, reason="needs root and a memory group, version 1"),
]


@pytest.fixture(name="group")
def _group() -> Iterator[Path]:
    own = _own()
    assert own is not None
    folder = own / f"ebbflow-test-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(str(LIMIT))
    yield folder
    until(lambda: not (folder / "cgroup.procs").read_text())
    folder.rmdir()


def _into(group: Path) -> list[str]:
    """Return what begins a command line so that it runs in a group."""
    return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$0" "$@"']


def _hungry(group: Path) -> float:
    """Run the other process to its end; return the CPU seconds of its work."""
    command = [*_into(group), sys.executable, "-c", _HUNGRY, str(HUNGER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr}"
    told = json.loads(done.stdout)
    assert told["bytes"] == HUNGER
    return float(told["cpu"])


def _killed(group: Path) -> int:
    fields = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
    return int(fields["oom_kill"])


def test_the_daemon_gives_way_to_its_groups_own_work(group: Path, tmp_path: Path) -> None:
    registry = MemoryRegistry(tmp_path / "memory")
    registry.token(create=True)
    alone, beside = list[float](), list[float]()
    for run in range(RUNS):
        alone.append(_hungry(group))
        lender = Lender(
            registry, "a", _into(group), slab_bytes=SLAB, max_bytes=LIMIT, headroom=0.125, period=1.0
        )
        behind = FileBehind(tmp_path / f"behind-{run}", SLAB, BLOCK)
        session = MemorySession(registry, behind, BlockSettings(32, SLAB, BLOCK, hot=1e9), period=60.0)
        store = session.blocks
        try:
            slabs = [slab for slab in range(32) if store.slabs.map(slab)]
            assert len(slabs) * SLAB > LIMIT - HUNGER, "there is not enough for both"
            for slab in slabs:
                store.write(slab * SLAB, bytes([slab + 1]) * SLAB)
                store.flush(slab)
            assert store.metrics.remote_writes
            beside.append(_hungry(group))
            assert not lender.ended
            assert store.metrics.evictions > 0
            assert all(store.read(slab * SLAB + slab, 1) == bytes([slab + 1]) for slab in slabs)
        finally:
            session.close()
            behind.close()
            lender.close()
    assert not _killed(group)
    slower = min(beside) / min(alone) - 1
    print(f"CPU seconds alone {alone}, beside the daemon {beside}: {slower:+.1%}")
    assert slower < 0.05
    assert read().total > LIMIT, "this process is in another group"
