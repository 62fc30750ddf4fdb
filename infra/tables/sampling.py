"""A sample of a table's rows, spread over its row groups, kept as Parquet with a checksum beside the cache."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import InfraError, StorageError, TableError
from ebbflow.infra.protocols import Relation
from ebbflow.infra.storage import checksums, files
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.filesystems import filesystem, to_uri, translated
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.tables import partitions
from ebbflow.infra.tables.filefooters import footer
from ebbflow.infra.tables.logs import deletions
from ebbflow.infra.tables.logs.snapshots import read_footers
from ebbflow.infra.tables.parquet import version

ENTIRE_TIMES = 10  # a table of up to this many times sample_rows is read entirely for its statistics
DECODE_ROWS = 400_000  # at most about this many rows are decoded for a sample
MOST_GROUPS = 64  # row groups read, of files that may be as many
LARGEST_BLOCKS = 8  # row groups sampled
TIME_LIMIT = 30.0  # seconds, times the tables sampled at once, after which no further row group is read
_KEPT_IN_MEMORY = 16  # samples
_BATCH = 65_536  # rows decoded at once


@dataclass(frozen=True, slots=True)
class Block:
    """The part of a sample that came from one row group."""

    row_group: int  # numbered through all files
    rows: int  # decoded, from the row group's first on
    sampled: int  # of those


@dataclass(frozen=True)
class Sample:
    """Rows of a table."""

    table: Any  # pyarrow.Table of all columns
    rows: int  # of the entire table
    blocks: tuple[Block, ...]

    @property
    def entire(self) -> bool:
        return bool(self.table.num_rows == self.rows)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group of a file."""

    file: FileEntry
    index: int  # within the file
    rows: int


def draw(
    relation: Relation,
    sample_rows: int,
    clock: Clock | None = None,
    names: Sequence[str] | None = None,
    at_once: int = 1,
) -> Sample:
    """Read a sample: random rows of row groups that are evenly spaced over all files.

    Rows are random, not evenly spaced, because equal values often lie side by side or at a fixed distance,
    and evenly spaced rows would then never, or always, meet them twice. The same files give the same sample.
    Tables of up to ``ENTIRE_TIMES * sample_rows`` rows in up to ``MOST_GROUPS`` row groups are read entirely. Only
    the columns ``names`` are read; without them, all. ``at_once``: tables that are sampled at a time, and share
    the link and the cores, so that each takes longer. Raises ``TableError``.
    """
    import pyarrow as pa

    clock = clock or SystemClock()
    names = [name for name, _ in relation.columns] if names is None else names
    groups = row_groups(relation, names)
    total = sum(group.rows for group in groups)
    entire = total <= ENTIRE_TIMES * sample_rows and len(groups) <= MOST_GROUPS
    chosen = list(range(len(groups))) if entire else _spread(groups)
    deadline = clock.now() + TIME_LIMIT * at_once
    tables: list[Any] = []
    blocks: list[Block] = []
    for position in chosen:
        if blocks and clock.now() > deadline:
            entire = False
            break
        group = groups[position]
        limit = group.rows if entire else min(group.rows, max(1, DECODE_ROWS // len(chosen)))
        part = decode(relation, group, limit, names)
        taken = part if entire else some_rows(part, -(-sample_rows // len(chosen)), position)
        tables.append(taken)
        blocks.append(Block(position, part.num_rows, taken.num_rows))
    table = pa.concat_tables(tables) if tables else _empty(relation).select(names)
    return Sample(table, total, tuple(blocks))


def thinned(sample: Sample, sample_rows: int) -> Sample:
    """Return at most ``sample_rows`` random rows of ``sample``; a smaller one stays as it is."""
    if sample.table.num_rows <= sample_rows:
        return sample
    return Sample(some_rows(sample.table, sample_rows, 0), sample.rows, ())


def some_rows(table: Any, count: int, seed: int) -> Any:
    """Return ``count`` random rows in their order; all when there are no more."""
    import numpy as np

    if table.num_rows <= count:
        return table
    return table.take(np.sort(np.random.default_rng(seed).choice(table.num_rows, count, replace=False)))


# --- keeping samples --------------------------------------------------------------------------------------

_memory: OrderedDict[tuple[str, int], Sample] = OrderedDict()
_memory_lock = threading.Lock()


def keep(relation: Relation, sample: Sample, cache: JsonStore | None, sample_rows: int) -> Sample:
    """Keep a sample in memory, and as a file beside ``cache`` where that can be written; return it with the columns
    of the same rows that were kept before."""
    key = _key(relation, sample_rows)
    sample = _joined(_found(key, cache), sample)
    _remember(key, sample)
    if cache is None:
        return sample
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = pa.BufferOutputStream()
    table = sample.table.replace_schema_metadata({b"ebbflow.rows": str(sample.rows).encode()})
    try:
        pq.write_table(table, buffer)
        with translated(f"write a sample to {cache.place.uri}"):
            content = buffer.getvalue().to_pybytes()
            content += checksums.of_bytes(content).encode()
            files.write_atomic(cache.place.fs(), cache.place.scheme, _path(cache, key), content)
    except (StorageError, pa.ArrowException):
        pass  # a cache only: the sample is drawn again when it is needed
    return sample


def kept(relation: Relation, cache: JsonStore | None, sample_rows: int, names: Sequence[str]) -> Sample:
    """Return the kept sample with at least the columns ``names``, drawing and keeping what is missing. Raises
    ``TableError``."""
    key = _key(relation, sample_rows)
    sample = _found(key, cache)
    missing = [name for name in names if sample is None or name not in sample.table.column_names]
    if sample is not None and not missing:
        _remember(key, sample)
        return sample
    drawn = keep(
        relation, thinned(draw(relation, sample_rows, names=missing), sample_rows), cache, sample_rows
    )
    if set(names) <= set(drawn.table.column_names):
        return drawn
    return keep(relation, thinned(draw(relation, sample_rows, names=names), sample_rows), cache, sample_rows)


def _found(key: tuple[str, int], cache: JsonStore | None) -> Sample | None:
    with _memory_lock:
        if key in _memory:
            return _memory[key]
    return _stored(cache, key) if cache is not None else None


def _joined(before: Sample | None, sample: Sample) -> Sample:
    """Return ``sample`` with the columns of ``before`` that it has not, if their rows are the same: as many rows of
    the same files are, unless time was short for one of them."""
    if before is None or before.table.num_rows != sample.table.num_rows or before.rows != sample.rows:
        return sample
    table = sample.table
    for name in before.table.column_names:
        if name not in table.column_names:
            table = table.append_column(name, before.table.column(name))
    return Sample(table, sample.rows, sample.blocks)


def _stored(cache: JsonStore, key: tuple[str, int]) -> Sample | None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with translated(f"read a sample in {cache.place.uri}"):
            with cache.place.fs().open_input_file(_path(cache, key)) as file:
                found = file.read()
            content, digits = found[: -checksums.DIGITS], found[-checksums.DIGITS :]
            if checksums.of_bytes(content).encode() != digits:
                return None  # damaged: it is drawn again
            table = pq.ParquetFile(pa.BufferReader(content)).read()
        rows = int((table.schema.metadata or {})[b"ebbflow.rows"])
    except (InfraError, KeyError, ValueError):
        return None
    return Sample(table, rows, ())


def _remember(key: tuple[str, int], sample: Sample) -> None:
    with _memory_lock:
        _memory[key] = sample
        _memory.move_to_end(key)
        while len(_memory) > _KEPT_IN_MEMORY:
            _memory.popitem(last=False)


def _key(relation: Relation, sample_rows: int) -> tuple[str, int]:
    return version(relation), sample_rows


def _path(cache: JsonStore, key: tuple[str, int]) -> str:
    return cache.file(f"sample/{key[0]}/{key[1]}", ".sample")


# --- reading ----------------------------------------------------------------------------------------------


def row_groups(relation: Relation, names: Sequence[str]) -> list[RowGroup]:
    """Return the row groups of a relation's files, whose columns ``names`` are to be read. Raises ``TableError``."""
    return [
        RowGroup(file, index, rows)
        for file, told in zip(relation.files, read_footers(relation, names), strict=True)
        for index, rows in enumerate(told.rows)
    ]


def _spread(groups: list[RowGroup]) -> list[int]:
    """Return evenly spaced positions of row groups, so many that about ``DECODE_ROWS`` rows are decoded."""
    average = max(1.0, sum(g.rows for g in groups) / len(groups))
    count = min(len(groups), max(1, min(LARGEST_BLOCKS, int(DECODE_ROWS / average))))
    # tiny row groups: take more of them, or the sample would be too small
    if average * count < DECODE_ROWS / 4:
        count = min(len(groups), MOST_GROUPS, max(count, int(DECODE_ROWS / 4 / average)))
    return sorted({int((i + 0.5) * len(groups) / count) for i in range(count)})


def decode(relation: Relation, group: RowGroup, limit: int, names: Sequence[str]) -> Any:
    """Return the columns ``names`` of the first ``limit`` rows of a row group, with plain strings in place of string
    views."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with (
        translated(f"read rows of {to_uri(group.file.path, relation.scheme)}", TableError),
        filesystem(relation.scheme).open_input_file(group.file.path) as source,
    ):
        reader = pq.ParquetFile(source, metadata=footer(relation.scheme, group.file))
        stored = [name for name in names if name not in relation.partitions]
        if relation.log is not None:
            gone = deletions.of(relation).get(group.file.path)
            table = _as_declared(reader, relation, stored, limit, gone)
        elif not stored:  # rows of no columns have no number
            table = pa.table({"": pa.nulls(min(limit, group.rows))})
        elif limit >= group.rows:
            table = reader.read_row_group(group.index, columns=stored).select(stored)
        else:
            batches, missing = [], limit
            for batch in reader.iter_batches(min(limit, _BATCH), row_groups=[group.index], columns=stored):
                batches.append(batch.select(stored).slice(0, missing))
                missing -= batches[-1].num_rows
                if missing <= 0:
                    break
            table = pa.Table.from_batches(batches)
        return partitions.with_values(_plain(table), relation, group.file.path).select(names)


def _as_declared(
    reader: Any, relation: Relation, names: Sequence[str], limit: int, gone: bytes | None
) -> Any:
    """Return the columns ``names`` of the first ``limit`` rows of a file of a table with a log, with the types of the
    table, without the rows ``gone``; a column that the file has not is NULL."""
    import pyarrow as pa

    from ebbflow.infra.tables.datatypes import arrow_type

    kinds = dict(relation.columns)
    there = {name.lower(): name for name in reader.schema_arrow.names}
    wanted = {name: relation.stored(name).lower() for name in names}
    if relation.log is not None and relation.log.ids:
        there = {
            (f.metadata or {}).get(b"PARQUET:field_id", b"").decode(): f.name for f in reader.schema_arrow
        }
        wanted = {name: str(number) for name, number in relation.log.ids if name in names}
    found = {name: there[at] for name, at in wanted.items() if at in there}
    there_are = reader.metadata.num_rows - (0 if gone is None else deletions.count(gone))
    batches, missing, first = [], min(limit, there_are), 0
    # where few rows are left, batches of so few are many
    size, deleted = (min(limit, _BATCH), None) if gone is None else (_BATCH, deletions.numbers(gone))
    for batch in reader.iter_batches(size, columns=list(found.values())) if found and missing else ():
        live = batch if deleted is None else deletions.without(batch, first, deleted)
        first += batch.num_rows
        batches.append(live.select(list(found.values())).slice(0, missing))
        missing -= batches[-1].num_rows
        if missing <= 0:
            break
    rows = pa.Table.from_batches(batches) if batches else None
    count = min(limit, there_are) - missing if found else missing
    columns = {}
    for name in names:
        kind = arrow_type(kinds[name])
        columns[name] = pa.nulls(count, kind)
        if rows is not None and name in found:
            with suppress(pa.ArrowException):  # a nested type that has grown: its statistics tell nothing
                columns[name] = rows.column(found[name]).cast(kind)
    return pa.table(columns) if columns else pa.table({"": pa.nulls(count)})


def _plain(table: Any) -> Any:
    """Return the table with string and binary views as plain ones, which more functions accept."""
    import pyarrow as pa

    for i, field in enumerate(table.schema):
        plain = pa.string() if field.type == pa.string_view() else None
        plain = pa.binary() if field.type == pa.binary_view() else plain
        if plain is not None:
            table = table.set_column(i, field.name, table.column(i).cast(plain))
    return table


def _empty(relation: Relation) -> Any:
    from ebbflow.infra.tables.datatypes import arrow_schema

    return arrow_schema(relation.columns).empty_table()
