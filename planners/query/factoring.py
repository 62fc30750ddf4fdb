"""Joins that correlated subqueries hang on, computed once and told to the subqueries.

Where nothing on a single relation restricts what a correlated subquery is asked for, the result of the joins below it
may (TPC-H Q21: one nation's late suppliers, against two subqueries over all of lineitem). The joins become a view of
their own; the query reads it once for its rows, and once in each subquery for the values that may be asked for:

    before: SELECT s.name FROM s, l, o WHERE <joins> AND EXISTS (SELECT * FROM l m WHERE m.ok = l.ok AND ...)
    after:  _b1 AS (SELECT s.name AS s__name, l.ok AS l__ok FROM s, l, o WHERE <joins>)
            SELECT _b1.s__name FROM _b1
            WHERE EXISTS (SELECT * FROM l m WHERE m.ok = _b1.l__ok AND ... AND m.ok IN (SELECT _b1.l__ok FROM _b1))

Read several times, the view is a natural checkpoint.
"""

from collections.abc import Iterator
from dataclasses import replace

from sqlglot import exp

from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.blocks import Block
from ebbflow.planners.query.cost import CostModel, write
from ebbflow.planners.query.families import Families, families
from ebbflow.planners.query.operators import Size, scan
from ebbflow.planners.query.parse import is_volatile, outside_tables
from ebbflow.planners.query.predicates import canonical, conjuncts, free_columns
from ebbflow.planners.query.reduction import (
    Fractions,
    Key,
    Reduction,
    broadcast,
    correlated,
    keys_of,
    plain_tables,
    saved,
    subqueries_of,
)
from ebbflow.planners.query.sizes import Sizes
from ebbflow.planners.query.staging import Analysis, BlockId
from ebbflow.planners.query.views import View, ViewChain

_CORES = 3.0  # that a statement more is taken to keep waiting: the share is not known yet


def factored(
    analysis: Analysis, catalogue: Catalogue, model: CostModel, fractions: Fractions, sizes: Sizes
) -> ViewChain:
    """Return the chain with the joins factored out where that saves more than it costs."""
    chain = analysis.chain
    if not any(correlated(view) for view in chain.views):
        return chain
    known = families(chain, catalogue)
    taken = {i.name.lower() for v in chain.views for i in v.query.find_all(exp.Identifier)} | set(
        catalogue.tables
    )
    views: list[View] = []
    for view in chain.views:
        plain = Reduction(view, chain, catalogue, model, fractions, known[view.name])
        rest = view
        for key in analysis.blocks_of(view.name):
            block = analysis.blocks[key]
            keys = list(_keys(view, block, known[view.name]))
            if keys and _gain(plain, sizes, key, keys) > max(plain.gain(block.select), 0.0):
                name = next(n for i in range(1, len(taken) + 2) if (n := f"_b{i}") not in taken)
                taken.add(name)
                below, rest = _split(rest, key, block, keys, name)
                views.append(below)
        views.append(rest)
    return chain if len(views) == len(chain.views) else replace(chain, views=tuple(views))


def _keys(view: View, block: Block, kinds: Families) -> Iterator[tuple[exp.Select, Key]]:
    """Yield the subqueries in the WHERE above ``block`` with what correlates them to its columns."""
    where = block.select.args.get("where")
    if where is None or block.barriers or view.volatile or is_volatile(view.query):
        return
    tables = {r.alias: r.source for r in block.graph.relations}
    for inner in subqueries_of(where):
        own = plain_tables(inner)
        for key in keys_of(inner, tables):
            kind = kinds.get(own.get(key.inner.table, ""), {}).get(key.inner.name)
            outer = kinds.get(tables[key.outer[0]], {}).get(key.outer[1])
            if kind is not None and kind == outer:
                yield inner, key


def _gain(plain: Reduction, sizes: Sizes, block: BlockId, keys: list[tuple[exp.Select, Key]]) -> float:
    """Return the core-seconds that factoring saves."""
    model, cardinalities = plain.model, sizes.blocks[block]
    everything = cardinalities.graph.everything
    total = -model.latency * _CORES
    for inner, key in keys:
        alias = key.inner.table
        asked = plain.asked_rows(inner, alias, plain_tables(inner).get(alias, ""))
        distinct = cardinalities.distinct(everything, [key.outer])
        whole = max(cardinalities.statistics(key.outer).distinct or 1.0, 1.0)
        total += saved(model, asked, distinct / whole, distinct)
    stored = Size(cardinalities.rows(everything), cardinalities.bytes(everything))
    copies = 1 + len(keys)
    return total - model.core_seconds(write(stored)) - copies * model.core_seconds(scan(stored))


def _split(
    view: View, key: BlockId, block: Block, keys: list[tuple[exp.Select, Key]], name: str
) -> tuple[View, View]:
    """Return the view of the joins of ``block``, and ``view`` reading it."""
    query = view.query.copy()
    copy = replace(view, query=query)
    select = list(copy.selects())[key[1]]
    kept = {canonical(part) for part in block.top}
    where = select.args["where"]
    parts = conjuncts(where.this.copy())
    columns = sorted(block.top_columns)
    below = exp.select(*(exp.alias_(exp.column(c, table=a), f"{a}__{c}") for a, c in columns))
    below.set("from_", select.args["from_"].copy())
    below.set("joins", [j.copy() for j in select.args["joins"]])
    moved = [p for p in parts if canonical(p) not in kept]
    if moved:
        below.set("where", exp.Where(this=exp.and_(*(p.copy() for p in moved))))
    above = exp.Where(this=exp.and_(*(p.copy() for p in parts if canonical(p) in kept)))
    select.set("where", above)
    asked = [(canonical(inner), k) for inner, k in keys]
    for inner in list(subqueries_of(above)):
        for text, k in asked:
            if canonical(inner) == text:
                reader = exp.select(exp.column(f"{k.outer[0]}__{k.outer[1]}", table=name)).from_(name)
                broadcast(reader)
                inner.where(exp.In(this=k.inner.copy(), query=exp.Subquery(this=reader)), copy=False)
                asked.remove((text, k))
                break
    inside = {a for a, _ in columns}
    select.set("from_", None)
    select.set("joins", None)
    for value in select.args.values():
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, exp.Expr):
                for column in list(free_columns(node)):
                    if column.table in inside:
                        column.set("this", exp.to_identifier(f"{column.table}__{column.name}"))
                        column.set("table", exp.to_identifier(name))
    select.set("from_", exp.From(this=exp.alias_(exp.Table(this=exp.to_identifier(name)), name, table=True)))
    return (
        _view(name, below, frozenset(view.reads_views)),
        _view(view.name, query, frozenset({*view.reads_views, name})),
    )


def _view(name: str, query: exp.Query, views: frozenset[str]) -> View:
    named = {t.name for t in outside_tables(query)}
    return View(name, query, tuple(sorted(named & views)), tuple(sorted(named - views)), volatile=False)
