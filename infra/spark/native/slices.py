"""Cuts relations into parts of about equal size: whole files or row groups of one, or several by a hash of a key.

Joined relations of which none is small are exchanged: tasks write their rows in the order of a hash (``BUCKETS`` of
them), and later tasks read a range of hashes each, of all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import accumulate
from math import ceil
from typing import NamedTuple, TypeAlias, TypeVar

from ebbflow.infra.protocols import Relation, StageJob
from ebbflow.infra.spark.native.catalyst import NotDoneError
from ebbflow.infra.spark.native.objects import Rows
from ebbflow.infra.spark.native.worker import KeyRange, Part
from ebbflow.infra.storage import files
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.filefooters import Bounds, FileFooter, footer, read_footers

T = TypeVar("T")
Value: TypeAlias = int | date
BUCKET = "__ebbflow_bucket"  # the column of a row's hash
BUCKETS = 1024
_EVEN = 1.3  # times the mean that the largest slice may have
_SKEWED = 2.0  # times the mean of what is divided from which on a range is read by several tasks
_GROUP = 20_480  # rows of a row group of what is exchanged: tasks read whole ones
_KEPT = 16  # a relation of less than such a part of a task's memory is read by each task, not exchanged
_WRITTEN = 4.0  # what exchanging a byte costs over reading it: it is read, sorted, written and read again


@dataclass(frozen=True, slots=True)
class Cut:
    """One slice of a relation: some of its files, and rows of others."""

    files: tuple[FileEntry, ...]
    rows: tuple[Rows, ...] = ()


def cuts(relation: Relation, count: int) -> list[Cut]:
    """Return ``relation`` in at most ``count`` slices, in the order of its rows. Raises ``TableError``."""
    if count <= 1 or not relation.files:
        return [Cut(relation.files)]
    whole = split([(file, file.size) for file in relation.files], count)
    sizes = [sum(file.size for file in part) for part in whole]
    if len(whole) == count and max(sizes) <= _EVEN * relation.bytes / count:
        return [Cut(tuple(part)) for part in whole]
    footers = files.in_parallel(lambda file: footer(relation.scheme, file), relation.files)
    groups: list[tuple[Rows, int]] = []
    for file, metadata in zip(relation.files, footers, strict=True):
        first = 0
        for number in range(metadata.num_row_groups):
            rows = metadata.row_group(number).num_rows
            if rows:
                groups.append((Rows(file.path, first, first + rows - 1), rows))
            first += rows
    if not groups:
        return [Cut(relation.files)]
    return [Cut((), _joined(part)) for part in split(groups, count)]


def arm_parts(job: StageJob, counts: Mapping[str, int]) -> list[Part]:
    """Return the parts of a job's arms: of those that a relation may be cut for, at most ``counts`` of it each.

    Raises ``TableError``.
    """
    relations = {one.name: one for one in job.relations}
    parts: list[Part] = []

    def add(sql: str, these: Sequence[Relation], sliced: str = "", rows: tuple[Rows, ...] = ()) -> None:
        name = f"part-{len(parts):05d}.parquet"
        parts.append(Part(sql, tuple(these), name, sliced, rows, layout=job.layout))

    for arm in job.arms:
        found = cuts(relations[arm.sliced], counts[arm.sliced]) if arm.sliced else []
        if len(found) <= 1:
            add(arm.sql, job.relations)
            continue
        for cut in found:
            of_it = replace(relations[arm.sliced], files=cut.files)
            own = [of_it if one.name == arm.sliced else one for one in job.relations]
            add(arm.sql, own, arm.sliced, cut.rows)
    return parts


class KeyBounds:
    """What the footers of a relation's files say of the values of a column, row group by row group."""

    def __init__(self, relation: Relation, column: str) -> None:
        """Read them. Raises ``TableError``."""
        self._files: dict[str, FileFooter] = {}
        self._column = relation.stored(column)
        by_number = relation.log is not None and relation.log.ids  # a column may have another one's old name
        if not by_number and column.lower() not in {name.lower() for name in relation.partitions}:
            found = read_footers(relation, [self._column])
            self._files = {file.path: told for file, told in zip(relation.files, found, strict=True)}

    def of(self, cut: Cut) -> tuple[Value, Value] | None:
        """Return the least and the greatest value of a slice; ``None`` where that is not known, or some are null."""
        found = [(rows, bounds) for file in cut.files for _, rows, bounds in self._groups(file.path)]
        for some in cut.rows:
            groups = self._groups(some.path)
            found += [(rows, b) for first, rows, b in groups if some.first <= first <= some.last]
        full = [bounds for rows, bounds in found if rows]
        if not full or not all(_known(bounds) and bounds.nulls == 0 for bounds in full):
            return None
        return min(b.low for b in full), max(b.high for b in full)

    def share(self, low: Value, high: Value) -> float:
        """Return the part of the rows that is in row groups which may have values from ``low`` to ``high``."""
        found = [(rows, b) for path in self._files for _, rows, b in self._groups(path)]
        total = sum(rows for rows, _ in found)
        read = sum(rows for rows, b in found if not _known(b) or (b.low <= high and b.high >= low))
        return read / total if total else 1.0

    def spread(self) -> int:
        """Return how many values the column may have at most, as footers tell; 0 where they do not."""
        found = [b for path in self._files for _, rows, b in self._groups(path) if rows]
        if not found or not all(map(_known, found)):
            return 0
        low, high = min(b.low for b in found), max(b.high for b in found)
        return (high - low).days + 1 if isinstance(low, date) else int(high - low) + 1

    def _groups(self, path: str) -> list[tuple[int, int, Bounds]]:
        """Return the row groups of a file: first row, number of rows, bounds."""
        told = self._files.get(path)
        if told is None:
            return [(0, 1, Bounds(None))]
        starts = accumulate(told.rows, initial=0)
        return list(zip(starts, told.rows, told.bounds.get(self._column, ()), strict=False))


def _known(bounds: Bounds) -> bool:
    return type(bounds.low) in (int, date) and type(bounds.low) is type(bounds.high)


def split(items: Sequence[tuple[T, float]], count: int) -> list[list[T]]:
    """Return the items in at most ``count`` runs of about equal sums of their sizes.

    >>> split([("a", 1), ("b", 1), ("c", 2)], 2)
    [['a', 'b'], ['c']]
    """
    total, seen = sum(size for _, size in items), 0.0
    runs: list[list[T]] = [[] for _ in range(count)]
    for item, size in items:
        middle = seen + size / 2
        runs[min(int(middle * count / total), count - 1) if total else 0].append(item)
        seen += size
    return [run for run in runs if run]


def _joined(parts: Sequence[Rows]) -> tuple[Rows, ...]:
    """Join rows that follow each other in one file."""
    found: list[Rows] = []
    for rows in parts:
        if found and found[-1].path == rows.path and found[-1].last + 1 == rows.first:
            found[-1] = Rows(rows.path, found[-1].first, rows.last)
        else:
            found.append(rows)
    return tuple(found)


class ByHash(NamedTuple):
    """Scans that are exchanged, by which columns, and the bytes of others that each task reads."""

    keys: Mapping[int, str]
    others: int

    def cost(self, sizes: Mapping[int, int], tasks: int) -> float:
        """Return what it costs, in bytes read; ``sizes`` are the bytes of the scans."""
        return _WRITTEN * sum(sizes[number] for number in self.keys) + tasks * self.others


def by_hash(
    keys: Sequence[Mapping[int, str]],
    sizes: Mapping[int, int],
    sliced: int,
    memory: int,
    tasks: int,
    scans: Mapping[int, Relation],
) -> ByHash | None:
    """Return the cheapest way to exchange; ``None``: each leaves more for every task to read than it can hold.

    Args:
        keys: scans with a column each, ``sliced`` among them: rows that meet have equal values.
        sizes: bytes of all scans.
        sliced: the scan each of whose rows is to be in one task.
        memory: bytes that a task can hold; half of them are for what is exchanged.
        tasks: that join what is exchanged.
        scans: all of them; of ways that cost the same, the one whose key may have most values in them is taken.

    Raises ``TableError``.
    """
    found = []
    for columns in keys:
        large = {n: c for n, c in columns.items() if n == sliced or sizes[n] * _KEPT >= memory}
        left = sum(size for number, size in sizes.items() if number not in large)
        if len(large) > 1 and 2 * left <= memory:
            found.append(ByHash(large, left))
    least = min((way.cost(sizes, tasks) for way in found), default=0.0)
    cheapest = [way for way in found if way.cost(sizes, tasks) == least]
    if len(cheapest) > 1:
        cheapest.sort(key=lambda way: -KeyBounds(scans[sliced], way.keys[sliced]).spread())
    return cheapest[0] if cheapest else None


class HashRange(NamedTuple):
    """What one task joins: rows with hashes from ``low`` to ``high``, of the sliced relation those of some files."""

    low: int
    high: int
    files: tuple[int, ...]


def hash_ranges(probed: Sequence[Sequence[float]], built: Sequence[float], count: int) -> list[HashRange]:
    """Return about ``count`` ranges of about equal sizes.

    A range with a key that most rows of the sliced relation have is read by several tasks, each of which has all of
    the other relations' rows in it and some of the sliced one's files.

    Args:
        probed: bytes by hash, of each file of the sliced relation; 0 where there is no row.
        built: bytes by hash of the others.
        count: of tasks.
    """
    totals = [sum(sizes) for sizes in zip(*probed, strict=True)]
    runs = split([(n, a + b) for n, (a, b) in enumerate(zip(totals, built, strict=True))], count)
    mean, found = sum(totals) / count, []
    for run in runs:
        low, high = run[0], run[-1]
        own = [(number, sum(sizes[low : high + 1])) for number, sizes in enumerate(probed)]
        own = [(number, size) for number, size in own if size > 0]
        size = sum(s for _, s in own)
        times = ceil(size / mean) if size > _SKEWED * mean else 1
        found += [HashRange(low, high, tuple(part)) for part in split(own, times) if part]
    return found or [HashRange(0, len(built) - 1, tuple(range(len(probed))))]


def bucket_sizes(relation: Relation) -> tuple[list[list[float]], list[int]]:
    """Return of each file of an exchanged relation its bytes by hash, as far as its footer tells, and its rows.

    Raises ``TableError``.
    """
    sizes, rows = [], []
    for file, told in zip(relation.files, read_footers(relation, [BUCKET]), strict=True):
        found, total = [0.0] * BUCKETS, sum(told.rows)
        for count, bounds in zip(told.rows, told.bounds[BUCKET], strict=True):
            low, high = (bounds.low, bounds.high) if _known(bounds) else (0, BUCKETS - 1)
            for bucket in range(low, high + 1) if count else ():
                found[bucket] += file.size * count / total / (high - low + 1)
        sizes.append(found)
        rows.append(total)
    return sizes, rows


class Exchange(NamedTuple):
    """What writes a scan's rows in the order of a hash: a statement, and the columns of the scan that it has."""

    sql: str
    columns: tuple[str, ...]

    def of(self, relation: Relation, scheme: str, entries: Sequence[FileEntry]) -> Relation:
        """Return as a relation what was written of ``relation``."""
        names = {name.lower() for name in self.columns}
        kept = tuple((name, kind) for name, kind in relation.columns if name.lower() in names)
        return Relation(relation.name, scheme, tuple(entries), (*kept, (BUCKET, "int")))


def writing(
    exchanges: Mapping[str, Exchange], scans: Mapping[str, Relation], count: Callable[[float], int]
) -> dict[str, list[Part]]:
    """Return by scan the parts that write what is exchanged; ``count`` tells the tasks for so many bytes.

    Raises ``TableError``.
    """
    whole = sum(scans[name].bytes for name in exchanges)
    found = {}
    for name, exchange in exchanges.items():
        relation = scans[name]
        share = ceil(count(whole) * relation.bytes / whole) if whole else 1
        found[name] = [
            Part(
                exchange.sql,
                (replace(relation, files=cut.files),),
                f".native-{name}-{number:05d}.parquet",
                name if cut.rows else "",
                cut.rows,
                group=_GROUP,
            )
            for number, cut in enumerate(cuts(relation, share))
        ]
    return found


def exchanged(
    exchanges: Mapping[str, Exchange],
    scans: Mapping[str, Relation],
    parts: Mapping[str, Sequence[Part]],
    output: StorageLocation,
    rows: int,
) -> tuple[dict[str, Relation], dict[str, list[list[float]]]]:
    """Return ``scans``, with what parts have written of them into ``output``, and of that the bytes by hash, file by
    file. Raises ``NotDoneError`` where it is not their number of ``rows``, and ``TableError``."""
    found, sizes, seen = dict(scans), {}, 0
    for name, exchange in exchanges.items():
        infos = output.fs().get_file_info([output.path(part.file) for part in parts[name]])
        entries = [FileEntry(info.path, info.size, 0.0) for info in infos]
        found[name] = exchange.of(scans[name], output.scheme, entries)
        sizes[name], counted = bucket_sizes(found[name])
        seen += sum(counted)
    if seen != rows:
        raise NotDoneError("what its tasks have exchanged is not what they wrote")
    return found, sizes


def joining(
    statement: str,
    scans: Mapping[str, Relation],
    sizes: Mapping[str, Sequence[Sequence[float]]],
    sliced: str,
    file: str,
    count: Callable[[float, float], int],
    room: float,
) -> list[Part]:
    """Return the parts that join ranges of what was exchanged.

    Args:
        statement: of each part.
        scans: what it reads, in place of what is exchanged what was written of it.
        sizes: of the latter the bytes by hash, a sequence for each file.
        sliced: the scan each of whose rows is to be in one part.
        file: name of a part's file, for its number.
        count: tells the tasks for the bytes of ``sliced`` and of all others that are exchanged.
        room: bytes of the latter that a task can hold.

    Raises ``NotDoneError`` where rows of one hash are more.
    """
    probed = sizes[sliced]
    built = [sum(one) for one in zip(*(f for n, fs in sizes.items() if n != sliced for f in fs), strict=True)]
    tasks = count(sum(map(sum, probed)), sum(built))
    parts: list[Part] = []
    ranges_ = [
        HashRange(first, last, one.files)
        for one in hash_ranges(probed, built, tasks)
        for first, last in _fitting(built, one.low, one.high, room)
    ]
    for low, high, some in ranges_:
        own = replace(scans[sliced], files=tuple(scans[sliced].files[n] for n in some))
        reads = tuple(own if name == sliced else relation for name, relation in scans.items())
        ranges = tuple(KeyRange(name, BUCKET, low, high) for name in sizes)
        parts.append(Part(statement, reads, file.format(len(parts)), ranges=ranges))
    return parts


def _fitting(built: Sequence[float], low: int, high: int, room: float) -> list[tuple[int, int]]:
    """Cut a range of hashes into runs whose rows fit. Raises ``NotDoneError`` where those of one hash do not."""
    runs: list[tuple[int, int]] = []
    first, held = low, 0.0
    for number in range(low, high + 1):
        if built[number] > room:
            raise NotDoneError("rows of one key do not fit into a task's memory")
        if held + built[number] > room:
            runs.append((first, number - 1))
            first, held = number, 0.0
        held += built[number]
    return [*runs, (first, high)]
