"""The joins of a SELECT taken out into a view of their own that it reads instead."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from sqlglot import exp

from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.plan.analysis import BlockId
from ebbflow.planners.query.sql.joingraph import Column
from ebbflow.planners.query.sql.predicates import canonical, conjuncts, free_columns
from ebbflow.planners.query.sql.references import outside_tables
from ebbflow.planners.query.views.blocks import Block
from ebbflow.planners.query.views.views import View, ViewChain


def unused_names(chain: ViewChain, catalogue: Catalogue) -> Iterator[str]:
    """Yield names for views that nothing else has."""
    taken = {i.name.lower() for v in chain.views for i in v.query.find_all(exp.Identifier)}
    return (n for i in itertools.count(1) if (n := f"_b{i}") not in taken and n not in catalogue.tables)


def lifted_name(column: Column) -> str:
    """Return what a column of the joins is called in their view."""
    return f"{column[0]}__{column[1]}"


def joins_view(view: View, block: Block, columns: Iterable[Column], name: str) -> View:
    """Return the view ``name`` of the joins of ``block``, a block of ``view`` without barriers, with ``columns``."""
    kept = {canonical(part) for part in block.top}
    below = exp.select(
        *(exp.alias_(exp.column(c[1], table=c[0]), lifted_name(c)) for c in sorted(set(columns)))
    )
    below.set("from_", block.select.args["from_"].copy())
    below.set("joins", [exp.Join(this=j.this.copy(), kind="CROSS") for j in block.select.args["joins"]])
    moved = [p for p in _conjuncts(block.select) if canonical(p) not in kept]
    if moved:
        below.set("where", exp.Where(this=exp.and_(*moved)))
    return _view(name, below, frozenset(view.reads_views))


def reading(
    view: View, key: BlockId, block: Block, name: str, tell: Callable[[exp.Where], None] | None = None
) -> View:
    """Return ``view`` with block ``key`` reading the view ``name`` of its joins.

    ``tell`` may change the conditions that stay above the joins, before their columns are renamed.
    """
    query = view.query.copy()
    select = list(replace(view, query=query).selects())[key[1]]
    kept = {canonical(part) for part in block.top}
    parts = [p for p in _conjuncts(select) if canonical(p) in kept]
    for clause in ("from_", "joins", "where"):
        select.set(clause, None)
    if parts:
        above = exp.Where(this=exp.and_(*parts))
        select.set("where", above)
        if tell is not None:
            tell(above)
    inside = {alias for alias, _ in block.top_columns}
    for value in select.args.values():
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, exp.Expr):
                for column in list(free_columns(node)):
                    if column.table in inside:
                        column.set("this", exp.to_identifier(lifted_name((column.table, column.name))))
                        column.set("table", exp.to_identifier(name))
    select.set("from_", exp.From(this=exp.alias_(exp.Table(this=exp.to_identifier(name)), name, table=True)))
    return _view(view.name, query, frozenset({*view.reads_views, name}))


def _conjuncts(select: exp.Select) -> list[exp.Expr]:
    """Return what WHERE and the inner joins ask for: some of either may have to stay above the joins."""
    where = select.args.get("where")
    asked = [where.this if where is not None else None, *(j.args.get("on") for j in select.args["joins"])]
    return [part for clause in asked if clause is not None for part in conjuncts(clause.copy())]


def _view(name: str, query: exp.Query, views: frozenset[str]) -> View:
    named = {t.name for t in outside_tables(query)}
    return View(name, query, tuple(sorted(named & views)), tuple(sorted(named - views)), volatile=False)
