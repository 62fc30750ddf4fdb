"""Where the workers of a job run: processes of this machine, or whatever else starts them."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from zmq.sugar.context import Context

from ebbflow.infra.clock import Clock
from ebbflow.infra.elastic.wire.heartbeats import LivenessTracker, Monitor
from ebbflow.infra.elastic.wire.messages import MASTER
from ebbflow.infra.elastic.wire.transport import Transport
from ebbflow.infra.elastic.wire.zeromq import ZmqTransport
from ebbflow.infra.machine import processes

_ENDING = 5.0  # seconds that a killed process gets to be gone


class WorkerPool(Protocol):
    """Workers by name, which are never used again. Called in the master's thread: nothing here waits."""

    transport: Transport  # the master's end
    liveness: LivenessTracker
    shared: bool  # whether workers can read and write in the job's directory
    joining: float  # seconds that a worker gets to join
    failed_starts: int  # in a row, of workers that end before they join, after which a job without any fails

    def changes(self, members: Sequence[str], target: int) -> tuple[int, tuple[str, ...]]:
        """Return how many workers to start, and which of ``members`` (oldest first) are to leave.

        ``target`` is what the job was asked for; a pool whose workers depend on something else may ignore it.
        """
        ...

    def start(self, name: str) -> None:
        """Start a worker, soon."""
        ...

    def ended(self, name: str) -> str:
        """Return how a worker ended, such as ``ended with status 1``; empty while it lives or starts."""
        ...

    def end(self, name: str) -> None:
        """End a worker at once, unless it has ended; it holds nothing of value. It is not asked about again."""
        ...

    def pids(self) -> dict[str, int]:
        """Return the process ids of live workers, by name, as far as they are processes of this machine."""
        ...

    def log(self, name: str) -> str:
        """Return the last lines of what a worker has written."""
        ...

    def close(self) -> None:
        """Close all connections and end all processes. May be called twice."""
        ...


class LocalWorkers:
    """Processes of this machine, as many as the job asks for; see ``WorkerPool``.

    Args:
        sockets: directory for sockets, which only this user may enter.
        folder: directory of the job, for logs.
        mark: by which the processes are known.
        application: ``MODULE:CLASS`` of the application.
        silence: seconds without a heartbeat after which a worker counts as dead.
    """

    shared = True
    joining = 60.0
    failed_starts = 3

    def __init__(
        self, sockets: str, folder: Path, mark: str, application: str, silence: float, clock: Clock
    ) -> None:
        self._sockets, self._folder, self._mark = sockets, folder, mark
        self._application, self._silence = application, silence
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._context = Context()
        self.liveness: LivenessTracker = Monitor(sockets, self._context, clock, silence)
        self.transport: Transport = ZmqTransport(sockets, MASTER, self._context)

    def changes(self, members: Sequence[str], target: int) -> tuple[int, tuple[str, ...]]:
        """See ``WorkerPool``; the newest leave."""
        return max(0, target - len(members)), tuple(members[target:])

    def start(self, name: str) -> None:
        """See ``WorkerPool``."""
        module = "ebbflow.infra.elastic.worker.node"
        command = [sys.executable, "-P", "-m", module]
        command += [self._sockets, name, str(self._silence), self._application]
        environment = {
            **processes.inherited(),
            **dict.fromkeys(processes.ONE_THREAD, "1"),
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        self._processes[name] = processes.spawn(
            command, environment, f"{self._mark}/{name}", self._file(name)
        )

    def ended(self, name: str) -> str:
        """See ``WorkerPool``."""
        status = self._processes[name].poll()
        return "" if status is None else f"ended with status {status}"

    def end(self, name: str) -> None:
        """See ``WorkerPool``; a process may be stopped or hung."""
        process = self._processes.pop(name, None)
        if process is not None and process.poll() is None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_ENDING)

    def pids(self) -> dict[str, int]:
        """See ``WorkerPool``."""
        return {name: p.pid for name, p in list(self._processes.items()) if p.poll() is None}

    def log(self, name: str) -> str:
        """See ``WorkerPool``."""
        return processes.tail(self._file(name))

    def close(self) -> None:
        """See ``WorkerPool``."""
        self.liveness.close()
        self._context.term()

    def _file(self, name: str) -> Path:
        return self._folder / "logs" / f"{name}.log"
