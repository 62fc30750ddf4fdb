"""The process that outlives its cluster's owner: it ends clusters left alone, and nodes at their deadline.

Started as ``python -m ebbflow.infra.spark.guardian FOLDER UID OWNER`` with the read end of a pipe from the
owner as its standard input. The pipe's end means that the owner is gone, however it went, SIGKILL included.
The word ``detach`` on it means that the cluster is to survive its owner; ``release``, that nothing is left.
"""

import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.spark import teardown
from ebbflow.infra.spark.state import ClusterState, StateFile

_LOOK = 0.5  # seconds between looks at the state file


class Guardian:
    """The owner's handle on its guardian process."""

    def __init__(self, file: StateFile, uid: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(file.folder), uid, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=file.folder,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def detach(self) -> None:
        """Let the cluster survive this process; its guardian stays, to end nodes at their deadline."""
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


def watch(file: StateFile, uid: str, owner: int, clock: Clock) -> None:
    """Guard until the cluster is stopped, released, or its owner is gone."""
    attached = True
    while True:
        word = _listen(_LOOK) if attached else None
        if not attached:
            clock.sleep(_LOOK)
        if word == "release":
            return
        if word == "detach":
            attached = False
        elif word == "" or (attached and os.getppid() != owner):
            # The second test is for an owner whose forked children keep the pipe open after its death.
            teardown.tear_down(file, uid, clock)
            return
        with contextlib.suppress(ClusterError):
            state = file.read()
            if state is None or state.uid != uid:
                return
            _end_overdue(file, state, clock)


def _listen(timeout: float) -> str | None:
    """Return the owner's next word, ``""`` at its end, ``None`` when none came in ``timeout`` seconds."""
    ready, _, _ = select.select([0], [], [], timeout)
    return os.read(0, 64).decode().strip() if ready else None


def _end_overdue(file: StateFile, state: ClusterState, clock: Clock) -> None:
    now = clock.now()
    for node in state.nodes:
        if node.phase == "up" and node.deadline is not None and node.deadline <= now:
            teardown.end_node(file, state, node.id, clock)


if __name__ == "__main__":
    watch(StateFile(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3]), SystemClock())
