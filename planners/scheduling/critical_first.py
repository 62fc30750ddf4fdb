"""Short average, short makespan and bounded unfairness at once, for gangs whose remaining work is known.

Shortest remaining service first has the best average completion time, but leaves the longest gangs to the end, where
they run alone (makespan), and may starve some (ρ). Two kinds of gangs therefore go first: those on the critical
path, whose remaining time is close to the least that all the work will take, and those whose finish-time fairness
would be worse than a bound even if they ran from now on.
"""

from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity
from ebbflow.planners.model.scheduling import App, Decision, View
from ebbflow.planners.scheduling.beliefs import remaining_time
from ebbflow.planners.scheduling.ordered import Ordered
from ebbflow.planners.scheduling.placement import Placer, by_skew


@dataclass(frozen=True, slots=True)
class CriticalFirst:
    """Critical gangs, then unfairly treated ones, then shortest remaining service first.

    A gang is critical if its remaining time is at least ``critical`` of the least time in which everything can be
    done: the longest remaining time, or all remaining service over all GPUs. It is unfairly treated if its bidder
    says that ρ would be above ``worst_rho`` with its whole gang from now on; apps without a bidder never are.
    ``refresh`` is after how many seconds it wants to be asked again.
    """

    critical: float = 0.8
    worst_rho: float = 1.0
    refresh: float = 120.0
    placer: Placer = by_skew
    name: str = "critical-first"

    def __post_init__(self) -> None:
        if not self.critical > 0:
            raise OptionError(f"critical must be > 0; got {self.critical}")
        if not self.worst_rho > 0:
            raise OptionError(f"worst_rho must be > 0; got {self.worst_rho}")

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Return the gangs that run."""
        left = {app.id: remaining_time(app, app.gpus) for app in view.apps}
        horizon = least_makespan(view, left)

        def key(app: App, _: View) -> tuple[float, ...]:
            mine = left[app.id]
            if mine >= self.critical * horizon:
                return (0, -mine)
            return (1 if _rho(app, view.capacity, view.now) > self.worst_rho else 2, mine * app.gpus)

        decision = Ordered(self.name, key, refresh=self.refresh, placer=self.placer).decide(view, memory, rng)
        return Decision(decision.grants, None, decision.wake, {"least_makespan": horizon})


def least_makespan(view: View, left: dict[str, float]) -> float:
    """Return a lower bound on the seconds until all apps are done, from their remaining times ``left``."""
    gpus = sum(node.gpus for node in view.capacity.usable)
    service = sum(left[app.id] * app.gpus for app in view.apps)
    return max(max(left.values(), default=0.0), service / gpus if gpus else inf)


def _rho(app: App, capacity: Capacity, now: float) -> float:
    if app.bidder is None or not capacity.nodes:
        return 0.0
    return app.bidder.rho(((capacity.nodes[0].id, app.gpus),), capacity, now)
