"""Directories of Parquet files that take results: a commit puts another directory in the place of the old one.

The other one has the files that stay as links, so nothing of them is copied, and readers see the table before or
after a commit. See ``exchange``.
"""

import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import StorageError, TableError
from ebbflow.infra.protocols import Relation
from ebbflow.infra.storage import files
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import parquet
from ebbflow.infra.tables.targets import exchange
from ebbflow.infra.tables.targets.model import (
    MARK,
    RUNS,
    CommitConflictError,
    DataFile,
    TableChange,
    TargetState,
    folder_name,
    leftovers,
)

_REMEMBERED = 7 * 86_400.0  # seconds
_PASSES = 20  # in which a directory that others write into is emptied
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
        if self._records():  # of a commit that was cut off, or that another makes now
            with self._alone("finish a commit to"):
                self._finish(1)
        source = self._source()
        if source is None:
            self._check_empty()
            return TargetState(None, written=self._has(run))
        if source.log is not None:
            raise TableError(
                f"{self.name} is a table of {source.log}; --into-format delta writes into those of Delta Lake, "
                f"iceberg://CATALOG/NAMESPACE/TABLE into those of Iceberg"
            )
        self._check_links()
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
            exchange.check(self._above)
            os.makedirs(place)
            if os.path.isdir(self._root):
                os.chmod(place, os.stat(self._root).st_mode & 0o7777)
        return StorageLocation(place)

    def ids(self, state: TargetState, columns: Sequence[tuple[str, str]]) -> tuple[tuple[str, int], ...]:
        return ()

    def discard(self, data: StorageLocation, added: Sequence[DataFile]) -> None:
        data.remove_folder("")

    def commit(self, state: TargetState, change: TableChange, data: StorageLocation) -> None:
        with self._alone("commit to"):
            self._finish(1)
            if self._has(change.run):
                raise CommitConflictError(f"{self.name} was written by another try")
            source = self._source()
            known = () if state.table is None else state.table.files
            if (() if source is None else source.files) != known:
                raise CommitConflictError(f"{self.name} was changed by another")
            self._replace(data.root, change)
            try:  # it is made: nothing of what is left to do may look as if it were not
                files.sync_folder(self._above)
                self._finish(_PASSES)
                for name in os.listdir(self._above):
                    if name.startswith(f".{self._base}{leftovers(change.run)}") and not name.endswith(
                        exchange.OLD
                    ):
                        shutil.rmtree(f"{self._above}/{name}", ignore_errors=True)
            except OSError as error:
                _log.warning("%s is written; what is left of before stays for now: %s", self.name, error)

    @contextmanager
    def _alone(self, action: str) -> Iterator[None]:
        """Hold the lock of the directory; ``action`` completes "cannot ... it"."""
        with (
            translated(f"{action} {self.name}", StorageError),
            files.locked(f"{self._above}/.{self._base}.ebbflow-lock", SystemClock()),
        ):
            yield

    def _replace(self, new: str, change: TableChange) -> None:
        """Give ``new`` the directory's name.

        Other programs know nothing of the lock: what they have done to the directory meanwhile is kept, see
        ``exchange``. Raises ``CommitConflictError`` where they have changed files that the commit replaces.
        """
        record = f"{RUNS}/{change.run}"
        if not os.path.isdir(self._root):
            self._remember(new, record, b"")
            os.rename(new, self._root)
            return
        self._check_links()
        links = exchange.link(self._root, new, change.removed, record)
        self._remember(new, record, links.encoded())
        if changed := exchange.exchange(self._root, new, links):
            raise CommitConflictError(
                f"{self.name} was changed by another program while it was written into: {_few(changed)}"
            )

    def _records(self) -> list[str]:
        """Return the records of exchanges that are not finished: those of finished ones are empty."""
        folder = f"{self._root}/{RUNS}"
        try:
            return sorted(name for name in os.listdir(folder) if os.path.getsize(f"{folder}/{name}"))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _finish(self, passes: int) -> None:
        """Finish exchanges whose process has died, or that could not be finished; the lock must be held."""
        for name in self._records():
            path = f"{self._root}/{RUNS}/{name}"
            try:
                with open(path, "rb") as file:
                    links = exchange.Links.decoded(file.read())
            except FileNotFoundError:  # with an exchange that was undone
                continue
            if links is None or "/" in links.new or not links.new.startswith(f".{self._base}.{MARK}"):
                continue
            old = f"{self._above}/{links.new}"
            if os.path.isdir(old) and exchange.conclude(self._root, old, links):
                shutil.rmtree(old, ignore_errors=True)
                continue
            old += exchange.OLD
            if os.path.isdir(old) and (
                why := exchange.emptied(self._root, old, links, passes, SystemClock())
            ):
                _log.warning("%s stays until %s is written into again: %s", old, self.name, why)
                continue
            os.truncate(path, 0)

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

    def _check_links(self) -> None:
        if (link := exchange.linked_folder(self._root)) is not None:
            raise TableError(
                f"{self.name} holds the directory {link}, which is a link: its files cannot be replaced with the "
                f"others; move them into the directory itself"
            )

    def _remember(self, new: str, record: str, content: bytes) -> None:
        os.makedirs(f"{new}/{RUNS}", exist_ok=True)
        for name in os.listdir(f"{new}/{RUNS}"):
            told = os.stat(f"{new}/{RUNS}/{name}")
            if not told.st_size and time.time() - told.st_mtime > _REMEMBERED:
                os.unlink(f"{new}/{RUNS}/{name}")
        with open(f"{new}/{record}", "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        files.sync_folder(f"{new}/{RUNS}")
        files.sync_folder(new)


def _few(names: Sequence[str]) -> str:
    """Return some of the names, for people."""
    more = f" and {len(names) - 3:,} others" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
