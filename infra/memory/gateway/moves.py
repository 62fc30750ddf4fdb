"""``StoreMoves``: names that change in a store, and memory before it that follows."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ebbflow.infra.memory.files import MemoryTier, TierFile
from ebbflow.infra.memory.gateway.messages import RefusedError
from ebbflow.infra.storage import files
from ebbflow.infra.storage.places import StorageLocation


@dataclass(eq=False)
class _Move:
    """A move under way. Where two have to do with the same names, the store decides, and memory keeps neither."""

    names: tuple[str, ...]
    alone: bool = True

    def meets(self, other: "_Move") -> bool:
        return any(
            f"{one}/".startswith(f"{two}/") or f"{two}/".startswith(f"{one}/")
            for one in self.names
            for two in other.names
        )


class StoreMoves:
    """Moves of files and directories. Safe for several threads.

    Args:
        place: the store itself.
        tier: nodes' memory before it.
    """

    def __init__(self, place: StorageLocation, tier: MemoryTier | None) -> None:
        self._place, self._tier, self._fs = place, tier, place.fs()
        self._lock = threading.Lock()
        self._moves: list[_Move] = []

    @contextmanager
    def moving(self, *names: str) -> Iterator["_Move"]:
        """Change names in the store within the block."""
        mine = _Move(names)
        with self._lock:
            for other in self._moves:
                if mine.meets(other):
                    mine.alone = other.alone = False
            self._moves.append(mine)
        try:
            yield mine
        finally:
            with self._lock:
                self._moves.remove(mine)

    def move(self, source: str, target: str, *, directory: bool, overwrite: bool) -> None:
        """Move in the store, and let memory follow. Raises ``RefusedError`` and ``OSError``.

        Args:
            source: path in the store's terms.
            target: the new one.
            directory: whether it is one.
            overwrite: replace a file that is there.
        """
        with self.moving(source, target) as mine:
            if not self._place.local:
                self._move_objects(source, target, directory)
            elif directory or overwrite:
                os.rename(source, target)
            else:
                self._move_new(source, target)
            if self._place.local:
                for folder in {os.path.dirname(source), os.path.dirname(target)}:
                    files.sync_folder(folder)
            if self._tier is not None:
                moved = self._tier.follow_move(source, target)
                self._confirm(moved, mine)

    def _move_new(self, source: str, target: str) -> None:
        """Move a local file to where none is."""
        try:
            os.link(source, target, follow_symlinks=False)
        except FileExistsError as error:
            name = os.path.basename(target)
            raise RefusedError("FileAlreadyExistsException", f"{name} already exists") from error
        except OSError as error:
            if error.errno not in files.NO_LINKS or os.path.lexists(target):
                raise
            os.rename(source, target)  # a file system without hard links
        else:
            os.unlink(source)

    def _move_objects(self, source: str, target: str, directory: bool) -> None:
        """Move objects, of a directory all copies before the first is deleted: there is the old or the new whole."""
        if not directory:
            self._fs.move(source, target)
            return
        inside = files.listing(self._fs, source, recursive=True)
        self._fs.create_dir(target, recursive=True)
        for info in inside:
            if not info.is_file:
                self._fs.create_dir(target + info.path[len(source) :], recursive=True)
        objects = [info.path for info in inside if info.is_file]
        files.in_parallel(lambda path: self._fs.copy_file(path, target + path[len(source) :]), objects)
        self._fs.delete_dir(source)

    def _confirm(self, moved: list[TierFile], move: _Move) -> None:
        """Note what the store has of files that memory keeps."""
        assert self._tier is not None
        infos = self._fs.get_file_info([file.path for file in moved]) if moved else []
        with self._lock:
            alone = move.alone
        for file, info in zip(moved, infos, strict=True):
            if alone and info.is_file and info.size == file.size:
                file.origin, file.compared = origin_of(info), time.monotonic()
            else:
                self._tier.drop(file)


def origin_of(info: Any) -> tuple[int, int]:
    """Return what tells whether a file of the store is still the same: size and time (ns)."""
    return int(info.size or 0), int(info.mtime_ns or 0)
