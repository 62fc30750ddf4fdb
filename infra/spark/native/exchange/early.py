"""Aggregates below joins: of a scan's rows groups are written, which the calls above combine.

Where calls read one scan's columns only, those of its rows that are alike in all else that is read of them are one to
joins, tests and keys: one row may stand for them, and counts once for each row that it meets, as each of them would.
(Eager aggregation; W. Yan and P. Larson, VLDB 1995.)
"""

from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ebbflow.infra.spark.native import types
from ebbflow.infra.spark.native.aggregates import Calls
from ebbflow.infra.spark.native.catalyst import PASSED, Attribute, Node
from ebbflow.infra.spark.native.narrowing import columns

_NAME = "__ebbflow_a"  # of the columns of calls
_STRICT = ("AttributeReference", "Literal", "Cast", "Add", "Subtract", "Multiply", "UnaryMinus")
"""Expressions that are null where a column is: what a join makes up for a missing row adds nothing to their calls."""


class Early(NamedTuple):
    """What is computed of a scan's rows before they are exchanged."""

    by: tuple[Attribute, ...] = ()  # what is left of the scan's columns
    # by text: what combines the values of a call, and their type
    calls: Mapping[str, tuple[str, str]] = MappingProxyType({})
    # by id(node): the scan, and the operators from there up to the aggregate
    through: frozenset[int] = frozenset()

    @property
    def columns(self) -> list[tuple[str, str]]:
        """Return the columns of the calls, with their Spark SQL types."""
        return [(f"{_NAME}{n}", types.sql_name(kind)) for n, (_, kind) in enumerate(self.calls.values())]

    def groups(self, source: str) -> str:
        """Return the groups of ``source``, rows of the scan."""
        by = ", ".join(one.column for one in self.by)
        calls = (f", {call} AS {name}" for call, (name, _) in zip(self.calls, self.columns, strict=True))
        return f"(SELECT {by}{''.join(calls)} FROM {source} GROUP BY {by})"

    def carried(self, node: Node) -> list[str]:
        """Return the names of the columns of calls, if an operator passes them on."""
        return [name for name, _ in self.columns] if id(node) in self.through else []

    def above(self, node: Node) -> dict[str, str] | None:
        """Return by the text of a call what it is of joined groups; ``None``: ``node`` is another aggregate."""
        if id(node) not in self.through:
            return None
        found = {}
        for (call, (how, _)), (name, _) in zip(self.calls.items(), self.columns, strict=True):
            one = f"coalesce({name}, 1)" if call == "count(*)" else name  # a row of the other side by itself
            counted = call.startswith("count(")
            found[call] = f"CAST(coalesce({how}({one}), 0) AS BIGINT)" if counted else f"{how}({one})"
        return found


NOTHING = Early()


def early_groups(
    aggregate: Node, calls: Calls, view: Node, key: str, passed: Collection[int]
) -> Early | None:
    """Return what can be computed of a scan's rows before they are joined; ``None``: nothing can.

    Args:
        aggregate: the one above the joins.
        calls: its calls, as they have been collected.
        view: the scan.
        key: its column by which its rows are exchanged.
        passed: tests, by id(node), that each row that is exchanged has passed.
    """
    own = {column.id: column for column in columns(view)}
    through = _way(aggregate.children[0], view)
    if not through or calls.whole or calls.values or "list" in calls.kinds.values():
        return None
    if any(column.name.lower().startswith(_NAME) for column in own.values()):
        return None
    if not all(_combines(call, own) for call in _called(aggregate)):
        return None
    needed = {found for one in _reading(aggregate, passed) for found in _outside(one)}
    by = tuple(column for column in own.values() if column.id in needed or column.name == key)
    if not all(types.exact(column.type) for column in by):
        return None
    told = {call: (how, calls.kinds[call]) for call, how in calls.parts.items()}
    return Early(by, told, frozenset(map(id, (aggregate, *through))))


def _way(node: Node, view: Node) -> list[Node]:
    """Return the operators from ``node`` down to a scan; nothing where one of them may need each row of it."""
    if node is view:
        return [node]
    below: tuple[Node, ...] = ()
    if node.kind == "Join":
        below = node.children[: 1 if node.object("joinType") in ("LeftSemi", "LeftAnti") else 2]
    elif node.kind in ("Project", "Filter", *PASSED):
        below = node.children
    ways = (_way(child, view) for child in below)
    return next(([node, *way] for way in ways if way), [])


def _called(aggregate: Node) -> Iterator[Node]:
    for item in aggregate.expressions("aggregateExpressions"):
        yield from (one for one in item.walk() if one.kind == "AggregateExpression")


def _combines(call: Node, own: Collection[int]) -> bool:
    """Tell whether a call of rows is one of what it is of their groups."""
    function, *condition = call.children
    if condition or call.fields.get("isDistinct"):
        return False
    nodes = [one for child in function.children for one in child.walk()]
    read = {one.attribute.id for one in nodes if one.kind == "AttributeReference"}
    if not read:  # it counts rows, also those that a join makes up for
        return function.kind == "Count" and all(one.kind == "Literal" for one in nodes)
    return read <= {*own} and all(one.kind in _STRICT for one in nodes)


def _reading(aggregate: Node, passed: Collection[int]) -> Iterator[Node]:
    """Iterate over what reads columns at an aggregate and below, but for tests that are ``passed``: expressions, and
    operators that no row of a scan comes through one by one."""
    yield from aggregate.expressions("groupingExpressions")
    yield from aggregate.expressions("aggregateExpressions")
    for node in aggregate.children[0].walk():
        if node.kind in ("Filter", "Join"):
            tests = node.expression("condition").conjuncts() if node.fields.get("condition") else ()
            yield from (test for test in tests if id(test) not in passed)
        elif node.kind == "Project":
            yield from (item for item in node.expressions("projectList") if item.kind != "AttributeReference")
        elif node.kind not in (*PASSED, "LogicalRelation"):
            yield node


def _outside(node: Node) -> Iterator[int]:
    """Iterate over the ids of columns that something reads outside of calls."""
    if node.kind != "AggregateExpression":
        yield from _ids(node.fields)
        for child in node.children:
            yield from _outside(child)


def _ids(value: Any) -> Iterator[int]:
    """Iterate over the ids of columns in a part of a plan, as Spark has written it."""
    if isinstance(value, Mapping):
        if str(value.get("class", "")).endswith(".AttributeReference"):
            yield int(value["exprId"]["id"])
        for one in value.values():
            yield from _ids(one)
    elif isinstance(value, list):
        for one in value:
            yield from _ids(one)
