"""Which machines to rent: by price per useful hour, interruptions seen, and how much may be lost at once.

Three formulas decide; the first and third are ours, the second is a known one applied to prices of machines.

1. *Useful share.* A spot node is interrupted at rate λ per hour. Each time D = restart + rework is paid for nothing
   on each of the ``span`` nodes that stop. Of a life of exponential length T, E[max(0, T - D)] / E[T] = exp(-λ D)
   is useful, which is 1 - λ D to first order and never below 0. A unit of useful work costs
   k = price / (work of a node per hour · exp(-λ · span · D)).
2. *Spread.* Mean and variance (Markowitz, Portfolio Selection, 1952; for spot markets Sharma, Irwin and Shenoy,
   Portfolio-driven Resource Management for Transient Cloud Servers, 2017): minimise
   Σ k_i / k* · x_i + a / 2 · Σ σ_i² x_i² over shares x_i of the work, where k* is the least k and a the aversion to
   risk. Nodes of one type and zone are taken to be lost together, other pairs independently, so
   σ² = p (1 - p) with p = 1 - exp(-λ) is the variance of the share of a pair that is lost within an hour. On-demand
   has σ = 0. Whole nodes are given out one by one to whom the next one costs least, which is optimal for such sums
   when nodes do equal work (Fox, Discrete Optimization via Marginal Analysis, 1966) and near it otherwise.
3. *Staying.* What is held already counts as cheaper by ``margin``. So nothing moves, neither between pools nor
   from on-demand back to spot, for a difference smaller than that.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import exp, inf, isfinite

from ebbflow.planners.errors import OptionError, PlanningError
from ebbflow.planners.hazard import hazard
from ebbflow.planners.model.capacity import Market
from ebbflow.planners.model.fleet import Offer

Place = tuple[str, str]
"""Instance type and zone: what is lost together."""
Key = tuple[str, str, Market]
"""What tells an offer: instance type, zone and market."""

LEAST_LIMIT = 0.001
"""$/h; EC2 takes no lower maximum price (SpotMarketOptions)."""
_SLACK = 1e-9


def key(offer: Offer) -> Key:
    """Return what tells this offer from all others."""
    return offer.instance_type, offer.zone, offer.market


def by_cores(offer: Offer) -> float:
    """Count an offer's work in cores."""
    return float(offer.cores)


def by_gpus(offer: Offer) -> float:
    """Count an offer's work in GPUs."""
    return float(offer.gpus)


@dataclass(frozen=True, slots=True)
class SpotObservation:
    """What was seen of the spot nodes of one type and zone."""

    losses: int
    node_seconds: float


def rates(
    seen: Mapping[Place, SpotObservation], places: Iterable[Place], weight: float = 24.0
) -> dict[Place, float]:
    """Return expected interruptions per node-hour.

    All that was seen gives the rate of the market (``recovery.hazard``, a Gamma posterior mean). It is the prior mean
    of each place, where it weighs ``weight`` node-hours: a place that nobody has tried is as good as the market,
    one with a long record stands for itself. Raises ``OptionError``.
    """
    if not (weight > 0 and isfinite(weight)):
        raise OptionError(f"weight must be > 0 node-hours; got {weight}")
    market = hazard(sum(one.losses for one in seen.values()), sum(one.node_seconds for one in seen.values()))
    never = SpotObservation(0, 0.0)
    found: dict[Place, float] = {}
    for place in places:
        own = seen.get(place, never)
        found[place] = hazard(own.losses, own.node_seconds, market * weight, weight)
    return found


def with_rates(
    offers: Iterable[Offer], seen: Mapping[Place, SpotObservation], weight: float = 24.0
) -> tuple[Offer, ...]:
    """Return spot offers with the interruptions that ``seen`` lets expect; on-demand ones as they are."""
    offers = tuple(offers)
    spot = {(offer.instance_type, offer.zone) for offer in offers if offer.market == "spot"}
    learnt = rates(seen, sorted(spot), weight)
    return tuple(
        replace(offer, interruptions=learnt[offer.instance_type, offer.zone])
        if offer.market == "spot"
        else offer
        for offer in offers
    )


@dataclass(frozen=True, slots=True)
class Interruption:
    """What one interruption costs. Raises ``OptionError``."""

    restart: float  # s until the work that stopped continues elsewhere
    rework: float = 0.0  # s of work that is done twice, mean: half the time between checkpoints, say
    span: int = 1  # nodes that stop when one is lost: all of a gang, else 1

    def __post_init__(self) -> None:
        for name, value in (("restart", self.restart), ("rework", self.rework)):
            if not (value >= 0 and isfinite(value)):
                raise OptionError(f"{name} must be >= 0 s; got {value}")
        if self.span < 1:
            raise OptionError(f"span must be >= 1 node; got {self.span}")

    def useful(self, rate: float) -> float:
        """Return the share of a node's time that is useful at ``rate`` interruptions per node-hour.

        >>> round(Interruption(restart=120.0, rework=300.0).useful(0.1), 4)
        0.9884
        """
        return exp(-rate * self.span * (self.restart + self.rework) / 3600.0)


@dataclass(frozen=True, slots=True)
class Terms:
    """How to choose. Raises ``OptionError`` for a value outside its rule."""

    aversion: float = 5.0  # to losing much at once, >= 0; see the module's formula 2
    per_place: float = (
        0.5  # share of the work that one type and zone of spot may hold, rounded up to whole nodes
    )
    per_zone: float = 1.0  # the same of all spot of one zone
    margin: float = 0.1  # what is held counts as cheaper by this share
    ceiling: float = inf  # $/h that is paid for a spot node at most, where on-demand is dearer
    min_on_demand_nodes: int = 0  # nodes
    max_on_demand_nodes: float = inf  # nodes; 0: spot or nothing

    def __post_init__(self) -> None:
        if not (self.aversion >= 0 and isfinite(self.aversion)):
            raise OptionError(f"aversion must be >= 0; got {self.aversion}")
        for name, share in (("per_place", self.per_place), ("per_zone", self.per_zone)):
            if not 0 < share <= 1:
                raise OptionError(f"{name} must be above 0 and at most 1; got {share}")
        if not 0 <= self.margin < 1:
            raise OptionError(f"margin must be at least 0 and below 1; got {self.margin}")
        if not self.ceiling > LEAST_LIMIT:
            raise OptionError(f"ceiling must be above {LEAST_LIMIT} $/h; got {self.ceiling}")
        if not 0 <= self.min_on_demand_nodes <= self.max_on_demand_nodes:
            raise OptionError(
                "0 <= min_on_demand_nodes <= max_on_demand_nodes must hold; got"
                f" {self.min_on_demand_nodes}, {self.max_on_demand_nodes}"
            )


def limit(offer: Offer, on_demand: float | None, ceiling: float = inf) -> float | None:
    """Return the most, $/h, to name for a spot node: the on-demand price, or ``ceiling`` where that is lower.

    None, where neither is known, is EC2's own default, which is the on-demand price too. A price above the limit
    means that no node of the offer is asked for and that EC2 takes those back that run.
    """
    known = [price for price in (on_demand, ceiling) if price is not None and isfinite(price)]
    return min(known) if known and offer.market == "spot" else None


@dataclass(frozen=True, slots=True)
class Allocation:
    """So many nodes of one offer."""

    offer: Offer
    nodes: int
    limit: float | None  # $/h to name for a spot node; None: name none
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """What to rent, and why."""

    allocations: tuple[Allocation, ...]  # sorted by type, zone and market
    work: float  # units per hour while nothing is interrupted
    dollars: float  # per hour
    left_out: tuple[tuple[Key, str], ...]  # offers that could not be taken, with the reason
    reason: str

    @property
    def nodes(self) -> int:
        """Return the nodes of all offers."""
        return sum(one.nodes for one in self.allocations)

    @property
    def on_demand(self) -> int:
        """Return how many of the nodes are on-demand."""
        return sum(one.nodes for one in self.allocations if one.offer.market == "on-demand")


@dataclass(slots=True)
class _Candidate:
    offer: Offer
    work: float  # units per node-hour
    cost: float  # $ per useful unit
    variance: float
    limit: float | None
    held: int
    nodes: int = 0


def choose(
    offers: Iterable[Offer],
    need: float,
    interruption: Interruption,
    *,
    work: Callable[[Offer], float] = by_cores,
    terms: Terms | None = None,
    held: Mapping[Key, int] | None = None,
    dry: Iterable[Place] = (),
) -> Choice:
    """Return which offers to rent, and how many nodes of each, for ``need`` units of work per hour.

    ``work`` is what a node of an offer does in an hour: cores, GPUs, or the goodput that the caller has measured.
    ``held`` counts what is there already; ``dry`` are places where spot cannot be had now.

    Raises:
        PlanningError: the offers cannot do the work within the caps; the message says what limits them.
        OptionError: ``need`` is negative or not finite, or an offer's price or rate is.
    """
    terms = terms or Terms()
    if not (need >= 0 and isfinite(need)):
        raise OptionError(f"need must be >= 0 units of work; got {need}")
    candidates, left_out = _candidates(tuple(offers), interruption, work, terms, held or {}, frozenset(dry))
    if need > 0 or terms.min_on_demand_nodes:
        _give(candidates, need, terms, left_out)
    return _choice(candidates, need, interruption, left_out)


def _candidates(
    offers: tuple[Offer, ...],
    interruption: Interruption,
    work: Callable[[Offer], float],
    terms: Terms,
    held: Mapping[Key, int],
    dry: frozenset[Place],
) -> tuple[list[_Candidate], dict[Key, str]]:
    listed = {one.instance_type: one.price for one in offers if one.market == "on-demand"}
    found: list[_Candidate] = []
    left_out: dict[Key, str] = {}
    for offer in sorted(offers, key=key):
        for name, value in (("price", offer.price), ("interruptions", offer.interruptions)):
            if not (value >= 0 and isfinite(value)):
                raise OptionError(f"{name} of {_name(offer)} must be >= 0; got {value}")
        spot = offer.market == "spot"
        most = limit(offer, listed.get(offer.instance_type), terms.ceiling)
        does = work(offer)
        if not (does > 0 and isfinite(does)):
            left_out[key(offer)] = f"does no work ({does:g} units per hour)"
        elif spot and (offer.instance_type, offer.zone) in dry:
            left_out[key(offer)] = "insufficient capacity"
        elif most is not None and offer.price > most:
            left_out[key(offer)] = (
                f"its price of ${offer.price:.4g}/h is above the limit of ${most:.4g}/h: none is launched, and EC2"
                " interrupts running instances"
            )
        elif not spot and not terms.max_on_demand_nodes:
            left_out[key(offer)] = "on-demand is disabled"
        else:
            rate = offer.interruptions if spot else 0.0
            lost = 1.0 - exp(-rate)
            cost = offer.price / (does * interruption.useful(offer.interruptions))
            found.append(
                _Candidate(offer, does, cost, lost * (1 - lost), most, max(held.get(key(offer), 0), 0))
            )
    return found, left_out


def _give(candidates: list[_Candidate], need: float, terms: Terms, left_out: Mapping[Key, str]) -> None:
    """Give out nodes, each to the candidate whose next one costs least."""
    unit = min((one.cost for one in candidates if one.cost > 0), default=1.0)
    zones: dict[str, float] = {}
    done, on_demand = 0.0, 0

    def next_cost(one: _Candidate) -> tuple[float, float, Key]:
        rest = need - done
        # of the last node only a part is needed
        paid = one.cost / unit * (one.work / min(one.work, rest) if rest > 0 else one.work)
        step = one.work / need if need else 0.0
        score = paid + terms.aversion * one.variance * (one.nodes + 0.5) * step
        stays = one.nodes < one.held
        return score * (1 - terms.margin if stays else 1.0), one.offer.price, key(one.offer)

    def allowed(one: _Candidate) -> bool:
        if one.offer.market == "on-demand":
            return on_demand < terms.max_on_demand_nodes
        if on_demand < terms.min_on_demand_nodes:
            return False
        return (
            one.nodes * one.work < terms.per_place * need - _SLACK * need
            and zones.get(one.offer.zone, 0.0) < terms.per_zone * need - _SLACK * need
        )

    while done < need * (1 - _SLACK) or on_demand < terms.min_on_demand_nodes:
        free = [one for one in candidates if allowed(one)]
        if not free:
            raise PlanningError(_short(done, need, on_demand, terms, candidates, left_out))
        best = min(free, key=next_cost)
        best.nodes += 1
        done += best.work
        if best.offer.market == "on-demand":
            on_demand += 1
        else:
            zones[best.offer.zone] = zones.get(best.offer.zone, 0.0) + best.work


def _short(
    done: float,
    need: float,
    on_demand: int,
    terms: Terms,
    candidates: list[_Candidate],
    left_out: Mapping[Key, str],
) -> str:
    if on_demand < terms.min_on_demand_nodes:
        said = f"{terms.min_on_demand_nodes} on-demand nodes are required; the offers have {on_demand}"
    else:
        said = f"the offers can do {done:g} of {need:g} units of work"
    parts = [f"{_name(one.offer)}: {one.nodes} nodes, then capped" for one in candidates if one.nodes]
    parts += [f"{'/'.join(which)}: {why}" for which, why in left_out.items()]
    caps = (
        f"per_place {terms.per_place:g}, per_zone {terms.per_zone:g}, "
        f"max_on_demand_nodes {terms.max_on_demand_nodes:g}"
    )
    return f"{said} ({'; '.join(parts) or 'there are no offers'}); name more instance types or zones, or raise {caps}"


def _choice(
    candidates: list[_Candidate], need: float, interruption: Interruption, left_out: Mapping[Key, str]
) -> Choice:
    taken = [one for one in candidates if one.nodes]
    done = sum(one.nodes * one.work for one in taken)
    allocations = tuple(
        Allocation(one.offer, one.nodes, one.limit, _why(one, done, interruption)) for one in taken
    )
    dollars = sum(one.nodes * one.offer.price for one in taken)
    if not taken:
        return Choice((), 0.0, 0.0, tuple(left_out.items()), "no work is requested")
    cheapest = min(candidates, key=lambda one: (one.cost, key(one.offer)))
    paid = sum(one.nodes * one.work * one.cost for one in taken) / done
    reason = (
        f"{need:g} units of work from {len(taken)} of {len(candidates) + len(left_out)} offers for ${dollars:.4g}/h; "
        f"a unit of work costs ${paid:.4g} (interruption-adjusted), ${cheapest.cost:.4g} with the"
        f" cheapest offer, {_name(cheapest.offer)}"
    )
    return Choice(allocations, done, dollars, tuple(left_out.items()), reason)


def _why(one: _Candidate, done: float, interruption: Interruption) -> str:
    wasted = 1 - interruption.useful(one.offer.interruptions)
    kept = f", {min(one.held, one.nodes)} of them running already" if one.held else ""
    return (
        f"${one.cost:.4g} per unit of work (interruption-adjusted): ${one.offer.price:.4g}/h for"
        f" {one.work:g}, {wasted:.2%} lost to"
        f" {one.offer.interruptions:.3g} interruptions per node-hour; {one.nodes * one.work / done:.0%} of the"
        f" work{kept}"
    )


def _name(offer: Offer) -> str:
    return f"{offer.market} {offer.instance_type} in {offer.zone or 'no zone'}"
