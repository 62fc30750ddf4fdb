"""What a table that takes a result is to whoever writes it, and the data files that are committed to it."""

import os
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, unquote

from ebbflow.infra.errors import InfraError, TableError
from ebbflow.infra.protocols import Relation
from ebbflow.infra.storage import files, private
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.filefooters import FileFooter, extract, opened

RUNS = "_ebbflow"  # a directory of Parquet files' own, of the runs that have written into it
NULL = "__HIVE_DEFAULT_PARTITION__"
_KEYS = frozenset({"string", "date", "boolean", "tinyint", "smallint", "int", "bigint"})
MARK = "ebbflow-"  # at the front of the names of all that is written here


class CommitConflictError(InfraError):
    """Another writer has changed the table since it was looked at; nothing was committed."""


@dataclass(frozen=True)
class TargetState:
    """A table as it was looked at."""

    columns: tuple[tuple[str, str], ...] | None  # (name, Spark SQL type); ``None``: there is no table yet
    partitions: tuple[str, ...] = ()
    required: frozenset[str] = frozenset()  # columns that are never NULL
    written: bool = False  # by the run that looks
    table: Any = None  # the library's


@dataclass(frozen=True)
class DataFile:
    """A file that is to be a table's."""

    scheme: str  # "file" or "s3"
    entry: files.FileEntry
    rows: int
    values: tuple[tuple[str, str | None], ...]  # partition columns with their value, as text
    footer: FileFooter

    @property
    def path(self) -> str:
        return self.entry.path

    @property
    def size(self) -> int:
        return self.entry.size


@dataclass(frozen=True)
class TableChange:
    """One commit: what a run adds to a table and removes from it."""

    run: str
    columns: tuple[tuple[str, str], ...]  # of a table that is made
    partitions: tuple[str, ...]
    added: tuple[DataFile, ...]
    removed: frozenset[str] = frozenset()  # paths of the table's files, as its relation has them


class TableTarget(Protocol):
    """A table that results are written into, in commits that are whole or not there at all."""

    name: str  # for people
    keeps_keys: bool  # whether files have the partition columns, too
    needs_file: bool  # whether only a file tells its columns

    def look(self, run: str) -> TargetState:
        """Return the table as it is now, and whether ``run`` has written into it. Raises ``TableError``."""
        ...

    def relation(self, state: TargetState) -> Relation:
        """Return the table's files as it was looked at. Raises ``TableError`` for what cannot be read."""
        ...

    def kinds(self, columns: Sequence[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
        """Return the columns that a table is made with for rows of ``columns``. Raises ``TableError``."""
        ...

    def data(self, state: TargetState, columns: Sequence[tuple[str, str]], run: str) -> StorageLocation:
        """Return the directory that data files of ``run`` are written below; ``columns`` are those of a table that
        is to be made."""
        ...

    def ids(self, state: TargetState, columns: Sequence[tuple[str, str]]) -> tuple[tuple[str, int], ...]:
        """Return the columns of a table's files with their field ids, where it knows columns by such."""
        ...

    def discard(self, data: StorageLocation, added: Sequence[DataFile]) -> None:
        """Delete files below ``data`` that are not committed, as far as they can be."""
        ...

    def commit(self, state: TargetState, change: TableChange, data: StorageLocation) -> None:
        """Make ``change``, whose files are below ``data``, of the table as it was looked at, or nothing.

        Raises ``CommitConflictError`` where another was quicker, and ``TableError``.
        """
        ...


def check_keys(name: str, columns: Sequence[tuple[str, str]], partitions: Sequence[str]) -> None:
    """Raise ``TableError`` for partition columns that are missing or whose values have no one text."""
    kinds = {column.lower(): kind for column, kind in columns}
    for key in partitions:
        if key.lower() not in kinds:
            raise TableError(f"{name} cannot be partitioned by {key!r}: the rows have no such column")
        if {"/", "="} & set(key):
            raise TableError(f"{name} cannot be partitioned by {key!r}, which no directory's name can tell")
        if kinds[key.lower()] not in _KEYS:
            raise TableError(
                f"{name} cannot be partitioned by {key!r}, which is of the type {kinds[key.lower()]}; partition by "
                f"texts, dates, whole numbers or truth values"
            )
    if columns and len(partitions) >= len(columns):
        raise TableError(f"{name} needs a column that it is not partitioned by")


def folder_name(run: str) -> str:
    """Return a new name of a directory that a try of ``run`` writes into; readers skip it.

    Begins with ``leftovers(run)``.
    """
    return f"{leftovers(run)}{uuid.uuid4().hex[:8]}"


def leftovers(run: str) -> str:
    """Return how the names of directories begin that tries of ``run`` have written into."""
    return f".{MARK}{run}-"


def settled(
    staged: StorageLocation, data: StorageLocation, partitions: Sequence[str], *, folders: bool
) -> tuple[DataFile, ...]:
    """Move what was written into ``staged`` to its place below ``data``; return the files.

    Args:
        staged: the directory that an engine has written into, in directories ``KEY=VALUE`` for each partition column,
            whose values begin with ``v``, or are ``n`` for NULL.
        data: the directory that the files are to be below.
        partitions: the partition columns, in the order of the directories.
        folders: whether files are to lie in a directory ``COLUMN=VALUE`` for each of them.

    Raises:
        TableError: a partition's value is an empty text.
        StorageError: files cannot be moved or read.
    """
    tried = staged.root.rsplit("/", 1)[1].lstrip(".")
    moves: list[tuple[str, StorageLocation, files.FileEntry, tuple[tuple[str, str | None], ...]]] = []
    with translated(f"write data files to {data}"):
        mode = _mode(data) if staged.local else 0
        for info in files.listing(staged.fs(), staged.root, recursive=True):
            if not info.is_file or files.hidden(info.base_name):
                continue
            inside = info.path.rsplit("/", len(partitions) + 1)[1:-1]
            values = tuple(
                (column, _value(folder.partition("=")[2], column, data))
                for column, folder in zip(partitions, inside, strict=True)
            )
            place = data
            for column, value in values if folders else ():
                place = place.under(f"{column}={NULL if value is None else _escaped(value)}")
            path = place.path(f"{tried}-{len(moves):05d}.parquet")
            moves.append((info.path, place, files.FileEntry(path, int(info.size), 0.0), values))
        files.in_parallel(lambda one: _move(staged, one[0], one[1], one[2].path, mode), moves)
        if staged.local:
            for folder in {entry.path.rpartition("/")[0] for _, _, entry, _ in moves}:
                files.sync_folder(folder)
        staged.remove_folder("")
    made = []
    for (_, _, entry, values), metadata in zip(
        moves, opened(data.scheme, [move[2] for move in moves]), strict=True
    ):
        names = {metadata.schema.column(i).path.split(".")[0] for i in range(metadata.num_columns)}
        told = extract(data.scheme, entry, metadata, names)
        made.append(DataFile(data.scheme, entry, sum(told.rows), values, told))
    return tuple(made)


def discard(data: StorageLocation, added: Sequence[DataFile]) -> None:
    """Delete files that were not committed, as far as they can be."""
    with suppress(OSError):
        for file in added:
            with suppress(FileNotFoundError):
                data.fs().delete_file(file.path)


def discard_others(data: StorageLocation, run: str, added: Sequence[DataFile]) -> None:
    """Delete what tries of ``run`` that were lost have left, now that its commit is made: no other can be."""
    kept = {file.path for file in added}
    with suppress(OSError):
        for info in data.entries():
            if not info.is_file and info.base_name.startswith(leftovers(run)):
                data.remove_folder(info.base_name)
        for folder in {path.rpartition("/")[0] for path in kept}:
            for info in files.listing(data.fs(), folder):
                ours = info.is_file and info.base_name.startswith(leftovers(run).lstrip("."))
                if ours and info.path not in kept:
                    data.fs().delete_file(info.path)


def nulls(file: DataFile, column: str) -> int | None:
    """Return how many rows of a file are NULL in a column; ``None`` where its footer does not tell."""
    counts = [bounds.nulls for bounds in file.footer.bounds.get(column, ())]
    return None if not counts or None in counts else sum(count for count in counts if count is not None)


def _value(folder: str, column: str, data: StorageLocation) -> str | None:
    text = unquote(folder)
    if text == "v":
        raise TableError(
            f"{data} is partitioned by {column!r}, which is an empty text in some rows; directories cannot tell it "
            f"from NULL"
        )
    return None if text == "n" else text.removeprefix("v")


def _escaped(text: str) -> str:
    """Return a text as a directory's name has it; Spark takes an escaped byte for a character, so others stay."""
    return "".join(
        sign if not sign.isascii() or sign.isalnum() or sign in "_-., @" else quote(sign, safe="")
        for sign in text
    )


def _mode(data: StorageLocation) -> int:
    """Return the mode of files that others make in a directory: its own without the right to search."""
    os.makedirs(data.root, exist_ok=True)
    if private.is_private(data.root):
        return 0o600 | os.stat(data.root).st_mode & 0o060
    return os.stat(data.root).st_mode & 0o666


def _move(staged: StorageLocation, path: str, place: StorageLocation, to: str, mode: int) -> None:
    if not staged.local:
        staged.fs().move(path, to)
        return
    os.makedirs(place.root, exist_ok=True)
    with suppress(PermissionError):  # of another user's, as executors' may be
        os.chmod(path, mode)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    os.rename(path, to)
