"""Most goodput within a bound on finish-time fairness, on GPUs that may leave and that cost money.

Ours. Pollux (OSDI 2021) maximises goodput and leaves fairness to the shape of its mean; Themis (NSDI 2020) bounds
finish-time fairness and leaves goodput to its auction. Here goodput is the objective and fairness the constraint.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Any, ClassVar

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import Decision, View
from ebbflow.planners.scheduling.goodput.search import SearchBudget
from ebbflow.planners.scheduling.placement import Placer, fewest_nodes
from ebbflow.planners.scheduling.rho_bounded.elastic import Elastic
from ebbflow.planners.scheduling.rho_bounded.forecast import (
    AppForecast,
    Group,
    History,
    Moves,
    forecasts,
    groups_of,
)
from ebbflow.planners.scheduling.rho_bounded.gangs import assign, queue
from ebbflow.planners.scheduling.rho_bounded.plan import Bounds, Plan, due, gangs_of, replan


@dataclass(frozen=True, slots=True)
class Memory:
    """What one decision leaves to the next."""

    history: History
    plan: Plan


@dataclass(frozen=True, slots=True)
class RhoBounded:
    """The policy. Gangs are queued by a rule that is planned ahead; elastic apps share by weighted goodput.

    What it knows of an app is what the app reports now; see ``rho_bounded_outlook``.

    Args:
        rho: worst finish-time fairness that it aims at, by its own account of a fair share.
        makespan: longest makespan of gangs, over the shortest that it finds.
        delay_s: s that a start or a move costs.
        leave_s: s before a firm notice's deadline by which GPUs are given up, to save what was trained.
        replan_s: s between plans for gangs, unless many come.
        interval_s: s after which it wants to be asked again while somebody waits or could grow.
        scaling: p of speed-ups that grow as GPUs**p, by which elastic apps' sizes are weighed.
        value: dollars that an hour of progress at the speed of one GPU of the best type is worth; GPUs that cost more
            for what they add are left alone, unless a bound is at stake. ``None``: money doesn't matter.
        placer: where a gang's GPUs are taken.
    """

    elastic: ClassVar[bool] = True
    rho: float = 1.0
    makespan: float = 1.05
    delay_s: float = 30.0
    leave_s: float = 30.0
    replan_s: float = 600.0
    interval_s: float = 60.0
    scaling: float = 0.5
    value: float | None = None
    placer: Placer = fewest_nodes
    effort: SearchBudget = field(default_factory=SearchBudget)
    name: str = "rho-bounded"

    def __post_init__(self) -> None:
        if not self.rho > 0 or not self.makespan >= 1:
            raise OptionError(f"need rho > 0 and makespan >= 1; got {self.rho} and {self.makespan}")
        for name in ("delay_s", "leave_s"):
            if not 0 <= getattr(self, name) < inf:
                raise OptionError(f"{name} must be >= 0 s and finite; got {getattr(self, name)}")
        for name in ("replan_s", "interval_s"):
            if not 0 < getattr(self, name) < inf:
                raise OptionError(f"{name} must be > 0 s and finite; got {getattr(self, name)}")
        if self.value is not None and not (self.value > 0 and isfinite(self.value)):
            raise OptionError(f"value must be > 0 dollars and finite; got {self.value}")
        if not 0 <= self.scaling < 1:
            raise OptionError(f"scaling must be >= 0 and < 1; got {self.scaling}")

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Return what everyone holds from now on."""
        before = memory if isinstance(memory, Memory) else Memory(History(view.now), Plan())
        known, history = forecasts(view, before.history)
        groups = groups_of(view)
        if not view.apps:
            return Decision({}, Memory(history, Plan()))
        if all(app.min_gpus >= app.max_gpus >= app.gpus for app in view.apps):
            return self._gangs(view, known, groups, before, history)
        elastic = Elastic(self.rho, self.scaling, Moves(self.delay_s, self.leave_s), self.value, self.effort)
        decision = elastic.decide(view, known, groups, rng)
        return replace(decision, memory=Memory(history, before.plan), wake=view.now + self.interval_s)

    def _gangs(
        self,
        view: View,
        known: Sequence[AppForecast],
        groups: Sequence[Group],
        before: Memory,
        history: History,
    ) -> Decision:
        earlier = before.history.attained
        plan = before.plan if earlier else Plan(busy_since=view.now)
        gangs = gangs_of(known, groups, self.delay_s)
        came = any(app.id not in earlier for app in view.apps)
        if due(plan, view.now, len(known), came, self.replan_s):
            plan = replan(gangs, view.now, Bounds(self.rho, self.makespan), plan, came)
        turns = queue(known, gangs, view.now, plan.rule)
        grants = assign(turns, groups, view.now, Moves(self.delay_s, self.leave_s), self.placer, self.value)
        alarms = [t.since for t in turns if not grants[t.forecast.app.id].placement and t.since > view.now]
        wake = max(min(alarms, default=inf), view.now + self.interval_s)
        notes = {"pressed": float(sum(t.kind < 2 for t in turns))}
        return Decision(grants, Memory(history, plan), wake, notes)
