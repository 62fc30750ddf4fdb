"""Dividing a long stage into slices: ranges of one column, each computed and made durable on its own.

A node that is lost, or a change of plan, then costs the slice that runs and not the whole stage. A slice is a range
of a column that the tables are stored in the order of, so that each slice reads only its own part of them: the
borders come from Parquet footers (``infra.tables.clustering``). Columns made equal by joins are divided together, so
two tables in the order of a common key are both read once in all. What is not divided is read again by every slice.

How many slices: a run side by side, on a cluster two, so that the fixed cost o of one hides behind the work of the
other. With total time T, R seconds repeated per slice, a rate λ of losses and ρ and σ as in ``cuts``, m slices take

    E(m) = T + (m − 1)·R + m/a · (o + λ·(ρ + σ)·L²/2),    L = (T + (m − 1)·R) / (m/a) + o

(Young 1974 finds the optimal interval between checkpoints in the same way). An engine in one process has no cores
left for a second: there a is 1, and a loss costs one slice. What the division leaves whole is computed once there and
read by every slice, where that takes less.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from sqlglot import exp

from ebbflow.planners.model import Share
from ebbflow.planners.query.estimates.literals import EPOCH
from ebbflow.planners.query.estimates.relations import RelationInput
from ebbflow.planners.query.plan.cuts import rework_seconds
from ebbflow.planners.query.sql.joingraph import Column

COUNTS = (2, 4, 8, 16)  # slices a stage may have; ``ColumnStatistics.reads`` follows them
_TYPES = ("tinyint", "smallint", "int", "bigint", "date")
_WORTH = 0.02  # a division must save this fraction of the expected time
AT_ONCE = 2  # slices of a stage that run side by side on a cluster


@dataclass(frozen=True)
class Grid:
    """Cells of one column's range, and the columns that a slice restricts to its cells.

    ``columns`` are equal in every row of the result, or a single one. ``reads`` tell per alias how many times its
    table is read in all by 2, 4, 8, 16 slices (empty: once by each slice).
    """

    columns: tuple[Column, ...]
    dates: frozenset[Column]  # those of type DATE; the others are whole numbers
    edges: tuple[float, ...]
    nulls: bool  # rows without a value belong to the first cell; otherwise no result has any
    reads: Mapping[str, tuple[float, ...]]

    @property
    def cells(self) -> int:
        """Return how many cells there are."""
        return len(self.edges) + 1

    @property
    def name(self) -> str:
        """Return what is divided, for people and for fingerprints."""
        return ", ".join(f"{alias}.{column}" for alias, column in self.columns)

    def times_read(self, alias: str, slices: int) -> float:
        """Return how many times the table under ``alias`` is read by ``slices`` slices."""
        known = self.reads.get(alias) or ()
        return known[COUNTS.index(slices)] if known else float(slices)

    def conditions(self, first: int, last: int) -> dict[Column, exp.Expr]:
        """Return per column the predicate of the cells ``first`` to ``last`` (exclusive).

        Raises ``ValueError`` for cells that the grid does not have.
        """
        if not 0 <= first < last <= self.cells:
            raise ValueError(f"cells must be within 0 to {self.cells}; got {first} to {last}")
        out: dict[Column, exp.Expr] = {}
        for column in self.columns:
            parts: list[exp.Expr] = []
            if first > 0:
                parts.append(_node(column) >= self._literal(column, self.edges[first - 1]))
            if last < self.cells:
                parts.append(_node(column) < self._literal(column, self.edges[last - 1]))
            if parts:
                inside = exp.and_(*parts)
                keeps_nulls = self.nulls and first == 0
                out[column] = exp.or_(inside, _node(column).is_(exp.Null())) if keeps_nulls else inside
        return out

    def bounds(self, first: int, last: int) -> tuple[float | None, float | None]:
        """Return the least value and the first value beyond the cells; ``None`` where there is no border."""
        return (self.edges[first - 1] if first else None, self.edges[last - 1] if last < self.cells else None)

    def _literal(self, column: Column, value: float) -> exp.Expr:
        if column in self.dates:
            return exp.cast(exp.Literal.string((EPOCH + timedelta(days=int(value))).isoformat()), "date")
        return exp.Literal.number(int(value))


def _node(column: Column) -> exp.Column:
    return exp.column(column[1], table=column[0])


@dataclass(frozen=True)
class Division:
    """How a stage is divided."""

    slices: int
    seconds: float  # expected, losses included
    whole: float  # expected without division


def divide(
    seconds: float,
    repeated: float,
    reread: Callable[[int], float],
    overhead: float,
    share: Share,
    counts: Sequence[int] = COUNTS,
    at_once: int = AT_ONCE,
) -> Division:
    """Return the best number of slices for a stage, 1 for none; with a single one in ``counts``, that.

    ``seconds`` is the stage's time on the share, ``repeated`` what each further slice computes again, ``reread``
    gives the seconds of reading more of the divided tables than once by number of slices, ``overhead`` the fixed
    cost of a statement. ``at_once`` run side by side.
    """
    whole = seconds + overhead + rework_seconds(seconds + overhead, share)
    best = Division(1, whole, whole)
    for slices in counts:
        total = seconds + (slices - 1) * repeated + reread(slices)
        rounds = slices / at_once
        length = total / rounds + overhead
        expected = total + rounds * (overhead + rework_seconds(length, share))
        if len(counts) == 1 or expected < best.seconds - _WORTH * whole:
            best = Division(slices, expected, whole)
    return best


def grids(
    relations: Mapping[str, RelationInput],
    types: Callable[[Column], str],
    classes: Sequence[Sequence[Column]],
) -> list[Grid]:
    """Return the grids that a statement over the base tables ``relations`` (by alias) may be divided by.

    ``classes`` are columns that its own joins make equal; ``types`` gives a column's Spark SQL type. Every column
    with ``edges`` gives one, an equality class the one of its largest table. Columns of different kinds of types are
    not divided together.
    """
    out = []
    equal = [members for members in classes if len({alias for alias, _ in members}) > 1]
    together = [[c for c in members if c[0] in relations] for members in equal]
    joined = {column for members in together for column in members}
    for alias, given in sorted(relations.items()):
        ordered = [(alias, name) for name, known in given.columns.items() if known.edges]
        together += [[column] for column in ordered if column not in joined]
    for members in together:
        kinds = {(types(c) == "date") if types(c) in _TYPES else None for c in members}
        with_edges = (
            [c for c in members if relations[c[0]].columns[c[1]].edges] if kinds <= {True, False} else []
        )
        if not with_edges or len(kinds) > 1:
            continue
        largest = max(with_edges, key=lambda c: (relations[c[0]].rows, c))
        reads = {c[0]: relations[c[0]].columns[c[1]].reads for c in members}
        edges = relations[largest[0]].columns[largest[1]].edges
        dates = frozenset(c for c in members if types(c) == "date")
        nulls = any(c not in joined for c in members)
        out.append(Grid(tuple(sorted(members)), dates, edges, nulls, reads))
    return out


def aligned_tables(select: exp.Select, grid: Grid) -> list[str]:
    """Return the tables of correlated subqueries of ``select`` that an equality ties to a divided column, one entry
    for each place where one is read.

    Engines restrict them to the same range: a subquery's rows can only match those of the slice.
    """
    found: dict[int, str] = {}
    divided = set(grid.columns)
    for subquery in select.find_all(exp.Select):
        if subquery is select:
            continue
        own = {t.alias_or_name: t for t in subquery.find_all(exp.Table) if t.parent_select is subquery}
        for equality in subquery.find_all(exp.EQ):
            one, other = equality.this, equality.expression
            if not isinstance(one, exp.Column) or not isinstance(other, exp.Column):
                continue
            for outside, inside in ((one, other), (other, one)):
                if (outside.table, outside.name) in divided and inside.table in own:
                    found[id(own[inside.table])] = own[inside.table].name
    return list(found.values())


def runs(done: Sequence[tuple[int, int]], cells: int, slices: int) -> Iterator[tuple[int, int]]:
    """Yield the slices still to run: runs of cells not in ``done``, each of at most cells / ``slices`` cells.

    >>> list(runs([(4, 8)], 16, 4))
    [(0, 4), (8, 12), (12, 16)]
    """
    step = max(cells // slices, 1)
    covered = {cell for first, last in done for cell in range(first, last)}
    start = None
    for cell in range(cells + 1):
        open_ = cell < cells and cell not in covered
        if start is not None and (not open_ or cell - start == step):
            yield start, cell
            start = None
        if open_ and start is None:
            start = cell
