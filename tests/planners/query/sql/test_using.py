"""Columns that joins share by USING and NATURAL: what qualifying makes of them, and what DuckDB then answers."""

import duckdb
import pytest
from sqlglot import exp

from ebbflow.planners.query.sql.dialect import duckdb_sql
from ebbflow.planners.query.sql.parse import parse_query
from tests.planners.query.statements import NOW, catalogue

TABLES = catalogue({"a": "k bigint, x bigint", "b": "k string, y bigint", "c": "k bigint, z bigint"})
DATA = """
CREATE TABLE a AS SELECT * FROM (VALUES (1::BIGINT, 10::BIGINT), (2, 20), (NULL, 30)) t(k, x);
CREATE TABLE b AS SELECT * FROM (VALUES ('1', 100::BIGINT), ('3', 300), (NULL, 400)) t(k, y);
CREATE TABLE c AS SELECT * FROM (VALUES (1::BIGINT, 7::BIGINT), (2, 8), (9, 9)) t(k, z);
"""


@pytest.mark.parametrize(
    ("text", "left_over"),
    [
        ("SELECT * FROM a JOIN b USING (k)", 0),
        ("SELECT k, x, y FROM a LEFT JOIN b USING (k) WHERE k < 5", 0),
        ("SELECT * FROM a JOIN c USING (k) JOIN b USING (k)", 0),
        ("SELECT * FROM a NATURAL JOIN c", 0),
        ("SELECT k, count(*) AS n FROM a LEFT JOIN c USING (k) GROUP BY k", 0),
        ("SELECT * FROM a FULL JOIN c USING (k)", 1),
        ("SELECT * FROM a RIGHT JOIN c USING (k)", 1),
        ("SELECT x, z, y FROM a FULL JOIN c USING (k) LEFT JOIN b ON b.y = x WHERE a.k IS NULL", 0),
        ("SELECT * FROM a JOIN c USING (k) FULL JOIN (SELECT k, z AS w FROM c WHERE z < 0) d USING (k)", 1),
        ("SELECT coalesce(a.k, c.k) AS v FROM a LEFT JOIN c ON a.k < c.k", 1),
        ("SELECT x FROM a JOIN c USING (k) WHERE k IN (SELECT coalesce(a.k, c.k) FROM a FULL JOIN c USING (k))", 1),
    ],
)  # fmt: skip
def test_what_is_shared_is_the_left_column_wherever_that_is_the_same(text: str, left_over: int) -> None:
    query = parse_query(text, TABLES, now=NOW, dialect="duckdb").expression
    assert min(len(list(query.find_all(exp.Coalesce))), 1) == left_over
    with duckdb.connect() as engine:
        engine.execute(DATA)
        expected = engine.sql(text).fetchall()
        found = engine.sql(duckdb_sql(query)).fetchall()
    assert sorted(found, key=repr) == sorted(expected, key=repr)
