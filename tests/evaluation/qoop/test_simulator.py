"""One query in simulation: what it must agree with, and what it must never do (QOOP, section 10.5)."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.query.plan.state import ExecutionState, RunningStage, StageOutput
from ebbflow.planners.query.running.packing import simulate
from tests.evaluation.qoop.profiles import Profile
from tests.evaluation.qoop.simulator import Options, backtracking_depth, run
from tests.evaluation.qoop.workloads import Family, Testbed, synthetic, varied
from tests.planners.query.replanning_cases import plan, queries, stage

BED = Testbed(machines=1, per_machine=8, memory=4.0)


def family(*plans: object) -> Family:
    return Family("q", tuple(plans))  # type: ignore[arg-type]


levels = st.lists(st.integers(2, 8), min_size=1, max_size=8)


@given(queries(), st.integers(2, 8))
def test_at_constant_capacity_a_query_takes_as_long_as_estimated(
    plans: tuple[object, ...], capacity: int
) -> None:
    for one in plans:
        outcome = run(family(one), Profile.constant(capacity), Options("clarinet"), testbed=BED)
        expected = simulate(one, BED.share(capacity)).seconds  # type: ignore[arg-type]
        assert outcome.seconds == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(queries(), st.integers(2, 8), st.floats(0.01, 0.5))
def test_nothing_switches_while_the_capacity_stays(plans: tuple[object, ...], level: int, h: float) -> None:
    # the share is announced again and again, but it is the same
    times = tuple(float(i) for i in range(40))
    profile = Profile(times, (float(level),) * 40, 40.0)
    options = Options("qoop", hysteresis=h, min_share_delta=0.05)
    assert run(family(*plans), profile, options, testbed=BED).switches == []
    assert run(family(*plans), Profile.constant(level), Options("qoop"), testbed=BED).decisions == 0


@given(queries(), levels, st.booleans())
def test_every_query_ends_and_no_completed_task_is_done_twice(
    plans: tuple[object, ...], seen: list[int], backtracking: bool
) -> None:
    profile = Profile.every(1.5, [float(v) for v in seen])
    options = Options("qoop", hysteresis=0.0, backtracking=backtracking)
    whole = family(*plans)
    one, two = run(whole, profile, options, testbed=BED), run(whole, profile, options, testbed=BED)
    assert one == two
    most = {s.physical_key: s.tasks for p in whole.plans for s in p.stages}
    if backtracking:
        assert one.tasks <= sum(most.values())
    fixed = run(whole, profile, Options("clarinet"), testbed=BED)
    assert fixed.switches == []
    chosen = next(p for p in whole.plans if p.id == fixed.plan)
    assert fixed.tasks == sum(s.tasks for s in chosen.stages)


def test_completed_tasks_outlast_a_revocation_and_the_least_progressed_are_lost() -> None:
    # 8 tasks of 4 s: 4 at once, 2 containers leave at 5 s, one second into the second wave
    one = family(plan("p", stage("A", tasks=8, duration=4)))
    outcome = run(one, Profile((0.0, 5.0), (4.0, 2.0), 10.0), Options("clarinet"), testbed=BED)
    assert (outcome.lost, outcome.tasks, outcome.seconds) == (2, 8, 12.0)


def test_a_task_that_needs_the_memory_of_several_containers_takes_them() -> None:
    one = family(plan("p", stage("A", tasks=4, duration=1, memory=8)))
    assert run(one, Profile.constant(4), Options("clarinet"), testbed=BED).seconds == 2


def figure_2_4(h: float, *, policy: str = "qoop") -> float:
    plans = (
        plan(
            "left",
            stage("AB", duration=3),
            stage("ABC", ("AB",), duration=3),
            stage("ABCD", ("ABC",), duration=3),
        ),
        plan(
            "bushy",
            stage("AB", duration=3),
            stage("CD", duration=3),
            stage("ABCD", ("AB", "CD"), tasks=2, duration=4),
        ),
        plan(
            "wide",
            stage("AC", tasks=2, duration=2),
            stage("BD", tasks=2, duration=2),
            stage("ABCD", ("AC", "BD"), tasks=4, duration=3),
        ),
    )
    profile = Profile((0.0, 1.0), (2.0, 4.0), 2.0)
    return run(family(*plans), profile, Options(policy, hysteresis=h), testbed=BED).seconds


def test_figure_2_4() -> None:
    assert figure_2_4(0, policy="volcano") == 9
    assert figure_2_4(0, policy="clarinet") == 7
    assert figure_2_4(0.15) == 6
    assert figure_2_4(0.2) == 7


def test_a_plan_that_is_left_and_resumed_goes_on_where_it_was() -> None:
    # 1 task at a time suits "slow", which 2 containers make worse than "wide"; then it is 1 again
    slow = plan("slow", stage("A", tasks=10, duration=1, key="slow"))
    wide = plan("wide", stage("A", tasks=2, duration=2, cores=4, key="wide"))
    profile = Profile((0.0, 4.0, 5.0), (1.0, 8.0, 1.0), 9.0)
    options = Options("qoop", hysteresis=0.0)
    kept = run(family(slow, wide), profile, options, testbed=BED)
    lost = run(family(slow, wide), profile, replace(options, backtracking=False), testbed=BED)
    assert kept.seconds <= 10
    assert kept.seconds <= lost.seconds


def test_depth_is_how_far_back_the_nearest_reused_stage_is() -> None:
    old = plan("old", stage("A"), stage("AB", ("A",)), stage("ABC", ("AB",)), stage("ABCD", ("ABC",)))
    same = plan("same", stage("A"), stage("AB", ("A",)), stage("ABD", ("AB",)), stage("ABCD", ("ABD",)))
    other = plan("other", stage("C"), stage("CD", ("C",)), stage("ABCD", ("CD",)))
    done = {fp: StageOutput(fp, 1, 1) for fp in ("A", "AB")}
    running = {"ABC": RunningStage(old.by_fp["ABC"], 0.0, 1)}
    state = ExecutionState(old, done, running)
    assert backtracking_depth(state, old) == 0
    assert backtracking_depth(state, same) == 1
    assert backtracking_depth(state, other) == 3
    assert backtracking_depth(ExecutionState(old, done), same) == 0


def test_without_backtracking_consumed_outputs_are_computed_again() -> None:
    # "ab" has joined A and B when the capacity calls for "ac", which needs A once more
    ab = plan(
        "ab",
        stage("A", duration=2),
        stage("AB", ("A",), duration=2),
        stage("ABC", ("AB",), tasks=1, duration=40),
    )
    ac = plan(
        "ac",
        stage("A", duration=2),
        stage("AC", ("A",), tasks=8, duration=3),
        stage("ABC", ("AC",), tasks=8, duration=4, key="wide"),
    )
    profile = Profile((0.0, 5.0), (1.0, 8.0), 9.0)
    options = Options("qoop", hysteresis=0.0)
    kept = run(family(ab, ac), profile, options, testbed=BED)
    lost = run(family(ab, ac), profile, replace(options, backtracking=False), testbed=BED)
    assert [s.after for s in kept.switches] == [s.after for s in lost.switches] == ["ac"]
    assert lost.seconds == kept.seconds + 2


def test_a_query_that_fits_nowhere_is_refused_with_its_limit() -> None:
    huge = family(plan("p", stage("A", cores=9)))
    with pytest.raises(OptionError, match="limit"):
        run(huge, Profile.constant(8), Options("clarinet"), testbed=BED)


def test_random_queries_have_plans_that_trade_work_for_time() -> None:
    made = synthetic(np.random.default_rng(3), 2)
    again = synthetic(np.random.default_rng(3), 2)
    assert made == again
    bed = Testbed()
    for one in map(varied, made):
        assert len(one.plans) > 1
        cheap = min(one.plans, key=lambda p: p.total_work)
        short = min(one.plans, key=lambda p: simulate(p, bed.share(600)).seconds)
        assert cheap.total_work < short.total_work
        assert simulate(short, bed.share(600)).seconds < simulate(cheap, bed.share(600)).seconds
