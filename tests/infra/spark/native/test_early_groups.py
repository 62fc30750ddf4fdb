"""Groups of a scan that are exchanged, not its rows: what calls above joins are of them, and whether that pays."""

from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.native.catalyst import Node
from ebbflow.infra.spark.native.exchange.costs import Exchanged, Size, Statements, Ways, by_hash, groups_of
from ebbflow.infra.spark.native.exchange.hashes import Exchange
from ebbflow.infra.spark.native.programs import program
from ebbflow.infra.storage.files import FileEntry
from tests.infra.spark.native.answers import by_hash as rows_by_hash
from tests.infra.spark.native.test_native_ways import expression, named

KINDS = (("k", "long"), ("v", "decimal(7,2)"), ("n", "long"), ("s", "string"))
CALLS = {
    "count": (expression("Count", expression("Literal", value="1", dataType="integer")), "bigint"),
    "counted": ("Count", "v", "bigint"),
    "sum": ("Sum", "v", "decimal(17,2)"),
    "whole": ("Sum", "n", "bigint"),
    "mean": ("Average", "n", "double"),
    "least": ("Min", "s", "string"),
    "greatest": ("Max", "n", "bigint"),
}


def column(first: int, name: str) -> list[Any]:
    """Return a column of the scan whose columns' ids begin with ``first``."""
    number = [one for one, _ in KINDS].index(name)
    return expression(
        "AttributeReference", exprId={"id": first + number}, name=name, dataType=KINDS[number][1]
    )


def scan(table: str, first: int) -> Node:
    relation = Node("LogicalRelation", {"output": [column(first, name) for name, _ in KINDS]}, ())
    return Node("View", {"desc": {"identifier": {"table": table}}}, (relation,))


def call(kind: str, of: int) -> list[Any]:
    function, *rest = CALLS[kind]
    inner = function if isinstance(function, list) else expression(function, column(of, rest[0]))
    return expression("AggregateExpression", inner, isDistinct=False)


def write(path: Path, rows: list[tuple[int | None, int | None]]) -> None:
    """Write a table of keys and of values, of which the other columns are."""
    listed = "k, CAST(v / 4 AS DECIMAL(7,2)) AS v, v AS n, chr(CAST(97 + v AS INTEGER)) AS s"
    with duckdb.connect() as connection:
        connection.execute("CREATE TABLE t (k BIGINT, v BIGINT)")
        if rows:
            connection.executemany("INSERT INTO t VALUES (?, ?)", rows)
        connection.execute(f"COPY (SELECT {listed} FROM t) TO '{path}' (FORMAT parquet)")


ROWS = st.lists(
    st.tuples(st.one_of(st.none(), st.integers(0, 4)), st.one_of(st.none(), st.integers(0, 5))), max_size=30
)
JOINS = st.sampled_from(["Inner", "LeftOuter", "RightOuter", "FullOuter"])


@given(ROWS, ROWS, JOINS, st.sets(st.sampled_from(sorted(CALLS)), min_size=1), st.data())
def test_calls_of_joined_groups_are_those_of_joined_rows(
    tmp_path_factory: pytest.TempPathFactory,
    left: list[tuple[int | None, int | None]],
    right: list[tuple[int | None, int | None]],
    kind: str,
    calls: set[str],
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("early")
    write(folder / "left.parquet", left)
    write(folder / "right.parquet", right)
    of, other = data.draw(st.permutations([10, 20]))
    by = data.draw(st.sampled_from([[(other, "k")], [(of, "k")], [(other, "s"), (of, "s")], []]))
    on = expression("EqualTo", column(10, "k"), column(20, "k"))
    if data.draw(st.booleans()):
        on = expression("And", on, expression("LessThan", column(of, "n"), column(other, "n")))
    below = Node(
        "Join", {"joinType": {"object": f"x.{kind}$"}, "condition": on}, (scan("left", 10), scan("right", 20))
    )
    if data.draw(st.booleans()):
        items = [column(first, name) for first in (20, 10) for name, _ in KINDS]
        below = Node("Project", {"projectList": items}, (below,))
    items = [named(50 + n, f"g{n}", column(*one)) for n, one in enumerate(by)]
    items += [named(70 + n, name, call(name, of)) for n, name in enumerate(sorted(calls))]
    fields = {"groupingExpressions": [column(*one) for one in by], "aggregateExpressions": items}
    types = {"long": "bigint"}
    columns = [(f"g{n}", types.get(dict(KINDS)[one[1]], "string")) for n, one in enumerate(by)]
    columns += [(name, CALLS[name][-1]) for name in sorted(calls)]
    made = program(Node("Aggregate", fields, (below,)), columns, {"left": 8, "right": 8}, escapes=False)
    assert made.ways is not None
    (number,) = (n for n, name in made.scans.items() if name == ("left" if of == 10 else "right"))
    way = made.ways.early(made.ways.keys[0], number)
    assert way is not None
    with duckdb.connect() as connection:
        for one, name in made.scans.items():
            connection.execute(f"CREATE VIEW s{one} AS SELECT * FROM read_parquet('{folder / name}.parquet')")
        whole = sorted(map(repr, connection.execute(made.whole).fetchall()))
        for rows in rows_by_hash(connection, made, way, folder, "x"):
            assert sorted(map(repr, rows)) == whole


def ways(keys: dict[int, str], groups: bool) -> Ways:
    """Return ways to exchange two scans, or groups of the second."""

    def made(columns: Any, early: int | None = None) -> Exchanged:
        found = {
            n: Exchange("", (c,) if n == early else (c, "v"), (c, "v"), groups=n == early)
            for n, c in columns.items()
        }
        return Exchanged(found, Statements("", ""), Statements("", ""), "", frozenset(columns))

    return Ways([keys], made, early=lambda columns, n: made(columns, n) if groups and n == 1 else None)


@pytest.mark.parametrize(
    ("repeated", "groups", "taken"), [(100, True, True), (1, True, False), (100, False, False)]
)
def test_groups_are_exchanged_where_they_are_few(
    tmp_path: Path, repeated: int, groups: bool, taken: bool
) -> None:
    path = tmp_path / "l.parquet"
    with duckdb.connect() as connection:
        rows = f"SELECT i * 7919 % {60_000 // repeated} AS k, i AS v, 'a' || i AS s FROM range(60000) t(i)"
        connection.execute(f"COPY ({rows}) TO '{path}' (FORMAT parquet)")
    kinds = (("k", "bigint"), ("v", "bigint"), ("s", "string"))
    lines = Relation("l", "file", (FileEntry(str(path), path.stat().st_size, 0.0),), kinds)
    sizes = {n: Size(1000, 1000) for n in range(2)}
    found = by_hash(ways({0: "k", 1: "k"}, groups), sizes, 0, 400, 3, {0: lines, 1: lines})
    plain = by_hash(ways({0: "k", 1: "k"}, False), sizes, 0, 400, 3, {0: lines, 1: lines})
    assert found is not None
    assert plain is not None
    assert found.made.exchanges[1].groups is taken
    assert (found.cost < plain.cost) is taken


def test_groups_of_slices_are_as_many_as_keys_that_each_may_have(tmp_path: Path) -> None:
    path = tmp_path / "l.parquet"
    with duckdb.connect() as connection:
        connection.execute(f"COPY (SELECT i % 100 AS k, 'a' AS s FROM range(10000) t(i)) TO '{path}'")
    kinds = (("k", "bigint"), ("s", "string"))
    lines = Relation("l", "file", (FileEntry(str(path), path.stat().st_size, 0.0),), kinds)
    assert groups_of(lines, ["k"], 1.0, 4) == pytest.approx(0.04)
    assert groups_of(lines, ["k"], 0.1, 4) == pytest.approx(0.38, abs=0.03)
    assert groups_of(lines, ["k"], 0.001, 4) == 1.0
    assert groups_of(lines, ["k", "s"], 1.0, 4) == 1.0, "footers do not tell how many texts there are"


def test_groups_by_columns_of_more_values_than_floats_count_are_as_many_as_rows(tmp_path: Path) -> None:
    path, names = tmp_path / "l.parquet", [f"k{n}" for n in range(17)]
    with duckdb.connect() as connection:
        columns = ", ".join(f"(i * 2 - 1) * {2**63 - 1} AS {name}" for name in names)
        connection.execute(f"COPY (SELECT {columns} FROM range(2) t(i)) TO '{path}'")
    kinds = tuple((name, "bigint") for name in names)
    lines = Relation("l", "file", (FileEntry(str(path), path.stat().st_size, 0.0),), kinds)
    assert groups_of(lines, names, 1.0, 4) == 1.0
