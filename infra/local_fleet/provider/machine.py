"""The process that stands for one GPU node: while it is there, so is the machine.

Run as ``python -m ebbflow.infra.local_fleet.provider.machine FOLDER UID NODE``. Kill it, and the supervisor takes all
that runs on the node down with it. It ends itself, and everything on its node, when the fleet no longer has the node,
or when the supervisor is gone and none follows.
"""

import json
import sys
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.local_fleet.state import labels
from ebbflow.infra.local_fleet.state.fleet_state import Identity
from ebbflow.infra.machine import processes
from ebbflow.infra.storage import private

_POLL = 0.5  # s between looks
TIMEOUT = 5.0  # s without a supervisor


def serve(folder: Path, uid: str, node: str, clock: Clock) -> None:
    """Be there until the fleet has no such node any more, or is left alone."""
    seen = clock.now()
    while True:
        clock.sleep(_POLL)
        state = _read_state(folder)
        if state is not None and (state["uid"] != uid or not _has(state, node)):
            return
        if state is not None and _kept(state):
            seen = clock.now()
        elif clock.now() - seen > TIMEOUT:
            return


def _read_state(folder: Path) -> dict[str, Any] | None:
    """Return the state as it stands in the file; ``None`` where it cannot be read now."""
    try:
        found: dict[str, Any] = json.loads((folder / "fleet.json").read_text())
    except (OSError, ValueError):
        return None
    return found


def _has(state: dict[str, Any], node: str) -> bool:
    return any(one["id"] == node for one in state["nodes"])


def _kept(state: dict[str, Any]) -> bool:
    supervisor = state.get("supervisor", state.get("keeper"))  # its former key
    return supervisor is not None and labels.alive(Identity(*supervisor))


def main(folder: Path, uid: str, node: str) -> None:
    """Serve, then take down what is left on the node; the one to go last is this process."""
    own = folder / "work" / node
    private.make_folder(own)
    private.reserve(own / "ready")
    clock = SystemClock()
    serve(folder, uid, node, clock)
    for _, environment in list(labels.environments(labels.below(uid, node))):
        name = environment[processes.MARK]
        if name != labels.machine_mark(uid, node):
            labels.destroy(name, clock)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
