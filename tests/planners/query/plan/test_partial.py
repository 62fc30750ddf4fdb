import random

import duckdb
import pytest
import sqlglot
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.query.plan.partial import bound, split, type_of

FP = "0123456789abcdef" * 2
SPLIT = [
    "SELECT t.g, SUM(t.v) AS s, AVG(t.v) AS m, COUNT(*) AS n, COUNT(t.v) AS c, MIN(t.v) AS a, MAX(t.d) AS z"
    " FROM t GROUP BY t.g",
    "SELECT SUM(t.v) AS s, COUNT(*) AS n, AVG(t.d) AS m FROM t WHERE t.k < 5",
    "SELECT t.g + 1 AS h, SUM(CASE WHEN t.k > 3 THEN t.d ELSE 0 END) / NULLIF(SUM(t.v), 0) AS r FROM t"
    " GROUP BY t.g + 1 ORDER BY h LIMIT 2",
    "SELECT t.g, SUM(t.d) AS s FROM t GROUP BY t.g HAVING SUM(t.d) > 3 AND COUNT(*) > 1",
    "SELECT t.g, t.k, SUM(t.d) AS s, SUM(SUM(t.d)) OVER (PARTITION BY t.g) AS w,"
    " RANK() OVER (ORDER BY SUM(t.v) DESC NULLS LAST, t.g, t.k) AS r FROM t GROUP BY t.g, t.k",
    "SELECT SUM(t.d) FILTER (WHERE t.k > 2) AS s, AVG(t.v) FILTER (WHERE t.k > 2) AS m FROM t",
    "SELECT t.k, t.v * 2 AS w FROM t WHERE t.v > 1 ORDER BY t.d, t.k, w LIMIT 4",
    "SELECT DISTINCT t.g, t.k FROM t",
    "SELECT t.g, u.k AS uk, COUNT(*) AS n FROM t LEFT JOIN t AS u ON t.k = u.v GROUP BY t.g, u.k",
    "SELECT t.g, SUM(t.v) AS s FROM t GROUP BY t.g HAVING SUM(t.v) > (SELECT MIN(u.v) FROM t AS u)",
]
WHOLE = [
    "SELECT t.g, COUNT(DISTINCT t.k) AS n FROM t GROUP BY t.g",
    "SELECT STDDEV_SAMP(t.v) AS s FROM t",
    "SELECT t.g, SUM(t.v) AS s FROM t GROUP BY ROLLUP (t.g)",
    "SELECT SUM(t.v) AS s FROM t GROUP BY t.g WITH ROLLUP",
    "SELECT SUM(t.v) AS s FROM t GROUP BY ROLLUP (t.g)",
    "SELECT SUM(t.v) AS s FROM t GROUP BY t.k, CUBE (t.g)",
    "SELECT SUM(t.v) AS s FROM t GROUP BY GROUPING SETS ((t.g), (t.k))",
    "SELECT t.g, FIRST(t.v) AS f FROM t GROUP BY t.g",
    "SELECT * FROM t",
    "SELECT SUM(t.v) + 1 FROM t",
    "SELECT t.g, (SELECT MAX(u.v) FROM t AS u WHERE u.d = t.d) AS m, SUM(t.v) AS s FROM t GROUP BY t.g, t.d + 1",
]


def parsed(text):
    return sqlglot.parse_one(text, dialect="spark")


def test_keys_that_duckdb_alone_tells_apart_stay_two():
    once, always = "REGEXP_REPLACE(t.s, 'x', 'y')", "REGEXP_REPLACE(t.s, 'x', 'y', 'g')"
    select = sqlglot.parse_one(f"SELECT {once} AS a FROM t GROUP BY {once}, {always}", dialect="duckdb")
    found = split(select, "source", type_of(FP))
    assert [item.this.sql("duckdb") for item in found.partial.selects] == [once, always]


def filled(rng):
    connection = duckdb.connect()
    connection.execute("CREATE TABLE t (g INT, k INT, v INT, d DECIMAL(9, 2))")
    for _ in range(rng.randint(0, 30)):
        row = [rng.choice((None, *range(n))) for n in (3, 8, 6)]
        connection.execute("INSERT INTO t VALUES (?, ?, ?, ?)", [*row, rng.randint(0, 900) / 100])
    return connection


def plain(rows, ordered):
    shown = [tuple(f"{v:.6g}" if v is not None and not isinstance(v, str) else v for v in r) for r in rows]
    return shown if ordered else sorted(shown, key=repr)


@given(st.sampled_from(SPLIT), st.integers(0, 10**6))
def test_merged_parts_give_what_one_statement_gives(text, seed):
    rng = random.Random(seed)
    connection = filled(rng)
    select = parsed(text)
    found = split(select, "parts", type_of(FP))
    assert found is not None
    assert select == parsed(text), "the query itself was changed"
    parts = rng.randint(1, 4)
    # the first part also has the rows without a value
    arms = [
        found.partial.copy().where(f"t.k % {parts} = {i}" + (" OR t.k IS NULL" if i == 0 else ""))
        for i in range(parts)
    ]
    union = " UNION ALL ".join(f"({a.sql('duckdb')})" for a in arms)
    connection.execute(f"CREATE TABLE parts AS {union}")
    described = connection.execute("DESCRIBE parts").fetchall()
    columns = [(name, kind if kind != "HUGEINT" else "DECIMAL(38,0)") for name, kind, *_ in described]
    outcomes = []
    for sql in (bound(found.merge.sql("duckdb"), {FP: columns}), select.sql("duckdb")):
        cursor = connection.execute(sql)
        names = [d[0] for d in cursor.description]
        outcomes.append((names, plain(cursor.fetchall(), "LIMIT" in text)))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("text", WHOLE)
def test_what_cannot_be_computed_from_parts_stays_whole(text):
    assert split(parsed(text), "parts", type_of(FP)) is None


def test_merged_sums_and_averages_have_the_types_of_the_parts():
    found = split(parsed("SELECT AVG(t.d) AS m FROM t"), "parts", type_of(FP))
    names = {e.this.sql(): e.alias for e in found.partial.selects}
    kinds = {
        names["AVG(t.d)"]: "decimal(13,6)",
        names["SUM(t.d)"]: "decimal(19,2)",
        names["COUNT(t.d)"]: "bigint",
    }
    text = bound(found.merge.sql("spark"), {FP: list(kinds.items())})
    assert text == (
        f"SELECT CAST(CAST(SUM(p.{names['SUM(t.d)']}) AS decimal(19,2)) / "
        f"CAST(SUM(p.{names['COUNT(t.d)']}) AS bigint) AS decimal(13,6)) AS m FROM parts AS p"
    )


def test_equal_parts_of_a_query_are_computed_once():
    found = split(
        parsed("SELECT t.g, SUM(t.v) AS a, SUM(t.v) + t.g AS b FROM t GROUP BY t.g"), "p", type_of(FP)
    )
    assert sorted(e.this.sql() for e in found.partial.selects) == ["SUM(t.v)", "t.g"]
