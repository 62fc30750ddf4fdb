"""What observing makes of groups, instances and the kept state. Nothing is asked here, no clock is read."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from ebbflow.infra.aws.fleet.groups import Group
from ebbflow.infra.aws.fleet.instances import Instance
from ebbflow.infra.aws.fleet.state import SETTLING, FleetState, ObservedNode, Plan
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.fleet import PoolState

KEPT = 600.0
"""Seconds after its deadline for which a notice of a node that was never seen is kept: the node may be starting."""
_SOONER = 1.0  # seconds by which a deadline must move to be news
UNASSIGNED = "unassigned"
"""Pool of nodes that carry the cluster's tags and no pool."""


def merged(known: Sequence[Notice], news: Iterable[Notice]) -> tuple[Notice, ...]:
    """Return one notice a node, sorted by node: the firmest, then the earliest, in whatever order they have come.

    A deadline that moves by a second or less is no news.
    """
    by_node = {notice.node_id: notice for notice in known}
    for notice in news:
        old = by_node.get(notice.node_id)
        firmer = old is None or (old.kind, notice.kind) == ("rebalance", "interruption")
        sooner = old is not None and old.kind == notice.kind and notice.deadline < old.deadline - _SOONER
        if firmer or sooner:
            by_node[notice.node_id] = notice
    return tuple(by_node[node] for node in sorted(by_node))


def observed(
    state: FleetState,
    groups: Mapping[str, Group],
    instances: Sequence[Instance],
    nodes: Sequence[Node],
    ending: Sequence[Notice],
    now: float,
) -> FleetState:
    """Return the state after a look; the revision grows where nodes or their notices differ from the last look.

    ``nodes`` are those of ``instances`` that run, ``ending`` the notices of nodes that their groups end.
    """
    pool_of = {instance.id: pool_name(instance) for instance in instances}
    seen = tuple(ObservedNode(n.id, pool_of[n.id], n.instance_type, n.zone, n.market) for n in nodes)
    there, before = {node.id for node in seen}, {node.id for node in state.seen}
    billed = {instance.id for instance in instances if not instance.gone}
    plans = dict(state.plans)
    for pool, group in groups.items():
        plan = plans.get(pool) or adopted(group)
        plans[pool] = replace(plan, drain=tuple(name for name in plan.drain if name in billed))
    late = {pool for pool, group in groups.items() if group.arrived < group.desired}
    notices = tuple(
        notice
        for notice in merged(state.notices, ending)
        if notice.node_id in there or (notice.node_id not in before and notice.deadline + KEPT > now)
    )
    later = replace(
        state,
        plans=plans,
        seen=seen,
        notices=notices,
        short={pool: state.short.get(pool, now) for pool in sorted(late)},
    )
    return state.after(later)


def pools_of(
    state: FleetState,
    groups: Mapping[str, Group],
    instances: Sequence[Instance],
    nodes: Sequence[Node],
    bases: Mapping[str, int],
    why: Mapping[str, str],
    now: float,
    aggregators: Collection[str] = (),
) -> tuple[PoolState, ...]:
    """Return all pools, sorted by name; a gang is one of fixed size, named ``pool/gang``.

    ``bases`` are the nodes of each pool that are always on-demand, ``why`` the reasons of its shortage,
    ``aggregators`` the pools whose nodes serve trainings as aggregators.
    """
    by_pool: dict[str, list[Node]] = {}
    pool_of = {instance.id: pool_name(instance) for instance in instances}
    for node in sorted(nodes, key=lambda node: node.id):
        by_pool.setdefault(pool_of[node.id], []).append(node)
    found = []
    for pool, group in groups.items():
        plan = state.plans[pool]
        found.append(
            PoolState(
                name=pool,
                planned=plan.nodes,
                requested=group.desired,
                nodes=tuple(by_pool.pop(pool, ())),
                on_demand=plan.on_demand,
                min_nodes=group.min_nodes,
                max_nodes=group.max_nodes,
                short_since=state.short.get(pool),
                short_why=why.get(pool, ""),
                base=bases.get(pool, 0),
                on_demand_since=plan.on_demand_since,
                draining=plan.drain,
                purpose="aggregators" if pool in aggregators else "",
            )
        )
    return tuple(
        sorted([*found, *_gangs(state, groups, instances, by_pool, now)], key=lambda pool: pool.name)
    )


def _gangs(
    state: FleetState,
    groups: Mapping[str, Group],
    instances: Sequence[Instance],
    nodes: Mapping[str, Sequence[Node]],
    now: float,
) -> list[PoolState]:
    """Return gangs, and nodes without a pool, as pools of fixed size; ``nodes`` are those that run, by pool.

    Planned is what is billed or may turn up yet: a gang is never filled up again. So nodes that are starting count
    against limits, and so do those that a request may have started whose answer was lost.
    """
    billed: dict[str, list[Instance]] = {}
    for instance in instances:
        if not instance.gone and (name := pool_name(instance)) not in groups:
            billed.setdefault(name, []).append(instance)
    plans = {f"{plan.pool}/{name}": plan for name, plan in state.gangs.items()}
    found = []
    for name in {*billed, *nodes, *plans}:
        there, held, plan = billed.get(name, []), tuple(nodes.get(name, ())), plans.get(name)
        size = max(len(there), len(held))
        on_demand = sum(not instance.spot for instance in there)
        if plan is not None and (plan.phase == "asked" or now - plan.since < SETTLING):
            missing = max(plan.size - size, 0)
            size += missing
            on_demand += missing * (plan.market == "on-demand")
        if size or plan is not None:  # what has not come to its end can be returned by its name
            found.append(PoolState(name, size, size, held, on_demand, size, size))
    return found


def adopted(group: Group) -> Plan:
    """Return the plan of a group that no target was applied to: what it is now."""
    return Plan(group.desired, min(group.on_demand_base, group.desired), reason="found so")


def pool_name(instance: Instance) -> str:
    """Return the pool that an instance is shown in."""
    pool = instance.pool or UNASSIGNED
    return f"{pool}/{instance.gang}" if instance.gang else pool
