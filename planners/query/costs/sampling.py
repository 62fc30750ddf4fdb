"""Which predicates are worth measuring on a sample before planning."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sqlglot import exp

from ebbflow.planners.model import Catalogue, ColumnStatistics
from ebbflow.planners.query.costs.sizes import conjuncts_key, own_conjuncts
from ebbflow.planners.query.estimates.ranges import WHOLE, key_ranges, measurable, within, within_text
from ebbflow.planners.query.estimates.relations import conjunction_text
from ebbflow.planners.query.plan.analysis import Analysis
from ebbflow.planners.query.sql.dialect import duckdb_sql
from ebbflow.planners.query.sql.joingraph import Column, JoinGraph, Predicate

_INTEGERS = frozenset({"tinyint", "smallint", "int", "bigint"})


@dataclass(frozen=True, slots=True)
class Question:
    """Ask a sample of ``table`` what fraction of its rows ``sql`` (DuckDB's dialect) keeps."""

    table: str
    scope: str  # "table alias": the key of ``QueryPlanner.sample``
    key: str  # canonical predicate text: the key inside the scope
    sql: str


def questions(analysis: Analysis, catalogue: Catalogue) -> tuple[Question, ...]:
    """Return the predicates on single base tables whose selectivity planning would otherwise guess.

    Those of a relation whose key reaches beyond what it is joined with are asked once more with the common range.
    """
    out: dict[tuple[str, str], Question] = {}
    for view in analysis.chain.views:
        for position, select in enumerate(view.selects()):
            block = analysis.blocks.get((view.name, position))
            found = (
                _of_graph(block.graph, catalogue)
                if block is not None
                else _of_select(select, view.reads_views)
            )
            for question in found:
                out.setdefault((question.scope, question.key), question)
    return tuple(out.values())


def _of_graph(graph: JoinGraph, catalogue: Catalogue) -> Iterable[Question]:
    yield from _of_relations(graph)
    kinds: dict[Column, str] = {}
    known: dict[Column, ColumnStatistics] = {}
    for ref in graph.relations:
        table = None if ref.is_view else catalogue.get(ref.source)
        if table is None or table.statistics is None:
            continue
        for name, kind in table.columns:
            kinds[ref.alias, name.lower()] = kind
            known[ref.alias, name.lower()] = table.statistics.columns.get(name, ColumnStatistics())
    ranges = key_ranges(graph, lambda column: known.get(column, ColumnStatistics()))
    for cls, found in zip(graph.classes, ranges, strict=True):
        if found is None:
            continue
        for alias, name in cls.columns:
            ref = graph.relations[graph.index[alias]]
            local = measurable(graph.local(graph.index[alias]))
            if local and kinds[alias, name] in _INTEGERS and found.share(known[alias, name]) < WHOLE:
                parts = [*(p.expression for p in local), within(name, found)]
                yield _question(ref.source, alias, within_text(local, name, found), parts)


def _of_relations(graph: JoinGraph) -> Iterable[Question]:
    for i, relation in enumerate(graph.relations):
        if relation.is_view:
            continue
        local = measurable(graph.local(i))
        groups: dict[str, Sequence[Predicate]] = {p.text: (p,) for p in local}
        by_column: dict[object, list[Predicate]] = {}
        for predicate in local:
            if len(predicate.columns) == 1:
                by_column.setdefault(next(iter(predicate.columns)), []).append(predicate)
        stated = [p for p in local if not p.implied]
        for together in (*by_column.values(), local, stated):
            if len(together) > 1:
                groups[conjunction_text(together)] = together
        for key, group in groups.items():
            yield _question(relation.source, relation.alias, key, [p.expression for p in group])


def _of_select(select: exp.Select, views: Sequence[str]) -> Iterable[Question]:
    start = select.args.get("from_")
    table = start.this if start is not None else None
    if not isinstance(table, exp.Table) or table.name in views:
        return
    alias = table.alias_or_name
    parts = own_conjuncts(select, alias)
    if parts:
        yield _question(table.name, alias, conjuncts_key(parts), parts)


def _question(table: str, alias: str, key: str, parts: Sequence[exp.Expr]) -> Question:
    condition = exp.and_(*(p.copy() for p in parts))
    for column in list(condition.find_all(exp.Column)):
        column.set("table", None)
    return Question(table, f"{table.lower()} {alias}", key, duckdb_sql(condition))
