"""Inner-join blocks: the reorderable part of a SELECT, taken apart into a ``JoinGraph``.

A block is the longest run of plain inner or cross joins at the start of FROM. Everything behind it (outer,
semi and anti joins, laterals, subqueries in FROM) is a barrier that stays on top, in its place.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import cast

from sqlglot import exp

from ebbflow.planners.query.joingraph import Column, EqualityClass, JoinGraph, Predicate, RelationRef
from ebbflow.planners.query.parse import is_volatile
from ebbflow.planners.query.predicates import (
    canonical,
    columns_of,
    conjuncts,
    free_columns,
    has_subquery,
    implied_by_disjunction,
    implied_by_equality,
)
from ebbflow.planners.query.views import View


@dataclass(frozen=True)
class Block:
    """One SELECT's join graph and what remains of the SELECT above it."""

    view: str
    graph: JoinGraph
    select: exp.Select  # its FROM and inner joins are replaced when a plan is rendered
    barriers: tuple[exp.Join, ...]  # joins that stay above the block, in order
    top: tuple[exp.Expression, ...]  # conjuncts that stay in the SELECT's WHERE
    top_columns: frozenset[Column]  # columns of the block's relations that are used above it

    def output(self, mask: int) -> tuple[Column, ...]:
        """Return the columns that relations ``mask`` must hand upward, sorted: a function of the set alone."""
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


def extract(view: View, select: exp.Select, views: Iterable[str]) -> Extraction:
    """Take ``select`` of ``view`` apart. The tree is not changed; the block holds copies of what it changes."""
    start = select.args.get("from_")
    joins = list(select.args.get("joins") or ())
    if start is None or not joins:
        return Extraction(None)
    if select.args.get("hint") is not None:
        return Extraction(None, f"{view.name}: the query's own hints are kept, its joins run as written")
    relations, conditions, barriers = _prefix(start.this, joins)
    if len(relations) < 2:
        return Extraction(None, f"{view.name}: {_barrier_words(barriers)} cannot be reordered")
    aliases = [t.alias_or_name for t in relations]
    if len(set(aliases)) < len(aliases):
        return Extraction(None, f"{view.name}: an alias is used twice")
    known = set(views)
    where = select.args.get("where")
    preserved = not any(j.side in ("RIGHT", "FULL") for j in barriers)
    everywhere = [*conditions, *(conjuncts(where.this.copy()) if where is not None and preserved else [])]
    kept = [] if where is None or preserved else [where.this.copy()]
    inner = set(aliases)
    movable: list[exp.Expression] = []
    for part in everywhere:
        columns = columns_of(part)
        if columns and {a for a, _ in columns} <= inner and not is_volatile(part):
            movable.append(part)
        else:
            kept.append(part)
    top_columns = _columns_above(select, barriers, kept, inner)
    graph = _graph(relations, movable, top_columns, known)
    return Extraction(Block(view.name, graph, select, tuple(barriers), tuple(kept), top_columns))


def _prefix(
    first: exp.Expression, joins: Sequence[exp.Join]
) -> tuple[list[exp.Table], list[exp.Expression], list[exp.Join]]:
    """Return the relations of the leading inner joins, their ON conjuncts, and the joins behind them."""
    if not _plain(first):
        return [], [], list(joins)
    relations, conditions = [cast("exp.Table", first)], []
    for position, join in enumerate(joins):
        inner = (
            not join.side
            and join.kind in ("", "INNER", "CROSS")
            and not join.args.get("method")
            and not join.args.get("using")
            and _plain(join.this)
        )
        if not inner:
            return relations, conditions, list(joins[position:])
        relations.append(cast("exp.Table", join.this))
        on = join.args.get("on")
        conditions += conjuncts(on.copy() if on is not None else None)
    return relations, conditions, []


def _plain(node: exp.Expression) -> bool:
    return isinstance(node, exp.Table) and not any(
        node.args.get(k) for k in ("joins", "pivots", "sample", "laterals", "version", "when", "partition")
    ) and isinstance(node.this, exp.Identifier)  # fmt: skip


def _barrier_words(barriers: Sequence[exp.Join]) -> str:
    kinds = {" ".join(w for w in (j.method, j.side, j.kind) if w).lower() or "inner" for j in barriers}
    return f"{' and '.join(sorted(kinds))} join"


def _columns_above(
    select: exp.Select, barriers: Sequence[exp.Join], kept: Sequence[exp.Expression], inner: set[str]
) -> frozenset[Column]:
    parts: list[exp.Expression] = [*kept]
    for key, value in select.args.items():
        if key in ("from_", "joins", "where", "with_"):
            continue
        parts += [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, exp.Expression)]
    for join in barriers:
        parts += [n for n in (join.this, join.args.get("on")) if n is not None]
    return frozenset((c.table, c.name) for p in parts for c in free_columns(p) if c.table in inner)


def _graph(
    tables: Sequence[exp.Table],
    parts: Sequence[exp.Expression],
    top_columns: frozenset[Column],
    views: set[str],
) -> JoinGraph:
    aliases = [t.alias_or_name for t in tables]
    index = {a: i for i, a in enumerate(aliases)}
    pairs: list[tuple[Column, Column]] = []
    others: list[exp.Expression] = []
    for part in parts:
        sides = _column_equality(part)
        if sides is None:
            others.append(part)
        else:
            pairs.append(sides)
    classes = _classes(pairs)
    predicates = _predicates(others, aliases, index, classes)
    used = set(top_columns) | {c for p in predicates for c in p.columns} | {c for k in classes for c in k.columns}
    relations = tuple(
        RelationRef(
            t.alias_or_name, t.name, t.name in views, frozenset(name for a, name in used if a == t.alias_or_name)
        )
        for t in tables
    )
    return JoinGraph(relations, predicates, classes)


def _column_equality(part: exp.Expression) -> tuple[Column, Column] | None:
    if not (
        isinstance(part, exp.EQ) and isinstance(part.this, exp.Column) and isinstance(part.expression, exp.Column)
    ):
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
    parts: Sequence[exp.Expression],
    aliases: Sequence[str],
    index: dict[str, int],
    classes: Sequence[EqualityClass],
) -> tuple[Predicate, ...]:
    found: dict[str, Predicate] = {}

    def add(node: exp.Expression, implied: bool) -> None:
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
            for node in implied_by_disjunction(part, aliases):
                add(node, True)
        columns = columns_of(part)
        if len(columns) == 1:
            column = next(iter(columns))
            for cls in classes:
                if column in cls.columns:
                    for node in implied_by_equality(part, column, cls.columns):
                        add(node, True)
    return tuple(sorted(found.values(), key=lambda p: (p.implied, p.text)))
