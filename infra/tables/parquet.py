"""Parquet files and directories as tables."""

import hashlib
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from ebbflow.infra.errors import StorageError, TableError
from ebbflow.infra.protocols import Relation
from ebbflow.infra.storage import files
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.filesystems import to_uri, translated
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import partitions
from ebbflow.infra.tables.datatypes import spark_type
from ebbflow.infra.tables.filefooters import extract, json_columns, opened
from ebbflow.infra.tables.logs import deletions, iceberg, snapshots
from ebbflow.infra.tables.logs.catalogues import IcebergCatalogue
from ebbflow.infra.tables.logs.snapshots import LogKind

_FORMAT = 1  # of cached columns
_MOST_SEEN = 1000  # tables whose columns are kept in memory
_SUFFIXES = (".parquet", ".parq", ".pq")
_Columns = tuple[tuple[str, str], ...]


class Source(NamedTuple):
    """A table's name, its files, and the columns that its directories give values of; no file was opened."""

    name: str
    files: tuple[FileEntry, ...]
    partitions: _Columns = ()
    log: LogKind | None = None  # the files are those that the log of the table in ``place`` names...
    place: StorageLocation | None = None  # ...or where its catalogue knows it to be


Place = StorageLocation | IcebergCatalogue


def discover(place: Place) -> tuple[Relation, ...]:
    """Return the tables in the directory ``place`` or in a catalogue of Iceberg, sorted by name.

    Each ``NAME.parquet`` file is a table, and so is each sub-folder ``NAME`` or ``NAME.parquet`` that holds
    Parquet files, itself or in partition directories (``k=v``, see ``partitions``), or that is a table of Delta Lake
    or Iceberg. ``place`` may also be one Parquet file, one metadata file of Iceberg, or one such table itself. Hidden
    and other files are skipped. Names need not be identifiers (SQL quotes them) but must differ in more than case.

    Raises ``TableError`` for a missing directory, one without Parquet, a corrupt or empty file, files of one
    table that disagree on a column, directories that disagree on the partition columns, a type that Spark lacks,
    Hudi's tables, and what ``snapshots.opened`` refuses.
    """
    return tuple(table_of(place, source) for source in sources(place))


def sources(place: Place) -> tuple[Source, ...]:
    """Return what ``discover`` would open, sorted by name. Raises ``TableError``."""
    held = _in_directory(place) if isinstance(place, StorageLocation) else _in_catalogue(place)
    _check_names(place, [source.name for source in held])
    return tuple(sorted(held, key=lambda source: source.name.lower()))


def _in_catalogue(catalogue: IcebergCatalogue) -> list[Source]:
    held = [Source(name, (), log="Iceberg") for name in catalogue.tables()]
    if not held:
        raise TableError(f"{catalogue} has no tables")
    return held


def _in_directory(place: StorageLocation) -> list[Source]:
    from pyarrow.fs import FileType

    with translated(f"read the tables in {place}", TableError):
        info = place.fs().get_file_info(place.root)
        if info.is_file and iceberg.is_metadata(info.base_name):
            table = iceberg.folder(place).root.rsplit("/", 1)[-1]
            held = [Source(_stem(table), (), log="Iceberg", place=place)]
        elif info.is_file:
            held = [Source(_stem(info.base_name), (files.entry(info),))]
        else:
            found = place.entries()
            if not found and info.type == FileType.NotFound:
                raise TableError(f"{place} does not exist; name a directory that holds Parquet files")
            if kind := snapshots.log_of(place, found):
                held = [Source(_stem(info.base_name), (), log=kind, place=place)]
            elif _partitioned(found):
                held = [_in_partitions(place, _stem(info.base_name), found)]
            else:
                held = [source for item in found if (source := _source(place, item)) is not None]
    if not held:
        raise TableError(f"{place} holds no Parquet files (*.parquet) and no directories of them")
    return held


def version(relation: Relation) -> str:
    """Return a hash of the relation's file list, sizes and modification times.

    It changes whenever the content, or what it is read as, may have changed; renaming the relation does not change
    it. For an external relation, whose files the engine hides, it covers the name and columns only.
    """
    digest = hashlib.sha256(relation.scheme.encode())
    if relation.external:
        digest.update(repr((relation.name, relation.columns)).encode())
    if relation.partitions or relation.log:
        digest.update(repr((relation.partitions, relation.columns)).encode())
    if relation.json:
        digest.update(repr(relation.json).encode())
    if relation.log:  # its files never change: not the log's version counts, but what is read of it
        digest.update(repr((relation.log.format, relation.log.stored, relation.log.ids)).encode())
        for path, rows in sorted(deletions.of(relation).items()):
            digest.update(f"\0{path}\0".encode() + rows)
    for file in sorted(relation.files, key=lambda f: f.path):
        digest.update(f"\0{file.path}\0{file.size}\0{file.modified!r}".encode())
    return digest.hexdigest()[:32]


def source_at(place: StorageLocation) -> Source | None:
    """Return the table that the directory ``place`` is; ``None`` where it is missing or holds no Parquet files.

    Raises ``TableError`` for what ``discover`` refuses.
    """
    with translated(f"read the table in {place}", TableError):
        info = place.fs().get_file_info(place.root)
        if info.is_file:
            raise TableError(f"{place} is a file; name a directory")
        above = StorageLocation(place.uri.rstrip("/").rpartition("/")[0])
        return _source(above, info)


def _source(place: StorageLocation, info: Any) -> Source | None:
    """Return the table that one entry of the directory ``place`` is, or ``None`` when it is none."""
    if files.hidden(info.base_name):
        return None
    if info.is_file:
        single = Source(_stem(info.base_name), (files.entry(info),))
        return single if _is_parquet(info.base_name) else None
    folder = place.under(info.base_name)
    inside = folder.entries()
    if kind := snapshots.log_of(folder, inside):
        return Source(_stem(info.base_name), (), log=kind, place=folder)
    if _partitioned(inside):
        return _in_partitions(folder, _stem(info.base_name), inside)
    entries = tuple(
        files.entry(i)
        for i in inside
        if i.is_file and _is_parquet(i.base_name) and not files.hidden(i.base_name)
    )
    for item in (i for i in inside if not i.is_file):
        _check_format(folder, item)
    return Source(_stem(info.base_name), entries) if entries else None


def _partitioned(inside: Sequence[Any]) -> bool:
    return any(not i.is_file and partitions.is_partition(i.base_name) for i in inside)


def _in_partitions(folder: StorageLocation, name: str, inside: Sequence[Any]) -> Source:
    """Return the table whose files are in partition directories below ``folder``."""
    for item in inside:
        if item.is_file and _is_parquet(item.base_name) and not files.hidden(item.base_name):
            raise TableError(
                f"{folder.uri} holds the file {item.base_name} beside partition directories, where it has no value "
                f"of their columns; move it into one of them"
            )
        if not item.is_file and not partitions.is_partition(item.base_name):
            _check_format(folder, item)
    root = folder.root.rstrip("/")
    found: list[FileEntry] = []
    folders: dict[str, None] = {}
    for item in files.listing(folder.fs(), root, recursive=True):
        parent, _, _ = item.path.removeprefix(f"{root}/").rpartition("/")
        if (
            item.is_file
            and _is_parquet(item.base_name)
            and not any(map(files.hidden, item.path.removeprefix(f"{root}/").split("/")))
        ):
            found.append(files.entry(item))
            folders[parent] = None
    if not found:
        raise TableError(f"{folder.uri} holds partition directories, and no Parquet files in them")
    columns = partitions.columns(name, list(folders))
    return Source(name, tuple(found), columns)


def _check_format(table: StorageLocation, folder: Any) -> None:
    """Refuse a directory inside the directory of a table that changes what the table's rows are."""
    name = folder.base_name
    if name == ".hoodie":
        raise TableError(
            f"{table.uri} is a Hudi table; its log decides which files count, "
            f"so read it through the engine's catalogue or export it to plain Parquet"
        )
    if not files.hidden(name) and any(_is_parquet(i.base_name) for i in table.entries(name) if i.is_file):
        raise TableError(
            f"{table.uri} holds Parquet in the nested directory {name!r}; a table is one directory of files"
        )


def table_of(
    place: Place,
    source: Source,
    names: Collection[str] | None = (),
    cache: JsonStore | None = None,
    *,
    at: str = "",
    pinned: str = "",
    json: bool = False,
) -> Relation:
    """Return the table that ``source`` of ``place`` is.

    Its files are opened unless this process or ``cache`` knows the columns of just these. Then what they say of the
    columns ``names`` (in lower case; ``None``: all) is kept in memory for ``filefooters.read_footers``. A table with
    a log is that of the version or time ``at``, or of the version ``pinned``; see ``snapshots.opened``. With ``json``
    a table without one tells of its columns of JSON. Raises ``TableError``.
    """
    if source.log is not None:
        there = place.place(source.name) if isinstance(place, IcebergCatalogue) else source.place or place
        found = snapshots.opened(there, source.name, source.log, at, pinned).relation
        if found.partitions and found.files:
            _check_above(found)
        return found
    if at:
        raise TableError(
            f"the table {source.name!r} has no versions, as it is plain Parquet; leave out at (--at)"
        )
    assert isinstance(place, StorageLocation)
    key = _key(place.scheme, source.files, tuple(name for name, _ in source.partitions))
    known = _seen.get(key) or (_decoded(cache.get(key)) if cache is not None else None)
    if known is None:
        known = _opened(place.scheme, source, names)
        if len(_seen) >= _MOST_SEEN:
            _seen.clear()
        _seen[key] = known
    found = _table(place.scheme, source, known)
    return replace(found, json=json_columns(found)) if json else found


def keep_columns(relation: Relation, cache: JsonStore) -> None:
    """Let ``cache`` know the columns of a table whose files this process has opened, for ``table_of``."""
    if relation.external or relation.log is not None:
        return
    key = _key(relation.scheme, relation.files, relation.partitions)
    if key in _seen and cache.get(key) is None:
        with suppress(StorageError):  # a cache only
            cache.put(key, _seen[key])


def _key(scheme: str, entries: tuple[FileEntry, ...], names: tuple[str, ...]) -> str:
    return f"columns/{_FORMAT}/{version(Relation('', scheme, entries, (), partitions=names))}"


_seen: dict[str, _Columns] = {}  # by this process


def _decoded(raw: Any) -> _Columns | None:
    try:
        return tuple((str(name), str(kind)) for name, kind in raw) or None
    except (TypeError, ValueError):
        return None


def _opened(scheme: str, source: Source, names: Collection[str] | None) -> _Columns:
    """Return the columns that all files have."""
    first: Any = None
    columns: _Columns = ()
    for file, metadata in zip(source.files, opened(scheme, source.files), strict=True):
        # what Arrow makes of a schema depends on these two alone
        if first is None or not (
            metadata.schema.equals(first.schema) and metadata.metadata == first.metadata
        ):
            found = _columns(to_uri(file.path, scheme), source.name, metadata)
            if first is None:
                first, columns = metadata, found
            elif found != columns:
                uri, other = to_uri(file.path, scheme), to_uri(source.files[0].path, scheme)
                raise TableError(_disagreement(source.name, uri, found, other, columns))
        extract(scheme, file, metadata, [n for n, _ in columns if names is None or n.lower() in names])
    return columns


def _table(scheme: str, source: Source, columns: _Columns) -> Relation:
    name, entries = source.name, source.files
    named = {column.lower() for column, _ in columns}
    if both := [column for column, _ in source.partitions if column.lower() in named]:
        raise TableError(
            f"the column {both[0]!r} of table {name!r} is in its files and in its partition directories; keep one"
        )
    relation = Relation(
        name,
        scheme,
        entries,
        (*columns, *sorted(source.partitions)),
        partitions=tuple(column for column, _ in source.partitions),
    )
    if source.partitions:
        _check_above(relation)
    return relation


def _check_above(relation: Relation) -> None:
    """Refuse a place whose own path would give a column another value: engines read it as partition directories."""
    root = partitions.root(relation)
    named = {column.lower() for column, _ in relation.columns}
    for part in root.split("/"):
        if partitions.is_partition(part) and part.partition("=")[0].lower() in named:
            raise TableError(
                f"table {relation.name!r} lies in the directory {part}, which engines take for a value of its "
                f"column; move the table elsewhere"
            )


def _columns(uri: str, table: str, metadata: Any) -> _Columns:
    with translated(f"read the schema of {uri}", TableError):
        schema = metadata.schema.to_arrow_schema()
        physical = {
            c.path: c.physical_type for c in (metadata.schema.column(i) for i in range(metadata.num_columns))
        }
    columns = []
    for field in schema:
        # INT96 is how older Spark wrote timestamps; Arrow shows it in nanoseconds
        dtype = "timestamp" if physical.get(field.name) == "INT96" else spark_type(field.type)
        if dtype is None:
            raise TableError(
                f"column {field.name!r} of table {table!r} ({uri}) has the type {field.type}, which "
                f"Spark SQL lacks; write it as another type, such as timestamps in microseconds"
            )
        columns.append((str(field.name), dtype))
    seen: set[str] = set()
    for column, _ in columns:
        if column.lower() in seen:
            raise TableError(
                f"table {table!r} ({uri}) has two columns {column!r}; names must differ in any case"
            )
        seen.add(column.lower())
    if not columns:
        raise TableError(f"table {table!r} ({uri}) has no columns")
    return tuple(columns)


def _disagreement(table: str, uri: str, ours: _Columns, other: str, theirs: _Columns) -> str:
    """Return how the columns of the file ``uri`` differ from those of ``other``."""
    start = f"the files of table {table!r} disagree: {uri} has "
    types = dict(theirs)
    for name, dtype in ours:
        if name not in types:
            return f"{start}the column {name!r}, {other} has not; all files must have the same columns"
        if types[name] != dtype:
            return f"{start}{name!r} as {dtype}, {other} has it as {types[name]}; all files must agree"
    missing = sorted(types.keys() - dict(ours).keys())
    if missing:
        return f"{start}no column {missing[0]!r}, {other} has it; all files must have the same columns"
    return f"{start}its columns in another order than {other}; write them in one order"


def _check_names(place: Place, names: Sequence[str]) -> None:
    seen: dict[str, str] = {}
    for name in names:
        if name.lower() in seen:
            raise TableError(
                f"{place} holds two tables {seen[name.lower()]!r} and {name!r}; names must differ in any case"
            )
        seen[name.lower()] = name


def _is_parquet(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES)


def _stem(name: str) -> str:
    return name.rsplit(".", 1)[0] if _is_parquet(name) else name
