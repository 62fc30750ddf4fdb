"""Directories of Parquet files that take results: a commit puts another directory in the place of the old one.

The other one has the files that stay as links, so nothing of them is copied, and readers see the table before or
after a commit. Linux exchanges the names of two directories at once: renameat2(2).
"""

import ctypes
import errno
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
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
            self._link(data.root, change.removed)
            self._remember(data.root, change.run)
            _exchange(data.root, self._root)
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

    def _link(self, new: str, removed: frozenset[str]) -> None:
        """Make links in ``new`` of all files of the directory but those at the paths ``removed``."""
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = f"{folder}/{name}"
                if path in removed:
                    continue
                to = f"{new}{folder.removeprefix(self._root)}/{name}"
                os.makedirs(os.path.dirname(to), exist_ok=True)
                try:
                    os.link(path, to)
                except OSError:  # a file system without links
                    shutil.copy2(path, to)

    def _remember(self, new: str, run: str) -> None:
        os.makedirs(f"{new}/{RUNS}", exist_ok=True)
        for name in os.listdir(f"{new}/{RUNS}"):
            if time.time() - os.stat(f"{new}/{RUNS}/{name}").st_mtime > _REMEMBERED:
                os.unlink(f"{new}/{RUNS}/{name}")
        with open(f"{new}/{RUNS}/{run}", "x", encoding="utf-8"):
            pass
        files.sync_folder(f"{new}/{RUNS}")
        files.sync_folder(new)


def _exchange(new: str, old: str) -> None:
    """Give ``new`` the name ``old``, and what has that, if anything, the other; delete it then."""
    if not os.path.isdir(old):
        os.rename(new, old)
        return
    _swap(new, old)
    shutil.rmtree(new, ignore_errors=True)


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
