"""Cuts relations into parts of about equal size, of whole files or row groups."""

import sys
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import cached_property
from itertools import accumulate
from operator import itemgetter
from typing import TypeAlias, TypeVar

from ebbflow.infra.protocols import Relation, StageJob
from ebbflow.infra.spark.native.objects import Rows
from ebbflow.infra.spark.native.worker import Part
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.tables.filefooters import Bounds, FileFooter, read_footers

T = TypeVar("T")
Value: TypeAlias = int | date
_first = itemgetter(0)
_EVEN = 1.3  # times the mean that the largest slice may have


@dataclass(frozen=True, slots=True)
class Cut:
    """One slice of a relation: some of its files, and rows of others."""

    files: tuple[FileEntry, ...]
    rows: tuple[Rows, ...] = ()


def cuts(relation: Relation, count: int, needed: Sequence[tuple[Rows, int]] | None = None) -> list[Cut]:
    """Return ``relation`` in at most ``count`` slices, in the order of its rows: of the row groups that are
    ``needed``, where others are not, with their numbers of rows.

    Raises ``TableError``.
    """
    if count <= 1 or not relation.files:
        return [Cut(relation.files)]
    if needed:
        return [Cut((), _joined(part)) for part in split(needed, count)]
    if needed is not None:  # none of its rows will do
        return [Cut(relation.files[:1])]
    whole = split([(file, file.size) for file in relation.files], count)
    sizes = [sum(file.size for file in part) for part in whole]
    if len(whole) == count and max(sizes) <= _EVEN * relation.bytes / count:
        return [Cut(tuple(part)) for part in whole]
    groups = _groups(relation, Cut(relation.files))
    return [Cut((), _joined(part)) for part in split(groups, count)] if groups else [Cut(relation.files)]


def finer(relation: Relation, cut: Cut, count: int) -> list[Cut]:
    """Return a slice of ``relation`` as at most ``count``.

    Raises ``TableError``.
    """
    if not cut.rows:
        return cuts(replace(relation, files=cut.files), count)
    groups = _groups(relation, cut) if count > 1 else []
    return [Cut((), _joined(part)) for part in split(groups, count)] if len(groups) > 1 else [cut]


def _groups(relation: Relation, cut: Cut) -> list[tuple[Rows, int]]:
    """Return the row groups of a slice that have rows, with their numbers."""
    entries = {file.path: file for file in relation.files}
    wanted = {file.path: [Rows(file.path, 0, sys.maxsize)] for file in cut.files}
    for some in cut.rows:
        wanted.setdefault(some.path, []).append(some)
    footers = read_footers(replace(relation, files=tuple(entries[path] for path in wanted)), ())
    found: list[tuple[Rows, int]] = []
    for (path, runs), told in zip(wanted.items(), footers, strict=True):
        for first, rows in zip(accumulate(told.rows, initial=0), told.rows, strict=False):
            last = first + rows - 1
            if rows and any(run.first <= first and last <= run.last for run in runs):
                found.append((Rows(path, first, last), rows))
    return found


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
        self._known: dict[str, list[tuple[int, int, Bounds]]] = {}
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
            low = bisect_left(groups, some.first, key=_first)
            high = bisect_right(groups, some.last, key=_first)
            found += [(rows, b) for _, rows, b in groups[low:high]]
        full = [bounds for rows, bounds in found if rows]
        if not full or not all(known(bounds) and bounds.nulls == 0 for bounds in full):
            return None
        return min(b.low for b in full), max(b.high for b in full)

    def share(self, low: Value, high: Value) -> float:
        """Return the part of the rows that is in row groups which may have values from ``low`` to ``high``."""
        (lows, begun), (highs, ended), unknown, total = self._sorted
        read = unknown + begun[bisect_right(lows, high)] - ended[bisect_left(highs, low)]
        return read / total if total else 1.0

    @cached_property
    def _sorted(self) -> tuple[tuple[list[Value], list[int]], tuple[list[Value], list[int]], int, int]:
        """Return least values of row groups in order, and the rows of so many first ones; the same of greatest ones;
        the rows of groups without either, and of all."""
        found = [(rows, b) for path in self._files for _, rows, b in self._groups(path)]
        told = [(rows, b) for rows, b in found if known(b)]
        sides = []
        for values in ([(b.low, rows) for rows, b in told], [(b.high, rows) for rows, b in told]):
            values.sort()
            sides.append(([v for v, _ in values], list(accumulate((r for _, r in values), initial=0))))
        total = sum(rows for rows, _ in found)
        return sides[0], sides[1], total - sum(rows for rows, _ in told), total

    def spread(self) -> int:
        """Return how many values the column may have at most, as footers tell; 0 where they do not."""
        found = [b for path in self._files for _, rows, b in self._groups(path) if rows]
        if not found or not all(map(known, found)):
            return 0
        low, high = min(b.low for b in found), max(b.high for b in found)
        return (high - low).days + 1 if isinstance(low, date) else int(high - low) + 1

    def width(self) -> float:
        """Return which part of all values a row group has between its least and its greatest one, on average; 1 where
        footers do not tell."""
        found = [b for path in self._files for _, rows, b in self._groups(path) if rows]
        if not found or not all(map(known, found)):
            return 1.0
        ranges = [(b.high - b.low).days if isinstance(b.low, date) else int(b.high - b.low) for b in found]
        return float(sum(ranges)) / (self.spread() * len(found))

    def _groups(self, path: str) -> list[tuple[int, int, Bounds]]:
        """Return the row groups of a file: first row, number of rows, bounds."""
        if path not in self._known:
            told = self._files.get(path)
            if told is None:
                return [(0, 1, Bounds(None))]
            starts = accumulate(told.rows, initial=0)
            self._known[path] = list(zip(starts, told.rows, told.bounds.get(self._column, ()), strict=False))
        return self._known[path]


def known(bounds: Bounds) -> bool:
    """Tell whether a footer says between which whole numbers or days a column's values are."""
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
