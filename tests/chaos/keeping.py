"""Processes that somebody looks after: started again when they end before their time, as an orchestrator does."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

EXCUSES = re.compile(
    r"[Nn]o space left|disk is full|disk may be full|free some space"  # the disk
    r"|cannot [^\n]{1,80} at (sqlite|postgresql)|(database|ledger)[^\n]{0,60} "
    r"(is locked|does not answer|does not respond|been away|been unavailable)"
    r"|no capacity loop is the leader|leads no more|no longer the leader|another process is running it"  # others
)
"""What a process may say of a fault when it ends before its time; anything else is a violation."""
_MOST = 4.0  # s between attempts


@dataclass(frozen=True, slots=True)
class Death:
    """One end of a process before its time."""

    at: float  # s, monotonic
    status: int
    said: str


@dataclass
class Kept:
    """One process, or one after another in its place.

    ``command`` returns what to start now. It is over with status 0, or when it was told to stop.
    """

    name: str
    command: Callable[[], Sequence[str]]
    folder: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    killed: set[int] = field(default_factory=set)  # by us
    starts: list[float] = field(default_factory=list)  # s, monotonic
    deaths: list[Death] = field(default_factory=list)
    over: bool = False
    aborted: bool = False  # by us, to see where it hung
    lock: threading.RLock = field(default_factory=threading.RLock)
    _due: float = 0.0
    _tries: int = 0

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def pid(self) -> int:
        """Return the process's id while it runs; 0 otherwise."""
        with self.lock:
            return self.process.pid if self.process is not None and self.process.poll() is None else 0

    def start(self) -> None:
        with self.lock, self.log.open("ab") as log:
            log.write(f"=== start {len(self.starts) + 1}\n".encode())
            log.flush()
            self.process = subprocess.Popen(
                list(self.command()),
                cwd=self.folder,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.starts.append(time.monotonic())

    def tend(self, back: float = 0.5) -> None:
        """Look whether it runs; start it again ``back`` seconds after an end before its time, later each time."""
        with self.lock:
            if self.over or self.aborted:
                return
            now = time.monotonic()
            if self.process is None:
                if now >= self._due:
                    self.start()
                return
            status = self.process.poll()
            if status is None:
                return
            if status == 0:
                self.over = True
                return
            died = self.process.pid in self.killed
            self.deaths.append(Death(now, status, self.said()))
            self._tries = 0 if died or now - self.starts[-1] > 20.0 else self._tries + 1
            self._due = max(self._due, now + min(back * 2.0**self._tries, _MOST))
            self.process = None

    def kill(self, *, group: bool, back: float) -> int:
        """SIGKILL to it, with all in its session if ``group``; return its id, 0 where none runs."""
        with self.lock:
            pid = self.pid
            if pid:
                self.killed.add(pid)
                self._due = time.monotonic() + back
                self.signal(signal.SIGKILL, group=group)
                assert self.process is not None
                self.process.wait(150)
            return pid

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        if pid := self.pid:
            with suppress(ProcessLookupError):
                os.killpg(pid, number) if group else os.kill(pid, number)

    def stop(self, seconds: float) -> str:
        """End it by SIGTERM; return what is wrong with how it ended."""
        with self.lock:
            self.over = True
            if not self.pid:
                return ""
            assert self.process is not None
            self.signal(signal.SIGTERM)
            try:
                status = self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.stacks()
                self.signal(signal.SIGKILL, group=True)
                return f"{self.name} did not end within {seconds:g} s of SIGTERM"
            return f"{self.name} ended with {status} after SIGTERM: {self.said()}" if status else ""

    def stacks(self) -> None:
        """Have it write the stacks of its threads into its log, and end."""
        self.aborted = True
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGABRT)
        if self.process is not None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(150)

    def said(self, characters: int = 600) -> str:
        """Return the end of what its present or last process has said."""
        text = self.log.read_text(errors="replace").rpartition("=== start ")[2]
        return text.partition("\n")[2].strip()[-characters:]

    def problems(self) -> list[str]:
        """Return ends that nobody has caused and no fault excuses, and errors that nobody has caught."""
        found = [
            f"{self.name} ended with {death.status}: {death.said}"
            for death in self.deaths
            if death.status != -signal.SIGKILL and not (self.aborted or EXCUSES.search(death.said))
        ]
        unkilled = sum(death.status == -signal.SIGKILL for death in self.deaths) - len(self.killed)
        if unkilled > 0:
            found.append(f"{self.name} was killed {unkilled} times by somebody else")
        text = self.log.read_text(errors="replace")
        for block in text.split("Traceback (most recent call last)")[1:]:
            lines = [
                line
                for line in block.splitlines()
                if line and not line.startswith((" ", "During", "The above"))
            ]
            what = next(iter(lines), "")
            found.append(f"{self.name} has a traceback in its log: {what[:300]}")
        return found
