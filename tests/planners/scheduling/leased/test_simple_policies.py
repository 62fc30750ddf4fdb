"""The policies that the papers compare with: the rule of each, and what all must keep."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.infra.simulation.engine import simulate
from ebbflow.infra.simulation.traces.cluster import Cluster
from ebbflow.infra.simulation.traces.workloads import Job, Workload
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Node, Notice
from ebbflow.planners.model.scheduling import App, Decision, Placement, Policy, View, gpus_of
from ebbflow.planners.scheduling.gangs.las import las, leased_las
from ebbflow.planners.scheduling.gangs.ordered import best_effort, smallest_first, srsf, srtf, yarn_cs
from ebbflow.planners.scheduling.leased.gandiva import gandiva, throughput_first
from ebbflow.planners.scheduling.leased.simple import (
    drf,
    equal_share,
    leased_srsf,
    leased_srtf,
    random_policy,
    worst_off_first,
)
from ebbflow.planners.scheduling.leased.slaq import LossCurve, slaq
from tests.evaluation.tiresias.time_sharing import TimeSharing

RIGID: list[Callable[[], Policy]] = [smallest_first, srtf, srsf, las, yarn_cs, best_effort, TimeSharing]
LEASED: list[Callable[[], Policy]] = [
    leased_las,
    leased_srtf,
    leased_srsf,
    drf,
    slaq,
    throughput_first,
    gandiva,
    random_policy,
    equal_share,
]


class Linear:
    """One iteration a second on one GPU, up to ``most`` GPUs' worth."""

    def __init__(self, most: float = inf) -> None:
        self.most = most

    def iteration_time(self, gpus: int) -> float:
        return 1 / min(gpus, self.most)


@dataclass
class Reports:
    value: float

    def rho(self, placement: Placement, capacity: Capacity, now: float) -> float:
        return self.value


def cluster(*gpus: int, racks: str = "") -> Capacity:
    nodes = tuple(Node(f"n{i}", 0, 0.0, gpus=g, rack=racks[i] if racks else "") for i, g in enumerate(gpus))
    return Capacity(0, nodes)


def app(number: int, gpus: int = 1, remaining: float = 100.0, **more: object) -> App:
    given = {"arrival": float(number), "speed": Linear(), "min_gpus": gpus, "max_gpus": gpus, **more}
    return App(id=f"a{number}", number=number, gpus=gpus, remaining=remaining, **given)  # type: ignore[arg-type]


def elastic(number: int, most: int = 8, remaining: float = 100.0, **more: object) -> App:
    return app(number, 1, remaining, **{"max_gpus": most, **more})


def decide(policy: Policy, apps: list[App], capacity: Capacity, now: float = 100.0) -> Decision:
    return policy.decide(View(now, apps, capacity), None, np.random.default_rng(0))


def shares(decision: Decision) -> dict[str, int]:
    return {name: gpus_of(grant.placement) for name, grant in decision.grants.items()}


def test_each_order_prefers_its_own_app() -> None:
    wide_short = app(0, gpus=4, remaining=100)  # 25 s, 100 GPU-s
    narrow_long = app(1, gpus=1, remaining=90)  # 90 s, 90 GPU-s
    middle = app(2, gpus=2, remaining=160)  # 80 s, 160 GPU-s
    apps, room = [wide_short, narrow_long, middle], cluster(4)
    assert shares(decide(srtf(), apps, room)) == {"a0": 4, "a1": 0, "a2": 0}
    assert shares(decide(srsf(), apps, room)) == {"a0": 0, "a1": 1, "a2": 2}
    assert shares(decide(smallest_first(), apps, room)) == {"a0": 0, "a1": 1, "a2": 2}
    narrow_long.service, middle.service = 50.0, 60.0
    assert shares(decide(las(), apps, room)) == {"a0": 4, "a1": 0, "a2": 0}


def test_preemptive_orders_take_gpus_from_running_apps_and_wait_says_why() -> None:
    long, short = app(0, 2, 1000, held=(("n0", 2),)), app(1, 2, 10)
    decision = decide(srtf(), [long, short], cluster(2))
    assert shares(decision) == {"a0": 0, "a1": 2}
    assert "too few GPUs" in decision.grants["a0"].reason


def test_running_apps_keep_their_nodes() -> None:
    runs = app(0, 2, 10, held=(("n1", 2),))
    decision = decide(srtf(), [runs, app(1, 2, 20)], cluster(2, 2))
    assert decision.grants["a0"].placement == (("n1", 2),)
    assert decision.grants["a1"].placement == (("n0", 2),)


def test_yarn_blocks_behind_the_first_that_does_not_fit_and_best_effort_does_not() -> None:
    runs, big, small = app(0, 2, held=(("n0", 2),)), app(1, 4), app(2, 1)
    assert shares(decide(yarn_cs(), [runs, big, small], cluster(4))) == {"a0": 2, "a1": 0, "a2": 0}
    assert shares(decide(best_effort(), [runs, big, small], cluster(4))) == {"a0": 2, "a1": 0, "a2": 1}


def test_yarn_waits_for_a_consolidated_place_and_never_preempts() -> None:
    holds = [app(i, 1, held=((f"n{i}", 1),)) for i in range(2)]
    wants = app(2, 4)
    assert shares(decide(yarn_cs(), [*holds, wants], cluster(4, 4)))["a2"] == 0  # 6 free, but 3 and 3
    early = app(0, 4, 1.0)
    late = app(1, 4, held=(("n0", 4),))
    assert shares(decide(yarn_cs(), [early, late], cluster(4))) == {"a0": 0, "a1": 4}


def test_leased_las_gives_each_gpu_to_the_least_served() -> None:
    fresh, served = elastic(0, service=0.0), elastic(1, service=1200.0)
    assert shares(decide(leased_las(600.0), [fresh, served], cluster(4))) == {"a0": 3, "a1": 1}
    heavy = elastic(2, service=1200.0, weight=10.0)
    assert shares(decide(leased_las(600.0), [heavy, elastic(3, service=600.0)], cluster(2)))["a2"] == 2


def test_leases_run_on_until_they_end() -> None:
    policy, room = leased_las(600.0), cluster(4)
    first = elastic(0)
    decision = decide(policy, [first], room)
    assert decision.grants["a0"].until == decision.wake == 700.0
    first.held, first.service = decision.grants["a0"].placement, 1200.0
    second = elastic(1)
    early = policy.decide(View(400.0, [first, second], room), decision.memory, np.random.default_rng(0))
    assert shares(early) == {"a0": 4, "a1": 0}
    later = policy.decide(View(700.0, [first, second], room), early.memory, np.random.default_rng(0))
    assert shares(later) == {"a0": 1, "a1": 3}
    assert set(later.grants["a0"].placement) <= {("n0", 1)}


def test_drf_levels_shares_and_never_takes_a_gpu_back() -> None:
    policy, room = drf(), cluster(4)
    first = elastic(0)
    decision = decide(policy, [first], room)
    assert decision.wake == inf
    first.held = decision.grants["a0"].placement
    again = policy.decide(View(1e9, [first, elastic(1)], room), decision.memory, np.random.default_rng(0))
    assert shares(again) == {"a0": 4, "a1": 0}
    assert shares(decide(policy, [elastic(0), elastic(1)], room)) == {"a0": 2, "a1": 2}


def test_equal_share_levels_again_as_leases_end() -> None:
    policy, room = equal_share(600.0), cluster(4)
    first = elastic(0)
    decision = decide(policy, [first], room)
    first.held = decision.grants["a0"].placement
    again = policy.decide(View(700.0, [first, elastic(1)], room), decision.memory, np.random.default_rng(0))
    assert shares(again) == {"a0": 2, "a1": 2}


def test_srtf_on_leases_gives_all_and_srsf_one_by_one() -> None:
    long, short = elastic(0, 4, 1000.0), elastic(1, 3, 30.0)
    assert shares(decide(leased_srtf(), [long, short], cluster(4))) == {"a0": 1, "a1": 3}
    assert shares(decide(leased_srsf(), [long, short], cluster(4))) == {"a0": 1, "a1": 3}
    wide = elastic(2, 4, 60.0)  # 15 s on four; the other 20 s on two
    narrow = elastic(3, 2, 40.0)
    assert shares(decide(leased_srtf(), [wide, narrow], cluster(4))) == {"a2": 4, "a3": 0}
    assert shares(decide(leased_srsf(), [wide, narrow], cluster(4))) == {"a2": 2, "a3": 2}


def test_throughput_first_serves_everyone_once_and_then_those_that_scale() -> None:
    scales, stalls = elastic(0), elastic(1, speed=Linear(most=1))
    assert shares(decide(throughput_first(), [scales, stalls], cluster(6))) == {"a0": 5, "a1": 1}


def test_throughput_first_counts_what_spreading_costs() -> None:
    tied = elastic(0, held=(("n0", 1),), skewed=True)
    free = elastic(1, held=(("n0", 1),))
    room = cluster(2, 1, racks="ab")
    memory = decide(throughput_first(1e9), [tied, free], cluster(2)).memory
    decision = throughput_first(1e9).decide(View(101.0, [tied, free], room), memory, np.random.default_rng(0))
    assert shares(decision) == {"a0": 1, "a1": 2}


def test_slaq_prefers_the_app_that_still_converges() -> None:
    policy, room = slaq(10.0), cluster(2)
    old, new = elastic(0, 1, 1000.0), elastic(1, 1, 1000.0)
    memory = decide(policy, [old], room).memory
    old.remaining = 100.0  # most of its loss is gone
    decision = policy.decide(View(200.0, [old, new], cluster(1)), memory, np.random.default_rng(0))
    assert shares(decision) == {"a0": 0, "a1": 1}


def test_loss_curve_against_its_formula() -> None:
    curve = LossCurve(0.5, 2.0, 7.0)
    assert curve.decrease(4.0, 12.0) == pytest.approx(1 / 4 - 1 / 10)
    with pytest.raises(OptionError, match="loss curve"):
        LossCurve(-1.0)


def test_gandiva_serves_good_bundles_first_and_larger_ones_among_equals() -> None:
    small, large = elastic(0, 1), elastic(1, 4)
    assert shares(decide(gandiva(), [small, large], cluster(4))) == {"a0": 0, "a1": 4}
    skewed = elastic(2, 4, skewed=True)  # could only be spread
    assert shares(decide(gandiva(), [skewed, elastic(3, 3)], cluster(2, 2))) == {"a2": 1, "a3": 3}


def test_gandiva_leaves_an_app_on_nodes_that_leave_while_no_others_are_free() -> None:
    spread = App("a0", 0, gpus=3, max_gpus=3, skewed=True, held=(("n0", 2), ("n1", 1)))
    other = App("a1", 1, held=(("n1", 1),))
    nodes = tuple(Node(f"n{number}", cores=2, memory=16.0, gpus=2) for number in range(2))
    capacity = Capacity(0, nodes, (Notice("n0", 1000.0),))
    decision = gandiva().decide(View(0.0, [spread, other], capacity), None, np.random.default_rng(0))
    assert {app: grant.placement for app, grant in decision.grants.items()} == {
        "a0": spread.held,
        "a1": other.held,
    }


def test_gandiva_migrates_to_a_better_place_when_one_is_free() -> None:
    policy = gandiva(1e6)
    spread = elastic(0, 2, skewed=True)
    first = decide(policy, [spread], cluster(1, 1))
    spread.held = first.grants["a0"].placement
    assert len(spread.held) == 2
    after = policy.decide(View(200.0, [spread], cluster(1, 1, 2)), first.memory, np.random.default_rng(0))
    assert after.grants["a0"].placement == (("n2", 2),)
    insensitive = elastic(0, 2, held=spread.held)
    stays = policy.decide(
        View(200.0, [insensitive], cluster(1, 1, 2)), first.memory, np.random.default_rng(0)
    )
    assert stays.grants["a0"].placement == spread.held


def test_the_strawman_serves_the_worst_report_and_needs_one() -> None:
    fine, bad = elastic(0, bidder=Reports(1.1), held=(("n0", 1),)), elastic(1, bidder=Reports(3.0))
    bad.held = (("n0", 1),)
    memory = decide(worst_off_first(1.0), [fine, bad], cluster(4)).memory
    decision = worst_off_first(1.0).decide(
        View(102.0, [fine, bad], cluster(4)), memory, np.random.default_rng(0)
    )
    assert shares(decision) == {"a0": 0, "a1": 4}
    with pytest.raises(OptionError, match="no bidder"):
        decide(worst_off_first(), [elastic(0)], cluster(1))


@pytest.mark.parametrize("make", [srtf, leased_srsf])
def test_unknown_speed_is_refused_and_throughputs_serve_instead(make: Callable[[], Policy]) -> None:
    with pytest.raises(OptionError, match="neither a speed nor a throughput"):
        decide(make(), [app(0, speed=None)], cluster(1))
    slow = app(0, speed=None, throughputs={"k80": 1.0})
    fast = app(1, speed=None, throughputs={"k80": 1.0, "v100": 9.0})
    assert shares(decide(make(), [slow, fast], cluster(1))) == {"a0": 0, "a1": 1}


def test_a_lease_must_last() -> None:
    with pytest.raises(OptionError, match="lease_s"):
        leased_las(0.0)


jobs = st.lists(
    st.tuples(st.integers(0, 300), st.sampled_from([1, 1, 2, 3, 4, 6]), st.integers(1, 900), st.booleans()),
    min_size=1,
    max_size=8,
)


@pytest.mark.parametrize("make", RIGID + LEASED, ids=lambda make: make.__name__)
@settings(max_examples=12, deadline=None)
@given(jobs, st.booleans())
def test_every_policy_finishes_every_job_within_capacity_and_repeats_itself(
    make: Callable[[], Policy], rows: list[tuple[int, int, int, bool]], stretchy: bool
) -> None:
    rows = sorted(rows)
    workload = Workload(
        "drawn",
        tuple(
            Job(
                id=f"j{i}",
                arrival=float(arrival),
                gpus=gpus,
                duration=float(duration),
                skewed=skewed,
                min_gpus=1 if stretchy else None,
                max_gpus=8 if stretchy else None,
            )
            for i, (arrival, gpus, duration, skewed) in enumerate(rows)
        ),
    )
    runs = [simulate(workload, Cluster.grid(2, 4, per_rack=1), make(), seed=7) for _ in range(2)]
    assert len(runs[0].jobs) == len(rows)  # the engine itself refuses broken capacity and partial gangs
    assert [job.finish for job in runs[0].jobs] == [job.finish for job in runs[1].jobs]


@pytest.mark.parametrize(
    ("policy", "jcts"), [(srsf(), [2, 10, 16]), (las(1.0), [5, 14, 16])], ids=lambda value: str(value)[:20]
)
def test_the_three_jobs_of_tiresias(policy: Policy, jcts: list[int]) -> None:
    """NSDI 2019, figure 3.7: two GPUs, (GPUs, duration) = (2, 2), (1, 8), (2, 6), unit intervals."""
    jobs = tuple(
        Job(id=f"J{i}", arrival=0.0, gpus=gpus, duration=float(duration))
        for i, (gpus, duration) in enumerate([(2, 2), (1, 8), (2, 6)], 1)
    )
    result = simulate(Workload("three", jobs), Cluster.grid(1, 2), policy, restart_delay=0.0)
    assert [job.jct for job in result.jobs] == pytest.approx(jcts)


def test_time_sharing_rotates_and_serves_a_wide_gang_in_its_turn() -> None:
    jobs = [Job(id=f"j{i}", arrival=0.0, gpus=1, duration=600.0) for i in range(8)]
    jobs.append(Job(id="wide", arrival=0.0, gpus=4, duration=600.0))
    result = simulate(
        Workload("turns", tuple(jobs)), Cluster.grid(1, 4), TimeSharing(60.0), restart_delay=0.0
    )
    wide = result.jobs[-1]
    assert wide.start <= 180.0
    narrow = [job.jct for job in result.jobs[:-1]]
    assert max(narrow) - min(narrow) <= 360.0
    assert wide.jct == pytest.approx(1800.0, abs=200.0)  # a third of the time
    with pytest.raises(OptionError, match="quantum_s"):
        TimeSharing(0.0)


def test_random_needs_the_generator_and_nothing_else() -> None:
    apps, room = [elastic(i) for i in range(6)], cluster(3)
    draws = {
        tuple(
            shares(random_policy().decide(View(0.0, apps, room), None, np.random.default_rng(seed))).values()
        )
        for seed in range(20)
    }
    assert len(draws) > 5
