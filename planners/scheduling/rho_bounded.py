"""Most goodput within a bound on finish-time fairness, on GPUs that may leave and that cost money.

Ours. Pollux (OSDI 2021) maximises goodput and leaves fairness to the shape of its mean; Themis (NSDI 2020) bounds
finish-time fairness and leaves goodput to the auction. Here goodput is the objective and fairness the constraint.
"""

from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, ClassVar

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import Decision, Grant, View
from ebbflow.planners.scheduling.placement import Placer, fewest_nodes
from ebbflow.planners.scheduling.rho_bounded_gangs import Bounds, Plan, assign, queue, replan
from ebbflow.planners.scheduling.rho_bounded_groups import groups_of
from ebbflow.planners.scheduling.rho_bounded_outlook import History, outlooks
from ebbflow.planners.scheduling.rho_bounded_rollout import Rule


@dataclass(frozen=True, slots=True)
class Memory:
    """What one decision leaves to the next."""

    history: History
    plan: Plan


@dataclass(frozen=True, slots=True)
class RhoBounded:
    """The policy."""

    elastic: ClassVar[bool] = True
    rho: float = 1.3
    makespan: float = 1.0
    delay_s: float = 20.0
    leave_s: float = 30.0
    replan_s: float = 600.0
    interval_s: float = 60.0
    value: float | None = None
    placer: Placer = fewest_nodes
    name: str = "rho-bounded"

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        before = memory if isinstance(memory, Memory) else None
        found, history = outlooks(view, before.history if before else None)
        apps = list(found.values())
        groups = groups_of(view)
        if before is None or not before.history.attained:
            plan = Plan(busy_since=view.now)
        else:
            plan = before.plan
        came = before is None or any(a.id not in before.history.attained for a in view.apps)
        if came or view.now - plan.at >= self.replan_s:
            plan = replan(apps, groups, view.now, Bounds(self.rho, self.makespan), self.delay_s, plan, came)
        turns = queue(apps, groups, plan.rule, view.now, self.delay_s)
        placed = assign(turns, groups, view, self.placer, self.delay_s, self.leave_s, self.value)
        grants = {}
        for t in turns:
            id_ = t.outlook.app.id
            if id_ in placed:
                p, g = placed[id_]
                grants[id_] = Grant(p, g.until - self.leave_s if g.until < inf else inf, "x")
            else:
                grants[id_] = Grant(reason="waits")
        return Decision(grants, Memory(history, plan))
