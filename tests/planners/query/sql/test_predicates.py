import itertools

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlglot import exp, parse_one

from ebbflow.planners.query.sql.predicates import (
    all_of,
    canonical,
    columns_of,
    conjuncts,
    free_columns,
    implied_by_disjunction,
    implied_by_equality,
)

VALUES = (None, 0, 1, 2)


def read(text):
    return parse_one(text, dialect="spark")


@pytest.fixture(scope="module")
def rows():
    """All combinations of four columns, NULLs among them, over two relations of one row each."""
    connection = duckdb.connect()
    connection.execute("CREATE TABLE r (ax INTEGER, ay INTEGER, bx INTEGER, bz INTEGER)")
    connection.executemany("INSERT INTO r VALUES (?, ?, ?, ?)", list(itertools.product(VALUES, repeat=4)))
    yield connection
    connection.close()


def kept(rows, node):
    """Return the rows for which ``node`` is true."""
    source = "(SELECT row_number() OVER () AS i, {'x': ax, 'y': ay} AS a, {'x': bx, 'z': bz} AS b FROM r)"
    return {i for (i,) in rows.execute(f"SELECT i FROM {source} WHERE {node.sql('duckdb')}").fetchall()}


columns = st.sampled_from(["a.x", "a.y", "b.x", "b.z"])
atoms = st.one_of(
    st.builds("{} {} {}".format, columns, st.sampled_from(["=", "<>", "<", ">="]), columns),
    st.builds("{} {} {}".format, columns, st.sampled_from(["=", "<>", "<", ">="]), st.sampled_from("012")),
    st.builds("{} IS {}NULL".format, columns, st.sampled_from(["", "NOT "])),
    st.builds(
        "{} {}IN (1, {})".format, columns, st.sampled_from(["", "NOT "]), st.sampled_from(["2", "NULL"])
    ),
)
conditions = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.builds("({} AND {})".format, inner, inner),
        st.builds("({} OR {})".format, inner, inner),
        st.builds("NOT ({})".format, inner),
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1 = a.x", "a.x = 1"),
        ("a.x <> b.x", "b.x <> a.x"),
        ("a.x < b.x", "b.x > a.x"),
        ("a.x >= 3", "3 <= a.x"),
        ("a.x IN (3, 1, 2)", "a.x IN (1, 2, 3)"),
        ("a.x = 1 AND b.x = 2", "b.x = 2 AND a.x = 1"),
        ("a.x = 1 OR (b.x = 2 OR a.y = 3)", "(a.y = 3 OR a.x = 1) OR b.x = 2"),
        ("(a.x = 1)", "a.x = 1"),
        ("lower(a.s) = 'x'", "'x' = LOWER(a.s)"),
    ],
)
def test_predicates_that_differ_in_the_order_of_operands_have_one_text(one, other):
    assert canonical(read(one)) == canonical(read(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("a.x = 1", "a.x = 2"),
        ("a.x < b.x", "a.x > b.x"),
        ("a.x < 1", "a.x <= 1"),
        ("a.x = 1", "a.x <=> 1"),
        ("a.s = 'b'", "a.s = 'B'"),
        ("(a.x < a.y) = b.t", "a.x < (a.y = b.t)"),
        ("(a.x = 1) IN (b.t)", "a.x = (1 IN (b.t))"),
        ("a.x - b.x = 1", "b.x - a.x = 1"),
        ("a.x IN (1, 2)", "a.x NOT IN (1, 2)"),
    ],
)
def test_predicates_that_mean_different_things_have_different_texts(one, other):
    assert canonical(read(one)) != canonical(read(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("regexp_replace(a.s, 'x', 'y') = 'z'", "regexp_replace(a.s, 'x', 'y', 'g') = 'z'"),
        ("CAST(a.s AS UUID) IS NULL", "CAST(a.s AS TEXT) IS NULL"),
        ("ascii(a.s) > 1", "unicode(a.s) > 1"),
    ],
)
def test_what_duckdb_alone_tells_apart_has_different_texts(one, other):
    texts = [canonical(parse_one(text, dialect="duckdb")) for text in (one, other)]
    assert texts[0] != texts[1]


@given(conditions, conditions)
def test_equal_texts_mean_equal_rows(rows, one, other):
    left, right = read(one), read(other)
    if canonical(left) == canonical(right):
        assert kept(rows, left) == kept(rows, right)


@given(conditions)
def test_splitting_and_factoring_keeps_the_same_rows(rows, text):
    node = read(text)
    assert kept(rows, all_of(conjuncts(node.copy()))) == kept(rows, node)


@given(st.lists(st.lists(atoms, min_size=0, max_size=2), min_size=2, max_size=4), atoms)
def test_a_factor_common_to_all_arms_is_pulled_out(rows, arms, common):
    node = read(" OR ".join(f"({' AND '.join([*arm, common])})" for arm in arms))
    parts = conjuncts(node.copy())
    assert canonical(read(common)) in {canonical(p) for p in parts}
    assert kept(rows, all_of(parts)) == kept(rows, node)


def test_the_join_that_a_disjunction_of_three_arms_hides_is_found():
    text = "(p.k = l.k AND p.b = 1) OR (p.k = l.k AND p.b = 2) OR (p.k = l.k AND l.q < 3)"
    assert [p.sql() for p in conjuncts(read(text))] == ["p.k = l.k", "(p.b = 1 OR p.b = 2 OR l.q < 3)"]


def test_an_arm_that_is_only_the_factor_makes_the_rest_superfluous():
    assert [p.sql() for p in conjuncts(read("(a.x = 1) OR (a.x = 1 AND b.x = 2)"))] == ["a.x = 1"]


def test_random_arms_are_not_factored():
    text = "(rand() < 0.5 AND a.x = 1) OR (rand() < 0.5 AND a.x = 2)"
    assert len(conjuncts(read(text))) == 1


@given(conditions)
def test_what_a_disjunction_implies_of_one_relation_never_drops_a_row(rows, text):
    node = read(text)
    for implied in implied_by_disjunction(node, ["a", "b"]):
        assert len({alias for alias, _ in columns_of(implied)}) == 1
        assert kept(rows, node) <= kept(rows, implied)


def test_a_disjunction_over_two_relations_implies_one_on_each():
    node = read("(a.x = 1 AND b.x = 2) OR (a.x = 2 AND b.x = 1)")
    assert [p.sql() for p in implied_by_disjunction(node, ["a", "b"])] == [
        "(a.x = 1 OR a.x = 2)",
        "(b.x = 2 OR b.x = 1)",
    ]


def test_an_arm_that_says_nothing_of_a_relation_implies_nothing_of_it():
    assert implied_by_disjunction(read("a.x = 1 OR b.x = 2"), ["a", "b"]) == []


@given(atoms)
def test_what_an_equality_implies_never_drops_a_row(rows, text):
    node = read(text)
    if set(columns_of(node)) == {("a", "x")}:
        for implied in implied_by_equality(node, ("a", "x"), [("a", "x"), ("b", "x")]):
            both = exp.and_(node.copy(), read("a.x = b.x"))
            assert kept(rows, both) <= kept(rows, implied)


def test_a_comparison_with_a_literal_is_restated_for_equal_columns():
    found = implied_by_equality(read("a.x BETWEEN 1 AND 2"), ("a", "x"), [("a", "x"), ("b", "y")])
    assert [p.sql() for p in found] == ["b.y BETWEEN 1 AND 2"]


def test_columns_bound_inside_a_subquery_are_not_free():
    node = read("EXISTS (SELECT 1 FROM t AS a JOIN u ON u.k = a.k WHERE a.x = b.x AND c.y > 1)")
    assert {(c.table, c.name) for c in free_columns(node)} == {("b", "x"), ("c", "y")}


def test_an_alias_is_bound_only_inside_the_subquery_that_defines_it():
    node = read("a.x > 1 AND EXISTS (SELECT 1 FROM t AS a WHERE a.y = 2)")
    assert {(c.table, c.name) for c in free_columns(node)} == {("a", "x")}


def test_laterals_and_nested_joins_bind_their_aliases():
    text = "x IN (SELECT e.v FROM (t AS p JOIN q ON p.k = q.k) LATERAL VIEW explode(p.tags) e AS v WHERE q.z = o.z)"
    assert {(c.table, c.name) for c in free_columns(read(text))} == {("o", "z")}
