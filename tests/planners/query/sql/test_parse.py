import duckdb
import pytest
from sqlglot import exp

from ebbflow.planners.errors import (
    SqlSyntaxError,
    UnknownColumnError,
    UnknownTableError,
    UnsupportedQueryError,
)
from ebbflow.planners.model.tables import Catalogue, Table
from ebbflow.planners.query.sql.dialect import duckdb_sql, spark_sql
from ebbflow.planners.query.sql.parse import parse, parse_query
from ebbflow.planners.query.sql.references import table_names
from tests.planners.query.sql.parsed import parsed
from tests.planners.query.statements import NOW


def test_a_syntax_error_names_line_column_and_the_piece_it_stumbles_over():
    with pytest.raises(SqlSyntaxError) as caught:
        parse("SELECT o_key\nFROM orders\nWHERE o_key ===> 3")
    assert "line 3" in str(caught.value)
    assert "column 16" in str(caught.value)
    assert "EQ is incomplete" in str(caught.value)
    assert "o_key ==>>>=><<< 3" in str(caught.value)


def test_text_that_cannot_even_be_split_into_words_is_a_syntax_error():
    with pytest.raises(SqlSyntaxError, match="cannot be read"):
        parse("SELECT 'never closed")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "found none"),
        ("  -- only a comment\n", "found none"),
        ("SELECT 1; SELECT 2", "found 2"),
        ("DROP TABLE orders", "got DROP"),
        ("INSERT INTO orders VALUES (1, 2, NULL)", "got INSERT"),
    ],
)
def test_anything_but_one_query_is_refused_with_what_was_found(text, words):
    with pytest.raises(UnsupportedQueryError, match=words):
        parse(text)


def test_a_trailing_semicolon_and_surrounding_parentheses_are_no_matter():
    assert parse("(SELECT 1 AS x);").sql() == parse("SELECT 1 AS x").sql()


def test_values_alone_are_a_query_with_sparks_column_names():
    found = parsed("VALUES (1, 'a'), (2, 'b')")
    assert found.expression.named_selects == ["col1", "col2"]


def test_an_unknown_table_is_told_with_the_nearest_known_one():
    with pytest.raises(UnknownTableError, match="unknown table 'ordres'; did you mean 'orders'"):
        parsed("SELECT 1 FROM ordres")


def test_an_unknown_table_without_a_near_one_is_told_with_all_known_ones():
    with pytest.raises(UnknownTableError, match="known: lines, mixed, orders"):
        parsed("SELECT 1 FROM zzz")


def test_qualified_table_names_that_nobody_knows_are_told_with_what_to_write_instead():
    with pytest.raises(UnknownTableError, match=r"unknown table 'db.orders'.*named alone, as 'orders'"):
        parsed("SELECT 1 FROM db.orders")


def test_a_known_qualified_table_becomes_a_name_of_one_part():
    known = Catalogue(
        {"db.t": Table("db.t", (("a", "bigint"),), "1"), "t": Table("t", (("b", "bigint"),), "2")}
    )
    text = "SELECT db.t.a, other.b FROM DB.T JOIN t AS other ON t.a = other.b"
    found = parse_query(text, known, now=NOW).expression
    assert found.sql("spark") == (
        "SELECT t.a AS a, other.b AS b FROM `db.t` AS t JOIN t AS other ON t.a = other.b"
    )
    assert table_names(parse(text)) == {"DB.T", "t"}
    assert table_names(found) == {"db.t", "t"}


@pytest.mark.parametrize(
    ("text", "means"),
    [
        (
            "SELECT prod.o.x FROM prod.o WHERE NOT EXISTS (SELECT 1 FROM staging.o WHERE staging.o.x = prod.o.x)",
            "SELECT prod_o.x AS x FROM `prod.o` AS prod_o WHERE NOT EXISTS(SELECT 1 AS `1` FROM `staging.o` AS "
            "staging_o WHERE staging_o.x = prod_o.x)",
        ),
        (
            "SELECT prod.o.* FROM prod.o JOIN staging.o ON prod.o.x = staging.o.x",
            "SELECT prod_o.x AS x, prod_o.s AS s FROM `prod.o` AS prod_o JOIN `staging.o` AS staging_o ON "
            "prod_o.x = staging_o.x",
        ),
        ("SELECT prod.o.s.f AS f FROM prod.o", "SELECT o.s.f AS f FROM `prod.o` AS o"),
        ("SELECT p.x FROM prod.o AS p", "SELECT p.x AS x FROM `prod.o` AS p"),
    ],
)
def test_columns_that_name_a_database_are_its_tables(text, means):
    columns = (("x", "bigint"), ("s", "struct<f: bigint>"))
    known = Catalogue({name: Table(name, columns, "1") for name in ("prod.o", "staging.o")})
    assert parse_query(text, known, now=NOW).expression.sql("spark") == means


def test_a_name_defined_in_one_with_is_unknown_outside_it():
    with pytest.raises(UnknownTableError, match="unknown table 'inner_one'"):
        parsed("SELECT * FROM (WITH inner_one AS (SELECT 1 AS x) SELECT x FROM inner_one) q, inner_one")


@pytest.mark.parametrize("text", ["SELECT o_totl FROM orders", "SELECT o.o_totl FROM orders o"])
def test_an_unknown_column_is_told_with_the_nearest_known_one(text):
    with pytest.raises(UnknownColumnError, match="did you mean 'o_total'"):
        parsed(text)


def test_an_ambiguous_column_is_told_with_the_tables_that_have_it():
    with pytest.raises(UnknownColumnError, match="'o_key' is ambiguous: qualify it with one of a, b"):
        parsed("SELECT o_key FROM orders a JOIN orders b ON a.o_key = b.o_key")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("(SELECT o_key FROM orders) LIMIT 2", "SELECT * FROM (SELECT o_key FROM orders) AS _s1 LIMIT 2"),
        (
            "((SELECT o_key FROM orders LIMIT 5)) ORDER BY o_key OFFSET 1",
            "SELECT * FROM ((SELECT o_key FROM orders LIMIT 5)) AS _s1 ORDER BY o_key OFFSET 1",
        ),
        (
            "WITH v AS ((SELECT 1 AS _s1) LIMIT 1) SELECT _s1 FROM v",
            "WITH v AS ((SELECT * FROM (SELECT 1 AS _s1) AS _s2 LIMIT 1)) SELECT _s1 FROM v",
        ),
        ("(SELECT 1) UNION ALL (SELECT 2) LIMIT 1",) * 2,
        ("(SELECT 1 AS a ORDER BY a LIMIT 1)", "SELECT 1 AS a ORDER BY a LIMIT 1"),
    ],
)
def test_what_follows_a_query_in_parentheses_stays(written, expected):
    assert spark_sql(parse(written)) == expected


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("'O''Brien'", r"'O\'Brien'"),
        ('"a""b"', "'a\"b'"),
        ("'a' 'b'", "CONCAT('a', 'b')"),
        ("percentile_cont(0.25) WITHIN GROUP (ORDER BY x DESC)",) * 2,
        ("percentile_disc(0.25) WITHIN GROUP (ORDER BY x)",) * 2,
        ("percentile(x, 0.5)",) * 2,
        ("percentile(x, 0.5, y)",) * 2,
        ("max_by(x, y, 2)",) * 2,
        ("log10(x)",) * 2,
        ("to_char(x, '999')",) * 2,
        ("parse_json(x)",) * 2,
        ("listagg(x)", "listagg(x, '')"),
        ("listagg(x, '-')",) * 2,
        ("to_date(x)",) * 2,
        ("to_date(x, 'yyyy-MM-dd')",) * 2,  # of '2020-1-1' an error, but a date without the format
        ("to_date(x, 'dd.MM.yyyy')",) * 2,
        ("cast('10:20:30' as time)",) * 2,
    ],
)
def test_spark_is_written_as_it_was_read(written, expected):
    assert spark_sql(parse(f"SELECT {written}")).lower() == f"select {expected}".lower()


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ("percentile(x, 0.25)", 1.75),
        ("percentile_cont(0.25) WITHIN GROUP (ORDER BY x DESC)", 5.25),
        ("percentile_disc(0.25) WITHIN GROUP (ORDER BY x DESC)", 9),
    ],
)
def test_duckdb_computes_the_percentiles_that_spark_would(call, value):
    text = duckdb_sql(parse(f"SELECT {call} FROM (VALUES (1), (2), (4), (9), (NULL)) AS t(x)"))
    assert duckdb.sql(text).fetchall() == [(value,)]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("5 ROWS (system, 42)", "USING SAMPLE SYSTEM (5 ROWS) REPEATABLE (42)"),
        ("5 ROWS", "USING SAMPLE RESERVOIR (5 ROWS)"),
        ("10% (bernoulli)", "USING SAMPLE BERNOULLI (10 PERCENT)"),
    ],
)
def test_a_sample_keeps_its_method(written, expected):
    assert duckdb_sql(parse(f"SELECT a FROM t USING SAMPLE {written}", "duckdb")).endswith(expected)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT alias(o_key) FROM orders",
        "SELECT * FROM orders PIVOT (min(o_total) FOR (o_key, o_date) IN ((1, NULL), (2, NULL)))",
        "SELECT * FROM orders PIVOT (min(o_total) FOR o_key IN (1, 2) GROUP BY o_date) AS p ORDER BY 1",
    ],
)
def test_what_asks_for_the_words_of_a_query_or_names_columns_by_several_values_runs_whole(text):
    found = parsed(text, dialect="duckdb")
    assert not found.qualified
    assert duckdb_sql(found.expression).lower().replace("pivot(", "pivot (") == text.lower()


def test_a_column_called_as_a_type_is_compared():
    text = "SELECT range, if(range < 2, 1, 2), list <3 FROM t WHERE range<7"
    assert duckdb_sql(parse(text, "duckdb")) == (
        "SELECT range, CASE WHEN range < 2 THEN 1 ELSE 2 END, list < 3 FROM t WHERE range < 7"
    )


def test_what_orders_and_bounds_the_rows_of_a_pivot_is_read():
    text = "PIVOT orders ON o_key USING SUM(o_total) ORDER BY o_date LIMIT 2"
    assert duckdb_sql(parse(text, "duckdb")) == (
        "SELECT * FROM (PIVOT orders ON o_key USING SUM(o_total)) ORDER BY o_date LIMIT 2"
    )


def test_a_join_on_a_subquery_has_no_name_for_it():
    text = "SELECT a.o_key AS k FROM orders AS a JOIN orders AS b ON (SELECT a.o_key = b.o_key AS x)"
    assert " ON ((SELECT a.o_key = b.o_key AS x))" in spark_sql(parsed(text).expression)


def test_a_word_behind_an_aggregate_that_is_no_name_is_refused():
    with pytest.raises(UnsupportedQueryError, match="EXPORT_STATE"):
        parse("SELECT max(o_key) EXPORT_STATE FROM orders", "duckdb")
    with pytest.raises(UnsupportedQueryError, match="EXPORT_STATE"):
        parse("SELECT max(o_key) FILTER (WHERE o_key > 1) EXPORT_STATE FROM orders", "duckdb")
    for named in ('max(o_key) AS "export_state"', "max(o_key) AS export_state", "o_key::int export_state"):
        assert parse(f"SELECT {named} FROM orders", "duckdb")


@pytest.mark.parametrize(
    ("keys", "planned"),
    [("1", True), ("k DESC, 2", True), ("ALL", True), ("o_key + 1", False), ("orders.o_key", False)],
)
def test_a_set_operation_ordered_by_what_its_arms_compute_runs_whole(keys, planned):
    arms = "SELECT o_key AS k, o_total FROM orders UNION ALL SELECT o_key + 1, o_total FROM orders"
    found = parsed(f"{arms} ORDER BY {keys}", dialect="duckdb")
    assert found.qualified is planned
    assert any("set operation" in note for note in found.notes) is not planned


@pytest.mark.parametrize(
    ("dialect", "call", "written"),
    [
        ("duckdb", "last(a ORDER BY b IGNORE NULLS) OVER w", "LAST(a ORDER BY b IGNORE NULLS) OVER w"),
        ("duckdb", "first(a IGNORE NULLS) OVER w", "FIRST(a IGNORE NULLS) OVER w"),
        ("spark", "last(a, true)", "LAST(a) FILTER (WHERE a IS NOT NULL)"),
        ("spark", "last(a) IGNORE NULLS OVER w", "LAST(a IGNORE NULLS) OVER w"),
    ],
)
def test_nulls_that_a_call_ignores_are_ignored_on_duckdb(dialect, call, written):
    assert written in duckdb_sql(parse(f"SELECT {call} FROM t WINDOW w AS (ORDER BY b)", dialect))


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (
            "list_filter(l, (x, i) -> x > i AND upper(x->'b') = 'c')",
            "LAMBDA x, i : x > i AND UPPER(x -> '$.b')",
        ),
        ("upper(list_transform(l, x -> x + 1)->'k')", "UPPER(LIST_TRANSFORM(l, LAMBDA x : x + 1) -> '$.k')"),
        ("coalesce((l)->'a', [1], l->'b')", "COALESCE((l) -> '$.a', [1], l -> '$.b')"),
        ("json_structure('{}'->'a' || l)", "JSON_STRUCTURE('{}' -> ('a' || l))"),
    ],
)
def test_an_arrow_is_a_lambda_only_in_calls_that_take_one(call, written):
    assert written in duckdb_sql(parse(f"SELECT {call} FROM t", "duckdb"))


def test_columns_that_only_the_engine_knows_leave_the_query_whole_instead_of_failing():
    found = parsed("SELECT o_key, key, value FROM orders LATERAL VIEW explode(map('a', o_key)) e")
    assert not found.qualified
    assert any("runs whole" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("SELECT a.o_total FROM orders a ASOF JOIN orders b USING (o_key)", "ASOF JOIN ... USING"),
        ("SELECT o_key, q.x FROM orders, LATERAL (SELECT x FROM LATERAL (SELECT o_key) l(x)) q", "LATERAL"),
        ("SELECT o_key.upper() AS x FROM orders", "method"),
        ("SELECT o_key, o_total % 2 AS o_key FROM orders ORDER BY o_key", "several columns"),
    ],
)
def test_names_that_sqlglot_takes_for_others_leave_the_query_whole(text, reason):
    found = parsed(text, dialect="duckdb")
    assert not found.qualified
    assert any("runs whole" in note and reason in note for note in found.notes)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT a.o_total FROM orders a ASOF JOIN orders b ON a.o_key >= b.o_key",
        "SELECT main.upper(o_key) AS x FROM orders",
        "SELECT o_key, o_key FROM orders ORDER BY o_key",
        "SELECT o_key, o_total AS x FROM orders ORDER BY o_key, x",
    ],
)
def test_names_that_are_clear_are_resolved(text):
    assert parsed(text, dialect="duckdb").qualified


@pytest.mark.parametrize(
    ("version", "dialect"),
    [
        ("VERSION AS OF 3", "spark"),
        ("TIMESTAMP AS OF '2026-01-01'", "spark"),
        ("AT (VERSION => 3)", "duckdb"),
    ],
)
def test_a_table_whose_columns_get_other_names_keeps_its_version(version, dialect):
    text = f"SELECT x FROM orders {version} AS t(x, y, z)"
    assert parse(text, dialect).find(exp.Table).args.get("version" if dialect == "spark" else "when")
    found = parsed(text, dialect=dialect)
    assert not found.qualified
    assert any("runs whole" in note for note in found.notes)


def test_table_names_are_those_that_no_with_in_scope_defines():
    text = (
        "WITH orders AS (SELECT * FROM orders), x AS (SELECT * FROM orders) SELECT * FROM x, lines, range(3)"
    )
    assert table_names(parse(text)) == {"orders", "lines"}
    assert table_names(parse("WITH x AS (SELECT 1 AS a) SELECT * FROM x")) == frozenset()
    recursive = (
        "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r WHERE n < 3) SELECT * FROM r"
    )
    assert table_names(parse(recursive)) == frozenset()


def test_another_dialect_is_read_as_such():
    found = parsed('SELECT "o_key" FROM orders', dialect="duckdb")
    assert spark_sql(found.expression) == "SELECT orders.`o_key` AS `o_key` FROM orders AS orders"


def test_duckdbs_division_is_one_of_doubles_on_every_engine():
    text = "SELECT o_total / 3 + CAST(o_key AS DOUBLE) / (o_total / 2 / 1) AS x FROM orders"
    assert spark_sql(parsed(text, dialect="duckdb").expression.selects[0].this) == (
        "orders.o_total / CAST(3 AS DOUBLE) + CAST(orders.o_key AS DOUBLE) / "
        "CAST((orders.o_total / CAST(2 AS DOUBLE) / CAST(1 AS DOUBLE)) AS DOUBLE)"
    )
    assert "CAST" not in spark_sql(parsed("SELECT o_total / 3 AS x FROM orders").expression)


def test_duckdbs_division_has_its_own_types_on_duckdb():
    kinds = ("FLOAT", "DOUBLE", "INTEGER", "HUGEINT", "DECIMAL(9,2)")
    pairs = [f"CAST(o_key AS {a}) / CAST(o_total AS {b})" for a in kinds for b in kinds]
    others = [
        "o_total / (o_key + 1)",
        "o_total / -o_key",
        "o_total / o_key::FLOAT / 2",
        "8 / (4 / CAST(2 AS FLOAT))",
    ]
    others += [
        "o_total / CASE WHEN o_key > 1 THEN 2 ELSE 4 END",
        "CAST(avg(o_key) OVER () AS FLOAT) / count(*) OVER ()",
    ]
    others += ["INTERVAL '4' DAY / 2"]
    listed = ", ".join(f"{text} AS c{number}" for number, text in enumerate([*pairs, *others]))
    text = f"SELECT {listed} FROM orders"
    written = duckdb_sql(parsed(text, dialect="duckdb").expression)
    with duckdb.connect() as connection:
        connection.execute("CREATE TABLE orders AS SELECT 3 AS o_key, CAST(7 AS DOUBLE) AS o_total")
        (expected, found) = (connection.sql(sql) for sql in (text, written))
        assert found.types == expected.types
        assert found.fetchall() == expected.fetchall()


def test_a_map_has_any_expressions_for_keys():
    found = parsed("SELECT MAP {o_key: 'a', 2: 'b'} AS m FROM orders", dialect="duckdb")
    assert "MAP(orders.o_key, 'a', 2, 'b') AS m" in spark_sql(found.expression)
