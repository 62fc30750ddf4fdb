"""The launcher's end of a process that passes its record on to a tracker: begun, heard, ended in bounded time."""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.machine.processes import inherited
from ebbflow.infra.storage import private
from ebbflow.infra.training.tracking.record import TrackingRecord
from ebbflow.infra.training.tracking.targets import TrackTarget
from ebbflow.infra.training.tracking.trackers import TrackedRun

_MODULE = "ebbflow.infra.training.tracking.deliver"
_KILL = 5.0  # seconds for a process that is killed

log = logging.getLogger(__name__)


class Sender:
    """One tracker of a run. Nothing here waits for it but ``await_id`` and ``await_end``, each as long as it is told.

    A process that dies is told of, and another one replaces it, once.

    Args:
        target: the tracker.
        run: as the tracker is to show it.
        record: of the run.
        notify: hears sentences for people: that it cannot be reached, and that it can again; in any thread.

    Raises ``EngineUnavailableError`` where no process can be started.
    """

    def __init__(
        self, target: TrackTarget, run: TrackedRun, record: TrackingRecord, notify: Callable[[str], None]
    ) -> None:
        self.target, self._record, self._notify = target, record, notify
        self.id = run.known
        self._answered, self._over = threading.Event(), threading.Event()
        self._done = self._restarted = False
        self._problem = ""
        self._run, self._state = run, ""
        self._killed, self._lock = False, threading.Lock()
        self._process = self._begun()
        self._reader = threading.Thread(target=self._hear, daemon=True, name=f"tracking-{target.kind}")
        self._reader.start()

    def _begun(self) -> "subprocess.Popen[bytes]":
        """Start the process and tell it what is to be done."""
        try:
            with private.open_file(
                self._record.path.parent / f"tracking-{self.target.kind}.log", "ab"
            ) as errors:
                process = subprocess.Popen(
                    [sys.executable, "-P", "-m", _MODULE],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=inherited(),
                    start_new_session=True,  # Ctrl-C is for the training, which still has something to say
                )
        except OSError as error:
            raise EngineUnavailableError(f"tracking cannot be started: {error}") from error
        run = replace(self._run, known=self.id)
        work = {"target": str(self.target), "run": asdict(run), "record": str(self._record.path)}
        _say(process, work)
        return process

    def await_id(self, seconds: float) -> str:
        """Return the tracker's ID of the run once it is known, or has met a problem, or the time is over."""
        if not self.id:
            self._answered.wait(seconds)
        return self.id

    def end(self, state: str) -> None:
        """Say that the run has ended, and how; ``await_end`` waits for what follows."""
        with self._lock:
            self._state = state
            _say(self._process, {"do": "finish", "state": state})

    def await_end(self, seconds: float) -> str:
        """Return why the tracker has not all of the run within ``seconds``; empty: it has. Then kill the process."""
        self._over.wait(seconds)
        self.kill()
        return "" if self._done else self._problem or f"no answer within {seconds:.0f} s"

    def kill(self) -> None:
        """End the process at once. May be called twice."""
        with self._lock:
            self._killed = True
            process = self._process
        with suppress(OSError):
            process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL)
        self._reader.join(_KILL)  # which closes what it reads
        with suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()

    def _hear(self) -> None:
        while True:
            process = self._process
            assert process.stdout is not None
            with process.stdout:
                for line in process.stdout:
                    with suppress(ValueError):
                        self._take(json.loads(line))
            if not self._died(process):
                break
        self._answered.set()
        self._over.set()

    def _died(self, process: "subprocess.Popen[bytes]") -> bool:
        """Tell people of a process that ended unasked; return whether another one replaces it, which happens once."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL)
        with self._lock:
            if self._killed or self._done:
                return False
            self._problem = f"the process that passes values on to it ended with status {process.returncode}"
            if self._restarted:
                self._notify(f"{self.target.kind} gets no more values, which are kept: {self._problem} again")
                return False
            self._notify(f"{self.target.kind}: {self._problem}; another begins")
            self._restarted = True
            try:
                self._process = self._begun()
            except EngineUnavailableError as error:
                self._problem = str(error)
                return False
            with suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
            if self._state:
                _say(self._process, {"do": "finish", "state": self._state})
            return True

    def _take(self, message: dict[str, str]) -> None:
        match message.get("do"):
            case "id":
                if self._record.said.ids.get(str(self.target)) != message["id"]:
                    self._record.add("id", target=str(self.target), id=message["id"])
                self.id = message["id"]
                self._answered.set()
            case "well":
                if self._problem:
                    self._notify(f"{self.target.kind} is reached again, and has what it missed")
                self._problem = ""
            case "problem":
                if not self._problem:
                    self._notify(
                        f"{self.target.kind} does not take the run's values, which are kept: {message['text']}"
                    )
                self._problem = message["text"]
                self._answered.set()
            case "done":
                self._done = True
                self._over.set()


def _say(process: "subprocess.Popen[bytes]", message: Mapping[str, object]) -> None:
    """Write a message to a process; that one has ended is heard by who reads from it."""
    with suppress(OSError, ValueError):
        assert process.stdin is not None
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()
