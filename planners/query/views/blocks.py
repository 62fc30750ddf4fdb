"""Inner-join blocks: the reorderable part of a SELECT, taken apart into a ``JoinGraph``.

A block is the plain inner or cross joins at the start of FROM, and those behind outer, semi and anti joins that
may go before them. Everything else (outer, semi and anti joins, laterals, subqueries in FROM) is a barrier that
stays on top, in its order.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from sqlglot import exp

from ebbflow.planners.query.sql.dialect import spark_sql
from ebbflow.planners.query.sql.freezing import is_volatile
from ebbflow.planners.query.sql.joingraph import Column, EqualityClass, JoinGraph, Predicate, RelationRef
from ebbflow.planners.query.sql.predicates import (
    canonical,
    columns_of,
    conjuncts,
    free_columns,
    has_subquery,
    implied_by_disjunction,
    implied_by_equality,
    is_correlated,
)
from ebbflow.planners.query.views.column_types import Families
from ebbflow.planners.query.views.views import View


@dataclass(frozen=True)
class Block:
    """One SELECT's join graph and what remains of the SELECT above it."""

    view: str
    graph: JoinGraph
    select: exp.Select  # its FROM and inner joins are replaced when a plan is rendered
    barriers: tuple[exp.Join, ...]  # joins that stay above the block, in order
    top: tuple[exp.Expr, ...]  # conjuncts that stay in the SELECT's WHERE
    top_columns: frozenset[Column]  # columns of the block's relations that are used above it

    def output(self, mask: int) -> tuple[Column, ...]:
        """Return the columns that relations ``mask`` must hand upward, sorted; the set alone decides."""
        graph = self.graph
        inside = set(graph.aliases(mask))
        needed = {c for c in self.top_columns if c[0] in inside}
        for predicate in graph.predicates:
            if not predicate.implied and predicate.relations & ~mask:
                needed |= {c for c in predicate.columns if c[0] in inside}
        for cls, class_mask in zip(graph.classes, graph.class_masks, strict=True):
            if class_mask & mask and class_mask & ~mask:
                needed.add(self.representative(cls, mask))
        return tuple(sorted(needed))

    def representative(self, cls: EqualityClass, mask: int) -> Column:
        """Return the column that stands for ``cls`` among relations ``mask``."""
        index = self.graph.index
        return min(c for c in cls.columns if mask >> index[c[0]] & 1)


@dataclass(frozen=True)
class Extraction:
    """The block of a SELECT, or why it has none."""

    block: Block | None
    reason: str = ""


def extract(view: View, select: exp.Select, families: Families) -> Extraction:
    """Take ``select`` of ``view`` apart.

    The tree is not changed; the block holds copies of what it changes. ``families`` says of the columns of
    tables and views which may share an equality class.
    """
    start = select.args.get("from_")
    joins = list(select.args.get("joins") or ())
    if start is None or not joins or view.opaque:
        return Extraction(None)
    if select.args.get("hint") is not None:
        return Extraction(None, f"{view.name}: the query's own hints are kept, its joins run as written")
    where = conjuncts(select.args["where"].this.copy()) if select.args.get("where") is not None else []
    run = _run(start.this, joins, where)
    relations, barriers = run.relations, run.barriers
    if len(relations) < 2:
        return Extraction(None, f"{view.name}: {barrier_words(barriers)} cannot be reordered")
    inner = {t.alias_or_name for t in relations}
    if len(inner) < len(relations):
        return Extraction(None, f"{view.name}: an alias is used twice")
    if _binds_by_position(select):
        return Extraction(None, f"{view.name}: a star or a column without its table keeps joins as written")
    movable = [part for part in run.conditions if _movable(part, inner)]
    kept = [part for part in run.conditions if not _movable(part, inner)]
    adding = any(j.side in ("RIGHT", "FULL") for j in barriers)
    fixed = kept if adding else [part for part in kept if is_volatile(part)]
    if fixed and barriers:  # above an outer join they would judge rows that it adds, or other random numbers
        condition = spark_sql(fixed[0])
        return Extraction(None, f"{view.name}: {condition} must stay below the {barrier_words(barriers)}")
    for part in where:
        # A correlated subquery costs a join of its own: after the block's joins it meets fewer rows.
        early = not adding and _movable(part, inner) and not is_correlated(part)
        (movable if early else kept).append(part)
    top_columns = _columns_above(select, barriers, kept, inner)
    graph = _graph(relations, movable, top_columns, view, families)
    names = [f"{r.alias}__{c}" for r in graph.relations for c in r.columns]
    if len(set(names)) < len(names):
        return Extraction(None, f"{view.name}: columns would share a name, as a__b.c and a.b__c do")
    return Extraction(Block(view.name, graph, select, tuple(barriers), tuple(kept), top_columns))


def _movable(part: exp.Expr, inner: set[str]) -> bool:
    """Tell whether a conjunct may be evaluated at any join that has its relations."""
    aliases = {a for a, _ in columns_of(part)}
    return bool(aliases) and aliases <= inner and not is_volatile(part)


def _binds_by_position(select: exp.Select) -> bool:
    """Tell whether something in ``select`` itself would mean something else over other relations."""
    outputs = {name.lower() for name in select.named_selects}
    own = [n for n in select.find_all(exp.Star, exp.Column) if n.parent_select is select]
    return any(
        (isinstance(node, exp.Star) and not isinstance(node.parent, exp.Count))
        or (isinstance(node, exp.Column) and not node.table and node.name.lower() not in outputs)
        for node in own
    )


@dataclass
class _Run:
    """The relations that inner joins connect, their ON conjuncts, and the joins that stay above them."""

    relations: list[exp.Table]
    conditions: list[exp.Expr]
    barriers: list[exp.Join]


def _run(first: exp.Expr, joins: Sequence[exp.Join], where: Sequence[exp.Expr]) -> _Run:
    """Return the leading inner joins, and those behind outer, semi and anti joins that may go first.

    ``(a LEFT JOIN b) JOIN c`` is ``(a JOIN c) LEFT JOIN b`` when the condition on ``c`` leaves ``b`` out
    (Galindo-Legaria and Rosenthal, TODS 1997, identity 1). That is done where a condition connects ``c`` with the
    block: as a cross product it is better off where it stands.
    """
    if not _plain(first):
        return _Run([], [], list(joins))
    leading = next((i for i, j in enumerate(joins) if not is_inner(j)), len(joins))
    run = _Run([cast("exp.Table", first)], [], [])
    for join in joins[:leading]:
        _take(run, join)
    rest = list(joins[leading:])
    end = next((i for i, j in enumerate(rest) if not _lets_pass(j)), len(rest))
    adding = any(j.side in ("RIGHT", "FULL") for j in rest)
    usable = [] if adding else [p for p in where if not is_volatile(p) and not has_subquery(p)]
    links = [{a for a, _ in columns_of(part)} for part in usable]
    inside = {t.alias_or_name for t in run.relations}
    aliases = [j.this.alias_or_name for j in joins]  # one that a semi join hides may be used again
    candidates = [j for j in rest[:end] if aliases.count(j.this.alias_or_name) == 1]
    while found := next((j for j in candidates if _may_go_first(j, inside, links)), None):
        _take(run, found)
        inside.add(found.this.alias_or_name)
        candidates = [j for j in candidates if j is not found]
        rest = [j for j in rest if j is not found]
    run.barriers = rest
    return run


def _take(run: _Run, join: exp.Join) -> None:
    run.relations.append(cast("exp.Table", join.this))
    on = join.args.get("on")
    parts = conjuncts(on.copy() if on is not None else None)
    run.conditions += [p for p in parts if not (isinstance(p, exp.Boolean) and p.this)]


def is_inner(join: exp.Join) -> bool:
    """Tell whether ``join`` is an inner or cross join with a plain table or view."""
    return (
        not join.side
        and join.kind in ("", "INNER", "CROSS")
        and not join.args.get("method")
        and not join.args.get("using")
        and _plain(join.this)
    )


def inner_relations(select: exp.Select) -> int:
    """Return how many plain relations inner joins connect in the FROM of ``select``, planned or not."""
    start = select.args.get("from_")
    joins = [j for j in select.args.get("joins") or () if is_inner(j)]
    first = start is not None and (_plain(start.this) or isinstance(start.this, exp.Subquery))
    return len(joins) + 1 if joins and first else 0


def _lets_pass(join: exp.Join) -> bool:
    """Tell whether an inner join behind ``join`` may go before it: it looks at each row of its left side alone."""
    left = (join.side == "LEFT" and join.kind in ("", "OUTER")) or join.kind in ("SEMI", "ANTI")
    return is_inner(join) or (left and not join.args.get("method") and not join.args.get("using"))


def _may_go_first(join: exp.Join, inside: set[str], links: Sequence[set[str]]) -> bool:
    """Tell whether ``join`` may join the relations ``inside`` directly, and has a condition that connects it."""
    if not is_inner(join):
        return False
    on, alias = join.args.get("on"), join.this.alias_or_name
    if alias in inside or (on is not None and (is_volatile(on) or has_subquery(on))):
        return False
    own = [{a for a, _ in columns_of(part)} for part in conjuncts(on)]
    if any(not aliases <= inside | {alias} for aliases in own):
        return False
    return any(alias in a and len(a) > 1 and a <= inside | {alias} for a in (*own, *links))


def _plain(node: exp.Expr) -> bool:
    """Tell whether ``node`` is a table or view under an alias and nothing else, such as a sample."""
    known = {"this", "alias"}
    return (
        isinstance(node, exp.Table)
        and isinstance(node.this, exp.Identifier)
        and not any(value for key, value in node.args.items() if key not in known)
        and not node.alias_column_names
    )


def barrier_words(barriers: Sequence[exp.Join]) -> str:
    """Return the kinds of joins that keep others from being reordered, for people."""
    kinds = {
        " ".join(w for w in (j.method, j.side, j.kind) if w).lower() for j in barriers if not is_inner(j)
    }
    kinds = kinds or {"inner"}
    return f"{' and '.join(sorted(kinds))} join"


def _columns_above(
    select: exp.Select, barriers: Sequence[exp.Join], kept: Sequence[exp.Expr], inner: set[str]
) -> frozenset[Column]:
    parts: list[exp.Expr] = [*kept]
    for key, value in select.args.items():
        if key in ("from_", "joins", "where", "with_"):
            continue
        parts += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, exp.Expr)]
    for join in barriers:
        parts += [n for n in (join.this, join.args.get("on")) if n is not None]
    return frozenset((c.table, c.name) for p in parts for c in free_columns(p) if c.table in inner)


def _graph(
    tables: Sequence[exp.Table],
    parts: Sequence[exp.Expr],
    top_columns: frozenset[Column],
    view: View,
    families: Families,
) -> JoinGraph:
    aliases = [t.alias_or_name for t in tables]
    index = {a: i for i, a in enumerate(aliases)}
    kinds = {
        (t.alias_or_name, column): family
        for t in tables
        for column, family in families.get(t.name, {}).items()
    }
    pairs: list[tuple[Column, Column]] = []
    others: list[exp.Expr] = []
    for part in parts:
        sides = _column_equality(part)
        # between types that are converted to be compared, equality is not transitive
        if sides is None or kinds.get(sides[0]) != kinds.get(sides[1]) or sides[0] not in kinds:
            others.append(part)
        else:
            pairs.append(sides)
    classes = _classes(pairs)
    predicates = _predicates(others, index, classes)
    used = set(top_columns).union(*(p.columns for p in predicates), *(k.columns for k in classes))
    relations = tuple(
        RelationRef(a, t.name, t.name in view.reads_views, frozenset(n for alias, n in used if alias == a))
        for a, t in zip(aliases, tables, strict=True)
    )
    return JoinGraph(relations, predicates, classes)


def _column_equality(part: exp.Expr) -> tuple[Column, Column] | None:
    if not isinstance(part, exp.EQ):
        return None
    if not isinstance(part.this, exp.Column) or not isinstance(part.expression, exp.Column):
        return None
    left, right = (part.this.table, part.this.name), (part.expression.table, part.expression.name)
    return None if left[0] == right[0] else (left, right)


def _classes(pairs: Iterable[tuple[Column, Column]]) -> tuple[EqualityClass, ...]:
    """Return the transitive closure of column equalities (union-find by merging sets)."""
    sets: dict[Column, set[Column]] = {}
    for left, right in pairs:
        merged = sets.get(left, {left}) | sets.get(right, {right})
        for column in merged:
            sets[column] = merged
    unique = {id(s): s for s in sets.values()}.values()
    return tuple(sorted((EqualityClass(tuple(sorted(s))) for s in unique), key=lambda c: c.columns))


def _predicates(
    parts: Sequence[exp.Expr], index: Mapping[str, int], classes: Sequence[EqualityClass]
) -> tuple[Predicate, ...]:
    found: dict[str, Predicate] = {}

    def add(node: exp.Expr, implied: bool) -> None:
        columns = columns_of(node)
        mask = 0
        for alias, _ in columns:
            mask |= 1 << index[alias]
        text = canonical(node)
        if text not in found or (found[text].implied and not implied):
            found[text] = Predicate(node.copy(), text, mask, columns, has_subquery(node), implied)

    for part in parts:
        add(part, False)
    for part in parts:
        if not has_subquery(part):
            for node in implied_by_disjunction(part, list(index)):
                add(node, True)
        columns = columns_of(part)
        if len(columns) == 1:
            column = next(iter(columns))
            for cls in classes:
                if column in cls.columns:
                    for node in implied_by_equality(part, column, cls.columns):
                        add(node, True)
    return tuple(sorted(found.values(), key=lambda p: (p.implied, p.text)))
