"""The policy with a bound on finish-time fairness: its rules by hand, and what must hold for any view."""

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Node, Notice
from ebbflow.planners.model.scheduling import App, View, gpus_of
from ebbflow.planners.scheduling.rho_bounded.elastic import size_weights
from ebbflow.planners.scheduling.rho_bounded.forecast import forecasts, groups_of
from ebbflow.planners.scheduling.rho_bounded.plan import Bounds, Plan, replan
from ebbflow.planners.scheduling.rho_bounded.policy import RhoBounded
from ebbflow.planners.scheduling.rho_bounded.rollout import Gangs, Rule, order, rollout


def node(number: int, gpus: int = 1, kind: str = "v100", price: float = 0.0) -> Node:
    return Node(f"n{number:02}", cores=gpus, memory=16.0, instance_type=kind, gpus=gpus, price=price)


def cluster(nodes: int, gpus: int = 1, notices: tuple[Notice, ...] = ()) -> Capacity:
    return Capacity(0, tuple(node(n, gpus) for n in range(nodes)), notices)


def gang(number: int, left: float, gpus: int = 1, **fields) -> App:
    fields = {"remaining": left, "throughputs": {"v100": 1.0}, **fields}
    return App(f"a{number}", number, gpus=gpus, min_gpus=gpus, max_gpus=gpus, **fields)


def decide(policy: RhoBounded, view: View, memory=None):
    return policy.decide(view, memory, np.random.default_rng(0))


def running(decision) -> dict[str, int]:
    return {a: gpus_of(g.placement) for a, g in decision.grants.items() if g.placement}


def gangs(left, gpus, fair=None, arrival=None, pool=None, pools=(2,), delay=0.0) -> Gangs:
    n = len(left)
    return Gangs(
        np.array(gpus),
        np.array(left, float),
        np.zeros(n) if arrival is None else np.array(arrival, float),
        np.full(n, 1e9) if fair is None else np.array(fair, float),
        np.ones((n, len(pools))),
        np.full(n, -1) if pool is None else np.array(pool),
        pools,
        delay,
    )


# Outlook


def test_time_alone_is_what_was_done_and_what_is_left_and_fair_is_that_times_contention():
    apps = [gang(0, 300.0), gang(1, 100.0, gpus=3)]
    first, history = forecasts(View(0.0, apps, cluster(2)), None)
    assert [(o.left, o.alone) for o in first] == [(300.0, 300.0), (100.0, 100.0)]
    assert [o.fair for o in first] == [450.0, 150.0]  # 1 + 2 GPUs asked for (3 cannot be had) over 2
    apps[0].remaining, apps[0].run_time, apps[0].restart_time = 250.0, 70.0, 20.0
    second, _ = forecasts(View(100.0, [apps[0]], cluster(2)), history)
    assert (second[0].left, second[0].alone) == (250.0, 300.0)
    assert second[0].fair == 450.0  # the mean over its life is 1.5, though it is alone now


def test_a_batch_size_that_changed_changes_the_outlook_only_once_it_is_reported():
    app = gang(0, 1000.0)
    (before,), history = forecasts(View(0.0, [app], cluster(1)), None)
    app.remaining, app.throughputs, app.run_time = 450.0, {"v100": 1.5}, 100.0
    (after,), _ = forecasts(View(100.0, [app], cluster(1)), history)
    assert (before.alone, after.left, after.alone) == (1000.0, 300.0, 400.0)


def test_time_on_a_slow_type_counts_by_its_speed():
    app = gang(0, 1000.0, throughputs={"v100": 2.0, "k80": 0.5}, held=(("n00", 1),))
    capacity = Capacity(0, (node(0, kind="k80"), node(1)))
    (first,), history = forecasts(View(0.0, [app], capacity), None)
    assert (first.left, first.rate("k80"), first.rate("p100")) == (500.0, 0.25, 0.0)
    app.run_time, app.remaining = 400.0, 800.0
    (later,), _ = forecasts(View(400.0, [app], capacity), history)
    assert (later.left, later.alone) == (400.0, 500.0)


def test_an_app_that_cannot_say_is_held_to_need_as_long_again():
    app = gang(0, inf)
    (first,), history = forecasts(View(0.0, [app], cluster(1)), None)
    app.run_time = 5000.0
    (later,), _ = forecasts(View(5000.0, [app], cluster(1)), history)
    assert (first.left, later.left, later.alone) == (600.0, 5000.0, 10000.0)


# Rules and forecasts


def test_shortest_first_fills_gaps_and_gang_power_counts_gpus():
    three = gangs([10, 20, 25], [1, 2, 1])
    assert rollout(three, 0.0, Rule(rho=inf)).tolist() == [10.0, 45.0, 25.0]
    two = gangs([20, 30], [2, 1])
    assert rollout(two, 0.0, Rule(0.0, inf)).tolist() == [20.0, 50.0]
    assert rollout(two, 0.0, Rule(1.0, inf)).tolist() == [50.0, 30.0]


def test_a_running_gang_stays_if_a_start_costs_more_than_the_difference():
    stays = gangs([100, 90], [2, 2], pool=[0, -1], delay=20.0)
    moves = gangs([100, 70], [2, 2], pool=[0, -1], delay=20.0)
    assert rollout(stays, 0.0, Rule(rho=inf)).tolist() == [100.0, 210.0]
    assert rollout(moves, 0.0, Rule(rho=inf)).tolist() == [210.0, 90.0]


def test_the_long_one_goes_first_when_the_makespan_hangs_on_it():
    mixed = gangs([100, 40, 40, 40], [1] * 4, pools=(2,))
    assert rollout(mixed, 0.0, Rule(rho=inf)).max() == 140.0
    assert rollout(mixed, 0.0, Rule(rho=inf, end=120.0)).tolist() == pytest.approx([117, 40, 63, 103], abs=1)
    assert order(mixed, mixed.left, np.ones(4, bool), 0.0, Rule(rho=inf, end=100.0))[1].tolist() == [
        0,
        2,
        2,
        2,
    ]


def test_an_app_takes_gpus_when_its_fairness_bound_runs_out():
    long_one = gangs([100, 30, 30, 30, 30], [1] * 5, fair=[150, 1e9, 1e9, 1e9, 1e9], pools=(1,))
    assert rollout(long_one, 0.0, Rule(rho=inf))[0] == 220.0
    assert rollout(long_one, 0.0, Rule(rho=1.0))[0] <= 150.0


def test_a_gang_larger_than_every_pool_never_finishes():
    assert rollout(gangs([10, 10], [3, 1]), 0.0, Rule()).tolist() == [inf, 10.0]


@given(
    st.lists(st.tuples(st.floats(1, 1000), st.integers(1, 4), st.floats(1, 8)), min_size=1, max_size=12),
    st.integers(4, 8),
    st.floats(0.5, 3.0),
)
def test_a_plan_keeps_the_bound_whenever_a_rule_it_tries_does(apps, pool, bound):
    left, gpus, slack = (np.array(column) for column in zip(*apps, strict=True))
    world = gangs(left, gpus.astype(int), fair=left * slack, pools=(pool,))
    # A generous makespan leaves fairness as the only bound.
    plan = replan(world, 0.0, Bounds(bound, 1e6), Plan(), True)
    allowed = np.maximum(bound, 1.05 * left / (left * slack))

    def excess(rule: Rule) -> float:
        return float((rollout(world, 0.0, rule) / world.fair / allowed).max())

    ends = [inf, *(world.lower_bound() * s for s in (1.0, 1.05, 1.1))]
    tried = [Rule(0.0, rho, end) for rho in (bound, inf) for end in ends]
    if any(excess(rule) <= 1.0 for rule in tried):
        assert excess(plan.rule) <= 1.01


def test_what_was_possible_stays_the_measure_until_apps_come():
    world = gangs([100, 10], [1, 1], pools=(1,))
    plan = replan(world, 0.0, Bounds(1.0, 1.0), Plan(), True)
    assert plan.soonest == 110.0
    assert replan(world, 50.0, Bounds(1.0, 1.0), plan, False).soonest == 110.0
    assert replan(world, 50.0, Bounds(1.0, 1.0), plan, True).soonest == 160.0


# Decisions on gangs


def test_the_shortest_run_and_the_rest_wait_with_reasons():
    view = View(0.0, [gang(0, 500), gang(1, 100), gang(2, 100, gpus=2)], cluster(3))
    decision = decide(RhoBounded(rho=1e6, makespan=1e6), view)
    assert running(decision) == {"a1": 1, "a2": 2}
    assert decision.grants["a0"].reason == "pending (Priority)"
    assert decision.wake >= 60.0


def test_fast_gpus_go_to_the_shortest():
    capacity = Capacity(0, (node(0, kind="k80"), node(1)))
    both = {"v100": 4.0, "k80": 1.0}
    view = View(0.0, [gang(0, 9000, throughputs=both), gang(1, 400, throughputs=both)], capacity)
    grants = decide(RhoBounded(rho=1e6, makespan=1e6), view).grants
    assert (grants["a1"].placement, grants["a0"].placement) == ((("n01", 1),), (("n00", 1),))


@given(st.data())
def test_capacity_and_gangs_hold_and_equal_inputs_give_equal_decisions(data):
    nodes = data.draw(st.integers(1, 4))
    per_node = data.draw(st.integers(1, 4))
    gone = data.draw(st.lists(st.tuples(st.integers(0, nodes - 1), st.floats(1, 500)), max_size=2))
    notices = tuple(Notice(f"n{n:02}", at) for n, at in gone)
    capacity = cluster(nodes, per_node, notices)
    sizes = st.tuples(st.floats(1, 2000), st.integers(1, nodes * per_node), st.booleans())
    drawn = data.draw(st.lists(sizes, min_size=1, max_size=10))
    apps = []
    for number, (left, gpus, elastic) in enumerate(drawn):
        app = gang(number, left, gpus)
        if elastic:
            app.min_gpus, app.max_gpus = 1, nodes * per_node
        apps.append(app)
    view = View(0.0, apps, capacity)
    decision = decide(RhoBounded(), view)
    assert decide(RhoBounded(), view).grants == decision.grants
    assert set(decision.grants) == {app.id for app in apps}
    used: dict[str, int] = {}
    for app in apps:
        placement = decision.grants[app.id].placement
        assert not placement or app.min_gpus <= gpus_of(placement) <= app.max_gpus
        assert bool(placement) or decision.grants[app.id].reason
        for id_, gpus in placement:
            used[id_] = used.get(id_, 0) + gpus
    assert all(gpus <= per_node for gpus in used.values())


# GPUs that leave, and money


def leaving(left: float, deadline: float, **fields):
    capacity = cluster(1, notices=(Notice("n00", deadline),))
    policy = RhoBounded(delay_s=30, leave_s=30)
    return decide(policy, View(0.0, [gang(0, left, **fields)], capacity)).grants["a0"]


def test_gpus_that_leave_serve_who_is_over_in_time():
    grant = leaving(60.0, 125.0)  # 30 to start, 60 to run, 30 to be gone
    assert (gpus_of(grant.placement), grant.until) == (1, 95.0)


def test_gpus_that_leave_serve_who_trains_longer_than_two_starts_take():
    assert not leaving(5000.0, 90.0).placement  # 60 s: a start now, and one again later
    assert leaving(5000.0, 92.0).placement
    assert leaving(5000.0, 62.0, held=(("n00", 1),)).placement  # it runs there already: one start
    assert not leaving(5000.0, 60.0, held=(("n00", 1),)).placement


def test_gpus_that_stay_come_first_and_advice_is_not_a_deadline():
    app = gang(0, 5000.0)
    firm = cluster(2, notices=(Notice("n00", 1000.0),))
    assert decide(RhoBounded(), View(0.0, [app], firm)).grants["a0"].placement == (("n01", 1),)
    advice = cluster(1, notices=(Notice("n00", 40.0, "rebalance"),))
    grant = decide(RhoBounded(), View(0.0, [app], advice)).grants["a0"]
    assert (gpus_of(grant.placement), grant.until) == (1, inf)


def test_a_node_past_its_deadline_is_worth_nothing():
    capacity = cluster(1, notices=(Notice("n00", 50.0),))
    assert groups_of(View(50.0, [], capacity)) == []


def test_nobody_buys_gpus_that_cost_more_than_they_give_unless_a_bound_is_at_stake():
    capacity = Capacity(0, (node(0, price=2.0),))
    app = gang(0, 100.0)
    dear = RhoBounded(rho=1e6, makespan=1e6, value=1.0)
    assert (
        decide(dear, View(0.0, [app], capacity)).grants["a0"].reason
        == "pending (Cost): GPUs cost more than their value"
    )
    assert running(decide(RhoBounded(rho=1e6, makespan=1e6, value=3.0), View(0.0, [app], capacity))) == {
        "a0": 1
    }
    assert running(decide(RhoBounded(rho=0.5, value=1.0), View(0.0, [app], capacity))) == {"a0": 1}


# Elastic apps


class Scales:
    """Goodput that grows as GPUs to the power of ``p``; unused nodes don't matter."""

    def __init__(self, p: float = 1.0) -> None:
        self.p = p

    def best(self, nodes, gpus):
        return np.where(gpus > 0, np.maximum(gpus, 1e-9) ** self.p, 0.0)


def elastic(number: int, left: float, p: float = 0.8, gpus: int = 4, **fields) -> App:
    fields = {"most_gpus": 8, "arrival": -1000.0, **fields}
    return App(f"a{number}", number, gpus=gpus, max_gpus=8, goodput=Scales(p), goodput_left=left, **fields)


def test_weights_are_those_of_hesrpt():
    # p = 1/2: the largest of two should get (1/2)**2 of the GPUs, the other the rest: 1/4 and 3/4.
    assert size_weights([100.0, 10.0], 0.5, -1.0) == pytest.approx([(1 / 3) ** 1.5, 1.0])
    thirds = [1.0, (3 / 5) ** 1.25, (1 / 5) ** 1.25]
    assert size_weights([10.0, 100.0, 1000.0], 0.5, -0.5) == pytest.approx(thirds)
    assert size_weights([5.0, 5.0], 0.0).tolist() == [1.0, 1.0]
    assert size_weights([], 0.5).tolist() == []


@pytest.mark.parametrize("scaling", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("exponent", [-1.0, -0.3])
def test_weights_make_the_mean_share_gpus_as_hesrpt_does(scaling, exponent):
    weights = size_weights([400.0, 300.0, 200.0, 100.0], scaling, exponent)
    gpus = weights ** (1 / (1 - scaling * exponent))  # where the sum of w (k**p)**q over k is least
    c = 1 / (1 - scaling)
    wanted = np.diff((np.arange(5) / 4) ** c)
    assert gpus / gpus.sum() == pytest.approx(wanted)


def test_the_smaller_app_gets_more_gpus():
    view = View(0.0, [elastic(0, 90_000.0), elastic(1, 900.0)], cluster(2, 4))
    granted = running(decide(RhoBounded(rho=1e6), view))
    assert granted["a1"] > granted["a0"] > 0


def test_an_app_whose_bound_runs_out_gets_the_gpus_that_bring_it_home():
    # 15,000 s are left on the 6 GPUs it asks for, 14 are asked for and 8 there: due 26,250 s after it came.
    late = elastic(0, 90_000.0, p=1.0, gpus=6, arrival=-12_000.0)
    others = [elastic(n, 900.0, arrival=-100.0) for n in (1, 2)]
    view = View(0.0, [late, *others], cluster(2, 4))
    bounded, free = (running(decide(RhoBounded(rho=rho), view)) for rho in (1.0, 1e6))
    assert bounded["a0"] >= 6 > free.get("a0", 0)


def test_gpus_whose_goodput_does_not_pay_stay_idle():
    capacity = Capacity(0, tuple(node(n, 4, price=4.0) for n in range(2)))
    view = View(0.0, [elastic(0, 1e6, p=0.5)], capacity)
    # One dollar per GPU-hour. The k-th GPU adds sqrt(k) - sqrt(k - 1): 1, 0.41, 0.32, 0.27, 0.24, ...
    assert running(decide(RhoBounded(rho=1e6, value=2.6), view)) == {"a0": 2}
    assert running(decide(RhoBounded(rho=1e6, value=0.9), view)) == {}
    assert running(decide(RhoBounded(rho=1e6), view)) == {"a0": 8}


def test_elastic_apps_use_gpus_that_leave_only_while_it_pays():
    notices = (Notice("n00", 1000.0),)
    view = View(0.0, [elastic(0, 1e6), elastic(1, 1e6)], cluster(1, 4, notices))
    granted = running(decide(RhoBounded(), view))
    assert granted == {"a0": 4}
    short = View(0.0, [elastic(0, 1e6)], cluster(1, 4, (Notice("n00", 80.0),)))
    assert running(decide(RhoBounded(), short)) == {}


def test_who_is_over_before_its_gpus_leave_stays():
    app = elastic(0, 100.0, p=1.0, held=(("n00", 4),))
    view = View(0.0, [app], cluster(2, 4, (Notice("n00", 120.0),)))
    grant = decide(RhoBounded(), view).grants["a0"]
    assert (grant.placement, grant.until) == ((("n00", 4),), 90.0)


def test_gangs_among_elastic_apps_run_whole_and_know_when_they_are_over():
    # 400 iterations at 4/s: 100 s, over before its node leaves.
    rigid = gang(1, 400.0, gpus=3, throughputs={"v100": 4.0}, held=(("n00", 3),), arrival=-50.0)
    view = View(0.0, [elastic(0, 1e6), rigid], cluster(2, 4, (Notice("n00", 140.0),)))
    grants = decide(RhoBounded(), view).grants
    assert grants["a1"].placement == (("n00", 3),)
    rigid.remaining = 4000.0
    assert running(decide(RhoBounded(), view))["a1"] == 3
    assert decide(RhoBounded(), view).grants["a1"].placement == (("n01", 3),)


@pytest.mark.parametrize(
    "options",
    [{"rho": 0.0}, {"makespan": 0.9}, {"delay_s": -1.0}, {"leave_s": inf}, {"replan_s": 0.0},
     {"interval_s": inf}, {"value": 0.0}, {"scaling": 1.0}],
)  # fmt: skip
def test_options_outside_their_rule(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        RhoBounded(**options)


def test_an_app_that_cannot_use_all_that_its_user_asked_for_gets_no_more_than_it_can_use():
    app = App("a0", 0, gpus=2, min_gpus=1, max_gpus=1, remaining=100.0, throughputs={"v100": 1.0})
    decision = decide(RhoBounded(), View(0.0, [app], cluster(1, 4)))
    assert running(decision) == {"a0": 1}
