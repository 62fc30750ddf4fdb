"""What no gang may break: it passes ``check`` as a pool of its own would, whole, or it is refused with the reasons.

The limits, the ceilings and the dollars are those of ordinary targets, by the same rules (``planners.fleet.guard``):
a gang counts as nodes of its pool, of the pool's team and of all, and one decision adds no more nodes than it may.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from ebbflow.planners.fleet.guard import NewNode, RunMoney, check
from ebbflow.planners.fleet.limits import Limits
from ebbflow.planners.model.fleet import Fleet, PoolState, Target, family
from ebbflow.planners.model.gangs import GangRequest, GangTarget


@dataclass(frozen=True, slots=True)
class GangVerdict:
    """Whether a gang may be started, and why not, in sentences for people."""

    target: GangTarget | None  # None: refused
    reasons: tuple[str, ...] = ()


def check_gang(
    request: GangRequest,
    fleet: Fleet,
    limits: Limits,
    *,
    new: Mapping[str, NewNode] | None = None,
    run: RunMoney | None = None,
    held: bool = False,
    why: str = "asked for",
) -> GangVerdict:
    """Return whether the gang may be started beside what ``fleet`` has.

    One that is ``held`` already, or whose nodes are all there, costs nothing more and passes. ``new`` says by pool
    what another node costs: without a price no gang is started under a limit of dollars, unless its own ``max_price``
    says what a node costs at most; and where it is not known what a node has, none under a limit of GPUs. ``run``
    says what the gang's run has cost, and for how long it is expected to continue.

    >>> from ebbflow.planners.fleet.limits import Quota
    >>> fleet = Fleet(1, 0.0, (PoolState("gpu", 2, 2, ()),))
    >>> limits = Limits(nodes=8)
    >>> check_gang(GangRequest("run-1", "gpu", 6), fleet, limits).target is not None
    True
    >>> check_gang(GangRequest("run-1", "gpu", 7), fleet, limits).reasons
    ('refused: 6 nodes instead of 7: all pools may have 8, the others have 2; a gang is whole or not at all',)
    """
    new = new or {}
    states = {pool.name: pool for pool in fleet.pools}
    if request.pool not in states:
        known = ", ".join(sorted({pool.family for pool in fleet.pools})) or "none"
        return GangVerdict(None, (f"rejected: no pool {request.pool!r}; pools: {known}",))
    beside = tuple((pool.name, pool.planned) for pool in fleet.pools if pool.name != request.shown)
    there = states[request.shown].nodes if request.shown in states else ()
    if held or len(there) >= request.size:
        return GangVerdict(GangTarget(request, fleet.revision, f"{why}: the gang exists already", beside))
    firm = request.size if request.market == "on-demand" else 0
    # no node of it is planned yet: what was asked for before and is not there is asked for again
    states[request.shown] = PoolState(request.shown, 0, 0, there, max_nodes=request.size, base=firm)
    with_it = replace(fleet, pools=tuple(states[name] for name in sorted(states)))
    if unknown := _unknown_gpus(request, with_it, limits, new):
        return GangVerdict(None, (f"rejected: {unknown}",))
    wanted = Target(request.shown, request.size, fleet.revision, why, firm)
    verdict = check(wanted, with_it, limits, new={**new, request.shown: gang_node(request, new)}, run=run)
    if verdict.target == wanted:
        return GangVerdict(GangTarget(request, fleet.revision, why, beside))
    if verdict.target is None:
        return GangVerdict(None, verdict.reasons)
    said = "; ".join(verdict.reasons)
    return GangVerdict(None, (f"rejected: {said}; a gang starts all-or-nothing",))


def gang_node(request: GangRequest, new: Mapping[str, NewNode]) -> NewNode:
    """Return what a node of the gang costs and has: a spot node never costs more than the request allows."""
    one = new.get(family(request.pool), NewNode())
    if request.max_price is None:
        return one
    return replace(one, spot=min(request.max_price, inf if one.spot is None else one.spot))


def _unknown_gpus(request: GangRequest, fleet: Fleet, limits: Limits, new: Mapping[str, NewNode]) -> str:
    """Return why a team's limit of GPUs cannot be kept; empty where it can."""
    known = request.pool in new or any(pool.nodes for pool in fleet.pools if pool.family == request.pool)
    for team, quota in limits.teams.items():
        if request.pool in quota.pools and quota.gpus < inf and not known:
            return (
                f"how many GPUs a node of {request.pool} has is not known, and team {team} may have {quota.gpus:g} "
                "GPUs: retry when AWS describes the pool's instance types"
            )
    return ""
