"""Join trees: which relations are joined in which order, and how."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, TypeAlias

JoinMethod = Literal["broadcast", "shuffle_hash", "sort_merge"]

SYMBOLS: dict[JoinMethod, str] = {"broadcast": "⋈ᵇ", "shuffle_hash": "⋈ʰ", "sort_merge": "⋈"}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One relation of a join graph, with its local predicates applied."""

    relation: int

    @property
    def mask(self) -> int:
        """Return the bit set of this relation."""
        return 1 << self.relation


@dataclass(frozen=True, slots=True)
class Join:
    """A join of two trees over disjoint relations.

    The right child is the build side: the one that is broadcast or hashed. Without an equality between the
    two sides, ``broadcast`` is a nested loop over the broadcast side and ``sort_merge`` stands for the
    engine's Cartesian product with a filter.
    """

    left: "Tree"
    right: "Tree"
    method: JoinMethod
    mask: int = field(default=-1)  # bit set of all relations below; computed if not given

    def __post_init__(self) -> None:
        union = self.left.mask | self.right.mask
        if self.left.mask & self.right.mask:
            raise ValueError(
                f"children must not share relations; both have {self.left.mask & self.right.mask:b}"
            )
        if self.mask == -1:
            object.__setattr__(self, "mask", union)
        elif self.mask != union:
            raise ValueError(f"mask must be the union of the children, {union:b}; got {self.mask:b}")


Tree: TypeAlias = Leaf | Join


def joins(tree: Tree) -> Iterator[Join]:
    """Iterate over the joins, children before parents and left before right."""
    if isinstance(tree, Join):
        yield from joins(tree.left)
        yield from joins(tree.right)
        yield tree


def leaves(tree: Tree) -> Iterator[Leaf]:
    """Iterate over the leaves from left to right."""
    if isinstance(tree, Leaf):
        yield tree
    else:
        yield from leaves(tree.left)
        yield from leaves(tree.right)


def subtree(tree: Tree, mask: int) -> Tree:
    """Return the part of ``tree`` over exactly the relations ``mask``. Raises ``StopIteration`` if it has none."""
    parts: Iterator[Tree] = chain(joins(tree), leaves(tree))
    return next(part for part in parts if part.mask == mask)


def logical_key(tree: Tree) -> frozenset[int]:
    """Return the bit sets of all joins. They determine an unordered binary tree over its leaves."""
    return frozenset(join.mask for join in joins(tree)) or frozenset({tree.mask})


def same_logical(one: Tree, other: Tree) -> bool:
    """Tell whether both join the same sets of relations, whatever the sides and methods."""
    return logical_key(one) == logical_key(other)


def is_linear(tree: Tree) -> bool:
    """Tell whether every join has a single relation on at least one side (left-deep up to swapping sides)."""
    return all(isinstance(j.left, Leaf) or isinstance(j.right, Leaf) for j in joins(tree))


def algebra(tree: Tree, names: Sequence[str]) -> str:
    """Write the tree for people: ``((lineitem ⋈ orders) ⋈ᵇ nation)``; ᵇ broadcast, ʰ shuffled hash join."""
    if isinstance(tree, Leaf):
        return names[tree.relation]
    return f"({algebra(tree.left, names)} {SYMBOLS[tree.method]} {algebra(tree.right, names)})"
