import random

import duckdb
import pytest
import sqlglot
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.query.sql.parse import qualified_copy
from ebbflow.planners.query.views.outerjoins import simplify_outer_joins
from tests.planners.query.random_queries import TABLES, fill
from tests.planners.query.statements import catalogue, multiset

KNOWN = catalogue({"a": "k int, x int, z int", "b": "k int, j int, y int", "c": "j int, z int, w int"})


def sides(joins, where=""):
    text = f"SELECT a.k FROM a {joins}" + (f" WHERE {where}" if where else "")
    query = simplify_outer_joins(qualified_copy(sqlglot.parse_one(text, read="spark"), KNOWN))
    return [j.side or j.kind or "INNER" for j in query.args["joins"]]


LEFT = "LEFT JOIN b ON a.k = b.k"


@pytest.mark.parametrize(
    "where",
    [
        "b.y > 1",
        "b.y IS NOT NULL",
        "NOT b.y IS NULL",
        "b.y + 1 = a.x",
        "b.y IN (1, 2)",
        "b.y NOT IN (1, 2)",
        "b.y BETWEEN 1 AND 2",
        "NOT (b.y = 1 AND b.j = 1)",
        "b.y = 1 OR b.j = 2",
        "CAST(b.y AS STRING) LIKE '1%'",
        "a.x = 1 AND b.y <> 2",
    ],
)
def test_a_condition_that_missing_rows_fail_makes_a_left_join_inner(where):
    assert sides(LEFT, where) == ["INNER"]


@pytest.mark.parametrize(
    "where",
    [
        "b.y IS NULL",
        "coalesce(b.y, 2) > 1",
        "b.y = 1 OR a.x = 1",
        "b.y <=> a.x",
        "NOT (b.y = 1 AND a.x = 1)",
        "b.y > rand()",
        "CASE WHEN b.y = 1 THEN false ELSE true END",
        "b.y NOT IN (SELECT w FROM c)",
        "a.x > 1",
    ],
)
def test_a_condition_that_missing_rows_may_pass_leaves_it(where):
    assert sides(LEFT, where) == ["LEFT"]


@pytest.mark.parametrize(
    ("joins", "where", "expected"),
    [
        ("RIGHT JOIN b ON a.k = b.k", "a.x = 1", ["INNER"]),
        ("RIGHT JOIN b ON a.k = b.k", "b.y = 1", ["RIGHT"]),
        ("FULL JOIN b ON a.k = b.k", "a.x = 1", ["LEFT"]),
        ("FULL JOIN b ON a.k = b.k", "b.y = 1", ["RIGHT"]),
        ("FULL JOIN b ON a.k = b.k", "a.x = b.y", ["INNER"]),
        (f"{LEFT} JOIN c ON c.j = b.j", "", ["INNER", "INNER"]),
        (f"{LEFT} LEFT SEMI JOIN c ON c.j = b.j", "", ["INNER", "LEFT"]),
        (f"{LEFT} LEFT ANTI JOIN c ON c.j = b.j", "", ["LEFT", "LEFT"]),
        (f"{LEFT} LEFT JOIN c ON c.j = b.j", "c.z = 1", ["INNER", "INNER"]),
        (f"{LEFT} LEFT JOIN c ON c.j = b.j", "b.y = 1", ["INNER", "LEFT"]),
        (f"{LEFT} FULL JOIN c ON c.j = a.k", "b.y = 1", ["INNER", "LEFT"]),
    ],
)
def test_each_join_is_weakened_as_far_as_later_conditions_allow(joins, where, expected):
    assert sides(joins, where) == expected


@pytest.mark.parametrize("test", ["= ALL(t.l)", "<> ALL(t.l)", "= ANY(t.l)"])
def test_null_against_an_empty_list_has_an_answer(test):
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t AS SELECT 1 AS k, [] :: INT[] AS l")
    connection.execute("CREATE TABLE u AS SELECT 2 AS k, 3 AS x")
    for no in ("", "NOT "):
        query = f"SELECT t.k, u.x FROM t LEFT JOIN u ON t.k = u.k WHERE {no}(u.x {test})"
        rewritten = simplify_outer_joins(sqlglot.parse_one(query, read="duckdb")).sql("duckdb")
        assert connection.execute(rewritten).fetchall() == connection.execute(query).fetchall()


@pytest.fixture(scope="module")
def filled():
    connection = duckdb.connect()
    fill(connection, random.Random(5))
    yield connection
    connection.close()


@given(st.integers(0, 10**9))
def test_random_chains_of_outer_joins_keep_their_rows(filled, seed):
    rng = random.Random(seed)
    aliases, text = ["a"], "FROM a"
    for table in rng.sample(["b", "c", "d"], rng.choice((1, 2, 3))):
        left = f"{rng.choice(aliases)}"
        condition = f"{left}.{rng.choice(TABLES[left])} = {table}.{rng.choice(TABLES[table])}"
        text += (
            f" {rng.choice(('LEFT', 'RIGHT', 'FULL', 'LEFT', 'INNER', 'SEMI'))} JOIN {table} ON {condition}"
        )
        if "SEMI JOIN " + table not in text:
            aliases.append(table)
    columns = [f"{a}.{c}" for a in aliases for c in TABLES[a]]

    def condition() -> str:
        one, other = rng.choice(columns), rng.choice([*columns, "1", "2"])
        simple = f"{one} {rng.choice(('=', '<>', '<'))} {other}"
        kind = rng.random()
        if kind < 0.6:
            return simple
        if kind < 0.8:
            return f"{rng.choice(columns)} IS {rng.choice(('', 'NOT '))}NULL"
        return f"{rng.choice(('', 'NOT '))}({simple} {rng.choice(('AND', 'OR'))} {condition()})"

    query = f"SELECT {', '.join(columns)} {text} WHERE {condition()}"
    rewritten = simplify_outer_joins(sqlglot.parse_one(query, read="duckdb")).sql("duckdb")
    assert multiset(filled.execute(rewritten).fetchall()) == multiset(filled.execute(query).fetchall()), (
        rewritten
    )
