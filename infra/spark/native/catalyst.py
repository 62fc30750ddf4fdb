"""Spark's resolved plan of a statement, as ``TreeNode.toJSON`` writes it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


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


def parse(text: str) -> Node:
    """Return the tree of ``TreeNode.toJSON``."""
    return tree(json.loads(text))


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
