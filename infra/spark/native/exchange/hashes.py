"""Joined relations of which none is small, exchanged between tasks: some write their rows by a hash (one of
``BUCKETS``), and later ones read a range of hashes each, of all of them.

Where few tasks are to read them from local files, rows are divided among files by ranges of hashes (the ``grain`` is
how many a file has); else they are sorted into one file, of which row groups are read.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import ceil
from typing import Any, NamedTuple

from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.native.catalyst import Attribute, NotDoneError
from ebbflow.infra.spark.native.exchange.within import Within, needed
from ebbflow.infra.spark.native.expressions import cast, reading
from ebbflow.infra.spark.native.slices import Cut, cuts, finer, known, split
from ebbflow.infra.spark.native.worker import KeyRange, Part
from ebbflow.infra.storage.files import FileEntry, listing
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.filefooters import read_footers

BUCKET = "__ebbflow_bucket"  # the column of a row's hash
BUCKETS = 1024
_SKEWED = 2.0  # times the mean of what is divided from which on a range is read by several tasks
GROUP = 20_480  # rows of a row group of what is exchanged: tasks read whole ones
_FINER = 4  # files of a task for each task that reads them: these are to have about the same to read
_FEWEST, _MOST = 8, 64  # files of a task; of two columns 64 take half the time of sorting, 16 two fifths
_LISTED = re.compile(r'(?:TRY\()?"(?:[^"]|"")*"\)? AS c\d+')  # a column of a scan, as ``Writer`` lists it


class HashRange(NamedTuple):
    """What one task joins: rows with hashes from ``low`` to ``high``, of the sliced relation those of some files."""

    low: int
    high: int
    files: tuple[int, ...]


def grain(tasks: int, rooms: float, *, local: bool) -> int:
    """Return how many hashes a file is to have of what ``tasks`` tasks are to read, ``rooms`` times what one of them
    can hold; 1: one file has all, sorted.

    Hashes of one file, if all have about the same rows, are a quarter at most of what a task can hold: only of sorted
    rows it is told which hashes have many.
    """
    files = _FEWEST
    while files < _FINER * max(tasks, rooms):
        files *= 2
    return BUCKETS // files if local and files <= _MOST else 1


def hash_ranges(
    probed: Sequence[Sequence[float]],
    built: Sequence[float],
    count: int,
    *,
    whole: bool = False,
    grain: int = 1,
) -> list[HashRange]:
    """Return about ``count`` ranges of about equal sizes.

    A range with a key that most rows of the sliced relation have is read by several tasks, each of which has all of
    the other relations' rows in it and some of the sliced one's files.

    Args:
        probed: bytes by hash, of each file of the sliced relation; 0 where there is no row.
        built: bytes by hash of the others.
        count: of tasks.
        whole: no range is read by several tasks, and one without rows of the sliced relation is read, too.
        grain: so many hashes are in one range.
    """
    totals = [sum(sizes) for sizes in zip(*probed, strict=True)] or [0.0] * len(built)
    both = [a + b for a, b in zip(totals, built, strict=True)]
    runs = split([(n, sum(both[n : n + grain])) for n in range(0, len(both), grain)], count)
    if whole and runs:
        bounds = [0, *(run[0] for run in runs[1:]), len(built)]
        return [HashRange(low, high - 1, tuple(range(len(probed)))) for low, high in pairwise(bounds)]
    mean, found = sum(totals) / count, []
    for run in runs:
        low, high = run[0], min(run[-1] + grain, len(both)) - 1
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
            low, high = (bounds.low, bounds.high) if known(bounds) else (0, BUCKETS - 1)
            for bucket in range(low, high + 1) if count else ():
                found[bucket] += file.size * count / total / (high - low + 1)
        sizes.append(found)
        rows.append(total)
    return sizes, rows


class Exchange(NamedTuple):
    """What writes a scan's rows, or groups of them, with their hashes: a statement, and columns of the scan."""

    sql: str
    columns: tuple[str, ...]  # that it writes...
    read: tuple[str, ...] = ()  # ...and those that it reads
    others: tuple[int, ...] = ()  # scans that its tests read
    part: float = 1.0  # of rows that tests for keys may leave
    calls: tuple[tuple[str, str], ...] = ()  # columns of calls of groups, and their Spark SQL types
    groups: bool = False  # of rows that are alike in its ``columns``
    within: tuple[Within, ...] = ()  # what all rows that it writes have

    def over(self, sql: str, columns: Sequence[Attribute]) -> str:
        """Return a statement over its scan, which has these columns, over what is written: of those that the
        statement reads nowhere there are NULLs."""
        nulls = {
            f"{reading(one)} AS {one.column}": f"{cast('NULL', one.type)} AS {one.column}"
            for one in columns
            if one.name not in self.columns
        }
        return _LISTED.sub(lambda found: nulls.get(found[0], found[0]), sql)

    def of(self, relation: Relation, scheme: str, entries: Sequence[FileEntry]) -> Relation:
        """Return as a relation what was written of ``relation``."""
        names = {name.lower() for name in self.columns}
        kept = tuple((name, kind) for name, kind in relation.columns if name.lower() in names)
        return Relation(relation.name, scheme, tuple(entries), (*kept, *self.calls, (BUCKET, "int")))


def writing(
    exchanges: Mapping[str, Exchange],
    scans: Mapping[str, Relation],
    count: Callable[[Exchange, Relation], int],
    grain: int = 1,
) -> dict[str, list[Part]]:
    """Return by scan the parts that write what is exchanged, the largest scans' first; ``count`` tells the tasks for
    one, ``grain`` how many hashes a file is to have.

    Raises ``TableError``.
    """
    found = {}
    by = f"{BUCKET} // {grain}" if grain > 1 else ""
    for name, exchange in sorted(exchanges.items(), key=lambda item: -scans[item[0]].bytes):
        relation = scans[name]
        found[name] = [
            Part(
                exchange.sql if by else f"{exchange.sql} ORDER BY {BUCKET}",
                (replace(relation, files=cut.files), *(scans[f"s{other}"] for other in exchange.others)),
                f".native-{name}-{number:05d}.parquet",
                name if cut.rows else "",
                cut.rows,
                group=GROUP,
                by=by,
            )
            for number, cut in enumerate(
                cuts(relation, count(exchange, relation), needed(relation, exchange.within))
            )
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
        entries = [
            FileEntry(info.path, info.size, 0.0) for part in parts[name] for info in _infos(output, part)
        ]
        found[name] = exchange.of(scans[name], output.scheme, entries)
        sizes[name], counted = bucket_sizes(found[name])
        seen += sum(counted)
    if seen != rows:
        raise NotDoneError("what its tasks have exchanged is not what they wrote")
    return found, sizes


def _infos(output: StorageLocation, part: Part) -> list[Any]:
    """Return what the file system tells of what a part has written."""
    if not part.by:
        return [output.fs().get_file_info(output.path(part.file))]
    return [info for info in listing(output.fs(), output.path(part.file)) if info.is_file]


def joining(
    statement: str,
    scans: Mapping[str, Relation],
    sizes: Mapping[str, Sequence[Sequence[float]]],
    sliced: str,
    file: str,
    count: Callable[[float, float], int],
    room: float,
    *,
    whole: bool = False,
    grain: int = 1,
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
        whole: all rows of one hash must be in one part.
        grain: how many hashes a file has.

    Raises ``NotDoneError`` where rows of one hash, or of those of one file, are more.
    """
    probed = sizes[sliced]
    built = [sum(one) for one in zip(*(f for n, fs in sizes.items() if n != sliced for f in fs), strict=True)]
    built = built or [0.0] * (len(probed[0]) if probed else BUCKETS)
    tasks = count(sum(map(sum, probed)), sum(built))
    parts: list[Part] = []
    ranges_ = [
        HashRange(first, last, one.files)
        for one in hash_ranges(probed, built, tasks, whole=whole, grain=grain)
        for first, last in _fitting(built, one.low, one.high, room, grain)
    ]
    for low, high, some in ranges_:
        part = Part(statement, tuple(scans.values()), file.format(len(parts)))
        parts.append(_of_hashes(part, sizes, low, high, {sliced: some}))
    return parts


def finer_writing(part: Part, scans: Mapping[str, Relation], count: int) -> list[Part]:
    """Return a part that writes what is exchanged of one of ``scans`` as at most ``count``, which name no files.

    Raises ``TableError``.
    """
    own, *others = part.relations
    found = finer(scans[own.name], Cut(own.files, part.rows), count)
    return [
        replace(
            part,
            relations=(replace(own, files=cut.files), *others),
            sliced=own.name if cut.rows else "",
            rows=cut.rows,
        )
        for cut in found
    ]


def finer_joining(
    part: Part,
    scans: Mapping[str, Relation],
    sizes: Mapping[str, Sequence[Sequence[float]]],
    grain: int,
    count: int,
) -> list[Part]:
    """Return a part of ``joining`` as at most ``count``, each with some of its hashes, which name no files."""
    low, high = part.ranges[0].low, part.ranges[0].high
    assert isinstance(low, int)
    assert isinstance(high, int)
    places = {name: {f.path: n for n, f in enumerate(scans[name].files)} for name in sizes}
    read = {
        one.name: [sizes[one.name][places[one.name][file.path]] for file in one.files]
        for one in part.relations
        if one.name in sizes
    }
    each = [
        (n, sum(sum(of[n : min(n + grain, high + 1)]) for files in read.values() for of in files))
        for n in range(low, high + 1, grain)
    ]
    return [_of_hashes(part, read, run[0], min(run[-1] + grain - 1, high), {}) for run in split(each, count)]


def _of_hashes(
    part: Part,
    sizes: Mapping[str, Sequence[Sequence[float]]],
    low: int,
    high: int,
    some: Mapping[str, Collection[int]],
) -> Part:
    """Return a part that reads a range of hashes of the relations in ``sizes``: of ``some`` only those files."""
    relations = tuple(
        _holding(one, sizes[one.name], low, high, some.get(one.name)) if one.name in sizes else one
        for one in part.relations
    )
    ranges = tuple(KeyRange(name, BUCKET, low, high) for name in sizes)
    return replace(part, relations=relations, ranges=ranges)


def _holding(
    relation: Relation, sizes: Sequence[Sequence[float]], low: int, high: int, some: Collection[int] | None
) -> Relation:
    """Return ``relation`` with those of its files, ``some`` at most, that have hashes of a range."""
    held = (n for n in (range(len(sizes)) if some is None else some) if any(sizes[n][low : high + 1]))
    return replace(relation, files=tuple(relation.files[n] for n in held))


def _fitting(built: Sequence[float], low: int, high: int, room: float, grain: int) -> list[tuple[int, int]]:
    """Cut a range of hashes into runs of whole grains whose rows fit: of a grain's file each task reads all.

    Raises ``NotDoneError`` where those of one grain do not.
    """
    runs: list[tuple[int, int]] = []
    first, held = low, 0.0
    for number in range(low, high + 1, grain):
        size = sum(built[number : min(number + grain, high + 1)])
        if size > room:
            raise NotDoneError("rows of one key do not fit into a task's memory")
        if held + size > room:
            runs.append((first, number - 1))
            first, held = number, 0.0
        held += size
    return [*runs, (first, high)]
