"""What aggregators would cost a training, measured where it runs: sums and updates of its parameters."""

import time
from typing import Any

import numpy as np
import torch

from ebbflow.infra.aggregation.rules import OptimizerState, gradient_sum
from ebbflow.infra.training.service.optimizer import rule_of, trained
from ebbflow.planners.errors import OptionError

_ELEMENTS = 1 << 20  # of the arrays that are measured
_TIMES = 3


def service_costs(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what a service would do for a model in each step, as plain values.

    Args:
        model: that is trained.
        optimizer: of its parameters.

    Returns:
        ``parameter_bytes`` as float32, ``sum_s`` and ``update_s`` of ``planners.aggregation.choice.SyncCosts``, the
        fastest of three measurements scaled by size; or ``obstacle``: why aggregators cannot train it.
    """
    try:
        parameters = trained(model, optimizer)
        rule = rule_of(optimizer, optimizer.param_groups[0])
    except OptionError as exc:
        return {"obstacle": str(exc)}
    elements = sum(one.numel() for one in parameters.values())
    gradient, values = np.ones(_ELEMENTS, np.float32), np.ones(_ELEMENTS, np.float32)
    state, sums, updates = OptimizerState(), [], []
    for _ in range(_TIMES + 1):  # the first makes the moments
        begun = time.perf_counter()
        total = gradient_sum([gradient, gradient])
        between = time.perf_counter()
        rule.update(values, total, state)
        sums.append((between - begun) / 2)
        updates.append(time.perf_counter() - between)
    scale = elements / _ELEMENTS
    return {
        "parameter_bytes": 4 * elements,
        "sum_s": min(sums[1:]) * scale,
        "update_s": min(updates[1:]) * scale,
    }
