"""Each scheduler on hand-computed clusters, and what all of them keep to."""

from collections.abc import Callable

import pytest
from clusters import assigned, job, known, ledger
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Resources
from ebbflow.planners.query.running.progress import whole
from tests.evaluation.qoop.carbyne import Carbyne, must_start, outlook, reverse
from tests.evaluation.qoop.drf import DRF
from tests.evaluation.qoop.ledger import Job, Ledger, Scheduler
from tests.evaluation.qoop.maxmin import MaxMinFair, resource_feedback
from tests.evaluation.qoop.sjf import SJF
from tests.evaluation.qoop.tetris import Tetris
from tests.planners.query.replanning_cases import plan, share, stage

FAIR: list[Callable[[], Scheduler]] = [DRF, MaxMinFair]
ALL: list[Callable[[], Scheduler]] = [DRF, MaxMinFair, SJF, Tetris, Carbyne]

sizes = st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([0, 1, 4, 6]), st.integers(1, 12))
clusters = st.lists(st.tuples(st.integers(2, 8), st.sampled_from([8, 16])), min_size=1, max_size=4)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Ledger, list[Job]]:
    books = ledger(*draw(clusters))
    weights = st.sampled_from([0.5, 1.0, 2.0])
    jobs = [
        job(books, f"j{n}", *draw(st.lists(sizes, min_size=1, max_size=3)), order=n, weight=draw(weights))
        for n in range(draw(st.integers(1, 5)))
    ]
    for one in jobs:
        one.remaining = lambda one=one: whole(  # type: ignore[misc]
            plan("p", *(stage(p.fp, tasks=p.pending, cores=1) for p in one.pools), stage("end"))
        )
    return books, jobs


# --- worked examples ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", FAIR)
def test_the_example_of_the_drf_paper_gives_three_tasks_and_two(scheduler: Callable[[], Scheduler]) -> None:
    books = ledger((9, 18))  # Ghodsi et al., NSDI 2011, section 4.1
    a, b = job(books, "a", (1, 4, 99)), job(books, "b", (3, 1, 99), order=1)
    assert assigned(scheduler(), books, a, b) == {"a": 3, "b": 2}
    assert a.load == pytest.approx(2 / 3)
    assert b.load == pytest.approx(2 / 3)


@pytest.mark.parametrize("scheduler", FAIR)
def test_weights_divide_a_cluster(scheduler: Callable[[], Scheduler]) -> None:
    books = ledger((12, 48))
    jobs = job(books, "a", (1, 1, 99)), job(books, "b", (1, 1, 99), order=1, weight=2)
    assert assigned(scheduler(), books, *jobs) == {"a": 4, "b": 8}


def test_running_tasks_count_towards_a_share() -> None:
    books = ledger((8, 32))
    a, b = job(books, "a", (1, 1, 99)), job(books, "b", (1, 1, 99), order=1)
    books.place(a, a.pools[0], 0, 4)
    books.collect()
    assert assigned(MaxMinFair(), books, a, b) == {"a": 0, "b": 4}


@pytest.mark.parametrize("scheduler", ALL)
def test_what_a_small_job_leaves_goes_to_the_others(scheduler: Callable[[], Scheduler]) -> None:
    books = ledger((10, 40))
    small, large = job(books, "small", (1, 1, 2)), job(books, "large", (1, 1, 99), order=1)
    for one, tasks in ((small, 2), (large, 99)):
        one.remaining = lambda n=tasks: whole(plan("p", stage("x", tasks=n)))  # type: ignore[misc]
    assert assigned(scheduler(), books, small, large) == {"small": 2, "large": 8}


def test_drf_takes_the_first_machine_and_qoop_the_best_aligned() -> None:
    for scheduler, machine in ((DRF(), 0), (MaxMinFair(), 1)):
        books = ledger((4, 16), (8, 16))
        one = job(books, "a", (1, 1, 1))
        scheduler.assign(books, [one], 0.0)
        assert books.collect() == [(one, one.pools[0], {machine: 1})]


def test_qoop_packs_the_stage_that_aligns_best() -> None:
    books = ledger((4, 4))
    one = job(books, "a", (1, 0, 9), (2, 2, 9))
    MaxMinFair().assign(books, [one], 0.0)
    assert {p.fp: sum(m.values()) for _, p, m in books.collect()} == {"a1": 2}


def test_shortest_first_gives_the_shortest_all_it_can_use() -> None:
    books = ledger((6, 24))
    jobs = (
        job(books, "long", (1, 1, 9), estimate=50),
        job(books, "short", (1, 1, 4), order=1, estimate=10),
        job(books, "middle", (1, 1, 1), order=2, estimate=20),
    )
    assert assigned(SJF(), books, *jobs) == {"long": 1, "short": 4, "middle": 1}


def test_shortest_remaining_asks_what_is_left() -> None:
    books = ledger((4, 16))
    done, begun = plan("d", stage("D", tasks=40)), plan("b", stage("B", tasks=8))
    long, short = known(books, "long", begun, 1), known(books, "short", done, 0)
    long.estimate, short.estimate = 100.0, 1.0
    assert assigned(SJF(remaining=True), books, short, long) == {"short": 0, "long": 4}


def test_tetris_weighs_packing_against_short_jobs() -> None:
    # alignment alone prefers the two-core task, remaining work the one-core job
    books = ledger((2, 8))
    big, small = job(books, "big", (2, 2, 50)), job(books, "small", (1, 1, 1), order=1)
    assert assigned(Tetris(fairness=0), books, big, small) == {"big": 0, "small": 1}
    books = ledger((2, 8))
    big, even = job(books, "big", (2, 2, 1)), job(books, "even", (1, 1, 2), order=1)
    assert assigned(Tetris(fairness=0), books, big, even) == {"big": 1, "even": 0}


def test_tetris_serves_the_jobs_furthest_below_their_share_first() -> None:
    books = ledger((8, 32))
    rich, poor = job(books, "rich", (1, 1, 99)), job(books, "poor", (1, 1, 400), order=1)
    books.place(rich, rich.pools[0], 0, 4)
    books.collect()
    # without fairness the shorter job would be served; with half of the jobs considered it is not
    assert assigned(Tetris(fairness=0.5), books, rich, poor) == {"rich": 0, "poor": 4}


def test_tetris_ends_a_nearly_finished_stage_first() -> None:
    for done, given_out in ((19, {"tail": 1, "other": 0}), (18, {"tail": 0, "other": 1})):
        books = ledger((2, 8))
        tail, other = job(books, "tail", (1, 1, 1)), job(books, "other", (2, 2, 1), order=1)
        tail.work_left = other.work_left = 1.0
        tail.pools[0].done, tail.pools[0].running = done, 19 - done
        assert assigned(Tetris(fairness=0), books, tail, other) == given_out


@pytest.mark.parametrize("options", [{"fairness": 1.0}, {"fairness": -0.1}, {"barrier": 0.0}])
def test_tetris_names_impossible_knobs(options: dict[str, float]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        Tetris(**options)


# --- Carbyne ------------------------------------------------------------------------------------------------------

# A (2 tasks of 5 s) and B (4 of 1 s) feed C: on 4 cores all end at 5 + 1, and B may wait until second 4
SLACK = plan("s", stage("A", tasks=2, duration=5), stage("B", tasks=4), stage("C", ("A", "B")))


def test_the_latest_schedule_is_the_reversed_one_read_backwards() -> None:
    found = outlook(whole(SLACK), share(4), now=100.0)
    assert found.end == 106
    assert {fp: d.finish for fp, d in found.deadlines.items()} == {"A": 105, "B": 105, "C": 106}
    assert found.deadlines["A"].width == 2
    assert found.deadlines["B"].width == 2


def test_reversing_twice_gives_the_same_edges() -> None:
    edges = {r.stage.output_fp: set(r.waits_for) for r in reverse(reverse(whole(SLACK))).stages}
    assert edges == {"A": set(), "B": set(), "C": {"A", "B"}}


def test_tasks_that_can_wait_do_not_have_to_start() -> None:
    books = ledger((4, 16))
    one = known(books, "a", SLACK)
    found = outlook(whole(SLACK), share(4), now=0.0)
    a, b = one.pools
    assert must_start(a, found, 0.0) == 2
    assert must_start(b, found, 0.0) == 0
    # two at a time: at 3 s there is room for the last two at 4 s
    assert must_start(b, found, 2.9) == 0
    assert must_start(b, found, 3.0) == 2
    assert must_start(b, found, 4.0) == 4


def test_an_altruistic_job_leaves_its_share_to_one_that_is_nearly_done() -> None:
    books = ledger((8, 32))
    patient = known(books, "patient", SLACK)
    hasty = known(books, "hasty", plan("h", stage("H", tasks=6)), 1)
    # fair shares are 4 cores each; DRF would give 4 and 4
    assert assigned(Carbyne(), books, patient, hasty) == {"patient": 2, "hasty": 6}
    books = ledger((8, 32))
    patient, hasty = known(books, "patient", SLACK), known(books, "hasty", plan("h", stage("H", tasks=6)), 1)
    assert assigned(MaxMinFair(), books, patient, hasty) == {"patient": 4, "hasty": 4}


def test_tasks_that_could_wait_run_when_nobody_else_wants_the_room() -> None:
    books = ledger((8, 32))
    assert assigned(Carbyne(), books, known(books, "a", SLACK)) == {"a": 6}


# --- what all keep to -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", ALL)
@given(cases())
def test_no_machine_is_overfull_and_no_task_that_fits_is_left_waiting(
    scheduler: Callable[[], Scheduler], case: tuple[Ledger, list[Job]]
) -> None:
    books, jobs = case
    wanted = sum(p.pending for j in jobs for p in j.pools)
    scheduler().assign(books, jobs, 0.0)
    placed = books.collect()
    running: dict[int, list[float]] = {m: [0.0] * len(books.idle()) for m in range(len(books.machines))}
    for _, pool, machines in placed:
        for m, tasks in machines.items():
            running[m] = [r + tasks * d for r, d in zip(running[m], pool.demand, strict=True)]
    for m, load in running.items():
        capacity = books.vector(books.machines[m])
        assert all(r <= c + 1e-6 for r, c in zip(load, capacity, strict=True))
        assert all(c - r == pytest.approx(f) for r, c, f in zip(load, capacity, books.free[m], strict=True))
    for one in jobs:
        for pool in one.pools:
            assert pool.pending == 0 or not any(books.fits(pool.demand, m) for m in range(len(running)))
    assert sum(p.pending + p.running for j in jobs for p in j.pools) == wanted
    total = [sum(column) for column in zip(*running.values(), strict=True)]
    assert total == pytest.approx([sum(column) for column in zip(*(j.used for j in jobs), strict=True)])


class _Watched(Ledger):
    """Checks at every placement that no job with a fitting task had a lower share."""

    jobs: list[Job]

    def place(self, job: Job, pool: object, machine: int, tasks: int = 1) -> None:
        for _ in range(tasks):
            for other in self.jobs:
                waits = any(
                    p.pending and any(self.fits(p.demand, m) for m in range(len(self.machines)))
                    for p in other.pools
                )
                assert other is job or not waits or other.load >= job.load - 1e-6
            super().place(job, pool, machine)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheduler", FAIR)
@given(cases())
def test_a_job_with_the_lowest_share_is_served_first(
    scheduler: Callable[[], Scheduler], case: tuple[Ledger, list[Job]]
) -> None:
    books, jobs = case
    watched = _Watched(books.machines)
    watched.jobs = jobs
    scheduler().assign(watched, jobs, 0.0)


@given(st.dictionaries(st.text("ab", min_size=1), st.floats(0.1, 10), min_size=1), st.floats(1, 600))
def test_the_shares_told_sum_to_the_cluster(weights: dict[str, float], cores: float) -> None:
    whole_cluster = share(cores, 4 * cores, nodes=20)
    shares = resource_feedback(weights, whole_cluster, revision=7)
    for dimension in range(2):
        told = sum(s.total[dimension] for s in shares.values())
        assert told == pytest.approx(whole_cluster.total[dimension])
    assert all(s.largest == whole_cluster.largest and s.revision == 7 for s in shares.values())
    assert all(
        s.total.cores / w == pytest.approx(cores / sum(weights.values()))
        for s, w in zip(shares.values(), weights.values(), strict=True)
    )


# --- the ledger ---------------------------------------------------------------------------------------------------


def test_the_ledger_refuses_what_does_not_fit_or_does_not_wait() -> None:
    books = ledger((2, 8))
    one = job(books, "a", (1, 1, 3))
    with pytest.raises(OptionError, match="machine 0"):
        books.place(one, one.pools[0], 0, 3)
    books.place(one, one.pools[0], 0, 2)
    with pytest.raises(OptionError, match="does not fit"):
        books.place(one, one.pools[0], 0)
    books.release(one, one.pools[0], 0, 2)
    assert books.free[0] == [1.0, 1.0]
    assert one.used == [0.0, 0.0]


def test_a_cluster_needs_cores() -> None:
    with pytest.raises(OptionError, match="cores and memory"):
        Ledger([Resources(0, 4)])
    with pytest.raises(OptionError, match="cores and memory"):
        Ledger([])
