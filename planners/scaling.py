"""How many nodes one large elastic job should rent (Pollux, OSDI 2021, section 5.10 of the thesis).

Nodes are worth their price as long as each GPU gives enough of what a single GPU would. The job grows when its
goodput per GPU is still high, to the size where it is expected to be about half; it never shrinks.
"""

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import Goodput

TRIGGER = 2 / 3
TARGET = 1 / 2


def goodput_per_gpu(goodput: Goodput, most: int, per_node: int) -> list[float]:
    """Return, for 1 to ``most`` whole nodes of ``per_node`` GPUs, goodput per GPU over that of a single GPU."""
    if most < 1 or per_node < 1:
        raise OptionError(f"most and per_node must be >= 1; got {most}, {per_node}")
    nodes = np.arange(1, most + 1)
    found = goodput.best(np.concatenate(([1], nodes)), np.concatenate(([1], nodes * per_node)))
    if not found[0] > 0:
        raise OptionError("goodput on a single GPU must be > 0")
    return [float(value) for value in found[1:] / (nodes * per_node) / found[0]]


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
    """
    if not 1 <= now <= most:
        raise OptionError(f"now must be 1 to {most} nodes; got {now}")
    if not 0 < target <= trigger <= 1:
        raise OptionError(f"0 < target <= trigger <= 1 must hold; got {target}, {trigger}")
    ratios = goodput_per_gpu(goodput, most, per_node)
    if ratios[now - 1] <= trigger:
        return now
    return max(now, 1 + min(range(most), key=lambda at: (abs(ratios[at] - target), at)))
