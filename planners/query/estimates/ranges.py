"""The values of a join's key that all of its sides can have.

A dimension often reaches further than the facts that refer to it: two hundred years of dates, five of them with
sales. What a filter keeps of the whole dimension then says little about the join; what it keeps of the part that the
facts refer to says all.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from sqlglot import exp

from ebbflow.planners.model import ColumnStatistics
from ebbflow.planners.query.estimates.intervals import Interval, covered
from ebbflow.planners.query.estimates.relations import conjunction_text
from ebbflow.planners.query.sql.joingraph import Column, JoinGraph, Predicate

WHOLE = 0.95  # of a column's rows: a range that holds so many is no range


class KeyRange(NamedTuple):
    """Values from ``low`` to ``high``; none where they are the other way round."""

    low: float
    high: float

    def share(self, statistics: ColumnStatistics) -> float:
        """Return the fraction of a column's present values inside, taken as evenly spread."""
        present = 1.0 - statistics.nulls
        if present <= 0.0 or self.low > self.high:
            return 0.0
        return covered(Interval(self.low, self.high), statistics) / present


def common_range(columns: Iterable[ColumnStatistics]) -> KeyRange | None:
    """Return the range of the values that all columns can have; ``None`` where one has none in numbers."""
    low, high = float("-inf"), float("inf")
    for column in columns:
        if not isinstance(column.low, int | float) or not isinstance(column.high, int | float):
            return None
        low, high = max(low, float(column.low)), min(high, float(column.high))
    return KeyRange(low, high)


def key_ranges(
    graph: JoinGraph, statistics: Callable[[Column], ColumnStatistics]
) -> tuple[KeyRange | None, ...]:
    """Return the common range of each equality class.

    ``None`` where it is not known, and where a predicate on one of the columns already says which values are left.
    """
    restricted = {c for p in graph.predicates if len(p.columns) == 1 and not p.subquery for c in p.columns}
    return tuple(
        None if restricted.intersection(cls.columns) else common_range(map(statistics, cls.columns))
        for cls in graph.classes
    )


def measurable(local: Sequence[Predicate]) -> list[Predicate]:
    """Return those of a relation's predicates that a sample of it can judge."""
    return [p for p in local if not p.subquery]


def within(name: str, found: KeyRange) -> exp.Expr:
    """Return the condition that integer column ``name`` is inside."""
    low, high = (exp.Literal.number(int(end)) for end in found)
    return exp.Between(this=exp.column(name, quoted=True), low=low, high=high)


def within_text(local: Sequence[Predicate], name: str, found: KeyRange) -> str:
    """Return the key under which is kept what fraction ``local`` and the range of column ``name`` keep together."""
    return f"{conjunction_text(local)} AND {name} IN [{found.low!r}, {found.high!r}]"
