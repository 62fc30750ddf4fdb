"""In how many tasks a stage runs natively, and what is left to Spark. No Spark is needed to decide that."""

from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.infra.protocols import Relation, StageJob
from ebbflow.infra.spark.native import stages
from ebbflow.infra.spark.native.catalyst import Node, NotNativeError
from ebbflow.infra.spark.native.exchange import costs
from ebbflow.infra.spark.native.exchange.costs import ByHash, Exchanged, Statements
from ebbflow.infra.spark.native.programs import program
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation

SIZES = {"large": 8_000, "small": 400}
K = (("k", "string"),)  # of which footers tell no bounds
ROWS = {"frameType": {"object": "x.RowFrame$"}}


def expression(kind: str, *children: list[Any], **fields: Any) -> list[Any]:
    """Return an expression as Spark lists it."""
    head = {"class": f"x.{kind}", "num-children": len(children), **fields}
    return [head, *(node for child in children for node in child)]


def column(number: int, name: str = "k") -> list[Any]:
    return expression("AttributeReference", exprId={"id": number}, name=name, dataType="string")


def named(number: int, name: str, value: list[Any]) -> list[Any]:
    return expression("Alias", value, exprId={"id": number}, name=name)


def scan(table: str, number: int) -> Node:
    relation = Node("LogicalRelation", {"output": [column(number)]}, ())
    return Node("View", {"desc": {"identifier": {"table": table}}}, (relation,))


def window(below: Node, key: int, number: int, call: list[Any], upper: str = "CurrentRow") -> Node:
    order = expression(
        "SortOrder",
        column(key),
        direction={"object": "x.Ascending$"},
        nullOrdering={"object": "x.NullsFirst$"},
    )
    frame = expression(
        "SpecifiedWindowFrame", expression("UnboundedPreceding$"), expression(f"{upper}$"), **ROWS
    )
    value = expression("WindowExpression", call, expression("WindowSpecDefinition", order, frame))
    return Node("Window", {"windowExpressions": [named(number, "n", value)]}, (below,))


def counted(key: int) -> list[Any]:
    return expression("AggregateExpression", expression("Count", column(key)), isDistinct=True)


def distinct(below: Node, key: int, *by: int) -> Node:
    items = [*(column(one) for one in by), named(90, "n", counted(key))]
    fields = {"groupingExpressions": [column(one) for one in by], "aggregateExpressions": items}
    return Node("Aggregate", fields, (below,))


def joined(left: Node, right: Node, keys: tuple[int, int]) -> Node:
    test = expression("EqualTo", *map(column, keys))
    return Node("Join", {"joinType": {"object": "x.Inner$"}, "condition": test}, (left, right))


def way(plan: Node, columns: Any = K, threads: int = 1, expected: float = 0.0) -> Any:
    """Return the slices of a plan over tables of ten files each, where four tasks run at once."""
    conf = SimpleNamespace(get=lambda key, default=None: {"spark.task.cpus": str(threads)}.get(key, default))
    context: Any = SimpleNamespace(
        master="local[4]", getConf=lambda: conf, defaultParallelism=4 * threads, applicationId="ways"
    )
    native = stages.NativeStages(context, owned=False)
    relations = tuple(
        Relation(name, "file", tuple(FileEntry(f"/none/{name}/{n}", size // 10, 0.0) for n in range(10)), K)
        for name, size in SIZES.items()
    )
    output = StorageLocation("file:///none/output")
    job = StageJob("id", "it", "SELECT 1", relations, output, expected=expected, native=True)
    made = program(plan, columns, SIZES, escapes=False)
    return native._way(made, job)


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_SMALLEST", 1_000)


RANKED = window(scan("large", 1), 1, 2, expression("Rank"))
RANKS = (*K, ("n", "int"))
COUNTED = ("n", "bigint")


@pytest.mark.parametrize(
    ("plan", "columns"),
    [(RANKED, RANKS), (distinct(scan("large", 1), 1), (COUNTED,))],
    ids=["windows", "distinct values"],
)
def test_one_task_never_gathers_what_is_too_much_for_it(
    monkeypatch: pytest.MonkeyPatch, plan: Node, columns: Any
) -> None:
    assert len(way(plan, columns)) == 4
    monkeypatch.setattr(stages, "_ALONE", 4_000)
    with pytest.raises(NotNativeError, match="one task"):
        way(plan, columns)
    assert len(way(scan("large", 1))) == 4


@pytest.mark.parametrize("apart", [True, False], ids=["groups in one task each", "others"])
def test_distinct_values_of_much_are_counted_in_ranges_of_hashes_that_have_whole_groups(
    monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    split = Statements("first", "merge")
    made = Exchanged({}, split, Statements("apart", "merge") if apart else split, "whole", frozenset())
    found = ByHash({0: "k"}, made, 0.0, 1e9)  # which costs more than slices would
    monkeypatch.setattr(costs, "by_hash", lambda *rest: found)
    plan, columns = distinct(joined(scan("large", 1), scan("small", 2), (1, 2)), 1, 1), (*K, COUNTED)
    assert len(way(plan, columns)) == 4
    monkeypatch.setattr(stages, "_ALONE", 4_000)
    if apart:
        assert way(plan, columns) is found
    else:
        with pytest.raises(NotNativeError, match="one task"):
            way(plan, columns)
