"""Nodes of shared aggregators: launched with GPUs, leased, paid, drained at a notice and given back."""

from dataclasses import replace

from ledger_worlds import START, app, fleet_of, node, pool
from test_loop_scaling import GANGS, RULES, Rented

from ebbflow.planners.aggregation.accounts import SharedAccounts
from ebbflow.planners.aggregation.demand import AggregationDemand, RunDemand, ServingNode
from ebbflow.planners.capacity.admission import over_budget
from ebbflow.planners.capacity.cycle_state import CycleState
from ebbflow.planners.capacity.leases import SERVICE
from ebbflow.planners.capacity.need import room_of
from ebbflow.planners.capacity.view import active
from ebbflow.planners.model.ledger import REMEMBERED, Recalled

SETTINGS = replace(GANGS, scaling=replace(RULES, pools={"agg": "aggregators"}))


class Serving(Rented):
    """An aggregator serves on each node of ``agg``, and ends where the loop drains it and nothing is left on it."""

    def __init__(self, *nodes: str) -> None:
        there = tuple(node(name, 0, price=0.5) for name in nodes)
        gpus = pool("gpu", (node("n0", 2),))
        super().__init__(SETTINGS, fleet_of(pool("agg", there, most=4), gpus))
        self.runs: tuple[RunDemand, ...] = ()
        self.tensors: dict[str, int] = {}  # by node
        self.draining: dict[str, float] = {}  # by aggregator
        self.ended: set[str] = set()
        self.unsaid: set[str] = set()  # nodes whose records are of the time before there were tensors
        self.known = True

    def cycle(self):
        there = [id_ for id_ in self.state.nodes if id_.startswith("agg") and f"on-{id_}" not in self.ended]
        said = {id_: 0 if id_ in self.unsaid else self.tensors.get(id_, 0) for id_ in there}
        nodes = [ServingNode(f"on-{id_}", id_, said[id_], self.draining.get(f"on-{id_}")) for id_ in there]
        self.aggregation = AggregationDemand(self.runs, tuple(nodes)) if self.known else None
        cycle = super().cycle()
        self.draining |= dict(cycle.drain)
        self.ended |= {one for one in self.draining if not self.tensors.get(one.removeprefix("on-"))}
        return cycle

    def _change(self, came=(), gone=()):
        super()._change(
            tuple((name, replace(one, gpus=0) if name == "agg" else one) for name, one in came), gone
        )

    @property
    def leased(self) -> set[str]:
        return {lease.node for lease in self.state.held(SERVICE)} if SERVICE in self.state.apps else set()


def test_aggregators_come_with_gpus_are_leased_and_are_given_back_after_the_last_training():
    world = Serving()
    world.enter(app("a", 2, aggregators=2))
    world.steps(3)
    assert world.sizes["agg"] == 2, "asked for with its GPUs, before the training has come to the service"
    assert any("agg scale-out 0 → 2 nodes: a begins on 2 aggregators" in why for why in world.said("scaling"))
    world.steps(25)
    assert world.leased == {"agg-1", "agg-2"}
    assert world.state.apps[SERVICE].phase == "running"
    assert world.live("a") == 2
    world.runs = (RunDemand("a", 2, placed=True),)
    world.tensors = {"agg-1": 3}
    world.steps(200)
    assert world.sizes["agg"] == 1, "the idle one is drained and ended"
    assert world.leased == {"agg-1"}
    assert world.draining.keys() == {"on-agg-2"}
    world.runs, world.tensors = (), {}
    world.finish("a")
    world.steps(200)
    assert world.sizes["agg"] == 0
    assert world.leased == set()
    assert world.state.apps[SERVICE].phase == "finished"
    assert world.state.apps[SERVICE].dollars > 0
    hours = (world.now - START) / 3600
    assert world.state.apps[SERVICE].dollars < 2 * 0.5 * hours


def test_a_training_that_waits_for_gpus_gets_no_aggregators_until_nodes_are_launched_for_it():
    world = Serving()
    world.enter(app("holder", 2))
    world.steps(2)
    world.enter(app("a", 2, aggregators=1))
    world.steps(8)
    assert world.sizes["agg"] == 0
    world.steps(8)
    assert world.sizes == {"agg": 1, "gpu": 2}, "both at once"


def test_a_notice_drains_an_aggregator_before_its_deadline_and_its_lease_ends_with_it():
    world = Serving("agg-1", "agg-2")
    world.enter(app("a", 2, aggregators=2))
    world.runs, world.tensors = (RunDemand("a", 2, placed=True),), {"agg-1": 2, "agg-2": 2}
    world.steps(3)
    assert world.leased == {"agg-1", "agg-2"}
    world.notice("agg-1", 100.0)
    deadline = world.now + 100.0
    world.steps(2)
    assert world.now < world.draining["on-agg-1"] < deadline
    [recalled] = [e.change for e in world.events if isinstance(e.change, Recalled)]
    assert "agg-1 terminates in" in recalled.reason
    assert world.state.held(SERVICE)[0].recalled == recalled.deadline
    world.tensors = {"agg-2": 4}
    world.steps(3)
    assert world.leased == {"agg-2"}
    assert "on-agg-2" not in world.draining


def test_a_node_that_leaves_is_not_ended_before_its_aggregator_which_has_more_than_it_has_said():
    world = Serving("agg-1", "agg-2")
    world.enter(app("a", 2, aggregators=2))
    world.runs, world.tensors = (RunDemand("a", 2, placed=True),), {"agg-1": 2, "agg-2": 2}
    world.unsaid = {"agg-1"}
    world.steps(100)
    assert "on-agg-1" in world.draining, "it seems idle"
    assert "agg-1" in world.state.nodes, "ended with tensors on it"
    world.tensors = {"agg-2": 4}
    world.steps(3)
    assert world.state.nodes.keys() == {"n0", "agg-2"}


def test_no_aggregators_node_is_ended_while_nothing_is_known_of_the_service():
    world = Serving("agg-1")
    world.enter(app("a", 2, aggregators=1))
    world.runs, world.tensors = (RunDemand("a", 1, placed=True),), {"agg-1": 2}
    world.steps(3)
    world.known = False
    world.steps(200)
    assert "agg-1" in world.state.nodes
    assert world.leased == {"agg-1"}


def test_leases_of_aggregators_are_no_gpus_to_anybody():
    world = Serving("agg-1")
    world.enter(app("a", 2, aggregators=1))
    world.runs, world.tensors = (RunDemand("a", 1, placed=True),), {"agg-1": 2}
    world.steps(3)
    assert world.live("a") == 2
    assert room_of(world.state).free_gpus == 0
    world.finish("a")
    world.steps(2)
    assert world.leased == {"agg-1"}
    assert room_of(world.state).free_gpus == 2


def test_a_share_of_aggregators_counts_for_a_trainings_budget():
    world = Serving("agg-1")
    world.enter(app("a", 2, aggregators=1, budget=5.0))
    world.runs, world.tensors = (RunDemand("a", 1, placed=True),), {"agg-1": 2}
    world.steps(3)
    assert world.live("a") == 2
    [(situation, memory, _, _)] = world.cycles[-1:]
    assert situation.aggregation is not None
    rich = replace(situation.aggregation, accounts=SharedAccounts(dollars={"a": 6.0}))
    scene = CycleState.of(replace(situation, aggregation=rich), world.settings, memory.draining)
    refused, _ = over_budget(scene, active(scene))
    assert "a" in refused
    scene = CycleState.of(situation, world.settings, memory.draining)
    assert over_budget(scene, active(scene))[0] == {}


def test_what_forgotten_trainings_have_used_counts_for_their_pipelines_budget():
    world = Serving("agg-1")
    world.enter(replace(app("a", 2, aggregators=1), pipeline="nightly", pipeline_budget=5.0))
    world.runs, world.tensors = (RunDemand("a", 1, placed=True),), {"agg-1": 2}
    world.steps(3)
    [(situation, memory, _, _)] = world.cycles[-1:]
    assert situation.aggregation is not None

    def refused(accounts: SharedAccounts) -> dict[str, str]:
        past = replace(situation.aggregation, accounts=accounts)
        scene = CycleState.of(replace(situation, aggregation=past), world.settings, memory.draining)
        return over_budget(scene, active(scene))[0]

    assert "the pipeline nightly's budget" in refused(SharedAccounts(pipelines={"nightly": 6.0}))["a"]
    assert refused(SharedAccounts(pipelines={"weekly": 6.0})) == {}
    # the ledger's state has forgotten it, and the accounts keep it by itself
    old = SharedAccounts().paid({"old": 6.0}, 0.0).settled({"old": ("", "nightly")}, [], 0.0, REMEMBERED)
    for now in (1.0, REMEMBERED, REMEMBERED + 1.0):
        old = old.settled({"a": ("", "nightly")}, [], now, REMEMBERED)
        assert "the pipeline nightly's budget" in refused(old)["a"]
    assert not old.dollars
