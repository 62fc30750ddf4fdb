"""What scaling, market and guard would do with a pool now, and why. Nothing is done."""

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from ebbflow.infra.aws.fleet.usage import UsageLog
from ebbflow.infra.protocols import ApplyResult, FleetControl
from ebbflow.planners.errors import PlanningError
from ebbflow.planners.fleet.guard import GuardResult
from ebbflow.planners.fleet.market import Choice, choose, with_rates
from ebbflow.planners.model.fleet import PoolState, Target
from ebbflow.tasks.fleet.money import seen_of
from ebbflow.tasks.fleet.request import FleetRules
from ebbflow.tasks.fleet.steps import Observation, act, decide, guard, new_nodes


@dataclass(frozen=True)
class PoolPlan:
    """What would become of one pool."""

    pool: PoolState
    wanted: Target  # by scaling
    target: Target  # with on-demand nodes where spot is dry, and with those that leave
    verdict: GuardResult
    market: tuple[str, ...]  # which machines the market would choose, in sentences
    would: ApplyResult  # what would be asked for
    dollars_now: float | None  # per hour; None: not known
    dollars_then: float | None  # with every new node as dear as the dearest offer

    @property
    def changes(self) -> bool:
        """Tell whether anything would be done."""
        target = self.verdict.target
        return bool(self.would.asked) or (target is not None and bool(target.drain))

    def to_json(self) -> dict[str, Any]:
        """Return it as values that JSON has."""
        target = self.verdict.target
        return {
            "pool": self.pool.name,
            "planned": self.pool.planned,
            "requested": self.pool.requested,
            "observed": len(self.pool.nodes),
            "wanted": asdict(self.wanted),
            "target": asdict(self.target),
            "guard": {
                "target": None if target is None else asdict(target),
                "reasons": list(self.verdict.reasons),
            },
            "market": list(self.market),
            "would": {
                "asked": [asdict(ask) for ask in self.would.asked],
                "refused": [asdict(refusal) for refusal in self.would.refused],
            },
            "dollars_per_hour": {"now": self.dollars_now, "then": self.dollars_then},
        }


def plan(
    control: FleetControl, seen: Observation, wanted: Target, rules: FleetRules, book: UsageLog
) -> PoolPlan:
    """Return what would become of the pool of ``wanted``. Raises ``AwsError``."""
    pool = seen.pool(wanted.pool)
    target = decide(seen, wanted, rules)
    verdict = guard(seen, target, rules)
    would = act(control, verdict, dry_run=True)
    now = rate(pool)
    then = now if verdict.target is None else rate_after(seen, pool, verdict.target)
    final = verdict.target or target
    return PoolPlan(pool, wanted, target, verdict, market(seen, final, rules, book), would, now, then)


def market(seen: Observation, target: Target, rules: FleetRules, book: UsageLog) -> tuple[str, ...]:
    """Return which machines the market would choose for ``target``, and why; all nodes count alike in a group."""
    pool = seen.pool(target.pool)
    offers = seen.offers.get(pool.name, ())
    if not offers:
        return ("prices are not known",)
    held = Counter((node.instance_type, node.zone, node.market) for node in pool.nodes)
    terms = replace(
        rules.terms,
        min_on_demand_nodes=min(target.on_demand, target.nodes),
        max_on_demand_nodes=max(rules.terms.max_on_demand_nodes, target.on_demand),
    )
    try:
        found = choose(
            with_rates(offers, seen_of(book.stays, seen.fleet.at)),
            float(target.nodes),
            rules.interruption,
            work=lambda offer: 1.0,
            terms=terms,
            held=held,
        )
    except PlanningError as error:
        return (str(error),)
    return (found.reason, *_lines(found))


def _lines(choice: Choice) -> list[str]:
    return [
        f"{one.nodes} × {one.offer.market} {one.offer.instance_type} in {one.offer.zone}, ${one.offer.price:.4g}/h"
        + (f", at most ${one.limit:.4g}/h" if one.limit is not None else "")
        for one in choice.allocations
    ]


def rate(pool: PoolState) -> float | None:
    """Return what a pool's nodes cost now, $/h; None where a price is not known."""
    prices = [node.price for node in pool.nodes]
    return sum(prices) if all(prices) else None


def rate_after(seen: Observation, pool: PoolState, target: Target) -> float | None:
    """Return what ``target`` costs once it is reached, $/h, each new node at the dearest offer of its market."""
    stay = [node for node in pool.nodes if node.id not in {*target.drain, *pool.draining}]
    stay = stay[: target.nodes] if len(stay) > target.nodes else stay
    more = target.nodes - len(stay)
    have = sum(node.market == "on-demand" for node in stay)
    firm = min(max(target.on_demand - have, 0), more)
    new = new_nodes(seen.offers).get(pool.name)
    if not all(node.price for node in stay) or (more and new is None):
        return None
    total = sum(node.price for node in stay)
    for market_name, count in (("on-demand", firm), ("spot", more - firm)):
        price = None if new is None else new.price("spot" if market_name == "spot" else "on-demand")
        if count and price is None:
            return None
        total += count * (price or 0.0)
    return total
