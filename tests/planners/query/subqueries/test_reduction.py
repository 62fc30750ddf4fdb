"""Correlated subqueries told what they are asked for: the rows stay, and conditions appear only where they pay."""

import random
from dataclasses import replace

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.model import Catalogue, ColumnStatistics, Share, Table, TableStatistics, Work
from ebbflow.planners.query.costs.cost import DUCKDB, SPARK
from ebbflow.planners.query.plan.analysis import Analysis
from ebbflow.planners.query.planner import QueryPlanner
from ebbflow.planners.query.subqueries.factoring import factored
from ebbflow.planners.query.subqueries.known import AnalyzedChain
from ebbflow.planners.query.subqueries.reduction import reduced
from tests.planners.query.plan.test_staging import HARD, TPCH, small, tpch  # noqa: F401  (fixtures)
from tests.planners.query.random_queries import fill, random_query
from tests.planners.query.statements import NOW, analyse, catalogue_of, random_choice, reference, run
from tests.sweeps import spread

# nothing costs anything but the rows that a condition would keep out: every condition that can be added pays
EAGER = replace(SPARK, rates=Work(aggregated_rows=1.0), latency=0.0)


def rewritten(text, known, *, factor):
    """Return the analyses before and after, with every condition that is possible."""
    before = analyse(text, known)
    going_by = AnalyzedChain(before, known, EAGER, {})
    chain = factored(before.chain, going_by) if factor else before.chain
    chain = reduced(chain, going_by)
    return before, before if chain is before.chain else Analysis.of(chain, known, "run")


def agrees(connection, known, text, expected):
    changed = False
    for factor in (False, True):
        before, after = rewritten(text, known, factor=factor)
        if after is not before:
            changed = True
            for seed in range(2):
                choice = random_choice(after, random.Random(seed))
                assert run(connection, after, choice).rows == expected, text
    return changed


@pytest.fixture(scope="module")
def filled():
    connection = duckdb.connect()
    fill(connection, random.Random(7))
    yield connection, catalogue_of(connection)
    connection.close()


@given(st.integers(0, 10**9))
def test_a_random_query_keeps_its_rows(filled, seed):
    connection, known = filled
    text = random_query(random.Random(seed))
    agrees(connection, known, text, reference(connection, text))


def test_random_queries_do_get_conditions(filled):
    _, known = filled
    found = (rewritten(random_query(random.Random(seed)), known, factor=True) for seed in range(30))
    assert any(after is not before for before, after in found)


@pytest.mark.parametrize("text", spread(HARD, 3, 1), ids=range(len(HARD)))
def test_a_hard_query_keeps_its_rows(small, text):  # noqa: F811
    connection, known = small
    agrees(connection, known, text, reference(connection, text))


CORRELATED = [p for p in TPCH if p.stem in {"q2", "q4", "q17", "q20", "q21", "q22"}]


@pytest.mark.parametrize("path", CORRELATED, ids=lambda p: p.stem)
def test_a_benchmark_query_keeps_its_rows(tpch, path):  # noqa: F811
    connection, known = tpch
    text = path.read_text().strip().rstrip(";")
    assert agrees(connection, known, text, reference(connection, text))


def test_a_comparison_that_converts_makes_no_values_equal():
    connection = duckdb.connect()
    for name, columns, rows in (
        ("o", "k INT, z INT", "(1, 100), (2, 200)"),
        ("t", "s VARCHAR, z INT", "('1', 5), ('2', 6)"),
        ("i", "s VARCHAR, y INT", "('1', 1), ('01', 2), ('2', 3)"),
    ):
        connection.execute(f"CREATE TABLE {name}({columns}); INSERT INTO {name} VALUES {rows}")
    text = "SELECT o.z FROM o, t WHERE o.k = t.s AND t.z = 5 AND 2 = (SELECT count(*) FROM i WHERE i.s = o.k)"
    assert reference(connection, text) == {(100,): 1}
    agrees(connection, catalogue_of(connection), text, reference(connection, text))


# --- where conditions pay ---------------------------------------------------------------------------------

COLUMNS = {
    "part": {"p_key": 200_000, "p_brand": 25, "p_size": 50},
    "line": {"l_part": 200_000, "l_order": 1_500_000, "l_supp": 10_000, "l_quantity": 50},
    "supplier": {"s_key": 10_000, "s_nation": 25},
}
SHARE = Share.uniform(3, 12, nodes=3)
ROWS = {"part": 200_000.0, "line": 6_000_000.0, "supplier": 10_000.0}


def large():
    tables = {}
    for name, columns in COLUMNS.items():
        known = {c: ColumnStatistics(float(d), 0.0, 1.0, float(d), 4.0) for c, d in columns.items()}
        statistics = TableStatistics(ROWS[name], ROWS[name] * 4.0 * len(columns), known)
        tables[name] = Table(name, tuple((c, "int") for c in columns), "1", statistics)
    return Catalogue(tables)


def statements(text, model=SPARK, fractions=None, share=SHARE):
    planner = QueryPlanner(text, large(), model, now=NOW, salt="run")
    planner.sample(fractions or {})
    plan = planner.candidates(share)[0]
    return [stage.statement.spark for stage in plan.stages]


AVERAGE = (
    "SELECT sum(l.l_quantity) AS s FROM line l, part p WHERE p.p_key = l.l_part AND {} "
    "AND l.l_quantity < (SELECT avg(m.l_quantity) FROM line m WHERE m.l_part = p.p_key)"
)


def test_a_selective_outer_filter_reaches_the_subquery():
    (sql,) = statements(AVERAGE.format("p.p_brand = 3 AND p.p_size = 5"))
    assert "m.l_part IN (SELECT /*+ BROADCAST(p) */ p.p_key FROM part AS p WHERE" in sql


def test_the_filter_of_an_equal_column_serves_as_well():
    text = AVERAGE.format("p.p_brand = 3").replace("m.l_part = p.p_key", "m.l_part = l.l_part")
    assert "m.l_part IN (SELECT /*+ BROADCAST(p) */ p.p_key" in statements(text)[0]


@pytest.mark.parametrize("condition", ["p.p_size > 0", "p.p_brand <> 3"])
def test_a_filter_that_keeps_most_values_is_left_alone(condition):
    (sql,) = statements(AVERAGE.format(condition))
    assert " IN (SELECT" not in sql


def test_a_measured_fraction_decides():
    text = AVERAGE.format("p.p_brand = 3")
    (sql,) = statements(text, fractions={"part p": {"3 = p.p_brand": 0.98}})
    assert " IN (SELECT" not in sql


def test_duckdb_reduces_by_itself():
    (sql,) = statements(AVERAGE.format("p.p_brand = 3"), DUCKDB)
    assert " IN (SELECT" not in sql


def test_a_volatile_filter_is_not_evaluated_twice():
    (sql,) = statements(AVERAGE.format("p.p_brand = 3 * rand()"))
    assert " IN (SELECT" not in sql


EXISTS = (
    "SELECT count(*) AS c FROM line l, supplier s WHERE l.l_supp = s.s_key AND s.s_nation = {} "
    "AND EXISTS (SELECT * FROM line m WHERE m.l_order = l.l_order AND m.l_supp <> l.l_supp)"
)


def test_joins_that_leave_few_values_are_computed_once_and_told():
    # on one core it does not pay to compute them twice
    first, second = statements(EXISTS.format("3"), share=Share.uniform(1, 4, nodes=1))
    assert "JOIN" in first
    assert "JOIN" not in second
    assert "m.l_order IN (SELECT /*+ BROADCAST(_b1) */ _b1.l__l_order FROM" in second


def test_joins_that_leave_most_values_stay_in_their_statement():
    (sql,) = statements(EXISTS.replace("= {}", "> 0"))
    assert " IN (SELECT" not in sql


def test_a_small_set_of_values_is_broadcast():
    text = "SELECT l.l_order FROM line l, part p WHERE l.l_part = p.p_key AND l.l_supp IN ({})"
    few = text.format("SELECT s.s_key FROM supplier s WHERE s.s_nation = 3")
    many = text.format("SELECT m.l_order FROM line m WHERE m.l_part > 0")
    assert "IN (SELECT /*+ BROADCAST(s) */" in statements(few)[0]
    assert "IN (SELECT m." in statements(many)[0]
    assert "IN (SELECT s." in statements(few.replace("l.l_supp IN", "l.l_supp NOT IN"))[0]
