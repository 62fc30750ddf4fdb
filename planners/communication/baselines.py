"""What a plan is compared with: the schedulers of the thesis' evaluation (section 4.6), all costed in one way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np

from ebbflow.planners.communication.dag import TrainingDag
from ebbflow.planners.communication.schedule import (
    ExecutionOption,
    Plan,
    Rule,
    Strict,
    Timeline,
    by_priority,
    critical_path,
    fifo,
    lifo,
    schedule,
)
from ebbflow.planners.communication.search import Cost, Options, brute_force, metropolis_search
from ebbflow.planners.errors import OptionError

System = Literal["FIFO", "LIFO", "HO", "S-Exec", "S-Sched", "S-Sched+greedy", "Syndicate"]
PREFETCHING: tuple[System, ...] = ("S-Sched", "S-Sched+greedy", "Syndicate")
"""Those that send what a later iteration needs before it begins."""
SYSTEMS: tuple[System, ...] = ("FIFO", "LIFO", "HO", "S-Exec", "S-Sched", "S-Sched+greedy", "Syndicate")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One system's plan and timeline."""

    system: System
    plan: Plan
    timeline: Timeline


@dataclass(frozen=True)
class Problem:
    """What is planned.

    Args:
        dag: one iteration.
        options: of each collective; the first is what the library does by default.
        rng: what a random walk is drawn from, where there are too many plans to try all.
        clock: s, for the bound of the walk.
        hand_order: names of collectives, the most urgent first, for ``HO``.
        seconds: that bound.
    """

    dag: TrainingDag
    options: Options
    rng: np.random.Generator
    clock: Callable[[], float]
    hand_order: tuple[str, ...] = ()
    seconds: float = 10.0

    def solve(self, system: System) -> Comparison:
        """Return the plan of a system. Raises ``OptionError`` for an unknown one."""
        match system:
            case "FIFO":
                return self._costed(system, {name: some[0] for name, some in self.options.items()})
            case "LIFO" | "S-Sched":
                return self._best(system, self._segmented(_default))
            case "HO" | "S-Sched+greedy":
                return self._best(system, self._segmented(_fastest))
            case "S-Exec" | "Syndicate":
                return self._searched(system)
        raise OptionError(f"a system must be one of {', '.join(SYSTEMS)}; got {system!r}")

    def compare(self, systems: Sequence[System] = SYSTEMS) -> tuple[Comparison, ...]:
        """Return the plans of several systems."""
        return tuple(self.solve(system) for system in systems)

    def simplified(self, found: Comparison, share: float) -> Comparison:
        """Return a system's plan with the library's own option for each collective that gains less than it must.

        Args:
            found: the plan.
            share: of the iteration, by which it may become longer in all.
        """
        bound = found.timeline.period * (1 + share)
        kept = self._costed(found.system, {name: some[0] for name, some in self.options.items()})
        if kept.timeline.period <= bound:
            return kept
        kept = found
        for name, some in self.options.items():
            if kept.plan[name].name != some[0].name:
                tried = self._costed(found.system, {**kept.plan, name: some[0]})
                kept = tried if tried.timeline.period <= bound else kept
        return kept

    def _rules(self, system: System) -> tuple[TrainingDag, Rule, Strict]:
        """Return what a system schedules, in which order, and how strictly."""
        dag = self.dag.prefetched() if system in PREFETCHING else self.dag
        match system:
            case "FIFO":
                return dag, fifo, "no"
            case "LIFO":
                return dag, lifo, "no"
            case "HO":
                order = self.hand_order or tuple(op.name for op in reversed(self.dag.comm))
                return dag, by_priority(*order), "no"
            case "S-Exec":
                return dag, fifo, "channel"
        return dag, critical_path, "no"

    def _costed(self, system: System, plan: Plan) -> Comparison:
        dag, rule, strict = self._rules(system)
        return Comparison(system, plan, schedule(dag, plan, rule, strict=strict))

    def _segmented(self, of: Callable[[Sequence[ExecutionOption]], ExecutionOption]) -> Options:
        """Return the options of the segment oracle: an algorithm and channel for each collective, in any cut.

        An all-to-all is not cut by it.
        """
        kinds = {op.name: op.kind for op in self.dag.comm}
        found = {}
        for name, some in self.options.items():
            chosen = of(some)
            cuts = [
                one for one in some if (one.algorithm, one.channels) == (chosen.algorithm, chosen.channels)
            ]
            found[name] = [chosen] if kinds[name] == "all-to-all" else cuts
        return found

    def _best(self, system: System, options: Options) -> Comparison:
        """Return the best cut by coordinate descent from the coarsest: exact where two interact, and bounded."""
        plan = {name: some[0] for name, some in options.items()}
        pairs = [name for name, some in options.items() if len(some) > 1]
        if len(pairs) <= 3:
            found = [
                {**plan, **dict(zip(pairs, chosen, strict=True))}
                for chosen in product(*(options[name] for name in pairs))
            ]
            plan = min(found, key=self._cost_of(system))
        else:
            for name in pairs:
                plan = min(({**plan, name: one} for one in options[name]), key=self._cost_of(system))
        return self._costed(system, plan)

    def _searched(self, system: System) -> Comparison:
        cost = self._cost_of(system)
        try:
            found = brute_force(self.options, cost, max_plans=2000)
        except OptionError:
            found = metropolis_search(
                self.options, cost, rng=self.rng, clock=self.clock, seconds=self.seconds
            )
        return self._costed(system, found.plan)

    def _cost_of(self, system: System) -> Cost:
        dag, rule, strict = self._rules(system)
        return lambda plan: schedule(dag, plan, rule, strict=strict).period


def _default(options: Sequence[ExecutionOption]) -> ExecutionOption:
    return options[0]


def _fastest(options: Sequence[ExecutionOption]) -> ExecutionOption:
    """Return the option that is fastest by itself on the default's channels."""
    same = [one for one in options if one.channels == options[0].channels]
    return min(same, key=lambda one: one.seconds)
