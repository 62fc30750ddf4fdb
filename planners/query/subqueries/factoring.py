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

from ebbflow.planners.query.costs.cost import write
from ebbflow.planners.query.costs.operators import Size, scan
from ebbflow.planners.query.costs.sizes import Sizes
from ebbflow.planners.query.plan.analysis import BlockId
from ebbflow.planners.query.sql.freezing import is_volatile
from ebbflow.planners.query.sql.predicates import canonical
from ebbflow.planners.query.subqueries.known import AnalyzedChain
from ebbflow.planners.query.subqueries.lifting import joins_view, lifted_name, reading, unused_names
from ebbflow.planners.query.subqueries.reduction import (
    Key,
    Reduction,
    broadcast,
    correlated,
    keys_of,
    plain_tables,
    saved,
    subqueries_of,
)
from ebbflow.planners.query.views.blocks import Block
from ebbflow.planners.query.views.column_types import Families, families
from ebbflow.planners.query.views.views import View, ViewChain

_CORES = 3.0  # that a statement more is taken to keep waiting: the share is not known yet


def factored(chain: ViewChain, known: AnalyzedChain) -> ViewChain:
    """Return ``chain``, that of ``known``, with the joins factored out where that saves more than it costs."""
    if known.model.engine != "spark" or not any(correlated(view) for view in chain.views):
        return chain  # DuckDB does as much by itself
    analysis, kinds = known.analysis, families(chain, known.catalogue)
    names = unused_names(chain, known.catalogue)
    views: list[View] = []
    for view in chain.views:
        plain = Reduction(view, chain, known, kinds[view.name])
        rest = view
        for key in analysis.blocks_of(view.name):
            block = analysis.blocks[key]
            keys = list(_keys(view, block, kinds[view.name]))
            if keys and _gain(plain, known.sizes, key, keys) > max(plain.gain(block.select), 0.0):
                below, rest = _split(rest, key, block, keys, next(names))
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
    model, cardinalities = plain.known.model, sizes.blocks[block]
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
    asked = [(canonical(inner), k) for inner, k in keys]

    def tell(above: exp.Where) -> None:
        for inner in list(subqueries_of(above)):
            for text, k in asked:
                if canonical(inner) == text:
                    reader = exp.select(exp.column(lifted_name(k.outer), table=name)).from_(name)
                    broadcast(reader)
                    inner.where(exp.In(this=k.inner.copy(), query=exp.Subquery(this=reader)), copy=False)
                    asked.remove((text, k))
                    break

    return joins_view(view, block, block.top_columns, name), reading(view, key, block, name, tell)
