"""A query as a chain of named views: derived tables, CTEs and uncorrelated subqueries each become one.

The chain is what plans are made of: a view's inner joins can be reordered, and a view can be cut out as a
stage of its own. Whatever resists this rewriting stays where it stands and runs inside its statement.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from sqlglot import exp
from sqlglot.errors import SqlglotError
from sqlglot.optimizer.eliminate_subqueries import eliminate_subqueries
from sqlglot.optimizer.merge_subqueries import merge_subqueries

from ebbflow.planners.errors import PlanningError, UnsupportedQueryError
from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.sql.freezing import is_volatile
from ebbflow.planners.query.sql.parse import ParsedQuery, check_tables, qualified_copy
from ebbflow.planners.query.sql.references import outside_tables
from ebbflow.planners.query.views.conditions import KEPT, separate_conditions
from ebbflow.planners.query.views.outerjoins import simplify_outer_joins
from ebbflow.planners.query.views.restriction import restrict_views

ROOT = "Result"  # the name of the last view; qualified names are lower case, so no other has it

MOST_JOINED = (
    40  # tables of one join: the search for good orders takes time by the cube of them, and then some
)


@dataclass(frozen=True)
class View:
    """One named query of the chain. ``query`` holds no WITH at its top unless the view is opaque."""

    name: str
    query: exp.Query
    reads_views: tuple[str, ...]  # sorted, in-chain views that it names
    reads_tables: tuple[str, ...]  # sorted, base tables that it names
    volatile: bool  # itself or through a view it reads
    opaque: bool = False  # runs as it is written: nothing in it can be planned

    @cached_property
    def columns(self) -> tuple[str, ...]:
        """Return its output column names, in order."""
        return tuple(self.query.named_selects)

    @cached_property
    def tables_by_select(self) -> tuple[tuple[str, ...], ...]:
        """Return, for each of ``selects``, the names of all tables and views under it, with repetitions."""
        return tuple(
            tuple(t.name for t in select.find_all(exp.Table) if isinstance(t.this, exp.Identifier))
            for select in self.selects()
        )

    def selects(self) -> Iterator[exp.Select]:
        """Yield the SELECTs that make up the view: itself, or the arms of its set operations."""
        stack: list[exp.Expr] = [self.query]
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
            for table in outside_tables(view.query):
                if table.name in view.reads_views:
                    counts[table.name] += 1
        return counts


def view_chain(parsed: ParsedQuery, catalogue: Catalogue, without: Collection[str] = ()) -> ViewChain:
    """Return ``parsed`` as a chain of views; never fails: at worst the whole query is one opaque view.

    Of ``REWRITES`` those named in ``without`` are left out.
    """
    reason = _unseparable(parsed)
    for rewrites in (REWRITES, _FIRST) if parsed.qualified and not reason else ():
        try:
            query = parsed.expression.copy()
            for name, rewrite in rewrites:
                if name not in without:
                    query = rewrite(query, catalogue)
            query = _unmarked(query)
            qualified_copy(query, catalogue)  # a rewrite that lost a column or a view is told here
            check_tables(query, catalogue)
            _check_joins(query)
            return ViewChain(_views(_bodies(query)), parsed.text, parsed.notes)
        except (SqlglotError, PlanningError, RecursionError, KeyError, AttributeError, ValueError) as error:
            reason = f"subqueries could not be separated, the query runs whole ({error})"
    notes = (*parsed.notes, reason) if reason else parsed.notes
    return ViewChain(_views([(ROOT, parsed.expression)], opaque=True), parsed.text, notes)


def _unseparable(parsed: ParsedQuery) -> str:
    """Return why the query must stay whole, if it must."""
    whole = parsed.expression
    if any(w.recursive for w in whole.find_all(exp.With)):
        return "recursive WITH: the query runs whole"
    # Equal derived tables become one view, but each draws its own random numbers.
    if any(is_volatile(s) for s in whole.find_all(exp.Subquery)):
        return "a subquery is not deterministic: the query runs whole"
    return ""


def _check_joins(query: exp.Query) -> None:
    """Raise ``UnsupportedQueryError`` where more tables are joined at once than orders of joins are looked for."""
    for select in query.find_all(exp.Select):
        joined = len(select.args.get("joins") or ()) + 1
        if joined > MOST_JOINED:
            raise UnsupportedQueryError(
                f"{joined} tables are joined at once; orders of joins are looked for up to {MOST_JOINED}"
            )


def _merged(query: exp.Query) -> exp.Query:
    """Merge views into their readers, where the result stays and a reader has no more than it can plan."""
    # Merging copies a view's expressions into its reader: a volatile one would be evaluated anew.
    if is_volatile(query):
        return query
    for select in _unmergeable(query):
        select.set("kind", KEPT)
    return _unmarked(merge_subqueries(query))


def _hoisted(query: exp.Query) -> exp.Query:
    """Turn derived tables into the WITH of ``query``.

    A view of the name that some other relation has as its alias gets another: sqlglot takes a correlated
    subquery's reference to that alias for the view.
    """
    query = eliminate_subqueries(query)
    with_ = query.args.get("with_")
    if with_ is None:
        return query
    aliases = [t.alias_or_name for t in query.find_all(exp.Table) if t.alias_or_name != t.name]
    taken = {*aliases, *(t.name for t in query.find_all(exp.Table)), *(c.alias for c in with_.expressions)}
    for position, cte in enumerate(with_.expressions):
        name = cte.alias
        if name not in aliases:
            continue
        fresh = next(n for i in itertools.count(2) if (n := f"{name}_{i}") not in taken)
        taken.add(fresh)
        readers = [c.this for c in with_.expressions[position + 1 :]]
        found = [t for body in readers for t in outside_tables(body)]
        with_.pop()
        found += outside_tables(query)
        query.set("with_", with_)
        for table in found:
            if table.name == name and not table.db:
                if not table.alias:
                    table.set("alias", exp.TableAlias(this=exp.to_identifier(name)))
                table.set("this", exp.to_identifier(fresh))
        cte.args["alias"].set("this", exp.to_identifier(fresh))
    return query


def _unmarked(query: exp.Query) -> exp.Query:
    for select in query.find_all(exp.Select):
        if select.args.get("kind") == KEPT:
            select.set("kind", None)
    return query


def _unmergeable(query: exp.Query) -> list[exp.Select]:
    """Return the views that sqlglot would merge although the result would change.

    Merging ``t LEFT JOIN (SELECT k, 1 AS f FROM u) v ON ...`` would make ``v.f`` 1 where nothing matches;
    and a view that a semi or anti join names is not counted as used there.
    """
    with_ = query.args.get("with_")
    bodies = {c.alias: c.this.unnest() for c in with_.expressions} if with_ is not None else {}
    found = {}
    for select in query.find_all(exp.Select):
        start = select.args.get("from_")
        before = [start.this] if start is not None else []
        for join in select.args.get("joins") or ():
            counted = join.kind not in ("SEMI", "ANTI")
            nullable = [join.this] if join.side in ("LEFT", "FULL") or not counted else []
            nullable += before if join.side in ("RIGHT", "FULL") else []
            for item in nullable:
                body = bodies.get(item.name) if isinstance(item, exp.Table) else None
                if isinstance(body, exp.Select) and not (counted and _only_columns(body)):
                    found[id(body)] = body
            before.append(join.this)
    return list(found.values())


def _only_columns(select: exp.Select) -> bool:
    return all(isinstance(item.unalias(), exp.Column) for item in select.selects)


def _bodies(query: exp.Query) -> list[tuple[str, exp.Query]]:
    """Return the name and query of each view, the result last."""
    with_ = query.args.get("with_")
    bodies: list[tuple[str, exp.Query]] = []
    if with_ is not None:
        # ``WITH t(a, b) AS`` column names are pushed in by qualify already
        bodies = [(c.alias, cast("exp.Query", c.this.unnest())) for c in with_.expressions]
        query.set("with_", None)
    bodies.append((ROOT, cast("exp.Query", query.unnest())))
    return bodies


def _views(bodies: list[tuple[str, exp.Query]], *, opaque: bool = False) -> tuple[View, ...]:
    views: dict[str, View] = {}
    for name, body in bodies:
        named = {t.name for t in outside_tables(body)}
        reads = tuple(sorted(n for n in named if n in views))
        views[name] = View(
            name,
            body,
            reads,
            tuple(sorted(named - set(reads))),
            is_volatile(body) or any(views[r].volatile for r in reads),
            opaque,
        )
    return tuple(views.values())


HOISTING = "hoisting"  # makes the views that the others rewrite: it cannot be left out

Rewrite = Callable[[exp.Query, Catalogue], exp.Query]
REWRITES: tuple[tuple[str, Rewrite], ...] = (
    ("conditions", lambda query, _: separate_conditions(query)),  # subqueries of conditions to derived tables
    (HOISTING, lambda query, _: _hoisted(query)),  # derived tables to views
    ("outer-joins", lambda query, _: simplify_outer_joins(query)),
    ("merging", lambda query, _: _merged(query)),  # views into their readers
    ("outer-joins", lambda query, _: simplify_outer_joins(query)),  # conditions have come together with joins
    ("restriction", restrict_views),  # readers' filters into views that are read several times
)
"""What makes a chain of a query, in this order, by name; a query that it fails for gets the first ones only.

Each takes a query with qualified columns and returns one with the same rows. What rewrites a chain once sizes are
known is in ``subqueries.rewrites``.
"""
_FIRST = REWRITES[:3]
