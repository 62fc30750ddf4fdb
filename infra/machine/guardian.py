"""Outlive the owner of local processes, and end what it leaves behind, however it goes, SIGKILL included.

A guardian is a process whose standard input is the read end of a pipe from its owner. The pipe's end means that the
owner is gone. The word ``detach`` on it means that what it guards is to survive its owner; ``release``, that nothing
is left to guard.

Run as ``python -m ebbflow.infra.machine.guardian MARK OWNER GRACE GROUPS FOLDER``, this module itself guards
processes that carry a mark (see ``infra.machine.processes``): once the owner is gone they get GRACE seconds to end by
themselves; then the rest is killed, and the empty control groups that match the pattern GROUPS and the directory
FOLDER are removed (each may be empty).
"""

import contextlib
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.machine import cgroups, processes
from ebbflow.infra.storage import private

_POLL = 0.5  # seconds between looks


class Guardian:
    """The owner's handle on its guardian process.

    Args:
        module: what the process runs.
        arguments: its arguments.
        folder: its working directory.
        log: file that takes what it prints, which is why it failed; none: nowhere.
    """

    def __init__(self, module: str, arguments: Sequence[str], folder: Path, log: Path | None = None) -> None:
        if log is not None:
            private.make_folder(log.parent)
        with open(os.devnull, "wb") if log is None else private.open_file(log, "ab") as out:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                cwd=folder,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def detach(self) -> None:
        """Let what is guarded survive this process; the guardian stays."""
        self._say(b"detach\n")
        # Popen warns of a child that it has not waited for; this one is meant to be left.
        self._process.returncode = 0

    def release(self) -> None:
        """End the guardian: there is nothing left to guard."""
        self._say(b"release\n")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)

    def _say(self, word: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(word)
            self._process.stdin.close()


def outlive(owner: int, look: Callable[[], bool], clock: Clock) -> bool:
    """Wait for the end of ``owner``, the process at the other end of standard input, and tell whether it came.

    It did not when there is nothing left to guard: the owner has released this process, or ``look``, called twice
    a second, returned false.
    """
    attached = True
    while True:
        word = _listen(_POLL) if attached else None
        if not attached:
            clock.sleep(_POLL)
        if word == "release":
            return False
        if word == "detach":
            attached = False
        elif word == "" or (attached and os.getppid() != owner):
            # The second test is for an owner whose forked children keep the pipe open after its death.
            return True
        if not look():
            return False


def _listen(timeout: float) -> str | None:
    """Return the owner's next word, ``""`` at its end, ``None`` when none came in ``timeout`` seconds."""
    ready, _, _ = select.select([0], [], [], timeout)
    return os.read(0, 64).decode().strip() if ready else None


def end_marked(mark: str, grace: float, clock: Clock) -> None:
    """Give the processes with ``mark`` ``grace`` seconds to end by themselves, then kill the rest."""
    end = clock.now() + grace
    while processes.members(mark) and clock.now() < end:
        clock.sleep(_POLL)
    processes.destroy(mark, [], clock)


def _guard(mark: str, owner: int, grace: float, groups: str, folder: str, clock: Clock) -> None:
    if not outlive(owner, lambda: True, clock):
        return
    try:
        end_marked(mark, grace, clock)
    finally:
        if groups:
            parent = Path(groups).parent
            for group in parent.glob(Path(groups).name):
                cgroups.remove(group, clock)
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _guard(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], sys.argv[5], SystemClock())
