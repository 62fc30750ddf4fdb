"""Clocks of a query are frozen for the run; what is drawn at random is noted, and not drawn twice."""

import pytest
from sqlglot import exp

from ebbflow.planners.query.sql.dialect import spark_sql
from ebbflow.planners.query.sql.freezing import is_volatile
from tests.planners.query.sql.parsed import parsed


def test_clock_functions_are_frozen_once_for_the_run_and_noted():
    found = parsed("SELECT current_date() AS d, now() AS a, current_timestamp() AS b FROM orders")
    text = spark_sql(found.expression)
    assert "CAST('2026-03-04' AS DATE) AS d" in text
    assert text.count("CAST('2026-03-04 05:06:07.890123+00:00' AS TIMESTAMP)") == 2
    assert sum("is fixed at" in note for note in found.notes) == 3


def test_unix_timestamp_of_now_is_frozen_too():
    found = parsed("SELECT unix_timestamp() AS u FROM orders")
    assert not found.expression.find(exp.CurrentTimestamp)


def test_a_local_timestamp_is_frozen_without_a_time_zone():
    found = parsed("SELECT localtimestamp() AS t FROM orders")
    assert "CAST('2026-03-04 05:06:07.890123' AS TIMESTAMP_NTZ)" in spark_sql(found.expression)


@pytest.mark.parametrize(
    ("moment", "value"),
    [
        ("DATE'today'", "2026-03-04"),
        ("CAST('Tomorrow' AS DATE)", "2026-03-05"),
        ("to_date(' yesterday ')", "2026-03-03"),
        ("TIMESTAMP'now'", "2026-03-04 05:06:07.890123+00:00"),
        ("TIMESTAMP_NTZ'today'", "2026-03-04 00:00:00.000000"),
    ],
)
def test_words_for_today_are_frozen_too(moment, value):
    found = parsed(f"SELECT {moment} AS m, 'today' AS word FROM orders")
    text = spark_sql(found.expression)
    assert f"('{value}'" in text
    assert "'today' AS word" in text
    assert any(f"fixed at {value}" in note for note in found.notes)


@pytest.mark.parametrize("call", ["get_current_timestamp()", "transaction_timestamp()", "localtime"])
def test_duckdbs_clocks_are_frozen_too(call):
    assert any("is fixed at" in n for n in parsed(f"SELECT {call} AS t FROM orders", dialect="duckdb").notes)


@pytest.mark.parametrize(
    "call",
    [
        "rand()", "rand(7)", "uuid()", "monotonically_increasing_id()", "shuffle(array(1, 2))", "uniform(1, 9)",
        "randstr(3)", "input_file_block_start()", "reflect('java.util.UUID', 'randomUUID')", "current_user()",
        "java_method('java.lang.System', 'nanoTime')", "version()", "current_timezone()", "current_path()",
        "current_setting('TimeZone')", "ago(INTERVAL 1 DAY)", "age(o_date)", "txid_current()", "current_query()",
    ],
)  # fmt: skip
def test_volatile_functions_are_left_and_noted(call):
    found = parsed(f"SELECT {call} AS v FROM orders", allowed=["reflect", "java_method", "current_setting"])
    assert is_volatile(found.expression)
    assert any("not deterministic" in note for note in found.notes)


@pytest.mark.parametrize(
    ("items", "whole"),
    [
        ("rand() AS r, r + 1 AS s FROM orders", True),
        ("floor(rand() * 3) AS g, count(*) AS n FROM orders GROUP BY g", True),
        ("rand() AS r, rank() OVER (ORDER BY r) AS n FROM orders", True),
        ("rand() AS r, o_key AS s FROM orders ORDER BY r", False),
        ("o_key + 1 AS r, r + 1 AS s FROM orders", False),
    ],
)
def test_a_random_value_under_an_alias_is_not_drawn_again(items, whole):
    found = parsed(f"SELECT {items}")
    assert found.qualified is not whole
    assert spark_sql(found.expression).count("RAND()") == ("rand()" in items)
    assert any("used again" in note for note in found.notes) is whole


def test_a_table_sample_is_volatile():
    found = parsed("SELECT o_key FROM orders TABLESAMPLE (10 PERCENT)")
    assert is_volatile(found.expression)


def test_a_query_that_stays_the_same_from_run_to_run_has_no_notes():
    assert parsed("SELECT o_key FROM orders").notes == ()
