"""Hints for the engine: which of the sets that ``IN`` asks for are small."""

from dataclasses import replace

from sqlglot import exp

from ebbflow.planners.query.estimates.relations import member_values
from ebbflow.planners.query.sql.predicates import free_columns
from ebbflow.planners.query.subqueries.known import AnalyzedChain
from ebbflow.planners.query.subqueries.reduction import MOST_KEYS, broadcast
from ebbflow.planners.query.views.views import View, ViewChain


def hinted(chain: ViewChain, known: AnalyzedChain) -> ViewChain:
    """Return ``chain`` with a broadcast of every small set that an ``IN`` asks for; the same where there is none."""
    if known.model.engine != "spark" or not any(_asks(view) for view in chain.views):
        return chain  # DuckDB does as much by itself
    views = tuple(_hinted(view, known) for view in chain.views)
    changed = any(new is not old for new, old in zip(views, chain.views, strict=True))
    return replace(chain, views=views) if changed else chain


def _asks(view: View) -> bool:
    """Tell whether a condition of ``view`` has a subquery."""
    return not view.opaque and any(
        isinstance(select.parent, (exp.Subquery, exp.Exists, exp.In))
        for select in view.query.find_all(exp.Select)
    )


def _hinted(view: View, known: AnalyzedChain) -> View:
    """Return ``view`` with a broadcast of every small set that an ``IN`` asks for.

    The engine would see the size of the files below it, shuffle both sides, and learn better when that is done.
    """
    chain, sizes = known.analysis.chain, known.sizes
    if view.opaque or view.name not in chain.by_name:
        return view
    query = view.query.copy()
    hinted = False
    for node in list(query.find_all(exp.In)):
        select = node.args["query"].unnest() if node.args.get("query") is not None else None
        if not isinstance(select, exp.Select) or select.args.get("hint") is not None:
            continue
        if node.find_ancestor(exp.Not, exp.Or, exp.Case) is not None or any(
            True for _ in free_columns(select)
        ):
            continue
        start = select.args.get("from_")
        source = start.this.name if start is not None and isinstance(start.this, exp.Table) else ""
        table = known.catalogue.get(source)
        estimated = source in view.reads_views or (table is not None and table.statistics is not None)
        if not estimated or (source in view.reads_views and source not in chain.by_name):
            continue
        members = member_values(
            node,
            lambda name: sizes.relation(view, name),
            lambda name, alias, parts: sizes.fraction(view, name, alias, parts),
        )
        if members is not None and members.distinct <= MOST_KEYS:
            broadcast(select)
            hinted = True
    return replace(view, query=query) if hinted else view
