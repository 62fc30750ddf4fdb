"""Iceberg tables by path: the files of one snapshot and what the manifests say of them.

After the "Iceberg Table Spec" of Apache Iceberg, read by the library ``pyiceberg``. What changes rows beyond the list
of files is refused. Columns are known by ids, while engines find them by names: see ``fieldids``.
"""

import os
import re
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from typing import Any, Final

from ebbflow.infra.errors import TableError
from ebbflow.infra.packages import require
from ebbflow.infra.protocols import Relation, TableLog
from ebbflow.infra.storage.files import FileEntry, in_parallel
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.datatypes import spark_type
from ebbflow.infra.tables.filefooters import Bounds
from ebbflow.infra.tables.logs import deletions
from ebbflow.infra.tables.logs.fieldids import places
from ebbflow.infra.tables.logs.versions import EXTRA, TIMEOUTS, Snapshot, moment, refused, s3_settings, shown
from ebbflow.planners.errors import EbbflowError

_KIND: Final = "Iceberg"
_METADATA = re.compile(r"(?:v([0-9]+)|([0-9]+)-.+?)(?:\.gz)?\.metadata\.json(?:\.gz)?")
_HINT = "metadata/version-hint.text"
_EPOCH = date(1970, 1, 1)


def is_metadata(name: str) -> bool:
    """Tell whether a file's name is that of a table's metadata."""
    return _METADATA.fullmatch(name) is not None


def folder(place: StorageLocation) -> StorageLocation:
    """Return the directory of the table that ``place``, which may be its metadata file, is."""
    if not is_metadata(place.root.rsplit("/", 1)[-1]):
        return place
    above = place.uri.rsplit("/", 2)[0]
    return StorageLocation(above)


def opened(place: StorageLocation, name: str, at: str = "", pinned: str = "") -> Snapshot:
    """Return the table in the directory ``place``, or of the metadata file ``place``; see ``delta.opened``.

    A version is a snapshot's id. Of a directory the newest metadata file counts, as ``version-hint.text`` has it or
    else by its number.
    """
    require("pyiceberg", f"the table {name!r} is one of Iceberg, which", EXTRA)
    with library_errors(name, place):
        table = _table(place, name)
        metadata = table.metadata
        newest = f"{metadata.current_snapshot_id or 0}.{metadata.current_schema_id}"
        version = pinned or (_version(metadata, name, moment(at)) if at else newest)
        snapshot, schema = (int(part) for part in version.split("."))
        return _snapshot(place, name, table, snapshot, schema, newest)


def _table(place: StorageLocation, name: str) -> Any:
    from pyiceberg.catalog.noop import NoopCatalog
    from pyiceberg.io.pyarrow import PyArrowFileIO
    from pyiceberg.serializers import FromInputFile
    from pyiceberg.table import Table

    # the table's own properties have no say in how it is reached
    io = PyArrowFileIO(_settings(place))
    location = _newest(place, name)
    metadata = FromInputFile.table_metadata(io.new_input(location))
    there = plain_path(metadata.location)
    root = folder(place).root.rstrip("/")
    if there != root and not (place.local and os.path.realpath(there) == os.path.realpath(root)):
        raise refused(
            name,
            _KIND,
            f"was written for {metadata.location} and lies in {root}",
            "open it where it was written",
        )
    return Table(("table", name), metadata, location, io, NoopCatalog("path"))


def _settings(place: StorageLocation) -> dict[str, str]:
    if place.local:
        return {}
    said, (connect, request) = s3_settings(), TIMEOUTS
    known = {
        "s3.endpoint": "AWS_ENDPOINT_URL",
        "s3.region": "AWS_REGION",
        "s3.access-key-id": "AWS_ACCESS_KEY_ID",
        "s3.secret-access-key": "AWS_SECRET_ACCESS_KEY",
        "s3.session-token": "AWS_SESSION_TOKEN",
    }
    return {
        **{name: said[variable] for name, variable in known.items() if variable in said},
        "s3.connect-timeout": connect,
        "s3.request-timeout": request,
    }


def _newest(place: StorageLocation, name: str) -> str:
    """Return where the table's metadata is: two files of one number are no answer, since one is not committed."""
    if is_metadata(place.root.rsplit("/", 1)[-1]):
        return place.root if place.local else place.uri
    with translated(f"read {place.uri_of('metadata')}", TableError):
        if place.is_file(_HINT):
            said = place.read(_HINT).decode(errors="replace").strip()
            numbered = f"v{said}.metadata.json" if said.isdecimal() else f"{said}.metadata.json"
            found = said if is_metadata(said) else numbered
        else:
            numbers = {
                info.base_name: int(match.group(1) or match.group(2))
                for info in place.entries("metadata")
                if info.is_file and (match := _METADATA.fullmatch(info.base_name))
            }
            last = max(numbers.values())
            newest = sorted(file for file, number in numbers.items() if number == last)
            if len(newest) > 1:
                raise TableError(
                    f"the {_KIND} table {name!r} has {len(newest)} newest metadata files ({', '.join(newest)}), of "
                    f"which its catalogue knows one; name that file as the table"
                )
            found = newest[0]
    return place.path(f"metadata/{found}") if place.local else place.uri_of(f"metadata/{found}")


def _version(metadata: Any, name: str, wanted: int | datetime) -> str:
    """Return the version that a snapshot's id or a time names: of a time, the one that was current then."""
    if isinstance(wanted, datetime):
        limit = wanted.timestamp() * 1000
        log = sorted((int(entry.timestamp_ms), int(entry.snapshot_id)) for entry in metadata.snapshot_log)
        before = [snapshot for committed, snapshot in log if committed <= limit]
        if not before:
            since = f"its first is of {shown(log[0][0])}" if log else "it has none"
            raise TableError(
                f"the {_KIND} table {name!r} has no snapshot as old as {wanted.isoformat(' ')}; {since}"
            )
        wanted = before[-1]
    found = next((one for one in metadata.snapshots if one.snapshot_id == wanted), None)
    if found is None:
        known = ", ".join(str(one.snapshot_id) for one in metadata.snapshots[-5:]) or "none"
        raise TableError(f"the {_KIND} table {name!r} has no snapshot {wanted}; its last are {known}")
    schema = metadata.current_schema_id if found.schema_id is None else found.schema_id
    return f"{wanted}.{schema}"


def _snapshot(
    place: StorageLocation, name: str, table: Any, snapshot: int, schema_id: int, newest: str
) -> Snapshot:
    schema = next((one for one in table.metadata.schemas if one.schema_id == schema_id), None)
    if schema is None:
        raise TableError(f"the {_KIND} table {name!r} does not know its schema {schema_id} any more")
    columns = columns_of(name, schema)
    found = []
    if snapshot:
        if all(one.snapshot_id != snapshot for one in table.metadata.snapshots):
            raise TableError(f"the {_KIND} table {name!r} has no snapshot {snapshot} any more")
        found = sorted(_planned(name, table, snapshot), key=lambda task: task.file.file_path)
    root = plain_path(table.metadata.location)
    for task in found:
        _check(name, root, task)
    data = [task.file for task in found]
    # where the table is reached by a link, its files are, too
    files = tuple(
        FileEntry(
            path_of(place, root, one),
            int(one.file_size_in_bytes),
            0.0,
        )
        for one in data
    )
    found_at = places(place.scheme, name, table.metadata, schema, files)
    named = {there for _, there in found_at.stored}.union(column for column, _ in columns)
    deleted = _deleted(place, root, name, table.io, found, named)
    rows = tuple(int(one.record_count) for one in data)
    deletions.check_files(name, {file.path: rows[n] for n, file in enumerate(files)}, deleted)
    log = TableLog(_KIND, place.root, f"{snapshot}.{schema_id}", found_at.stored, found_at.ids, deleted)
    relation = Relation(name, place.scheme, files, columns, log=log)
    fields = {str(field.name): field for field in schema.fields}

    def bounds(column: str, kind: str) -> tuple[Bounds, ...]:
        return tuple(_bounds(one, fields[column]) for one in data)

    return Snapshot(relation, newest, rows, bounds, _keys(table.specs(), schema, data))


def _planned(name: str, table: Any, snapshot: int) -> list[Any]:
    try:
        return list(table.scan(snapshot_id=snapshot).plan_files())
    except ValueError as error:
        if "equality deletes" not in str(error):
            raise
        raise refused(
            name,
            _KIND,
            "has rows deleted by their values (equality deletes)",
            "rewrite its data files (rewrite_data_files)",
        ) from error


def _deleted(
    place: StorageLocation, root: str, name: str, io: Any, tasks: Sequence[Any], columns: Collection[str]
) -> deletions.Deleted:
    """Return the rows that position deletes and deletion vectors delete: of each file those of the delete files that
    apply to it. Raises ``TableError`` for what cannot be left out."""
    import numpy as np

    used = list({one.file_path: one for task in tasks for one in task.delete_files}.values())
    found = in_parallel(lambda one: _positions(name, io, one), used)
    known = {one.file_path: said for one, said in zip(used, found, strict=True)}
    rows = {}
    for task in tasks:
        apply = [
            known[path].get(task.file.file_path) for path in {one.file_path for one in task.delete_files}
        ]
        if some := [numbers for numbers in apply if numbers is not None]:
            rows[path_of(place, root, task.file)] = np.concatenate(some)
    return deletions.packed(name, _KIND, place.scheme, columns, rows)


def _positions(name: str, io: Any, file: Any) -> dict[str, Any]:
    """Return the row numbers that a delete file deletes, by the paths of data files as the table has them."""
    import pyarrow.parquet as pq
    from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
    from pyiceberg.table.puffin import PuffinFile

    with io.new_input(file.file_path).open() as source:
        if file.file_format.name == "PUFFIN":
            vectors = deletion_vectors_from_puffin_file(PuffinFile(source.read()))
            return {one.referenced_data_file: one.to_vector().to_numpy() for one in vectors}
        if file.file_format.name != "PARQUET":
            raise refused(
                name, _KIND, f"has delete files of {file.file_format.name}", "rewrite its data files"
            )
        if int(file.record_count) > deletions.MOST:
            raise refused(name, _KIND, f"has over {deletions.MOST:,} rows in a delete file", "rewrite it")
        table = pq.read_table(source, columns=["file_path", "pos"])
    order = table.combine_chunks().sort_by("file_path")
    paths = order.column("file_path").combine_chunks().dictionary_encode()
    numbers = order.column("pos").to_numpy()
    if not len(numbers):
        return {}
    codes = paths.indices.to_numpy()
    starts = _starts(codes)
    names = paths.dictionary.to_pylist()
    return {names[codes[a]]: numbers[a:b] for a, b in zip(starts, [*starts[1:], len(codes)], strict=True)}


def _starts(codes: Any) -> list[int]:
    """Return where runs of equal values begin in an array that is not empty."""
    import numpy as np

    return [0, *(int(n) + 1 for n in np.flatnonzero(np.diff(codes)))]


def _check(name: str, root: str, task: Any) -> None:
    """Refuse what no list of files can honour."""
    file = task.file
    if file.file_format.name != "PARQUET":
        raise refused(name, _KIND, f"has files of {file.file_format.name}", "rewrite them as Parquet")
    if file.key_metadata is not None:
        raise refused(name, _KIND, "has encrypted files", "write it without encryption")
    path = plain_path(file.file_path)
    if not path.startswith(f"{root}/") or ".." in path.split("/"):
        raise refused(
            name,
            _KIND,
            f"has a file outside of its directory ({file.file_path:.200})",
            "write its data below that",
        )


def columns_of(name: str, schema: Any) -> tuple[tuple[str, str], ...]:
    """Return (name, Spark SQL type) of the columns of the table ``name``. Raises ``TableError``."""
    from pyiceberg.io.pyarrow import schema_to_pyarrow
    from pyiceberg.schema import index_by_id
    from pyiceberg.types import UUIDType

    for field in index_by_id(schema).values():
        if isinstance(field.field_type, UUIDType):
            raise TableError(
                f"column {field.name!r} of the {_KIND} table {name!r} is a uuid, which Spark SQL lacks"
            )
        if getattr(field, "initial_default", None) is not None:
            raise refused(
                name,
                _KIND,
                f"has a default for rows older than the column {field.name!r}",
                "rewrite its data files",
            )
    columns = []
    seen: set[str] = set()
    for field in schema_to_pyarrow(schema, include_field_ids=False):
        kind = spark_type(field.type)
        if kind is None:
            raise TableError(
                f"column {field.name!r} of the {_KIND} table {name!r} has the type {field.type}, which Spark SQL "
                f"lacks"
            )
        if field.name.lower() in seen:
            raise TableError(
                f"the {_KIND} table {name!r} has two columns {field.name!r}; names must differ in any case"
            )
        seen.add(field.name.lower())
        columns.append((str(field.name), kind))
    return tuple(columns)


# --- what manifests say ----------------------------------------------------------------------------------


def _bounds(file: Any, field: Any) -> Bounds:
    from pyiceberg.conversions import from_bytes
    from pyiceberg.types import PrimitiveType

    number, kind = field.field_id, field.field_type
    if not isinstance(kind, PrimitiveType):
        return Bounds(None)
    nulls = (file.null_value_counts or {}).get(number)
    low, high = (file.lower_bounds or {}).get(number), (file.upper_bounds or {}).get(number)
    if low is None or high is None:
        return Bounds(nulls)
    try:
        return Bounds(nulls, _plain(from_bytes(kind, low), kind), _plain(from_bytes(kind, high), kind))
    except (
        struct.error,
        ValueError,
        TypeError,
        OverflowError,
        ArithmeticError,
    ):  # written as another, narrower type
        return Bounds(nulls)


def _keys(specs: Mapping[int, Any], schema: Any, data: Sequence[Any]) -> dict[str, tuple[Any, ...]]:
    """Return the columns by whose values all files are partitioned, with their value in each."""
    from pyiceberg.transforms import IdentityTransform

    used = {one.spec_id: specs[one.spec_id] for one in data}
    found: dict[str, tuple[Any, ...]] = {}
    for field in schema.fields:
        places = {
            number: position
            for number, spec in used.items()
            for position, part in enumerate(spec.fields)
            if part.source_id == field.field_id and isinstance(part.transform, IdentityTransform)
        }
        if used and len(places) == len(used):
            kind = field.field_type
            found[str(field.name)] = tuple(_plain(one.partition[places[one.spec_id]], kind) for one in data)
    return found


def _plain(value: Any, kind: Any) -> Any:
    """Return a value of a manifest as Python has it: days and microseconds as dates and times."""
    from pyiceberg.types import DateType, TimestampType, TimestamptzType

    if not isinstance(value, int):
        return value
    if isinstance(kind, DateType):
        return _EPOCH + timedelta(days=value)
    if isinstance(kind, TimestampType | TimestamptzType):
        found = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=value)
        return found if isinstance(kind, TimestamptzType) else found.replace(tzinfo=None)
    return value


def path_of(place: StorageLocation, root: str, file: Any) -> str:
    """Return the path of a data file of the table in ``place``, which was written for ``root``."""
    return folder(place).path(plain_path(file.file_path).removeprefix(f"{root}/"))


def plain_path(uri: str) -> str:
    """Return a location of the table's as a path: nothing in it is percent-encoded."""
    for start in ("file://", "file:", "s3://", "s3a://", "s3n://"):
        if uri.startswith(start):
            return uri.removeprefix(start).rstrip("/")
    return uri.rstrip("/")


@contextmanager
def library_errors(name: str, place: StorageLocation) -> Iterator[None]:
    """Turn the library's errors as it reads a table into ``TableError``. Our own pass."""
    try:
        yield
    except EbbflowError:
        raise
    except Exception as error:  # the library has many kinds, with nothing in common
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TableError(
            f"cannot read the metadata of the {_KIND} table {name!r} ({place}): {said}"
        ) from error
