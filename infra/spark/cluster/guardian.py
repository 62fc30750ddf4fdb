"""The process that outlives its cluster's owner: it ends clusters left alone, and nodes at their deadline.

Started as ``python -m ebbflow.infra.spark.cluster.guardian FOLDER UID OWNER`` by ``infra.machine.guardian.Guardian``.
"""

import contextlib
import os
import sys
from pathlib import Path

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.machine import guardian
from ebbflow.infra.spark.cluster import teardown
from ebbflow.infra.spark.cluster.state import ClusterState, StateFile


class Guardian(guardian.Guardian):
    """The owner's handle on its cluster's guardian process."""

    def __init__(self, file: StateFile, uid: str) -> None:
        super().__init__(__name__, [str(file.folder), uid, str(os.getpid())], file.folder)


def watch(file: StateFile, uid: str, owner: int, clock: Clock) -> None:
    """Guard until the cluster is stopped, released, or its owner is gone."""

    def look() -> bool:
        with contextlib.suppress(ClusterError):
            state = file.read()
            if state is None or state.uid != uid:
                return False
            _end_overdue(file, state, clock)
        return True

    if guardian.outlive(owner, look, clock):
        teardown.tear_down(file, uid, clock)


def _end_overdue(file: StateFile, state: ClusterState, clock: Clock) -> None:
    now = clock.now()
    for node in state.nodes:
        if node.phase == "up" and node.deadline is not None and node.deadline <= now:
            teardown.end_node(file, state, node.id, clock)


if __name__ == "__main__":
    watch(StateFile(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3]), SystemClock())
