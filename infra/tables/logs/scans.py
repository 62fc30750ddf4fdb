"""Files as a dataset of pyarrow's of which some rows are deleted: its scans leave them out.

Row numbers are those of whole files, so that a file with deleted rows is read row group by row group, and what a
scan's filter leaves out is left out after them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ebbflow.infra.tables.logs import deletions


@dataclass(frozen=True)
class Touched:
    """A file with deleted rows."""

    fragment: Any  # of the whole file
    deleted: bytes  # as ``TableLog.deleted`` has them
    groups: frozenset[int] | None = None  # of its row groups only these; ``None``: all


@dataclass(frozen=True)
class _Scan:
    """A scan as DuckDB asks for it."""

    columns: list[str]
    filter: Any  # perhaps of other columns
    options: Mapping[str, Any] = field(default_factory=dict)


def scannable(found: Any, fragments: Sequence[Any], touched: Sequence[Touched] = (), **options: Any) -> Any:
    """Return a dataset of ``fragments`` and of the live rows of ``touched``, all of them of the dataset ``found``.

    ``options`` are what ``pyarrow.dataset.Scanner`` takes, for each scan.
    """
    made = _kind()(list(fragments), found.schema, found.format, found.filesystem)
    made.touched, made.options = tuple(touched), options
    return made


def live(found: Any, deleted: Mapping[str, bytes]) -> Any:
    """Return the dataset ``found`` without the rows ``deleted`` of its files, by path.

    Raises ``ValueError`` where it has none of a path.
    """
    if not deleted:
        return found
    fragments = list(found.get_fragments())
    touched = [Touched(one, deleted[one.path]) for one in fragments if one.path in deleted]
    check_all(touched, deleted)
    return scannable(found, [one for one in fragments if one.path not in deleted], touched)


def check_all(touched: Sequence[Touched], deleted: Mapping[str, bytes]) -> None:
    """Raise ``ValueError`` where ``touched`` lacks a file with ``deleted`` rows, which would come back."""
    if missing := sorted(deleted.keys() - {one.fragment.path for one in touched}):
        raise ValueError(f"{missing[0]} has another name to Arrow")


@lru_cache(maxsize=1)
def _kind() -> Any:
    import pyarrow as pa
    import pyarrow.dataset as ds

    class Scannable(ds.FileSystemDataset):  # type: ignore[misc]
        """What DuckDB scans as any other dataset: it calls ``scanner``, and of what that returns ``to_reader``."""

        touched: tuple[Touched, ...]
        options: Mapping[str, Any]

        def scanner(self, columns: Any = None, filter: Any = None, **options: Any) -> Any:
            names = list(columns) if columns else self.schema.names
            asked = {"columns": names, "filter": filter, **options, **self.options}
            whole = super().scanner(**asked)
            if not self.touched:
                return whole
            return Scanner(whole, self, _Scan(names, filter, {**options, **self.options}))

    class Scanner:
        """What DuckDB needs of a scanner. Its batches are made in the thread that asks for them: one of Arrow's own
        threads would wait for others of them."""

        def __init__(self, whole: Any, dataset: Scannable, scan: _Scan) -> None:
            self._whole, self._dataset, self._scan = whole, dataset, scan
            self.projected_schema = whole.projected_schema

        def to_reader(self) -> Any:
            return pa.RecordBatchReader.from_batches(self.projected_schema, self._batches())

        def _batches(self) -> Iterator[Any]:
            yield from self._whole.to_batches()
            schema = self._dataset.schema
            read = _needed(schema, self._scan)
            for one in self._dataset.touched:
                yield from _live_batches(one, schema, self._scan, read)

    return Scannable


def _live_batches(one: Touched, schema: Any, scan: _Scan, read: Sequence[str]) -> Iterator[Any]:
    """Yield the live rows of a file that pass the filter of a scan, for which the columns ``read`` are needed."""
    import pyarrow as pa

    deleted = deletions.numbers(one.deleted)
    first, starts = 0, {}
    for group in one.fragment.row_groups:
        starts[group.id] = first
        first += group.num_rows
    for part in one.fragment.split_by_row_group(filter=scan.filter, schema=schema):
        (group,) = part.row_groups
        if one.groups is not None and group.id not in one.groups:
            continue
        first = starts[group.id]
        for batch in part.to_batches(schema=schema, columns=list(read), **scan.options):
            kept = deletions.without(batch, first, deleted)
            first += batch.num_rows
            if scan.filter is not None:
                passed = pa.Table.from_batches([kept]).filter(scan.filter)
                yield from passed.select(scan.columns).to_batches()
            elif kept.num_rows:
                yield kept


def _needed(schema: Any, scan: _Scan) -> list[str]:
    """Return the columns of a scan and those that its filter is of, which an expression does not tell."""
    import pyarrow as pa

    def is_of(names: Sequence[str]) -> bool:
        try:
            pa.schema([schema.field(name) for name in names]).empty_table().filter(scan.filter)
        except pa.ArrowInvalid:
            return False
        return True

    if scan.filter is None or is_of(scan.columns):
        return scan.columns
    others = [name for name in schema.names if name not in scan.columns]
    return scan.columns + [one for one in others if not is_of([n for n in schema.names if n != one])]
