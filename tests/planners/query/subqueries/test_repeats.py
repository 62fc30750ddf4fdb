"""Joins that a query repeats: computed once, the rows stay, and it is done only where it pays."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_reduction import filled  # noqa: F401  (fixture)

from ebbflow.planners.model import Share, Work
from ebbflow.planners.query.costs.cost import SPARK
from ebbflow.planners.query.plan.analysis import Analysis
from ebbflow.planners.query.planner import QueryPlanner
from ebbflow.planners.query.subqueries.known import AnalyzedChain
from ebbflow.planners.query.subqueries.repeats import shared_joins
from tests.planners.query.plan.test_staging import HARD, TPCH, small, tpch  # noqa: F401  (fixtures)
from tests.planners.query.random_queries import random_repeats
from tests.planners.query.statements import NOW, analyse, random_choice, reference, run
from tests.planners.query.test_planner import KNOWN
from tests.sweeps import spread

EAGER = replace(SPARK, rates=Work(built_rows=1.0, sorted_rows=1.0, tasks=1.0), latency=0.0)  # copies are free
SHARE = Share.uniform(3, 12, nodes=3)


def shared(known, text):
    """Return the query with its shared joins; ``None`` where nothing is shared."""
    before = analyse(text, known)
    chain = shared_joins(before.chain, AnalyzedChain(before, known, EAGER, {}))
    return None if chain is before.chain else Analysis.of(chain, known, "run")


def agrees(connection, known, text):
    """Tell whether something was shared; assert that the rows stay what they were."""
    after = shared(known, text)
    if after is None:
        return False
    # DuckDB 2.0.0 mixes up the columns of joins that it shares
    connection.execute("SET disabled_optimizers = 'common_subplan'")
    expected = reference(connection, text)
    for seed in range(2):
        assert run(connection, after, random_choice(after, random.Random(seed))).rows == expected, text
    return True


@given(st.integers(0, 10**9))
def test_a_random_query_keeps_its_rows(filled, seed):  # noqa: F811
    agrees(*filled, random_repeats(random.Random(seed)))


def test_random_queries_do_share_joins(filled):  # noqa: F811
    _, known = filled
    found = [shared(known, random_repeats(random.Random(seed))) for seed in range(16)]
    assert sum(one is not None for one in found) >= 2


@pytest.mark.parametrize("never", ["1 = 0", "FALSE"])
@pytest.mark.parametrize("first", [True, False])
def test_what_only_one_join_asks_stays_with_it(filled, never, first):  # noqa: F811
    one, other = "SELECT a.x AS o FROM a JOIN b ON a.k = b.k", "SELECT b.y AS o FROM a JOIN b ON a.k = b.k"
    arms = (f"{one} AND {never}", other) if first else (one, f"{other} AND {never}")
    assert agrees(*filled, " UNION ALL ".join(arms))


@pytest.mark.parametrize("text", spread(HARD, 3, 2), ids=range(len(HARD)))
def test_a_hard_query_keeps_its_rows(small, text):  # noqa: F811
    agrees(*small, text)


@pytest.mark.parametrize("path", TPCH, ids=lambda p: p.stem)
def test_a_benchmark_query_keeps_its_rows(tpch, path):  # noqa: F811
    assert agrees(*tpch, path.read_text().strip().rstrip(";")) == (path.stem == "q11")


def stages(text, scale):
    known = replace(KNOWN, tables={name: larger(table, scale) for name, table in KNOWN.tables.items()})
    planner = QueryPlanner(text, known, SPARK, now=NOW, salt="run")
    planner.sample({})
    return planner.candidates(SHARE)[0].stages


def larger(table, scale):
    found = table.statistics
    if table.name in ("nation", "region"):
        return table
    columns = {
        c: replace(s, distinct=s.distinct * scale if c.endswith("key") else s.distinct)
        for c, s in found.columns.items()
    }
    return replace(
        table, statistics=replace(found, rows=found.rows * scale, bytes=found.bytes * scale, columns=columns)
    )


Q11 = next(p for p in TPCH if p.stem == "q11").read_text()


def test_the_stock_of_a_nation_is_joined_once():
    joined, result = stages(Q11, 20)
    assert joined.statement.spark.count("partsupp AS") == 1
    assert "partsupp" not in result.tables
    assert result.inputs == (joined.output_fp,)
    assert result.statement.spark.count(" AS _b1") == 2


def test_a_join_that_takes_no_time_is_repeated():
    (result,) = stages(Q11, 0.01)
    assert result.statement.spark.count("partsupp AS") == 2


SAME = "SELECT {} FROM orders o, customer c WHERE o.o_custkey = c.c_custkey AND {}"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("c.c_acctbal > 1", "another condition"),
        ("c.c_acctbal > 0 AND o.o_totalprice > 5", "one condition more"),
        ("c.c_acctbal > rand()", "random numbers"),
    ],
)
def test_joins_that_differ_stay_apart(other, why):
    text = SAME.format("o.o_totalprice", "c.c_acctbal > 0") + " UNION ALL "
    shares = analyse(text + SAME.format("c.c_acctbal", "c.c_acctbal > 0"), KNOWN)
    assert (
        len(shared_joins(shares.chain, AnalyzedChain(shares, KNOWN, EAGER, {})).views)
        == len(shares.chain.views) + 1
    )
    apart = analyse(text + SAME.format("c.c_acctbal", other), KNOWN)
    assert shared_joins(apart.chain, AnalyzedChain(apart, KNOWN, EAGER, {})) is apart.chain, why
