"""How many nodes one large job is worth renting: Pollux's cloud auto-scaling (OSDI 2021, section 5.3.3)."""

import numpy as np
from numpy.typing import NDArray

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import Goodput

TRIGGER = 2 / 3  # goodput of a GPU over that of a lone GPU, above which the job grows
TARGET = 1 / 2  # the same ratio that it grows to


def utilities(model: Goodput, node_gpus: int, most_nodes: int) -> NDArray[np.float64]:
    """Return the goodput of a GPU on 1 to ``most_nodes`` full nodes of ``node_gpus`` GPUs, over that of a lone GPU.

    Raises ``OptionError`` for no node or no GPU, and for a job that a lone GPU cannot run.
    """
    if node_gpus < 1 or most_nodes < 1:
        raise OptionError(f"node_gpus and most_nodes must be >= 1; got {node_gpus} and {most_nodes}")
    nodes = np.arange(1, most_nodes + 1)
    found = model.best(np.concatenate(([1], nodes)), np.concatenate(([1], nodes * node_gpus)))
    if not found[0] > 0:
        raise OptionError("auto-scaling compares with one GPU, on which this job has no goodput")
    return np.asarray(found[1:] / (nodes * node_gpus * found[0]))


def nodes_worth(
    model: Goodput,
    node_gpus: int,
    most_nodes: int,
    held: int = 1,
    trigger: float = TRIGGER,
    target: float = TARGET,
) -> int:
    """Return the nodes that a job on ``held`` full nodes should go on with; never fewer than it holds.

    It grows once a GPU of its present nodes is worth more than ``trigger``, to the number of nodes on which a GPU
    is worth closest to ``target``. With a model that counts every example alike
    (``GoodputModel(adaptive=False)``) this is the throughput rule that Pollux is compared with.

    Raises ``OptionError`` unless ``1 <= held <= most_nodes`` and ``0 < target <= trigger``.
    """
    if not 1 <= held <= most_nodes:
        raise OptionError(f"held must be between 1 and most_nodes; got {held} of {most_nodes}")
    if not 0 < target <= trigger:
        raise OptionError(f"auto-scaling needs 0 < target <= trigger; got {target} and {trigger}")
    worth = utilities(model, node_gpus, most_nodes)
    if worth[held - 1] <= trigger:
        return held
    return max(held, int(np.abs(worth - target).argmin()) + 1)
