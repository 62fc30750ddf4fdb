"""Aggregates of a statement that tasks compute each by itself, in waves: its rows are those of the whole."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pytest

from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.native.catalyst import Node, NotDoneError, NotNativeError
from ebbflow.infra.spark.native.exchange.costs import WAVE, Size
from ebbflow.infra.spark.native.exchange.program import Program, Slice
from ebbflow.infra.spark.native.exchange.waves import Computing, Waves, waves
from ebbflow.infra.spark.native.programs import program
from ebbflow.infra.spark.native.slices import Cut
from ebbflow.infra.spark.native.worker import Done
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation
from tests.infra.spark.native.test_native_ways import (
    SIZES,
    calling,
    column,
    expression,
    joined,
    limited,
    named,
    scan,
)

LEAST = 1_000  # bytes: "small" is not divided
HALVES = 2
ALIKE = "rows of one table that pass tests"


def counted(below: Node, key: int, number: int, *by: int) -> Node:
    """Return how often there is a ``key``, by columns that are ``number`` and so on above."""
    items = [named(number + n, f"k{number + n}", column(one)) for n, one in enumerate(by)]
    items.append(named(number + 9, f"n{number}", calling("Count", key)))
    fields = {"groupingExpressions": [*map(column, by)], "aggregateExpressions": items}
    return Node("Aggregate", fields, (below,))


def table(below: Node) -> Node:
    return Node("CTERelationDef", {"id": 7}, (below,))


def read(number: int) -> Node:
    """Return a reader of ``table``, of a text and how often there is one."""
    output = [
        expression("AttributeReference", exprId={"id": number + n}, name=f"r{number + n}", dataType=kind)
        for n, kind in enumerate(("string", "long"))
    ]
    return Node("CTERelationRef", {"cteId": 7, "output": output}, ())


def counts(*numbers: int) -> list[tuple[str, str]]:
    return [pair for n in numbers for pair in ((f"k{n}", "string"), (f"n{n}", "bigint"))]


def passing(number: int, key: int, *values: str) -> Node:
    """Return how many rows of a table have one of some values."""
    literals = (expression("Literal", dataType="string", value=one) for one in values)
    below = Node("Filter", {"condition": expression("In", column(key), *literals)}, (scan("large", key),))
    return counted(below, key, number)


BY = counted(scan("large", 1), 1, 10, 1)
OTHER = counted(scan("large", 2), 2, 20, 2)
LITTLE = counted(scan("small", 2), 2, 20, 2)
UNITED = Node("Union", {}, (scan("large", 1), scan("small", 4), scan("large", 3)))
CASES = {
    "joined": (joined(BY, OTHER, (10, 20)), counts(10, 20), [2]),
    "one is little": (joined(BY, LITTLE, (10, 20)), counts(10, 20), [1]),
    "read twice": (
        Node("WithCTE", {}, (table(BY), joined(read(30), read(32), (30, 32)))),
        [("r30", "string"), ("r31", "bigint"), ("r32", "string"), ("r33", "bigint")],
        [1],
    ),
    "read by nothing": (Node("WithCTE", {}, (table(BY), OTHER)), counts(20), [1]),
    "one after the other": (counted(joined(scan("large", 2), BY, (2, 10)), 2, 20, 10), counts(20), [1, 1]),
    "a union": (joined(counted(UNITED, 1, 10, 1), LITTLE, (10, 20)), counts(10, 20), [1]),
    "distinct rows": (
        Node("Distinct", {}, (joined(scan("large", 1), LITTLE, (1, 20)),)),
        [("k", "string"), *counts(20)],
        [1],
    ),
    "in both": (
        Node("Intersect", {"isAll": False}, (scan("large", 1), scan("large", 2))),
        [("k", "string")],
        [2],
    ),
    "in one only": (
        Node("Except", {"isAll": False}, (scan("large", 1), scan("small", 2))),
        [("k", "string")],
        [1],
    ),
    "of all rows": (counted(scan("large", 1), 1, 10), [("n10", "bigint")], [1]),
    ALIKE: (
        Node(
            "Join", {"joinType": {"object": "x.Cross$"}}, (passing(10, 1, "a", "b"), passing(20, 2, "b", "e"))
        ),
        [("n10", "bigint"), ("n20", "bigint")],
        [1],
    ),
}


def divided(
    plan: Node, columns: Any, slices: Callable[[Program], list[Slice]]
) -> tuple[Program, Waves | None]:
    made = program(plan, columns, SIZES, escapes=False)
    scans = {
        number: Relation(name, "file", (FileEntry(f"/none/{name}", SIZES[name], 0.0),), (("k", "string"),))
        for number, name in made.scans.items()
    }
    return made, waves(made, scans, 1 << 30, LEAST, slices)


def halves(made: Program) -> list[Slice]:
    return [Slice(Cut(()), (), 0.0, made)] * (1 if made.sliced is None else HALVES)


@pytest.mark.parametrize("case", CASES)
def test_waves_of_slices_give_the_rows_of_the_whole_statement(case: str) -> None:
    plan, columns, numbers = CASES[case]
    made, found = divided(plan, columns, halves)
    assert found is not None
    assert [len(wave) for wave in found.pieces] == numbers
    with duckdb.connect() as connection:
        for number in made.scans:
            kind = 0 if case == ALIKE else number
            key = f"CASE WHEN i % 7 > 0 THEN chr(97 + CAST(i * i % {19 + kind} AS INTEGER)) END"
            connection.execute(f"CREATE TABLE t{number} AS SELECT {key} AS k FROM range({40 + kind}) t(i)")
            connection.execute(f"CREATE VIEW s{number} AS FROM t{number}")
        whole = connection.execute(made.whole).fetchall()
        for piece in (one for wave in found.pieces for one in wave):
            for task, one in enumerate(piece.slices):
                sliced = one.made.sliced
                connection.execute(
                    f"CREATE OR REPLACE VIEW s{sliced} AS FROM t{sliced} WHERE rowid % {HALVES} = {task % HALVES}"
                )
                into = f"INSERT INTO {piece.name}" if task else f"CREATE TABLE {piece.name} AS"
                connection.execute(f"{into} {one.made.first}")
                connection.execute(f"CREATE OR REPLACE VIEW s{sliced} AS FROM t{sliced}")
        rows = connection.execute(found.merge).fetchall()
    assert whole
    assert sorted(map(repr, rows)) == sorted(map(repr, whole))


@pytest.mark.parametrize(("values", "read"), [("ab", {0, 1}), ("aa", {0})])
def test_tasks_need_of_a_shared_table_what_is_counted_or_tested_once_for_each_test(
    values: str, read: set[int]
) -> None:
    def of_wide(key: int, number: int, value: str) -> Node:
        stored = Node("LogicalRelation", {"output": [column(key), column(key + 1, "unread")]}, ())
        view = Node("View", scan("large", key).fields, (stored,))
        test = expression("In", column(key), expression("Literal", dataType="string", value=value))
        return counted(Node("Filter", {"condition": test}, (view,)), key, number)

    both = (of_wide(key, number, value) for key, number, value in zip((1, 3), (10, 20), values, strict=True))
    plan = Node("Join", {"joinType": {"object": "x.Cross$"}}, tuple(both))
    _, found = divided(plan, [("n10", "bigint"), ("n20", "bigint")], halves)
    assert found is not None
    assert [one.made.used[0] for one in found.slices] == [("k",)] * HALVES
    assert found.sliced == read


def test_nothing_is_divided_whose_tasks_would_choose_among_equal_rows_or_that_does_not_fit() -> None:
    first = joined(scan("large", 1), limited(scan("small", 5), 3), (1, 5))
    assert divided(joined(counted(first, 1, 10, 1), LITTLE, (10, 20)), counts(10, 20), halves)[1] is None

    def none(made: Program) -> list[Slice]:
        raise NotNativeError("it does not fit")

    assert divided(*CASES["joined"][:2], none)[1] is None
    assert divided(LITTLE, counts(20), halves)[1] is None, "it is little"


def test_waves_are_weighed_against_one_task_or_against_spark_sql() -> None:
    """Two tasks read 50 units each, and a third one ``left``; one task would read 100 more, of the same table."""
    made, found = divided(*CASES[ALIKE][:2], halves)
    assert found is not None
    assert len(found.slices) == HALVES < len(made.scans) * HALVES

    def pays(left: float, cores: int, *, divided: bool) -> bool:
        sizes = {number: Size(size * WAVE, 0.0) for number, size in ((0, 100), (1, 100), (2, left))}
        waves = found._replace(sliced=frozenset({0}), left={2: sizes[2]})
        return waves.pays(sizes, cores, divided=divided)

    assert pays(left=500, cores=2, divided=False)  # 551 of 700
    assert not pays(left=600, cores=2, divided=False)  # 651 of 800
    assert pays(left=600, cores=7, divided=True)  # 651 seven times, 800 six times
    assert not pays(left=600, cores=8, divided=True)


def ran(made: Program, folder: Path) -> tuple[list[Relation], Computing]:
    """Return a program's scans, and what computes slices as 100 bytes each in ``folder``."""

    def run(
        slices: list[Slice], names: list[str], relations: Sequence[Relation], later: int
    ) -> tuple[list[list[str]], list[Done]]:
        for name in names:
            (folder / name).write_bytes(b"x" * 100)
        return [[name] for name in names], [Done(1)] * len(slices)

    return [Relation(f"s{number}", "file", (), (("k", "string"),)) for number in made.scans], run


def test_one_task_is_not_given_more_than_it_can_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two aggregates of two slices each: four files of 100 bytes."""
    made, found = divided(*CASES["joined"][:2], halves)
    assert found is not None
    scans, run = ran(made, tmp_path)
    merge, done = found.run(StorageLocation(tmp_path), scans, run)
    assert len(done) == 4
    assert {one.name: one.bytes for one in merge.relations if one.files} == {"parts0": 200, "parts1": 200}
    monkeypatch.setattr("ebbflow.infra.spark.native.exchange.waves.MERGED", 399)
    with pytest.raises(NotDoneError, match="too many groups"):
        found.run(StorageLocation(tmp_path), scans, run)


def test_a_task_of_a_later_wave_is_not_given_more_than_it_can_hold(tmp_path: Path) -> None:
    """Groups of two slices, two files of 100 bytes, are read by each of two tasks."""
    made, found = divided(*CASES["one after the other"][:2], halves)
    assert found is not None
    scans, run = ran(made, tmp_path)
    assert len(found._replace(room=200).run(StorageLocation(tmp_path), scans, run)[1]) == 4
    with pytest.raises(NotDoneError, match="too many groups"):
        found._replace(room=199).run(StorageLocation(tmp_path), scans, run)
