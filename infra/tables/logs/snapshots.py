"""Versions of tables with a log, as relations, and what footers would say of their files from the log instead."""

import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal

from ebbflow.infra.errors import TableError
from ebbflow.infra.protocols import Relation, TableLog
from ebbflow.infra.storage import files
from ebbflow.infra.storage.filesystems import to_uri, translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import filefooters
from ebbflow.infra.tables.filefooters import Bounds, FileFooter
from ebbflow.infra.tables.logs import deletions, delta, iceberg
from ebbflow.infra.tables.logs.versions import Snapshot
from ebbflow.infra.tables.partitions import PartitionValue

LogKind = Literal["Delta Lake", "Iceberg"]
_KEPT = 16  # snapshots in memory
_MEASURED = 64  # files whose footers tell how large columns are unpacked
_READERS = {"Delta Lake": delta.opened, "Iceberg": iceberg.opened}

_known: OrderedDict[tuple[str, TableLog], Snapshot] = OrderedDict()
_lock = threading.Lock()


def log_of(place: StorageLocation, inside: Sequence[Any]) -> LogKind | None:
    """Return of which format the table in the directory ``place`` is by what is ``inside``; ``None``: of none."""
    folders = {item.base_name for item in inside if not item.is_file}
    if "_delta_log" in folders:
        return "Delta Lake"
    if "metadata" in folders and any(iceberg.is_metadata(i.base_name) for i in place.entries("metadata")):
        return "Iceberg"
    return None


def opened(place: StorageLocation, name: str, kind: LogKind, at: str = "", pinned: str = "") -> Snapshot:
    """Return the table ``name`` in ``place`` as of ``at``, or of the version ``pinned`` while that can be read; see
    ``delta.opened``.

    Of a version that is asked for, all files must still be there. Raises ``TableError``.
    """
    if pinned:
        with suppress(TableError):
            return _complete(place, _READERS[kind](place, name, "", pinned))
    found = _READERS[kind](place, name, at)
    return _complete(place, found) if at else _keep(found)


def _complete(place: StorageLocation, found: Snapshot) -> Snapshot:
    """Return and keep ``found``. Raises ``TableError`` where files of it have been removed."""
    with translated(f"list the files of {place}", TableError):
        folder = iceberg.folder(place)
        there = {
            item.path for item in files.listing(folder.fs(), folder.root, recursive=True) if item.is_file
        }
    gone = [file.path for file in found.relation.files if file.path not in there]
    if gone:
        raise TableError(
            f"{version_text(found.relation)} cannot be read any more: {len(gone):,} of its "
            f"{len(found.relation.files):,} files have been removed, such as {gone[0]}"
        )
    return _keep(found)


def version_text(relation: Relation) -> str:
    """Return which version of which table with a log a relation is, for people."""
    log = relation.log
    assert log is not None
    return f"{relation.name}: {log.format}, version {log.version.partition('.')[0]}"


def version_words(relations: Sequence[Relation], pinned: Mapping[str, str]) -> list[str]:
    """Return, for people, which versions of those tables that have a log are read, and whether there are newer ones.

    ``pinned`` are those that an earlier run of the query began with, by lower-case name.
    """
    told = []
    for relation in relations:
        if relation.log is None:
            continue
        version, newest = relation.log.version, snapshot(relation).newest
        said = version_text(relation)
        if version != newest:
            said += f"; the newest is {newest.partition('.')[0]}"
            if pinned.get(relation.name.lower()) == version:
                said += ". An earlier run of this query began with it and has not ended; --no-reuse takes the newest"
        told.append(said)
    return told


def snapshot(relation: Relation) -> Snapshot:
    """Return what the log says of a relation that has one. Raises ``TableError``."""
    log = relation.log
    assert log is not None
    with _lock:
        found = _known.get((relation.scheme, log))
    if found is None:
        place = StorageLocation(to_uri(log.root, relation.scheme))
        found = _keep(_READERS[log.format](place, relation.name, "", log.version))
    return found


def _keep(found: Snapshot) -> Snapshot:
    log = found.relation.log
    assert log is not None
    with _lock:
        _known[found.relation.scheme, log] = found
        _known.move_to_end((found.relation.scheme, log))
        while len(_known) > _KEPT:
            _known.popitem(last=False)
    return found


def keys(relation: Relation) -> dict[str, tuple[PartitionValue, ...]]:
    """Return the columns that have one value in each file as the log says, with these; none without a log."""
    if relation.log is None:
        return {}
    found = snapshot(relation)
    numbers = _numbers(relation, found)
    return {name: tuple(values[n] for n in numbers) for name, values in found.keys.items()}


def read_footers(relation: Relation, names: Collection[str]) -> list[FileFooter]:
    """Return of each file of ``relation`` what is said of the columns ``names``: by the log where the relation has
    one, as of one row group, else by the footers. Raises ``TableError``."""
    if relation.log is None:
        return filefooters.read_footers(relation, names)
    found = snapshot(relation)
    kinds = dict(relation.columns)
    numbers = _numbers(relation, found)
    wanted = [name for name in names if name not in relation.partitions]
    bounds = {name: found.bounds(name, kinds[name]) for name in wanted}
    told, deleted = [], deletions.of(relation)
    for number, file in zip(numbers, relation.files, strict=True):
        rows = found.rows[number]
        if rows is None:
            footer = _from_footer(relation, file, wanted)
        else:
            footer = FileFooter((rows,), {name: (bounds[name][number],) for name in wanted})
        told.append(_without(footer, deletions.count(deleted[file.path])) if file.path in deleted else footer)
    return told


def unpacked(relation: Relation, names: Collection[str]) -> float:
    """Return the bytes of columns, unpacked but encoded: of a table with a log as its first, last and evenly spaced
    files tell, since no log does. Raises ``TableError``."""
    whole = relation if relation.log is None else replace(relation, log=None, files=_spread(relation.files))
    stored = [relation.stored(name) for name in names]  # where names differ by file, those that have it tell
    told = filefooters.read_footers(whole, stored)
    measured = float(sum(file.unpacked.get(name, 0) for file in told for name in stored))
    return measured * relation.bytes / max(whole.bytes, 1)


def _spread(entries: tuple[files.FileEntry, ...]) -> tuple[files.FileEntry, ...]:
    if len(entries) <= _MEASURED:
        return entries
    return tuple(entries[n * (len(entries) - 1) // (_MEASURED - 1)] for n in range(_MEASURED))


def _numbers(relation: Relation, found: Snapshot) -> list[int]:
    """Return where the files of ``relation``, which may be some only, are among those of its snapshot."""
    if relation.files == found.relation.files:
        return list(range(len(relation.files)))
    places = {file.path: number for number, file in enumerate(found.relation.files)}
    return [places[file.path] for file in relation.files]


def _from_footer(relation: Relation, file: files.FileEntry, names: Sequence[str]) -> FileFooter:
    """Return what a file's own footer says, summed to one row group, where the log does not count its rows."""
    stored = {name: relation.stored(name) for name in names}
    (told,) = filefooters.read_footers(replace(relation, log=None, files=(file,)), list(stored.values()))
    return FileFooter(
        (sum(told.rows),), {name: (_summed(told.bounds[there], told.rows),) for name, there in stored.items()}
    )


def _without(footer: FileFooter, deleted: int) -> FileFooter:
    """Return what is known of the rows of a file of which so many are deleted; which of them were NULL is not."""
    (rows,) = footer.rows
    left = max(0, rows - deleted)
    nulls = {0: 0, rows: left}
    return FileFooter(
        (left,),
        {
            name: (one._replace(nulls=None if one.nulls is None else nulls.get(one.nulls)),)
            for name, (one,) in footer.bounds.items()
        },
    )


def _summed(bounds: Sequence[Bounds], rows: Sequence[int]) -> Bounds:
    counts = [one.nulls for one in bounds]
    nulls = None if None in counts else sum(count for count in counts if count is not None)
    valued = [one for one, count in zip(bounds, rows, strict=True) if one.nulls != count]
    if not valued or any(one.low is None or one.high is None for one in valued):
        return Bounds(nulls)
    return Bounds(nulls, min(one.low for one in valued), max(one.high for one in valued))
