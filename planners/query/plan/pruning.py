"""Which files of a partitioned table a query can do without, as far as its own words tell.

A file whose partition values fail a filter of each place that reads the table gives no row to any of them. What
cannot be decided by partition columns alone counts as passed: a conjunct is weakened until it names no others.
"""

import re
from collections.abc import Iterable, Mapping

from sqlglot import exp

from ebbflow.planners.query.plan.analysis import Analysis
from ebbflow.planners.query.sql.dialect import duckdb_sql
from ebbflow.planners.query.sql.freezing import is_volatile
from ebbflow.planners.query.sql.joingraph import JoinGraph
from ebbflow.planners.query.sql.predicates import has_subquery
from ebbflow.planners.query.sql.references import outside_tables
from ebbflow.planners.query.views.restriction import own_filters

Columns = Mapping[str, str]  # partition columns in lower case, with their types
Filters = tuple[tuple[str, ...], ...]
"""Of each place that reads a table, conjuncts in DuckDB's dialect over its partition columns."""

_COMPARISONS = (exp.EQ, exp.NEQ, exp.LT, exp.LTE, exp.GT, exp.GTE)
_PARTS = (exp.Year, exp.Month, exp.Day, exp.DayOfMonth, exp.Quarter)
_ISO = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def partition_filters(
    analysis: Analysis, partitions: Mapping[str, Columns], *, portable: bool
) -> dict[str, Filters]:
    """Return what each place that reads a table asks of its partition columns, by the table's name in lower case.

    Args:
        analysis: of the query.
        partitions: the tables' partition columns, by their names in lower case.
        portable: leave out what another engine than DuckDB may answer otherwise.

    Tables that some place reads without such a filter are left out. A row of a file may be used only if, for one of
    the places, each of its conjuncts is true of the file's values.
    """
    found: dict[str, list[tuple[str, ...]] | None] = {}
    for view in analysis.chain.views:
        graphs = {
            id(select): analysis.blocks[view.name, position].graph
            for position, select in enumerate(view.selects())
            if (view.name, position) in analysis.blocks
        }
        for table in outside_tables(view.query):
            name = table.name.lower()
            if name not in partitions or table.name in view.reads_views:
                continue
            told = tuple(
                duckdb_sql(_unqualified(weak))
                for part in _conjuncts(table, graphs)
                if (weak := _weakened(part, partitions[name], portable)) is not None
            )
            places = found.setdefault(name, [])
            if not told:
                found[name] = None
            elif places is not None:
                places.append(told)
    return {name: tuple(places) for name, places in found.items() if places}


def _conjuncts(table: exp.Table, graphs: Mapping[int, JoinGraph]) -> Iterable[exp.Expr]:
    """Return conjuncts on ``table`` alone that every row used of it passes, those that joins imply too."""
    yield from own_filters(table)
    select = table.parent_select
    graph = graphs.get(id(select)) if select is not None else None
    position = graph.index.get(table.alias_or_name) if graph is not None else None
    if graph is not None and position is not None and graph.relations[position].source == table.name:
        for predicate in graph.local(position):
            if not predicate.subquery:
                yield predicate.expression


def _weakened(node: exp.Expr, columns: Columns, portable: bool) -> exp.Expr | None:
    """Return what is true whenever ``node`` is, over partition columns only; ``None`` where nothing is left."""
    node = node.unnest()
    if isinstance(node, exp.And | exp.Or):
        sides = [_weakened(side, columns, portable) for side in (node.this, node.expression)]
        kept = [exp.paren(side.copy()) for side in sides if side is not None]
        if isinstance(node, exp.And):
            return exp.and_(*kept) if kept else None
        return exp.or_(*kept) if len(kept) == 2 else None
    used = list(node.find_all(exp.Column))
    if not used or any(column.name.lower() not in columns for column in used):
        return None
    if has_subquery(node) or is_volatile(node) or (portable and not _portable(node, columns)):
        return None
    return node


def _unqualified(node: exp.Expr) -> exp.Expr:
    node = node.copy()
    for column in list(node.find_all(exp.Column)):
        column.set("table", None)
    return node


def _portable(node: exp.Expr, columns: Columns) -> bool:
    """Tell whether engines agree on ``node``: it compares a column with constants of its own type."""
    node = node.unnest()
    if isinstance(node, exp.Not):
        return _portable(node.this, columns)
    if isinstance(node, exp.And | exp.Or):
        return _portable(node.this, columns) and _portable(node.expression, columns)
    if isinstance(node, exp.Is):
        return isinstance(node.this, exp.Column) and isinstance(node.expression, exp.Null)
    if isinstance(node, exp.In):
        others = node.expressions if not node.args.get("unnest") else []
        operands = [node.this, *others]
    elif isinstance(node, exp.Between):
        operands = [node.this, node.args["low"], node.args["high"]]
    elif isinstance(node, _COMPARISONS):
        operands = [node.this, node.expression]
    else:
        return False
    kinds = {_kind(operand, columns) for operand in operands}
    texts = {"text", "iso"}
    return len(operands) > 1 and (
        kinds == {"bigint"} or (kinds <= {"string"} | texts and "string" in kinds) or kinds <= {"date", "iso"}
    )


def _kind(node: exp.Expr, columns: Columns) -> str:
    """Return the type of a column or constant; ``iso`` is a text that is a date where it is compared with one."""
    node = node.unnest()
    if isinstance(node, exp.Column):
        return columns[node.name.lower()]
    if isinstance(node, exp.Literal):
        if node.is_string:
            return "iso" if _ISO.fullmatch(node.name) else "text"
        return "bigint" if node.name.isdecimal() else ""
    if isinstance(node, exp.Neg):
        return "bigint" if _kind(node.this, columns) == "bigint" else ""
    if isinstance(node, exp.Cast) and node.is_type("date"):
        return "date" if _kind(node.this, columns) in ("iso", "date") else ""
    if isinstance(node, exp.TsOrDsToDate):
        return "date" if _kind(node.this, columns) == "date" else ""
    if isinstance(node, _PARTS):
        return "bigint" if _kind(node.this, columns) == "date" else ""
    return ""
