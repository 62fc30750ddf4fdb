"""Which blocks of the parameters to save next, and who adopts those of a lost node.

SCAR's running checkpoint (Qiao et al., ICML 2019; Qiao's thesis, CMU-CS-21-135, section 5.4) holds the latest saved
value of every block. Instead of everything each C iterations it takes a fraction r each r·C iterations, so that the
same volume is written. Blocks are numbered from 0; sizes are in one unit, bytes as a rule.

    plan = PartialCheckpoints(CheckpointSchedule(period=16, fraction=1 / 8), sizes, PrioritySelection())
    if plan.due(iteration):
        ids = plan.choose(iteration, distances, rng)      # copy, write; on a failed write: plan.undo(...)
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.saving.rework import rework_after_recovery

Node = TypeVar("Node", bound=Hashable)
Strategy = Literal["priority", "round", "random"]


class Selection(Protocol):
    """Chooses the blocks of one partial checkpoint."""

    def select(
        self, distances: ArrayLike, sizes: ArrayLike, budget: float, rng: np.random.Generator
    ) -> list[int]:
        """Return the ids to save, most wanted first; none for a budget <= 0, else at least one.

        Blocks are taken in order while at least half of the next one fits, so that n equal blocks of size s give
        round(budget/s) ids. The caller carries what was taken too much, or too little, to the next budget.

        Args:
            distances: of each block from its saved value, >= 0, inf for one that was never saved; shape (n,).
            sizes: of each block, > 0; shape (n,).
            budget: how much to save, in the unit of ``sizes``.
            rng: drawn from only where the strategy is random. The same state gives the same ids everywhere.
        """
        ...


@dataclass(frozen=True, slots=True)
class PrioritySelection:
    """Takes the blocks that changed most since they were saved; of equal ones the lowest id.

    For equal blocks no choice leaves a smaller expected squared perturbation behind. With ``density`` the squared
    change per unit of size ranks instead, which serves unequal blocks better, but is not what was published.
    """

    density: bool = False

    def select(
        self, distances: ArrayLike, sizes: ArrayLike, budget: float, rng: np.random.Generator
    ) -> list[int]:
        far, large = _checked(distances, sizes)
        rank = far * far / large if self.density else far
        return fill(np.argsort(-rank, kind="stable"), large, budget)


@dataclass(slots=True)
class RoundRobinSelection:
    """Takes the next blocks in a fixed order: ``order`` if it is given, else drawn at the first use."""

    order: tuple[int, ...] = ()
    next: int = 0  # place in the order

    def select(
        self, distances: ArrayLike, sizes: ArrayLike, budget: float, rng: np.random.Generator
    ) -> list[int]:
        _, large = _checked(distances, sizes)
        if not self.order:
            self.order = tuple(rng.permutation(len(large)).tolist())
        if len(self.order) != len(large):
            raise OptionError(f"order must name each of {len(large)} blocks once; it has {len(self.order)}")
        taken = fill(self.order[self.next :] + self.order[: self.next], large, budget)
        self.next = (self.next + len(taken)) % len(large)
        return taken


@dataclass(frozen=True, slots=True)
class RandomSelection:
    """Takes blocks at random, each at most once."""

    def select(
        self, distances: ArrayLike, sizes: ArrayLike, budget: float, rng: np.random.Generator
    ) -> list[int]:
        _, large = _checked(distances, sizes)
        return fill(rng.permutation(len(large)), large, budget)


def selection(strategy: Strategy) -> Selection:
    """Return a fresh selection by name. Raises ``OptionError`` for another name."""
    made: dict[str, Selection] = {
        "priority": PrioritySelection(),
        "round": RoundRobinSelection(),
        "random": RandomSelection(),
    }
    if strategy not in made:
        raise OptionError(f"strategies are {', '.join(made)}; got {strategy!r}")
    return made[strategy]


def fill(order: Iterable[int], sizes: ArrayLike, budget: float) -> list[int]:
    """Return the first ids of ``order`` that a budget pays for; see ``Selection.select``."""
    large = np.asarray(sizes, float)
    ids = np.fromiter(order, int)
    if budget <= 0 or not len(ids):
        return []
    before = np.concatenate(([0.0], np.cumsum(large[ids])[:-1]))
    fits = budget - before >= large[ids] / 2 - 1e-9 * budget
    count = len(ids) if fits.all() else max(1, int(np.argmin(fits)))
    return [int(block) for block in ids[:count]]


@dataclass(frozen=True, slots=True)
class CheckpointSchedule:
    """Saves ``fraction`` of the parameters so often that all of their volume is written once in ``period``.

    ``period`` is C in iterations; ``fraction`` is r, from above 0 to 1. r = 1 is the ordinary full checkpoint.
    """

    period: int
    fraction: float = 1 / 8

    def __post_init__(self) -> None:
        if self.period < 1:
            raise OptionError(f"period must be >= 1 iteration; got {self.period}")
        if not 0 < self.fraction <= 1:
            raise OptionError(f"fraction must be above 0 and at most 1; got {self.fraction}")

    @property
    def interval(self) -> int:
        """Return the iterations between two saves: max(1, round(r·C))."""
        return max(1, round(self.fraction * self.period))

    @property
    def share(self) -> float:
        """Return what one save takes of all: ``fraction``, but for r·C that is no whole number of iterations."""
        return self.interval / self.period

    def due(self, iteration: int) -> bool:
        """Return whether to save after ``iteration``, counted from 1; 0 is the start, which is always saved."""
        return iteration > 0 and iteration % self.interval == 0

    def mean_age(self, strategy: Literal["round", "random"]) -> float:
        """Return the mean iterations since a block was saved, at a random moment: C/2, or C·(1 − r/2) at random.

        Raises ``OptionError``.
        """
        if strategy not in {"round", "random"}:
            raise OptionError(f"the mean age is known for round and random; got {strategy!r}")
        return self.period * (0.5 if strategy == "round" else 1 - self.share / 2)


@dataclass(slots=True)
class PartialCheckpoints:
    """When to save, and which blocks: a schedule, a selection, the byte budget and the ages of the blocks.

    Unequal blocks seldom fill a budget exactly: what was taken too much is owed by the next save. A block that was
    not saved for ``max_age`` iterations (4·C unless told) comes first, so that storage need not keep old segments for
    ever. Equal calls give equal choices, on every rank.
    """

    schedule: CheckpointSchedule
    sizes: Sequence[float]
    selection: Selection = field(default_factory=PrioritySelection)
    max_age: float | None = None  # iterations; inf: never forced
    saved: NDArray[np.int64] = field(
        init=False
    )  # iteration at which each block was last chosen; 0: the start
    debt: float = field(init=False, default=0.0)  # in the unit of sizes; < 0 is credit

    def __post_init__(self) -> None:
        if not len(self.sizes) or not all(0 < size < inf for size in self.sizes):
            raise OptionError("sizes of blocks must be finite and > 0, and there must be one at least")
        if self.max_age is None:
            self.max_age = 4.0 * self.schedule.period
        if not self.max_age >= self.schedule.period:
            raise OptionError(
                f"max_age must be at least the period of {self.schedule.period} iterations; got {self.max_age}"
            )
        self.saved = np.zeros(len(self.sizes), np.int64)

    def due(self, iteration: int) -> bool:
        """Return whether to save after ``iteration``."""
        return self.schedule.due(iteration)

    def choose(
        self, iteration: int, distances: ArrayLike, rng: np.random.Generator, *, budget: float | None = None
    ) -> list[int]:
        """Return the ids to save now, most wanted first, and count them as saved.

        ``budget`` replaces the schedule's, in the unit of ``sizes``: what a notice still leaves time for, say. Such
        an extra save neither pays nor makes debts.
        """
        large = np.asarray(self.sizes, float)
        paid = float(large.sum()) * self.schedule.share - self.debt if budget is None else budget
        late = np.flatnonzero(iteration - self.saved >= (self.max_age or inf))
        first = fill(late[np.argsort(self.saved[late], kind="stable")], large, paid)
        left = paid - float(large[first].sum())
        taken = first
        if not first or left > 0:
            far = np.array(distances, float)
            far[first] = 0.0
            wanted = self.selection.select(far, large, left, rng)
            fresh = [block for block in wanted if block not in set(first)]
            taken = first + (fresh if not first else _affordable(fresh, large, left))
        if budget is None:
            self.debt = float(large[taken].sum()) - paid
        self.saved[taken] = iteration
        return taken

    def undo(self, durable: Mapping[int, int]) -> None:
        """Count blocks as saved when storage says so, after writes that failed: id to iteration.

        Their distances count from there again; what the writes cost is not repaid.
        """
        for block, iteration in durable.items():
            self.saved[block] = iteration

    def state(self) -> dict[str, Any]:
        """Return what a restart needs, as plain values."""
        kept: dict[str, Any] = {"saved": self.saved.tolist(), "debt": self.debt}
        if isinstance(self.selection, RoundRobinSelection):
            kept |= {"order": list(self.selection.order), "next": self.selection.next}
        return kept

    def restore(self, kept: Mapping[str, Any]) -> None:
        """Take the ``state`` of an earlier one. Raises ``OptionError`` if it was of another number of blocks."""
        if len(kept["saved"]) != len(self.sizes):
            raise OptionError(f"state must be of {len(self.sizes)} blocks; got {len(kept['saved'])}")
        self.saved = np.asarray(kept["saved"], np.int64)
        self.debt = float(kept["debt"])
        if isinstance(self.selection, RoundRobinSelection) and "order" in kept:
            self.selection.order, self.selection.next = tuple(kept["order"]), int(kept["next"])


def assign_lost_blocks(lost: Mapping[int, float], loads: Mapping[Node, float]) -> dict[int, Node]:
    """Return who adopts each lost block: the largest first, each to the least loaded survivor.

    Args:
        lost: size of each lost block, by its id.
        loads: what each survivor holds already, in the same unit. Ties go to the node whose name sorts first.

    Raises ``OptionError``.
    """
    if lost and not loads:
        raise OptionError(f"{len(lost)} blocks are lost and no node survives; restore all of them")
    total = dict(sorted(loads.items(), key=lambda item: (str(type(item[0])), item[0])))
    adopted: dict[int, Node] = {}
    for block in sorted(lost, key=lambda block: (-lost[block], block)):
        adopted[block] = min(total, key=total.__getitem__)
        total[adopted[block]] += lost[block]
    return adopted


def expected_rework(
    hazard: float,
    schedule: CheckpointSchedule,
    distances: Sequence[float],
    *,
    contraction: float,
    error: float,
    lost: float = 1.0,
) -> float:
    """Return the iterations that losses are expected to cost in one iteration, at most.

    A loss falls on any iteration of a period alike, so that the bound is averaged over the last period.

    Args:
        hazard: losses expected in an iteration, each of the share ``lost`` of all blocks.
        schedule: of the running checkpoint.
        distances: ‖w − z‖ of all parameters after each of the last iterations, oldest first.
        contraction: c of the training, in (0, 1).
        error: ‖w − w*‖ now; ``rework.error_from_step`` estimates it.
        lost: p, from 0 to 1.

    Raises ``OptionError``.
    """
    if not hazard >= 0:
        raise OptionError(f"hazard must be >= 0 losses an iteration; got {hazard}")
    recent = list(distances)[-schedule.period :]
    if not recent:
        raise OptionError("distances must hold one iteration at least")
    bounds = [rework_after_recovery(contraction, error, distance, lost) for distance in recent]
    return hazard * sum(bounds) / len(bounds)


def drain_or_recover(
    rework: float, step: float, *, drain: float, restore: float, notice: float
) -> Literal["drain", "recover"]:
    """Return what costs less time when a node is announced to leave.

    Args:
        rework: iterations that its loss would cost (``rework.rework_after_recovery``).
        step: seconds of an iteration.
        drain: seconds to stop, save and hand its blocks over before it leaves.
        restore: seconds until its blocks are read from storage after it has left.
        notice: seconds until it leaves; what cannot be drained by then is lost anyway.
    """
    if drain > notice:
        return "recover"
    return "drain" if drain <= restore + rework * step else "recover"


def _affordable(ids: Sequence[int], sizes: NDArray[np.float64], budget: float) -> list[int]:
    """Return the first ``ids`` while at least half of the next fits: none where a first one would not."""
    taken = []
    for block in ids:
        if budget < sizes[block] / 2:
            break
        taken.append(block)
        budget -= sizes[block]
    return taken


def _checked(distances: ArrayLike, sizes: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    far, large = np.asarray(distances, float), np.asarray(sizes, float)
    if far.ndim != 1 or far.shape != large.shape or not len(far):
        raise OptionError(f"distances and sizes must be one a block; got {far.shape} and {large.shape}")
    if not (far >= 0).all():
        raise OptionError("distances must be >= 0 and no NaN")
    if not ((large > 0) & (large < inf)).all():
        raise OptionError("sizes of blocks must be finite and > 0")
    return far, large
