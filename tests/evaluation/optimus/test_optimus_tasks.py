"""Worked examples of marginal gains with parameter servers, and of their placement."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from tests.evaluation.optimus.optimus_tasks import PsJob, Tasks, allocate, place


def sync(batch: float, fixed: float, share: float, per_worker: float = 0.0):
    return lambda p, w: 1 / (batch / w + fixed + share * w / p + per_worker * w)


SLOT = {"slot": 1.0}


def job(id_: str, remaining: float, speed) -> PsJob:
    return PsJob(id_, remaining, speed, SLOT, SLOT)


A = job("A", 100, sync(8, 0.5, 0.5))
B = job("B", 50, sync(4, 0.25, 0.25))
C = job("C", 40, sync(2, 1, 1, 0.2))


def total(jobs, tasks) -> float:
    return sum(j.remaining / j.speed(*tasks[j.id]) for j in jobs)


def best(jobs, slots: int) -> float:
    """Return the least sum of remaining times over all allocations."""
    options = [[(p, w) for p in range(1, slots) for w in range(1, slots)] for _ in jobs]
    return min(
        sum(j.remaining / j.speed(*pw) for j, pw in zip(jobs, choice, strict=True))
        for choice in product(*options)
        if sum(p + w for p, w in choice) <= slots
    )


@pytest.mark.parametrize(
    ("slots", "a", "b", "time", "last_gains"),
    [
        (8, (2, 3), (1, 2), 529.167, [350, 87.5, 83.333, 75]),
        (10, (3, 4), (1, 2), 454.167, [41.667, 33.333]),
        (12, (4, 5), (1, 2), 410.0, [23.333, 20.833]),
    ],
)
def test_two_jobs(slots, a, b, time, last_gains):
    tasks, steps = allocate([A, B], {"slot": slots})
    assert tasks == {"A": a, "B": b}
    assert total([A, B], tasks) == pytest.approx(time, abs=5e-4)
    assert total([A, B], tasks) == pytest.approx(best([A, B], slots), abs=1e-9)
    gains = [step.gain / slots for step in steps]  # gains are per share of capacity
    assert gains[-len(last_gains) :] == pytest.approx(last_gains, abs=5e-4)


def test_a_third_job_that_more_workers_would_hurt_keeps_one_of_each():
    tasks, _ = allocate([A, B, C], {"slot": 14})
    assert tasks == {"A": (4, 5), "B": (1, 2), "C": (1, 1)}
    assert total([A, B, C], tasks) == pytest.approx(578)
    times = {pw: C.remaining / C.speed(*pw) for pw in [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (3, 3)]}
    assert list(times.values()) == pytest.approx([168, 176, 148, 136, 122.667, 130.667], abs=1e-3)


def test_a_pair_helps_where_neither_task_alone_does():
    stuck = job("stuck", 100, lambda p, w: {(1, 1): 1.0, (2, 2): 4.0}.get((p, w), 0.5))
    assert allocate([stuck], {"slot": 8}, pairs=False)[0] == {"stuck": (1, 1)}
    assert allocate([stuck], {"slot": 8})[0] == {"stuck": (2, 2)}


def test_a_task_that_does_not_fit_stops_or_is_skipped():
    big = PsJob("big", 1000, sync(8, 0.1, 0.1), {"cpu": 1}, {"cpu": 4})
    small = PsJob("small", 10, sync(8, 0.1, 0.1), {"cpu": 1}, {"cpu": 1})
    capacity = {"cpu": 9}
    stopped, _ = allocate([big, small], capacity)
    skipped, _ = allocate([big, small], capacity, on_full="skip")
    assert stopped == {"big": (1, 1), "small": (1, 1)}
    assert sum(skipped["big"]) + sum(skipped["small"]) == 6


def test_a_job_without_a_model_keeps_one_of_each():
    tasks, steps = allocate([PsJob("new", 100, None, SLOT, SLOT)], {"slot": 8})
    assert tasks == {"new": (1, 1)}
    assert not steps


def test_a_demand_that_the_cluster_lacks_is_refused():
    with pytest.raises(OptionError, match="gpu"):
        allocate([PsJob("j", 1, None, {"cpu": 1}, {"gpu": 1})], {"cpu": 8})


@given(
    st.lists(st.tuples(st.floats(1, 1000), st.floats(0.1, 10), st.floats(0, 2), st.floats(0, 2)), max_size=5),
    st.integers(0, 30),
    st.sampled_from(["stop", "skip"]),
)
def test_invariants(rows, slots, on_full):
    jobs = [job(str(at), q, sync(a, b, c)) for at, (q, a, b, c) in enumerate(rows)]
    tasks, steps = allocate(jobs, {"slot": slots}, on_full=on_full)
    assert sum(sum(t) for t in tasks.values()) <= slots
    assert list(tasks) == [str(at) for at in range(min(len(jobs), slots // 2))]
    assert all(min(t) >= 1 for t in tasks.values())
    assert all(step.gain > 0 for step in steps)
    scaled = [job(j.id, j.remaining * 4, j.speed) for j in jobs]
    assert allocate(scaled, {"slot": slots}, on_full=on_full)[0] == tasks


def test_placement_takes_the_fewest_servers_and_deals_evenly():
    free = {"s1": 8, "s2": 6, "s3": 6}
    assert place({"j": Tasks(4, 4)}, free, {"j": (1, 1)})["j"].machines == {"s1": (4, 4)}
    assert place({"j": Tasks(6, 6)}, free, {"j": (1, 1)})["j"].machines == {"s1": (3, 3), "s2": (3, 3)}


def test_small_jobs_are_placed_first_and_large_ones_shrink():
    placed = place(
        {"large": Tasks(5, 5), "small": Tasks(1, 1)}, {"s1": 4, "s2": 4}, {"large": (1, 1), "small": (1, 1)}
    )
    assert placed["small"].tasks == (1, 1)
    assert placed["large"].tasks == (3, 3)
    assert place({"j": Tasks(1, 1)}, {"s1": 1}, {"j": (1, 1)}) == {}
