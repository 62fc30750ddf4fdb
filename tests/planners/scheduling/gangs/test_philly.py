"""Locality by cost, causes of delay and defragmentation: the study's lessons as rules."""

from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.infra.simulation.engine import simulate
from ebbflow.infra.simulation.traces.cluster import Cluster
from ebbflow.infra.simulation.traces.workloads import Job, Workload
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Node
from ebbflow.planners.model.scheduling import App, View, gpus_of
from ebbflow.planners.scheduling.gangs.defragmentation import Resident, fragmentation, plan_migrations
from ebbflow.planners.scheduling.gangs.philly import Philly, delay_cause
from ebbflow.planners.scheduling.gangs.spread import (
    Spread,
    allowed_level,
    best_level,
    expected_waits,
    feasible,
    place_within,
    spread_of,
)
from ebbflow.planners.scheduling.placement import FreeCapacity

SLOW = (1.0, 1.1, 1.5)
WAITS = (1200.0, 300.0, 0.0)


def nodes(count: int, gpus: int = 8, per_rack: int = 100) -> tuple[Node, ...]:
    return tuple(Node(f"n{i}", 8, 64.0, gpus=gpus, rack=f"r{i // per_rack}") for i in range(count))


def room(free: list[int], gpus: int = 8, per_rack: int = 100) -> FreeCapacity:
    made = FreeCapacity(nodes(len(free), gpus, per_rack))
    made.free = list(free)
    return made


class Linear:
    def iteration_time(self, gpus: int) -> float:
        return 1.0 / gpus


def app(name: str, gpus: int, number: int = 0, **more: object) -> App:
    given_ = {"speed": Linear(), "remaining": 1e4 * gpus} | more
    return App(name, number=number, gpus=gpus, min_gpus=gpus, max_gpus=gpus, **given_)  # type: ignore[arg-type]


# --- where, and how long to wait for it -----------------------------------------------------------------------


@pytest.mark.parametrize(("remaining", "level"), [(300, 2), (3600, 1), (36_000, 0)])
def test_short_jobs_spread_and_long_ones_wait(remaining, level):
    assert best_level(WAITS, SLOW, remaining) == level


def test_break_even_between_levels():
    assert best_level(WAITS, SLOW, 749) == Spread.ANYWHERE
    assert best_level(WAITS, SLOW, 751) == Spread.ONE_RACK
    assert best_level(WAITS, SLOW, 8_999) == Spread.ONE_RACK
    assert best_level(WAITS, SLOW, 9_001) == Spread.FEWEST_NODES


def test_whoever_waited_as_long_as_the_next_level_costs_may_take_it():
    # of 36,000 s a tenth is lost in one rack, which is free in 300 s
    assert allowed_level(WAITS, SLOW, 36_000, 3_899) == (Spread.FEWEST_NODES, pytest.approx(1.0))
    level, more = allowed_level(WAITS, SLOW, 36_000, 3_901)
    assert level == Spread.ONE_RACK
    assert more == pytest.approx(18_000 - 3_901)


@given(
    st.lists(st.floats(0, 1e5), min_size=3, max_size=3),
    st.floats(0, 1e6),
    st.floats(0, 1e6),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_more_work_left_never_spreads_further(waits, one, other, a, b):
    slow = (1.0, 1.0 + a, 1.0 + a + b)
    short, long = sorted((one, other))
    assert best_level(waits, slow, long) <= best_level(waits, slow, short)


@given(st.lists(st.floats(0, 1e5), min_size=3, max_size=3), st.floats(1, 1e6))
def test_without_slowdown_nobody_waits_for_a_place(waits, remaining):
    chosen = best_level([*waits[:2], 0.0], (1.0, 1.0, 1.0), remaining)
    assert [*waits[:2], 0.0][chosen] < 1e-6


def test_slowdowns_below_one_are_refused():
    with pytest.raises(OptionError, match=r"0\.9"):
        best_level(WAITS, (0.9, 1.0, 1.0), 10)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=12), st.integers(1, 40), st.integers(1, 6))
def test_levels_are_nested_and_placements_are_of_their_level(free, gpus, per_rack):
    gang = app("a", gpus)
    possible = [feasible(room(free, per_rack=per_rack), gang, gpus, level) for level in Spread]
    assert possible == sorted(possible)
    for level in Spread:
        here = room(free, per_rack=per_rack)
        placement = place_within(here, gang, gpus, level)
        assert (placement is not None) == possible[level]
        if placement:
            assert gpus_of(placement) == gpus
            assert min(here.free) >= 0
            assert spread_of(placement, here.nodes) <= level


def test_expected_waits_follow_what_running_jobs_give_back():
    here = room([2, 2, 2, 2], per_rack=2)
    releases = [(50.0, (("n0", 6),)), (500.0, (("n1", 6),)), (20.0, (("n3", 2),))]
    # anywhere: 8 are free now; one rack: n2 and n3 never have 8, n0 alone has 8 after 50 s
    assert expected_waits(here, app("a", 8), 8, releases) == (50.0, 50.0, 0.0)
    assert expected_waits(here, app("a", 16), 16, releases) == (500.0, 500.0, 50.0)
    assert expected_waits(here, app("a", 32), 32, releases) == (inf, inf, 600.0)


# --- why a gang waits -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "cause"), [(16, "fair share"), (12, "borrowed capacity"), (8, "fragmentation"), (2, "scheduler")]
)
def test_causes_of_delay(gpus, cause):
    assert delay_cause(room([2, 2, 2, 2]), app("a", gpus), Spread.FEWEST_NODES, 20, 32) == cause


def test_one_rack_is_enough_for_eight_scattered_gpus():
    assert delay_cause(room([2, 2, 2, 2]), app("a", 8), Spread.ONE_RACK, 20, 32) == "scheduler"


# --- defragmentation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "share"), [(8, 1.0), (4, 1.0), (2, 0.0), (3, 1.0)])
def test_fragmentation(gpus, share):
    assert fragmentation([2, 2, 2, 2], gpus) == share


def residents() -> list[Resident]:
    return [Resident("a", "n0", 2), Resident("b", "n1", 3), Resident("c", "n2", 1), Resident("d", "n3", 8)]


def test_the_cheapest_node_is_vacated_onto_the_fullest_that_fits():
    here = room([6, 5, 7, 0])
    plan = plan_migrations(here, 8, residents(), wait=3600)
    assert plan is not None
    assert plan.moves == (("c", 1, "n2", "n1"),)
    assert (plan.nodes, plan.cost, plan.benefit) == (("n2",), 60.0, 8 * 3510.0)
    assert here.free == [6, 5, 7, 0]


def test_moves_that_save_too_little_are_not_made():
    assert plan_migrations(room([6, 5, 7, 0]), 8, residents(), wait=90 + 2 * 60 / 8) is None
    assert plan_migrations(room([6, 5, 7, 0]), 8, residents(), wait=91 + 2 * 60 / 8) is not None


def test_a_job_that_cannot_be_moved_leaves_its_node_to_the_next():
    fixed = [r._replace(movable=r.app != "c") for r in residents()]
    plan = plan_migrations(room([6, 5, 7, 0]), 8, fixed, wait=3600)
    assert plan is not None
    assert plan.moves == (("a", 2, "n0", "n1"),)


@st.composite
def _fragmented(draw):
    free, jobs = [], []
    for at in range(draw(st.integers(2, 8))):
        sizes = draw(st.lists(st.integers(1, 4), max_size=4))
        left = 8
        for number, size in enumerate(sizes):
            if size <= left:
                jobs.append(Resident(f"j{at}.{number}", f"n{at}", size, movable=draw(st.booleans())))
                left -= size
        free.append(left)
    return free, jobs


@settings(max_examples=300)
@given(_fragmented(), st.integers(1, 24), st.integers(1, 4))
def test_moves_keep_jobs_whole_and_make_the_gang_fit(cluster, gpus, per_rack):
    free, jobs = cluster
    here = room(free, per_rack=per_rack)
    plan = plan_migrations(here, gpus, jobs, wait=1e6)
    gang = app("gang", gpus)
    if plan is None:
        return
    assert not feasible(here, gang, gpus, Spread.FEWEST_NODES)
    known = {job.app: job for job in jobs}
    after = here.copy()
    for move in plan.moves:
        job = known[move.app]
        assert (job.gpus, job.node, job.movable) == (move.gpus, move.source, True)
        after.give_back(((move.source, move.gpus),))
        after.hold(((move.target, move.gpus),))
    assert len({move.app for move in plan.moves}) == len(plan.moves) <= 8
    assert min(after.free) >= 0
    assert sum(after.free) == sum(here.free)
    assert sum(left == 8 for left in after.free) >= sum(left == 8 for left in here.free)
    assert feasible(after, gang, gpus, Spread.FEWEST_NODES)
    assert plan.benefit > 2 * plan.cost


# --- the policy -----------------------------------------------------------------------------------------------


def decide(policy, apps, count=4, now=0.0, memory=None):
    view = View(now, tuple(apps), Capacity(1, nodes(count), at=now))
    return policy.decide(view, memory, np.random.default_rng(0))


def test_teams_beyond_their_quota_borrow_only_what_others_leave():
    apps = [app("a", 8, 0, team="x"), app("b", 8, 1, team="x"), app("c", 8, 2, team="y")]
    given_ = decide(Philly(quotas={"x": 8, "y": 8}), apps, count=2).grants
    assert given_["a"].placement
    assert given_["c"].placement
    assert given_["b"].reason == "pending: fair share"


def test_a_long_skewed_gang_waits_and_a_short_one_spreads():
    blockers = [app(f"b{i}", 4, i, held=((f"n{i}", 4),), remaining=4 * 1000.0) for i in range(2)]
    long = app("long", 8, 9, skewed=True, remaining=8 * 1e6)
    short = app("short", 8, 9, skewed=True, remaining=8 * 10.0)
    policy = Philly(defragment=False)
    assert decide(policy, [*blockers, long], count=2).grants["long"].reason == "pending: fragmentation"
    assert gpus_of(decide(policy, [*blockers, short], count=2).grants["short"].placement) == 8


def test_attempts_relax_one_level_at_a_time():
    policy = Philly("attempts", defragment=False)
    blockers = [app(f"b{i}", 4, i, held=((f"n{i}", 4),)) for i in range(2)]
    gang = app("gang", 8, 9)
    first = decide(policy, [*blockers, gang], count=2)
    assert not first.grants["gang"].placement
    again = decide(policy, [*blockers, gang], count=2, now=599, memory=first.memory)
    assert not again.grants["gang"].placement
    assert decide(policy, [*blockers, gang], count=2, now=600, memory=first.memory).grants["gang"].placement
    assert (
        not decide(Philly("never", defragment=False), [*blockers, gang], 2, 1e6, first.memory)
        .grants["gang"]
        .placement
    )


def test_a_small_job_makes_room_for_a_large_gang_once_an_hour():
    small = app("small", 1, 0, held=(("n0", 1),), remaining=1e5)
    other = app("other", 4, 1, held=(("n1", 4),), remaining=4e5)
    gang = app("gang", 8, 2, skewed=True, remaining=8e6)
    decision = decide(Philly(), [small, other, gang], count=2)
    assert decision.grants["small"].placement == (("n1", 1),)
    assert decision.grants["gang"].placement == (("n0", 8),)
    memory = ({}, {"small": 0.0})
    later = decide(Philly(), [small, other, gang], count=2, now=3599, memory=memory)
    assert later.grants["small"].placement == (("n0", 1),)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 4000), st.integers(1, 20), st.integers(60, 5000)), min_size=1, max_size=12
    ),
    st.sampled_from(["cost", "attempts", "never", "at-once"]),
    st.booleans(),
)
def test_every_gang_runs_to_its_end(rows, relaxation, defragment):
    jobs = tuple(Job(f"j{i}", float(at), gpus, duration=float(s)) for i, (at, gpus, s) in enumerate(rows))
    result = simulate(Workload("w", jobs), Cluster.grid(3, 8, per_rack=2), Philly(relaxation, defragment))
    assert len(result.jobs) == len(jobs)
    assert all(job.finish < inf for job in result.jobs)


def test_an_unknown_relaxation_is_refused():
    with pytest.raises(OptionError, match=r"relaxation must be one of .*'at_once'"):
        Philly(relaxation="at_once")
