"""Directories of Parquet files that take results: a commit puts another directory in the place of the old one.

The other one has the files that stay as links, so nothing of them is copied, and readers see the table before or
after a commit. Linux exchanges the names of two directories at once: renameat2(2).
"""

import ctypes
import errno
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import StorageError, TableError
from ebbflow.infra.protocols import Relation
from ebbflow.infra.storage import files
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import parquet
from ebbflow.infra.tables.targets.model import (
    RUNS,
    CommitConflictError,
    DataFile,
    TableChange,
    TargetState,
    folder_name,
    leftovers,
)

_EXCHANGE = 2  # RENAME_EXCHANGE of linux/fs.h
_HERE = -100  # AT_FDCWD
_REMEMBERED = 7 * 86_400.0  # seconds
_PASSES = 20  # in which a directory that others write into is emptied
_Identity = tuple[int, int, int]
_log = logging.getLogger(__name__)


class FolderTarget:
    """A local directory of Parquet files, in directories ``COLUMN=VALUE`` where it has partitions.

    Raises ``TableError`` for one in object storage, where many files cannot appear at once.
    """

    keeps_keys = False
    needs_file = True

    def __init__(self, place: StorageLocation) -> None:
        if not place.local:
            raise TableError(
                f"{place} cannot be written as plain Parquet files: object storage shows them one by one; write into "
                f"a table of Delta Lake or Iceberg there"
            )
        self._root = os.path.realpath(place.root)  # of a link, it is the directory that is replaced
        self._above, _, self._base = self._root.rpartition("/")
        self.name = f"the directory {place}"

    def look(self, run: str) -> TargetState:
        source = self._source()
        if source is None:
            self._check_empty()
            return TargetState(None, written=self._has(run))
        if source.log is not None:
            raise TableError(
                f"{self.name} is a table of {source.log}; --into-format delta writes into those of Delta Lake, "
                f"iceberg://CATALOG/NAMESPACE/TABLE into those of Iceberg"
            )
        relation = self._relation(source)
        columns = tuple(
            (name, "" if name in relation.partitions else kind) for name, kind in relation.columns
        )
        return TargetState(columns, relation.partitions, written=self._has(run), table=relation)

    def relation(self, state: TargetState) -> Relation:
        found: Relation = state.table
        return found

    def kinds(self, columns: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        return tuple(columns)

    def data(self, state: TargetState, columns: Sequence[tuple[str, str]], run: str) -> StorageLocation:
        place = f"{self._above}/.{self._base}{folder_name(run)}"
        with translated(f"write {self.name}", StorageError):
            os.makedirs(self._above, exist_ok=True)
            _check_exchange(self._above)
            os.makedirs(place)
            if os.path.isdir(self._root):
                os.chmod(place, os.stat(self._root).st_mode & 0o7777)
        return StorageLocation(place)

    def ids(self, state: TargetState, columns: Sequence[tuple[str, str]]) -> tuple[tuple[str, int], ...]:
        return ()

    def discard(self, data: StorageLocation, added: Sequence[DataFile]) -> None:
        data.remove_folder("")

    def commit(self, state: TargetState, change: TableChange, data: StorageLocation) -> None:
        with (
            translated(f"commit to {self.name}", StorageError),
            files.locked(f"{self._above}/.{self._base}.ebbflow-lock", SystemClock()),
        ):
            if self._has(change.run):
                raise CommitConflictError(f"{self.name} was written by another try")
            source = self._source()
            known = () if state.table is None else state.table.files
            if (() if source is None else source.files) != known:
                raise CommitConflictError(f"{self.name} was changed by another")
            linked = self._link(data.root, change.removed)
            self._remember(data.root, change.run)
            self._exchange(data.root, linked, change.removed)
            files.sync_folder(self._above)
            with suppress(OSError):
                for name in os.listdir(self._above):
                    if name.startswith(f".{self._base}{leftovers(change.run)}"):
                        shutil.rmtree(f"{self._above}/{name}", ignore_errors=True)

    def _source(self) -> parquet.Source | None:
        return parquet.source_at(StorageLocation(self._root))

    def _relation(self, source: parquet.Source) -> Relation:
        return parquet.table_of(StorageLocation(self._above), source)

    def _check_empty(self) -> None:
        there = [
            name for name in os.listdir(self._root) if not files.hidden(name)
        ] if os.path.isdir(self._root) else []  # fmt: skip
        if there:
            raise TableError(f"{self.name} holds {sorted(there)[0]} and no Parquet files; name another")

    def _has(self, run: str) -> bool:
        return os.path.isfile(f"{self._root}/{RUNS}/{run}")

    def _link(self, new: str, removed: frozenset[str]) -> dict[str, _Identity]:
        """Make links in ``new`` of all files of the directory but those at the paths ``removed``.

        Return what all of them were, by their paths below the directory.
        """
        there: dict[str, _Identity] = {}
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = f"{folder}/{name}"
                below = path.removeprefix(f"{self._root}/")
                there[below] = _identity(path)
                if path in removed:
                    continue
                to = f"{new}/{below}"
                os.makedirs(os.path.dirname(to), exist_ok=True)
                try:
                    os.link(path, to)
                except OSError:  # a file system without links
                    shutil.copy2(path, to)
        return there

    def _exchange(self, new: str, linked: Mapping[str, _Identity], removed: frozenset[str]) -> None:
        """Give ``new`` the directory's name, then empty and remove the directory that had it.

        Other programs know nothing of the lock: what they have done to the directory since its files were linked is
        done to the new one as well, as if they had done it after the commit. Raises ``CommitConflictError``, with
        the directory as it was, where they have changed files that the commit has replaced.
        """
        if not os.path.isdir(self._root):
            os.rename(new, self._root)
            return
        _swap(new, self._root)
        old = new
        replaced = {path.removeprefix(f"{self._root}/") for path in removed}
        changed = sorted(
            below
            for below in replaced & set(_inside(old))
            if linked.get(below) != _identity(f"{old}/{below}")
        )
        if changed:
            _swap(old, self._root)
            raise CommitConflictError(
                f"{self.name} was changed by another program while it was written into: {_few(changed)}"
            )
        for below in linked.keys() - replaced - set(_inside(old)):  # deleted meanwhile
            with suppress(FileNotFoundError):
                os.unlink(f"{self._root}/{below}")
        for _ in range(_PASSES):
            for below in _inside(old):
                path = f"{old}/{below}"
                if linked.get(below) == _identity(path):
                    os.unlink(path)
                else:
                    to = f"{self._root}/{below}"
                    os.makedirs(os.path.dirname(to), exist_ok=True)
                    os.rename(path, to)
            if _emptied(old):
                return
        _log.warning("%s stays: another program keeps writing into it", old)

    def _remember(self, new: str, run: str) -> None:
        os.makedirs(f"{new}/{RUNS}", exist_ok=True)
        for name in os.listdir(f"{new}/{RUNS}"):
            if time.time() - os.stat(f"{new}/{RUNS}/{name}").st_mtime > _REMEMBERED:
                os.unlink(f"{new}/{RUNS}/{name}")
        with open(f"{new}/{RUNS}/{run}", "x", encoding="utf-8"):
            pass
        files.sync_folder(f"{new}/{RUNS}")
        files.sync_folder(new)


def _identity(path: str) -> _Identity:
    """Return what differs between two files that have had one path: inode, bytes and time of change in ns."""
    told = os.lstat(path)
    return told.st_ino, told.st_size, told.st_mtime_ns


def _inside(folder: str) -> list[str]:
    """Return the paths of all files in a directory, below it."""
    return [
        f"{above}/{name}".removeprefix(f"{folder}/") for above, _, names in os.walk(folder) for name in names
    ]


def _emptied(folder: str) -> bool:
    """Remove a directory that holds no files; tell whether it is gone, which it is not where one has appeared."""
    for above, _, _ in os.walk(folder, topdown=False):
        try:
            os.rmdir(above)
        except OSError:
            return False
    return True


def _few(names: Sequence[str]) -> str:
    """Return some of the names, for people."""
    more = f" and {len(names) - 3:,} others" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _check_exchange(folder: str) -> None:
    """Raise ``OSError`` where the names of two directories in ``folder`` cannot be exchanged, as on NFS."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=".ebbflow-exchange-") as tried:
        for name in "ab":
            os.mkdir(f"{tried}/{name}")
        _swap(f"{tried}/a", f"{tried}/b")


def _swap(new: str, old: str) -> None:
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None or call(_HERE, os.fsencode(new), _HERE, os.fsencode(old), _EXCHANGE):
        number = ctypes.get_errno() if call is not None else errno.ENOSYS
        raise OSError(
            number,
            f"the directories {new} and {old} cannot be exchanged ({os.strerror(number)}), which writing into a "
            f"directory of Parquet files needs; write into a table of Delta Lake there",
        )
