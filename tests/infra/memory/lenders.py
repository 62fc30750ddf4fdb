"""Daemons as processes, and a store behind that is one file."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

from ebbflow.infra.memory.lending import process
from ebbflow.infra.memory.peer import PeerAddress
from ebbflow.infra.memory.registry import DIRECTORY, MemoryRegistry
from ebbflow.planners.memory.slab_table import BlockRange

SLAB = 1 << 20


def until(reached: Callable[[], bool], seconds: float = 150.0) -> None:
    """Wait, bounded, until something holds."""
    end = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


class Lender:
    """A daemon's process; ``before`` begins its command line, ``options`` are those of ``process.arguments``."""

    def __init__(
        self, registry: MemoryRegistry, name: str, before: Sequence[str] = (), **options: Any
    ) -> None:
        values = {"slab_bytes": SLAB, "max_bytes": 16 * SLAB, "headroom": 0.0, "period": 0.1} | options
        self.name = name
        self._process = subprocess.Popen(
            [*before, *process.arguments(name, **values)],
            stdout=subprocess.PIPE,
            env={**os.environ, DIRECTORY: str(registry.folder)},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{name} has not begun"
        told = json.loads(line)
        self.address = PeerAddress(name, told["host"], told["port"], values["slab_bytes"])

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(150)

    def terminate(self, timeout: float = 60) -> int:
        """Ask it to end, as an interruption notice does; return its exit status."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout)

    def close(self) -> None:
        if not self.ended:
            self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


class FileBehind:
    """A store behind with a lane for each slab, in one file."""

    def __init__(self, path: Path, slab_bytes: int, block_bytes: int) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        self._slab, self._block = slab_bytes, block_bytes

    def lane(self, blocks: BlockRange) -> Hashable:
        return blocks.slab

    def write(self, blocks: BlockRange, data: bytes) -> None:
        os.pwrite(self._file, data, self._start(blocks))

    def read(self, blocks: BlockRange, offset: int, size: int) -> bytes:
        return os.pread(self._file, size, self._start(blocks) + offset)

    def close(self) -> None:
        os.close(self._file)

    def _start(self, blocks: BlockRange) -> int:
        return blocks.slab * self._slab + blocks.first * self._block
