"""What an engine is told of a query in the other one's dialect."""

from datetime import UTC, date, datetime
from decimal import Decimal

import duckdb
import pytest

from ebbflow.planners.errors import UnsupportedQueryError
from ebbflow.planners.model import Catalogue, Table
from ebbflow.planners.query.sql.dialect import duckdb_sql, spark_sql
from ebbflow.planners.query.sql.parse import ParsedQuery, parse, parse_query
from ebbflow.planners.query.sql.translation.whole import check_said, duckdb_lacks, spark_lacks
from tests.planners.query.sql.answers import ALIKE, ALIKE_OF_ALL, COLUMNS, NOT_TOLD, ROWS

OTHER = {"duckdb": "spark", "spark": "duckdb"}
KNOWN = Catalogue({"t": Table("t", COLUMNS, "")})


def parsed(item: str, dialect: str) -> ParsedQuery:
    return parse_query(
        f"SELECT {item} AS r FROM t", KNOWN, now=datetime(2026, 11, 26, tzinfo=UTC), dialect=dialect
    )


@pytest.mark.parametrize(
    ("dialect", "call", "reason"),
    [(d, call, why) for d, calls in NOT_TOLD.items() for call, why in calls.items()],
)
def test_a_call_that_the_other_engine_answers_otherwise_is_not_passed_to_it(
    dialect: str, call: str, reason: str
) -> None:
    tree = parsed(call, dialect).expression
    with pytest.raises(UnsupportedQueryError, match=reason):
        check_said(tree, dialect, OTHER[dialect])
    check_said(tree, dialect, dialect)


@pytest.mark.parametrize("dialect", ALIKE)
def test_calls_that_both_engines_answer_alike_are_passed_to_both(dialect: str) -> None:
    for call in (*ALIKE[dialect], *ALIKE_OF_ALL[dialect]):
        check_said(parsed(call, dialect).expression, dialect, OTHER[dialect])


def test_what_is_rewritten_for_spark_is_answered_as_it_was_on_duckdb() -> None:
    with duckdb.connect() as connection:
        connection.execute(f"CREATE TABLE t AS {ROWS}")
        for call in (*ALIKE["duckdb"], *ALIKE_OF_ALL["duckdb"]):
            asked = connection.sql(f"SELECT {call} AS r FROM t")
            told = connection.sql(duckdb_sql(parsed(call, "duckdb").expression))
            assert repr(told.fetchall()) == repr(asked.fetchall()), call
            assert told.types == asked.types, call


def test_joins_whose_word_spark_takes_for_an_alias_are_not_passed_to_it() -> None:
    for join in ("ASOF JOIN u ON t.k >= u.k", "POSITIONAL JOIN u"):
        assert "alias" in spark_lacks(parse(f"SELECT * FROM t {join}", "duckdb"), "duckdb")


def test_what_spark_orders_by_outputs_is_ordered_so_on_duckdb() -> None:
    text = "SELECT -i AS i FROM t ORDER BY i + 1"
    of_sources = {
        "(SELECT i + 1 AS k FROM t)": [None, -3, -2, 6],
        "VALUES (1), (3), (2) AS v(k)": [-3, -2, -1],
        "range(1, 4) AS r(k)": [-3, -2, -1],
    }
    of_rows = {f"SELECT -k AS k FROM {source} ORDER BY k * 2": rows for source, rows in of_sources.items()}
    now = datetime(2026, 11, 27, tzinfo=UTC)
    with duckdb.connect() as connection:
        connection.execute(f"CREATE TABLE t AS {ROWS}")
        for one, rows in {text: [None, -2, -1, 7], **of_rows}.items():
            found = parse_query(one, KNOWN, now=now).expression
            check_said(found, "spark", "duckdb")
            assert [row[0] for row in connection.sql(duckdb_sql(found)).fetchall()] == rows
    for dialect in ("duckdb", "postgres"):
        other = parse_query(text, KNOWN, now=now, dialect=dialect).expression
        assert "ORDER BY i + 1" in duckdb_sql(other)
    exploded = parse_query("SELECT explode(l) AS l FROM t ORDER BY l", KNOWN, now=now).expression
    assert not duckdb_lacks(exploded, "spark")


@pytest.mark.parametrize("value", ["rank() OVER (ORDER BY i)", "rand()", "(SELECT max(b) FROM t)"])
def test_what_only_spark_orders_by_is_not_passed_to_duckdb(value: str) -> None:
    text = f"SELECT {value} AS i FROM t ORDER BY i + 1"
    found = parse_query(text, KNOWN, now=datetime(2026, 11, 27, tzinfo=UTC)).expression
    assert "ORDER BY i + 1" in spark_sql(found)
    assert "Spark orders by" in duckdb_lacks(found, "spark")
    plain = parse_query(text.removesuffix(" + 1"), KNOWN, now=datetime(2026, 11, 27, tzinfo=UTC)).expression
    assert not duckdb_lacks(plain, "spark")


def test_what_is_the_same_column_to_both_is_ordered_by_as_it_is_written() -> None:
    known = Catalogue({"t": Table("t", COLUMNS, ""), "u": Table("u", (("i", "int"), ("b", "bigint")), "")})
    now = datetime(2026, 11, 27, tzinfo=UTC)
    for text, order in {
        "SELECT s, sum(i) AS n FROM t GROUP BY ROLLUP(s) ORDER BY s IS NULL, s": "ORDER BY s IS NULL, s",
        "SELECT upper(s) AS s FROM t GROUP BY ROLLUP(upper(s)) ORDER BY s IS NULL": "ORDER BY s IS NULL",
        "SELECT t.s FROM t JOIN u ON t.i = u.i ORDER BY s || '!'": "ORDER BY s || '!'",
        "SELECT t.i FROM t JOIN u ON t.i = u.i ORDER BY i + 1": "ORDER BY (t.i) + 1",
        "SELECT i2 AS i FROM t ORDER BY i + 1": "ORDER BY (t.i2) + 1",
        "SELECT -k AS k FROM t LATERAL VIEW explode(l) v AS k ORDER BY k * 2": "ORDER BY (-v.k) * 2",
        "SELECT (SELECT t.b AS b FROM u ORDER BY b + 1 LIMIT 1) AS c FROM t": "ORDER BY (t.b) + 1 LIMIT 1)",
    }.items():
        assert order in spark_sql(parse_query(text, known, now=now).expression)


def test_a_float_beside_what_is_none_is_a_double_in_sparks_sql() -> None:
    known = Catalogue({"t": Table("t", (("f", "float"), ("i", "int")), "")})
    items = (
        "f > 0.1 AS a, f IN (0.1) AS b, f BETWEEN 0 AND 0.1 AS c, f = f AS d, f <=> 0.1 AS n, "
        "f IS DISTINCT FROM 0.1 AS o, f + 0.1 AS e, f / i AS g"
    )
    text = f"SELECT {items} FROM t"
    now = datetime(2026, 11, 27, tzinfo=UTC)
    told = duckdb_sql(parse_query(text, known, now=now).expression)
    with duckdb.connect() as connection:
        connection.execute("CREATE TABLE t AS SELECT 0.1::FLOAT AS f, 3 AS i")
        (row,) = connection.sql(told).fetchall()
    assert row[:6] == (True, False, False, True, False, True)
    assert row[6:] == pytest.approx((0.2 + 1.5e-9, 0.1 / 3 + 0.5e-9), abs=1e-10)
    assert "f > 0.1" in duckdb_sql(parse_query(text, known, now=now, dialect="duckdb").expression)


def test_floats_that_a_subquery_gives_are_compared_with_as_they_are() -> None:
    known = Catalogue({"t": Table("t", (("d", "double"),), ""), "u": Table("u", (("f", "float"),), "")})
    text = "SELECT d FROM t WHERE d IN (SELECT f FROM u)"
    told = duckdb_sql(parse_query(text, known, now=datetime(2026, 11, 27, tzinfo=UTC)).expression)
    with duckdb.connect() as connection:
        connection.execute("CREATE TABLE u AS SELECT unnest([0.1, 0.5])::FLOAT AS f")
        connection.execute("CREATE TABLE t AS SELECT f::DOUBLE AS d FROM u UNION ALL SELECT 0.1")
        rows = sorted(row for (row,) in connection.sql(told).fetchall())
    assert rows == [pytest.approx(0.1 + 1.5e-9, abs=1e-10), 0.5]


def test_a_pivot_that_counts_is_not_passed_to_duckdb() -> None:
    for call, told in (("count(*)", "counts 0"), ("max(i)", "")):
        text = f"SELECT * FROM (SELECT s, i FROM t) PIVOT ({call} FOR s IN ('a', 'b'))"
        assert told in (lacks := duckdb_lacks(parse(text), "spark"))
        assert bool(lacks) == bool(told)


def test_a_query_in_a_third_dialect_is_passed_on_as_far_as_there_are_words_for_it() -> None:
    tree = parse("SELECT hash(x) AS h FROM t", "postgres")
    assert not spark_lacks(tree, "postgres")
    assert not duckdb_lacks(tree, "postgres")


def test_a_list_is_looked_into_at_the_place_that_each_engine_has_for_it() -> None:
    tree = parsed("l[i]", "duckdb").expression
    assert "TRY_ELEMENT_AT(t.l, t.i)" in spark_sql(tree)
    assert "t.l[t.i]" in duckdb_sql(tree)


# a call in Spark's SQL, and what it is there of the first rows
OF_SPARK = {
    "CAST(percentile(d + 0.2D, 1.0D) AS INT)": [1],
    "CAST(aggregate(array(0.7D, 1.0D), CAST(0 AS DOUBLE), (a, x) -> a + x) AS INT)": [1] * 4,
    "transform(array(1.5D, 2.5D), e -> CAST(e AS INT))": [[1, 2]] * 4,
    "CAST(mp['a'] * 0.7D AS INT)": [0, None, None, None],
    "CAST(array_max(array(d, 0.6D)) AS INT)": [1, 0, 0, 0],
    "CAST(CAST(ts AS TIMESTAMP) AS STRING)": [
        "2024-01-31 23:59:58.75", "1969-12-31 10:20:30.5", "2024-12-30 00:00:00", None,
    ],
    "concat('at ', CAST(ts AS TIMESTAMP))": [
        "at 2024-01-31 23:59:58.75", "at 1969-12-31 10:20:30.5", "at 2024-12-30 00:00:00", None,
    ],
    "CAST(floor(d) AS STRING)": ["1", "-3", "0", None],
    "concat(ceil(d), '%')": ["2%", "-2%", "1%", None],
    "concat('EUR ', round(m, 1))": ["EUR 2.6", "EUR -2.5", "EUR 0.1", None],
    "l[size(l) - 1]": [3, None, None, None],
    "split(s, '_')[size(split(s, '_')) - 1]": ["b ab", "B", "axb", None],
    "mp[left(s, 1)]": [1, None, None, None],
    "try_element_at(l, i)": [1, None, None, None],
    "try_element_at(l, size(l))": [3, None, None, None],
    "l[l[0]]": [3, None, None, None],
    "map(7, i, 8, i2)[8]": [5, -3, 2, None],
    "CAST(dt + INTERVAL 1 DAY AS STRING)": ["2024-02-01", "2024-01-01", "2024-12-30", None],
    "coalesce((dt - INTERVAL 1 MONTH), dt)": [date(2023, 12, 31), date(2023, 11, 30), date(2024, 11, 29), None],
    "CAST(m AS DECIMAL)": [Decimal(3), Decimal(-3), Decimal(0), None],
    "percentile_approx(i2, 0.3)": [-3],
    "string_agg(DISTINCT CAST(ts2 AS TIMESTAMP), ';') FILTER (WHERE i = 1)": ["2024-02-01 00:00:01"],
    "TRY_CAST(concat(i, '.5') AS INT)": [None] * 4,
    "CAST(CAST(ts AS TIMESTAMP) AS BIGINT)": [1706745598, -49170, 1735516800, None],
    "CAST(to_timestamp('2024-01-05 10:00:00+02:00') AS STRING)": ["2024-01-05 08:00:00"] * 4,
    "ln(i - 1)": [None, 0.0, None, None],
    "log10(i - 1)": [None, 0.0, None, None],
    "log(2, i - 1)": [None, 0.0, None, None],
    "isnull(i)": [False, False, False, True],
}  # fmt: skip


@pytest.mark.parametrize("call", OF_SPARK)
def test_duckdb_answers_what_spark_does(call: str) -> None:
    tree = parsed(call, "spark").expression
    check_said(tree, "spark", "duckdb")
    with duckdb.connect() as connection:
        connection.execute(f"SET TimeZone = 'UTC'; CREATE TABLE t AS {ROWS}")
        assert [row[0] for row in connection.sql(duckdb_sql(tree)).fetchall()] == OF_SPARK[call]


def asked_and_told(text: str) -> None:
    """Assert that DuckDB answers a query in its own words as it does what it is told, names and types too."""
    with duckdb.connect() as connection:
        connection.execute(f"CREATE TABLE t AS {ROWS}")
        asked = connection.sql(text)
        found = parse_query(
            text,
            KNOWN,
            now=datetime(2026, 11, 26, tzinfo=UTC),
            dialect="duckdb",
            outputs=asked.columns,
            engine="duckdb",
        )
        told = connection.sql(duckdb_sql(found.expression))
        assert (told.columns, told.types) == (asked.columns, asked.types)
        assert sorted(map(repr, told.fetchall())) == sorted(map(repr, asked.fetchall()))


@pytest.mark.parametrize(
    "text",
    [
        "SELECT due - dt2 AS x FROM (SELECT dt + INTERVAL 3 DAY AS due, dt2 FROM t)",
        "SELECT x - dt2 AS x FROM (SELECT dt AS x, dt2 FROM t UNION ALL SELECT ts, dt2 FROM t)",
        "SELECT alias(i) AS a, alias(i), 5 FROM t",
        "PIVOT (SELECT s, i FROM t) ON s IN ('axb') USING sum(i)",
        "SELECT * FROM (PIVOT (SELECT s, i FROM t) ON s IN ('a_b ab') USING sum(i))",
        "SELECT arg_max(s, i), arg_min(DISTINCT s, i) FROM t",
        'SELECT "dayofweek(dt)" FROM (SELECT dayofweek(dt) FROM t)',
        'SELECT * EXCLUDE ("log(b)") FROM (SELECT i, log(b) FROM t)',
        "SELECT i, log(b) FROM t UNION ALL BY NAME SELECT i, log(b) FROM t",
        "SELECT s, l[1], 'a' FROM t UNION ALL BY NAME SELECT s, l[1], 'a' FROM t",
        "SELECT count(*), today() > DATE '2000-01-01' FROM t "
        "UNION ALL BY NAME SELECT count(*), today() > DATE '2000-01-01' FROM t",
    ],
)
def test_duckdb_is_told_what_its_own_query_says(text: str) -> None:
    asked_and_told(text)


def test_the_other_engine_is_told_of_a_query_that_runs_whole_what_it_has_alike() -> None:
    text = (
        "SELECT alias(i) AS a, CAST(d AS INT) AS n, dayofweek(dt) AS w, CAST(floor(d) AS STRING) AS f FROM t"
    )
    now = datetime(2026, 11, 26, tzinfo=UTC)
    found = parse_query(text, KNOWN, now=now, engine="duckdb")
    assert not found.qualified
    check_said(found.expression, "spark", "duckdb")
    with duckdb.connect() as connection:
        connection.execute(f"CREATE TABLE t AS {ROWS}")
        assert connection.sql(duckdb_sql(found.expression)).fetchall()[:2] == [
            ("a", 1, 4, "1"),
            ("a", -2, 1, "-3"),
        ]
    texts = parse_query(
        "SELECT alias(i) AS a, CAST(d AS STRING) AS x FROM t", KNOWN, now=now, engine="duckdb"
    )
    with pytest.raises(UnsupportedQueryError, match="texts"):
        check_said(texts.expression, "spark", "duckdb")
    own = parse_query(text, KNOWN, now=now, engine="spark")
    assert own.as_written
    assert "DAYOFWEEK(dt) AS w" in spark_sql(own.expression)


def test_columns_of_exploded_lists_and_maps_have_texts_as_their_elements_do() -> None:
    known = Catalogue({"t": Table("t", (*COLUMNS, ("x", "array<double>")), "")})

    def lacks(column: str, view: str) -> str:
        text = f"SELECT CAST({column} AS STRING) AS r FROM t LATERAL VIEW {view}"
        tree = parse_query(text, known, now=datetime(2026, 11, 26, tzinfo=UTC)).expression
        return duckdb_lacks(tree, "spark")

    for view in ("explode(l) v AS k", "posexplode(x) v AS k, w", "explode(mp) v AS k, w"):
        assert not lacks("k", view)
    assert "texts" in lacks("w", "posexplode(x) v AS k, w")
    assert not lacks("w", "explode(mp) v AS k, w")


def test_casts_of_what_only_duckdb_knows_within_each_other_stay_short() -> None:
    call = "transform(l, x -> x + 1)[0]"
    for _ in range(12):
        call = f"CAST(get(array({call}), 0) AS INT)"
    assert len(duckdb_sql(parsed(call, "spark").expression)) < 20_000


def test_a_distinct_column_is_ordered_by_its_name_whatever_is_written_for_it() -> None:
    for dialect in OTHER:
        text = "SELECT DISTINCT dt + INTERVAL 1 MONTH AS x FROM t ORDER BY dt + INTERVAL 1 MONTH"
        found = parse_query(text, KNOWN, now=datetime(2026, 11, 26, tzinfo=UTC), dialect=dialect)
        assert spark_sql(found.expression).endswith(
            "ORDER BY x" if dialect == "spark" else "ORDER BY x NULLS LAST"
        )


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("SELECT CAST(v.k AS STRING) FROM t LATERAL VIEW explode(l) v AS k", "k"),
        ("SELECT CAST(a.i AS STRING) FROM (t AS a JOIN t AS b ON a.i = b.i)", "i"),
        ("SELECT CAST(mp.a AS STRING) FROM t", "_col_0"),
    ],
)
def test_a_cast_of_a_column_is_called_as_the_column(text: str, name: str) -> None:
    found = parse_query(text, KNOWN, now=datetime(2026, 11, 26, tzinfo=UTC))
    assert found.expression.named_selects == [name]
