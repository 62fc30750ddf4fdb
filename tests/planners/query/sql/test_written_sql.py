"""What engines are told of a query is what its author wrote."""

import json

import duckdb
import pytest

from ebbflow.planners.errors import UnsupportedQueryError
from ebbflow.planners.query.sql.dialect import duckdb_sql, spark_sql
from ebbflow.planners.query.sql.parse import parse
from ebbflow.planners.query.sql.translation.whole import alike, whole_duckdb_sql

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
    [
        "user.name", "$.user.name", '$."user.name"', "/user/name", "a[0]", "$.a[0]", "it''s", "b c", "$.d", "/e", "*",
        "$.*", "$..name", "0", "user", "$", "a[#-1]", "$.a[#-1]",
    ],
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
    assert r"'$[\'user.name\']'" in spark_sql(parse("SELECT j->>'user.name' FROM t", "duckdb"))
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
        ("sum(count(a)) OVER (PARTITION BY first_value(a, true))", 3),
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


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        ("array_sort(array(5, 9, 2), (x, y) -> y - x)", "comparator"),
        ("levenshtein('kitten', 'sitting', 1)", "Levenshtein"),
    ],
)
def test_what_duckdb_has_no_words_for_is_not_left_out(call: str, missing: str) -> None:
    with pytest.raises(UnsupportedQueryError, match=f"DuckDB has no words.*{missing}"):
        whole_duckdb_sql(parse(f"SELECT {call}"), "spark")


@pytest.mark.parametrize(
    "call",
    [
        "array_sort(l)", "sort_array(l, false)", "last(x) RESPECT NULLS", "collect_list(x)", "/*+ BROADCAST(t) */ x",
        "concat_ws('-', x, y)", "extract(HOUR FROM CAST(x AS TIMESTAMP))", "levenshtein(x, y)", "any_value(x, true)",
        "lag(x) OVER (ORDER BY y)", "regexp_replace(x, 'a', 'b')", "regexp_extract(x, '(a)', 1)",
        "max(x) FILTER (WHERE y > 1)", "date_trunc('day', x)", "to_date(x, 'yyyy-MM-dd')",
        "CAST(x AS DECIMAL(38, 4))", "from_json(x, 'a INT')",
    ],
)  # fmt: skip
def test_what_duckdb_is_told_of_as_a_whole_is_not_refused(call: str) -> None:
    tree = parse(f"SELECT {call} FROM t")
    assert whole_duckdb_sql(tree, "spark") == duckdb_sql(tree)


@pytest.mark.parametrize(("items", "value"), [("1, 2, 3", 60), ("", 0)])
def test_what_spark_applies_to_the_end_of_an_aggregation_is_applied_on_duckdb(items: str, value: int) -> None:
    text = f"SELECT aggregate(array({items}), 0, (x, y) -> x + y, x -> x * 10)"
    assert duckdb.sql(whole_duckdb_sql(parse(text), "spark")).fetchall() == [(value,)]
    null = text.replace(f"array({items})", "CAST(NULL AS array<int>)")
    assert duckdb.sql(whole_duckdb_sql(parse(null), "spark")).fetchall() == [(None,)]


@pytest.mark.parametrize(
    "query",
    [
        "SELECT m[10], m[11] FROM (SELECT MAP([10, 11], [1, 2]) AS m)",
        "SELECT l[1], l[-1], l[i + 1], l[2:], t[2] FROM (SELECT [5, 6] AS l, 1 AS i, CAST('xyz' AS VARCHAR) AS t)",
        "SELECT l[:n] FROM (SELECT [5, 6, 7] AS l, 2 AS n)",
        "SELECT DATE '2020-01-02'::VARCHAR || 'x', typeof(DATE '2020-01-02'::TIMESTAMP_MS), date('2020-01-02')::TEXT",
        "SELECT +a, [a]::BIGINT ARRAY, [a]::BIGINT ARRAY AS b FROM (SELECT 3 AS a)",
        "SELECT [1]::BIGINT ARRAY",
        "SELECT INTERVAL '1' DAY::VARCHAR, INTERVAL '1 month ago', INTERVAL '1 day 2 hours', INTERVAL '3 days'",
        "SELECT INTERVAL 24 HOURS + '1999-12-31'::TIMESTAMP",
        "SELECT typeof(.34), typeof(0.34), 1e3+1e3, 1e3-5, '1e3+1e3\u200b'",
        "SELECT\u200ba\ufeff FROM (SELECT 42) t(a)",
        "SELECT regexp_replace('a^/$b', '^/$', '', 'l'), regexp_extract('foo', '(zzz)', 1, 'ik')",
        "SELECT regexp_replace('aBab', 'b', 'x', 'gi'), regexp_extract_all('aBab', 'b', 0, 'i')",
        "SELECT typeof((42,)), (1, 2), (3)",
        "SELECT struct_pack(a, b), struct_pack(x := a) FROM (SELECT 1 AS a, 2 AS b)",
        "SELECT * FROM range(10) LIMIT (SELECT 20) %",
        "SELECT name, v FROM (SELECT 1 AS a, 2 AS b) UNPIVOT (v FOR name IN (a AS 'First half', b AS 'second'))",
    ],
)
def test_duckdb_answers_what_is_written_as_it_answers_what_was_read(query: str) -> None:
    written = duckdb_sql(parse(query, "duckdb"))
    assert duckdb.sql(written).fetchall() == duckdb.sql(query).fetchall(), written


def test_literals_behind_their_types_and_numbers_beside_signs_are_spark_s_too() -> None:
    written = spark_sql(parse("SELECT DATE '2020-01-02'::STRING, 1e3+1e3, l[0], date('2020-01-02')::STRING"))
    assert "CAST(CAST('2020-01-02' AS DATE) AS STRING), 1e3 + 1e3, l[0], CAST(" in written


def test_spark_is_told_of_places_and_keys_as_they_are_written() -> None:
    assert "TRY_ELEMENT_AT(l, 3)" in spark_sql(alike(parse("SELECT l[3] FROM t", "duckdb"), "duckdb"))
    mapped = "SELECT m[3] FROM (SELECT MAP([3], [1]) AS m)"
    assert "TRY_ELEMENT_AT(m, 3)" in spark_sql(alike(parse(mapped, "duckdb"), "duckdb"))
    assert "l[1]" in duckdb_sql(parse("SELECT l[0] FROM t"))
