"""Plans as they are executed: whatever the join trees, cuts and cut views, the rows are the query's own."""

import random
import re
from pathlib import Path

import duckdb
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from ebbflow.planners.model import Share
from ebbflow.planners.query.costs.cost import DUCKDB
from ebbflow.planners.query.plan.staging import Choice, Rendered, Staging
from ebbflow.planners.query.plan.trees import joins
from ebbflow.planners.query.planner import PlannerOptions, QueryPlanner
from tests.planners.query.random_queries import TABLES, fill, random_query
from tests.planners.query.statements import (
    NOW,
    analyse,
    catalogue_of,
    multiset,
    random_choice,
    reads,
    reference,
    run,
)
from tests.sweeps import spread
from tests.tpch_tables import tpch_tables

FIXTURES = Path(__file__).parents[3] / "fixtures"
HARD = [q for q in (FIXTURES / "queries" / "hard.sql").read_text().split(";\n") if q.strip()]
TPCH = sorted((FIXTURES / "tpch").glob("q*.sql"), key=lambda p: int(p.stem[1:]))
SHARE = Share.uniform(8, 32, nodes=4, hazard=1.0)


@pytest.fixture(scope="module")
def small():
    connection = duckdb.connect()
    connection.execute((FIXTURES / "queries" / "tables.sql").read_text())
    yield connection, catalogue_of(connection)
    connection.close()


@pytest.fixture(scope="module")
def tpch():
    connection = duckdb.connect()
    for path in sorted(tpch_tables(0.01).glob("*.parquet")):
        connection.execute(f"CREATE TABLE {path.stem} AS FROM '{path}'")
    yield connection, catalogue_of(connection)
    connection.close()


class Filled:
    """A database of random rows, made anew when a query has broken it."""

    def __init__(self):
        self.renew()

    def renew(self):
        self.connection = duckdb.connect()
        fill(self.connection, random.Random(99))
        self.known = catalogue_of(self.connection)


@pytest.fixture(scope="module")
def filled():
    database = Filled()
    yield database
    database.connection.close()


@pytest.mark.parametrize("text", HARD, ids=range(len(HARD)))
def test_a_hard_query_gives_its_own_rows_however_it_is_planned(small, text):
    connection, known = small
    expected = reference(connection, text)
    analysis = analyse(text, known)
    seed = HARD.index(text) % 2
    rng = random.Random(seed)
    choice = random_choice(analysis, rng)
    # DuckDB converts text to compare it, and fails on 'three' if it does so first
    divided = known if seed and "'01'" not in text else None
    assert run(connection, analysis, choice, divided, rng).rows == expected


@pytest.mark.parametrize("text", spread(HARD, 3), ids=range(len(HARD)))
def test_a_hard_query_can_be_costed_and_its_single_statement_is_the_query(small, text):
    connection, known = small
    planner = QueryPlanner(text, known, DUCKDB, now=NOW, salt="run")
    for plan in planner.candidates(SHARE):
        for stage in plan.stages:
            assert stage.statement.spark
            assert stage.statement.fallback
    (stage,) = planner.single(SHARE).stages
    assert multiset(connection.execute(stage.statement.duckdb).fetchall()) == reference(connection, text)
    assert stage.tables == reads(planner.parsed.expression)[1]


@given(st.integers(0, 10**9))
def test_a_random_query_gives_its_own_rows_however_it_is_planned(filled, seed):
    text = random_query(random.Random(seed))
    try:
        expected = reference(filled.connection, text)
    except duckdb.Error:  # internal errors of DuckDB 2.0 on one query in a thousand, as it is written
        filled.renew()
        reject()
    connection, known = filled.connection, filled.known
    analysis = analyse(text, known)
    for number in range(2):
        rng = random.Random(number)
        choice = random_choice(analysis, rng)
        divided = known if number else None
        assert run(connection, analysis, choice, divided, rng).rows == expected, text


def test_random_queries_reach_what_they_are_meant_to():
    texts = [random_query(random.Random(seed)) for seed in range(200)]
    for words in (
        "WITH",
        "LEFT JOIN",
        "FULL JOIN",
        "ANTI JOIN",
        "EXISTS",
        "NOT IN",
        "GROUP BY",
        "UNION",
        "(SELECT",
    ):
        assert sum(words in text for text in texts) > 10, words
    assert set(TABLES) == {"a", "b", "c", "d"}


@pytest.mark.parametrize("path", TPCH, ids=lambda p: p.stem)
def test_tpch_gives_its_own_rows_however_it_is_planned(tpch, path):
    connection, known = tpch
    text = path.read_text()
    expected = reference(connection, text)
    analysis = analyse(text, known)
    seed = TPCH.index(path) % 2
    rng = random.Random(seed)
    choice = random_choice(analysis, rng)
    assert run(connection, analysis, choice, known if seed else None, rng).rows == expected


@pytest.mark.parametrize("path", spread(TPCH, 2), ids=lambda p: p.stem)
def test_what_the_planner_proposes_for_tpch_gives_the_reference_result(tpch, path):
    connection, known = tpch
    text = path.read_text()
    expected = reference(connection, text)
    options = PlannerOptions(cuts="every-join", keep=2)
    planner = QueryPlanner(text, known, DUCKDB, now=NOW, salt="run", options=options)
    for plan in planner.candidates(SHARE):
        made = []
        for stage in plan.stages:
            made.append(f"ckpt_{stage.output_fp}")
            connection.execute(f"CREATE TEMP TABLE {made[-1]} AS {stage.statement.duckdb}")
        rows = multiset(connection.execute(f"FROM {made[-1]}").fetchall())
        for name in made:
            connection.execute(f"DROP TABLE {name}")
        assert rows == expected


def test_q1_of_a_cut_everything_plan_joins_once_a_stage(small):
    _, known = small
    analysis = analyse("SELECT a.x FROM a JOIN b ON a.k = b.k JOIN c ON c.j = b.j", known)
    choice = random_choice(analysis, random.Random(3))
    cuts = {key: frozenset(j.mask for j in joins(tree)) for key, tree in choice.trees.items()}
    staging = Staging(analysis, Choice(choice.trees, cuts))
    statements = [Rendered(staging, unit).spark for unit in staging.units]
    assert [s.count("JOIN") for s in statements] == [1, 1, 0]
    assert [u.is_result for u in staging.units] == [False, False, True]
    assert staging.units[-1].covers == {"Result.a", "Result.b", "Result.c"}


def test_a_cut_that_nobody_reads_is_no_stage(small):
    _, known = small
    text = """WITH v AS (SELECT a.k, sum(b.y) AS s FROM a JOIN b ON a.k = b.k JOIN c ON c.j = b.j GROUP BY a.k)
    SELECT p.s, q.s AS t FROM v p JOIN v q ON p.k = q.k"""
    analysis = analyse(text, known)
    choice = random_choice(analysis, random.Random(1))
    cuts = {key: frozenset(j.mask for j in joins(tree)) for key, tree in choice.trees.items()}
    everything = Staging(analysis, Choice(choice.trees, cuts, frozenset({"v"}))).units
    read = {fp for unit in everything for fp in unit.inputs}
    assert {u.output_fp for u in everything[:-1]} <= read


def test_the_fallback_asks_for_no_broadcast_and_duckdb_gets_no_hints(small):
    _, known = small
    text = "SELECT /*+ BROADCAST(b) */ a.x FROM a JOIN b ON a.k = b.k"
    (stage,) = QueryPlanner(text, known, DUCKDB, now=NOW, salt="run").single(SHARE).stages
    assert "BROADCAST(b)" in stage.statement.spark
    assert "BROADCAST" not in stage.statement.fallback
    assert "MERGE(b)" in stage.statement.fallback
    assert "/*+" not in stage.statement.duckdb


def test_names_that_are_keywords_or_no_words_are_quoted(small):
    _, known = small
    text = "SELECT `left`.x FROM a AS `left` JOIN `Odd Table` AS o ON `left`.k = o.`Group` JOIN b ON b.k = `left`.k"
    analysis = analyse(text, known)
    for seed in range(4):
        staging = Staging(analysis, random_choice(analysis, random.Random(seed)))
        for unit in staging.units:
            statement = Rendered(staging, unit).spark
            assert not re.search(r"(?<!`)\b(left|odd table|group)\b", statement)


def test_statements_are_the_callers_own(small):
    _, known = small
    analysis = analyse("SELECT a.x FROM a JOIN b ON a.k = b.k", known)
    staging = Staging(analysis, random_choice(analysis, random.Random(0)))
    first = staging.statement(staging.units[-1])
    before = first.sql()
    first.set("where", None)
    first.find(type(first)).set("expressions", [])
    assert staging.statement(staging.units[-1]).sql() == before
