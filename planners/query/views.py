"""A query as a chain of named views: derived tables, CTEs and uncorrelated subqueries each become one.

The chain is what plans are made of: a view's inner joins can be reordered, and a view can be cut out as a
stage of its own. Whatever resists this rewriting stays where it stands and runs inside its statement.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.eliminate_subqueries import eliminate_subqueries
from sqlglot.optimizer.merge_subqueries import merge_subqueries
from sqlglot.optimizer.qualify import qualify

from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.parse import ParsedQuery, is_volatile
from ebbflow.planners.query.predicates import free_columns

ROOT = "result"  # the name of the last view; never a relation that another view reads


@dataclass(frozen=True)
class View:
    """One named query of the chain. ``query`` holds no WITH unless the view is opaque."""

    name: str
    query: exp.Query
    reads_views: tuple[str, ...]  # sorted, in-chain views that it names
    reads_tables: tuple[str, ...]  # sorted, base tables that it names
    volatile: bool  # itself or through a view it reads

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Return its output column names, in order."""
        return tuple(self.query.named_selects)

    def selects(self) -> Iterator[exp.Select]:
        """Yield the SELECTs that make up the view: itself, or the arms of its set operations."""
        stack: list[exp.Expression] = [self.query]
        while stack:
            node = stack.pop().unnest()
            if isinstance(node, exp.SetOperation):
                stack += [node.expression, node.this]
            elif isinstance(node, exp.Select):
                yield node


@dataclass(frozen=True)
class ViewChain:
    """Views in dependency order; the last one is the query's result."""

    views: tuple[View, ...]
    text: str
    notes: tuple[str, ...]

    @cached_property
    def by_name(self) -> Mapping[str, View]:
        return {v.name: v for v in self.views}

    @property
    def root(self) -> View:
        return self.views[-1]

    @cached_property
    def uses(self) -> Mapping[str, int]:
        """Return how many times each view is named by others."""
        counts = dict.fromkeys(self.by_name, 0)
        for view in self.views:
            for table in view.query.find_all(exp.Table):
                if table.name in counts:
                    counts[table.name] += 1
        return counts


def view_chain(parsed: ParsedQuery, catalogue: Catalogue) -> ViewChain:
    """Return ``parsed`` as a chain of views; never fails: at worst the whole query is one opaque view."""
    whole = parsed.expression
    notes = list(parsed.notes)
    with_ = whole.args.get("with_")
    if with_ is not None and with_.recursive:
        return _single(whole, parsed.text, (*notes, "recursive WITH: the query runs whole"))
    for rewrite in (_flattened, _hoisted):
        try:
            query = rewrite(whole.copy())
            qualify(query.copy(), schema=catalogue.schema(), dialect="spark", quote_identifiers=False)
            return _chain(query, parsed.text, tuple(notes))
        except (SqlglotError, RecursionError, KeyError, AttributeError, ValueError) as error:
            last = f"{type(error).__name__}: {error}"
    return _single(whole, parsed.text, (*notes, f"subqueries could not be separated, the query runs whole ({last})"))


def _hoisted(query: exp.Query) -> exp.Query:
    return cast("exp.Query", eliminate_subqueries(_hoist_conditions(query)))


def _flattened(query: exp.Query) -> exp.Query:
    # Merging copies a view's expressions into its reader: a volatile one would be evaluated anew.
    if is_volatile(query):
        return _hoisted(query)
    return cast("exp.Query", merge_subqueries(eliminate_subqueries(_hoist_conditions(query))))


def _hoist_conditions(query: exp.Query) -> exp.Query:
    """Turn uncorrelated subqueries of conditions into derived tables, so that they become views too.

    Before: ``o_orderkey IN (SELECT l_orderkey FROM lineitem GROUP BY l_orderkey)``;
    after: ``o_orderkey IN (SELECT _q.l_orderkey FROM (SELECT ...) AS _q)``. Only those worth planning on
    their own: with a join, or an aggregate.
    """
    for select in list(query.find_all(exp.Select)):
        parent = select.parent
        in_condition = isinstance(parent, exp.In) or (
            isinstance(parent, exp.Subquery) and not isinstance(parent.parent, (exp.From, exp.Join))
        )
        if not in_condition or isinstance(parent, exp.Exists):
            continue
        if select.args.get("with_") or any(True for _ in free_columns(select)):
            continue
        if not select.args.get("joins") and not select.args.get("group"):
            continue
        names = select.named_selects
        if not names or "*" in names:
            continue
        inner = select.copy()
        outer = exp.select(*(exp.alias_(exp.column(n, table="_q"), n) for n in names)).from_(
            exp.Subquery(this=inner, alias=exp.TableAlias(this=exp.to_identifier("_q")))
        )
        select.replace(outer)
    return query


def _chain(query: exp.Query, text: str, notes: tuple[str, ...]) -> ViewChain:
    with_ = query.args.get("with_")
    bodies: list[tuple[str, exp.Query]] = []
    if with_ is not None:
        bodies = [(c.alias, cast("exp.Query", _named(c))) for c in with_.expressions]
        query.set("with_", None)
    bodies.append((ROOT, cast("exp.Query", query.unnest())))
    return ViewChain(_views(bodies), text, notes)


def _named(cte: exp.CTE) -> exp.Expression:
    """Return the CTE's query; ``WITH t(a, b) AS`` column names are already pushed in by qualify."""
    return cte.this.unnest()


def _single(query: exp.Query, text: str, notes: tuple[str, ...]) -> ViewChain:
    return ViewChain(_views([(ROOT, query)]), text, notes)


def _views(bodies: list[tuple[str, exp.Query]]) -> tuple[View, ...]:
    views: dict[str, View] = {}
    for name, body in bodies:
        inner = {c.alias for c in body.find_all(exp.CTE)}
        named = {
            t.name for t in body.find_all(exp.Table) if isinstance(t.this, exp.Identifier) and t.name not in inner
        }
        reads = tuple(sorted(n for n in named if n in views))
        views[name] = View(
            name,
            body,
            reads,
            tuple(sorted(named - set(reads))),
            is_volatile(body) or any(views[r].volatile for r in reads),
        )
    return tuple(views.values())
