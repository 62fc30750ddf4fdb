"""Competitive ratios of the abstract online planner, measured on many instances at once (QOOP, section 6).

The ratio of an instance is the number of copies of its best single plan that an offline optimum fits into the
allocations up to the moment at which the online planner finishes. Theorem 2.2 bounds it by 2 when every plan
has at most half the work of the one before, and by 4 for any plans. The model is fluid: a step does as much
work as the allocation, and the last step ends when the plan does.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ebbflow.planners.errors import OptionError

Array: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]

ALLOCATORS = ("random levels", "random walk", "starving", "starving early")
PLANS = 6  # most plans of an instance
STEPS = 600  # of allocations; what has not finished by then counts with the copies that fitted
_CHUNK = 20_000
_SLACK = 1e-9


@dataclass(frozen=True, slots=True)
class Ratios:
    """Measured ratios of one kind of allocations."""

    allocator: str
    separated: bool  # every plan has at most half the work of the one before
    count: int
    unfinished: int  # instances that outlasted the steps; their ratio so far is counted
    mean: float
    p99: float
    largest: float

    @property
    def bound(self) -> float:
        """Return the theorem's bound."""
        return 2.0 if self.separated else 4.0

    @property
    def kept(self) -> bool:
        """Tell whether no instance exceeds the bound."""
        return self.largest <= self.bound * (1 + _SLACK)


def measure(rng: np.random.Generator, count: int, *, separated: bool) -> tuple[Ratios, ...]:
    """Measure ``count`` instances for each way of allocating: i.i.d. levels, a walk between levels, and two
    adversaries that see the planner's choices and starve a plan that is nearly complete, the second one
    at a random part of its work. Reproducible from ``rng``."""
    if count < 1:
        raise OptionError(f"count must be >= 1; got {count}")
    out = []
    for kind, name in enumerate(ALLOCATORS):
        parts = [
            _ratios(rng, min(_CHUNK, count - start), kind, separated) for start in range(0, count, _CHUNK)
        ]
        ratios = np.concatenate([r for r, _ in parts])
        unfinished = sum(int(u.sum()) for _, u in parts)
        out.append(
            Ratios(
                name, separated, count, unfinished,
                float(ratios.mean()), float(np.quantile(ratios, 0.99)), float(ratios.max()),
            )
        )  # fmt: skip
    return tuple(out)


def instances(rng: np.random.Generator, count: int, separated: bool) -> tuple[Array, Array]:
    """Return demands and works of ``count`` random instances, one a row; plans that are not there have
    infinite demand and work. Demands increase; separated works at least halve, half of them exactly."""
    size = rng.integers(1, PLANS + 1, count)
    absent = np.arange(PLANS)[None, :] >= size[:, None]
    grown = np.where(rng.random((count, PLANS)) < 0.5, 2.0, rng.uniform(1.02, 4.0, (count, PLANS)))
    demand: Array = np.cumprod(grown, 1, dtype=np.float64)
    if separated:
        factor = np.where(rng.random((count, PLANS)) < 0.5, 0.5, rng.uniform(0.05, 0.5, (count, PLANS)))
    else:
        factor = np.exp(rng.uniform(-1.2, 0.6, (count, PLANS)))
    work: Array = np.cumprod(factor, 1, dtype=np.float64)
    # so that even the last plan takes some steps
    last = np.take_along_axis(demand / work, (size - 1)[:, None], 1)
    work = np.asarray(work * last * np.exp(rng.uniform(0.0, np.log(48.0), (count, 1))), dtype=np.float64)
    demand[absent] = np.inf
    work[absent] = np.inf
    return demand, work


def retained(work: Array) -> Flags:
    """Return which plans the filter keeps: those with at most half the work of the last one kept."""
    kept = np.zeros(work.shape, dtype=bool)
    kept[:, 0] = True
    last = work[:, 0].copy()
    for i in range(1, work.shape[1]):
        kept[:, i] = work[:, i] <= last / 2
        last = np.where(kept[:, i], work[:, i], last)
    return kept


def _ratios(rng: np.random.Generator, count: int, kind: int, separated: bool) -> tuple[Array, Flags]:
    demand, work = instances(rng, count, separated)
    kept = retained(work)
    present = np.isfinite(demand)
    top = present.sum(1) - 1
    rows = np.arange(count)
    remaining = np.where(kept, work, np.inf)
    offered = np.zeros_like(work)  # what each plan alone could have done by now
    done = np.zeros(count, dtype=bool)
    level = top.copy()
    leave_at = rng.uniform(0.0, 0.9, count) if kind == 3 else np.zeros(count)
    for _ in range(STEPS):
        if kind == 0:
            level = (rng.random(count) * (top + 1)).astype(np.int64)
        elif kind == 1:
            level = np.clip(level + rng.integers(-1, 2, count), 0, top)
        allocation = demand[rows, level]
        if kind < 2:
            allocation = allocation * rng.uniform(1.0, 1.5, count)
        choice, left = _choice(demand, remaining, kept, allocation)
        if kind >= 2:
            level, allocation, choice, left = _starve(
                demand, work, remaining, kept, level, allocation, choice, left, leave_at
            )
        part = np.where(done, 0.0, np.minimum(left / allocation, 1.0))
        offered += np.where(
            present & (demand <= allocation[:, None] + _SLACK), (allocation * part)[:, None], 0.0
        )
        remaining[rows, choice] -= np.where(done, 0.0, np.minimum(allocation, left))
        done |= remaining[rows, choice] <= _SLACK
        if done.all():
            break
    return np.max(np.where(present, offered / np.where(present, work, 1.0), 0.0), axis=1), ~done


def _choice(
    demand: Array, remaining: Array, kept: Flags, allocation: Array
) -> tuple[npt.NDArray[np.int64], Array]:
    """Return the retained plan with the least remaining work among those that fit, and that work; ties go
    to the smallest demand. Plan 0 is always retained and always fits."""
    fits = kept & (demand <= allocation[:, None] + _SLACK)
    left = np.where(fits, remaining, np.inf)
    choice = np.argmin(left, axis=1)
    return choice, left[np.arange(len(choice)), choice]


def _starve(
    demand: Array,
    work: Array,
    remaining: Array,
    kept: Flags,
    level: npt.NDArray[np.int64],
    allocation: Array,
    choice: npt.NDArray[np.int64],
    left: Array,
    leave_at: Array,
) -> tuple[npt.NDArray[np.int64], Array, npt.NDArray[np.int64], Array]:
    """Go below the chosen plan's demand while one more step would nearly complete it (theorem 2.1)."""
    rows = np.arange(len(level))
    for _ in range(PLANS):
        near = (left <= np.maximum(allocation, leave_at * work[rows, choice])) & (choice > 0)
        if not near.any():
            break
        level = np.where(near, choice - 1, level)
        allocation = demand[rows, level]
        choice, left = _choice(demand, remaining, kept, allocation)
    return level, allocation, choice, left
