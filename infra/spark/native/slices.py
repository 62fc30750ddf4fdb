"""Cuts a relation into parts of about equal size: whole files, or row groups of files."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.native.worker import Rows
from ebbflow.infra.storage import files
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.tables.filefooters import footer

T = TypeVar("T")
_EVEN = 1.3  # times the mean that the largest slice may have


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


def split(items: Sequence[tuple[T, int]], count: int) -> list[list[T]]:
    """Return the items in at most ``count`` runs of about equal sums of their sizes.

    >>> split([("a", 1), ("b", 1), ("c", 2)], 2)
    [['a', 'b'], ['c']]
    """
    total, seen = sum(size for _, size in items), 0
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
