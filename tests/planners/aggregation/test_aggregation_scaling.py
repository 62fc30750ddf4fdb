"""How the pool follows trainings: never more than needed, never a tensor lost, never a half-done release."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.aggregation.assignment import assign_job
from ebbflow.planners.aggregation.clusters import free_demand, may_start, select_cluster
from ebbflow.planners.aggregation.cyclic_schedule import performance_loss
from ebbflow.planners.aggregation.model import AggregatorPool, JobProfile
from ebbflow.planners.aggregation.scaling import (
    HybridScaler,
    ScaleResult,
    consolidate,
    drain,
    on_feedback,
    on_job_arrival,
    on_job_exit,
)
from ebbflow.planners.errors import OptionError
from tests.planners.aggregation.pools import profile, profiles


def _keys(jobs: list[JobProfile]) -> list[tuple[str, str]]:
    return sorted(task.key for job in jobs for task in job.tasks)


def test_feedback_adds_an_aggregator_and_exit_releases_it() -> None:
    """The case study: two, three while the second training runs, two again."""
    pool = AggregatorPool()
    on_job_arrival(pool, profile("vgg", 1200, [600, 300, 200, 200], servers=2))
    assert len(pool) == 2
    assert on_job_arrival(pool, profile("alex", 300, [30, 20, 20], servers=2)).allocated == ()
    assert on_feedback(pool, "alex", 0.05).allocated == ()
    result = on_feedback(pool, "alex", 0.22)
    assert (len(pool), result.allocated) == (3, (2,))
    assert {one for _, one in pool.placed("alex")} == {2}
    assert {move.target for move in result.moves} == {2}
    after = on_job_exit(pool, "alex")
    assert (len(pool), after.released, after.moves) == (2, (2,), ())


def test_feedback_stops_at_the_requested_servers() -> None:
    pool = AggregatorPool()
    on_job_arrival(pool, profile("a", 100, [10]))
    on_job_arrival(pool, profile("b", 100, [10]))
    assert on_feedback(pool, "b", 0.5).allocated == (1,)
    assert on_feedback(pool, "b", 0.5, own=[1]).allocated == ()
    with pytest.raises(OptionError, match="'c' is not registered"):
        on_feedback(pool, "c", 0.5)


def test_exit_packs_what_is_left() -> None:
    pool = AggregatorPool()
    for name, execution in (("a", 6), ("b", 5), ("c", 4), ("d", 3)):
        on_job_arrival(pool, profile(name, 10, [execution]))
    assert sorted(pool.where().values()) == [0, 0, 1, 1]
    assert (on_job_exit(pool, "a").released, len(pool)) == ((), 2)
    result = on_job_exit(pool, "b")
    assert len(pool) == 1
    assert len(result.released) == 1
    assert _keys([pool.profiles["c"], pool.profiles["d"]]) == sorted(pool.where())


@given(profiles(max_jobs=6), st.data())
def test_any_series_of_arrivals_and_exits_keeps_every_task_once(
    jobs: list[JobProfile], data: st.DataObject
) -> None:
    pool, running, private = AggregatorPool(), [], set()
    limit = Fraction(1, 10)
    for job in jobs:
        placed = on_job_arrival(pool, job)
        private |= set(placed.allocated) if placed.private else set()
        running.append(job)
        while running and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(running))
            running.remove(gone)
            before, where = set(pool.aggregators), pool.where()
            result = on_job_exit(pool, gone.job_id)
            assert set(pool.aggregators) == before - set(result.released)
            assert result.allocated == ()
            for move in result.moves:
                assert where[move.task.key] == move.source
                assert pool.where()[move.task.key] == move.target
        assert sorted(pool.where()) == _keys(running)
    for one in pool.aggregators:
        losses = [performance_loss(pool.cycle_us(one), own) for own in pool.iterations(one).values()]
        assert max(losses, default=Fraction(0)) < limit
        assert one in private or pool.load(one) <= 1


def test_an_aggregator_keeps_its_cycle_where_a_shorter_one_would_slow_those_that_stay() -> None:
    pool = AggregatorPool()
    for name, iteration in (("a", 200), ("b", 100), ("c", 66)):
        on_job_arrival(pool, profile(name, iteration, [10]))
    assert len(pool) == 1
    assert performance_loss(100, 66) > Fraction(3, 10)
    on_job_exit(pool, "a")
    assert pool.cycle_us(0) == 200
    on_job_exit(pool, "c")
    assert pool.cycle_us(0) == 100


def test_a_release_is_all_or_nothing() -> None:
    pool = AggregatorPool()
    for name, executions in (("a", [7]), ("b", [8]), ("c", [2, 3])):
        pool.register(job := profile(name, 10, executions))
        if name != "c":
            pool.aggregators[pool.allocate()].add(job.tasks[0])
    third = pool.allocate()
    for task in pool.profiles["c"].tasks:
        pool.aggregators[third].add(task)
    assert consolidate(pool).released == (third,)  # 3 beside the 7, 2 beside the 8
    before = pool.where()
    pool.register(more := profile("d", 10, [1]))
    last = pool.allocate()
    pool.aggregators[last].add(more.tasks[0])
    assert consolidate(pool) == ScaleResult()  # nothing has room for even the smallest
    assert pool.where() == {**before, ("d", "d00"): last}


def test_a_release_that_fails_half_way_moves_nothing() -> None:
    pool = AggregatorPool()
    for name, executions in (("a", [7]), ("b", [9]), ("c", [2, 3])):
        pool.register(job := profile(name, 10, executions))
        one = pool.allocate()
        for task in job.tasks:
            pool.aggregators[one].add(task)
    before = pool.where()
    assert consolidate(pool) == ScaleResult()  # 3 fits beside the 7, and then 2 fits nowhere
    assert pool.where() == before
    assert pool.allocate() == 3


@given(profiles(max_jobs=5), st.data())
def test_a_drain_leaves_nothing_behind(jobs: list[JobProfile], data: st.DataObject) -> None:
    pool = AggregatorPool()
    for job in jobs:
        on_job_arrival(pool, job)
    one = data.draw(st.sampled_from(sorted(pool.aggregators)))
    on_it = [key for key, where in pool.where().items() if where == one]
    plan = drain(pool, one, 100, 10)
    assert one not in pool.aggregators
    assert sorted(pool.where()) == _keys(jobs)
    assert sorted(move.task.key for move, _ in plan.moves) == sorted(on_it)


def test_a_drain_sends_the_largest_first_and_names_what_is_late() -> None:
    pool = AggregatorPool()
    sizes = {"a": 100, "b": 300, "c": 200}
    for name, size in sizes.items():
        on_job_arrival(pool, profile(name, 10, [2], size=size))
    plan = drain(pool, 0, 11, 100, state_factor=3)
    assert [(move.task.job_id, at) for move, at in plan.moves] == [("b", 9.0)]
    assert [move.task.job_id for move in plan.late] == ["c", "a"]
    assert (plan.allocated, len(pool)) == ((1,), 1)
    with pytest.raises(OptionError, match="aggregator 0 is not in the pool"):
        drain(pool, 0, 1, 1)
    with pytest.raises(OptionError, match="bytes_per_second must be positive, not 0"):
        drain(pool, 1, 1, 0)


def test_hybrid_scaling_allocates_above_its_threshold_and_releases_at_the_end_of_a_period() -> None:
    pool, scaler = AggregatorPool(), HybridScaler(threshold=1)
    scaler.on_arrival(pool, profile("a", 10, [8]))
    assert len(pool) == 1
    assert scaler.on_arrival(pool, profile("b", 10, [8])).allocated == ()
    assert dict(scaler.squeezed) == {"b": 1}
    result = scaler.on_arrival(pool, profile("c", 10, [8]))
    assert (len(result.allocated), len(pool), dict(scaler.squeezed)) == (2, 3, {})
    assert len(result.moves) == 1
    assert scaler.on_exit(pool, "a").released == ()
    assert len(pool) == 3
    assert len(scaler.on_period(pool, mean_used=2.2).released) == 0
    assert len(scaler.on_period(pool, mean_used=2.0).released) == 1


def test_periodic_scaling_waits_for_the_end_of_a_period() -> None:
    pool, scaler = AggregatorPool(), HybridScaler(threshold=None)
    for name in "abc":
        scaler.on_arrival(pool, profile(name, 10, [8]))
    assert len(pool) == 1
    result = scaler.on_period(pool, 1.0)
    assert (len(pool), len(result.allocated), dict(scaler.squeezed)) == (3, 2, {})
    with pytest.raises(OptionError, match="threshold must not be negative, not -1"):
        HybridScaler(-1)


@given(profiles(max_jobs=6), st.sampled_from([0, 1, 2, None]), st.data())
def test_hybrid_scaling_keeps_every_task_once(
    jobs: list[JobProfile], threshold: int | None, data: st.DataObject
) -> None:
    pool, scaler, running = AggregatorPool(), HybridScaler(threshold), []
    for job in jobs:
        where = pool.where()
        result = scaler.on_arrival(pool, job)
        running.append(job)
        assert all(where[move.task.key] == move.source for move in result.moves)
        if data.draw(st.booleans()):
            scaler.on_exit(pool, running.pop(0).job_id)
        if data.draw(st.booleans()):
            scaler.on_period(pool, data.draw(st.floats(0, 3)))
            assert not scaler.squeezed
        assert sorted(pool.where()) == _keys(running)


def test_the_least_free_cluster_that_suffices_is_selected() -> None:
    job = profile("a", 10, [8, 7])
    free = {"x": Fraction(3), "y": Fraction(3, 2), "z": Fraction(1)}
    assert select_cluster(free, job) == "y"
    assert select_cluster({"z": Fraction(1)}, job) is None
    pool = AggregatorPool()
    assign_job(pool, profile("b", 10, [4]))
    assert free_demand(pool, 2) == Fraction(8, 5)


def test_a_training_starts_where_its_whole_request_can_be_met() -> None:
    running = {"b": profile("b", 10, [4], servers=3)}
    assert may_start(profile("a", 10, [1], servers=2), running, 5)
    assert not may_start(profile("a", 10, [1], servers=2), running, 4)
