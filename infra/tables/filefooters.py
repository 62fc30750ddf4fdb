"""Footers of Parquet files: whole ones of few files, and of many files what planning needs of them."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from ebbflow.infra.errors import TableError
from ebbflow.infra.protocols import Relation
from ebbflow.infra.storage import files
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.filesystems import filesystem, to_uri, translated

_KEPT = 200_000  # statistics of column chunks kept in memory, some 200 bytes each


class Bounds(NamedTuple):
    """What a footer says of one column in one row group."""

    nulls: int | None  # rows without a value, where it tells
    low: Any = None  # smallest and greatest value, where it tells both
    high: Any = None


@dataclass(slots=True)
class FileFooter:
    """What a footer says of some columns."""

    rows: tuple[int, ...]  # per row group
    bounds: dict[str, tuple[Bounds, ...]] = field(default_factory=dict)  # per row group, by column
    unpacked: dict[str, int] = field(default_factory=dict)  # bytes, uncompressed but encoded, by column


@lru_cache(maxsize=64)
def footer(scheme: str, file: FileEntry) -> Any:
    """Return a file's ``pyarrow.parquet.FileMetaData``. Raises ``TableError`` when it is not Parquet."""
    return _opened(scheme, file)


def json_columns(relation: Relation) -> tuple[str, ...]:
    """Return the columns of text that the first file of ``relation`` marks as JSON. Raises ``TableError``."""
    texts = [name for name, kind in relation.columns if kind == "string" and name not in relation.partitions]
    if not texts or not relation.files:
        return ()
    schema = footer(relation.scheme, relation.files[0]).schema
    columns = (schema.column(place) for place in range(len(schema)))
    marked = {column.path for column in columns if column.logical_type.type == "JSON"}
    return tuple(name for name in texts if name in marked)


def _opened(scheme: str, file: FileEntry) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    uri = to_uri(file.path, scheme)
    if file.size == 0:
        raise TableError(f"{uri} is empty; a Parquet file has at least a footer, delete it or write it again")
    with translated(f"read {uri} as Parquet", TableError):
        local = scheme == "file"
        with pa.OSFile(file.path) if local else filesystem(scheme).open_input_file(file.path) as source:
            return pq.ParquetFile(source).metadata


def read_footers(relation: Relation, names: Collection[str]) -> list[FileFooter]:
    """Return of each file of ``relation`` what its footer says of the columns ``names``.

    What was read before in this process is not read again. Raises ``TableError``.
    """
    wanted = frozenset(names).difference(relation.partitions)
    found = {file: _known.get((relation.scheme, file)) for file in relation.files}
    missing = [file for file, told in found.items() if told is None or not wanted <= told.bounds.keys()]
    for file, metadata in zip(missing, opened(relation.scheme, missing), strict=True):
        found[file] = extract(relation.scheme, file, metadata, wanted)
    return [told for file in relation.files if (told := found[file]) is not None]


def opened(scheme: str, entries: Sequence[FileEntry]) -> Iterable[Any]:
    """Return the footers of files, in order.

    Those in object storage are read a few at a time; of local files reading takes no longer than the interpreter
    takes to hand it to another thread.
    """
    if scheme == "file":
        return (_opened(scheme, file) for file in entries)
    return files.in_parallel(lambda file: _opened(scheme, file), entries)


def extract(scheme: str, file: FileEntry, metadata: Any, names: Collection[str]) -> FileFooter:
    """Return, and keep in memory, what ``metadata`` says of the columns ``names``."""
    told = FileFooter(tuple(metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)))
    chunks: dict[str, list[Bounds]] = {name: [] for name in names}
    told.unpacked = dict.fromkeys(names, 0)
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    flat = [(i, path) for i, path in enumerate(paths) if path in chunks]
    nested = [
        (i, top) for i, path in enumerate(paths) if (top := path.split(".")[0]) in chunks and top != path
    ]
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for i, name in flat:
            chunk = group.column(i)
            chunks[name].append(_bounds(chunk.statistics))
            told.unpacked[name] += chunk.total_uncompressed_size
        for i, name in nested:
            told.unpacked[name] += group.column(i).total_uncompressed_size
    unknown = (Bounds(None),) * len(told.rows)
    told.bounds = {name: tuple(found) or unknown for name, found in chunks.items()}
    with _lock:
        _known[scheme, file] = told
        _known.move_to_end((scheme, file))
        _trim()
    return told


def _bounds(statistics: Any) -> Bounds:
    if statistics is None:
        return Bounds(None)
    nulls = statistics.null_count if statistics.has_null_count else None
    if not statistics.has_min_max:
        return Bounds(nulls)
    try:
        return Bounds(nulls, statistics.min, statistics.max)
    except (OverflowError, ValueError):  # dates before the year 1 or after 9999, which Python has not
        return Bounds(nulls)


_known: OrderedDict[tuple[str, FileEntry], FileFooter] = OrderedDict()
_lock = threading.Lock()  # held while it is changed


def _trim() -> None:
    while len(_known) > 1 and sum(map(len, _known[next(iter(_known))].bounds.values())) * len(_known) > _KEPT:
        _known.popitem(last=False)
