"""SQL of stages: a join tree becomes nested FROM clauses whose order and join methods Spark keeps."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sqlglot import exp
from sqlglot.dialects.spark import Spark

from ebbflow.planners.query.plan.trees import Join, Leaf, Tree
from ebbflow.planners.query.sql.joingraph import Column, Predicate
from ebbflow.planners.query.sql.predicates import free_columns
from ebbflow.planners.query.views.blocks import Block

HINTS = {"broadcast": "BROADCAST", "shuffle_hash": "SHUFFLE_HASH", "sort_merge": "MERGE"}
_BROADCASTS = {"BROADCAST", "BROADCASTJOIN", "MAPJOIN"}
_WORDS = frozenset(w.lower() for words in Spark.Tokenizer.KEYWORDS for w in words.split())


@dataclass
class FromClause:
    """A rendered FROM clause: where each needed column is found now, and what must still be filtered."""

    first: exp.Expr
    joins: list[exp.Join] = field(default_factory=list)
    hints: list[tuple[str, str]] = field(default_factory=list)  # (hint name, alias)
    names: dict[Column, Column] = field(default_factory=dict)
    pending: list[Predicate] = field(default_factory=list)  # with subqueries: only a WHERE may hold them
    mask: int = 0


def checkpoint_name(fingerprint: str) -> str:
    """Return the relation name under which SQL reads a checkpoint."""
    return f"ckpt_{fingerprint}"


def unused_prefix(names: Iterable[str]) -> str:
    """Return underscores that none of ``names`` begins with."""
    taken, prefix = [n for n in names if n.startswith("_")], "_"
    while any(name.startswith(prefix) for name in taken):
        prefix += "_"
    return prefix


def output_name(column: Column) -> str:
    """Return the name that ``column`` has in a stage's output: unique across relations."""
    return f"{column[0]}__{column[1]}"


def open_keys(block: Block, mask: int) -> dict[int, str]:
    """Return the names in a stage's output of the columns by which relations ``mask`` are yet to be joined, by the
    index of their equality class."""
    classes = zip(block.graph.classes, block.graph.class_masks, strict=True)
    return {
        index: output_name(block.representative(cls, mask))
        for index, (cls, members) in enumerate(classes)
        if members & mask and members & ~mask
    }


class BlockRenderer:
    """Renders subsets of one block. ``cut`` maps a subset to its checkpoint's fingerprint."""

    def __init__(
        self, block: Block, cut: Mapping[int, str], slice_: Mapping[Column, exp.Expr] | None = None
    ) -> None:
        """``slice_`` holds predicates on columns of base tables: those of the slice to compute, if one is."""
        self._block = block
        self._cut = cut
        self._slice = slice_ or {}
        self._nestings = itertools.count(1)
        sources = block.select.find_all(exp.Table, exp.Subquery, exp.Lateral)
        self._prefix = unused_prefix(s.alias_or_name for s in sources)

    def stage(self, tree: Tree) -> exp.Select:
        """Return the statement of a stage that computes ``tree``; cuts below it are read, its own is not."""
        return self._project(self._render(tree, own=True), tree.mask)

    def top(self, tree: Tree) -> exp.Select:
        """Return the block's SELECT with its FROM replaced by ``tree``."""
        block = self._block
        rendered = self._render(tree, own=False)
        select = block.select.copy()
        barriers = [j.copy() for j in block.barriers]
        select.set("from_", exp.From(this=rendered.first))
        select.set("joins", rendered.joins + barriers)
        parts = [p.copy() for p in block.top] + [p.expression.copy() for p in rendered.pending]
        select.set("where", exp.Where(this=exp.and_(*parts)) if parts else None)
        for key, value in select.args.items():
            if key in ("from_", "joins", "hint"):
                continue
            for node in value if isinstance(value, list) else [value]:
                if isinstance(node, exp.Expr):
                    _rename(node, rendered.names)
        for join in barriers:
            _rename(join, rendered.names)
        _hint(select, rendered.hints)
        return select

    def _project(self, rendered: FromClause, mask: int) -> exp.Select:
        columns = self._block.output(mask)
        items: list[exp.Expr] = [
            exp.alias_(exp.column(name, table=alias), output_name(c))
            for c in columns
            for alias, name in [rendered.names[c]]
        ]
        select = exp.select(*(items or [exp.alias_(exp.Literal.number(1), "__one")]))
        select.set("from_", exp.From(this=rendered.first))
        select.set("joins", rendered.joins)
        if rendered.pending:
            where = exp.and_(*(p.expression.copy() for p in rendered.pending))
            _rename(where, rendered.names)
            select.set("where", exp.Where(this=where))
        _hint(select, rendered.hints)
        return select

    def _render(self, tree: Tree, *, own: bool) -> FromClause:
        if tree.mask in self._cut and not own:
            return self._checkpoint(tree.mask)
        if isinstance(tree, Leaf):
            return self._leaf(tree.relation)
        return self._join(tree)

    def _checkpoint(self, mask: int) -> FromClause:
        fingerprint = self._cut[mask]
        alias = f"{self._prefix}c{fingerprint[:8]}"
        table = exp.alias_(exp.to_table(checkpoint_name(fingerprint)), alias, table=True)
        names = {c: (alias, output_name(c)) for c in self._block.output(mask)}
        return FromClause(table, names=names, mask=mask)

    def _leaf(self, i: int) -> FromClause:
        graph = self._block.graph
        relation = graph.relations[i]
        alias = relation.alias
        table = exp.alias_(exp.Table(this=exp.to_identifier(relation.source)), alias, table=True)
        names = {(alias, c): (alias, c) for c in relation.columns}
        filters = [p.expression.copy() for p in graph.local(i)]
        filters += [condition.copy() for column, condition in self._slice.items() if column[0] == alias]
        for cls in graph.classes:  # two columns of one relation in a class are equal already here
            own = [exp.column(name, table=a) for a, name in cls.columns if a == alias]
            filters += [one.copy().eq(other) for one, other in itertools.pairwise(own)]
        if not filters:
            return FromClause(table, names=names, mask=1 << i)
        items: list[exp.Expr] = [exp.column(c, table=alias) for c in sorted(relation.columns)]
        scan = exp.select(*(items or [exp.Literal.number(1)])).from_(table).where(exp.and_(*filters))
        named = exp.Subquery(this=scan, alias=exp.TableAlias(this=exp.to_identifier(alias)))
        return FromClause(named, names=names, mask=1 << i)

    def _join(self, tree: Join) -> FromClause:
        left = self._render(tree.left, own=False)
        right = self._render(tree.right, own=False)
        if right.joins or right.pending:
            right = self._nested(right)
        names = {**left.names, **right.names}
        on, pending = self._conditions(left, right)
        for condition in on:
            _rename(condition, names)
        item = right.first
        alias = item.alias_or_name
        join = exp.Join(this=item, on=exp.and_(*on)) if on else exp.Join(this=item, kind="CROSS")
        hints = [*left.hints, (HINTS[tree.method], alias)]
        return FromClause(
            left.first, [*left.joins, join], hints, names, left.pending + pending, left.mask | right.mask
        )

    def _nested(self, inner: FromClause) -> FromClause:
        alias = f"{self._prefix}j{next(self._nestings)}"
        query = self._project(inner, inner.mask)
        names = {c: (alias, output_name(c)) for c in self._block.output(inner.mask)}
        item = exp.Subquery(this=query, alias=exp.TableAlias(this=exp.to_identifier(alias)))
        return FromClause(item, names=names, mask=inner.mask)

    def _conditions(self, left: FromClause, right: FromClause) -> tuple[list[exp.Expr], list[Predicate]]:
        block, graph = self._block, self._block.graph
        both = left.mask | right.mask
        on: list[exp.Expr] = []
        for cls, mask in zip(graph.classes, graph.class_masks, strict=True):
            if mask & left.mask and mask & right.mask:
                a, b = block.representative(cls, left.mask), block.representative(cls, right.mask)
                on.append(exp.column(a[1], table=a[0]).eq(exp.column(b[1], table=b[0])))
        pending = []
        for predicate in graph.predicates:
            mask = predicate.relations
            if predicate.implied or mask & ~both or not mask & ~left.mask or not mask & ~right.mask:
                continue
            if predicate.subquery:
                pending.append(predicate)
            else:
                on.append(predicate.expression.copy())
        return on, pending


def _rename(node: exp.Expr, names: Mapping[Column, Column]) -> None:
    """Point the free columns under ``node`` at where they are found now."""
    for column in list(free_columns(node)):
        new = names.get((column.table, column.name))
        if new is not None and new != (column.table, column.name):
            column.set("table", exp.to_identifier(new[0]))
            column.set("this", exp.to_identifier(new[1]))


def _hint(select: exp.Select, hints: Sequence[tuple[str, str]]) -> None:
    if hints:
        items = [exp.Anonymous(this=name, expressions=[exp.to_identifier(alias)]) for name, alias in hints]
        select.set("hint", exp.Hint(expressions=items))


def quote(tree: exp.Expr) -> None:
    """Quote the identifiers under ``tree`` that need it: keywords and whatever is no plain word."""
    for identifier in tree.find_all(exp.Identifier):
        if not exp.SAFE_IDENTIFIER_RE.match(identifier.name) or identifier.name.lower() in _WORDS:
            identifier.set("quoted", True)


def without_broadcast(query: exp.Expr) -> exp.Expr:
    """Return a copy of ``query`` in which every broadcast hint asks for a sort-merge join instead."""
    copy = query.copy()
    for hint in copy.find_all(exp.Hint):
        for item in hint.expressions:
            if isinstance(item, exp.Anonymous | exp.JoinHint) and item.name.upper() in _BROADCASTS:
                item.set("this", HINTS["sort_merge"])
    return copy


def without_hints(query: exp.Expr) -> exp.Expr:
    """Return a copy of ``query`` without hints, for engines that have none."""
    copy = query.copy()
    for select in copy.find_all(exp.Select):
        select.set("hint", None)
    return copy
