"""Words such as ``user`` and ``current_time``: columns where there are such, else calls, as DuckDB has them."""

import duckdb
import pytest

from ebbflow.planners.query.sql.dialect import duckdb_sql, spark_sql
from ebbflow.planners.query.sql.parse import ParsedQuery, parse_query
from tests.planners.query.statements import NOW, catalogue

TABLES = catalogue({"t": "a int, b string", "people": "user string, localtime int"})


def parsed(text: str, dialect: str = "duckdb") -> ParsedQuery:
    return parse_query(text, TABLES, now=NOW, dialect=dialect)


@pytest.mark.parametrize(
    "word",
    ["user", "UsEr", "session_user", "current_user", "current_role", "current_schema", "current_catalog"],
)
def test_a_word_for_the_session_gives_its_value_under_its_name(word: str) -> None:
    found = parsed(f"SELECT {word}")
    assert found.qualified
    assert any("not deterministic" in note for note in found.notes)
    theirs, ours = duckdb.sql(f"SELECT {word}"), duckdb.sql(duckdb_sql(found.expression))
    assert ours.columns == theirs.columns == [word]
    assert ours.fetchall() == theirs.fetchall()


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("SELECT user FROM people", 'SELECT people."user" AS "user" FROM people AS people'),
        (
            "SELECT a AS localtime FROM t WHERE localtime > 3",
            'SELECT t.a AS "localtime" FROM t AS t WHERE t.a > 3',
        ),
        (
            "SELECT p.localtime FROM people p ORDER BY localtime",
            'SELECT p."localtime" AS "localtime" FROM people AS p ORDER BY "localtime"',
        ),
        ("SELECT user FROM (VALUES (42)) user(x)", 'SELECT "user" FROM (VALUES (42)) AS "user"(x)'),
        ("SELECT [user FOR user IN [1]] AS l", 'SELECT ["user" FOR "user" IN [1]] AS l'),
        ("SELECT a FROM t WHERE b = user", "SELECT t.a AS a FROM t AS t WHERE t.b = USER()"),
    ],
)
def test_a_column_an_alias_or_a_table_of_such_a_name_comes_first(text: str, means: str) -> None:
    assert duckdb_sql(parsed(text).expression) == means


def test_a_function_whose_columns_only_the_engine_knows_may_have_one_called_user() -> None:
    found = parse_query(
        "SELECT user, current_date AS d FROM read_csv('x') r",
        TABLES,
        now=NOW,
        dialect="duckdb",
        allowed=["read_csv"],
    )
    assert duckdb_sql(found.expression).startswith(
        'SELECT r."user" AS "user", CAST(\'2026-03-04\' AS DATE) AS d'
    )


def test_what_is_some_time_ago_is_so_from_the_time_that_is_fixed() -> None:
    text = "SELECT ago(INTERVAL 1 DAY) = current_timestamp - INTERVAL 1 DAY, ago('1 hour') < now()"
    assert duckdb.sql(duckdb_sql(parsed(text).expression)).fetchall() == [(True, True)]
    assert not any("not deterministic" in note for note in parsed(text).notes)


def test_the_time_now_has_a_time_zone_in_duckdbs_sql_alone() -> None:
    text = "SELECT typeof(current_time), typeof(get_current_time()), typeof(localtime), current_time::VARCHAR"
    assert duckdb.sql(duckdb_sql(parsed(text).expression)).fetchall() == [
        ("TIME WITH TIME ZONE", "TIME WITH TIME ZONE", "TIME", "05:06:07.890123+00")
    ]
    time = "CAST('05:06:07.890123' AS TIME)"
    assert spark_sql(parsed("SELECT current_time() AS t", "spark").expression) == f"SELECT {time} AS t"
    on_spark = spark_sql(parsed("SELECT current_time AS t").expression)
    assert on_spark == f"SELECT CAST({time} AS TIME) AS t"
