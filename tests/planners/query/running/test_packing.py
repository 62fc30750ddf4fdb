"""List scheduling of remaining tasks."""

import time
from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.model import Resources, Share
from ebbflow.planners.model.capacity import ARRIVAL, WARM
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage
from ebbflow.planners.query.plan.state import ExecutionState, RunningStage
from ebbflow.planners.query.running.execution import Execution
from ebbflow.planners.query.running.packing import simulate, stage_seconds
from ebbflow.planners.query.running.progress import propagate, whole
from ebbflow.planners.query.running.replanner import Replanner
from tests.planners.query.replanning_cases import Engine, fig_2_4, output, plan, queries, share, shares, stage


@pytest.mark.parametrize(("cores", "times"), [(2, [9, 7, 10]), (4, [9, 7, 5])])
def test_the_three_plans_of_figure_2_4_take_the_published_times(cores: int, times: list[float]) -> None:
    assert [simulate(p, share(cores)).seconds for p in fig_2_4()] == times


def test_the_schedule_tells_when_each_stage_starts_and_finishes() -> None:
    schedule = simulate(fig_2_4()[1], share(2))
    assert schedule.start == {"AB": 0, "CD": 0, "ABCD": 3}
    assert schedule.finish == {"AB": 3, "CD": 3, "ABCD": 7}


def test_a_share_without_cores_takes_for_ever() -> None:
    assert simulate(fig_2_4()[0], share(0, 0, nodes=0)).seconds == inf


def test_a_task_larger_than_the_largest_node_takes_for_ever_and_is_named() -> None:
    big = plan("q", stage("A", memory=5), stage("AB", ("A",), memory=1))
    assert simulate(big, share(4, 8, nodes=1)).seconds == 2
    schedule = simulate(big, share(4, 8, nodes=2))
    assert (schedule.seconds, schedule.misfit) == (inf, "A")


def test_a_task_larger_than_a_fraction_of_the_cluster_takes_for_ever() -> None:
    half = Share(0, Resources(1, 4), Resources(4, 16), nodes=1)
    assert simulate(plan("q", stage("A", cores=2)), half).seconds == inf


def test_network_counts_only_where_the_share_offers_it() -> None:
    hungry = plan("q", stage("A", tasks=2, network=80))
    metered = Share(0, Resources(4, 16, 0, 100), Resources(4, 16, 0, 100), nodes=1)
    assert simulate(hungry, share(4, 16)).seconds == 1
    assert simulate(hungry, metered).seconds == 2


def test_latency_passes_before_the_first_task_and_occupies_no_core() -> None:
    delayed = plan("q", stage("A", latency=5, duration=1), stage("B", tasks=5), stage("AB", ("A", "B")))
    assert simulate(delayed, share(1)).finish == {"A": 6, "B": 5, "AB": 7}


def test_the_better_aligned_task_starts_first_and_ties_go_to_the_longer_path() -> None:
    by_size = plan("q", stage("A", duration=1), stage("B", cores=2), stage("C", ("A", "B")))
    assert simulate(by_size, share(2)).finish == {"B": 1, "A": 2, "C": 3}
    by_rank = plan("q", stage("A"), stage("B"), stage("BC", ("B",)), stage("ABC", ("A", "BC")))
    assert simulate(by_rank, share(1)).finish == {"B": 1, "A": 2, "BC": 3, "ABC": 4}


def test_memory_limits_how_many_tasks_run_at_once() -> None:
    assert simulate(plan("q", stage("A", tasks=6, memory=4)), share(8, 8)).seconds == 3


def test_the_first_tasks_of_a_stage_on_cold_cores_take_its_warm_up_longer_until_they_are_warm() -> None:
    wide = plan("q", warming(stage("A", tasks=4)), warming(stage("AB", ("A",), tasks=4)))
    assert simulate(wide, share(4)).finish == {"A": 1, "AB": 2}
    assert simulate(wide, replace(share(4), cold=4)).finish == {"A": 4, "AB": 8}
    assert simulate(wide, replace(share(4), cold=1)).finish == {"A": 4, "AB": 8}
    late = plan("q", stage("A", tasks=4, duration=WARM), warming(stage("AB", ("A",), tasks=4)))
    assert simulate(late, replace(share(4), cold=4)).finish == {"A": WARM, "AB": WARM + 1}
    assert simulate(wide, replace(share(4), cold=0.2)).finish == {"A": 1, "AB": 2}  # all but warm
    narrow = plan("q", warming(stage("A", tasks=1)), warming(stage("AB", ("A",), tasks=4)))
    assert simulate(narrow, replace(share(4), cold=1)).finish == {"A": 1, "AB": 5}
    many = plan("q", warming(stage("A", tasks=40)))
    assert (
        simulate(many, replace(share(4), cold=4)).seconds == 13
    )  # rounds are not skipped while some are slow
    assert simulate(many, replace(share(4), cold=1)).seconds == pytest.approx(11)


def test_absent_cores_take_tasks_when_they_have_come() -> None:
    wide = plan("q", stage("A", tasks=4, duration=1), stage("AB", ("A",), tasks=4, duration=ARRIVAL))
    assert simulate(wide, share(4)).finish == {"A": 1, "AB": 1 + ARRIVAL}
    assert simulate(wide, replace(share(4), absent=2)).finish == {"A": 2, "AB": 2 * ARRIVAL}
    assert simulate(wide, replace(share(4), absent=4)).finish == {"A": ARRIVAL + 1, "AB": 2 * ARRIVAL + 1}
    waits = replace(share(4), absent=2, arrival=1.5)
    assert simulate(wide, waits).finish == {"A": 2, "AB": 2 + ARRIVAL}
    assert (waits.waited(9.0), replace(waits, arrival=ARRIVAL).waited(9.0)) == (0.75, ARRIVAL / 2)
    soon = plan("q", stage("A", tasks=2, duration=1))
    assert simulate(soon, replace(share(4), absent=2)).finish == {"A": 1}  # two are enough
    seen = RunningStage(wide.stages[0], 0, 4, 0, task_seconds_left=0.5, tasks_running=4)
    state = ExecutionState(wide, running={"A": seen})
    assert simulate(propagate(wide, state), replace(share(4), absent=2)).finish["A"] == 0.5
    new = plan("q", warming(stage("A", tasks=2)), warming(stage("AB", ("A",), tasks=2, latency=ARRIVAL)))
    assert simulate(new, replace(share(4), absent=2, cold=2)).finish == {"A": 1, "AB": 5 + ARRIVAL}


def test_cold_cores_that_come_cost_stages_their_warm_up_that_began_before() -> None:
    long = plan("q", warming(stage("A", tasks=10, duration=4)))
    assert simulate(long, replace(share(4), absent=2)).seconds == 14  # two at 0, 4, 8, and two at 6, 10
    assert simulate(long, replace(share(4), absent=2, cold=2)).seconds == 16  # those at 6 end at 13
    nine = plan("q", warming(stage("A", tasks=9, duration=4)))
    ends = [simulate(nine, replace(share(5), absent=1, cold=cold)).seconds for cold in (0, 1)]
    assert ends == [10, 13]
    few = plan("q", warming(stage("A", tasks=4, duration=3)))
    assert simulate(few, replace(share(4), absent=2, cold=2)).seconds == 6  # over before those come


@given(
    st.integers(1, 40), st.floats(0.1, 9.0), st.sampled_from([1, 2, 4, 8]), st.floats(0, 1), st.floats(0, 1)
)
def test_the_more_is_absent_the_later_a_stage_ends(
    tasks: int, duration: float, cores: int, one: float, other: float
) -> None:
    single = plan("q", stage("A", tasks=tasks, duration=duration))
    less, more = sorted((one, other))
    times = [simulate(single, replace(share(cores), absent=cores * part)).seconds for part in (0, less, more)]
    assert times[0] <= times[1] + 1e-9
    assert times[1] <= times[2] + 1e-9
    assert times[2] <= ARRIVAL + times[0] + 1e-9


def warming(one: Stage) -> Stage:
    return replace(one, warm_up=3.0)


def test_a_stage_alone_takes_its_warm_up_where_its_tasks_meet_cold_cores() -> None:
    one = warming(stage("A", tasks=2, latency=0.5))
    assert [stage_seconds(one, 4, cold) for cold in (0, 0.5, 1, 4)] == [1.5, 2.25, 3, 4.5]
    assert stage_seconds(one, 1, 0) == 2.5


def test_a_limit_on_parallel_stages_holds_back_the_shorter_path() -> None:
    wide = plan("q", stage("A"), stage("B", duration=2), stage("AB", ("A", "B")))
    assert simulate(wide, share(8)).seconds == 3
    assert simulate(wide, share(8), max_parallel_stages=1).finish == {"B": 2, "A": 3, "AB": 4}


def test_tasks_in_flight_end_early_and_those_that_lost_their_node_start_again() -> None:
    long = stage("A", tasks=4, duration=10)
    running = RunningStage(long, 0, 4, 0, task_seconds_left=3, tasks_running=4)
    remaining = propagate(plan("q", long), ExecutionState(plan("q", long), running={"A": running}))
    assert simulate(remaining, share(4)).seconds == 3
    assert simulate(remaining, share(2)).seconds == 13


def test_a_finished_plan_takes_no_time() -> None:
    done = plan("q", stage("A"))
    state = ExecutionState(done, checkpoints={"A": output("A")})
    assert simulate(propagate(done, state), share(1)).seconds == 0


@given(queries(most_plans=1), shares(), st.sampled_from([0, 1, 2]))
def test_the_estimate_equals_the_completion_of_a_task_by_task_simulation(
    plans: tuple[QueryExecutionPlan, ...], capacity: Share, limit: int
) -> None:
    expected = simulate(plans[0], capacity, limit)
    execution = Execution(plans, plans[0], "single", Replanner(plans), max_parallel_stages=limit)
    engine = Engine(execution, capacity)
    engine.begin()
    engine.run()
    assert engine.finished_at == pytest.approx(expected.seconds, abs=1e-9)
    assert engine.completed == pytest.approx(expected.finish, abs=1e-9)


@st.composite
def bags(draw: st.DrawFn) -> QueryExecutionPlan:
    """Many tasks of different shapes that compete, so that the best aligned stage changes midway."""
    leaves = [
        stage(
            f"l{i}",
            tasks=draw(st.integers(1, 60)),
            cores=draw(st.integers(1, 4)),
            memory=draw(st.integers(0, 8)),
            duration=draw(st.integers(1, 6)) / 2,
        )
        for i in range(draw(st.integers(2, 4)))
    ]
    return plan("q", *leaves, stage("sink", tuple(s.output_fp for s in leaves)))


@given(bags(), st.sampled_from([8, 16, 32]), st.sampled_from([8, 16, 64]))
def test_batches_of_tasks_give_the_same_schedule_as_single_tasks(
    bag: QueryExecutionPlan, cores: int, memory: int
) -> None:
    capacity = share(cores, memory)
    engine = Engine(Execution([bag], bag, "single", Replanner([bag])), capacity)
    engine.begin()
    engine.run()
    assert simulate(bag, capacity).finish == pytest.approx(engine.completed, abs=1e-9)


@given(queries(most_plans=1, latency=False), shares(), st.integers(0, 12))
def test_the_estimate_stays_exact_while_the_plan_proceeds_on_lockstep_waves(
    plans: tuple[QueryExecutionPlan, ...], capacity: Share, steps: int
) -> None:
    execution = Execution(plans, plans[0], "single", Replanner(plans), max_parallel_stages=1)
    engine = Engine(execution, capacity)
    engine.begin()
    expected = execution.expected(0).estimate.seconds
    now = min(steps / 3, expected)
    engine.run(until=now)
    assert execution.finished or now + execution.expected(now).estimate.seconds == pytest.approx(expected)


@given(st.integers(1, 400), st.integers(1, 9), st.integers(1, 9))
def test_a_single_stage_takes_its_number_of_waves(tasks: int, cores: int, duration: int) -> None:
    waves = -(-tasks // cores)
    one = plan("q", stage("A", tasks=tasks, duration=duration / 4))
    assert simulate(one, share(cores)).seconds == pytest.approx(waves * duration / 4, abs=1e-9)


@given(st.integers(1, 60), st.integers(1, 8), st.integers(1, 9))
def test_a_larger_share_never_slows_a_bag_of_tasks(tasks: int, cores: int, duration: int) -> None:
    one = whole(plan("q", stage("A", tasks=tasks, duration=duration)))
    assert simulate(one, share(cores + 1)).seconds <= simulate(one, share(cores)).seconds


def ten_stages(tasks: int) -> QueryExecutionPlan:
    """A bushy plan whose branches overlap."""
    leaves = [stage(f"l{i}", tasks=tasks, duration=1 + i / 7, memory=1 + i / 10) for i in range(5)]
    joins = [stage("j0", ("l0", "l1"), tasks=tasks, memory=1)]
    for i in range(1, 4):
        joins.append(stage(f"j{i}", (f"j{i - 1}", f"l{i + 1}"), tasks=tasks, memory=1.5, duration=0.7))
    return plan("q", *leaves, *joins, stage("sink", ("j3",)))


@pytest.mark.parametrize("tasks", [16, 200])
def test_a_ten_stage_plan_is_estimated_within_two_milliseconds(tasks: int) -> None:
    remaining, capacity = whole(ten_stages(tasks)), share(8, 24, nodes=2)
    times = []
    for _ in range(15):
        begin = time.perf_counter()
        simulate(remaining, capacity)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.002
