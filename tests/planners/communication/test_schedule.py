"""The list scheduler against the thesis' worked examples, and what holds for every schedule."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.communication.dag import CommOp, ComputeOp, Dependency, TrainingDag
from ebbflow.planners.communication.schedule import (
    ExecutionOption,
    PlannedMotif,
    by_priority,
    critical_path,
    fifo,
    lifo,
    schedule,
)
from ebbflow.planners.errors import OptionError
from tests.planners.communication.fixtures import DLRM, HAND_ORDER, MOTIVATING, MOTIVATING_OPTIONS, dlrm_plan

GREEDY = {name: some[0] for name, some in MOTIVATING_OPTIONS.items()}
TCP = {**GREEDY, "a": MOTIVATING_OPTIONS["a"][1]}


@pytest.mark.parametrize(
    ("plan", "order", "strict", "makespan"),
    [
        (GREEDY, "bcda", "channel", 11.0),
        (GREEDY, "abcd", "channel", 12.0),
        (TCP, "abcd", "channel", 9.5),
        (TCP, "bcda", "start", 10.0),
        (TCP, "bcda", "channel", 9.5),
        (TCP, "adbc", "channel", 13.0),
    ],
)
def test_the_motivating_example(
    plan: dict[str, ExecutionOption], order: str, strict: Any, makespan: float
) -> None:
    found = schedule(MOTIVATING, plan, by_priority(*order), strict=strict, iterations=1)
    assert found.makespan == pytest.approx(makespan)


def test_the_critical_path_finds_the_motivating_example_s_optimum() -> None:
    assert schedule(MOTIVATING, TCP, iterations=1).makespan == pytest.approx(9.5)


@pytest.mark.parametrize(
    ("rule", "strict", "early", "plan", "period", "idle"),
    [
        (fifo, "channel", False, dlrm_plan(), 103.5, 0.514),
        (lifo, "no", False, dlrm_plan(), 100.0, 0.497),
        (by_priority(*HAND_ORDER), "no", False, dlrm_plan(0.62, bottom=2), 84.24, 0.403),
        (fifo, "channel", False, dlrm_plan(1.15, 1, 4), 83.19, 0.395),
        (critical_path, "no", True, dlrm_plan(), 77.90, 0.354),
        (critical_path, "no", True, dlrm_plan(1.15, 1, 4), 69.30, 0.274),
        (critical_path, "no", True, dlrm_plan(1.15, 1, 1), 79.69, None),
    ],
    ids=["FIFO", "LIFO", "HO", "S-Exec", "S-Sched", "Syndicate", "unsplit"],
)
def test_periods_of_the_dlrm_that_fits_model_a2(
    rule: Any, strict: Any, early: bool, plan: dict[str, ExecutionOption], period: float, idle: float | None
) -> None:
    found = schedule(DLRM.prefetched() if early else DLRM, plan, rule, strict=strict)
    assert found.period == pytest.approx(period, abs=0.1)
    if idle is not None:
        assert found.idle == pytest.approx(idle, abs=0.001)


@st.composite
def problems(draw: st.DrawFn) -> tuple[TrainingDag, dict[str, ExecutionOption]]:
    """Return a random DAG with a plan."""
    seconds = st.floats(0.1, 5)
    blocks = [ComputeOp(f"k{i}", draw(seconds)) for i in range(draw(st.integers(1, 5)))]
    comm, dependencies, plan = [], [], {}
    for i, before in enumerate(
        sorted(draw(st.lists(st.integers(0, len(blocks) - 1), min_size=1, max_size=5)))
    ):
        name = f"c{i}"
        comm.append(CommOp(name, "all-reduce", 1.0, 4, draw(st.booleans())))
        dependencies.append(Dependency(f"k{before}", name))
        if before + 1 < len(blocks) and draw(st.booleans()):
            dependencies.append(Dependency(name, f"k{draw(st.integers(before + 1, len(blocks) - 1))}"))
        else:
            dependencies.append(Dependency(name, f"k{draw(st.integers(0, len(blocks) - 1))}", lag=1))
        motifs = tuple(
            PlannedMotif(
                draw(seconds), (draw(st.integers(0, 1)),), (k - 1,) if k and draw(st.booleans()) else ()
            )
            for k in range(draw(st.integers(1, 3)))
        )
        plan[name] = ExecutionOption("x", motifs)
    return TrainingDag(tuple(blocks), tuple(comm), tuple(dependencies)), plan


@pytest.mark.parametrize(
    ("rule", "strict"), [(critical_path, "no"), (fifo, "channel"), (fifo, "start"), (lifo, "no")]
)
@given(problem=problems())
def test_nothing_begins_before_what_it_waits_for_and_no_channel_is_used_twice(
    problem: tuple[TrainingDag, dict[str, ExecutionOption]], rule: Any, strict: Any
) -> None:
    dag, plan = problem
    found = schedule(dag, plan, rule, strict=strict, iterations=4)
    assert len(found.starts) == 4 * (len(dag.compute) + sum(len(one.motifs) for one in plan.values()))
    begins: dict[tuple[int, str], float] = {}
    ends: dict[tuple[int, str], float] = {}
    for node, start in found.starts.items():
        at = node.iteration, node.op
        begins[at] = min(begins.get(at, start), start)
        ends[at] = max(ends.get(at, 0.0), found.ends[node])
        if node.motif >= 0:
            for i in plan[node.op].motifs[node.motif].after:
                assert start >= found.ends[node._replace(motif=i)]
    for edge in dag.edges:
        for i in range(edge.lag, 4):
            assert begins[i, edge.after] >= ends[i - edge.lag, edge.before]
    for channel in (0, 1):
        used = sorted(
            (start, found.ends[node])
            for node, start in found.starts.items()
            if node.motif >= 0 and channel in plan[node.op].motifs[node.motif].channels
        )
        assert all(one[1] <= other[0] for one, other in pairwise(used))
    load = max(
        [dag.compute_seconds]
        + [
            sum(m.seconds for one in plan.values() for m in one.motifs if channel in m.channels)
            for channel in (0, 1)
        ]
    )
    assert found.makespan >= 4 * load - 1e-9


def test_an_order_that_waits_for_itself_is_refused() -> None:
    with pytest.raises(OptionError, match="must not contradict the DAG; f2 can never begin"):
        schedule(
            TrainingDag(
                MOTIVATING.compute, MOTIVATING.comm, (*MOTIVATING.dependencies, Dependency("b", "f2"))
            ),
            GREEDY,
            by_priority("d", "b", "a", "c"),
            strict="channel",
            iterations=1,
        )


def test_a_plan_that_leaves_a_collective_out_is_refused() -> None:
    with pytest.raises(OptionError, match="the plan has no option for 'd'"):
        schedule(MOTIVATING, {name: GREEDY[name] for name in "abc"})


@pytest.mark.parametrize(
    ("compute", "comm", "edges", "message"),
    [
        ((), (), (), "must have a block of compute; got none"),
        ((ComputeOp("k", -1),), (), (), "seconds of k must be >= 0 and finite; got -1"),
        ((ComputeOp("k", 1), ComputeOp("k", 1)), (), (), "must be unique; got 'k' twice"),
        ((ComputeOp("k", 1),), (CommOp("c", "all-reduce", 1, 0),), (), "ranks of c must be >= 1; got 0"),
        ((ComputeOp("k", 1),), (), (Dependency("k", "x"),), "names 'x', which the DAG does not have"),
        (
            (ComputeOp("k", 1),),
            (CommOp("c", "all-reduce", 1, 2),),
            (Dependency("k", "c"), Dependency("c", "k")),
            "must have no circle; got ",
        ),
    ],
)
def test_a_dag_that_is_none_is_refused(compute: Any, comm: Any, edges: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        TrainingDag(compute, comm, edges)
