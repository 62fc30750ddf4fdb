"""What a cluster's utility would be on another number of nodes, with allocations made anew for them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.scaling.band import cluster_utility
from ebbflow.planners.fleet.scaling.limits import Curve
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.scheduling import App, Placement, Policy, View, gpus_of


def speedup(app: App, placement: Placement) -> float:
    """Return the goodput of ``app`` on ``placement`` over that on one GPU; 0 without GPUs or before it is known.

    Raises ``OptionError``.
    """
    gpus = gpus_of(placement)
    if not gpus or app.goodput is None:
        return 0.0
    found = app.goodput.best(np.array([1, len(placement)]), np.array([1, gpus]))
    if not found[0] > 0:
        raise OptionError(f"app {app.id}: goodput on a single GPU must be > 0")
    return float(found[1] / found[0])


def utility_now(view: View) -> float:
    """Return the utility of the cluster as its apps hold it: what ``UtilityBand.after`` is told each round."""
    gpus = sum(node.gpus for node in view.capacity.usable)
    return cluster_utility((speedup(app, app.held) for app in view.apps), gpus)


def utility_curve(view: View, policy: Policy, template: Node, seed: int) -> Curve:
    """Return the utility on n nodes with what ``policy`` would allot on them.

    The nodes are the first n of the view, then more like ``template``. Each count is planned with a generator of the
    same ``seed``, so that it does not matter in which order counts are asked for.

    Raises ``OptionError``.
    """
    present: Sequence[Node] = view.capacity.usable
    if template.gpus < 1:
        raise OptionError(f"a node must have GPUs; got {template.gpus}")

    def curve(nodes: int) -> float:
        more = (replace(template, id=f"~more-{number:05d}") for number in range(nodes - len(present)))
        there = (*present[:nodes], *more)
        gpus = sum(node.gpus for node in there)
        if not gpus:
            return 0.0
        ids = {node.id for node in there}
        apps = [app if all(id_ in ids for id_, _ in app.held) else replace(app, held=()) for app in view.apps]
        capacity = replace(view.capacity, nodes=there, notices=())
        decided = policy.decide(
            replace(view, apps=apps, capacity=capacity), None, np.random.default_rng(seed)
        )
        placed = {name: grant.placement for name, grant in decided.grants.items()}
        return cluster_utility((speedup(app, placed.get(app.id, ())) for app in view.apps), gpus)

    return curve
