"""Folders of local fleets that are down: the newest are kept, older ones are removed.

A fleet's folder outlives the fleet: its logs are there, and its book keeps ids and epochs from being used twice. Each
run of a pipeline on this machine has a fleet of its own, though, and nobody takes those folders away.
"""

import contextlib
import logging
import os
import secrets
import shutil
from pathlib import Path

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import InfraError
from ebbflow.infra.local_fleet.state import labels as marks
from ebbflow.infra.local_fleet.state.fleet_state import FleetBook
from ebbflow.infra.local_fleet.state.store import BOOK, LOCK, STARTING, BookFile
from ebbflow.infra.machine import processes
from ebbflow.infra.storage import files

KEPT = 20
"""Fleets that are down whose folders are kept, those that went down last."""
_TRASH = ".removed-"  # begins the name of a folder that is being removed

log = logging.getLogger(__name__)


def prune(parent: Path, clock: Clock, keep: int = KEPT) -> list[str]:
    """Remove the folders of fleets in ``parent`` that are down but for the ``keep`` newest; return their names.

    A fleet that is up, that somebody starts just now, or of which a process lives is never touched, nor is a folder
    without a book that can be read. Safe for several processes at once; what cannot be removed is left to the next.
    """
    removed = []
    for folder in _oldest(parent)[: -keep or None]:
        with contextlib.suppress(InfraError, OSError):
            if _take_away(folder, clock):
                removed.append(folder.name)
    for trash in parent.glob(f"{_TRASH}*"):
        shutil.rmtree(trash, ignore_errors=True)
    if removed:
        log.info("folders of fleets that are down were removed: %s", ", ".join(removed))
    return removed


def _oldest(parent: Path) -> list[Path]:
    """Return the folders of fleets that look as if they were down, the one that went down first at first."""
    found = []
    for path in parent.glob(f"*/{BOOK}"):
        with contextlib.suppress(InfraError, OSError):
            at, book = path.stat().st_mtime, BookFile(path.parent).read()
            if book is not None and not _there(book):
                found.append((at, path.parent))
    return [folder for _, folder in sorted(found)]


def _there(book: FleetBook) -> bool:
    """Tell whether a fleet lives: it is up and so is its owner, or its keeper is there."""
    return marks.alive(book.keeper) or (book.up and (book.owner is None or marks.alive(book.owner)))


def _take_away(folder: Path, clock: Clock) -> bool:
    """Remove one folder, unless its fleet has begun to live again."""
    trash = folder.with_name(f"{_TRASH}{secrets.token_hex(6)}")
    # whoever starts the fleet holds the first lock all the while, whoever changes its book the second
    with files.locked(str(folder / STARTING), clock, 0.0), files.locked(str(folder / LOCK), clock, 1.0):
        book = BookFile(folder).read()
        if book is None or _there(book) or _runs(book):
            return False
        os.rename(folder, trash)  # at once: whoever comes now finds no folder, and makes a new one
    shutil.rmtree(trash, ignore_errors=True)
    return True


def _runs(book: FleetBook) -> bool:
    """Tell whether any process of the fleet's last life is there."""
    spark = book.spark is not None and processes.members(f"{book.spark.uid}/")
    return bool(spark or marks.nodes(book.uid) or processes.members(f"{book.uid}-keeper"))
