"""Tables and part files of native stages in object storage: tasks reach it by pyarrow's client, and need no JVM's.

A table is an Arrow scan in DuckDB, which asks it for the columns of the statement and for the rows that pass its
simple conditions; row groups that have none by their statistics are not read. A scan holds some row groups' columns.
"""

import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ebbflow.infra.protocols import Relation
from ebbflow.infra.query.duckdb_statements import dataset, selected, written
from ebbflow.infra.query.duckdbtypes import quoted
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.filesystems import filesystem

CANCELLED = ".cancelled"  # in the stage's directory: its tasks are to stop
EVERY = 5  # of a task's looks at whether it is still wanted one that asks object storage
_BATCH = 1 << 16  # rows
_LARGE = (
    64 << 20
)  # bytes of a file that is scanned row group by row group, for which its footer is read first
_AHEAD = 1  # batches, and files, that are read before they are asked for
_TRANSIENT = (
    "NETWORK_CONNECTION", "curlCode", "SLOW_DOWN", "REQUEST_TIMEOUT", "INTERNAL_FAILURE", "SERVICE_UNAVAILABLE",
    "HTTP status 5",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a Parquet file."""

    path: str
    first: int
    last: int  # the last one itself


def transient(message: str) -> bool:
    """Tell whether an error's message is pyarrow's of S3 that another try may not meet."""
    return "AWS Error" in message and any(sign in message for sign in _TRANSIENT)


def register_objects(cursor: Any, relation: Relation, rows: tuple[Rows, ...], test: str) -> None:
    """Make the files of ``relation`` and ``rows`` of other files a view, as ``register_view`` does with files.

    Of what tasks have written the columns are as they are. Raises ``OSError`` and ``ValueError``."""
    source = f"__files_of_{relation.name}"
    cursor.register(source, scanned(relation, rows))
    columns = selected(relation) or "*"
    cursor.execute(
        f"CREATE TEMP VIEW {quoted(relation.name)} AS "
        f"SELECT * FROM (SELECT {columns} FROM {quoted(source)}) WHERE {test}"
    )


def scanned(relation: Relation, rows: tuple[Rows, ...] = ()) -> Any:
    """Return the files of ``relation``, and ``rows`` of other files, as a dataset whose scans read little ahead.

    Raises ``OSError``, and ``ValueError`` for rows that are no whole row groups.
    """
    whole = {file.path: file.size for file in relation.files}
    others = dict.fromkeys(some.path for some in rows)
    files = (*relation.files, *(FileEntry(path, 1, 0.0) for path in others if path not in whole))
    found = dataset(replace(relation, files=files))
    fragments: list[Any] = []
    for fragment in found.get_fragments():
        if fragment.path in whole:  # what is read ahead of a fragment stays in memory until its end
            large = whole[fragment.path] > _LARGE
            fragments += fragment.split_by_row_group() if large else [fragment]
        for some in rows:
            if some.path == fragment.path:
                fragments += _groups(fragment, some)
    return _frugal()(fragments, found.schema, found.format, found.filesystem)


def _groups(fragment: Any, some: Rows) -> list[Any]:
    """Return the row groups of a file that hold ``some`` of its rows, a fragment each."""
    first, found, count = 0, [], 0
    for group in fragment.row_groups:
        if group.num_rows and some.first <= first and first + group.num_rows - 1 <= some.last:
            found.append(group.id)
            count += group.num_rows
        first += group.num_rows
    if count != some.last - some.first + 1:
        raise ValueError(f"{some.path} has other row groups than when it was planned")
    return [fragment.subset(row_group_ids=[number]) for number in found]


@lru_cache(maxsize=1)
def _frugal() -> Any:
    import pyarrow.dataset as ds

    class Frugal(ds.FileSystemDataset):  # type: ignore[misc]
        """What DuckDB scans as any other dataset."""

        def scanner(self, **options: Any) -> Any:
            return super().scanner(
                **options,
                batch_size=_BATCH,
                batch_readahead=_AHEAD,
                fragment_readahead=_AHEAD,
                use_threads=False,  # a task has its cores; requests have threads of their own
            )

    return Frugal


class ObjectParts:
    """The stage's directory in object storage, as one task writes into it; see ``worker.Parts``."""

    def __init__(self, scheme: str, folder: str) -> None:
        self._scheme = scheme
        self._fs = filesystem(scheme)
        self._folder = folder
        self._unfinished = ""
        self._looks = 0
        self._seen = False  # some stores know no empty directory

    def cancelled(self) -> bool:
        mark, folder = self._fs.get_file_info([f"{self._folder}/{CANCELLED}", self._folder])
        gone = self._seen and not _is_there(folder)
        self._seen = self._seen or _is_there(folder)
        return bool(mark.is_file) or gone

    def unwanted(self) -> bool:
        self._looks += 1
        if self._looks % EVERY:
            return False
        with suppress(OSError):  # whether it can be written will be seen
            return self.cancelled()
        return False

    def write(self, cursor: Any, statement: str, name: str, check: Callable[[], None]) -> int:
        self._unfinished = f"{self._folder}/.{name.lstrip('.')}-{uuid.uuid4().hex[:12]}.tmp"
        rows = written(cursor, statement, self._scheme, self._unfinished, check)
        check()
        # closing an upload completes it, after an error too: only the name says that it is whole
        self._fs.move(self._unfinished, f"{self._folder}/{name}")
        return rows

    def clear(self) -> None:
        with suppress(OSError):
            if self._unfinished:
                self._fs.delete_file(self._unfinished)


def _is_there(info: Any) -> bool:
    from pyarrow.fs import FileType

    return bool(info.type != FileType.NotFound)
