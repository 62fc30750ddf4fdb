"""What nodes do and hold, for who is to choose those that leave."""

from dataclasses import replace

from ebbflow.planners.capacity.cycle_state import Scene
from ebbflow.planners.capacity.values import Plan, Situation
from ebbflow.planners.fleet.scaling.scale_in import NodeUse


def uses_of(situation: Situation, scene: Scene, plan: Plan) -> dict[str, NodeUse]:
    """Return what nodes do and hold, leases included: a node with a lease is busy until it was let go of, and one
    that the plan wants is so already."""
    found = dict(situation.uses)
    counts: dict[str, int] = {}
    for leases in scene.mine.values():
        for lease in leases.values():
            counts[lease.node] = counts.get(lease.node, 0) + 1
    for wanted in plan.wanted.values():
        for node, gpus in wanted.placement:
            if node not in scene.closed:
                counts[node] = max(counts.get(node, 0), gpus)
    for node, gpus in counts.items():
        use = found.get(node, NodeUse())
        found[node] = replace(
            use, busy=use.busy + gpus * scene.settings.grace_s, work=max(use.work, float(gpus))
        )
    return found
