"""Ways to rent machines for a job with a deadline: plain ones, and the planners'."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple, Protocol

from ebbflow.planners.errors import PlanningError
from ebbflow.planners.fleet.market import Interruption, Place, SpotObservation, Terms, choose, with_rates
from ebbflow.planners.fleet.scaling.deadline import DeadlineScaling
from ebbflow.planners.fleet.scaling.steady import StabilizationWindow, StabilizedTarget
from ebbflow.planners.model.capacity import Market, Node
from ebbflow.planners.model.fleet import Offer, PoolState
from ebbflow.planners.model.prices import HOUR
from tests.evaluation.renting.jobs import Job

PLAIN_RESERVE = 0.9
"""Of the time that is left, what work on spot nodes is planned to take at most; the rest is for interruptions."""


class Wanted(NamedTuple):
    """Nodes of one type and zone, by market."""

    spot: int
    on_demand: int


Plan = Mapping[Place, Wanted]
"""What to hold, by instance type and zone; places left out hold nothing."""


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known when a plan is asked for."""

    now: float  # s since the Unix epoch
    job: Job
    left: float  # steps still to do
    until: float  # s since the Unix epoch, by when they are to be done
    offers: tuple[Offer, ...]  # at present prices
    pools: Mapping[Place, PoolState]
    seen: Mapping[Place, SpotObservation]  # what happened to the job's own spot nodes
    boot: float  # s from grant to work
    restart: float  # s that a change of the job's nodes takes
    leaving: frozenset[str] = frozenset()  # nodes that were told to

    @property
    def seconds(self) -> float:
        """Return the seconds until the deadline."""
        return self.until - self.now

    def takes(self, kind: str, nodes: int) -> float:
        """Return seconds for the rest of the job on ``nodes`` nodes of one type, restart not counted."""
        speed = self.job.speed(kind, nodes)
        return self.left / speed if speed > 0 else inf

    def nodes(self, kind: str) -> tuple[Node, ...]:
        """Return the nodes of a type that are there and stay."""
        there = (node for place, pool in self.pools.items() if place[0] == kind for node in pool.nodes)
        return tuple(node for node in there if node.id not in self.leaving)


class Strategy(Protocol):
    """Says what to hold. Equal situations in equal order give equal plans."""

    name: str
    again: bool  # asked at intervals too, not only when nodes or notices change
    reason: str  # of the last plan

    def plan(self, seen: Situation) -> Plan:
        """Return what to hold from now on."""
        ...


class Sized(NamedTuple):
    """The fewest nodes of a type that do the job in time, or the fastest count if none does."""

    kind: str
    nodes: int
    seconds: float  # the rest of the job on them
    enough: bool
    reason: str


def sized(seen: Situation, kind: str, seconds: float) -> Sized:
    """Return how many nodes of a type are needed to end within ``seconds``, by the rule for deadlines."""
    there = seen.nodes(kind)
    here = len(there)
    pool = PoolState(kind, here, here, there, min_nodes=1, max_nodes=max(seen.job.most(kind), here))

    def curve(nodes: int) -> float:
        return seen.takes(kind, nodes) + (seen.restart if nodes != here else 0.0)

    target = DeadlineScaling(seconds, seen.boot).decide(pool, 0, curve)
    nodes = min(target.nodes, seen.job.most(kind))
    total = curve(nodes) + (seen.boot if nodes > here else 0.0)
    return Sized(kind, nodes, seen.takes(kind, nodes), total <= seconds, target.reason)


@dataclass(slots=True)
class Once:
    """Chooses at the start and asks for that until the job is done: the cheapest offer of one market.

    ``by`` "hour" takes the cheapest machine, "work" the one on which the whole job would cost least. The count is the
    fewest that do the job within ``reserve`` of the time if nothing happens, or the fastest if none does.
    """

    name: str
    market: Market
    by: str = "work"
    reserve: float = PLAIN_RESERVE
    again: bool = False
    chosen: Plan | None = None
    reason: str = ""

    def plan(self, seen: Situation) -> Plan:
        """Return the plan of the first time."""
        if self.chosen is None:
            self.chosen = self._choice(seen)
        return self.chosen

    def _choice(self, seen: Situation) -> Plan:
        sizes = {kind: sized(seen, kind, seen.seconds * self.reserve) for kind in seen.job.types}
        offers = [
            offer for offer in seen.offers if offer.market == self.market and offer.instance_type in sizes
        ]

        def cost(offer: Offer) -> tuple[bool, float, str, str]:
            size = sizes[offer.instance_type]
            dollars = offer.price * (size.nodes * size.seconds / HOUR if self.by == "work" else 1.0)
            # who looks at machines only does not see that some are too slow
            return self.by == "work" and not size.enough, dollars, offer.instance_type, offer.zone

        best = min(offers, key=cost)
        nodes = sizes[best.instance_type].nodes
        self.reason = f"the cheapest by the {self.by} at the start: {sizes[best.instance_type].reason}"
        wanted = Wanted(nodes, 0) if self.market == "spot" else Wanted(0, nodes)
        return {(best.instance_type, best.zone): wanted}


@dataclass(slots=True)
class Planned:
    """The planners': scaling to the deadline, choice of the market, on-demand when spot is dry or time is short.

    At each decision the fewest nodes of each type that end in time are priced by ``market.choose``; the cheapest
    type wins, the present one with ``margin`` in its favour. A place that lacks nodes for ``dry_after`` seconds is
    left out for ``dry_for`` seconds. While the nodes there end in time, a move included, they are kept. Otherwise,
    when the time left is no more than ``guard`` seconds and a move above what on-demand needs, rented as it would
    have been at the start, only on-demand is taken until the job is done.
    """

    name: str = "planned"
    again: bool = True
    margin: float = 0.1
    dry_after: float = 600.0
    dry_for: float = 1800.0
    guard: float = 180.0
    terms: Terms = field(default_factory=Terms)
    steady: StabilizationWindow = field(
        default_factory=lambda: StabilizationWindow(window=1800.0, hold=900.0)
    )
    dry: dict[Place, float] = field(default_factory=dict)  # place -> s since the Unix epoch, until when
    sizes: dict[str, StabilizedTarget] = field(default_factory=dict)  # by type
    kind: str = ""
    firm: bool = False  # only on-demand from now on
    fallback: tuple[str, int] | None = None  # type and nodes
    reason: str = ""

    def plan(self, seen: Situation) -> Plan:
        """Return what to hold now."""
        self._note_dry(seen)
        self.firm = self.firm or self._pressed(seen)
        best: tuple[bool, float, float, str] | None = None
        plan: Plan = {}
        for kind in seen.job.types:
            found = self._priced(seen, kind)
            if found is None:
                continue
            late, dollars, wanted, reason = found
            rank = (late > 0, late, dollars * (1 - self.margin if kind == self.kind else 1.0), kind)
            if best is None or rank < best:
                best, plan, self.reason = rank, wanted, reason
        if best is not None:
            self.kind = best[-1]
        return plan

    def _priced(self, seen: Situation, kind: str) -> tuple[float, float, Plan, str] | None:
        """Return the seconds it takes if that is too long (else 0), the dollars to the end, the plan, its reason."""
        size = sized(seen, kind, seen.seconds - (0.0 if self.firm else self._buffer(seen)))
        nodes = self._settled(seen, size)
        seconds = seen.takes(kind, nodes)
        held = Counter((node.instance_type, node.zone, node.market) for node in seen.nodes(kind))
        interruption = Interruption(seen.restart + seen.boot, span=nodes)
        offers = with_rates((offer for offer in seen.offers if offer.instance_type == kind), seen.seen)
        places = {(offer.instance_type, offer.zone) for offer in offers}
        try:
            choice = choose(
                offers,
                float(nodes),
                interruption,
                work=lambda _: 1.0,
                terms=self.terms,
                held=held,
                dry=places if self.firm else [place for place in self.dry if place in places],
            )
        except PlanningError:
            return None
        plan: dict[Place, Wanted] = {}
        for one in choice.allocations:
            place = one.offer.instance_type, one.offer.zone
            had = plan.get(place, Wanted(0, 0))
            more = (one.nodes, 0) if one.offer.market == "spot" else (0, one.nodes)
            plan[place] = Wanted(had.spot + more[0], had.on_demand + more[1])
        rate = sum(
            one.nodes * one.offer.interruptions for one in choice.allocations if one.offer.market == "spot"
        )
        wasted = rate * (seen.restart + seen.boot) / HOUR  # of each hour
        dollars = choice.dollars * seconds / HOUR * (1 + wasted)
        moves = seen.boot + seen.restart if not held else 0.0
        dollars += choice.dollars * moves / HOUR
        late = 0.0 if size.enough else seconds + moves
        return late, dollars, plan, f"{kind}: {size.reason}; {choice.reason}"

    def _settled(self, seen: Situation, size: Sized) -> int:
        before = self.sizes.get(size.kind, StabilizedTarget(size.nodes))
        after = self.steady.settle(before, size.nodes, seen.now)
        self.sizes[size.kind] = after
        return after.nodes

    def _pressed(self, seen: Situation) -> bool:
        """Tell whether on-demand, as it would have been rented at the start, can only just do it in time."""
        if self.fallback is None:
            self.fallback = _cheapest_on_demand(seen)
        kind, nodes = self.fallback
        here = min(seen.takes(kind, len(seen.nodes(kind))) for kind in seen.job.types)
        if here + seen.boot + seen.restart <= seen.seconds or here <= self.guard:
            return False  # time runs short only for work that stands still or is behind
        return seen.seconds <= seen.takes(kind, nodes) + self._buffer(seen)

    def _buffer(self, seen: Situation) -> float:
        """Return the seconds before the deadline that work on spot must not use: a move to on-demand fits in."""
        return self.guard + seen.boot + seen.restart

    def _note_dry(self, seen: Situation) -> None:
        self.dry = {place: until for place, until in self.dry.items() if until > seen.now}
        for place, pool in seen.pools.items():
            short = pool.short_since
            spot = pool.planned - pool.on_demand
            if spot > 0 and short is not None and seen.now - short >= self.dry_after:
                self.dry[place] = seen.now + self.dry_for


def _cheapest_on_demand(seen: Situation) -> tuple[str, int]:
    """Return the type and the nodes that do the rest of the job in time for the fewest dollars, or soonest."""
    prices = {offer.instance_type: offer.price for offer in seen.offers if offer.market == "on-demand"}
    sizes = [sized(seen, kind, seen.seconds) for kind in seen.job.types if kind in prices]
    in_time = [size for size in sizes if size.enough]
    if in_time:
        best = min(in_time, key=lambda size: (size.seconds * size.nodes * prices[size.kind], size.kind))
    else:
        best = min(sizes, key=lambda size: (size.seconds, size.kind))
    return best.kind, best.nodes
