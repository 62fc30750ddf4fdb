"""What is on offer to the re-planner: plans that trade work against width, memory and links."""

import math

import pytest
from statements import NOW
from test_planner import KNOWN, SHARE, TPCH, in_order, planner

from ebbflow.planners.model import Measured, Share
from ebbflow.planners.query.costs.cost import DUCKDB, NATIVE, SPARK, CostModel, JoinCostModel, Size
from ebbflow.planners.query.costs.operators import split_bytes
from ebbflow.planners.query.costs.stage_engines import StageEngines
from ebbflow.planners.query.orders.contrasts import contrasts
from ebbflow.planners.query.plan.qep import QueryExecutionPlan
from ebbflow.planners.query.plan.trees import is_linear
from ebbflow.planners.query.planner import PlannerOptions, QueryPlanner
from ebbflow.planners.query.running.packing import simulate


def broadcasts(plan: QueryExecutionPlan) -> int:
    """Return how many of a plan's joins are broadcast."""
    return plan.shape.count("⋈ᵇ")


def test_contrasts_are_unlike_the_share() -> None:
    share = Share.uniform(4, 8, 4, network=100)
    found = contrasts(share)
    assert found["partitioned"].largest.memory < share.largest.memory / 10
    assert found["partitioned"].link < share.link
    assert (found["broadcast"].nodes, found["broadcast"].link) == (1, 0.0)
    assert found["wide"].total.cores == 8 * share.total.cores
    assert found["wide"].link == share.link
    nothing = contrasts(Share.uniform(0, 0, 0))
    assert all(other.total.cores >= 1 for other in nothing.values())


@pytest.mark.parametrize("number", [5, 7, 9])
def test_plans_with_and_without_large_broadcasts_are_on_offer(number: int) -> None:
    plans = planner(number).candidates(SHARE)
    assert len(plans) <= 8
    assert min(map(broadcasts, plans)) + 2 <= max(map(broadcasts, plans))
    work = [plan.total_work for plan in plans]
    assert min(work) < 0.95 * max(work)


def test_bushy_and_linear_trees_are_on_offer() -> None:
    made = planner(5)
    plans = made.candidates(SHARE)
    linear = {all(is_linear(tree) for tree in made._choices[plan.id].trees.values()) for plan in plans}
    assert linear == {True, False}


@pytest.mark.parametrize("number", [3, 5, 9, 18, 21])
def test_the_best_plan_of_an_earlier_share_is_never_better_than_those_made_anew(number: int) -> None:
    """Planned anew for what capacity has become, the query has at least the plan that it had."""
    before = Share.uniform(6, 12, 6)
    made = planner(number)
    best = min(made.candidates(before), key=lambda plan: simulate(plan, before).seconds)
    for share in (Share.uniform(2, 1, 2), Share.uniform(6, 12, 6, network=60), Share.uniform(1, 2, 1)):
        plans = made.candidates(share, also=(best.id,))
        seconds = {plan.id: simulate(plan, share).seconds for plan in plans}
        assert math.isfinite(min(seconds.values()))
        assert min(seconds.values()) <= seconds[best.id]


@pytest.mark.parametrize("number", [3, 5, 9, 18])
def test_a_stage_keeps_all_cores_busy_however_few_columns_it_reads(number: int) -> None:
    """Files are split by all their bytes: as the engine cuts them, so are tasks counted."""
    share = Share.uniform(6, 12, 6)
    split = split_bytes(KNOWN.tables["lineitem"].statistics.bytes, 6, 0.0)
    reads = [s for p in planner(number).candidates(share) for s in p.stages if "lineitem" in s.tables]
    assert reads
    for stage in reads:
        assert stage.tasks >= math.ceil(KNOWN.tables["lineitem"].statistics.bytes / split) >= 6
        assert stage.work.tasks >= stage.tasks


def auto(number: int) -> QueryPlanner:
    text = (TPCH / f"q{number}.sql").read_text()
    options = PlannerOptions(cuts="every-join")
    return QueryPlanner(text, KNOWN, NATIVE, now=NOW, salt="run", options=options, rivals=(SPARK,))


def test_each_stage_takes_the_engine_by_which_it_is_sooner_done() -> None:
    for plan in auto(9).candidates(SHARE):
        assert {stage.engine for stage in plan.stages} <= {"native", "spark"}
        assert all("natively" in s.engine_reason and "by Spark SQL" in s.engine_reason for s in plan.stages)
    assert all(stage.engine == "" for plan in planner(9).candidates(SHARE) for stage in plan.stages)


def test_native_stages_share_a_table_that_few_build_and_exchange_what_many_would() -> None:
    """Each slice of a native stage builds all that it joins with: the more of them there are, the more is built."""
    sizes = (Size(1e9, 3e10), Size(1e8, 3e9), Size(1e8, 3e9))
    for cores, exchanges in ((2, False), (512, True)):
        share = Share.uniform(cores, 16.0 * cores, cores // 2)
        pricer = JoinCostModel(NATIVE, share)
        assert (pricer.sliced(*sizes, equality=True).exchanged > 0) is exchanges
        spark = JoinCostModel(SPARK, share).seconds("shuffle_hash", *sizes)
        assert pricer.seconds("shuffle_hash", *sizes) < spark
        assert not pricer.sliced(*sizes, equality=False).exchanged


def test_what_a_plan_was_costed_by_is_done() -> None:
    engines = StageEngines("auto")
    work = auto(3).candidates(SHARE)[0].sink.work
    assert not engines.choose(work, 2.0, "spark", "1 s natively, 0.5 s by Spark SQL expected").native
    assert engines.choose(work, 2.0, "native", "why").reason == "why"
    slow = [Measured("native", work, 500.0, 250.0, 2, 2.0)] * 20
    assert StageEngines("auto", slow).choose(work, 2.0, "native", "why").native


@pytest.mark.parametrize("model", [NATIVE, SPARK])
def test_tables_behind_links_are_waited_for_until_nodes_have_read_them(model: CostModel) -> None:
    """What one statement over all tables reads over a link, and how that is shared by more nodes."""
    text = (TPCH / "q6.sql").read_text()
    one, six, free = (
        Share.uniform(n, 2.0 * n, n, network=rate * n) for n, rate in ((1, 25), (6, 25), (6, 0))
    )

    def seconds(share: Share, tables: float) -> float:
        made = QueryPlanner(text, KNOWN, model.behind_links(tables, 0.0), now=NOW, salt="run")
        plan = made.single(share)
        assert plan.sink.waiting == pytest.approx(plan.sink.network * share.total.cores)
        return plan.sink.network

    lineitem = KNOWN.tables["lineitem"].statistics
    assert 0.0 < seconds(one, 1.0) < lineitem.bytes / 25e6
    assert seconds(six, 1.0) == pytest.approx(seconds(one, 1.0) / 6, rel=0.05)
    assert seconds(one, 0.5) == pytest.approx(seconds(one, 1.0) / 2, rel=0.05)
    assert seconds(six, 0.0) < 0.05 * seconds(six, 1.0)
    assert seconds(free, 1.0) == 0.0


def embedded(text: str, hazard: float = 0.0) -> tuple[QueryPlanner, tuple[QueryExecutionPlan, ...]]:
    made = QueryPlanner(text, KNOWN, DUCKDB, now=NOW, salt="r")
    return made, made.candidates(Share.uniform(1, 2, 4, hazard=hazard))


@pytest.mark.parametrize("number", [2, 5, 9, 15, 21])
def test_duckdb_alone_orders_the_joins_of_a_query_that_nothing_interrupts(number: int) -> None:
    made, (plan,) = embedded((TPCH / f"q{number}.sql").read_text())
    (stage,) = plan.stages
    assert stage.statement.duckdb == made.single(SHARE).stages[0].statement.duckdb
    assert stage.statement.spark != made.single(SHARE).stages[0].statement.spark


def test_an_embedded_query_that_may_be_interrupted_is_cut_on_offer() -> None:
    _, plans = embedded((TPCH / "q9.sql").read_text(), hazard=500.0)
    assert sum(len(plan.stages) == 1 for plan in plans) <= 1 < len(plans)
    for plan in plans:
        for stage in plan.stages[:-1]:
            assert "JOIN" in stage.statement.duckdb


def test_a_whole_embedded_query_is_the_same_plan_on_any_share() -> None:
    made, (plan,) = embedded((TPCH / "q3.sql").read_text())
    (again,) = made.candidates(Share.uniform(4, 64, 1), also=(plan.id,))
    assert (again.id, again.stages[0].physical_key) == (plan.id, plan.stages[0].physical_key)
    assert made.again(plan.id, SHARE, {}).stages[0].statement.duckdb == plan.stages[0].statement.duckdb


TWICE = """
    WITH v AS (SELECT l_suppkey, SUM(l_extendedprice) AS total FROM lineitem GROUP BY l_suppkey)
    SELECT a.l_suppkey FROM v AS a JOIN v AS b ON a.l_suppkey = b.l_suppkey WHERE a.total > b.total
"""


def test_duckdb_computes_a_view_once_that_a_query_reads_twice() -> None:
    _, (plan,) = embedded(TWICE)
    once = embedded(TWICE.replace("JOIN v AS b", "JOIN supplier AS b").replace("b.l_suppkey", "b.s_suppkey")
                    .replace("a.total > b.total", "a.total > 1"))[1][0]  # fmt: skip
    assert len(plan.stages) == 1
    assert plan.total_work < 1.5 * once.total_work
    for plans in (
        embedded(TWICE, hazard=5.0)[1],
        QueryPlanner(TWICE, KNOWN, SPARK, now=NOW, salt="r").candidates(SHARE),
    ):
        assert any(len(plan.stages) > 1 for plan in plans)


def test_derived_tables_that_a_text_repeats_are_one_view_for_duckdb() -> None:
    derived = "(SELECT l_suppkey, SUM(l_extendedprice) AS total FROM lineitem GROUP BY l_suppkey)"
    text = f"SELECT a.l_suppkey FROM {derived} a JOIN {derived} b ON a.l_suppkey = b.l_suppkey"
    _, (plan,) = embedded(text)
    assert plan.stages[0].statement.duckdb.count("GROUP BY") == 1


def test_a_division_that_was_begun_is_kept_where_nothing_interrupts_any_more() -> None:
    made = QueryPlanner((TPCH / "q3.sql").read_text(), in_order(), DUCKDB, now=NOW, salt="r")
    begun = dict.fromkeys(made.partial_fps, ("lineitem.l_orderkey, orders.o_orderkey", 4))
    made.keep_divided(begun)
    plans = made.candidates(Share.uniform(1, 2, 4))
    assert {s.slicing.slices for p in plans for s in p.stages if s.output_fp in begun} == {4}
