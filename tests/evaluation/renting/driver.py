"""Runs one job on a simulated fleet under one strategy, and says what came of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from ebbflow.infra.protocols import FleetControl
from ebbflow.planners.fleet.market import Place, SpotObservation
from ebbflow.planners.fleet.scaling.scale_in import NodeUse, may_end, with_drains
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.fleet import Fleet, Target
from ebbflow.planners.model.prices import offers_of
from tests.evaluation.renting.fleet import BOOT, SimulatedFleet
from tests.evaluation.renting.fleet_pool import SimulatedPool
from tests.evaluation.renting.jobs import MACHINES, Job
from tests.evaluation.renting.spot_supply import Supply
from tests.evaluation.renting.strategies import Plan, Situation, Strategy, Wanted
from tests.evaluation.renting.virtual_clock import VirtualClock

RESTART = 90.0  # s of a change of the job's nodes: save, start, load
INTERVAL = 900.0  # s between decisions; every change of the fleet is one more
SOON = 120.0  # s between them while nodes are missing
PATIENCE = 4.0  # times the time allowed, after which a job is given up
NOTHING = Wanted(0, 0)


@dataclass(frozen=True, slots=True)
class World:
    """Places with what they give, and the most that is paid for a spot node."""

    supplies: Mapping[tuple[str, str], Supply]  # by zone and type
    begin: float  # s since the Unix epoch
    limits: Mapping[tuple[str, str], float] = field(
        default_factory=dict
    )  # $/h; places left out: on-demand's price
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a job came to."""

    finished: bool
    in_time: bool
    seconds: float  # until it was done or given up
    dollars: float
    on_demand_dollars: float  # of them
    trained: float  # s in which it made progress
    interruptions: int  # nodes that were taken back
    restarts: int
    plans: int  # times that another plan was asked for


def run(job: Job, strategy: Strategy, world: World) -> Outcome:
    """Return what came of ``job`` under ``strategy`` in ``world``."""
    return _Run(job, strategy, world).run()


class _Run:
    def __init__(self, job: Job, strategy: Strategy, world: World) -> None:
        self.job, self.strategy, self.world = job, strategy, world
        self.clock = VirtualClock(world.begin)
        self.places: dict[str, Place] = {}  # by the pool's name
        pools = []
        for (zone, kind), _ in sorted(world.supplies.items()):
            if kind in job.types:
                name = f"{kind}/{zone}"
                self.places[name] = kind, zone
                limit = world.limits.get((zone, kind))
                # twice what is of use: what comes may overlap with what goes
                pools.append(SimulatedPool(name, MACHINES[kind], zone, most=2 * job.most(kind), limit=limit))
        self.ceilings = {self.places[pool.name]: pool.ceiling for pool in pools}
        self.zones: dict[str, list[str]] = {}
        for kind, zone in self.places.values():
            self.zones.setdefault(kind, []).append(zone)
        self.fleet = SimulatedFleet(self.clock, pools, world.supplies, seed=world.seed, boot=BOOT)
        self.control: FleetControl = self.fleet
        self.first: dict[str, float] = {}  # when a node was first seen, by id
        self.left, self.trained, self.restarts, self.plans = job.steps, 0.0, 0, 0
        self.used: tuple[Node, ...] = ()
        self.ready = inf  # when the nodes in use begin to train
        self.asked: Plan = {}

    def run(self) -> Outcome:
        """Let time pass until the job is done or given up."""
        begin, last = self.world.begin, self.world.begin + PATIENCE * self.job.allowed
        decide, revision = begin, -1
        while self.left > 0 and self.clock.now() < last:
            fleet = self.control.observe()
            if fleet.revision != revision or self.clock.now() >= decide:
                self._decide(fleet)
                complete = self._use(self.control.observe())
                revision = self._revision()
                pause = INTERVAL if complete else SOON
                decide = self.clock.now() + pause if self.strategy.again else inf
            self._wait(min(decide, last, self.fleet.next_change()))
        for pool in self.control.observe().pools:
            self._apply(pool.name, 0, 0)
            self.control.terminate([node.id for node in pool.nodes])
        now, bills = self.clock.now(), self.fleet.bills()
        finished = self.left <= 0
        return Outcome(
            finished,
            finished and now - begin <= self.job.allowed,
            now - begin,
            self.fleet.dollars(),
            sum(bill.dollars for bill in bills if bill.node.market == "on-demand"),
            self.trained,
            sum(bill.interrupted for bill in bills),
            self.restarts,
            self.plans,
        )

    def _wait(self, until: float) -> None:
        """Let time pass until ``until``, the start of training or the end of the job, and count the progress."""
        now = self.clock.now()
        if now < self.ready < until:
            until = self.ready
        if self.ready <= now:
            speed = self._speed(self.used)
            done = now + self.left / speed
            until = min(until, done)
            self.trained += until - now
            self.left = 0.0 if until == done else self.left - speed * (until - now)
        self.clock.until(until)

    # --- asking -----------------------------------------------------------------------------------------------

    def _decide(self, fleet: Fleet) -> None:
        plan = self.strategy.plan(self._situation(fleet))
        if plan != self.asked:
            self.plans += 1
            self.asked = plan
        leaving = {notice.node_id for notice in fleet.notices}
        for pool in fleet.pools:
            spot, firm = self.asked.get(self.places[pool.name], NOTHING)
            staying = [node.market for node in pool.nodes if node.id not in leaving]
            # what is to go stays until what is to come has come
            firm = max(firm, staying.count("on-demand"))
            nodes = firm + max(spot, staying.count("spot"))
            if (nodes, firm) != (pool.planned, pool.on_demand):
                self._apply(pool.name, nodes, firm)

    def _apply(self, pool: str, nodes: int, on_demand: int) -> None:
        self.control.apply(Target(pool, nodes, self._revision(), self.strategy.reason, on_demand))

    def _revision(self) -> int:
        return self.control.take_notices(())

    def _situation(self, fleet: Fleet) -> Situation:
        now = self.clock.now()
        prices = {place: self.world.supplies[place[1], place[0]].prices.at(now) for place in self.ceilings}
        spot = {
            (zone, kind): price
            for (kind, zone), price in prices.items()
            if price <= self.ceilings[kind, zone]
        }
        return Situation(
            now=now,
            job=self.job,
            left=self.left,
            until=self.world.begin + self.job.allowed,
            offers=offers_of([MACHINES[kind] for kind in self.zones], self.zones, spot),
            pools={self.places[pool.name]: pool for pool in fleet.pools},
            seen=self._seen(fleet),
            boot=BOOT,
            restart=RESTART,
            leaving=frozenset(notice.node_id for notice in fleet.notices),
        )

    def _seen(self, fleet: Fleet) -> dict[Place, SpotObservation]:
        """Return what happened to the spot nodes of each place so far."""
        now = self.clock.now()
        losses: dict[Place, int] = {}
        seconds: dict[Place, float] = {}
        for bill in self.fleet.bills():
            if bill.node.market == "spot":
                place = bill.node.instance_type, bill.node.zone
                losses[place] = losses.get(place, 0) + bill.interrupted
                seconds[place] = seconds.get(place, 0.0) + bill.end - bill.start
        for pool in fleet.pools:
            for node in pool.nodes:
                since = self.first.setdefault(node.id, now)
                if node.market == "spot":
                    place = self.places[pool.name]
                    seconds[place] = seconds.get(place, 0.0) + now - since
        return {place: SpotObservation(losses.get(place, 0), spent) for place, spent in seconds.items()}

    # --- using ------------------------------------------------------------------------------------------------

    def _use(self, fleet: Fleet) -> bool:
        """Choose the nodes that the job trains on, let the others go, and tell whether it has all that it planned."""
        chosen, complete = self._chosen(fleet)
        if {node.id for node in chosen} != {node.id for node in self.used}:
            self.used = chosen
            self.ready = self.clock.now() + RESTART if chosen else inf
            self.restarts += bool(chosen)
        if complete:
            self._let_go(fleet)
        return complete

    def _chosen(self, fleet: Fleet) -> tuple[tuple[Node, ...], bool]:
        """Return the nodes to train on, and whether they are all that the plan asks for."""
        leaving = {notice.node_id for notice in fleet.notices}
        there = {node.id for pool in fleet.pools for node in pool.nodes}
        mine = {node.id for node in self.used}
        planned: list[Node] = []
        complete = bool(self.asked)
        for pool in fleet.pools:
            spot, firm = self.asked.get(self.places[pool.name], NOTHING)
            for market, count in (("on-demand", firm), ("spot", spot)):
                fit = [node for node in pool.nodes if node.market == market and node.id not in leaving]
                fit.sort(key=lambda node: (node.id not in mine, node.id))
                planned += fit[:count]
                complete = complete and len(fit) >= count
        if complete:
            return tuple(planned), True
        present = tuple(node for node in self.used if node.id in there)
        # with less than was planned, the job moves only where it is faster
        return (tuple(planned) if self._speed(planned) > self._speed(present) else present), False

    def _let_go(self, fleet: Fleet) -> None:
        """Drain what the plan does not ask for, and end what is drained."""
        busy = {node.id for node in self.used}
        for pool in fleet.pools:
            spot, firm = self.asked.get(self.places[pool.name], NOTHING)
            if (spot + firm, firm) == (pool.planned, pool.on_demand) and len(pool.nodes) <= spot + firm:
                continue
            uses = {node.id: NodeUse(busy=1.0 if node.id in busy else 0.0) for node in pool.nodes}
            target = Target(pool.name, spot + firm, self._revision(), "the plan is there without them", firm)
            target = with_drains(target, pool, uses, notices=fleet.notices)
            self.control.apply(target)
            self.control.terminate(may_end(target.drain, pool.nodes, uses))

    def _speed(self, nodes: Sequence[Node]) -> float:
        """Return steps per second on those of ``nodes`` that are of the best type."""
        kinds = [node.instance_type for node in nodes]
        return max((self.job.speed(kind, kinds.count(kind)) for kind in set(kinds)), default=0.0)
