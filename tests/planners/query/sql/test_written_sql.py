"""What engines are told of a query is what its author wrote."""

import json

import duckdb
import pytest

from ebbflow.planners.query.sql.dialect import duckdb_sql, spark_sql
from ebbflow.planners.query.sql.parse import parse

ODD = {
    "user.name": "x",
    "user": {"name": "y"},
    "a[0]": "z",
    "a": ["w"],
    "it's": "v",
    "b c": "u",
    "$.d": "t",
    "/e": "s",
    "*": "r",
}


@pytest.mark.parametrize(
    "path",
    ["user.name", "$.user.name", '$."user.name"', "/user/name", "a[0]", "$.a[0]", "it''s", "b c", "$.d", "/e", "*"]
    + ["$.*", "$..name", "0", "user", "$", "a[#-1]", "$.a[#-1]"],
)  # fmt: skip
def test_a_text_is_a_key_of_json_unless_it_begins_as_a_path(path: str) -> None:
    calls = [f"j->'{path}'", f"j->>'{path}'"]
    calls += [f"{name}(j, '{path}')" for name in ("json_extract", "json_extract_string", "json_extract_path")]
    document = json.dumps(ODD).replace("'", "''")
    for call in calls:
        text = f"SELECT {call} AS found FROM (SELECT CAST('{document}' AS JSON) AS j) AS t"
        written = duckdb_sql(parse(text, "duckdb"))
        assert duckdb.sql(written).fetchall() == duckdb.sql(text).fetchall(), written


def test_spark_is_told_of_a_key_with_a_dot_as_of_one() -> None:
    assert "$['user.name']" in spark_sql(parse("SELECT j->>'user.name' FROM t", "duckdb"))
    assert "'$.user.name'" in spark_sql(parse("SELECT j->>'$.user.name' FROM t", "duckdb"))


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("last(a, true) FILTER (WHERE b < 4 OR b > 9)", 5),
        ("last_value(a, true) FILTER (WHERE b < 4 OR b > 9)", 5),
        ("last_value(a, true)", 7),
        ("last_value(a)", None),
        ("first_value(a, true)", 3),
        ("first_value(a, true) FILTER (WHERE b > 2)", 5),
        ("first_value(a)", None),
        ("max(last_value(a, true)) OVER (PARTITION BY first_value(a, true))", 7),
    ],
)
def test_nulls_that_an_aggregate_ignores_are_ignored_beside_its_filter(call: str, value: int | None) -> None:
    rows = "(VALUES (NULL, 1), (3, 2), (5, 3), (7, 4), (NULL, 5)) AS t(a, b)"
    assert duckdb.sql(duckdb_sql(parse(f"SELECT {call} FROM {rows}"))).fetchall() == [(value,)]


def test_values_in_windows_keep_their_names() -> None:
    text = "SELECT last_value(a, true) OVER (ORDER BY b), first_value(a) OVER (ORDER BY b) FROM t"
    written = duckdb_sql(parse(text))
    assert "LAST_VALUE(a IGNORE NULLS) OVER" in written
    assert "FIRST_VALUE(a) OVER" in written


def test_reduce_has_its_arguments_where_each_engine_has_them() -> None:
    tree = parse("SELECT reduce(l, (x, y) -> x - y, 5) FROM t", "duckdb")
    assert "AGGREGATE(l, 5, (x, y) -> x - y)" in spark_sql(tree)
    assert "LIST_REDUCE(l, LAMBDA x, y : x - y, 5)" in duckdb_sql(tree)
