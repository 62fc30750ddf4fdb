import random

import duckdb
import pytest
import sqlglot
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.query.sql.parse import qualified_copy
from ebbflow.planners.query.views.restriction import restrict_views
from tests.planners.query.random_queries import fill
from tests.planners.query.statements import catalogue, multiset, reference

TABLES = {"a": "k int, x int, z int", "b": "k int, j int, y int"}
KNOWN = catalogue(TABLES)
GROUPED = "SELECT a.k, a.x, sum(a.z) AS s FROM a GROUP BY a.k, a.x"


def restricted(view, first, second, start="FROM v p JOIN v q ON p.k = q.k"):
    """Return what is added to ``view`` when its readers p and q filter so."""
    text = f"WITH v AS ({view}) SELECT p.k {start} WHERE {first} AND {second}"
    before = qualified_copy(sqlglot.parse_one(text, read="spark"), KNOWN)
    after = restrict_views(before.copy(), KNOWN)
    if after == before:
        return ""
    assert after.args["where"] == before.args["where"]  # readers keep their filters
    body = after.args["with_"].expressions[0].this
    arms = [body] if body.key == "select" else [body.this, body.expression]
    return "; ".join(a.args["where"].this.sql() if a.args.get("where") else "-" for a in arms)


def test_the_readers_filters_are_joined_by_or():
    assert restricted(GROUPED, "p.x = 1", "q.x > 2") == "(a.x = 1 OR a.x > 2)"
    assert restricted(GROUPED, "p.x = 1 AND p.k < 3", "q.x = 2") == (
        "((a.x = 1 AND a.k < 3) OR (a.x = 2 AND a.k < 3))"  # for p.k = q.k
    )
    assert restricted(GROUPED, "p.x = 1", "q.x = 1") == "(a.x = 1)"


@pytest.mark.parametrize(
    ("view", "first", "second"),
    [
        (GROUPED, "p.x = 1", "q.s = 2"),  # an aggregate
        (GROUPED, "p.x = 1", "q.k < p.x"),  # not of one reader alone
        (GROUPED, "p.x = 1", "q.k + 1 = 2"),  # more than a comparison: it might fail on other rows
        (GROUPED, "p.x = 1", "q.x < rand()"),
        (f"{GROUPED} LIMIT 3", "p.x = 1", "q.x = 2"),
        ("SELECT a.k, sum(a.x) OVER (PARTITION BY a.k) AS x FROM a", "p.k = 1", "q.k = 2"),
        ("SELECT a.k, a.x + 1 AS x FROM a", "p.x = 1", "q.x = 2"),
        ("SELECT 1 AS k, count(*) AS x FROM a", "p.k = 2", "q.k = 3"),
        ("SELECT a.k, a.x, count(*) AS n FROM a GROUP BY ROLLUP (a.k, a.x)", "p.k = 1", "q.k = 2"),
        (f"SELECT a.k, a.x FROM a UNION {GROUPED.replace(', sum(a.z) AS s', '')}", "p.k < 1", "q.k < 2"),
    ],
)
def test_what_cannot_be_told_of_the_views_rows_is_left_to_the_readers(view, first, second):
    assert restricted(view, first, second) == ""


@pytest.mark.parametrize(
    ("start", "added"),
    [
        ("FROM v p LEFT JOIN v q ON p.k = q.k AND q.x = 3", "(a.x = 1 OR a.x = 3)"),
        ("FROM v p LEFT SEMI JOIN v q ON p.k = q.k AND q.x = 3", "(a.x = 1 OR a.x = 3)"),
        ("FROM v p LEFT ANTI JOIN v q ON p.k = q.k AND q.x = 3", "(a.x = 1 OR a.x = 3)"),
        ("FROM v p LEFT JOIN v q ON p.k = q.k", ""),
        ("FROM v p RIGHT JOIN v q ON p.k = q.k AND q.x = 3", ""),
        ("FROM v p FULL JOIN v q ON p.k = q.k AND q.x = 3", ""),
        ("FROM v p LEFT JOIN v q ON p.k = q.k AND q.x = 3 RIGHT JOIN b ON b.k = p.k", ""),
    ],
)
def test_a_filter_counts_only_where_it_decides_about_the_readers_rows(start, added):
    assert restricted(GROUPED, "p.x = 1", "TRUE", start) == added


def test_an_arm_that_a_constant_excludes_computes_nothing():
    view = "SELECT a.k, 's' AS kind FROM a UNION ALL SELECT b.k, 'w' AS kind FROM b"
    assert restricted(view, "p.kind = 's' AND p.k = 1", "q.kind = 'w'") == "(a.k = 1); (b.k = 1)"
    assert restricted(view, "p.kind = 's' AND p.k = 1", "q.kind = 's' AND q.k = 2", "FROM v p, v q") == (
        "(a.k = 1 OR a.k = 2); (FALSE)".replace("(FALSE)", "FALSE")
    )


@pytest.mark.parametrize("filters", [("p.k = 1", "q.k = 2"), ("NOT p.k = '01'", "NOT q.k = '01'")])
def test_arms_of_different_types_are_not_restricted(filters):
    assert restricted("SELECT a.k FROM a UNION ALL SELECT CAST(b.k AS STRING) AS k FROM b", *filters) == ""
    mixed = "SELECT a.k, a.x FROM a UNION ALL SELECT CAST(b.k AS STRING) AS k, b.j AS x FROM b"
    assert (
        restricted(mixed, f"{filters[0]} AND p.x = 1", "q.x = 2")
        == "(a.x = 1 OR a.x = 2); (b.j = 1 OR b.j = 2)"
    )


@pytest.mark.parametrize(
    ("readers", "added"),
    [
        ("v WHERE v.x = 1", "a.x = 1"),
        ("b JOIN v ON v.k = b.k WHERE b.k = 1", "a.k = 1"),
        ("b JOIN v ON v.k = b.k AND v.x = b.j WHERE b.k = 1 AND b.j IN (2, 3)", "a.x IN (2, 3) AND a.k = 1"),
        ("b LEFT JOIN v ON v.k = b.k WHERE b.k = 1", "a.k = 1"),
        ("b LEFT ANTI JOIN v ON v.k = b.k WHERE b.k = 1", "a.k = 1"),
        ("b LEFT JOIN a AS c ON b.k = c.x AND c.x > 4 LEFT JOIN v ON c.x = v.k", "a.k > 4"),
        ("b JOIN a AS c ON b.k = c.k JOIN v ON c.k = v.x WHERE b.k = 1", "a.x = 1"),
        ("b RIGHT JOIN v ON v.k = b.k WHERE b.j = 1", ""),
        ("b LEFT JOIN v ON v.k = b.k AND b.k = 1", ""),  # of the left rows all count
        ("b JOIN v ON v.k = b.k WHERE b.k + 0 = 1", ""),
        ("b JOIN v ON v.k = b.k WHERE b.k = b.j", ""),
        ("b JOIN v ON v.k < b.k WHERE b.k = 1", ""),
        ("c JOIN v ON v.k = c.k WHERE c.k = '01'", ""),  # a text, of which 1 is another
        ("b JOIN v ON v.k = b.k WHERE b.k = '1' AND b.k > 1 / 0 AND b.k < -1", "a.k < -1"),
    ],
)
def test_a_filter_is_one_of_all_columns_that_joins_make_equal(readers, added):
    known = catalogue({**TABLES, "c": "k string, x int"})
    text = f"WITH v AS ({GROUPED}) SELECT 1 AS one FROM {readers}"
    query = restrict_views(qualified_copy(sqlglot.parse_one(text, read="spark"), known), known)
    where = query.args["with_"].expressions[0].this.args.get("where")
    assert (where.this.sql().strip("()") if where is not None else "") == added.strip("()")


@pytest.mark.parametrize(
    ("test", "added"),
    [
        ("c.t IN ('x', 'y')", "u.t IN ('x', 'y')"),
        ("c.t = 1", ""),  # of other texts it fails
        ("c.d >= DATE '2026-01-01'", "u.d >= CAST('2026-01-01' AS DATE)"),
        ("c.d >= 'January'", ""),
    ],
)
def test_what_equal_columns_are_compared_with_has_their_type(test, added):
    kinds = "t string, d date"
    known = catalogue({"c": kinds, "u": kinds})
    text = f"""WITH v AS (SELECT u.t, u.d, count(*) AS n FROM u GROUP BY u.t, u.d)
    SELECT v.n FROM c JOIN v ON v.t = c.t AND v.d = c.d WHERE {test}"""
    query = restrict_views(qualified_copy(sqlglot.parse_one(text, read="spark"), known), known)
    where = query.args["with_"].expressions[0].this.args.get("where")
    assert (where.this.sql().strip("()") if where is not None else "") == added.strip("()")


def test_a_limit_in_parentheses_is_seen():
    text = "WITH v AS ((SELECT a.k FROM a ORDER BY a.k) LIMIT 5) SELECT v.k FROM v WHERE v.k > 3"
    before = qualified_copy(sqlglot.parse_one(text, read="spark"), KNOWN)
    assert restrict_views(before.copy(), KNOWN) == before


def test_a_view_of_a_view_is_restricted_through_both():
    text = f"""WITH u AS ({GROUPED}), v AS (SELECT u.k, u.x FROM u),
    w AS (SELECT u.k, u.x FROM u) SELECT p.k FROM v p, v q, w, w w2
    WHERE p.x = 1 AND q.x = 2 AND w.x = 3 AND w2.x = 4 AND p.k = q.k AND w.k = p.k AND w2.k = p.k"""
    query = restrict_views(qualified_copy(sqlglot.parse_one(text, read="spark"), KNOWN), KNOWN)
    first = query.args["with_"].expressions[0].this
    assert first.args["where"].this.sql() == "((a.x = 1 OR a.x = 2) OR (a.x = 3 OR a.x = 4))"


@pytest.fixture(scope="module")
def filled():
    connection = duckdb.connect()
    fill(connection, random.Random(7))
    yield connection
    connection.close()


VIEWS = (
    "SELECT k, x, z FROM a",
    "SELECT DISTINCT k, x, z FROM a",
    "SELECT k, x, sum(z) AS z FROM a GROUP BY k, x",
    "SELECT k, x, 1 AS z FROM a WHERE x > 0 UNION ALL SELECT k, j, 2 AS z FROM b",
    "SELECT k, x, z FROM a EXCEPT SELECT k, j, y FROM b",
    "SELECT k, x, z FROM a INTERSECT SELECT k, z, x FROM a",
    "SELECT a.k, b.j AS x, count(*) AS z FROM a LEFT JOIN b ON a.k = b.k GROUP BY a.k, b.j",
    "SELECT a.k, b.j AS x, 2 AS z FROM a FULL JOIN b ON a.k = b.k",
    "SELECT k, x, row_number() OVER (PARTITION BY k ORDER BY x, z) AS z FROM a",
    "SELECT k, x, count(*) AS z FROM a GROUP BY ROLLUP (k, x)",
    "SELECT 1 AS k, 2 AS x, count(*) AS z FROM a",
)


@given(st.integers(0, 10**9))
def test_random_readers_of_random_views_see_what_they_saw(filled, seed):
    rng = random.Random(seed)

    def test(alias: str) -> str:
        column = f"{alias}.{rng.choice('kxz')}"
        return rng.choice(
            (f"{column} = {rng.choice('0123')}", f"{column} < {rng.choice('123')}", f"{column} IS NULL",
             f"{column} IN (1, 2)", f"({column} = 1 OR {alias}.k = 2)", f"NOT {column} = 1")
        )  # fmt: skip

    join = rng.choice(
        ("JOIN", "JOIN", "LEFT JOIN", "LEFT SEMI JOIN", "LEFT ANTI JOIN", "RIGHT JOIN", "FULL JOIN")
    )
    on = f"p.k = q.k AND {test('q')}" if rng.random() < 0.6 else "p.k = q.k"
    where = [test("p")] + ([test("q")] if "SEMI" not in join and "ANTI" not in join else [])
    text = f"""WITH v AS ({rng.choice(VIEWS)}) SELECT p.k, p.x, p.z FROM v p {join} v q ON {on}
    WHERE {" AND ".join(where)}"""
    query = restrict_views(qualified_copy(sqlglot.parse_one(text, read="spark"), KNOWN), KNOWN)
    got = multiset(filled.execute(query.sql("duckdb")).fetchall())
    assert got == reference(filled, text), query.sql("duckdb")
