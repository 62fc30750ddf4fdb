"""What the output columns of a query are called, and which of them ORDER BY means."""

import pytest
from sqlglot import exp

from ebbflow.planners.query.sql.dialect import duckdb_sql, spark_sql
from tests.planners.query.sql.parsed import parsed


def test_output_names_keep_the_authors_case():
    found = parsed("SELECT o_key AS MyKey, O_TOTAL, count(*) AS `N rows` FROM orders GROUP BY o_key, O_TOTAL")
    assert found.expression.named_selects == ["MyKey", "O_TOTAL", "N rows"]


def test_a_star_gives_the_names_that_the_table_has():
    assert parsed("SELECT * FROM Mixed").expression.named_selects == ["Id", "Full Name"]


def test_two_output_columns_of_one_name_get_distinct_names_and_a_note():
    found = parsed(
        "SELECT a.o_key, b.o_key, a.o_total AS O_KEY FROM orders a JOIN orders b ON a.o_key = b.o_key"
    )
    assert found.expression.named_selects == ["o_key", "o_key_1", "O_KEY_2"]
    assert len(found.notes) == 2


def test_a_query_that_runs_whole_tells_of_output_columns_of_one_name():
    text = "SELECT COLUMNS(*), o_key FROM orders"
    found = parsed(text, dialect="duckdb", outputs=("o_key", "o_total", "O_KEY"))
    assert not found.qualified
    assert any("a second output column O_KEY is named O_KEY_1" in note for note in found.notes)


@pytest.mark.parametrize(
    ("items", "outputs", "written"),
    [
        ("alias(o_key), now()", "alias(o_key)|now()", 'TIMESTAMPTZ) AS "now()"'),
        ("COLUMNS(*), o_key::TEXT", "o_key|o_total|CAST(o_key AS VARCHAR)", 'AS "CAST(o_key AS VARCHAR)"'),
        ("o_key ** 2, COLUMNS('o_t.*')", "(o_key ** 2)|o_total", 'AS "(o_key ** 2)"'),
        ("alias(o_key), (SELECT o_key), today() AS n", "alias(o_key)|o_key|n", "(SELECT o_key), CAST("),
        ("o_key ** 2, COLUMNS(*), now()", "(o_key ** 2)|o_key|o_total|now()", 'TIMESTAMPTZ) AS "now()"'),
    ],
)
def test_columns_without_names_of_a_query_that_runs_whole_are_called_as_the_engine_calls_them(
    items, outputs, written
):
    text = f"SELECT {items} FROM orders"
    for query in (text, f"({text}) ORDER BY 1"):
        found = parsed(query, dialect="duckdb", outputs=outputs.split("|"))
        assert not found.qualified
        assert written in duckdb_sql(found.expression)
        assert not found.unnamed
    assert parsed(text, dialect="duckdb").unnamed


def test_a_fresh_output_name_is_none_that_the_query_has():
    found = parsed(
        "SELECT a.o_key, b.o_key, a.o_total AS o_key_1 FROM orders a JOIN orders b ON a.o_key = b.o_key "
        "ORDER BY o_key_1"
    )
    assert found.expression.named_selects == ["o_key", "o_key_2", "o_key_1"]


@pytest.mark.parametrize("outputs", [None, ["x", "x"]])
def test_an_alias_that_is_used_again_in_its_select_keeps_its_name(outputs):
    text = "SELECT concat(o_key, 'a') AS x, x FROM orders ORDER BY 2"
    found = parsed(text, dialect="duckdb", outputs=outputs)
    assert found.expression.named_selects == ["x", "x_1"]
    assert found.expression.args["order"].find(exp.Column).name == "x_1"


def test_what_orders_a_select_distinct_is_named_as_its_output():
    text = "SELECT DISTINCT (o.o_key) AS k, o.o_total FROM orders o ORDER BY o.o_key DESC, o_total"
    assert spark_sql(parsed(text).expression).endswith("ORDER BY k DESC, o_total")
    plain = "SELECT o.o_key AS k FROM orders o ORDER BY o.o_key"
    assert spark_sql(parsed(plain).expression).endswith("ORDER BY o.o_key")


@pytest.mark.parametrize(
    ("dialect", "item", "named"),
    [
        ("duckdb", "o_key::VARCHAR", "o.o_key"),
        ("duckdb", "(TRY_CAST(o_key AS VARCHAR))", "o.o_key"),
        ("duckdb", "'o_key'", "o.o_key"),
        ("duckdb", "[o_total, o_key][2]", "o.o_key"),
        ("duckdb", "CAST(o_key AS VARCHAR) AS o_key", "o_key"),
        ("spark", "CAST(o_key AS STRING)", "o_key"),
        ("spark", "(CAST((o.o_key) AS STRING))", "o_key"),
        ("spark", "CAST(CAST(o_key AS STRING) AS STRING)", "o.o_key"),
    ],
)
def test_order_by_means_an_output_only_where_the_language_calls_it_so(dialect, item, named):
    """DuckDB calls a cast by its text, Spark that of a column by the column; an output comes before a column."""
    found = parsed(f"SELECT {item} FROM orders o ORDER BY o_key", dialect=dialect)
    ordered = spark_sql(found.expression).split("ORDER BY ")[1].removesuffix(" NULLS LAST")
    assert ordered == named
