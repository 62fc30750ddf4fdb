"""Seconds to a query's end by nodes: the best of all plans, with what is done, and pruned without a change."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import plan, pool, stage

from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.scaling.deadline import DeadlineScaling, QueryCurve
from ebbflow.planners.model import Resources, Share
from ebbflow.planners.query.plan.qep import QueryExecutionPlan
from ebbflow.planners.query.plan.state import ExecutionState, RunningStage, StageOutput
from ebbflow.planners.query.running.replanner import assess

NODE = Resources(4.0, 16.0)
WIDE = plan("wide", stage("ab", tasks=40, seconds=10.0), stage("abc", ("ab",), tasks=40, seconds=10.0))
DEEP = plan("deep", stage("bc", tasks=4, seconds=30.0), stage("abc", ("bc",), tasks=8, seconds=20.0))


def curve(plans: list[QueryExecutionPlan], state: ExecutionState | None = None) -> QueryCurve:
    return QueryCurve(plans, state or ExecutionState(plans[0]), NODE, 0.0)


def test_it_is_the_best_plan_on_so_many_equal_nodes() -> None:
    found = curve([WIDE, DEEP])
    # on one node of 4 cores: wide 2 · 10 rounds of 10 s; deep 30 s and 2 rounds of 20 s
    assert found(1) == pytest.approx(70.0)
    # on ten: wide 2 rounds of 10 s; deep stays at 30 s and 20 s
    assert found(10) == pytest.approx(20.0)
    assert found(0) == inf


def test_the_fewest_nodes_for_a_query() -> None:
    target = DeadlineScaling(40.0).decide(pool(2, max_nodes=10), 0, curve([WIDE, DEEP]))
    assert target.nodes == 5  # wide: 2 · 2 rounds of 10 s
    none = DeadlineScaling(15.0).decide(pool(2, max_nodes=64), 0, curve([WIDE, DEEP]))
    assert "no number of nodes from 0 to 64 suffices" in none.reason
    assert none.nodes == 10


def test_what_is_finished_counts() -> None:
    done = ExecutionState(WIDE, {"ab": StageOutput("ab", 1, 1)})
    assert curve([WIDE], done)(1) == pytest.approx(100.0)


def test_a_task_that_fits_no_node_never_ends() -> None:
    large = plan("large", stage("a", tasks=1, seconds=1.0, memory=100.0))
    assert curve([large])(50) == inf
    kept = DeadlineScaling(60.0).decide(pool(3, max_nodes=8), 0, curve([large]))
    assert kept.nodes == 3
    assert "runs on none" in kept.reason


@st.composite
def plans(draw: st.DrawFn) -> QueryExecutionPlan:
    count = draw(st.integers(1, 4))
    stages = []
    for at in range(count):
        inputs = tuple(f"s{one}" for one in range(at) if at == count - 1 or draw(st.booleans()))
        stages.append(
            stage(
                f"s{at}" if at < count - 1 else "sink",
                tuple(name for name in inputs if name != "sink"),
                tasks=draw(st.integers(1, 30)),
                seconds=draw(st.floats(0.5, 20.0)),
                cores=draw(st.sampled_from([1.0, 2.0, 4.0])),
                memory=draw(st.sampled_from([1.0, 6.0, 16.0])),
            )
        )
    return plan(f"p{draw(st.integers(0, 10**6))}", *stages)


@given(st.lists(plans(), min_size=1, max_size=4, unique_by=lambda p: p.id), st.integers(1, 12), st.data())
def test_pruning_changes_no_result_and_the_bound_is_one(
    candidates: list[QueryExecutionPlan], nodes: int, data: st.DataObject
) -> None:
    current = candidates[0]
    names = [one.output_fp for one in current.stages[:-1]]
    done = {name: StageOutput(name, 1, 1) for name in names if data.draw(st.booleans())}
    running = {
        one.output_fp: RunningStage(one, 0.0, one.tasks, data.draw(st.integers(0, one.tasks)), 1.0)
        for one in current.stages
        if one.output_fp not in done and all(fp in done for fp in one.inputs) and data.draw(st.booleans())
    }
    state = ExecutionState(current, done, running)
    share = Share.uniform(NODE.cores * nodes, NODE.memory * nodes, nodes)
    best = min(assess(one, state, share, 0.0).estimate.seconds for one in candidates)
    found = QueryCurve(candidates, state, NODE, 0.0)
    assert found(nodes) == best
    assert found.bound(nodes) <= best


def test_bad_input_is_refused() -> None:
    with pytest.raises(OptionError, match="at least one plan"):
        QueryCurve([], ExecutionState(WIDE), NODE, 0.0)
    with pytest.raises(OptionError, match="cores and memory"):
        QueryCurve([WIDE], ExecutionState(WIDE), Resources(0.0, 1.0), 0.0)
    with pytest.raises(OptionError, match=">= 0"):
        curve([WIDE])(-1)
