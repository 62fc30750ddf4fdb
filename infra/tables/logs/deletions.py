"""Rows of data files that a log says are deleted: their positions, few bytes each, as a relation has them.

Delta Lake's deletion vectors, and Iceberg's position deletes and deletion vectors, name rows by their numbers in the
file, from 0. Engines leave them out as they read.
"""

import struct
import zlib
from collections.abc import Collection, Mapping
from typing import Any

from ebbflow.infra.errors import TableError
from ebbflow.infra.protocols import Relation
from ebbflow.infra.tables.logs.versions import refused

MOST = 20_000_000  # deleted rows of one table: about 1.5 bytes each in a plan, 16 in DuckDB's memory
_RESERVED = frozenset({"file_row_number", "_metadata"})  # names by which engines tell a row's number
_PATTERN = frozenset("*?[]{}\\")  # in a path: such files are not read by DuckDB itself, which numbers rows
_COUNT = struct.Struct("<q")

Deleted = tuple[tuple[str, bytes], ...]  # paths of files with their deleted rows, as ``packed``


def packed(table: str, kind: str, scheme: str, columns: Collection[str], rows: Mapping[str, Any]) -> Deleted:
    """Return the deleted ``rows`` of files, by path, as ``TableLog.deleted`` has them, without files that have none.

    Args:
        table: the table's name, for errors.
        kind: its format.
        scheme: where its files are.
        columns: the names of its columns in the files.
        rows: arrays of row numbers, in any order, some perhaps twice.

    Raises:
        TableError: there are more than ``MOST``, or engines cannot number the rows of such files.
    """
    import numpy as np

    found, total = [], 0
    for path, numbers in sorted(rows.items()):
        sorted_ = np.unique(np.asarray(numbers, dtype=np.int64))
        if not len(sorted_):
            continue
        total += len(sorted_)
        _check(table, kind, scheme, columns, path, total)
        steps = np.diff(sorted_, prepend=0)
        content = _COUNT.pack(len(sorted_)) + zlib.compress(steps.astype(np.uint64).tobytes(), 1)
        found.append((path, content))
    return tuple(found)


def _check(table: str, kind: str, scheme: str, columns: Collection[str], path: str, total: int) -> None:
    remedy = "rewrite its data files without them"
    if total > MOST:
        raise refused(table, kind, f"has more than {MOST:,} deleted rows", remedy)
    if scheme == "file" and _PATTERN & set(path):
        raise refused(table, kind, f"has deleted rows in a file whose name is a pattern ({path})", remedy)
    if taken := sorted(name for name in columns if name.lower() in _RESERVED):
        raise refused(table, kind, f"has deleted rows and a column {taken[0]!r}", remedy)


def count(content: bytes) -> int:
    """Return how many rows of a file are deleted."""
    return int(_COUNT.unpack_from(content)[0])


def numbers(content: bytes) -> Any:
    """Return the numbers of the deleted rows of a file, ascending, as an array of 64-bit integers."""
    import numpy as np

    steps = np.frombuffer(zlib.decompress(content[_COUNT.size :]), dtype=np.uint64)
    return np.cumsum(steps.astype(np.int64))


def without(batch: Any, first: int, deleted: Any) -> Any:
    """Return the rows of a batch, which begins at the row ``first`` of its file, whose numbers are not among those
    ``deleted``, which ascend."""
    import numpy as np

    low, high = np.searchsorted(deleted, [first, first + batch.num_rows])
    kept = np.ones(batch.num_rows, dtype=bool)
    kept[deleted[low:high] - first] = False
    return batch.filter(kept)


def words(content: bytes) -> tuple[Any, Any]:
    """Return the deleted rows of a file as a bit map: row n is bit n % 64 of the signed 64-bit integer n // 64.

    Of these integers only those that are not 0: their numbers, ascending, and they themselves.
    """
    import numpy as np

    rows = numbers(content)
    at = rows // 64
    starts = np.flatnonzero(np.diff(at, prepend=-1))
    bits = np.left_shift(np.uint64(1), (rows % 64).astype(np.uint64))
    return at[starts], np.bitwise_or.reduceat(bits, starts).view(np.int64)


def of(relation: Relation) -> dict[str, bytes]:
    """Return the deleted rows of those files of ``relation`` that have some, by path."""
    if relation.log is None or not relation.log.deleted:
        return {}
    there = {file.path for file in relation.files}
    return {path: content for path, content in relation.log.deleted if path in there}


def check_files(table: str, files: Mapping[str, int | None], deleted: Deleted) -> None:
    """Raise ``TableError`` where a row is deleted of a file that is none of the table's ``files``, whose deleted rows
    would come back, or that its file, of so many rows, does not have."""
    for path, content in deleted:
        if path not in files:
            raise TableError(
                f"the table {table!r} says that rows of {path} are deleted, which is no file of it"
            )
        rows, last = files[path], int(numbers(content)[-1])
        if rows is not None and last >= rows:
            raise TableError(
                f"the table {table!r} says that row {last} of {path} is deleted, which has {rows}"
            )
