import pytest

from ebbflow.planners.query.sql.parse import parse_query
from ebbflow.planners.query.views.views import ROOT, view_chain
from tests.planners.query.statements import NOW, catalogue

TABLES = catalogue({"a": "k int, x int", "b": "k int, j int, y double", "c": "j int, z int"})


def chain(text):
    return view_chain(parse_query(text, TABLES, now=NOW), TABLES)


def shape(text):
    """Return per view, except the result, what it reads."""
    return [v.reads_views + v.reads_tables for v in chain(text).views[:-1]]


def test_a_query_without_subqueries_is_one_view():
    found = chain("SELECT a.x FROM a JOIN b ON a.k = b.k")
    assert [v.name for v in found.views] == [ROOT]
    assert found.root.reads_tables == ("a", "b")


def test_a_derived_table_with_an_aggregate_becomes_a_view():
    assert shape("SELECT q.s FROM (SELECT k, sum(x) AS s FROM a GROUP BY k) q JOIN b ON b.k = q.k") == [
        ("a",)
    ]


def test_a_plain_derived_table_is_merged_into_its_reader():
    found = chain("SELECT q.x FROM (SELECT k, x FROM a WHERE x > 1) q JOIN b ON b.k = q.k")
    assert [v.name for v in found.views] == [ROOT]
    assert "x > 1" in found.root.query.sql()


def test_an_expression_under_the_null_supplying_side_of_an_outer_join_is_not_merged():
    for text in (
        "SELECT a.x, q.f FROM a LEFT JOIN (SELECT k, 1 AS f FROM b) q ON a.k = q.k",
        "SELECT a.x, q.f FROM (SELECT k, 1 AS f FROM b) q RIGHT JOIN a ON a.k = q.k",
        "SELECT a.x, q.f FROM (SELECT k, 1 AS f FROM b) q FULL JOIN a ON a.k = q.k",
    ):
        assert shape(text) == [("b",)], text
        assert not any(v.query.args.get("kind") for v in chain(text).views)


def test_plain_columns_under_an_outer_join_are_merged():
    assert shape("SELECT a.x, q.y FROM a LEFT JOIN (SELECT k, y FROM b) q ON a.k = q.k") == []


def test_a_with_used_twice_is_one_view_used_twice():
    found = chain("WITH v AS (SELECT k, x FROM a) SELECT p.x, q.x AS y FROM v p JOIN v q ON p.k = q.k")
    assert found.uses["v"] == 2


def test_a_with_that_a_semi_join_names_besides_is_not_lost():
    found = chain("WITH v AS (SELECT k FROM a) SELECT v.k FROM v LEFT SEMI JOIN v AS w ON v.k = w.k")
    assert found.uses["v"] == 2


def test_nested_withs_come_in_dependency_order():
    text = """
    WITH v AS (WITH w AS (SELECT k, max(x) AS x FROM a GROUP BY k)
               SELECT w.k, b.j, sum(w.x) AS s FROM w JOIN b ON w.k = b.k GROUP BY w.k, b.j)
    SELECT v.s, c.z FROM v JOIN c ON v.j = c.j"""
    found = chain(text)
    assert len(found.views) == 3
    inner, outer, root = found.views
    assert inner.reads_tables == ("a",)
    assert outer.reads_views == (inner.name,)
    assert root.reads_views == (outer.name,)


def test_equal_names_in_different_withs_stay_apart():
    text = """
    WITH v AS (WITH w AS (SELECT k, max(x) AS m FROM a GROUP BY k) SELECT k, m FROM w),
         u AS (WITH w AS (SELECT j AS k, min(z) AS m FROM c GROUP BY j) SELECT k, m FROM w)
    SELECT v.m, u.m AS n FROM v JOIN u ON v.k = u.k"""
    assert sorted(shape(text)) == [("a",), ("c",)]


def test_a_with_that_shadows_a_table_reads_that_table():
    found = chain("WITH a AS (SELECT k, sum(x) AS x FROM a GROUP BY k) SELECT a.x FROM a JOIN b ON a.k = b.k")
    view, root = found.views
    assert (view.name, view.reads_tables, view.reads_views) == ("a", ("a",), ())
    assert (root.reads_tables, root.reads_views) == (("b",), ("a",))
    assert found.uses["a"] == 1


def test_a_with_may_be_called_result():
    found = chain("WITH result AS (SELECT k, sum(x) AS x FROM a GROUP BY k) SELECT x FROM result")
    assert [v.name for v in found.views] == ["result", ROOT]


@pytest.mark.parametrize(
    "condition",
    [
        "a.x IN (SELECT sum(z) FROM c GROUP BY j)",
        "a.x NOT IN (SELECT c.z FROM c JOIN b ON b.j = c.j)",
        "a.x > (SELECT avg(b.y) FROM b JOIN c ON b.j = c.j)",
    ],
)
def test_an_uncorrelated_subquery_with_a_join_or_groups_becomes_a_view(condition):
    assert len(shape(f"SELECT a.k FROM a WHERE {condition}")) == 1


@pytest.mark.parametrize(
    "condition",
    [
        "a.x IN (SELECT sum(z) FROM c WHERE c.j = a.k GROUP BY j)",
        "a.x > (SELECT avg(b.y) FROM b LEFT JOIN c ON b.j = c.j AND c.z = a.k)",
        "EXISTS (SELECT 1 FROM b JOIN c ON b.j = c.j AND rand() < 0.5 WHERE b.k = a.k)",
    ],
)
def test_a_subquery_whose_joins_are_correlated_or_volatile_stays_where_it_is(condition):
    assert shape(f"SELECT a.k FROM a WHERE {condition}") == []


@pytest.mark.parametrize(
    ("condition", "moved", "left"),
    [
        (
            "EXISTS (SELECT * FROM b JOIN c ON b.j = c.j WHERE b.k = a.k AND c.z > 1)",
            "SELECT b.k AS b__k FROM b AS b JOIN c AS c ON b.j = c.j WHERE c.z > 1",
            "EXISTS(SELECT 1 AS _one FROM {} AS _q1 WHERE _q1.b__k = a.k)",
        ),
        (
            "a.x > (SELECT avg(b.y) FROM b JOIN c ON b.j = c.j AND c.z = a.k)",
            "SELECT b.y AS b__y, c.z AS c__z FROM b AS b JOIN c AS c ON b.j = c.j",
            "a.x > (SELECT AVG(_q1.b__y) AS _col_0 FROM {} AS _q1 WHERE _q1.c__z = a.k)",
        ),
        (
            "NOT EXISTS (SELECT 1 FROM b, c WHERE b.j = c.j)",
            "SELECT 1 AS _one FROM b AS b, c AS c WHERE b.j = c.j",
            "NOT EXISTS(SELECT 1 AS _one FROM {} AS _q1)",
        ),
        (
            "a.k IN (SELECT b.k FROM b, c WHERE b.j = c.j UNION SELECT c.z FROM c)",
            "SELECT b.k AS k FROM b AS b, c AS c WHERE b.j = c.j UNION SELECT c.z AS z FROM c AS c",
            "a.k IN (SELECT _q1.k AS k FROM {} AS _q1)",
        ),
    ],
)
def test_the_uncorrelated_joins_of_a_subquery_become_a_view(condition, moved, left):
    found = chain(f"SELECT a.k FROM a WHERE {condition}")
    view, root = found.views
    assert " ".join(view.query.sql().replace("CROSS JOIN", ",").replace(" ,", ",").split()) == moved
    assert root.query.args["where"].this.sql() == left.format(view.name)


def test_a_view_does_not_hide_a_relation_of_that_alias_from_a_correlated_subquery():
    text = """SELECT q.s FROM (SELECT a.k, sum(a.x) AS s FROM a GROUP BY a.k) AS q JOIN
    (SELECT max(q.k) AS m FROM b AS q WHERE EXISTS (SELECT 1 FROM c WHERE c.j = q.j)) AS r ON r.m = q.k"""
    found = chain(text)
    assert not found.notes
    assert [v.name for v in found.views] == ["q_2", "r", ROOT]
    assert found.views[-1].reads_views == ("q_2", "r")


def test_columns_of_one_name_in_a_nested_correlated_subquery_are_not_mixed_up():
    found = chain(
        "SELECT a.k FROM a WHERE EXISTS (SELECT 1 FROM b, c WHERE b.j = c.j AND b.k = a.k AND EXISTS "
        "(SELECT 1 FROM b AS b2, c WHERE b2.j = c.j AND b2.k = b.k AND c.z = a.x))"
    )
    text = found.root.query.sql()
    assert "_q2.b__k = a.k" in text
    assert "_q1.b2__k = _q2.b__k" in text
    assert len(found.views) == 3


def test_a_subquery_inside_a_subquery_is_hoisted_too():
    text = """SELECT a.k FROM a WHERE a.k IN (
        SELECT b.k FROM b JOIN c ON b.j = c.j WHERE c.z > (SELECT avg(z) FROM c GROUP BY z HAVING z > 1))"""
    assert len(shape(text)) == 2


def test_a_recursive_with_leaves_the_query_whole():
    found = chain(
        "WITH RECURSIVE r AS (SELECT 1 AS n UNION ALL SELECT n + 1 FROM r WHERE n < 3) "
        "SELECT r.n, a.x FROM r JOIN a ON a.k = r.n JOIN b ON b.k = a.k"
    )
    (view,) = found.views
    assert view.opaque
    assert view.reads_tables == ("a", "b")
    assert any("recursive" in note for note in found.notes)


def test_a_query_that_could_not_be_qualified_is_whole():
    (view,) = chain("SELECT k, key FROM a LATERAL VIEW explode(map('p', x)) e").views
    assert view.opaque


def test_the_arms_of_set_operations_are_the_selects_of_one_view():
    found = chain("SELECT k FROM a UNION ALL (SELECT k FROM b EXCEPT SELECT j FROM c)")
    assert [s.args["from_"].this.name for s in found.root.selects()] == ["a", "b", "c"]


def test_a_volatile_with_makes_all_its_readers_volatile_and_is_not_merged():
    text = """WITH v AS (SELECT k, rand() AS r FROM a), w AS (SELECT k, max(x) AS x FROM a GROUP BY k)
    SELECT v.r, w.x FROM v JOIN w ON v.k = w.k"""
    assert {v.name: v.volatile for v in chain(text).views} == {"v": True, "w": False, ROOT: True}


def test_equal_random_subqueries_are_not_made_one():
    found = chain(
        "SELECT p.r, q.r AS s FROM (SELECT k, rand() AS r FROM a) p "
        "JOIN (SELECT k, rand() AS r FROM a) q ON p.k = q.k"
    )
    assert [v.opaque for v in found.views] == [True]
    assert any("not deterministic" in note for note in found.notes)


def test_taking_apart_changes_nothing_in_the_parsed_query():
    parsed = parse_query("SELECT q.s FROM (SELECT k, sum(x) AS s FROM a GROUP BY k) q", TABLES, now=NOW)
    before = parsed.expression.sql()
    view_chain(parsed, TABLES)
    assert parsed.expression.sql() == before
