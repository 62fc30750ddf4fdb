"""Pollux: GPUs where they add most goodput, evenly (OSDI 2021, section 4.2)."""

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import Decision, Grant, Placement, View, gpus_of
from ebbflow.planners.scheduling.goodput.genetic import Genetic, Population, genetic_search
from ebbflow.planners.scheduling.goodput.objective import Matrix, Objective, Problem, problem_of
from ebbflow.planners.scheduling.goodput.search import SearchBudget, local_search

Search = Literal["local", "genetic"]


@dataclass(frozen=True, slots=True)
class Pollux:
    """Asked every interval, it allots all GPUs anew so as to maximise the fitness.

    ``search`` "local" is ours, "genetic" the paper's; both maximise the same objective under the same rules.
    """

    elastic: ClassVar[bool] = True
    name: str = "pollux"
    search: Search = "local"
    objective: Objective = field(default_factory=Objective)
    effort: SearchBudget = field(default_factory=SearchBudget)
    genetic: Genetic = field(default_factory=Genetic)
    pinned: frozenset[str] = frozenset()  # apps that must not be moved once they hold GPUs

    def __post_init__(self) -> None:
        if self.search not in get_args(Search):
            raise OptionError(f"search must be one of {', '.join(get_args(Search))}; got {self.search!r}")

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Return the allocation with the best fitness found."""
        problem = problem_of(view, self.objective, self.pinned)
        if self.search == "genetic":
            before = memory if isinstance(memory, Population) else None
            rows, population, _ = genetic_search(problem, rng, self.genetic, before)
            return decision_of(view, problem, rows, population)
        rows, bound = local_search(problem, rng, self.effort)
        decision = decision_of(view, problem, rows, None)
        if not view.apps or not bound:
            return decision
        gap = float(problem.costs(rows).sum() / bound - 1.0)
        return replace(decision, notes={**decision.notes, "gap": abs(gap)})


def decision_of(view: View, problem: Problem, rows: Matrix, memory: Any) -> Decision:
    """Return a feasible matrix (J, N) as grants with reasons, and its fitness."""
    grants = {}
    for j, app in enumerate(view.apps):
        row: dict[str, int] = {problem.nodes[n]: int(rows[j, n]) for n in np.flatnonzero(rows[j])}
        if row == dict(app.held):
            placement: Placement = app.held
        else:
            placement = tuple(row.items())
        grants[app.id] = Grant(placement, reason=_reason(app.held, placement))
    notes = {"fitness": float(problem.fitness(rows))} if view.apps else {}
    return Decision(grants, memory, notes=notes)


def _reason(held: Placement, given: Placement) -> str:
    """Return what changes for an app, in words."""
    before, after = gpus_of(held), gpus_of(given)
    if given == held:
        return (
            f"keeps its {before} GPUs"
            if before
            else "pending (Priority): other apps gain more goodput from GPUs"
        )
    if not before:
        return f"starts on {after} GPUs"
    if not after:
        return f"preempted: other apps gain more goodput from its {before} GPUs"
    if before == after:
        return f"migrates with its {before} GPUs to defragment nodes"
    return f"{'scale-up' if after > before else 'scale-down'} {before} → {after} GPUs"
