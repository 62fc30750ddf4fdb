"""Spark's words for elements, percentiles and Unix times, as DuckDB answers them."""

import duckdb
import pytest

from ebbflow.planners.query.sql.dialect import duckdb_sql
from ebbflow.planners.query.sql.parse import parse_query
from tests.planners.query.statements import NOW, catalogue

TABLES = catalogue({"t": "id int, tags array<string>, m map<string,int>, price decimal(7,2), w timestamp"})
ROWS = """CREATE TABLE t AS SELECT * FROM (VALUES
  (1, ['a', 'b'], MAP {'k': 1}, 1.10::DECIMAL(7,2), TIMESTAMPTZ '1970-01-01 00:01:40+00'),
  (2, []::VARCHAR[], MAP {'l': 2}, 2.25, NULL), (3, NULL, NULL, 2.30, NULL)
) v(id, tags, m, price, w)"""


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT id, x FROM t LATERAL VIEW explode(tags) e AS x", [(1, "a"), (1, "b")]),
        (
            "SELECT id, x FROM t LATERAL VIEW OUTER explode(tags) e AS x",
            [(1, "a"), (1, "b"), (2, None), (3, None)],
        ),
        (
            "SELECT id, x FROM t LATERAL VIEW explode_outer(tags) e AS x",
            [(1, "a"), (1, "b"), (2, None), (3, None)],
        ),
        ("SELECT id, p, x FROM t LATERAL VIEW posexplode(tags) e AS p, x", [(1, 0, "a"), (1, 1, "b")]),
        ("SELECT id, k, v FROM t LATERAL VIEW explode(m) e AS k, v", [(1, "k", 1), (2, "l", 2)]),
        ("SELECT id, e.col FROM t LATERAL VIEW explode(tags) e", [(1, "a"), (1, "b")]),
        ("SELECT median(price), percentile(price, 0.5) FROM t WHERE id < 3", [(1.675, 1.675)]),
        ("SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY price) FROM t WHERE id < 3", [(1.675,)]),
        ("SELECT unix_timestamp(w) FROM t WHERE id = 1", [(100,)]),
        ("SELECT unix_timestamp('1970-01-01 00:01:40')", [(100,)]),
        ("SELECT id, count(*) FROM t WHERE id < 2 GROUP BY id WITH ROLLUP", [(1, 1), (None, 1)]),
        (
            "SELECT id, price > 2 AS p, count(*) FROM t WHERE id < 2 GROUP BY 1, 2 WITH CUBE",
            [(1, False, 1), (1, None, 1), (None, False, 1), (None, None, 1)],
        ),
    ],
)
def test_duckdb_answers_sparks_words_as_spark_does(sql: str, rows: list[tuple[object, ...]]) -> None:
    found = parse_query(sql, TABLES, now=NOW, dialect="spark", engine="duckdb").expression
    with duckdb.connect() as connection:
        connection.execute(ROWS)
        assert sorted(map(repr, connection.execute(duckdb_sql(found)).fetchall())) == sorted(map(repr, rows))


def test_a_hint_names_aliases_and_reads_nothing() -> None:
    sql = "SELECT /*+ BROADCAST(c) */ count(*) AS n FROM t AS o JOIN t AS c ON o.id = c.id"
    assert not parse_query(sql, TABLES, now=NOW, engine="duckdb").notes


@pytest.mark.parametrize(
    ("sql", "rows"),
    [
        ("SELECT * FROM range(1, 4)", [(1,), (2,), (3,)]),
        ("SELECT id FROM range(2) ORDER BY id", [(0,), (1,)]),
        ("SELECT r.id FROM range(5, 9, 2) AS r", [(5,), (7,)]),
        ("SELECT n AS id FROM range(1) AS r(n)", [(0,)]),
        ("SELECT max(range_0.id) AS id FROM range(2) AS range_0 JOIN range(1) ON true", [(1,)]),
    ],
)
def test_the_numbers_of_a_range_are_called_as_on_spark(sql: str, rows: list[tuple[int]]) -> None:
    found = parse_query(sql, TABLES, now=NOW, dialect="spark", engine="duckdb").expression
    told = duckdb.sql(duckdb_sql(found))
    assert (told.columns, told.fetchall()) == (["id"], rows)
