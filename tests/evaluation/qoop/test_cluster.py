"""Many queries on one cluster in virtual time."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Resources, Share
from ebbflow.planners.query.plan.qep import QueryExecutionPlan
from ebbflow.planners.query.running.packing import simulate
from tests.evaluation.qoop.carbyne import Carbyne
from tests.evaluation.qoop.cluster import ClusterSimulator
from tests.evaluation.qoop.drf import DRF
from tests.evaluation.qoop.ledger import Scheduler
from tests.evaluation.qoop.maxmin import MaxMinFair
from tests.evaluation.qoop.runs import Run, Submission
from tests.evaluation.qoop.sjf import SJF
from tests.evaluation.qoop.tetris import Tetris
from tests.planners.query.replanning_cases import fig_2_4, plan, queries, stage

ONE = (Resources(4, 64),)
BAG = (plan("bag", stage("X", tasks=8)),)
SCHEDULERS: list[Callable[[], Scheduler]] = [
    DRF,
    MaxMinFair,
    SJF,
    lambda: SJF(remaining=True),
    Tetris,
    Carbyne,
]


def run(
    *submissions: Submission,
    scheduler: Callable[[], Scheduler] = MaxMinFair,
    policy: str = "volcano",
    machines: tuple[Resources, ...] = ONE,
    **options: float,
) -> Run:
    return ClusterSimulator(submissions, machines, scheduler(), policy, **options).run()  # type: ignore[arg-type]


def finishes(result: Run) -> list[float]:
    return [o.finish for o in result.outcomes]


# --- worked examples ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheduler", "ends", "jain", "windows"),
    [
        # seconds 0, 1, 2, 3:  A 4, 2, 2;  B -, 2, 2, 4
        (DRF, [3, 4], 1.0, 2),
        (MaxMinFair, [3, 4], 1.0, 2),
        # A 4, 4;  B -, -, 4, 4: in second 1 one of two has everything
        (SJF, [2, 4], 0.5, 1),
    ],
)
def test_two_bags_of_tasks_share_four_cores(
    scheduler: Callable[[], Scheduler], ends: list[float], jain: float, windows: int
) -> None:
    result = run(Submission("A", BAG, 0), Submission("B", BAG, 1), scheduler=scheduler, window=1)
    assert finishes(result) == ends
    assert (result.jain, result.jain_windows) == (pytest.approx(jain), windows)
    assert result.honoured == pytest.approx(jain)
    assert (result.makespan, result.used, result.tasks) == (4, 16, 16)
    assert [o.seconds for o in result.outcomes] == [ends[0], ends[1] - 1]


def test_a_weight_is_a_larger_share() -> None:
    machine = (Resources(6, 64),)
    result = run(Submission("A", BAG, 0), Submission("B", BAG, 0, weight=2), machines=machine)
    assert finishes(result) == [3, 2]  # A 2, 2, 4; B 4, 4


FILLER = Submission("filler", (plan("f", stage("F", tasks=2)),), 0)


@pytest.mark.parametrize(
    ("policy", "hysteresis", "finish", "plans"),
    [
        ("clarinet", 0.15, 7, ("(AB)(CD)",)),
        ("qoop", 0.15, 6, ("(AB)(CD)", "(AC)(BD)")),  # at second 1: 5 s against 6 s
        ("qoop", 0.2, 7, ("(AB)(CD)",)),
        ("volcano", 0.15, 9, ("((AB)C)D",)),
    ],
)
def test_a_query_told_that_another_ended_changes_its_plan(
    policy: str, hysteresis: float, finish: float, plans: tuple[str, ...]
) -> None:
    query = Submission("q", fig_2_4(), 0)  # QOOP, figure 2.4: 2 cores, then 4 from second 1
    result = run(query, FILLER, policy=policy, hysteresis=hysteresis, feedback=True)
    outcome = result.outcomes[0]
    assert (outcome.finish, outcome.plans) == (finish, plans)
    assert outcome.aborted == (2 if len(plans) > 1 else 0)  # AB and CD had run for a second each
    assert outcome.switches == len(plans) - 1


def test_without_feedback_nobody_changes_plans() -> None:
    result = run(Submission("q", fig_2_4(), 0), FILLER, policy="qoop")
    assert result.outcomes[0].plans == ("(AB)(CD)",)
    assert result.decisions == 2


def test_tasks_of_a_stage_that_was_stopped_are_not_run_again() -> None:
    # 2 cores: 10 s against 11; 4 cores from second 1: 8 against 6.5; 2 again from 1.5: 9 against 10.5
    long = plan("long", stage("N", tasks=8), stage("S", ("N",), duration=6, key="s1"))
    wide = plan("wide", stage("W", tasks=14, duration=1.5), stage("S", ("W",), duration=0.5, key="s2"))
    result = run(
        Submission("first", (long, wide), 0),
        Submission("other", (plan("o", stage("O", tasks=2)),), 0),
        Submission("third", (plan("t", stage("T", tasks=40)),), 1.5),
        policy="qoop",
        feedback=True,
        hysteresis=0.1,
    )
    outcome = result.outcomes[0]
    assert outcome.plans == ("long", "wide", "long")
    assert outcome.aborted == 4 * 0.5
    # two tasks of N ended in second 1, the other six run two by two from 1.5 on
    assert outcome.finish == 1.5 + 3 + 6


def test_tasks_are_placed_on_machines_not_on_the_sum_of_them() -> None:
    two = (Resources(3, 16), Resources(3, 16))
    tasks = (plan("p", stage("X", tasks=3, cores=2)),)
    assert finishes(run(Submission("A", tasks, 0), machines=two)) == [2]  # 6 cores, yet two at a time
    assert finishes(run(Submission("A", tasks, 0), machines=(Resources(6, 16),))) == [1]


def test_latency_passes_outside_the_cluster() -> None:
    late = (plan("p", stage("X", tasks=4, latency=2), stage("Y", ("X",), latency=1)),)
    result = run(Submission("A", late, 1), Submission("B", BAG, 1))
    # B has all four cores for 2 s while X has not begun
    assert finishes(result) == [1 + 2 + 1 + 1 + 1, 1 + 2]


def test_a_share_smaller_than_a_task_holds_nobody_up() -> None:
    large = (plan("p", stage("X", tasks=1, cores=4)),)
    result = run(*(Submission(f"q{n}", large, 0) for n in range(6)), policy="clarinet")
    assert finishes(result) == [1, 2, 3, 4, 5, 6]


def test_an_idle_gap_between_queries_is_no_trouble() -> None:
    result = run(Submission("A", BAG, 10), Submission("B", BAG, 1000))
    assert finishes(result) == [12, 1002]
    assert result.makespan == 992
    assert result.active == pytest.approx(1.0)


def test_impossible_submissions_are_named() -> None:
    with pytest.raises(OptionError, match="A has tasks of up to 5 cores"):
        run(Submission("A", (plan("p", stage("X", cores=5)),), 0))
    with pytest.raises(OptionError, match="arrival of A"):
        run(Submission("A", BAG, -1))


# --- properties ---------------------------------------------------------------------------------------------------


@given(queries(), st.sampled_from([4, 8]))
def test_a_query_alone_on_a_machine_takes_as_long_as_estimated(
    plans: tuple[QueryExecutionPlan, ...], cores: int
) -> None:
    machine = Resources(cores, 16)
    result = run(Submission("q", plans, 0), machines=(machine,), policy="clarinet")
    best = min(simulate(p, Share(0, machine, machine, 1)).seconds for p in plans)
    assert result.outcomes[0].finish == pytest.approx(best, abs=1e-9)
    # and nothing changes while nothing happens
    again = run(Submission("q", plans, 0), machines=(machine,), policy="qoop", feedback=True)
    assert again.outcomes[0].switches == 0
    assert again.outcomes[0].finish == pytest.approx(best, abs=1e-9)


arrivals = st.lists(st.tuples(queries(), st.integers(0, 40)), min_size=1, max_size=5)


def submitted(drawn: list[tuple[tuple[QueryExecutionPlan, ...], int]]) -> list[Submission]:
    return [Submission(f"q{n}", plans, float(at)) for n, (plans, at) in enumerate(drawn)]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@settings(max_examples=25)
@given(arrivals, st.sampled_from(["volcano", "clarinet"]))
def test_every_query_ends_and_no_work_is_lost_or_done_twice(
    scheduler: Callable[[], Scheduler],
    drawn: list[tuple[tuple[QueryExecutionPlan, ...], int]],
    policy: str,
) -> None:
    machines = (Resources(4, 8), Resources(2, 8))
    submissions = submitted(drawn)
    result = run(*submissions, scheduler=scheduler, policy=policy, machines=machines)
    work = 0.0
    for submission, outcome in zip(submissions, result.outcomes, strict=True):
        (chosen,) = [p for p in submission.plans if p.id == outcome.plans[0]]
        work += chosen.total_work
        assert outcome.seconds >= chosen.critical_path - 1e-9
        assert len(outcome.plans) == 1
    assert result.used == pytest.approx(work)
    assert result.used <= 6 * result.makespan + 1e-9
    assert 0 < result.jain <= 1
    assert 0 < result.honoured <= 1 + 1e-12


@given(arrivals)
def test_replanned_queries_all_end_with_a_plan_of_their_own(
    drawn: list[tuple[tuple[QueryExecutionPlan, ...], int]],
) -> None:
    machines = (Resources(4, 8), Resources(4, 8))
    submissions = submitted(drawn)

    def once() -> Run:
        return run(*submissions, policy="qoop", feedback=True, machines=machines, hysteresis=0.0)

    result = once()
    for submission, outcome in zip(submissions, result.outcomes, strict=True):
        assert set(outcome.plans) <= {p.id for p in submission.plans}
        assert submission.at <= outcome.finish < float("inf")
        assert outcome.aborted >= 0
    assert once() == result  # equal inputs, equal runs
