import random
from collections import defaultdict
from dataclasses import replace

import duckdb
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.planners.model import Catalogue
from ebbflow.planners.query.plan.analysis import Analysis
from ebbflow.planners.query.plan.render import BlockRenderer
from ebbflow.planners.query.plan.staging import Choice, Rendered, Staging
from ebbflow.planners.query.plan.trees import joins
from ebbflow.planners.query.sql.parse import parse_query
from ebbflow.planners.query.views.fingerprint import digest
from ebbflow.planners.query.views.views import ROOT, view_chain
from tests.planners.query.random_queries import fill
from tests.planners.query.statements import NOW, analyse, catalogue, catalogue_of, multiset, random_choice

TABLES = catalogue(
    {"s": "k int, d int, q int", "t": "k int, n string", "i": "d int, p double", "u": "k int, w int"}
)
THREE = "SELECT s.q, i.p FROM s, t, i WHERE s.k = t.k AND s.d = i.d AND t.n = 'x'"


def fingerprint(text, aliases, known=TABLES, salt="run"):
    """Return the fingerprint of the join of ``aliases`` in a query of one block."""
    analysis = analyse(text, known, salt=salt)
    (block,) = (b for b in analysis.blocks.values() if set(aliases) <= set(b.graph.index))
    return analysis.fingerprints.subset(block, sum(1 << block.graph.index[a] for a in aliases))


def whole(text, known=TABLES, salt="run"):
    return analyse(text, known, salt=salt).fingerprints.view(ROOT)


def newer(table):
    tables = dict(TABLES.tables)
    tables[table] = replace(tables[table], version="2")
    return Catalogue(tables)


@pytest.mark.parametrize(
    "text",
    [
        "SELECT s.q, i.p FROM i JOIN s ON s.d = i.d JOIN t ON s.k = t.k WHERE t.n = 'x'",
        "SELECT s.q, i.p FROM t JOIN s ON t.k = s.k AND 'x' = t.n CROSS JOIN i WHERE i.d = s.d",
        "SELECT q, p FROM s JOIN (SELECT k FROM t WHERE n = 'x') AS t ON s.k = t.k JOIN i USING (d)",
    ],
)
def test_the_order_and_place_of_joins_and_conditions_is_no_matter(text):
    for aliases in ("sti", "st", "si"):
        assert fingerprint(text, aliases) == fingerprint(THREE, aliases), aliases


@pytest.mark.parametrize(
    "text",
    [
        THREE.replace("'x'", "'y'"),
        THREE.replace("s.q, i.p", "s.q"),
        THREE.replace("s.q, i.p", "s.q, i.p, t.n"),
        THREE.replace("s.d = i.d", "s.q = i.d"),
        THREE + " AND s.q > 1",
        THREE.replace("t.n = 'x'", "t.n <> 'x'"),
    ],
)
def test_another_constant_column_or_condition_is_another_fingerprint(text):
    assert fingerprint(text, "sti") != fingerprint(THREE, "sti")


def test_another_version_of_a_table_changes_only_what_reads_it():
    assert fingerprint(THREE, "st", newer("t")) != fingerprint(THREE, "st")
    assert fingerprint(THREE, "si", newer("t")) == fingerprint(THREE, "si")
    assert whole(THREE, newer("t")) != whole(THREE)


def test_an_equality_that_is_implied_gives_the_same_fingerprint_as_a_stated_one():
    implied = "SELECT s.q FROM s, t, u WHERE s.k = t.k AND t.k = u.k"
    stated = "SELECT s.q FROM s, t, u WHERE s.k = u.k AND u.k = t.k"
    for aliases in ("su", "st", "tu", "stu"):
        assert fingerprint(implied, aliases) == fingerprint(stated, aliases)


def test_a_filter_that_follows_from_one_outside_the_set_is_part_of_its_identity():
    query = "SELECT s.q, u.w FROM s, t, u WHERE s.k = t.k AND t.k = u.k AND u.k = {}"
    assert fingerprint(query.format(5), "st") != fingerprint(query.format(6), "st")
    assert fingerprint(query.format(5), "st") != fingerprint(query.replace(" AND u.k = {}", ""), "st")


def test_a_table_inside_a_predicates_subquery_counts_with_its_version():
    text = THREE + " AND s.q IN (SELECT w FROM u)"
    assert fingerprint(text, "st", newer("u")) != fingerprint(text, "st")
    assert fingerprint(text, "ti", newer("u")) == fingerprint(text, "ti")


def test_a_view_inside_a_predicates_subquery_counts_with_its_content():
    text = THREE + " AND s.q IN (SELECT max(w) FROM u WHERE w > {} GROUP BY k)"
    assert fingerprint(text.format(1), "st") != fingerprint(text.format(2), "st")


def test_a_view_counts_with_its_content_and_not_with_its_name():
    text = (
        "WITH {0} AS (SELECT k, sum(w) AS w FROM u WHERE w > {1} GROUP BY k) "
        "SELECT s.q, v.w FROM s JOIN {0} v ON v.k = s.k"
    )
    assert fingerprint(text.format("one", 1), "sv") == fingerprint(text.format("other", 1), "sv")
    assert fingerprint(text.format("one", 1), "sv") != fingerprint(text.format("one", 2), "sv")


def test_only_volatile_stages_take_the_runs_salt():
    volatile = "SELECT s.q, rand() AS r FROM s JOIN t ON s.k = t.k"
    assert whole(volatile, salt="one") != whole(volatile, salt="two")
    assert fingerprint(volatile, "st", salt="one") == fingerprint(volatile, "st", salt="two")
    assert whole(THREE, salt="one") == whole(THREE, salt="two")
    reader = (
        "WITH v AS (SELECT k, rand() AS r FROM t) SELECT s.q FROM s JOIN v ON s.k = v.k JOIN u ON u.k = s.k"
    )
    assert fingerprint(reader, "sv", salt="one") != fingerprint(reader, "sv", salt="two")
    assert fingerprint(reader, "su", salt="one") == fingerprint(reader, "su", salt="two")


def test_a_frozen_clock_is_a_constant():
    assert whole("SELECT current_date() AS d FROM s") == whole("SELECT DATE '2026-03-04' AS d FROM s")


def test_what_spark_has_one_word_for_is_still_two_things_to_duckdb():
    known = catalogue({"t": "s string, u string"})

    def of(item, where="TRUE"):
        query = parse_query(
            f"SELECT {item} AS v FROM t JOIN t AS o ON t.s = o.u WHERE {where}",
            known,
            now=NOW,
            dialect="duckdb",
        )
        analysis = Analysis.of(view_chain(query, known), known, "run")
        (block,) = analysis.blocks.values()
        return analysis.fingerprints.view(ROOT), analysis.fingerprints.subset(block, 3)

    once, always = "regexp_replace(t.s, 'x', 'y')", "regexp_replace(t.s, 'x', 'y', 'g')"
    assert of(once)[0] != of(always)[0]
    assert of("list(t.s ORDER BY t.s)")[0] != of("list(t.s ORDER BY t.s DESC)")[0]
    assert of("t.s", f"{once} = 'z'")[1] != of("t.s", f"{always} = 'z'")[1]


def test_a_digest_depends_on_structure_and_not_on_concatenation():
    assert digest("a", "b") != digest("ab")
    assert digest(["a", "b"], "c") != digest(["a"], "b", "c")
    assert len(digest(1)) == 32


CONDITIONS = (
    "a.k = b.k", "b.j = c.j", "a.k = d.k", "d.j = c.j", "a.z = c.z", "b.k = d.k", "c.w = d.w", "a.x = b.y",
    "a.x < c.z", "a.x + b.y = 3", "(a.x = 1 OR b.y = 1)", "(a.x = 1 AND c.z = 1 OR a.x = 2 AND c.z = 0)",
    "a.k = 1", "b.k = 2", "a.x > 0", "c.z IS NULL", "d.w IN (1, 2)", "a.k IN (SELECT y FROM b)",
    "EXISTS (SELECT 1 FROM c AS e WHERE e.j = b.j AND e.w > a.x)",
)  # fmt: skip
COLUMNS = ("a.k", "a.x", "b.j", "b.y", "c.z", "d.w")


@pytest.fixture(scope="module")
def filled():
    connection = duckdb.connect()
    fill(connection, random.Random(5))
    return connection, catalogue_of(connection)


@settings(max_examples=12)
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from(CONDITIONS), min_size=1, max_size=5, unique=True),
            st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=3, unique=True),
        ),
        min_size=2,
        max_size=3,
    ),
    st.integers(0, 10**6),
)
def test_equal_fingerprints_mean_equal_rows_within_and_across_queries(filled, queries, seed):
    connection, known = filled
    rng = random.Random(seed)
    rows = defaultdict(list)
    for conditions, columns in queries:
        text = f"SELECT {', '.join(columns)} FROM a, b, c, d WHERE {' AND '.join(conditions)}"
        analysis = analyse(text, known)
        ((key, block),) = analysis.blocks.items()
        for _ in range(2):
            choice = random_choice(analysis, rng)
            for join in joins(choice.trees[key]):
                statement = BlockRenderer(block, {}).stage(join)
                found = analysis.fingerprints.subset(block, join.mask)
                rows[found].append(multiset(connection.execute(statement.sql("duckdb")).fetchall()))
            staging = Staging(analysis, Choice(choice.trees))
            sink = staging.units[-1]
            rows[sink.output_fp].append(
                multiset(connection.execute(Rendered(staging, sink).duckdb).fetchall())
            )
    for found in rows.values():
        assert all(other == found[0] for other in found)
