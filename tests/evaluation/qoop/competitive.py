"""The abstract online planner and its guarantees (QOOP, 5.2 and 6; thesis, theorems 2.1 and 2.2).

A plan a×b is a bag of b independent tasks that each need a resource-units for one step. Completed tasks are
never redone and switching costs nothing. An online planner is α-competitive if it never finishes later than
an offline optimum that knows all allocations, picks one plan and runs α copies of it back to back. The
planner here is 4-competitive, and 2-competitive if every plan has at most half the work of the one before.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil, floor, inf
from typing import Literal, Protocol

from ebbflow.planners.errors import OptionError

Mode = Literal["fluid", "whole-task"]
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class AbstractQEP:
    """``b`` tasks of ``a`` resource-units and one step each."""

    a: float
    b: float

    @property
    def work(self) -> float:
        """Return a·b: unit-steps."""
        return self.a * self.b

    def per_step(self, allocation: float, mode: Mode = "fluid") -> float:
        """Return the work done in one step: the allocation, or whole tasks only; 0 if no task fits."""
        if allocation < self.a:
            return 0.0
        return allocation if mode == "fluid" else self.a * floor(allocation / self.a + _SLACK)


class OnlinePlanner(Protocol):
    """Chooses a plan each step without knowing later allocations."""

    qeps: tuple[AbstractQEP, ...]
    remaining: list[float]  # work left of each plan

    def choose(self, allocation: float) -> int | None:
        """Return the plan to run on ``allocation``, or ``None`` to idle."""
        ...

    def step(self, allocation: float) -> int | None:
        """Run one step and return the plan that ran."""
        ...


def filter_qeps(qeps: Sequence[AbstractQEP]) -> tuple[AbstractQEP, ...]:
    """Drop plans whose work is more than half of the last retained plan's; the first is always retained.

    >>> [q.b for q in filter_qeps([AbstractQEP(1, 56), AbstractQEP(2, 19), AbstractQEP(4, 6)])]
    [56, 6]

    Raises ``OptionError`` unless demands are positive and strictly increasing.
    """
    demands = [q.a for q in qeps]
    if not demands or demands[0] <= 0 or any(a >= b for a, b in pairwise(demands)):
        raise OptionError(f"plans must have positive, strictly increasing demands; got {demands}")
    kept = [qeps[0]]
    for qep in qeps[1:]:
        if qep.work <= kept[-1].work / 2:
            kept.append(qep)
    return tuple(kept)


class OnlineGreedyPlanner:
    """Among retained plans that fit the allocation, runs the one with the least remaining processing time.

    Ties go to the smallest demand. In ``fluid`` mode a step does as much work as the allocation, in
    ``whole-task`` mode only whole tasks, where the competitive ratios hold for powers of two only.
    """

    def __init__(self, qeps: Sequence[AbstractQEP], mode: Mode = "fluid", *, filtered: bool = True) -> None:
        self.qeps = filter_qeps(qeps) if filtered else tuple(qeps)
        self.mode: Mode = mode
        self.remaining = [float(q.work) for q in self.qeps]

    @property
    def done(self) -> bool:
        """Tell whether some plan is complete."""
        return min(self.remaining) <= _SLACK

    def choose(self, allocation: float) -> int | None:
        """Return the plan to run on ``allocation``, or ``None`` when none fits."""
        feasible = [i for i, q in enumerate(self.qeps) if q.a <= allocation]
        if not feasible:
            return None
        return min(feasible, key=lambda i: (self._time_left(i, allocation), self.qeps[i].a))

    def step(self, allocation: float, plan: int | None = None) -> int | None:
        """Run one step on ``allocation``, on ``plan`` if given, and return the plan that ran."""
        chosen = self.choose(allocation) if plan is None else plan
        if chosen is not None:
            done = self.qeps[chosen].per_step(allocation, self.mode)
            self.remaining[chosen] = max(self.remaining[chosen] - done, 0.0)
        return chosen

    def run(self, allocations: Iterable[float]) -> float:
        """Return the number of steps until some plan is complete; infinite if the allocations end first."""
        return self._run(allocations, lazy=False)

    def run_lazily(self, allocations: Iterable[float]) -> float:
        """Like ``run``, but decide only when the allocation changes: the choice cannot change in between."""
        return self._run(allocations, lazy=True)

    def _run(self, allocations: Iterable[float], *, lazy: bool) -> float:
        last, chosen = -1.0, None
        for number, allocation in enumerate(allocations, 1):
            if not lazy or allocation != last:
                last, chosen = allocation, self.choose(allocation)
            if chosen is not None:
                self.step(allocation, chosen)
            if self.done:
                return float(number)
        return inf

    def _time_left(self, i: int, allocation: float) -> float:
        """Return the remaining work: every feasible plan proceeds at the rate of the allocation."""
        if self.mode == "fluid":
            return self.remaining[i]
        return float(ceil(self.remaining[i] / self.qeps[i].per_step(allocation, self.mode) - _SLACK))


def copies_time(
    qep: AbstractQEP, allocations: Iterable[float], copies: float = 1.0, mode: Mode = "fluid"
) -> float:
    """Return the steps that ``copies`` of ``qep`` take back to back; infinite if they never end."""
    left = copies * qep.work
    for number, allocation in enumerate(allocations, 1):
        left -= qep.per_step(allocation, mode)
        if left <= _SLACK:
            return float(number)
    return inf


def offline_copies_time(
    qeps: Sequence[AbstractQEP], allocations: Sequence[float], copies: float, mode: Mode = "fluid"
) -> float:
    """Return the steps in which the best single plan runs ``copies`` times, knowing all allocations."""
    return min(copies_time(q, allocations, copies, mode) for q in qeps)


def copies_fitting(qeps: Sequence[AbstractQEP], allocations: Sequence[float], mode: Mode = "fluid") -> float:
    """Return how many copies of the best single plan the offline optimum fits into ``allocations``."""
    return max(sum(q.per_step(a, mode) for a in allocations) / q.work for q in qeps)


@dataclass(frozen=True, slots=True)
class AdversaryRun:
    """What the lower-bound adversary did to an online planner."""

    qeps: tuple[AbstractQEP, ...]
    allocations: tuple[float, ...]  # per step, until the planner finished
    copies: float  # that the offline optimum fits


def lower_bound_adversary(
    m: int,
    unit: float = 64.0,
    planner: Callable[[Sequence[AbstractQEP]], OnlinePlanner] = OnlineGreedyPlanner,
) -> AdversaryRun:
    """Play the adversary of theorem 2.1 against ``planner`` and measure the copies that the optimum fits.

    There are m plans with a_i = 2^i and w_i = 2^(m-i)·W, W = ``unit``·2^m. In phase j, 2^j units are
    allocated each step until some plan i ≤ j is near-complete: one more such step would finish it. Phase
    i-1 follows, which starves it. Once plan 1 is near-complete it gets what its last task needs. No online
    planner escapes a ratio of 2 - 2^-(m-1) as W grows.

    Raises ``OptionError`` for m < 1 and for a planner that idles although a plan fits.
    """
    if m < 1:
        raise OptionError(f"m must be >= 1; got {m}")
    scale = unit * 2**m
    qeps = tuple(AbstractQEP(2.0**i, 2 ** (m - i) * scale / 2**i) for i in range(1, m + 1))
    online = planner(qeps)
    rank = {q: i for i, q in enumerate(qeps, 1)}
    allocations: list[float] = []
    phase = m
    while phase >= 1:
        allocation = 2.0**phase
        chosen = online.choose(allocation)
        if chosen is None:
            raise OptionError(f"planner must run some plan that fits; it idles on {allocation:g} units")
        if online.remaining[chosen] <= allocation:
            phase = rank[online.qeps[chosen]] - 1
            continue
        online.step(allocation)
        allocations.append(allocation)
    allocations.append(qeps[0].a)
    online.step(qeps[0].a)
    return AdversaryRun(qeps, tuple(allocations), copies_fitting(qeps, allocations))
