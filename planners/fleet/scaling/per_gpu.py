"""How many nodes one large elastic job should rent (Pollux, OSDI 2021, section 5.10 of the thesis).

Nodes are worth their price as long as each GPU gives enough of what a single GPU would. The job grows when its
goodput per GPU is still high, to the size where it is expected to be about half; it never shrinks. With throughput
in place of goodput it is the rule of Or et al. (MLSys 2020) that Pollux is compared with.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.scaling.limits import Curve, limits, to
from ebbflow.planners.model.fleet import PoolState, Target
from ebbflow.planners.model.scheduling import Goodput
from ebbflow.planners.training.speed.goodput import GoodputModel

TRIGGER = 2 / 3
TARGET = 1 / 2

Measure = Literal["goodput", "throughput"]


def goodput_per_gpu(goodput: Goodput, most: int, per_node: int) -> list[float]:
    """Return, for 1 to ``most`` whole nodes of ``per_node`` GPUs, goodput per GPU over that of a single GPU.

    Raises ``OptionError``.
    """
    if most < 1 or per_node < 1:
        raise OptionError(f"most and per_node must be >= 1; got {most}, {per_node}")
    nodes = np.arange(1, most + 1)
    found = goodput.best(np.concatenate(([1], nodes)), np.concatenate(([1], nodes * per_node)))
    if not found[0] > 0:
        raise OptionError("goodput on a single GPU must be > 0")
    return [float(value) for value in found[1:] / (nodes * per_node) / found[0]]


def by_throughput(goodput: Goodput) -> Goodput:
    """Return what a job would believe whose examples count alike in every batch (Or et al., MLSys 2020)."""
    return replace(goodput, adaptive=False) if isinstance(goodput, GoodputModel) else goodput


def per_gpu_curve(goodput: Goodput, most: int, per_node: int) -> Curve:
    """Return ``goodput_per_gpu`` as a function of the nodes, 1 to ``most``."""
    ratios = goodput_per_gpu(goodput, most, per_node)
    return lambda nodes: ratios[nodes - 1]


def nodes_wanted(
    goodput: Goodput,
    now: int,
    most: int,
    per_node: int,
    *,
    trigger: float = TRIGGER,
    target: float = TARGET,
) -> int:
    """Return the nodes to hold from now on: ``now``, or more if they are worth it.

    Above ``trigger`` the job grows to the count, up to ``most``, whose goodput per GPU comes nearest to ``target``;
    of equally near ones the smallest.

    Raises ``OptionError``.
    """
    if not 1 <= now <= most:
        raise OptionError(f"now must be 1 to {most} nodes; got {now}")
    _check(trigger, target)
    return _nearest(per_gpu_curve(goodput, most, per_node), now, most, trigger, target)


@dataclass(frozen=True, slots=True)
class PerGpuScaling:
    """Grows a pool that serves one job while each of its GPUs gives enough.

    ``measure`` is for the words only: which of both the curve gives is up to its maker (``by_throughput``).
    ``explore``: at most so many times the nodes that are there, since a job's model knows no larger sizes.
    """

    name: ClassVar[str] = "per-gpu"
    measure: Measure = "goodput"
    trigger: float = TRIGGER
    target: float = TARGET
    explore: float = 2.0

    def __post_init__(self) -> None:
        _check(self.trigger, self.target)
        if self.measure not in get_args(Measure):
            raise OptionError(f"measure must be one of {', '.join(get_args(Measure))}; got {self.measure!r}")
        if not self.explore >= 1:
            raise OptionError(f"explore must be >= 1 times the nodes; got {self.explore}")

    def decide(self, pool: PoolState, revision: int, curve: Curve) -> Target:
        """Return the pool's target: what is planned, or more.

        ``curve``: ``measure`` per GPU on n nodes, over that of a single GPU.
        """
        least, most = limits(pool)
        now = max(pool.planned, least, 1)
        ceiling = min(most, max(now, int(self.explore * now)))
        if now > ceiling:
            return to(pool, revision, most, f"max_nodes of the pool is {most}")
        here = curve(now)
        said = f"{self.measure} per GPU on {now} nodes is {here:.3f} of a single GPU's, "
        if here <= self.trigger:
            return to(pool, revision, now, f"{said}not above {self.trigger:.3f}")
        found = _nearest(curve, now, ceiling, self.trigger, self.target)
        said += f"above {self.trigger:.3f}; "
        if found == now:
            said += f"no count up to {ceiling} comes nearer to {self.target:.3f}"
        else:
            said += f"{found} nodes, with {curve(found):.3f}, come nearest to {self.target:.3f}"
        return to(pool, revision, found, said)


def _nearest(curve: Callable[[int], float], now: int, most: int, trigger: float, target: float) -> int:
    if curve(now) <= trigger:
        return now
    return min(range(now, most + 1), key=lambda nodes: (abs(curve(nodes) - target), nodes))


def _check(trigger: float, target: float) -> None:
    if not 0 < target <= trigger <= 1:
        raise OptionError(f"0 < target <= trigger <= 1 must hold; got {target}, {trigger}")
