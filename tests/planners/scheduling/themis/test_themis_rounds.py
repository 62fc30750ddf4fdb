"""Themis in rounds: who bids, what leases do, what happens to leftovers and to lost nodes."""

from dataclasses import replace
from math import ceil, inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Notice
from ebbflow.planners.model.scheduling import App, Decision, Placement, View, gpus_of
from ebbflow.planners.scheduling.auction.auction import AuctionOptions
from ebbflow.planners.scheduling.locality import Slowdown
from ebbflow.planners.scheduling.themis.leases import Lease, Leases, standings
from ebbflow.planners.scheduling.themis.themis import Themis, give_away
from tests.planners.scheduling.auction_worlds import capacity, job


def app(number: int, demand: int = 4, least: int = 1, left: float = 4000.0, arrival: float = 0.0) -> App:
    bidder = job(demand, left, Slowdown(1.0, 1.0, 1.29, 1.6), arrival)
    return App(f"a{number}", number, arrival, demand, least, demand, bidder=bidder)


def cluster(machines: int = 4, gpus: int = 4) -> Capacity:
    return capacity([gpus] * machines, [m // 2 for m in range(machines)])


def decide(
    policy: Themis, apps: list[App], nodes: Capacity, now: float, memory: object = None, seed: int = 0
) -> Decision:
    """Decide, check what every decision must hold, and hand it to the apps."""
    decision = policy.decide(View(now, apps, nodes), memory, np.random.default_rng(seed))
    used: dict[str, int] = {}
    for one in apps:
        grant = decision.grants[one.id]
        assert grant.reason
        assert gpus_of(grant.placement) == 0 or one.min_gpus <= gpus_of(grant.placement) <= one.max_gpus
        for node, gpus in grant.placement:
            used[node] = used.get(node, 0) + gpus
        assert grant.placement == () or now < grant.until <= now + policy.lease_s
    assert all(used[n] <= {m.id: m.gpus for m in nodes.nodes}[n] for n in used)
    for one in apps:
        one.held, one.lease_until = decision.grants[one.id].placement, decision.grants[one.id].until
    return decision


def test_a_lone_app_gets_what_it_can_use_together() -> None:
    one = app(0)
    decision = decide(Themis(), [one], cluster(), 0.0)
    assert len(one.held) == 1
    assert gpus_of(one.held) == 4
    assert decision.wake == 600.0
    assert decision.notes["gap"] == pytest.approx(0.0, abs=1e-6)


@settings(max_examples=25)
@given(st.integers(1, 12), st.sampled_from([0.0, 0.3, 0.8, 1.0]), st.integers(0, 3))
def test_the_worst_off_bid_and_no_gpu_stays_idle_that_anyone_wants(
    count: int, knob: float, seed: int
) -> None:
    apps = [
        app(i, 1 + i % 5, left=500.0 * (1 + (i + seed) % 4), arrival=-300.0 * ((i * 7 + seed) % 5))
        for i in range(count)
    ]
    nodes = cluster(3, 3)
    decision = decide(Themis(knob=knob), apps, nodes, 0.0, seed=seed)
    assert decision.notes["bidders"] == max(1, ceil((1 - knob) * count - 1e-9))
    longest = sorted((one.bidder.rho((("m0", 1),), nodes, 0.0) for one in apps), reverse=True)
    bidders = [a for a in apps if not decision.grants[a.id].reason.startswith("not among")]
    worst = sorted((one.bidder.rho((("m0", 1),), nodes, 0.0) for one in bidders), reverse=True)
    assert worst == longest[: len(bidders)]
    held = sum(gpus_of(a.held) for a in apps)
    # placements that would only slow an app down may stay idle, never while one holds nothing
    assert held == 9 or all(a.held for a in apps)


def test_equal_seeds_give_equal_rounds_and_others_do_not() -> None:
    def run(seed: int) -> list[Placement]:
        apps = [app(i) for i in range(8)]
        decide(Themis(), apps, cluster(), 0.0, seed=seed)
        return [a.held for a in apps]

    assert run(1) == run(1)
    assert any(run(1) != run(seed) for seed in range(2, 8))


def test_a_losers_rho_rises_until_it_is_among_the_bidders() -> None:
    policy, nodes = Themis(knob=0.9, leftovers="machine"), cluster(1, 2)
    apps, memory, now = [app(i, 2, 2, left=1e6) for i in range(3)], None, 0.0
    served = set()
    waiting: dict[str, float] = {}
    for _ in range(4):
        memory = decide(policy, apps, nodes, now, memory).memory
        served |= {a.id for a in apps if a.held}
        for one in apps:
            rho = one.bidder.rho((("m0", 2),), nodes, now)
            assert one.held or rho >= waiting.get(one.id, 0.0)
            waiting[one.id] = rho
            if one.held:
                one.bidder.job = replace(one.bidder.job, iterations=one.bidder.job.iterations - 600.0)
        now += 600.0
    assert served == {"a0", "a1", "a2"}


def test_leases_go_on_until_their_end_and_are_then_sold_again() -> None:
    policy, nodes = Themis(knob=0.0), cluster(1, 4)
    apps = [app(0, 4)]
    memory = decide(policy, apps, nodes, 0.0).memory
    had = apps[0].held
    apps.append(app(1, 4, arrival=-5000.0))
    between = decide(policy, apps, nodes, 300.0, memory)
    assert apps[0].held == had
    assert between.grants["a0"].reason == "lease continues"
    assert between.grants["a1"].reason == "pending (Resources): no free GPUs"
    after = decide(policy, apps, nodes, 600.0, between.memory)
    assert apps[1].held
    assert gpus_of(apps[0].held) + gpus_of(apps[1].held) == 4
    assert after.wake == 1200.0


def test_renewals_keep_the_same_gpus() -> None:
    policy = Themis(knob=0.0, options=AuctionOptions(payments="none"))
    apps, nodes = [app(i, 4) for i in range(4)], cluster()
    memory = decide(policy, apps, nodes, 0.0).memory
    before = {a.id: a.held for a in apps}
    for round_ in range(1, 4):
        memory = decide(policy, apps, nodes, 600.0 * round_, memory).memory
        assert {a.id: a.held for a in apps} == before


def test_a_lost_node_ends_its_leases_and_only_its() -> None:
    policy = Themis(knob=0.0, options=AuctionOptions(payments="none"))
    apps, nodes = [app(0, 4), app(1, 4)], cluster(2)
    memory = decide(policy, apps, nodes, 0.0).memory
    gone = apps[0].held[0][0]
    other = apps[1].held
    left = replace(nodes, nodes=tuple(n for n in nodes.nodes if n.id != gone))
    decision = decide(policy, apps, left, 100.0, memory)
    assert decision.grants["a0"].reason.startswith("lost 4 GPUs with their node")
    assert (apps[0].held, apps[1].held) == ((), other)
    again = decide(policy, apps, nodes, 200.0, decision.memory)
    assert gpus_of(apps[0].held) == 4
    assert again.grants["a0"].until == 800.0


def test_a_gang_that_lost_a_part_is_not_left_with_the_rest() -> None:
    policy = Themis(knob=0.0, options=AuctionOptions(payments="none"))
    apps, nodes = [app(0, 8, 8)], cluster(2)
    memory = decide(policy, apps, nodes, 0.0).memory
    assert gpus_of(apps[0].held) == 8
    one = replace(nodes, nodes=nodes.nodes[:1])
    memory = decide(policy, apps, one, 10.0, memory).memory
    assert apps[0].held == ()
    decide(policy, apps, nodes, 20.0, memory)
    assert gpus_of(apps[0].held) == 8


def test_a_node_with_a_firm_notice_is_worth_only_until_its_deadline() -> None:
    policy = Themis(knob=0.0, options=AuctionOptions(payments="none"))
    apps, nodes = [app(0, 4), app(1, 4)], cluster(2)
    memory = decide(policy, apps, nodes, 0.0).memory
    leaving = apps[0].held[0][0]
    told = replace(nodes, notices=(Notice(leaving, 120.0),))
    decision = decide(policy, apps, told, 50.0, memory)
    assert decision.grants["a0"].until == 120.0
    assert decision.wake == 120.0
    after = decide(policy, [*apps, app(2)], told, 120.0, decision.memory)
    assert apps[0].held == ()
    assert leaving not in {n for g in after.grants.values() for n, _ in g.placement}
    advice = replace(nodes, notices=(Notice(leaving, 120.0, "rebalance"),))
    decide(policy, apps, advice, 130.0, None)
    assert gpus_of(apps[0].held) + gpus_of(apps[1].held) == 8


def test_demand_that_shrinks_frees_gpus_at_once() -> None:
    policy = Themis(knob=0.0, options=AuctionOptions(payments="none"))
    apps, nodes = [app(0, 4)], cluster(1, 4)
    memory = decide(policy, apps, nodes, 0.0).memory
    apps[0].max_gpus = 1
    apps.append(app(1, 3))
    decide(policy, apps, nodes, 10.0, memory)
    assert [gpus_of(a.held) for a in apps] == [1, 3]


def test_gpus_held_without_a_lease_are_leased() -> None:
    one = replace(app(0), held=(("m0", 4),), lease_until=inf)
    found = standings(View(50.0, [one], cluster()), None, 600.0, 0.0)[0]
    assert found.live == (Lease((("m0", 4),), 650.0),)
    assert found.unmet == 0


def test_what_an_app_no_longer_holds_is_no_longer_leased() -> None:
    one = replace(app(0), held=(("m0", 1),))
    memory = Leases({"a0": (Lease((("m0", 3),), 500.0),)})
    found = standings(View(50.0, [one], cluster()), memory, 600.0, 0.0)[0]
    assert found.live == (Lease((("m0", 1),), 500.0),)


def test_leases_ending_within_the_pooling_window_are_one_round() -> None:
    one = replace(app(0), held=(("m0", 2),))
    memory = Leases({"a0": (Lease((("m0", 2),), 603.0),)})
    assert standings(View(600.0, [one], cluster()), memory, 600.0, 5.0)[0].ended == {"m0": 2}
    assert standings(View(600.0, [one], cluster()), memory, 600.0, 0.0)[0].ended == {}


def test_time_mode_keeps_every_gpu_for_a_part_of_the_lease() -> None:
    policy = Themis(knob=0.0, options=AuctionOptions(rounding="time"))
    apps, nodes = [app(i, 8, left=4000.0) for i in range(2)], cluster(1, 8)
    decision = decide(policy, apps, nodes, 0.0)
    assert [gpus_of(a.held) for a in apps] == [4, 4]
    assert all(decision.grants[a.id].until == pytest.approx(300.0) for a in apps)


def test_leftovers_are_drawn_evenly_among_those_who_accept() -> None:
    apps = [app(i, 40) for i in range(2)] + [app(2, 40)]
    holding: dict[str, dict[str, int]] = {a.id: {} for a in apps}
    rng = np.random.default_rng(3)
    free = {"m0": 60}
    given_ = give_away(free, apps, holding, {}, lambda one, has, after: one.id != "a2", "gpu", rng)
    assert set(given_) == {"a0", "a1"}
    assert abs(given_["a0"]["m0"] - given_["a1"]["m0"]) <= 24
    assert free == {"m0": 0}
    whole = give_away({"m0": 4, "m1": 4}, apps, {a.id: {} for a in apps}, {}, lambda *_: True, "machine", rng)
    assert sorted(sum(g.values()) for g in whole.values()) in ([4, 4], [8])


def test_affine_leftovers_go_back_to_who_had_them() -> None:
    apps = [app(i, 4) for i in range(6)]
    before = {"a4": {"m0": 2}}
    got = give_away(
        {"m0": 3}, apps, {a.id: {} for a in apps}, before, lambda *_: True, "affine", np.random.default_rng(0)
    )
    assert got["a4"]["m0"] >= 2


def test_an_app_declines_a_gpu_that_would_slow_it_down() -> None:
    bidder = job(8, 4000.0, Slowdown(1.0, 1.0, 3.0, 9.0))
    local = App("a0", 0, 0.0, 8, 1, 8, held=(("m0", 2),), bidder=bidder)
    nodes = capacity([2, 1], [0, 1])
    memory = Leases({"a0": (Lease((("m0", 2),), 500.0),)})
    decision = decide(Themis(), [local], nodes, 0.0, memory)
    assert local.held == (("m0", 2),)
    assert decision.notes["idle"] == 1.0


def test_leftovers_without_anyone_else_go_to_bidders_and_are_counted() -> None:
    apps = [app(i, 4) for i in range(2)]
    decision = decide(Themis(knob=0.0), apps, cluster(1, 4), 0.0)
    assert decision.notes["forfeited_share"] == 0.5
    assert decision.notes["to_bidders"] == 2.0
    assert sum(gpus_of(a.held) for a in apps) == 4


def test_an_app_without_a_bidder_and_bad_options_are_refused() -> None:
    with pytest.raises(OptionError, match="no bidder"):
        decide(Themis(), [App("x")], cluster(), 0.0)
    for bad in ({"knob": 1.5}, {"lease_s": 0.0}, {"kappa": 1.0}, {"leftovers": "none"}, {"pool_s": 600.0}):
        with pytest.raises(OptionError):
            Themis(**bad)


def test_a_cluster_without_gpus_makes_everyone_wait() -> None:
    decision = decide(Themis(), [app(0)], Capacity(0, ()), 0.0)
    assert (decision.grants["a0"].placement, decision.wake) == ((), inf)
