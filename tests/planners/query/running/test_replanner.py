"""Stay, switch or wait."""

import time
from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Share
from ebbflow.planners.model.capacity import ARRIVAL
from ebbflow.planners.query.plan.qep import QueryExecutionPlan
from ebbflow.planners.query.plan.state import ExecutionState, ReplanDecision, RunningStage
from ebbflow.planners.query.running.baselines import clarinet
from ebbflow.planners.query.running.execution import Execution
from ebbflow.planners.query.running.replanner import (
    Replanner,
    Risk,
    assess,
    share_change,
    validate_options,
)
from tests.planners.query.replanning_cases import Engine, fig_2_4, output, plan, queries, share, shares, stage

PLANS = fig_2_4()
LEFT_DEEP, BUSHY, WIDE = PLANS


def at_one_second() -> ExecutionState:
    """The bushy plan of figure 2.4 one second after its start."""
    ab, cd, _ = BUSHY.stages
    running = {s.output_fp: RunningStage(s, 0, 1, 0, task_seconds_left=2, tasks_running=1) for s in (ab, cd)}
    return ExecutionState(BUSHY, running=running)


def decide(h: float, **options: float) -> ReplanDecision:
    return Replanner(PLANS, hysteresis=h, **options).decide(
        at_one_second(), share(4, revision=7), 1, "arrived: w2"
    )


def test_figure_2_4_switches_at_fifteen_percent() -> None:
    decision = decide(0.15)
    assert (decision.kind, decision.current, decision.chosen) == ("switch", BUSHY.id, WIDE.id)
    assert (decision.revision, decision.at, decision.trigger) == (7, 1, "arrived: w2")
    assert {e.plan_id: e.seconds for e in decision.estimates} == {BUSHY.id: 6, WIDE.id: 5, LEFT_DEEP.id: 8}
    assert decision.reason == (
        "switch: (AC)(BD) would finish in 5.0 s against 6.0 s of (AB)(CD), 17 % sooner, above the 15 % "
        "threshold; 0 checkpoints reused, 3 stages to run"
    )


def test_figure_2_4_stays_at_twenty_percent() -> None:
    decision = decide(0.20)
    assert (decision.kind, decision.chosen) == ("stay", BUSHY.id)
    assert decision.reason == (
        "stay: best alternative (AC)(BD) would finish in 5.0 s against 6.0 s, 17 % sooner, "
        "below the 20 % threshold"
    )


@pytest.mark.parametrize(("h", "end", "plans"), [(0.15, 6, 2), (0.20, 7, 1)])
def test_figure_2_4_runs_to_its_published_end(h: float, end: float, plans: int) -> None:
    engine = Engine(Execution(PLANS, None, "qoop", Replanner(PLANS, hysteresis=h)), share(2))
    engine.begin()
    engine.run(until=1)
    engine.resize(share(4, revision=1))
    engine.run()
    assert engine.finished_at == end
    assert len({d.chosen for d in engine.execution.decisions}) == plans
    assert sorted(engine.cancelled) == (["AB", "CD"] if plans == 2 else [])


def test_the_switch_cost_counts_against_alternatives_only() -> None:
    decision = decide(0.1, switch_cost=0.75)
    assert decision.kind == "stay"
    assert "5.8 s against 6.0 s" in decision.reason
    assert "0.8 s for switching included" in decision.reason


def test_a_saving_of_exactly_the_threshold_is_not_enough() -> None:
    ten, nine = plan("ten", stage("A", duration=10)), plan("nine", stage("B", duration=9))
    decision = Replanner([ten, nine], hysteresis=0.1).decide(ExecutionState(ten), share(1), 0, "t")
    assert decision.kind == "stay"
    assert decision.reason.endswith("10 % sooner, at the 10 % threshold")


def test_a_saving_close_to_the_threshold_is_shown_with_enough_digits() -> None:
    slow, fast = plan("slow", stage("A", duration=100)), plan("fast", stage("B", duration=85.2))
    decision = Replanner([slow, fast]).decide(ExecutionState(slow), share(1), 0, "t")
    assert "14.8 % sooner, below the 15 % threshold" in decision.reason


def test_ties_go_to_the_current_plan_then_to_less_work_then_to_the_id() -> None:
    def one(name: str, fp: str, tasks: int = 1, duration: float = 4) -> QueryExecutionPlan:
        return plan(name, stage(fp, tasks=tasks, duration=duration))

    costly, cheap, twin = one("a", "A", tasks=2), one("c", "B"), one("b", "C")
    current = one("z", "Z", duration=9)
    replanner = Replanner([costly, cheap, twin, current])
    assert replanner.decide(ExecutionState(current), share(2), 0, "t").chosen == "b"
    assert replanner.decide(ExecutionState(costly), share(2), 0, "t").kind == "stay"


def test_an_infinite_current_plan_is_left_whatever_the_threshold() -> None:
    big, small = plan("big", stage("A", memory=9)), plan("small", stage("B", duration=99))
    decision = Replanner([big, small], hysteresis=0.9).decide(ExecutionState(big), share(2, 8), 0, "t")
    assert (decision.kind, decision.chosen) == ("switch", "small")
    assert "stage A of big needs 1 cores and 9.00 GiB" in decision.reason


def test_without_nodes_every_plan_waits() -> None:
    decision = Replanner(PLANS).decide(ExecutionState(BUSHY), share(0, 0, nodes=0), 0, "left: w1")
    assert (decision.kind, decision.chosen) == ("wait", BUSHY.id)
    assert decision.reason == "wait: there is no usable node"
    assert {e.seconds for e in decision.estimates} == {inf}


def test_a_single_plan_stays() -> None:
    decision = Replanner([BUSHY]).decide(ExecutionState(BUSHY), share(2), 0, "t")
    assert decision.reason == "stay: (AB)(CD) is the only plan and would finish in 7.0 s"


def test_progress_counts_for_every_plan_that_can_use_it() -> None:
    state = ExecutionState(LEFT_DEEP, checkpoints={"AC": output("AC"), "BD": output("BD")})
    decision = Replanner(PLANS).decide(state, share(4), 0, "t")
    assert decision.chosen == WIDE.id
    assert next(e for e in decision.estimates if e.plan_id == WIDE.id).reused == 2


def last_join(duration: float, left: float) -> tuple[ExecutionState, QueryExecutionPlan]:
    """A running last join with ``left`` seconds to go, and a plan whose own form takes ``duration``."""
    running = plan("running", stage("AB"), stage("ABC", ("AB",), duration=50))
    own = plan("own", stage("AC"), stage("ABC", ("AC",), duration=duration))
    state = ExecutionState(
        running,
        checkpoints={"AB": output("AB"), "AC": output("AC")},
        running={"ABC": RunningStage(running.sink, 0, 1, 0, task_seconds_left=left, tasks_running=1)},
    )
    return state, own


def test_a_running_stage_in_another_form_is_adopted_when_that_is_sooner() -> None:
    state, own = last_join(duration=10, left=4)
    assessed = assess(own, state, share(1))
    assert (assessed.estimate.seconds, assessed.estimate.adopted, assessed.estimate.needed) == (4, 1, 0)


def test_a_running_stage_in_another_form_is_aborted_when_the_own_form_is_sooner() -> None:
    state, own = last_join(duration=10, left=40)
    assessed = assess(own, state, share(1))
    assert (assessed.estimate.seconds, assessed.estimate.adopted, assessed.estimate.needed) == (10, 0, 1)
    decision = Replanner([state.plan, own]).decide(state, share(1), 0, "t")
    assert (decision.kind, decision.chosen) == ("switch", "own")


def test_the_current_plan_keeps_what_runs() -> None:
    state, own = last_join(duration=10, left=40)
    assert assess(own, replace(state, plan=own), share(1)).estimate.seconds == 40


def under_way(done: int, spent: float = 0.0, tasks: int = 8) -> ExecutionState:
    """A stage of tasks of four seconds of which some are done and two run, and one more stage to come."""
    current = plan("current", stage("A", tasks=tasks, duration=4), stage("AB", ("A",), duration=6))
    flying = min(2, tasks - done)
    running = RunningStage(current.stages[0], 0, tasks, done, 4 - spent, flying, task_seconds_spent=spent)
    return ExecutionState(current, running={"A": running})


def against(state: ExecutionState, rival: QueryExecutionPlan, risk: Risk, cores: float = 2) -> ReplanDecision:
    return Replanner([state.plan, rival], risk=risk).decide(state, share(cores), 0, "t")


def test_whoever_discards_what_is_done_must_gain_as_much_as_may_be_missing() -> None:
    """Half of sixteen seconds is done: of what is left, 14 s, the rival saves 6 s and discards 8 s."""
    state, rival = under_way(4), plan("rival", stage("C", tasks=2, duration=8))
    assert against(state, rival, Risk()).kind == "switch"
    assert against(state, rival, Risk(error=1.25)).kind == "switch"  # 8 s and a fourth of 8 s
    decision = against(state, rival, Risk(error=2.0, cancelling=1.0))
    assert decision.kind == "stay"
    assert "rival in 17.0 s (9.0 s for what it discards included)" in decision.reason
    assert [e.seconds for e in decision.estimates] == [14, 8]


def test_a_stage_without_tasks_so_far_costs_nothing_to_cancel() -> None:
    """It is counted as running from the moment it is to start: before what a stage's end has shown is weighed."""
    new = RunningStage(stage("A", tasks=4, duration=1, latency=0.5), 0.0, 4)
    state = ExecutionState(plan("current", new.stage), running={"A": new})
    rival = plan("rival", stage("A", tasks=4, duration=0.6, key="other"))
    for running, kind, risk in (
        (new, "switch", 0.0),
        (replace(new, tasks_running=0, task_seconds_left=0.6, task_seconds_spent=0.4), "switch", 0.0),
        (replace(new, tasks_running=1), "stay", 1.0),
        (replace(new, tasks_running=0, tasks_done=1), "stay", 1.5),
        (replace(new, task_seconds_left=0.9, task_seconds_spent=0.1), "stay", 1.2),
    ):
        told = replace(state, running={"A": running})
        weighed = Risk(2.0, 1.0)
        assert weighed.seconds([running], 2) == pytest.approx(risk)
        assert against(told, rival, weighed).kind == kind


def test_a_switch_says_what_it_counted_for_what_it_discards() -> None:
    decision = against(under_way(1), plan("rival", stage("C", duration=1)), Risk(error=2.0))
    assert decision.kind == "switch"
    assert decision.reason.endswith("1 stage to run (2.0 s for what it discards included)")


def test_the_threshold_is_no_larger_for_the_wait_for_executors_that_start() -> None:
    """With all four cores 25 s against 20 s, a fifth; three of them take tasks 6 s later."""
    long, short = plan("long", stage("A", tasks=100)), plan("short", stage("B", tasks=80))
    late = replace(share(4), absent=3)
    assert (share(4).waited(9.0), late.waited(9.0), late.waited(2.0)) == (0, ARRIVAL * 0.75, 1.5)
    for cores, h, kind in ((share(4), 0.19, "switch"), (late, 0.19, "switch"), (late, 0.21, "stay")):
        decision = Replanner([long, short], hysteresis=h).decide(ExecutionState(long), cores, 0, "t")
        assert decision.kind == kind
    assert (
        "25.0 s against 30.0 s, 20 % sooner but for 4.5 s lost to executors that start, below"
        in decision.reason
    )


def test_what_a_rival_keeps_running_is_no_risk() -> None:
    state = under_way(4)
    rival = plan("rival", *state.plan.stages[:1], stage("AC", ("A",), duration=1))
    assert assess(rival, state, share(2), 0, risk=Risk(9.0, 9.0)).risk == 0
    assert against(state, rival, Risk(9.0, 9.0)).kind == "switch"


def test_a_running_stage_in_another_form_is_aborted_only_for_more_than_it_has_done() -> None:
    state, own = last_join(duration=10, left=20)
    begun = replace(state.running["ABC"], task_seconds_spent=30)
    state = replace(state, running={"ABC": begun})
    assert assess(own, state, share(1)).estimate.adopted == 0
    assessed = assess(own, state, share(1), risk=Risk(error=1.5))
    assert (assessed.estimate.adopted, assessed.risk) == (1, 0)


def test_slices_that_the_rival_takes_are_not_discarded() -> None:
    whole = replace(stage("A", tasks=4, duration=4), slicing=SimpleNamespace())  # type: ignore[arg-type]
    other = replace(whole, physical_key="other", duration=1)
    running = RunningStage(whole, 0, 4, 2, 1, tasks_running=1, task_seconds_spent=3, seconds_seen=11)
    state = ExecutionState(plan("one", whole), running={"A": running}, sliced={"A": 0.5})
    assessed = assess(plan("two", other), state, share(1), 0, risk=Risk(error=1.5))
    assert (assessed.estimate.adopted, assessed.risk) == (0, 1.5)  # of the task that runs


@given(
    queries(),
    shares(),
    shares(),
    st.integers(0, 40),
    st.floats(1.0, 4.0),
    st.floats(0.0, 2.0),
    st.floats(0, 0.5),
)
def test_a_switch_gains_more_than_what_it_discards_under_the_runs_error(
    plans: tuple[QueryExecutionPlan, ...],
    before: Share,
    after: Share,
    steps: int,
    error: float,
    cancelling: float,
    h: float,
) -> None:
    engine = Engine(Execution(plans, None, "qoop", Replanner(plans)), before)
    engine.begin()
    engine.run(until=steps / 4)
    assume(not engine.execution.finished)
    state = engine.execution.state(engine.now)
    replanner = Replanner(plans, hysteresis=h, risk=Risk(error, cancelling))
    decision = replanner.decide(state, after, engine.now, "t")
    seconds = {e.plan_id: e.seconds for e in decision.estimates}
    if decision.kind != "switch" or seconds[state.plan.id] == inf:
        return
    chosen = next(p for p in plans if p.id == decision.chosen)
    kept = assess(chosen, state, after, engine.now, risk=Risk(error, cancelling)).remaining.adopted
    cores = after.total.cores
    lost = [r for fp, r in state.running.items() if fp not in kept]
    work = sum(
        r.stage.demand.cores
        * (r.tasks_done * r.stage.duration + (r.tasks_running or 0) * r.task_seconds_spent)
        for r in lost
    )
    gain = seconds[state.plan.id] - seconds[decision.chosen]
    begun = any(r.tasks_done or r.tasks_running or r.task_seconds_spent for r in lost)
    assert gain >= (error - 1) * work / cores + cancelling * begun + h * seconds[state.plan.id] - 1e-6


@given(
    st.integers(1, 9),
    st.floats(0.5, 40),
    st.integers(1, 4),
    st.floats(1.0, 4.0),
    st.sampled_from([1, 2, 4, 8]),
)
def test_the_more_is_done_the_less_it_pays_to_discard_it(
    tasks: int, duration: float, width: int, error: float, cores: int
) -> None:
    rival = plan("rival", stage("C", tasks=width, duration=duration))
    states = [under_way(done, spent, tasks) for done in range(0, tasks, 2) for spent in (0.0, 1.0, 3.0)]
    kinds = [against(state, rival, Risk(error, 0.5), cores).kind for state in states]
    assert kinds == sorted(kinds, reverse=True)  # first those that switch, then those that stay


@given(queries(), shares(), shares(), st.sampled_from([0.05, 0.15, 0.3]), st.integers(0, 40))
def test_decisions_at_one_instant_settle_since_every_switch_saves_more_than_the_threshold(
    plans: tuple[QueryExecutionPlan, ...], before: Share, after: Share, h: float, steps: int
) -> None:
    """No endless A→B→A: a plan that was left is taken again only when it has become better."""
    replanner = Replanner(plans, hysteresis=h, min_share_delta=0)
    engine = Engine(Execution(plans, None, "qoop", replanner), before)
    engine.begin()
    engine.run(until=steps / 4)
    assume(not engine.execution.finished)
    left = inf
    for revision in range(1, 50):
        engine.resize(replace(after, revision=revision))
        decision = engine.execution.decisions[-1]
        seconds = {e.plan_id: e.seconds for e in decision.estimates}
        assert engine.execution.expected(engine.now).estimate.seconds == pytest.approx(
            seconds[decision.chosen]
        )
        if decision.kind == "stay":
            break
        assert seconds[decision.chosen] < (1 - h) * min(left, seconds[decision.current])
        left = seconds[decision.chosen]
    else:
        pytest.fail("still switching")


@given(queries(), shares(), st.sampled_from([0.05, 0.15, 0.3]))
def test_static_capacity_never_switches(
    plans: tuple[QueryExecutionPlan, ...], capacity: Share, h: float
) -> None:
    engine = Engine(Execution(plans, None, "qoop", Replanner(plans, hysteresis=h)), capacity)
    engine.begin()
    for step in range(1, 9):
        engine.run(until=step)
        if not engine.execution.finished:
            engine.resize(replace(capacity, revision=step))
    engine.run()
    assert engine.result is not None
    assert {d.kind for d in engine.execution.decisions} <= {"start", "stay"}
    assert {d.chosen for d in engine.execution.decisions} == {clarinet(plans, capacity).id}


@given(queries(), shares(), shares(), st.floats(0, 0.9), st.floats(0, 5))
def test_a_switch_always_saves_more_than_the_threshold(
    plans: tuple[QueryExecutionPlan, ...], before: Share, after: Share, h: float, cost: float
) -> None:
    replanner = Replanner(plans, hysteresis=h, switch_cost=cost)
    current = clarinet(plans, before)
    decision = replanner.decide(ExecutionState(current), after, 0, "t")
    seconds = {e.plan_id: e.seconds + (cost if e.plan_id != current.id else 0) for e in decision.estimates}
    best = min(seconds.values())
    if decision.kind == "switch":
        assert seconds[decision.chosen] == pytest.approx(best)
        assert seconds[decision.chosen] < (1 - h) * seconds[current.id]
    else:
        assert decision.chosen == current.id
        assert best >= (1 - h) * seconds[current.id] - 1e-6


def test_a_switch_saves_more_than_the_margin_too() -> None:
    ten, six = plan("ten", stage("A", duration=10)), plan("six", stage("B", duration=6))
    assert against(ExecutionState(ten), six, Risk(margin=3.9)).kind == "switch"
    decision = against(ExecutionState(ten), six, Risk(margin=4.0))
    assert decision.kind == "stay"
    assert decision.reason == (
        "stay: best alternative six would finish in 6.0 s against 10.0 s, 40 % sooner, "
        "but not by more than 4.00 s, which such short times may be off by"
    )
    big = plan("big", stage("A", memory=99))
    assert against(ExecutionState(big), six, Risk(margin=4.0)).kind == "switch", "it cannot continue"


@given(queries(), shares(), shares(), st.floats(0, 0.9), st.floats(0, 20))
def test_a_margin_only_keeps_plans_that_would_be_left_for_less(
    plans: tuple[QueryExecutionPlan, ...], before: Share, after: Share, h: float, margin: float
) -> None:
    state = ExecutionState(clarinet(plans, before))
    exact, careful = (
        Replanner(plans, hysteresis=h, risk=Risk(margin=least)).decide(state, after, 0, "t")
        for least in (0.0, margin)
    )
    seconds = {e.plan_id: e.seconds for e in exact.estimates}
    gain = seconds[exact.current] - seconds[exact.chosen]
    assert careful.chosen == (exact.chosen if gain > margin else exact.current)


def test_share_changes_below_the_threshold_are_insignificant() -> None:
    replanner = Replanner(PLANS, min_share_delta=0.05)
    assert not replanner.significant(share(100, 100), share(104, 104))
    assert replanner.significant(share(100, 100), share(100, 95))
    assert replanner.significant(share(0, 0), share(1, 1))
    assert Replanner(PLANS, min_share_delta=0).significant(share(4), share(4))


def test_a_change_of_the_largest_node_alone_is_a_change_of_the_share() -> None:
    assert share_change(share(4, 8, nodes=1), share(4, 8, nodes=2)) == 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((1.0, 0, 0), r"hysteresis must be in \[0, 1\).*got 1.0"),
        ((-0.1, 0, 0), "hysteresis"),
        ((float("nan"), 0, 0), "hysteresis"),
        ((0.1, -1, 0), "switch_cost must be >= 0 seconds and finite; got -1"),
        ((0.1, inf, 0), "switch_cost"),
        ((0.1, 0, 1.5), r"min_share_delta must be in \[0, 1\).*got 1.5"),
        ((0.1, 0, 0, -1), "max_parallel_stages must be >= 0.*got -1"),
    ],
)
def test_options_outside_their_rule_are_refused(options: tuple[float, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        validate_options(*options)  # type: ignore[arg-type]


def test_candidates_must_exist_and_have_different_ids() -> None:
    with pytest.raises(OptionError, match="at least one plan"):
        Replanner([])
    with pytest.raises(OptionError, match="more than once"):
        Replanner([BUSHY, BUSHY])


def test_eight_plans_of_eight_stages_are_decided_within_fifty_milliseconds() -> None:
    plans = []
    for number in range(8):
        stages = [stage(f"{number}.0", tasks=200, memory=1), stage("1", tasks=64, memory=1.5)]
        stages += [
            stage(
                f"{number}.{i}" if i < 7 else "sink", (f"{number}.{i - 1}" if i > 2 else "1", f"{number}.0")
            )
            for i in range(2, 8)
        ]
        plans.append(plan(f"q{number}", *stages))
    sink = replace(plans[0].sink, physical_key="elsewhere")
    state = ExecutionState(
        plans[0],
        running={
            "1": RunningStage(plans[0].stages[1], 0, 64, 3, 0.5, 4),
            "sink": RunningStage(sink, 0, 1, 0, 0.5, 1),
        },
    )
    replanner = Replanner(plans)
    times = []
    for _ in range(7):
        begin = time.perf_counter()
        replanner.decide(state, share(6, 24, nodes=3), 1, "t")
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.05
