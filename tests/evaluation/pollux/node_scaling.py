"""One large job on rented nodes: how many it takes is decided by goodput, or by throughput alone.

The first is Pollux's cloud auto-scaling (OSDI 2021, section 5.10 of the thesis), the second the rule that it is
compared with (Or et al., MLSys 2020): the batch grows in both, but only the first sees what a large batch is worth.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from ebbflow.planners.errors import PlanningError
from ebbflow.planners.fleet.scaling.per_gpu import TARGET, TRIGGER, by_throughput, nodes_wanted
from ebbflow.planners.model.scheduling import Decision, Grant, View


@dataclass(frozen=True, slots=True)
class NodeScaling:
    """Whole nodes for a single app, never fewer than before.

    ``by_goodput`` false: every example counts alike in decisions. ``explore``: at most so many times the GPUs that
    the job ever held, since its model knows no larger sizes.
    """

    elastic: ClassVar[bool] = True
    by_goodput: bool = True
    explore: float = 2.0
    trigger: float = TRIGGER
    target: float = TARGET

    @property
    def name(self) -> str:
        """Return what it decides by."""
        return "goodput-scaling" if self.by_goodput else "throughput-scaling"

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Return the nodes that the app holds from now on; the first it takes are the first of the capacity."""
        if len(view.apps) != 1:
            raise PlanningError(f"{self.name} serves one job at a time; got {len(view.apps)}")
        app = view.apps[0]
        nodes = [node for node in view.capacity.usable if node.gpus > 0]
        if not nodes:
            return Decision({app.id: Grant(reason="there are no nodes")})
        per_node = min(node.gpus for node in nodes)
        held = max(len(app.held), 1)
        wanted = min(held, len(nodes))
        if app.goodput is not None:
            most = min(len(nodes), app.max_gpus // per_node, max(1, int(self.explore * held)))
            if most > wanted:
                goodput = app.goodput if self.by_goodput else by_throughput(app.goodput)
                wanted = nodes_wanted(
                    goodput, wanted, most, per_node, trigger=self.trigger, target=self.target
                )
        kept = {id_ for id_, _ in app.held}
        order = sorted(range(len(nodes)), key=lambda at: (nodes[at].id not in kept, at))[:wanted]
        placement = tuple((nodes[at].id, per_node) for at in sorted(order))
        given = app.held if placement == app.held else placement
        return Decision({app.id: Grant(given, reason=f"{wanted} nodes by {self.name}")})
