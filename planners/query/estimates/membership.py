"""How many values ``IN (SELECT ...)`` admits."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from sqlglot import exp

from ebbflow.planners.model import ColumnStatistics
from ebbflow.planners.query.estimates.relations import distinct_after
from ebbflow.planners.query.sql.predicates import conjuncts


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
