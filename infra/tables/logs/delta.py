"""Delta Lake tables: the files of one version and what the log says of them.

After the protocol's specification, "Delta Transaction Log Protocol" of the Delta Lake project, read by the library
``deltalake``. What changes rows beyond the list of files is honoured or refused, see ``_check``.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final
from urllib.parse import unquote

from ebbflow.infra.errors import TableError
from ebbflow.infra.packages import require
from ebbflow.infra.protocols import Relation, TableLog
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import partitions
from ebbflow.infra.tables.datatypes import spark_type
from ebbflow.infra.tables.filefooters import Bounds
from ebbflow.infra.tables.logs import deletions
from ebbflow.infra.tables.logs.versions import EXTRA, TIMEOUTS, Snapshot, moment, refused, s3_settings, shown

_KIND: Final = "Delta Lake"
# what a reader need not do anything for
_HARMLESS = frozenset(
    {"timestampNtz", "vacuumProtocolCheck", "v2Checkpoint", "columnMapping", "deletionVectors"}
)
_HARMLESS_IF_UNUSED = ("variantType", "variantType-preview")  # a column of that type is refused as such
_LATEST_READER = 3


def opened(place: StorageLocation, name: str, at: str = "", pinned: str = "") -> Snapshot:
    """Return the table in the directory ``place`` as of ``at`` (a version or a time), or of the version ``pinned``,
    which was found before; of its newest without either.

    Raises ``TableError`` for an unknown version and for features that are refused, ``EngineUnavailableError``
    without the library.
    """
    require("deltalake", f"the table {name!r} is one of Delta Lake, which", EXTRA)
    with translated(name, place):
        table = _table(place)
        newest = int(table.version())
        wanted = int(pinned) if pinned else _version(table, name, newest, moment(at)) if at else newest
        if wanted != newest:
            table = _table(place, _known(name, wanted, newest))
        mapped = _check(table, name)
        return _snapshot(place, name, table, mapped, str(newest))


def address(place: StorageLocation) -> tuple[str, dict[str, str] | None]:
    """Return how the library calls ``place``, and its options to reach that."""
    if place.local:
        return place.root, None
    connect, request = TIMEOUTS
    limits = {"connect_timeout": f"{connect}s", "timeout": f"{request}s"}
    return place.uri, {**s3_settings(), **limits, "conditional_put": "etag"}


def _table(place: StorageLocation, version: int | None = None) -> Any:
    from deltalake import DeltaTable

    target, options = address(place)
    return DeltaTable(target, version=version, storage_options=options)


def _known(name: str, version: int, newest: int) -> int:
    if version > newest:
        raise TableError(f"the {_KIND} table {name!r} has no version {version}; its newest is {newest}")
    return version


def _version(table: Any, name: str, newest: int, wanted: int | datetime) -> int:
    """Return the version that a number or a time names: of a time, the last that was committed by then."""
    if isinstance(wanted, int):
        return _known(name, wanted, newest)
    limit = wanted.timestamp() * 1000
    commits = sorted((int(commit["version"]), int(commit["timestamp"])) for commit in table.history())
    before = [version for version, committed in commits if committed <= limit]
    if not before:
        raise TableError(
            f"the {_KIND} table {name!r} has no version as old as {wanted.isoformat(' ')}; its log goes back to "
            f"version {commits[0][0]} of {shown(commits[0][1])}"
        )
    return before[-1]


def _check(table: Any, name: str) -> bool:
    """Refuse what no list of files can honour; tell whether columns have names of their own in the files."""
    protocol = table.protocol()
    reader = int(protocol.min_reader_version)
    if reader > _LATEST_READER:
        raise refused(
            name, _KIND, f"asks for readers of version {reader}", f"{_LATEST_READER} is the newest known"
        )
    known = _HARMLESS.union(_HARMLESS_IF_UNUSED)
    if strange := sorted(set(protocol.reader_features or ()) - known):
        raise refused(
            name, _KIND, f"has the feature {strange[0]}", "rewrite it without that, or export it to Parquet"
        )
    mode = str(table.metadata().configuration.get("delta.columnMapping.mode") or "none").lower()
    if mode == "id":
        raise refused(
            name,
            _KIND,
            "maps columns by id (delta.columnMapping.mode = id)",
            "write it again, mapped by name",
        )
    return mode == "name"


def _snapshot(place: StorageLocation, name: str, table: Any, mapped: bool, newest: str) -> Snapshot:
    import pyarrow as pa
    import pyarrow.compute as pc

    columns, stored = _columns(name, table, mapped)
    keys = tuple(str(column) for column in table.metadata().partition_columns)
    actions = pa.table(table.get_add_actions())
    actions = actions.take(pc.sort_indices(actions.column("path")))
    paths = [path_of(place, name, text) for text in actions.column("path").to_pylist()]
    modified = actions.column("modification_time").to_pylist()
    files = tuple(
        FileEntry(path, int(size), int(at) / 1000)
        for path, size, at in zip(paths, actions.column("size_bytes").to_pylist(), modified, strict=True)
    )
    rows = tuple(actions.column("num_records").to_pylist())
    deleted = _deleted(place, name, table, [named[1] for named in stored] + [named[0] for named in columns])
    deletions.check_files(name, dict(zip(paths, rows, strict=True)), deleted)
    log = TableLog(_KIND, place.root, str(table.version()), stored, deleted=deleted)
    relation = Relation(name, place.scheme, files, columns, partitions=keys, log=log)
    values = {key: tuple(_within(actions, "partition", key) or (None,) * len(files)) for key in keys}
    _check_folders(place, relation, values, mapped)

    def bounds(column: str, kind: str) -> tuple[Bounds, ...]:
        if kind.startswith(("array", "map", "struct")):
            return (Bounds(None),) * len(files)
        said = [_within(actions, part, relation.stored(column)) for part in ("null_count", "min", "max")]
        nulls, low, high = (one or [None] * len(files) for one in said)
        return tuple(map(Bounds, nulls, low, high))

    return Snapshot(relation, newest, rows, bounds, values)


def _deleted(place: StorageLocation, name: str, table: Any, columns: Sequence[str]) -> deletions.Deleted:
    """Return the rows that deletion vectors delete. Raises ``TableError`` for what cannot be left out."""
    if int(table.protocol().min_reader_version) < _LATEST_READER:
        return ()
    import numpy as np
    import pyarrow as pa

    root = os.path.realpath(place.root) if place.local else place.root
    rows: dict[str, Any] = {}
    for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
        kept = batch.column("selection_vector")
        for number, uri in enumerate(batch.column("filepath").to_pylist()):
            mask = kept[number].values.to_numpy(zero_copy_only=False)
            rows[_named(place, root, uri)] = np.flatnonzero(~mask.astype(bool))
    return deletions.packed(name, _KIND, place.scheme, columns, rows)


def has_deletion_vectors(table: Any) -> bool:
    """Tell whether files of a table, which is the library's, have deletion vectors."""
    import pyarrow as pa

    if int(table.protocol().min_reader_version) < _LATEST_READER:
        return False
    return any(batch.num_rows for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()))


def _named(place: StorageLocation, root: str, uri: str) -> str:
    """Return the path of a file that the library calls ``uri``: percent-encoded, as the log has it, and below the
    directory ``root``, which is ``place`` without links."""
    if not place.local:
        return unquote(uri.partition("://")[2])
    path = unquote(uri.removeprefix("file://"))
    below = path.removeprefix(f"{root.rstrip('/')}/")
    return path if below == path else place.path(below)


def _columns(
    name: str, table: Any, mapped: bool
) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
    """Return (name, Spark SQL type) of the columns, and of those that files have under another name, these."""
    import pyarrow as pa

    columns, stored = [], []
    for field in pa.schema(table.schema().to_arrow()):
        kind = spark_type(field.type)
        if kind is None:
            raise TableError(
                f"column {field.name!r} of the {_KIND} table {name!r} has the type {field.type}, which Spark SQL "
                f"lacks"
            )
        columns.append((str(field.name), kind))
    if mapped:
        for field in table.schema().fields:
            physical = field.metadata.get("delta.columnMapping.physicalName", field.name)
            if physical != field.name:
                stored.append((str(field.name), str(physical)))
            if _nested_mapping(field.type):
                raise refused(
                    name,
                    _KIND,
                    f"maps the fields of the nested column {field.name!r}",
                    "write it again without a mapping",
                )
    return tuple(columns), tuple(stored)


def _nested_mapping(kind: Any) -> bool:
    """Tell whether a type holds a struct, whose fields are mapped as columns are."""
    import json

    return '"struct"' in json.dumps(json.loads(kind.to_json()))


def path_of(place: StorageLocation, name: str, text: str) -> str:
    """Return a file's path: the log has it relative to the table, percent-encoded."""
    path = unquote(text)
    if "://" in text or path.startswith("/") or ".." in path.split("/"):
        raise refused(
            name,
            _KIND,
            f"has a file outside of its directory ({text:.200})",
            "copy it as a whole (no shallow clone)",
        )
    return place.path(path)


def _check_folders(
    place: StorageLocation, relation: Relation, values: dict[str, tuple[Any, ...]], mapped: bool
) -> None:
    """Refuse partitions whose directories say something else than the log: engines read the directories."""
    if not relation.partitions:
        return
    kinds = dict(relation.columns)
    for number, file in enumerate(relation.files):
        folders = file.path.removeprefix(f"{place.root.rstrip('/')}/").split("/")[:-1]
        expected = [(key, values[key][number]) for key in relation.partitions]
        found = [partitions.told(folder, kinds) for folder in folders]
        if mapped or found != expected:
            raise refused(
                relation.name,
                _KIND,
                f"has the partition {_worded(expected)} in the directory {'/'.join(folders) or '.'!r}",
                "write it again with its partitions as directories COLUMN=VALUE",
            )


def _worded(values: Sequence[tuple[str, Any]]) -> str:
    return ", ".join(f"{name} = {'NULL' if value is None else repr(value)}" for name, value in values)


def _within(actions: Any, part: str, name: str) -> list[Any] | None:
    """Return what all actions say of a column in one of their structs, ``None`` where none says anything."""
    if part not in actions.column_names:
        return None
    import pyarrow.compute as pc

    column = actions.column(part)
    position = column.type.get_field_index(name)
    return None if position < 0 else list(pc.struct_field(column, [position]).to_pylist())


@contextmanager
def translated(name: str, place: StorageLocation, action: str = "read the log of") -> Iterator[None]:
    """Turn the library's errors into ``TableError``; ``action`` completes "cannot ..."."""
    from deltalake.exceptions import DeltaError, TableNotFoundError

    try:
        yield
    except TableNotFoundError as error:
        raise TableError(
            f"the log of the {_KIND} table {name!r} ({place}) cannot be found: {error}"
        ) from error
    except (DeltaError, OSError, ValueError) as error:
        raise TableError(f"cannot {action} the {_KIND} table {name!r} ({place}): {_plain(error)}") from error


def _plain(error: Exception) -> str:
    """Return the library's message, which may be a tree in colours, as one line."""
    words = re.sub("\x1b\\[[0-9;]*m|↳", "", str(error)).split()
    return " ".join(words)[:500]
