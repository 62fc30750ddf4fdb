"""Which aggregator gets which task: the examples, the literal reading's mistakes, and the exact optimum."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.aggregation.assignment import (
    LITERAL,
    RECOMMENDED,
    HeuristicOptions,
    assign_job,
    assign_task,
    by_execution,
    place_tasks,
)
from ebbflow.planners.aggregation.cyclic_schedule import performance_loss
from ebbflow.planners.aggregation.exact import execution_need, least_max_loss, max_loss
from ebbflow.planners.aggregation.model import AggregationTask, AggregatorPool, JobProfile
from ebbflow.planners.errors import OptionError
from tests.planners.aggregation.pools import placed, profile, profiles

D = {"J1": 6, "J2": 12, "J3": 5, "a": 10, "b": 10}
EXAMPLES = [
    ([("J1", 2), ("J2", 3)], [0, 0], [(12, 7, 5)], [0, 0]),
    ([("J3", 1), ("J2", 3)], [0, 1], [(5, 1, 4), (12, 3, 9)], [0, 1]),
    ([("J2", 3), ("J3", 1)], [0, 1], [(12, 3, 9), (5, 1, 4)], [0, 0]),
    ([("J2", 9), ("J1", 2)], [0, 1], [(12, 9, 3), (6, 2, 4)], [0, 0]),
    ([("a", 6), ("a", 7), ("b", 3), ("b", 4)], [0, 1, 1, 0], [(10, 10, 0), (10, 10, 0)], [0, 1, 1, 0]),
]


def _run(tasks: list[tuple[str, int]], options: HeuristicOptions) -> tuple[list[int], AggregatorPool]:
    """Place tasks one by one in their order."""
    pool, where = AggregatorPool(), []
    for i, (job, execution) in enumerate(tasks):
        if job not in pool.profiles:
            pool.register(JobProfile(job, D[job], ()))
        task = AggregationTask(job, str(i), execution)
        one = assign_task(pool, task, options)
        chosen = pool.allocate() if one is None else one
        pool.aggregators[chosen].add(task)
        where.append(chosen)
    return where, pool


@pytest.mark.parametrize(("tasks", "where", "states", "literal"), EXAMPLES)
def test_runs_of_the_heuristic(
    tasks: list[tuple[str, int]], where: list[int], states: list[tuple[int, int, int]], literal: list[int]
) -> None:
    chosen, pool = _run(tasks, RECOMMENDED)
    assert (chosen, placed(pool)) == (where, states)
    assert _run(tasks, LITERAL)[0] == literal


def test_what_the_literal_reading_overlooks() -> None:
    assert max_loss(_run([("J2", 3), ("J3", 1)], LITERAL)[1]) == Fraction(1, 6)
    assert placed(_run([("J2", 9), ("J1", 2)], LITERAL)[1]) == [(12, 13, -1)]


def test_a_greater_limit_lets_trainings_share() -> None:
    pool = AggregatorPool()
    assign_job(pool, profile("J3", 5, [1]), HeuristicOptions(Fraction(1, 5)))
    result = assign_job(pool, profile("J2", 12, [3]), HeuristicOptions(Fraction(1, 5)))
    assert result is not None
    assert (result.where, placed(pool)) == ({"J200": 0}, [(12, 5, 7)])


def test_the_source_counts_no_execution_where_another_aggregator_stretches_a_training() -> None:
    tasks = [
        (AggregationTask("J3", "x", 1), 0),
        (AggregationTask("J3", "y", 1), 1),
        (AggregationTask("J2", "z", 3), 1),
    ]
    assert execution_need(tasks, D, literal=True)[0] == 0
    assert execution_need(tasks, D)[0] == 1


def test_a_training_that_needs_more_than_it_requested_runs_alone() -> None:
    pool = AggregatorPool()
    assign_job(pool, profile("a", 10, [3]))
    result = assign_job(pool, profile("b", 10, [9, 9, 9], servers=2))
    assert result is not None
    assert (result.private, result.allocated, result.overloaded) == (True, (1, 2), (1,))
    assert result.where == {"b00": 1, "b01": 2, "b02": 1}


def test_a_training_without_room_is_not_placed() -> None:
    pool = AggregatorPool()
    assert assign_job(pool, profile("a", 10, [3, 4]), max_new=0) is None
    assert not pool.profiles
    assert not pool.aggregators


def test_a_single_task_longer_than_the_iteration_is_an_overload() -> None:
    pool = AggregatorPool()
    result = assign_job(pool, profile("a", 10, [12, 3], servers=2))
    assert result is not None
    assert (result.overloaded, result.private, len(pool)) == ((0,), False, 2)


@given(profiles(), st.sampled_from([Fraction(1, 20), Fraction(1, 10), Fraction(3, 10)]))
def test_no_aggregator_is_overloaded_and_no_training_loses_more_than_the_limit(
    jobs: list[JobProfile], limit: Fraction
) -> None:
    pool, private = AggregatorPool(), set()
    for job in jobs:
        result = assign_job(pool, job, HeuristicOptions(limit))
        assert result is not None
        private |= set(result.allocated) if result.private else set()
        assert sorted(key for key in pool.where() if key[0] == job.job_id) == sorted(t.key for t in job.tasks)
        assert len(pool) <= sum(one.requested_servers for one in pool.profiles.values())
    for one in pool.aggregators:
        assert one in private or pool.busy_us(one) <= pool.cycle_us(one)
        for iteration in pool.iterations(one).values():
            assert performance_loss(pool.cycle_us(one), iteration) < limit


@given(profiles(), st.sampled_from([RECOMMENDED, LITERAL, HeuristicOptions(count_repeats=False)]))
def test_placing_many_tasks_is_placing_them_one_by_one(
    jobs: list[JobProfile], options: HeuristicOptions
) -> None:
    together, single = AggregatorPool(), AggregatorPool()
    for job in jobs:
        together.register(job)
        single.register(job)
        assert place_tasks(together, job, by_execution(job.tasks), options, max_new=len(job.tasks))
        for task in by_execution(job.tasks):
            one = assign_task(single, task, options)
            single.aggregators[single.allocate() if one is None else one].add(task)
        assert together.where() == single.where()


@given(profiles(max_jobs=3, max_tasks=2))
def test_the_optimum_is_at_most_the_heuristic(jobs: list[JobProfile]) -> None:
    pool = AggregatorPool()
    for job in jobs:
        pool.register(job)
        place_tasks(pool, job, by_execution(job.tasks), max_new=6)
    if len(pool) > 3:
        return
    tasks = [task for job in jobs for task in job.tasks]
    best = least_max_loss(tasks, {job.job_id: job.iteration_us for job in jobs}, len(pool))
    assert best is not None
    assert best <= max_loss(pool)


def test_an_exact_assignment_has_few_tasks() -> None:
    with pytest.raises(OptionError, match="at most 10 tasks and 4 aggregators, not 11 and 1"):
        least_max_loss(profile("a", 20, [1] * 11).tasks, {"a": 20}, 1)
    assert least_max_loss(profile("a", 20, [11, 11]).tasks, {"a": 20}, 1) is None


def test_profiles_refuse_what_breaks_their_rules() -> None:
    with pytest.raises(OptionError, match="execution_us of tensor 't' must be positive, not 0"):
        AggregationTask("a", "t", 0)
    with pytest.raises(OptionError, match="unique"):
        JobProfile("a", 5, (AggregationTask("a", "t", 1),) * 2)
    with pytest.raises(OptionError, match="must not hold a task of 'b'"):
        JobProfile("a", 5, (AggregationTask("b", "t", 1),))
    with pytest.raises(OptionError, match="loss_limit must be above 0 and below 1, not 1"):
        HeuristicOptions(Fraction(1))
    pool = AggregatorPool()
    pool.register(profile("a", 5, [1]))
    with pytest.raises(OptionError, match="'a' must be registered only once"):
        pool.register(profile("a", 5, [1]))
