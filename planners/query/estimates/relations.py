"""What is known of single relations: statistics, and what their local predicates leave.

How many values ``IN (SELECT ...)`` admits.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

from sqlglot import exp

from ebbflow.planners.model import ColumnStatistics
from ebbflow.planners.query.estimates.selectivity import back_off, independent_parts, single_column
from ebbflow.planners.query.sql.joingraph import Column, JoinGraph, Predicate
from ebbflow.planners.query.sql.predicates import conjuncts

KEY_RATIO = 0.9  # a column with at least this many distinct values per row is a key
DEFAULT_DISTINCT = 200.0  # for a column of which nothing is known


@dataclass(frozen=True, slots=True)
class RelationInput:
    """What is known of one relation of a join graph."""

    rows: float  # before its local predicates
    bytes_stored: float  # all columns, as stored
    columns: Mapping[str, ColumnStatistics] = field(default_factory=dict)
    version: str = ""


def conjunction_text(predicates: Iterable[Predicate]) -> str:
    """Return the key under which the measured selectivity of several predicates together is looked up."""
    return " AND ".join(sorted(p.text for p in predicates))


def distinct_after(distinct: float, rows: float, kept: float) -> float:
    """Return the expected distinct values left when a fraction ``kept`` of ``rows`` is drawn independently of
    the column (Cardenas 1975; an approximation to Yao 1977): ``d·(1 − (1 − kept)^(rows/d))``."""
    if distinct <= 0.0 or rows <= 0.0:
        return 0.0
    per_value = max(rows, distinct) / distinct
    return distinct * (1.0 - math.pow(1.0 - min(max(kept, 0.0), 1.0), per_value))


class LocalEstimates:
    """Statistics and row counts of the single relations of a join graph."""

    def __init__(
        self, graph: JoinGraph, inputs: Sequence[RelationInput], measured: Mapping[str, float]
    ) -> None:
        self._graph = graph
        self._inputs = inputs
        self._measured = measured
        self._columns = {
            (ref.alias, name): _completed(statistics, given.rows)
            for ref, given in zip(graph.relations, inputs, strict=True)
            for name, statistics in given.columns.items()
        }
        self._kept: list[dict[str, float]] = []
        self._rows: list[float] = []
        for i in range(len(inputs)):
            self._add(i)

    def rows(self, i: int) -> float:
        """Return the estimated rows of relation ``i`` after its local predicates; may be below 1."""
        return self._rows[i]

    def kept(self, column: Column) -> float:
        """Return the fraction of rows that the predicates on ``column`` alone keep."""
        i = self._graph.index.get(column[0])
        return 1.0 if i is None else self._kept[i].get(column[1], 1.0)

    def statistics(self, column: Column) -> ColumnStatistics:
        """Return a column's statistics before any predicate, the missing ones filled in."""
        found = self._columns.get(column)
        if found is None:
            i = self._graph.index.get(column[0])
            rows = self._inputs[i].rows if i is not None else DEFAULT_DISTINCT
            found = self._columns[column] = _completed(ColumnStatistics(), rows)
        return found

    def ndv(self, column: Column) -> float:
        """Return a column's distinct values before any predicate."""
        return self.statistics(column).distinct or 1.0

    def is_key(self, column: Column) -> bool:
        """Tell whether nearly every row has its own value of ``column``."""
        rows = self._inputs[self._graph.index[column[0]]].rows
        return rows > 0.0 and self.ndv(column) >= KEY_RATIO * rows

    def distinct(self, i: int, names: Iterable[str]) -> float:
        """Return the expected distinct combinations of columns of relation ``i`` after its local predicates.
        Predicates on the columns themselves cut their values; all others thin them out (Cardenas)."""
        alias, rows = self._graph.relations[i].alias, self._inputs[i].rows
        values = 1.0
        for name in names:
            kept = self.kept((alias, name))
            values *= max(self.ndv((alias, name)) * kept, 1.0)
            rows *= kept
        rows = max(rows, 1.0)
        left = distinct_after(min(values, rows), rows, self._rows[i] / rows)
        return max(left, 1.0)

    def _add(self, i: int) -> None:
        predicates = self._graph.local(i)
        # An OR that its own implied parts restate must not count twice.
        disjunctions = [p for p in predicates if not p.implied and isinstance(p.expression.unnest(), exp.Or)]
        predicates = tuple(
            p for p in predicates if not (p.implied and any(p.columns <= d.columns for d in disjunctions))
        )
        own: dict[str, list[Predicate]] = {}
        for predicate in predicates:
            column = None if predicate.subquery else single_column(predicate.expression)
            if column is not None:
                own.setdefault(column[1], []).append(predicate)
        kept = {name: self.together(group) for name, group in own.items()}
        measured = self._measured.get(conjunction_text(self._graph.local(i)))
        fraction = self.together(predicates) if measured is None else min(max(measured, 0.0), 1.0)
        fraction *= self._same_relation(i)
        self._kept.append(kept)
        self._rows.append(self._inputs[i].rows * fraction)

    def together(self, predicates: Sequence[Predicate]) -> float:
        """Return the fraction that all of ``predicates`` keep: measured where it was, estimated elsewhere."""
        if not predicates:
            return 1.0
        whole = self._measured.get(conjunction_text(predicates))
        if whole is not None:
            return min(max(whole, 0.0), 1.0)
        measured = [self._measured[p.text] for p in predicates if p.text in self._measured]
        rest = [p.expression for p in predicates if p.text not in self._measured]
        return back_off([*measured, *independent_parts(rest, self.statistics)])

    def _same_relation(self, i: int) -> float:
        """Return the fraction kept by equalities between columns of one relation (two in one class)."""
        alias = self._graph.relations[i].alias
        fraction = 1.0
        for cls in self._graph.classes:
            values = sorted(self.ndv(c) for c in cls.columns if c[0] == alias)
            for value in values[1:]:
                fraction /= max(value, 1.0)
        return fraction


def _completed(statistics: ColumnStatistics, rows: float) -> ColumnStatistics:
    """Fill in the distinct count: the width of an integer range, or a default; never more than the rows."""
    distinct = statistics.distinct
    if distinct is None:
        low, high = statistics.low, statistics.high
        distinct = DEFAULT_DISTINCT
        if isinstance(low, int | float) and isinstance(high, int | float):
            distinct = high - low + 1.0 if float(low).is_integer() and float(high).is_integer() else rows
    return replace(statistics, distinct=max(min(distinct, rows), 1.0))


class Relation(Protocol):
    """What is known of a table or view."""

    @property
    def rows(self) -> float: ...
    @property
    def columns(self) -> Mapping[str, ColumnStatistics]: ...


class Values(NamedTuple):
    """The distinct values of a column before and after some conditions."""

    distinct: float
    whole: float
    rows: float  # read to find them
    bytes_read: float


def values_after(column: ColumnStatistics, rows: float, kept: float) -> Values:
    """Return the values of ``column`` that ``kept`` of ``rows`` rows still have; an unknown column is a key."""
    whole = max(min(column.distinct or rows, rows), 1.0)
    left = distinct_after(whole, rows, kept / rows) if rows > 0.0 else 0.0
    return Values(min(left, max(kept, 1.0)), whole, rows, rows * column.width)


def member_values(
    node: exp.In,
    relation: Callable[[str], Relation | None],
    fraction: Callable[[str, str, Sequence[exp.Expr]], float],
) -> Values | None:
    """Return the values that ``x IN (SELECT column FROM table WHERE ...)`` admits, ``None`` for other subqueries.

    ``fraction(table, alias, conjuncts)`` tells what part of a table's rows conditions keep.
    """
    query = node.args.get("query")
    select = query.unnest() if isinstance(query, exp.Query) else None
    if not isinstance(select, exp.Select) or len(select.selects) != 1:
        return None
    if any(select.args.get(key) for key in ("joins", "group", "having", "limit", "laterals", "with_")):
        return None
    start, column = select.args.get("from_"), select.selects[0].unalias()
    if start is None or not isinstance(start.this, exp.Table) or not isinstance(column, exp.Column):
        return None
    known = relation(start.this.name)
    if known is None:
        return None
    where = select.args.get("where")
    parts = conjuncts(where.this.copy()) if where is not None else []
    kept = known.rows * fraction(start.this.name, start.this.alias_or_name, parts)
    return values_after(known.columns.get(column.name, ColumnStatistics()), known.rows, kept)
