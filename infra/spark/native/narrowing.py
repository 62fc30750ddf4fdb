"""Which rows of other scans a slice of one scan can need: those whose keys lie where the slice's keys lie.

A slice of a table that is sorted by a key, or nearly so, holds few of its values. What joins make equal to that key
needs to be read only in the same range, below aggregates by it and in subqueries that compare with it too. (Semi-join
reduction by ranges; P. Bernstein and D. Chiu, JACM 1981.)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from ebbflow.infra.spark.native import types
from ebbflow.infra.spark.native.catalyst import (
    EACH,
    PASSED,
    ROWWISE,
    Attribute,
    Node,
    divisible,
    outputs,
    passed,
    read_once,
    tree,
)

RANGED = ("integer", "long", "date")  # types of keys of which footers tell ranges
_JOINS = {"Inner": None, "Cross": None, "LeftSemi": None, "LeftOuter": 1, "LeftAnti": 1, "RightOuter": 0}
"""By the kind of a join its input of which no row that fails the condition is in the result; ``None``: both."""
_SUBQUERIES = ("Exists", "ScalarSubquery", "ListQuery")


class Narrowing(NamedTuple):
    """A column of the sliced relation, and those of other scans that need no value which a slice does not have in
    it, whatever rows of the relation the slice is."""

    column: str
    type: str
    others: tuple[tuple[int, str], ...]  # (scan, column)


def narrowings(
    plan: Node, root: Node, sliced: Node, number_of: Callable[[Node], int]
) -> tuple[Narrowing, ...]:
    """Return by which columns of a sliced scan other scans can be narrowed.

    Args:
        plan: the whole one.
        root: an operator of it each of whose rows comes from one row of the sliced scan.
        sliced: that scan, a ``View``.
        number_of: the number of a scan.
    """
    found, tables = [], read_once(plan)
    path = _path(root, sliced)
    for column in columns(sliced):
        if types.exact(column.type):
            seen = _Narrowed(number_of, sliced, tables)
            for node, equal in _equal(path, column.id):
                for one in sorted(equal):
                    seen.at(node, one)
            others = tuple(sorted(seen.columns))
            if others:
                found.append(Narrowing(column.name, column.type, others))
    return tuple(found)


def pushed(root: Node, scan: Node) -> list[Node]:
    """Return the tests of operators from ``root`` down that drop rows of ``scan`` which nothing else needs: they
    read its columns only, or ask whether one is in what a subquery finds by itself, and no operator on the way
    counts rows or makes up for missing ones."""
    own, tests = {column.id for column in columns(scan)}, list[Node]()
    path = _path(root, scan)[::-1]
    for node, below in pairwise(path):
        if node.kind == "Filter":
            tests += node.expression("condition").conjuncts()
        elif node.kind == "Join":
            side, kind = int(node.children[1] is below), node.object("joinType")
            passing = _JOINS.get(kind, -1)
            if passing in (side, -1):  # a row that is dropped below would be null above
                tests = []
            if passing in (side, None) and node.fields.get("condition"):
                tests += node.expression("condition").conjuncts()
        elif node.kind not in ("Project", *PASSED):
            tests = []
    return [test for test in tests if _reads_only(test, own)]


def _reads_only(test: Node, own: set[int]) -> bool:
    if test.kind == "InSubquery":
        *values, query = test.children
        return len(values) == 1 and attribute_of(values[0]) in own and not _asks(query.fields["plan"])
    nodes = list(test.walk())
    if any(one.kind in (*_SUBQUERIES, "InSubquery", "OuterReference") for one in nodes):
        return False
    read = {one.attribute.id for one in nodes if one.kind == "AttributeReference"}
    return bool(read) and read <= own


def _asks(value: Any) -> bool:
    """Tell whether something in a plan, as Spark has written it, is of another plan or of a subquery."""
    if isinstance(value, Mapping):
        kind = str(value.get("class", "")).rpartition(".")[2]
        refers = kind in (*_SUBQUERIES, "InSubquery", "OuterReference", "CTERelationRef", "WithCTE")
        return refers or any(map(_asks, value.values()))
    return isinstance(value, list) and any(map(_asks, value))


class Member(NamedTuple):
    """A column of a scan whose values outside of what an operator finds nothing needs."""

    scan: int
    column: str
    test: Node  # ``InSubquery``, of a plan that asks nothing else


def members(plan: Node, number_of: Callable[[Node], int]) -> list[Member]:
    """Return what tests of filters, that some column is in what a subquery finds by itself, say of other scans: those
    below the filter, and in subqueries of its other tests."""
    found, tables = [], read_once(plan)
    for node in _operators(plan):
        if node.kind == "Filter":
            for test in node.expression("condition").conjuncts():
                column = attribute_of(test.children[0]) if test.kind == "InSubquery" else None
                if column is not None and _reads_only(test, {column}):
                    inside = [v for v in test.children[-1].expression("plan").walk() if v.scans]
                    seen = _Narrowed(number_of, inside[0] if inside else node, tables)
                    seen.at(node, column)
                    own = {number_of(view) for view in inside}
                    found += [Member(n, name, test) for n, name in sorted(seen.columns) if n not in own]
    return found


def _operators(plan: Node) -> Iterator[Node]:
    """Iterate over a plan's operators and those of its subqueries."""
    for node in plan.walk():
        yield node
        for below in _subplans(node):
            yield from _operators(below)


def _subplans(node: Node) -> list[Node]:
    """Return the plans of subqueries in the condition of an operator."""
    if node.kind not in ("Filter", "Join") or not node.fields.get("condition"):
        return []
    return [one.expression("plan") for one in node.expression("condition").walk() if one.kind in _SUBQUERIES]


def around(root: Node, scan: Node) -> Node | None:
    """Return ``root``, or the plan of the subquery below it, whose operators are above ``scan``."""
    if _path(root, scan):
        return root
    plans = (below for node in root.walk() for below in _subplans(node))
    return next((found for plan in plans if (found := around(plan, scan)) is not None), None)


def reach(plan: Node, scan: Node) -> Node:
    """Return the highest operator above ``scan`` each of whose rows comes from one row of it."""
    root, highest = around(plan, scan), scan
    for node in _path(root, scan) if root is not None else ():
        if not any(one is scan for one in divisible(node)):
            break
        highest = node
    return highest


def columns(view: Node) -> list[Attribute]:
    """Return the columns of a scan."""
    return [tree([flat]).attribute for (flat,) in view.children[0].fields["output"]]


def _path(root: Node, sliced: Node) -> list[Node]:
    """Return the operators from the sliced scan up to ``root``."""
    if root is sliced:
        return [root]
    for child in root.children:
        if below := _path(child, sliced):
            return [*below, root]
    return []


def passes(root: Node, scan: Node, column: Attribute) -> int | None:
    """Return the id that a column of a scan has in ``root``, which is above it; ``None``: it is not passed on."""
    node, found = _highest(_path(root, scan), column.id)
    return found if node is root else None


def equalities(condition: Node) -> Iterator[tuple[int, int]]:
    """Iterate over the columns that a condition makes equal."""
    for test in condition.conjuncts():
        if test.kind == "EqualTo":
            left, right = (attribute_of(child) for child in test.children)
            if left is not None and right is not None:
                yield left, right


def _highest(path: list[Node], column: int) -> tuple[Node, int]:
    """Return the highest operator on the path that still has the column, and the column's id there."""
    node = path[0]
    for above in path[1:]:
        if above.kind == "Project":
            names = [new for new, old in passed(above.expressions("projectList")) if old == column]
            if not names:
                break
            column = names[0]
        node = above
    return node, column


def _equal(path: list[Node], column: int) -> Iterator[tuple[Node, set[int]]]:
    """Iterate over the operators on the path and, of each, the ids of columns that have the value of a scan's column
    in all rows: what is above a join may be tied to the key of its other side."""
    equal = {column}
    for node in path:
        if node.kind == "Project":
            equal = {new for new, old in passed(node.expressions("projectList")) if old in equal}
        elif node.kind == "Filter" or (node.kind == "Join" and node.object("joinType") in ("Inner", "Cross")):
            pairs = list(equalities(node.expression("condition"))) if node.fields.get("condition") else []
            while more := {one for pair in pairs if equal & {*pair} for one in pair} - equal:
                equal = equal | more
        yield node, equal


@dataclass
class _Narrowed:
    """Walks down from an operator of whose rows only those matter that have a column in the range, not null."""

    number_of: Callable[[Node], int]
    sliced: Node
    tables: Mapping[int, Node]  # common table expressions that one place reads, by Spark's id

    def __post_init__(self) -> None:
        self.columns: set[tuple[int, str]] = set()
        self._seen: set[tuple[int, int]] = set()

    def at(self, node: Node, column: int) -> None:
        """Only rows of ``node`` with ``column`` in the range matter: find what that says of scans below."""
        if (id(node), column) in self._seen:
            return
        self._seen.add((id(node), column))
        kind = node.kind
        if node.scans:
            self._scan(node, column)
        elif kind in PASSED or kind in ROWWISE:
            self.at(node.children[0], column)
        elif kind == "Project":
            self._passed_on(node, "projectList", column)
        elif kind == "Aggregate":
            self._grouped(node, column)
        elif kind == "CTERelationRef":
            self._table(node, column)
        elif kind == "Filter":
            self.at(node.children[0], column)
            self._tests(node.expression("condition"), column, node)
        elif kind == "Join" and node.object("joinType") in _JOINS:
            for child in node.children:
                self.at(child, column)
            if node.fields.get("condition"):
                side = _JOINS[node.object("joinType")]
                passing = node if side is None else node.children[side]
                self._tests(node.expression("condition"), column, passing)

    def _scan(self, view: Node, column: int) -> None:
        if view is not self.sliced:
            self.columns |= {(self.number_of(view), c.name) for c in columns(view) if c.id == column}

    def _table(self, reference: Node, column: int) -> None:
        below = self.tables.get(int(reference.fields["cteId"]))
        found = outputs(below) if below is not None else []
        names = [tree(flat).attribute.id for flat in reference.fields["output"]]
        if below is not None and len(found) == len(names) and column in names:
            self.at(below, found[names.index(column)])

    def _passed_on(self, node: Node, field: str, column: int) -> None:
        for new, old in passed(node.expressions(field)):
            if new == column:
                self.at(node.children[0], old)

    def _grouped(self, node: Node, column: int) -> None:
        """Groups whose key is outside do not matter, so none of their rows does."""
        keys = {
            k.attribute.id for k in node.expressions("groupingExpressions") if k.kind == "AttributeReference"
        }
        for new, old in passed(node.expressions("aggregateExpressions")):
            if new == column and old in keys:
                self.at(node.children[0], old)

    def _tests(self, condition: Node, column: int, passing: Node) -> None:
        """Follow what a condition makes equal to ``column``, that rows of ``passing`` must pass to matter."""
        for left, right in equalities(condition):
            if column in (left, right):
                self.at(passing, right if left == column else left)
        for test in condition.conjuncts():
            if test.kind == "InSubquery" and attribute_of(test.children[0]) == column:
                plan = test.children[-1].expression("plan")
                if len(found := outputs(plan)) == 1:
                    self.at(plan, found[0])
            for one in test.walk():
                if one.kind in _SUBQUERIES:
                    self._correlated(one.expression("plan"), column)

    def _correlated(self, node: Node, column: int) -> None:
        """Follow what filters of a subquery's plan make equal to ``column`` of the row that it is computed for."""
        if node.kind == "Filter":
            for test in node.expression("condition").conjuncts():
                if test.kind == "EqualTo":
                    left, right = test.children
                    for outer, inner in (
                        (_outer(left), attribute_of(right)),
                        (_outer(right), attribute_of(left)),
                    ):
                        if outer == column and inner is not None:
                            self.at(node, inner)
        for child in node.children:
            self._correlated(child, column)


def _outer(node: Node) -> int | None:
    node = _unwidened(node)
    return attribute_of(node.expression("e")) if node.kind == "OuterReference" else None


def attribute_of(node: Node) -> int | None:
    """Return the id of the column that an expression is, perhaps with 64 bits instead of 32; ``None``: it is none."""
    node = _unwidened(node)
    return node.attribute.id if node.kind == "AttributeReference" else None


def _unwidened(node: Node) -> Node:
    """Return what an expression is that has 64 bits instead of 32."""
    if node.kind == "Cast" and node.fields["dataType"] == "long":
        (below,) = node.children
        column = below.expression("e") if below.kind == "OuterReference" else below
        if column.kind == "AttributeReference" and column.fields["dataType"] == "integer":
            return below
    return node


def fully_joined(below: Node) -> list[tuple[Node, Attribute]]:
    """Return of a full join right below ``below`` the scans of both sides each of whose rows gives rows of that side,
    with their columns that the join makes equal; nothing: there is no such join."""
    node = below
    while node.kind in EACH and not node.scans:
        node = node.children[0]
    if node.kind != "Join" or node.object("joinType") != "FullOuter" or not node.fields.get("condition"):
        return []
    for left, right in equalities(node.expression("condition")):
        for one, other in ((left, right), (right, left)):
            found = [_source(node.children[0], one), _source(node.children[1], other)]
            if all(found):
                return [pair for pair in found if pair is not None]
    return []


def _source(side: Node, column: int) -> tuple[Node, Attribute] | None:
    """Return the scan each of whose rows gives rows of ``side``, and its column that is ``column`` there."""
    pairs = ((view, one) for view in divisible(side) for one in columns(view))
    return next((p for p in pairs if types.exact(p[1].type) and passes(side, *p) == column), None)
