"""The process that stands for one GPU node: while it is there, so is the machine.

Run as ``python -m ebbflow.infra.local_fleet.provider.machine FOLDER UID NODE``. Kill it, and the keeper takes all
that runs on the node down with it. It ends itself, and everything on its node, when the fleet no longer has the node,
or when the keeper is gone and none follows.
"""

import json
import sys
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.local_fleet.state import labels as marks
from ebbflow.infra.local_fleet.state.fleet_state import Identity
from ebbflow.infra.machine import processes
from ebbflow.infra.storage import private

_LOOK = 0.5  # s between looks
PATIENCE = 5.0  # s without a keeper


def serve(folder: Path, uid: str, node: str, clock: Clock) -> None:
    """Be there until the fleet has no such node any more, or is left alone."""
    seen = clock.now()
    while True:
        clock.sleep(_LOOK)
        book = _book(folder)
        if book is not None and (book["uid"] != uid or not _has(book, node)):
            return
        if book is not None and _kept(book):
            seen = clock.now()
        elif clock.now() - seen > PATIENCE:
            return


def _book(folder: Path) -> dict[str, Any] | None:
    """Return the book as it stands in the file; ``None`` where it cannot be read now."""
    try:
        found: dict[str, Any] = json.loads((folder / "fleet.json").read_text())
    except (OSError, ValueError):
        return None
    return found


def _has(book: dict[str, Any], node: str) -> bool:
    return any(one["id"] == node for one in book["nodes"])


def _kept(book: dict[str, Any]) -> bool:
    keeper = book["keeper"]
    return keeper is not None and marks.alive(Identity(*keeper))


def main(folder: Path, uid: str, node: str) -> None:
    """Serve, then take down what is left on the node; the one to go last is this process."""
    own = folder / "work" / node
    private.make_folder(own)
    private.reserve(own / "ready")
    clock = SystemClock()
    serve(folder, uid, node, clock)
    for _, environment in list(marks.environments(marks.below(uid, node))):
        name = environment[processes.MARK]
        if name != marks.machine_mark(uid, node):
            marks.destroy(name, clock)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
