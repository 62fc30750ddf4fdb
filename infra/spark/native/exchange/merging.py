"""Groups that slices have found, merged by several tasks: each has all rows of those whose keys have some hashes.

One task may as well compute what is above them, as far as that sees groups apart: windows by these keys, the first
rows of its own. What is left runs in one more task, or is the result.
"""

from typing import NamedTuple

from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.native import types
from ebbflow.infra.spark.native.aggregates import Groups
from ebbflow.infra.spark.native.catalyst import (
    PASSED,
    Node,
    NotNativeError,
    gathering_of,
    last,
    passed,
    ranked,
    way_down,
)
from ebbflow.infra.spark.native.exchange.costs import Statements
from ebbflow.infra.spark.native.exchange.program import Program, scans_in
from ebbflow.infra.spark.native.programs import result, statements_of
from ebbflow.infra.spark.native.statements import PARTS
from ebbflow.infra.spark.native.worker import Part

MANY = 1_000_000  # rows up to which one task merges sooner than several, each of which reads all of them
_SHARE = "share"  # the relation of a task's own rows


class Merging(NamedTuple):
    """How several tasks merge."""

    split: Statements
    by: tuple[str, ...]  # keys of groups: those that are alike in them are one task's

    def parts(self, written: Relation, tasks: int) -> list[Part]:
        """Return what the tasks run over what slices have written."""
        found = []
        for number in range(tasks):
            own = f"hash({', '.join(self.by)}) % {tasks} = {number}"
            share = f"WITH {_SHARE} AS (SELECT * FROM {PARTS} WHERE {own})"
            rest = self.split.first
            statement = f"{share}, {rest[5:]}" if rest.startswith("WITH ") else f"{share} {rest}"
            file = self.split.file.format(number).replace(".native-", f".native-{_SHARE}-")
            found.append(Part(statement, (written,), file))
        return found


def merging(made: Program, merge: str) -> Merging | None:
    """Return how several tasks do what the statement ``merge`` does with all that slices have written; ``None``:
    groups have no keys to be told apart by, or it reads tables, too."""
    try:
        return _merging(made, merge) if made.exchanger is not None else None
    except (NotNativeError, RecursionError):
        return None


def _merging(made: Program, merge: str) -> Merging | None:
    assert made.exchanger is not None
    plan, own = made.exchanger.plan, made.exchanger.writer.anew(frozenset())
    aggregate = gathering_of(last(plan))
    if aggregate is None or aggregate.kind != "Aggregate":
        return None
    own.query(plan)  # it knows common table expressions then
    above, groups = own.grouped(aggregate)
    own.stored[id(aggregate)] = above.over(groups.merged(PARTS))
    if own.complete(result(own.query(plan), made.columns)) != merge:
        return None  # slices have written something else
    own.stored[id(aggregate)] = above.over(groups.merged(_SHARE))
    top, by = _apart(plan, aggregate, groups)
    split = statements_of(own, plan, made.columns, top)[1]
    if not by or split is None or scans_in(split.first + split.merge):
        return None
    return Merging(split, by)


def _apart(plan: Node, aggregate: Node, groups: Groups) -> tuple[Node, tuple[str, ...]]:
    """Return the highest operator above an aggregate whose rows can be told by keys of groups to be of one task, and
    these keys."""
    keys = {text: key.sql for text, key in groups.keys.items() if types.exact(key.type)}
    names = {
        new: keys[f"c{old}"]
        for new, old in passed(aggregate.expressions("aggregateExpressions"))
        if f"c{old}" in keys
    }
    top, by = aggregate, set(keys.values())
    for node in reversed(way_down(last(plan), aggregate)):
        if node.kind == "Project":
            found = passed(node.expressions("projectList"))
            names = {new: names[old] for new, old in found if old in names}
        elif node.kind == "Window":
            columns = {
                n.attribute.id for n in node.expressions("partitionSpec") if n.kind == "AttributeReference"
            }
            common = by & {names[column] for column in columns if column in names}
            if not common or ranked(last(plan), node) is not None:  # of which few rows of each share are left
                break
            top, by = node, common
        elif node.kind != "Filter" and node.kind not in PASSED:
            break
    return top, tuple(sorted(by))
