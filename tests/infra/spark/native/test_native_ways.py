"""In how many tasks a stage runs natively, and what is left to Spark. No Spark is needed to decide that."""

import math
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.protocols import Relation, StageJob
from ebbflow.infra.spark.native import slices, stages
from ebbflow.infra.spark.native.catalyst import Node, NotNativeError, resolved
from ebbflow.infra.spark.native.exchange import costs, division
from ebbflow.infra.spark.native.exchange.costs import ByHash, Exchanged, Statements
from ebbflow.infra.spark.native.exchange.hashes import Exchange
from ebbflow.infra.spark.native.programs import program
from ebbflow.infra.spark.native.statements import Query, Writer
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.parquet import discover

SIZES = {"large": 8_000, "small": 400}
K = (("k", "string"),)  # of which footers tell no bounds
ROWS = {"frameType": {"object": "x.RowFrame$"}}


def expression(kind: str, *children: list[Any], **fields: Any) -> list[Any]:
    """Return an expression as Spark lists it."""
    head = {"class": f"x.{kind}", "num-children": len(children), **fields}
    return [head, *(node for child in children for node in child)]


def column(number: int, name: str = "k", kind: str = "string") -> list[Any]:
    return expression("AttributeReference", exprId={"id": number}, name=name, dataType=kind)


def named(number: int, name: str, value: list[Any]) -> list[Any]:
    return expression("Alias", value, exprId={"id": number}, name=name)


def scan(table: str, number: int, kind: str = "string") -> Node:
    relation = Node("LogicalRelation", {"output": [column(number, kind=kind)]}, ())
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


def calling(kind: str, key: int, distinct: bool = False) -> list[Any]:
    return expression("AggregateExpression", expression(kind, column(key)), isDistinct=distinct)


def limited(below: Node, count: int) -> Node:
    limit = expression("Literal", dataType="integer", value=str(count))
    return Node("GlobalLimit", {"limitExpr": limit}, (below,))


def distinct(below: Node, key: int, *by: int) -> Node:
    items = [*(column(one) for one in by), named(90, "n", calling("Count", key, distinct=True))]
    fields = {"groupingExpressions": [column(one) for one in by], "aggregateExpressions": items}
    return Node("Aggregate", fields, (below,))


def joined(left: Node, right: Node, keys: tuple[int, int]) -> Node:
    test = expression("EqualTo", *map(column, keys))
    return Node("Join", {"joinType": {"object": "x.Inner$"}, "condition": test}, (left, right))


def stage(threads: int = 1, expected: float = 0.0) -> tuple[stages.NativeStages, StageJob]:
    """Return native stages of which four tasks run at once, and a job over tables of ten files each."""
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
    return native, job


def way(plan: Node, columns: Any = K, threads: int = 1, expected: float = 0.0) -> Any:
    """Return the slices of a plan."""
    native, job = stage(threads, expected)
    return native._division.way(program(plan, columns, SIZES, escapes=False), job)


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "_SMALLEST", 1_000)


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
    monkeypatch.setattr(division, "_ALONE", 4_000)
    monkeypatch.setattr(division, "_LARGEST", 4_000)
    with pytest.raises(NotNativeError, match="one task"):
        way(plan, columns)
    assert len(way(scan("large", 1))) == 4


@pytest.mark.parametrize("apart", [True, False], ids=["groups in one task each", "others"])
def test_distinct_values_of_much_are_counted_in_ranges_of_hashes_that_have_whole_groups(
    monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    split = Statements("first", "merge")
    made = Exchanged({}, split, Statements("apart", "merge") if apart else split, "whole", frozenset())
    found = ByHash({0: "k"}, made, 0.0, 1e9, 0.0)  # which costs more than slices would
    monkeypatch.setattr(costs, "by_hash", lambda *rest: found)
    plan, columns = distinct(joined(scan("large", 1), scan("small", 2), (1, 2)), 1, 1), (*K, COUNTED)
    assert len(way(plan, columns)) == 4
    monkeypatch.setattr(division, "_ALONE", 4_000)
    monkeypatch.setattr(division, "_LARGEST", 4_000)
    if apart:
        assert way(plan, columns) is found
    else:
        with pytest.raises(NotNativeError, match="one task"):
            way(plan, columns)


@pytest.mark.parametrize(("cores", "sooner"), [(4, True), (100, False)])
def test_tasks_spill_what_they_cannot_hold_where_that_is_sooner_than_spark(
    monkeypatch: pytest.MonkeyPatch, cores: int, sooner: bool
) -> None:
    monkeypatch.setattr(costs, "column_bytes", lambda relation, names: (float(relation.bytes), 0))
    monkeypatch.setattr(costs, "by_hash", lambda *rest: None)
    monkeypatch.setattr(slices, "_EVEN", 3.0)  # of ten files: no footer is asked
    monkeypatch.setattr(division, "_ALONE", 4_000)
    monkeypatch.setattr(division, "_LARGEST", 4_000)
    _, job = stage()
    join = joined(scan("large", 1), scan("small", 2), (1, 2))
    made = program(Node("Project", {"projectList": [column(1)]}, (join,)), K, SIZES, escapes=False)
    assert len(division.Division(400, cores).way(made, job)) == (4 if sooner else 8)
    if sooner:
        assert len(division.Division(100, cores).way(made, job)) == 4
    else:
        with pytest.raises(NotNativeError, match="do not fit"):
            division.Division(100, cores).way(made, job)


@pytest.mark.parametrize("of", [1, 12])
def test_columns_that_are_not_exchanged_are_null_in_their_own_scan_only(of: int) -> None:
    """``k`` of one scan is c1, which is how c12 begins, that of the other; each is joined by its ``v``."""

    def two(number: int) -> Node:
        relation = Node("LogicalRelation", {"output": [column(number), column(number + 1, "v")]}, ())
        return Node("View", {"desc": {"identifier": {"table": "large"}}}, (relation,))

    join = joined(two(1), two(12), (2, 13))
    made = program(Node("Project", {"projectList": [column(of)]}, (join,)), K, SIZES, escapes=False)
    assert made.ways is not None
    found = made.ways.made(made.ways.keys[0])
    read = {1: 0, 12: 1}[of]
    assert {n: one.columns for n, one in found.exchanges.items()} == {read: ("k", "v"), 1 - read: ("v",)}
    with duckdb.connect() as connection:
        connection.execute("CREATE TABLE large AS SELECT 'k' || range AS k, 'v' || range AS v FROM range(9)")
        for number, one in found.exchanges.items():
            connection.execute(f"CREATE VIEW s{number} AS SELECT * FROM large")
            connection.execute(f"CREATE TABLE x{number} AS {one.sql}")
        for number in found.exchanges:
            connection.execute(f"CREATE OR REPLACE VIEW s{number} AS SELECT * FROM x{number}")
        for sql in (found.whole, found.split.first):
            assert sorted(connection.execute(sql).fetchall()) == [(f"k{n}",) for n in range(9)]


def test_groups_that_are_whole_in_no_task_are_told_from_those_that_are() -> None:
    plan = distinct(joined(scan("large", 1), scan("small", 2), (1, 2)), 1)
    made = program(plan, (COUNTED,), SIZES, escapes=False)
    assert made.ways is not None
    found = made.ways.made(made.ways.keys[0])
    assert found.apart is found.split
    plain = distinct(joined(scan("large", 1), scan("small", 2), (1, 2)), 1, 1)
    grouped = program(plain, (*K, COUNTED), SIZES, escapes=False).ways
    assert grouped is not None
    both = grouped.made(grouped.keys[0])
    assert both.apart is not both.split


def test_there_are_as_many_slices_as_make_fit_what_tasks_need_of_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Both tables are in the order of what joins them, in 40 row groups; a task can hold a fifteenth."""
    for name in SIZES:
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"k": range(40_000)}), tmp_path / name / "a.parquet", row_group_size=1_000)
    relations = tuple(discover(StorageLocation(str(tmp_path))))
    views = (scan("large", 1, "long"), scan("small", 2, "long"))
    test = expression("EqualTo", column(1, kind="long"), column(2, kind="long"))
    join = Node("Join", {"joinType": {"object": "x.Inner$"}, "condition": test}, views)
    plan = Node("Project", {"projectList": [column(1, kind="long")]}, (join,))
    made = program(plan, (("k", "bigint"),), {one.name: one.bytes for one in relations}, escapes=False)
    monkeypatch.setattr(costs, "by_hash", lambda *rest: None)
    monkeypatch.setattr(costs, "alone", lambda *rest: False)
    monkeypatch.setattr(division, "_ALONE", 1_000)
    job = replace(stage()[1], relations=relations)
    one = division.Division(relations[0].bytes // 15, 1)
    with pytest.raises(NotNativeError, match="do not fit"):
        one._divided(made, job, *_sized(made, relations, one.room))
    monkeypatch.setattr(division, "_FILLED", 1_000)
    found = one.way(made, job)
    assert isinstance(found, list)
    assert len(found) == 32
    assert all(len(each.ranges) == 1 for each in found)


def _sized(made: Any, relations: tuple[Relation, ...], room: int) -> tuple[Any, Any]:
    scans = {number: next(r for r in relations if r.name == name) for number, name in made.scans.items()}
    return scans, costs.scan_sizes(scans, made.used, room)


def test_tasks_that_sort_are_as_many_as_have_room_and_rows_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 10_000_000
    monkeypatch.setattr(costs, "column_bytes", lambda relation, names: (8.0 * rows, rows))
    table = Relation("t", "file", (FileEntry("/none/t", 1 << 20, 0.0),), K)
    written, one = Exchange("", ("n",)), division.Division(64 << 20, 2)
    assert one.writers(written, table, sorts=False) == 2
    assert one.writers(written, table, sorts=True) == math.ceil(2 * rows * 32 / (64 << 20)) == 10
    assert one.writers(written._replace(part=0.5), table, sorts=True) == 5
    tight = division.Division(1 << 20, 2)
    assert tight.writers(written, table, sorts=True) == rows // (16 * 20_480)


NUMBERED = window(scan("small", 1), 1, 2, expression("RowNumber"))
RUNNING = window(scan("small", 1), 1, 2, calling("Count", 1))
TOTAL = window(scan("small", 1), 1, 2, calling("Count", 1), "UnboundedFollowing")
RANK = window(scan("small", 1), 1, 2, expression("Rank"))
FIRST = limited(scan("small", 1), 5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("side", "tasks"),
    [(NUMBERED, 1), (RUNNING, 1), (FIRST, 1), (TOTAL, 4), (RANK, 4)],
    ids=["numbers of rows", "running counts", "first rows", "totals", "ranks"],
)
def test_tasks_do_not_choose_among_equal_rows_each_for_itself(
    monkeypatch: pytest.MonkeyPatch, side: Node, tasks: int, threads: int
) -> None:
    plan = distinct(joined(scan("large", 3), side, (3, 1)), 3, 3)
    assert len(way(plan, (*K, COUNTED), threads) or [plan]) == tasks
    monkeypatch.setattr(division, "_ALONE", 4_000)
    monkeypatch.setattr(division, "_LARGEST", 4_000)
    if tasks == 1:
        with pytest.raises(NotNativeError, match="equal rows"):
            way(plan, (*K, COUNTED), threads)


def test_the_last_operators_choose_among_the_rows_of_all_slices() -> None:
    last = window(scan("large", 1), 1, 2, expression("RowNumber"))
    assert len(way(last, RANKS)) == 4
    assert len(way(limited(scan("large", 1), 5))) == 4


def test_sets_of_groups_that_cannot_be_read_leave_the_stage_to_spark() -> None:
    def broken() -> Any:
        raise RuntimeError("Py4JError: an error occurred\nwhile calling o1.projections")

    none = SimpleNamespace(size=lambda: 0)
    one = SimpleNamespace(nodeName=lambda: "Expand", projections=broken, children=lambda: none)
    one.toJSON = lambda: '[{"class": "x.Expand", "num-children": 0}]'
    query = SimpleNamespace(queryExecution=lambda: SimpleNamespace(analyzed=lambda: one))
    for jvm in (MagicMock(), SimpleNamespace()):
        frame = SimpleNamespace(_jdf=query, sparkSession=SimpleNamespace(_jvm=jvm))
        with pytest.raises(NotNativeError, match="sets of groups cannot be read"):
            resolved(frame)


def united(count: int, nested: bool) -> Node:
    """Return the union of as many tables, or unions of each with those before, whose types are made alike."""
    parts = [scan("small", number) for number in range(1, count)] + [scan("large", count)]
    if not nested:
        return Node("Union", {}, tuple(parts))
    whole = parts[0]
    for part in parts[1:]:
        below = Node("Project", {"projectList": [column(1)]}, (whole,)) if whole.kind == "Union" else whole
        whole = Node("Union", {}, (below, part))
    return whole


@pytest.mark.parametrize("nested", [False, True])
def test_the_parts_of_a_union_are_written_when_they_are_asked_for_and_each_by_itself(
    monkeypatch: pytest.MonkeyPatch, nested: bool
) -> None:
    read, whole = list[Node](), Writer.scan

    def scanned(writer: Writer, node: Node) -> Query:
        read.append(node)
        return whole(writer, node)

    monkeypatch.setattr(Writer, "scan", scanned)
    made = program(united(20, nested), K, SIZES, escapes=False)
    assert len(read) == 20
    assert [arm.scans for arm in made.arms] == [{n: made.scans[n]} for n in range(20)]
    assert len(read) <= 3 * 20, "for each part others are written than it and the first one"
    assert sorted(arm.first.count(" FROM s") for arm in made.arms) == [1] * 20
    with duckdb.connect() as connection:
        for number in range(20):
            connection.execute(f"CREATE VIEW s{number} AS SELECT '{number}' AS k")
        rows = [connection.execute(arm.first).fetchall() for arm in made.arms]
        assert rows == [[(str(number),)] for number in range(20)]


def test_each_part_of_a_union_has_as_many_tasks_as_its_share_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(division, "_SMALLEST", 1 << 30)
    found = way(united(6, nested=False), expected=4.0)  # of 10 000 bytes the last part has 8 000
    assert Counter(one.made.scans[one.made.sliced] for one in found) == {"small": 5, "large": 4}


@pytest.mark.parametrize(
    ("plan", "even"),
    [(united(400, nested=True), 1.3), (scan("large", 1), 0.0)],
    ids=["it is nested too deeply", "footers of its tables cannot be read"],
)
def test_a_stage_that_cannot_be_planned_is_left_to_spark(
    monkeypatch: pytest.MonkeyPatch, plan: Node, even: float
) -> None:
    monkeypatch.setattr(slices, "_EVEN", even)  # of files of about one size no footer is asked
    monkeypatch.setattr(stages, "resolved", lambda frame: plan)
    monkeypatch.setitem(stages._probed, "ways", "")
    native, job = stage()
    with pytest.raises(NotNativeError, match="cannot be planned"):
        native.run(None, job, K, threading.Event())


def test_a_plan_that_spark_cannot_write_down_is_left_to_it() -> None:
    plan = MagicMock()
    plan.toJSON.side_effect = RuntimeError("java.lang.StackOverflowError\n\tat java.base")
    query = SimpleNamespace(queryExecution=lambda: SimpleNamespace(analyzed=lambda: plan))
    with pytest.raises(NotNativeError, match=r"cannot be read: java\.lang\.StackOverflowError$"):
        resolved(SimpleNamespace(_jdf=query))


def test_what_tasks_are_mapped_over_is_made_once_and_not_kept_of_applications_that_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: dict[str, dict[int, Any]] = {}
    monkeypatch.setattr(stages, "_empty", kept)
    made: list[int] = []

    class Empty:
        def __init__(self, rows: list[Any], tasks: int) -> None:
            made.append(tasks)

        def mapPartitionsWithIndex(self, run: Any) -> "Empty":
            return self

        def collect(self) -> list[Any]:
            return []

    for application, tasks in (("first", 2), ("first", 2), ("first", 3), ("second", 2)):
        native: Any = SimpleNamespace(_application=application, _context=SimpleNamespace(parallelize=Empty))
        work: Any = SimpleNamespace(parts=[None] * tasks, run=None)
        assert stages.NativeStages._collected(native, work) == []
    assert made == [2, 3, 2]
    assert {one: list(rdds) for one, rdds in kept.items()} == {"second": [2]}
