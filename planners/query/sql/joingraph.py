"""The reorderable part of one SELECT: relations, predicates and equality classes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from sqlglot import exp

Column = tuple[str, str]  # (relation alias, column name)


@dataclass(frozen=True, slots=True)
class Predicate:
    """One conjunct. ``expression`` has qualified columns and belongs to nobody else: copy before a change."""

    expression: exp.Expr
    text: str  # canonical SQL; equal texts mean equal predicates
    relations: int  # bit set of the relations it needs
    columns: frozenset[Column]
    subquery: bool = False  # contains a subquery, so it may stand only in a WHERE
    implied: bool = False  # derived from other conjuncts: never needed for the result, may help early


@dataclass(frozen=True, slots=True)
class EqualityClass:
    """Columns made equal by inner-join predicates, sorted."""

    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class RelationRef:
    """One relation of a block: a base table or a view of the query, under an alias."""

    alias: str
    source: str  # table name or view name
    is_view: bool
    columns: frozenset[str]  # columns that the query uses of it


@dataclass(frozen=True)
class JoinGraph:
    """Relation ``i`` is bit ``1 << i``. ``predicates`` holds what is not a plain column equality; equalities
    between columns of different relations live in ``classes`` (transitively closed)."""

    relations: tuple[RelationRef, ...]
    predicates: tuple[Predicate, ...]
    classes: tuple[EqualityClass, ...]

    @cached_property
    def index(self) -> Mapping[str, int]:
        """Return the position of each alias."""
        return {r.alias: i for i, r in enumerate(self.relations)}

    @property
    def everything(self) -> int:
        """Return the bit set of all relations."""
        return (1 << len(self.relations)) - 1

    @cached_property
    def class_masks(self) -> tuple[int, ...]:
        """Return per equality class the bit set of relations that have a column in it."""
        masks = []
        for cls in self.classes:
            mask = 0
            for alias, _ in cls.columns:
                mask |= 1 << self.index[alias]
            masks.append(mask)
        return tuple(masks)

    @cached_property
    def neighbours(self) -> tuple[int, ...]:
        """Return per relation the bit set of relations it shares a join predicate with (any multi-relation
        predicate without a subquery, or an equality class)."""
        out = [0] * len(self.relations)
        masks = [*self.class_masks]
        masks += [p.relations for p in self.predicates if not p.subquery and not p.implied]
        for mask in masks:
            for i in range(len(self.relations)):
                if mask >> i & 1:
                    out[i] |= mask & ~(1 << i)
        return tuple(out)

    def local(self, i: int) -> tuple[Predicate, ...]:
        """Return the predicates that need relation ``i`` alone."""
        return tuple(p for p in self.predicates if p.relations == 1 << i)

    def aliases(self, mask: int) -> tuple[str, ...]:
        """Return the aliases in ``mask``, in relation order."""
        return tuple(r.alias for i, r in enumerate(self.relations) if mask >> i & 1)
