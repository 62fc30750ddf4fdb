"""Spark's resolved plan of a statement, as ``TreeNode.toJSON`` writes it."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ebbflow.infra.spark.failures import first_line
from ebbflow.infra.spark.gateway import acknowledge_at_once

PASSED = ("SubqueryAlias", "ResolvedHint", "View")  # operators that change nothing
EACH = ("Project", "Filter", "Expand", *PASSED)  # each row of these comes from one row below
_GATHERING = ("Sort", "GlobalLimit", "Distinct", "Aggregate", "Window")
ROWWISE = ("Sort", "Distinct")  # what is dropped below them is dropped above them, and nothing else changes
RANKS = {
    "Rank": "rank()",
    "DenseRank": "dense_rank()",
    "RowNumber": "row_number()",
}  # over windows, in DuckDB
_UP_TO = ("EqualTo", "LessThan", "LessThanOrEqual")
_ZONE, _TIME = "spark.sql.session.timeZone", '"timestamp"'
_UTC = ("UTC", "Etc/UTC", "GMT", "Z", "+00:00")


class NotNativeError(Exception):
    """A stage cannot run natively; the text says why. Nobody outside this directory sees it."""


class NotDoneError(NotNativeError):
    """A stage that can run natively has failed."""


class Attribute(NamedTuple):
    """A column of a node's output. Its id is unique in the plan, so that it needs no qualifier."""

    id: int
    name: str
    type: str  # Spark's name of it, as in ``types``

    @property
    def column(self) -> str:
        """Return its name in our SQL."""
        return f"c{self.id}"


@dataclass(frozen=True, eq=False)
class Node:
    """An operator or an expression. Expressions of operators, and plans of subqueries, are in its fields."""

    kind: str  # name of its class, without the package
    fields: Mapping[str, Any]
    children: tuple["Node", ...]
    _read: dict[str, "Node"] = field(default_factory=dict)  # trees of fields: each is one object

    def expression(self, name: str) -> "Node":
        """Return the tree in the field ``name``."""
        if name not in self._read:
            self._read[name] = tree(self.fields[name])
        return self._read[name]

    def expressions(self, name: str) -> tuple["Node", ...]:
        """Return the list of trees in the field ``name``."""
        for number, flat in enumerate(self.fields[name]):
            if f"{name} {number}" not in self._read:
                self._read[f"{name} {number}"] = tree(flat)
        return tuple(self._read[f"{name} {number}"] for number in range(len(self.fields[name])))

    def object(self, name: str) -> str:
        """Return the name of the Scala object in the field ``name``: ``Ascending``, ``Inner``."""
        value = self.fields.get(name)
        if not isinstance(value, Mapping) or "object" not in value:
            return ""
        return str(value["object"]).rpartition(".")[2].rstrip("$")

    @property
    def attribute(self) -> Attribute:
        """Return the column that a named expression defines, without its type when that is not its own field."""
        return Attribute(
            int(self.fields["exprId"]["id"]), str(self.fields["name"]), str(self.fields.get("dataType", ""))
        )

    @property
    def scans(self) -> bool:
        """Whether this is a table that is read."""
        return self.kind == "View" and self.children[0].kind == "LogicalRelation"

    def conjuncts(self) -> list["Node"]:
        """Return the conditions that all hold where this one does."""
        if self.kind == "And":
            return [test for child in self.children for test in child.conjuncts()]
        return [self]

    def walk(self) -> Iterator["Node"]:
        """Iterate over this node and those below it, its fields left out."""
        yield self
        for child in self.children:
            yield from child.walk()


def resolved(frame: Any) -> Node:
    """Return the tree of the plan that Spark has resolved a frame to, common table expressions that one operator
    reads in their place.

    Raises ``NotNativeError`` where a part of it cannot be read, and where times in it are in another zone than UTC.
    """
    plan = frame._jdf.queryExecution().analyzed()
    acknowledge_at_once(frame)
    try:
        text = plan.toJSON()
        flat = json.loads(text)
        zone = frame.sparkSession.conf.get(_ZONE) if _TIME in text else "UTC"
    except Exception as error:  # of Py4J, for instance where it is nested too deeply
        raise NotNativeError(f"Spark's plan cannot be read: {first_line(error)}") from error
    if zone not in _UTC:
        raise NotNativeError(f"times in the zone {zone} are not proven to be equal")
    if expands := [node for node in flat if node["class"].endswith(".Expand")]:
        try:
            _read_sets(plan, expands, frame.sparkSession._jvm)
        except Exception as error:  # of Py4J, or of another version of Spark
            raise NotNativeError(f"sets of groups cannot be read: {first_line(error)}") from error
    return _inlined(tree(flat))


def _read_sets(plan: Any, expands: Sequence[dict[str, Any]], jvm: Any) -> None:
    """Give operators the rows that they make of one, which ``toJSON`` leaves out. Those in subqueries stay so."""
    array = jvm.org.apache.spark.sql.catalyst.expressions.CreateArray
    for node, expand in zip(expands, _expands(plan), strict=True):
        node["projections"] = [json.loads(array(row, False).toJSON()) for row in _each(expand.projections())]


def _expands(plan: Any) -> Iterator[Any]:
    """Iterate over the operators in Spark's own plan that make several rows of one, in preorder."""
    if plan.nodeName() == "Expand":
        yield plan
    for child in _each(plan.children()):
        yield from _expands(child)


def _each(sequence: Any) -> Iterator[Any]:
    return (sequence.apply(number) for number in range(sequence.size()))


def tree(flat: Sequence[Mapping[str, Any]]) -> Node:
    """Return the tree that ``flat`` lists in preorder.

    Raises ``NotNativeError`` for what is no tree.
    """
    if not isinstance(flat, list) or not flat:
        raise NotNativeError("Spark's plan has a part without a description")
    rest = iter(flat)

    def read() -> Node:
        value = next(rest)
        return Node(
            str(value["class"]).rpartition(".")[2],
            value,
            tuple(read() for _ in range(int(value["num-children"]))),
        )

    return read()


def sources(node: Node) -> Iterator[Node]:
    """Iterate over the scans and unions below an operator of whose rows each of its own comes from one."""
    if node.scans or node.kind == "Union":
        yield node
    elif node.kind in EACH:
        yield from sources(node.children[0])
    elif node.kind == "Join":
        left, right = node.children
        kind = node.object("joinType")
        if kind in ("Inner", "Cross", "LeftOuter", "LeftSemi", "LeftAnti"):
            yield from sources(left)
        if kind in ("Inner", "Cross", "RightOuter"):
            yield from sources(right)


def divisible(node: Node) -> list[Node]:
    """Return the scans below an operator whose slices give slices of its rows."""
    return [one for one in sources(node) if one.scans]


def arms(union: Node) -> list[tuple[Node, frozenset[int]]]:
    """Return what a union consists of, each with the parts of it and of unions below, by id(node), that have none of
    its rows."""
    found, every = list[tuple[Node, frozenset[int]]](), set[int]()
    left = [(part, frozenset([id(part)])) for part in reversed(union.children)]
    while left:
        part, above = left.pop()
        every |= above
        below = part
        while below.kind in EACH and not below.scans:
            below = below.children[0]
        if below.kind == "Union":
            left += [(one, above | {id(one)}) for one in reversed(below.children)]
        else:
            found.append((part, above))
    return [(part, frozenset(every - above)) for part, above in found]


def last(plan: Node) -> Node:
    """Return what a plan is but for its common table expressions."""
    return plan.children[-1] if plan.kind == "WithCTE" else plan


def limit_above(plan: Node, sort: Node) -> Node | None:
    """Return the limit right above ``sort``: the first rows of all are among the first of each slice."""
    for node in plan.walk():
        if node.kind == "GlobalLimit":
            child = node.children[0]
            below = child.children[0] if child.kind == "LocalLimit" else child
            if below is sort:
                return node
    return None


def ranked(plan: Node, window: Node) -> tuple[int, int] | None:
    """Return a column that numbers a window's rows by rank, and the last rank that filters above let pass: rows of
    all that have such a rank have one among those of each slice; ``None``: rows of all ranks count.

    (Group limits, as in Spark's SPARK-37099.)
    """
    items = window.expressions("windowExpressions")
    if not all(item.kind == "Alias" and item.children[0].children[0].kind in RANKS for item in items):
        return None
    names = {item.attribute.id: item.attribute.id for item in items}  # above -> of the window
    way = way_down(plan)
    for node in reversed(way[: next(n for n, one in enumerate(way) if one is window)]):
        if node.kind == "Filter":
            for test in node.expression("condition").conjuncts():
                if test.kind in _UP_TO and [one.kind for one in test.children] == [
                    "AttributeReference",
                    "Literal",
                ]:
                    column, most = test.children
                    if column.attribute.id in names and most.fields["value"] is not None:
                        return names[column.attribute.id], int(str(most.fields["value"]))
        elif node.kind == "Project":
            found = passed(node.expressions("projectList"))
            names = {new: names[old] for new, old in found if old in names}
        elif node.kind not in PASSED:
            break
    return None


def passed(items: tuple[Node, ...]) -> Iterator[tuple[int, int]]:
    """Iterate over the columns that are passed on: (id above, id below)."""
    for item in items:
        below = item.children[0] if item.kind == "Alias" else item
        if below.kind == "AttributeReference":
            yield item.attribute.id, below.attribute.id


def gathering_of(plan: Node, above: Node | None = None) -> Node | None:
    """Return the lowest operator on the way from the result down, as far as ``above``, that must see all rows."""
    return next((node for node in reversed(way_down(plan, above)) if node.kind in _GATHERING), None)


def way_down(plan: Node, above: Node | None = None) -> list[Node]:
    """Return the operators from the result down, as far as ``above``, or the first one that reads several."""
    found, node = list[Node](), plan
    while node is not above and node.kind in (*EACH, *_GATHERING, "LocalLimit") and node.children:
        found.append(node)
        node = node.children[0]
    return found


def outputs(plan: Node) -> list[int]:
    """Return the ids of a plan's columns, in order; none where they are not plain."""
    while plan.kind in ("Filter", "Union", *PASSED, *ROWWISE) and not plan.scans:
        plan = plan.children[0]  # a union has the ids of its first part
    items = {"Project": "projectList", "Aggregate": "aggregateExpressions"}.get(plan.kind)
    return [item.attribute.id for item in plan.expressions(items)] if items else []


def read_once(plan: Node) -> dict[int, Node]:
    """Return the plans of common table expressions that one place reads, by Spark's id."""
    if plan.kind != "WithCTE":
        return {}
    read = Counter(_references([node.fields for node in plan.walk()]))
    return {
        number: one.children[0] for one in plan.children[:-1] if read[number := int(one.fields["id"])] == 1
    }


def _references(value: Any) -> Iterator[int]:
    """Iterate over the common table expressions that a plan's fields read, subqueries in them included."""
    if isinstance(value, Mapping):
        if str(value.get("class", "")).endswith(".CTERelationRef"):
            yield int(value["cteId"])
        for one in value.values():
            yield from _references(one)
    elif isinstance(value, list):
        for one in value:
            yield from _references(one)


def _inlined(plan: Node) -> Node:
    """Return ``plan`` with each common table expression that one operator reads in the operator's place, as Spark's
    optimiser has it: what is below it can be divided then. Those of subqueries stay."""
    once, used = read_once(plan), set[int]()

    def put(node: Node) -> Node:
        if node.kind == "CTERelationRef" and not node.fields.get("recursive"):
            number = int(node.fields["cteId"])
            columns = outputs(once[number]) if number in once else []
            if columns and len(columns) == len(node.fields["output"]):
                used.add(number)
                return _renamed(node, put(once[number]), columns)
        children = tuple(map(put, node.children))
        changed = any(new is not old for new, old in zip(children, node.children, strict=True))
        return replace(node, children=children) if changed else node

    if plan.kind != "WithCTE":
        return plan
    *definitions, last = plan.children
    last = put(last)
    kept = [put(one) for one in reversed(definitions) if int(one.fields["id"]) not in used]  # readers first
    return replace(plan, children=(*reversed(kept), last)) if kept else last


def _renamed(reference: Node, below: Node, columns: Sequence[int]) -> Node:
    """Return ``below`` under the names and ids of the columns of a reference to it."""
    listed = []
    for (new,), old in zip(reference.fields["output"], columns, strict=True):
        alias = {**new, "class": "inlined.Alias", "num-children": 1, "child": 0}
        listed.append([alias, {**new, "exprId": {**new["exprId"], "id": old}}])
    return Node("Project", {"class": "inlined.Project", "num-children": 1, "projectList": listed}, (below,))
