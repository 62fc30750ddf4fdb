"""What no decision about nodes may break, whoever made it: every ``Target`` passes ``check`` before it is applied.

Refused are targets for an old revision and those that make no sense; others are moved to the nearest that the rules
allow. Where rules contradict each other, the later of this list wins: what was asked for, the most that one decision
adds, the least that a pool must have, the most that a pool, a team or all may have, money, the most that one decision
takes away, the last copy of anything. So a limit that falls below what is there is reached over several decisions,
and a wrong price does not end a fleet at once. A target that has passed passes again unchanged.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor, inf

from ebbflow.planners.fleet.guard_draft import NewNode, Prices, TargetDraft
from ebbflow.planners.fleet.limits import Limits, PoolLimits, Quota
from ebbflow.planners.fleet.scaling.scale_in import NodeUse
from ebbflow.planners.model.fleet import Fleet, Offer, PoolState, Target

__all__ = ["GuardResult", "Limits", "NewNode", "RunMoney", "check", "closed", "new_nodes", "open_nodes"]

_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class RunMoney:
    """What the run that a pool works for has cost, and for how long it is expected to continue."""

    spent: float  # dollars
    seconds: float | None = None  # until its end with the nodes of the target; None: not known


@dataclass(frozen=True, slots=True)
class GuardResult:
    """What may be applied, and what of it the rules changed or would have changed, in sentences for people."""

    target: Target | None  # None: refused
    changed: bool
    reasons: tuple[str, ...] = ()


def check(
    target: Target,
    fleet: Fleet,
    limits: Limits,
    *,
    new: Mapping[str, NewNode] | None = None,
    uses: Mapping[str, NodeUse] | None = None,
    elsewhere: Collection[str] = (),
    run: RunMoney | None = None,
) -> GuardResult:
    """Return what of ``target`` may be applied to ``fleet``.

    ``new`` says by pool what another node costs: without a price a pool that has a limit of dollars does not grow.
    ``uses`` says what nodes hold, ``elsewhere`` what storage has a copy of. Nodes cost their price until they are
    gone, so a pool that replaces nodes at its limit of dollars waits for the old ones to leave.
    """
    # what one rule leaves can open the way for another, so they are gone through until nothing changes
    passed, reasons = target, list[str]()
    for _ in range(_ROUNDS):
        once = _once(passed, fleet, limits, new or {}, uses or {}, frozenset(elsewhere), run)
        if once.target is None:
            return once
        reasons += [reason for reason in once.reasons if reason not in reasons]
        if not once.changed:
            break
        passed = once.target
    else:
        return _refused(f"no size satisfies all limits: {'; '.join(reasons)}")
    changed = passed != target
    if changed:
        passed = replace(passed, reason=f"{target.reason}; guard: {'; '.join(reasons)}")
    return GuardResult(passed, changed, tuple(reasons))


def _once(
    target: Target,
    fleet: Fleet,
    limits: Limits,
    new: Mapping[str, NewNode],
    uses: Mapping[str, NodeUse],
    elsewhere: frozenset[str],
    run: RunMoney | None,
) -> GuardResult:
    """Go through all rules once."""
    if target.revision != fleet.revision:
        return _refused(f"decided for revision {target.revision}; the fleet is at revision {fleet.revision}")
    if target.pool not in (names := sorted(pool.name for pool in fleet.pools)):
        return _refused(f"no pool {target.pool!r}; pools: {', '.join(names) or 'none'}")
    if target.nodes < 0 or not 0 <= target.on_demand <= target.nodes:
        return _refused(
            f"0 <= on_demand <= nodes must hold; got {target.on_demand} on-demand of {target.nodes} nodes"
        )
    draft = TargetDraft(target, fleet, Prices(fleet, new), uses, elsewhere, limits.shrink)
    own = _own(draft, limits)
    draft.take_drain()
    draft.lower(draft.pool.planned + limits.grow, f"one decision launches at most {limits.grow:g}")
    ceilings = _ceilings(draft, own, limits)
    least = max(draft.pool.min_nodes, own.min_nodes, own.min_on_demand_nodes)
    draft.min_nodes = int(max(min(least, *(most for most, _ in ceilings)), 0))
    draft.lift(draft.min_nodes, "min_nodes of the pool")
    _on_demand(draft, own, limits)
    for most, why in ceilings:
        draft.lower(most, why)
    if rooms := _rooms(draft, limits, run):
        draft.within(*min(rooms, key=lambda one: one[0]))
    draft.step_down()
    draft.settle()
    _on_demand(draft, own, limits)
    passed = replace(target, nodes=draft.nodes, on_demand=draft.on_demand, drain=tuple(draft.drain))
    return GuardResult(passed, passed != target, tuple(draft.reasons))


def closed(fleet: Fleet) -> dict[str, str]:
    """Return the nodes on which no new work may start, with the reason: those told to leave, and draining ones.

    A rebalance recommendation is none: it is a weak signal, and the node may stay for days.
    """
    found = {id_: "it is being drained" for pool in fleet.pools for id_ in pool.draining}
    for notice in fleet.notices:
        if notice.kind == "interruption":
            left = notice.deadline - fleet.at
            found[notice.node_id] = (
                f"it terminates in {left:.0f} s" if left > 0 else "its deadline has passed"
            )
    return found


def open_nodes(fleet: Fleet, revision: int, nodes: Iterable[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which of ``nodes`` new work may start on, in their order, and why it may not on others.

    For an old ``revision`` it may on none.
    """
    wanted = tuple(dict.fromkeys(nodes))
    if revision != fleet.revision:
        return (), (f"rejected: decided for revision {revision}; the fleet is at revision {fleet.revision}",)
    there = {node.id for pool in fleet.pools for node in pool.nodes}
    shut = closed(fleet) | {id_: "no such node" for id_ in wanted if id_ not in there}
    good = tuple(id_ for id_ in wanted if id_ not in shut)
    return good, tuple(f"{id_} is cordoned: {shut[id_]}" for id_ in wanted if id_ in shut)


def new_nodes(offers: Mapping[str, Sequence[Offer]]) -> dict[str, NewNode]:
    """Return what one node more costs, by pool, on the safe side.

    A group takes spot capacity where it is deep, so the dearest spot offer counts; on-demand it takes the cheapest.
    """
    found = {}
    for pool, some in offers.items():
        spot = [offer.price for offer in some if offer.market == "spot"]
        listed = [offer.price for offer in some if offer.market == "on-demand"]
        found[pool] = NewNode(
            max(spot, default=None), min(listed, default=None), max((offer.gpus for offer in some), default=0)
        )
    return found


def _refused(why: str) -> GuardResult:
    return GuardResult(None, True, (f"rejected: {why}",))


def _on_demand(draft: TargetDraft, own: PoolLimits, limits: Limits) -> None:
    """Keep the nodes that must be on-demand within the pool's limits; the most wins."""
    draft.min_on_demand_nodes = int(
        min(max(own.min_on_demand_nodes, draft.pool.base), own.max_on_demand_nodes)
    )
    most = min(own.max_on_demand_nodes, draft.nodes)
    wanted = int(min(max(draft.on_demand, draft.min_on_demand_nodes), most))
    if wanted != draft.on_demand:
        which = "least" if wanted > draft.on_demand else "most"
        said = limits.pools.get(draft.pool.family, own)  # of the pool and its gangs together
        limit = said.min_on_demand_nodes if which == "least" else said.max_on_demand_nodes
        named = f", {limit:g}" if 0 < limit < inf else ""
        draft.reasons.append(
            f"{wanted} on-demand instead of {draft.on_demand}: the {which} of the pool{named}"
        )
        draft.on_demand = wanted


def _ceilings(draft: TargetDraft, own: PoolLimits, limits: Limits) -> list[tuple[float, str]]:
    """Return how many nodes the pool may have by each limit of nodes, and how to say it."""
    others, kin = _size(draft.others), _size(draft.kin)
    rest = f", of which {draft.rest} {kin}" if kin else ""
    found = [
        (draft.pool.max_nodes, f"max_nodes of the pool is {draft.pool.max_nodes}"),
        (own.max_nodes, f"the pool's limit is {own.max_nodes + kin:g}{rest}"),
        (limits.nodes - others, f"all pools may have {limits.nodes:g}, the others have {others}"),
    ]
    for team, quota in _quotas(draft, limits):
        mates = [pool for pool in draft.others if pool.family in quota.pools]
        size = _size(mates)
        found.append(
            (quota.nodes - size, f"team {team} may have {quota.nodes:g}, its other pools have {size}")
        )
        each = draft.prices.gpus_each(draft.pool)
        if each and quota.gpus < inf:
            held = sum(draft.prices.gpus(pool) for pool in mates)
            said = f"team {team} may have {quota.gpus:g} GPUs, its other pools have {held}, a node here has {each}"
            found.append((floor((quota.gpus - held) / each), said))
    return found


def _rooms(draft: TargetDraft, limits: Limits, run: RunMoney | None) -> list[tuple[float, str]]:
    """Return what the pool may cost, $/h, by each limit of dollars, and how to say it."""
    found: list[tuple[float, str]] = []
    if limits.dollars_per_hour < inf:
        rate = draft.prices.of_pools(draft.others)
        said = f"the limit is ${limits.dollars_per_hour:g}/h, other pools cost ${rate:.4g}/h"
        found.append((limits.dollars_per_hour - rate, said))
    for team, quota in _quotas(draft, limits):
        if quota.dollars_per_hour < inf:
            rate = draft.prices.of_pools(pool for pool in draft.others if pool.family in quota.pools)
            said = f"team {team} may spend ${quota.dollars_per_hour:g}/h, its other pools cost ${rate:.4g}/h"
            found.append((quota.dollars_per_hour - rate, said))
    if run is not None and limits.dollars_per_run < inf:
        left = limits.dollars_per_run - run.spent
        said = f"the run may cost ${limits.dollars_per_run:g}, ${run.spent:.4g} are spent"
        if left <= 0:
            found.append((0.0, said))
        elif run.seconds:
            hours = run.seconds / 3600
            found.append((left / hours, f"{said}, {hours:.3g} h remain"))
    return found


def _quotas(draft: TargetDraft, limits: Limits) -> list[tuple[str, Quota]]:
    return [(team, quota) for team, quota in limits.teams.items() if draft.pool.family in quota.pools]


def _size(pools: Iterable[PoolState]) -> int:
    """Return how many nodes there are, are planned, or were asked for and may come yet."""
    return sum(max(pool.planned, pool.requested, len(pool.nodes)) for pool in pools)


def _own(draft: TargetDraft, limits: Limits) -> PoolLimits:
    """Return what of its pool's limits is left to the pool beside its gangs, or to a gang beside the rest.

    What a pool must have at least is not the gangs' business.
    """
    own = limits.pools.get(draft.pool.family, PoolLimits())
    if draft.is_gang:
        own = replace(own, min_nodes=0, min_on_demand_nodes=0)
    firm = sum(
        max(pool.on_demand, sum(node.market == "on-demand" for node in pool.nodes)) for pool in draft.kin
    )
    return replace(
        own,
        max_nodes=own.max_nodes - _size(draft.kin),
        max_on_demand_nodes=max(own.max_on_demand_nodes - firm, 0),
    )
