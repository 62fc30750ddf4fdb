"""Critical gangs, unfairly treated ones, then the shortest service; and what that comes to on Shockwave's jobs."""

import json
from math import inf
from pathlib import Path

import numpy as np
import pytest

from ebbflow.infra.sim.rounds_setting import SHOCKWAVE
from ebbflow.infra.sim.rounds_trace import read_throughputs, read_trace
from ebbflow.infra.sim.rounds_world import RoundsWorld
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Node
from ebbflow.planners.model.scheduling import App, View
from ebbflow.planners.scheduling.critical_first import CriticalFirst, least_makespan
from ebbflow.planners.scheduling.gang_bidder import GangBidder

FOLDER = Path(__file__).parents[2] / "fixtures/training/shockwave"
ROOM = Capacity(0, (Node("n0", 0, 0.0, gpus=2),))


def app(number: int, seconds: float, gpus: int = 1, arrival: float = 0.0, alone: float = inf) -> App:
    made = App(
        id=f"a{number}", number=number, gpus=gpus, arrival=arrival, remaining=seconds,
        throughputs={"v100": 1.0},
    )  # fmt: skip
    made.bidder = GangBidder(made, alone) if alone < inf else None
    return made


def running(policy: CriticalFirst, apps: list[App], now: float = 0.0) -> set[str]:
    decision = policy.decide(View(now, apps, ROOM), None, np.random.default_rng(0))
    return {name for name, grant in decision.grants.items() if grant.placement}


def test_the_critical_path_goes_before_short_gangs() -> None:
    apps = [app(0, 1000.0), *(app(i, 10.0) for i in range(1, 5))]
    assert running(CriticalFirst(), apps) == {"a0", "a1"}
    assert running(CriticalFirst(critical=2.0), apps) == {"a1", "a2"}  # nothing is critical: shortest service


def test_an_unfairly_treated_gang_goes_before_short_ones() -> None:
    late = app(9, 50.0, alone=100.0)  # 200 s old: rho 2.5 even from now on
    apps = [app(0, 1000.0), app(1, 10.0, alone=1e9), late]
    assert running(CriticalFirst(), apps, now=200.0) == {"a0", "a9"}
    assert running(CriticalFirst(worst_rho=3.0), apps, now=200.0) == {"a0", "a1"}


def test_least_makespan_is_the_longest_or_all_work_over_all_gpus() -> None:
    apps = [app(0, 100.0), app(1, 40.0, gpus=2)]
    left = {"a0": 100.0, "a1": 40.0}
    assert least_makespan(View(0.0, apps, ROOM), left) == 100.0
    left["a1"] = 70.0
    assert least_makespan(View(0.0, apps, ROOM), left) == 120.0
    assert least_makespan(View(0.0, [], ROOM), {}) == 0.0


def test_the_bid_of_a_gang() -> None:
    asks = GangBidder(app(0, 300.0, gpus=2, arrival=100.0), 200.0, 2.0)
    assert asks.rho((("n0", 2),), ROOM, 200.0) == pytest.approx((100 + 300) / 400)
    assert asks.rho((("n0", 1),), ROOM, 200.0) == inf
    assert asks.rho_at(np.array([1, 2, 3]), np.zeros(3), 200.0).tolist() == [inf, 1.0, 1.0]


@pytest.mark.parametrize(("critical", "worst_rho"), [(0.8, 1.0), (0.9, 1.0), (0.8, 0.9)])
def test_on_shockwaves_jobs_no_published_policy_is_better_at_anything(
    critical: float, worst_rho: float
) -> None:
    trace = read_trace(FOLDER / "jobs-120.trace")

    def agent(app: App, alone: float) -> None:
        app.bidder = GangBidder(app, alone, len(trace) / 32)

    world = RoundsWorld(
        trace, read_throughputs(FOLDER / "tacc_throughputs.json"), {"v100": 32}, SHOCKWAVE, agent
    )
    ours = world.run(CriticalFirst(critical, worst_rho)).summary()
    published = json.loads((FOLDER / "published.json").read_text())["simulated"]["simulation"].values()
    assert ours["avg_jct_s"] < min(policy["avg_jct_s"] for policy in published)
    assert ours["makespan_s"] < min(policy["makespan_s"] for policy in published)
    assert ours["worst_rho"] < min(policy["worst_rho"] for policy in published)
    assert ours["unfair_pct"] < 100 * min(policy["unfair_share"] for policy in published)


@pytest.mark.parametrize("option", ["critical", "worst_rho"])
def test_bad_options_are_refused(option: str) -> None:
    with pytest.raises(OptionError, match=option):
        CriticalFirst(**{option: 0.0})
