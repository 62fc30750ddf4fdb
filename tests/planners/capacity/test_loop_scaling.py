"""How many nodes there are to be: for deadlines and waiting apps, none for nobody, no flapping."""

from dataclasses import replace

import pytest
from ledger_worlds import START, World, app, applied, fleet_of, node, pool

from ebbflow.planners.capacity.scaling import becomes
from ebbflow.planners.capacity.values import Scaling, Settings
from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.limits import Limits, PoolLimits
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.fleet import Fleet, Offer, Target
from ebbflow.planners.model.ledger import AppReport, CapacityChanged
from ebbflow.planners.scheduling.live import live_policy

RULES = Scaling(
    provision_time_s=20.0, scale_out_after_s=10.0, scale_in_idle_s=60.0, cooldown_s=30.0, fallback=None
)
GANGS = Settings(
    policy=live_policy("best-effort"), lease_s=60, interval_s=10, termination_grace_s=5, scaling=RULES
)


class Rented(World):
    """A world whose fleet does what it is told: nodes come ``boot`` s after they were asked for."""

    def __init__(self, settings: Settings, fleet: Fleet, boot: float = 20.0, **more) -> None:
        super().__init__(settings, [one for p in fleet.pools for one in p.nodes], fleet=fleet, **more)
        self.boot, self.coming = boot, []
        self.targets = []
        self.number = 0
        self.dry = False

    def cycle(self):
        cycle = super().cycle()
        for target in cycle.targets:
            self.targets.append((self.now - START, target))
            before = next(p for p in self.fleet.pools if p.name == target.pool)
            self.fleet = applied(self.fleet, target)
            self.coming += [(self.now + self.boot, target.pool)] * max(target.nodes - before.planned, 0)
        if cycle.end:
            self._change(gone=set(cycle.end))
        while not self.dry and self.coming and self.coming[0][0] <= self.now:
            _, name = self.coming.pop(0)
            self.number += 1
            like = next(p for p in self.fleet.pools if p.name == name)
            gpus = like.nodes[0].gpus if like.nodes else 2
            self._change(came=((name, node(f"{name}-{self.number}", gpus)),))
        return cycle

    def _change(self, came=(), gone=()):
        pools = tuple(
            replace(
                p,
                nodes=tuple(
                    sorted(
                        [n for n in p.nodes if n.id not in gone] + [n for name, n in came if name == p.name],
                        key=lambda n: n.id,
                    )
                ),
                draining=tuple(id_ for id_ in p.draining if id_ not in gone),
            )
            for p in self.fleet.pools
        )
        self.fleet = replace(self.fleet, pools=pools, revision=self.fleet.revision + 1)
        left = tuple(sorted(id_ for id_ in gone if id_ in self.state.nodes))
        self.write([CapacityChanged(self.state.revision + 1, tuple(n for _, n in came), left)])

    @property
    def sizes(self) -> dict[str, int]:
        return {p.name: p.planned for p in self.fleet.pools}


def gpus(count: int = 1, each: int = 2, **more):
    nodes = tuple(node(f"n{i}", each) for i in range(count))
    return pool("gpu", nodes, **more)


def test_an_app_that_waits_for_too_long_gets_nodes_no_more_than_it_needs():
    world = Rented(GANGS, fleet_of(gpus(1)))
    world.enter(app("a", 6))
    world.steps(9)
    assert world.targets == []
    world.steps(4)
    [(at, target)] = world.targets
    assert at >= 10.0
    assert target.nodes == 3
    assert "a has waited for" in target.reason
    assert any("gpu scale-out 1 → 3 nodes" in why for why in world.said("scaling"))
    world.steps(40)
    assert world.live("a") == 6
    assert world.sizes == {"gpu": 3}


def test_nodes_leave_when_they_have_been_idle_drained_and_empty_ones_only():
    world = Rented(GANGS, fleet_of(gpus(3)))
    world.enter(app("a", 2))
    world.step()
    [used] = world.placement("a")
    world.steps(55)
    assert world.targets == []
    world.steps(15)
    assert world.sizes == {"gpu": 1}
    drained = {id_ for _, target in world.targets for id_ in target.drain}
    assert drained == {"n0", "n1", "n2"} - {used}
    assert set(world.state.nodes) == {used}
    assert world.live("a") == 2


def test_a_deadline_that_nears_brings_nodes_before_it_is_too_late():
    rules = replace(GANGS, policy=live_policy("rho-bounded", {"interval_s": 5}))
    world = Rented(rules, fleet_of(gpus(1)))
    world.enter(app("a", 2, 1, 8, deadline=START + 300.0), work=1500.0)
    world.steps(60)
    first = world.targets[0][1]
    assert "a needs" in first.reason
    assert "to complete within" in first.reason
    assert world.sizes["gpu"] >= 3
    while world.state.apps["a"].phase != "finished":
        world.step()
        assert world.now < START + 300.0


def test_no_nodes_are_rented_for_a_deadline_that_can_be_met_or_is_over():
    world = Rented(GANGS, fleet_of(gpus(2)))
    world.enter(app("a", 2, 2, 4, deadline=START + 1000.0), work=400.0)
    world.enter(app("b", 2, 2, 4, deadline=START - 5.0), work=4000.0)
    world.steps(30)
    assert world.targets == []


def test_a_wish_that_comes_and_goes_does_not_make_the_fleet_flap():
    world = Rented(GANGS, fleet_of(gpus(1)))
    for round_ in range(4):
        world.enter(app(f"a{round_}", 4))
        world.steps(40)
        world.finish(f"a{round_}")
        world.steps(15)
    assert [target.nodes for _, target in world.targets] == [2]


def test_no_node_is_rented_for_an_app_that_has_no_money_left():
    world = Rented(GANGS, fleet_of(gpus(1)))
    world.enter(app("a", 4, budget=0.0))
    world.steps(60)
    assert world.targets == []


def test_the_guard_keeps_targets_within_limits_and_says_so_once():
    rules = replace(GANGS, limits=Limits(pools={"gpu": PoolLimits(max_nodes=1)}))
    world = Rented(rules, fleet_of(gpus(1)))
    world.enter(app("a", 6))
    world.steps(60)
    assert world.targets == []
    said = [why for why in world.said("guard") if why.startswith("gpu stays")]
    assert len(said) == 1
    assert "the pool's limit is 1" in said[0]


def test_of_two_pools_the_cheaper_grows_first():
    offers = {
        "dear": (Offer("p3", "a", "spot", 4.0, 8, 61.0, 2),),
        "cheap": (Offer("g4", "a", "spot", 1.0, 8, 61.0, 2),),
    }
    fleet = fleet_of(pool("dear", (), most=4), pool("cheap", (), most=2))
    world = Rented(GANGS, fleet)
    world.offers = offers
    world.enter(app("a", 6))
    world.steps(15)
    assert world.sizes == {"cheap": 2, "dear": 1}


def test_pools_that_grow_in_one_cycle_share_the_limits():
    rules = replace(GANGS, limits=Limits(nodes=2))
    world = Rented(rules, fleet_of(pool("one", (), most=2), pool("two", (), most=2)))
    both = (Offer("g4", "a", "spot", 1.0, 8, 61.0, 2),)
    world.offers = {"one": both, "two": both}
    world.enter(app("a", 8))
    world.steps(15)
    assert world.sizes == {"one": 2, "two": 0}
    assert any("all pools may have 2, the others have 2" in why for why in world.said("guard"))


def test_a_dry_spot_pool_falls_back_to_on_demand():
    from ebbflow.planners.fleet.fallback import Fallback

    rules = replace(GANGS, scaling=replace(RULES, fallback=Fallback(after=30.0, hold=600.0)))
    world = Rented(rules, fleet_of(gpus(1)))
    world.dry = True
    world.enter(app("a", 4))
    world.steps(15)
    short = tuple(replace(p, short_since=world.now) for p in world.fleet.pools)
    world.fleet = replace(world.fleet, pools=short)
    world.steps(40)
    assert world.fleet.pools[0].on_demand == 1
    assert any("insufficient Spot capacity" in why for why in world.said("scaling"))


def test_a_noticed_node_is_not_counted_on():
    world = Rented(GANGS, fleet_of(gpus(2)))
    world.enter(app("a", 4))
    world.steps(3)
    world.notice("n0", 60)
    world.steps(30)
    assert world.state.apps["a"].phase != "lost"
    # what the notice takes is asked for again by the provider: the plan still stands at two nodes
    assert world.sizes["gpu"] >= 2


def test_a_query_near_its_deadline_brings_cores():
    nodes = (node("c1", 0, cores=4),)
    world = Rented(GANGS, fleet_of(pool("etl", nodes)))
    living = world.enter(app("q", 0, kind="query", deadline=START + 200.0))
    living.fields |= {"cores": 64.0, "seconds_left": 150.0}
    world.steps(5)
    assert world.targets == []  # 150 s of the 195 that are left
    living.fields["seconds_left"] = 600.0
    world.steps(5)
    assert world.sizes["etl"] >= 4
    assert "q needs" in world.targets[0][1].reason


def test_cores_that_queries_need_are_rented_once_of_the_cheapest_pool_first():
    dear = pool("dear", (node("d1", 0, cores=4, price=4.0),))
    cheap = pool("cheap", (node("c1", 0, cores=4, price=1.0),), most=3)
    world = Rented(GANGS, fleet_of(dear, cheap))
    living = world.enter(app("q", 0, kind="query", deadline=START + 200.0))
    living.fields |= {"cores": 64.0, "seconds_left": 600.0}  # on the 8 cores of both
    world.steps(2)
    # 600 s on 8 cores with a reserve of 1.1, less 20 s until nodes come: 5120 core-seconds in 179 s, so 29 cores
    assert world.sizes == {"cheap": 3, "dear": 5}
    assert "q needs 29 cores" in world.targets[0][1].reason


def test_queries_keep_no_more_of_several_pools_than_they_can_use():
    pools = [pool(name, tuple(node(f"{name}{i}", 0, cores=4) for i in range(3))) for name in ("a", "b")]
    world = Rented(GANGS, fleet_of(*pools))
    living = world.enter(app("q", 0, kind="query"))
    living.fields |= {"cores": 14.0}
    world.steps(70)
    assert world.sizes == {"a": 3, "b": 1}


def test_without_queries_the_pool_of_cores_shrinks_to_its_least():
    nodes = tuple(node(f"c{i}", 0, cores=4) for i in range(3))
    world = Rented(GANGS, fleet_of(pool("etl", nodes, min_nodes=1)))
    world.steps(70)
    assert world.sizes == {"etl": 1}


def test_without_rules_the_fleet_is_left_alone():
    world = Rented(replace(GANGS, scaling=None), fleet_of(gpus(1)))
    world.enter(app("a", 4))
    world.steps(60)
    assert world.targets == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"provision_time_s": -1.0}, "provision_time_s must be >= 0 s"),
        ({"deadline_safety_factor": 0.5}, "deadline_safety_factor must be >= 1"),
        ({"pools": {"x": "disks"}}, "pool x must be for 'gpus', 'cores' or 'aggregators'; got 'disks'"),
    ],
)
def test_rules_that_make_no_sense_are_refused(values, said):
    with pytest.raises(OptionError, match=said):
        Scaling(**values)


def test_rebalance_advice_and_reports_of_strangers_change_no_size():
    world = Rented(GANGS, fleet_of(gpus(1)))
    world.capacity(notices=(Notice("n0", START + 100.0, "rebalance"),))
    world.reports["stranger"] = AppReport(START, cores=500.0)
    world.steps(20)
    assert world.targets == []


def test_gpus_that_give_enough_goodput_are_rented_only_where_that_is_asked_for():
    from test_live_views import JOB

    for worth, nodes in ((None, 1), (0.5, 2)):
        rules = replace(
            GANGS, scaling=replace(RULES, min_marginal_goodput=worth), policy=live_policy("rho-bounded")
        )
        world = Rented(rules, fleet_of(gpus(1)))
        living = world.enter(app("a", 2, 1, 8))
        living.fields |= {"job": JOB.to_dict(), "seconds_left": 1e6}
        world.steps(30)
        assert world.sizes["gpu"] >= nodes
        assert bool(world.targets) == (worth is not None)


def test_a_node_that_is_wanted_now_is_not_drained_in_the_same_moment():
    world = Rented(GANGS, fleet_of(gpus(2)))
    world.steps(58)
    for number in range(8):  # somebody comes just when idle nodes are about to leave
        world.enter(app(f"a{number}", 4))
        world.step(0.3)
        world.step(0.5)
        drained = {id_ for p in world.fleet.pools for id_ in p.draining}
        assert not drained & {lease.node for lease in world.state.leases.values()}


def test_a_fleet_that_does_not_answer_leaves_draining_nodes_closed():
    world = Rented(GANGS, fleet_of(gpus(2, draining=("n0",))))
    world.boot = 1e9
    world.step()
    world.fleet, fleet = None, world.fleet
    world.cycle = super(Rented, world).cycle
    world.enter(app("a", 2))
    world.steps(3)
    assert world.placement("a") == {"n1": 2}
    assert fleet is not None


def test_a_clock_that_is_set_back_stops_nothing():
    world = Rented(GANGS, fleet_of(gpus(2)))
    world.enter(app("a", 2))
    world.steps(20)
    world.now -= 100.0
    world.steps(80)
    assert world.live("a") == 2
    assert world.sizes["gpu"] == 1


def test_an_empty_pool_grows_again_by_nodes_like_those_that_it_had():
    world = Rented(GANGS, fleet_of(gpus(1)))
    world.steps(70)
    assert world.sizes == {"gpu": 0}
    assert not world.state.nodes
    world.enter(app("a", 4))
    world.steps(15)
    assert world.sizes == {"gpu": 2}


def test_of_a_pool_of_which_nothing_is_known_one_node_is_tried_first():
    rules = replace(GANGS, scaling=replace(RULES, pools={"gpu": "gpus"}))
    world = Rented(rules, fleet_of(pool("gpu", ())))
    world.enter(app("a", 4))
    world.steps(15)
    assert world.sizes == {"gpu": 1}
    world.steps(40)
    assert world.live("a") == 4
    assert world.sizes == {"gpu": 2}


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ({"nodes": 4}, "scale-out 3 → 4 nodes"),
        ({"nodes": 1}, "scale-in 3 → 1 node"),
        ({"nodes": 3, "drain": ("n1",)}, "stays at 3 nodes, drains n1"),
        ({"nodes": 3, "on_demand": 2}, "stays at 3 nodes, 2 of them on-demand instead of 0"),
    ],
)
def test_what_becomes_of_a_pool_is_said_as_people_say_it(target, said):
    there = gpus(3, draining=("n0",))
    values = {"drain": ("n0",), **target}
    if "n1" in values["drain"]:
        values["drain"] = ("n0", "n1")
    assert becomes(there, Target("gpu", revision=1, reason="", **values)) == said
