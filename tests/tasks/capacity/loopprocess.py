"""A loop in a process of its own that kills itself at a named point, once a file says so."""

import json
import os
import signal
import threading
from pathlib import Path

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.model.capacity import Capacity
from ebbflow.tasks.capacity.loop import CapacityLoop
from tests.tasks.capacity.loopcases import BRIEF, node, settings

POINTS = ("observed", "capacity written", "decided", "written", "scaled", "evicted", "ended")


class FileSource:
    """Sees the nodes that a file names: a list of (name, GPUs)."""

    def __init__(self, path: Path) -> None:
        self._path, self._clock = path, SystemClock()
        self._revision, self._last = 0, None

    def capacity(self) -> Capacity:
        there = json.loads(self._path.read_text())
        if there != self._last:
            self._revision, self._last = self._revision + 1, there
        found = tuple(node(name, gpus) for name, gpus in sorted(there))
        return Capacity(self._revision, found, (), self._clock.now())


def write(path: Path, content: object) -> None:
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(content))
    os.replace(scratch, path)


def run(folder: str, deadly: str) -> None:
    """Lead until SIGKILL comes from within: at the point ``deadly``, from when the file ``armed`` is there."""
    here = Path(folder)

    def point(name: str) -> None:
        if name == deadly and (here / "armed").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    with Ledger.open(str(here / "ledger.db")) as ledger:
        CapacityLoop(ledger, None, FileSource(here / "nodes.json"), settings(), pace=BRIEF, point=point).run(
            threading.Event()
        )
