"""Tell the training nodes that launchers run on a machine that it will be gone soon."""

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

from ebbflow.infra.local_fleet.state import labels as marks
from ebbflow.infra.machine import processes
from ebbflow.infra.storage import private

_ENTRY = "EBBFLOW_NODE_ENTRY"  # see ``infra.training.channel.wire``
_NOTICE = "notice"  # see ``infra.training.launcher.node``


def tell(fleet: str, node: str, deadline: float) -> int:
    """Tell all that are ready for it and have not been told of this deadline; return how many that were.

    One that is still importing would end by the signal: it is told at a later call.
    """
    by_mark: dict[str, dict[int, Mapping[str, str]]] = {}
    for pid, environment in marks.environments(marks.below(fleet, node)):
        if _ENTRY in environment:
            by_mark.setdefault(environment[processes.MARK], {})[pid] = environment
    told = 0
    for found in by_mark.values():
        for pid in marks.leaders(found):
            told += _tell(pid, _folder(found[pid]), deadline)
    return told


def _tell(pid: int, folder: Path | None, deadline: float) -> bool:
    if folder is None or not folder.is_dir() or not marks.catches(pid, signal.SIGTERM):
        return False
    note = folder / _NOTICE
    with contextlib.suppress(OSError, ProcessLookupError):
        if note.exists() and note.read_text() == repr(deadline):
            return False
        private.write_text(note, repr(deadline))
        os.kill(pid, signal.SIGTERM)
        return True
    return False


def _folder(environment: Mapping[str, str]) -> Path | None:
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return Path(json.loads(environment[_ENTRY])["folder"])
    return None
