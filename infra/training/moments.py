"""Adam's moments when the batch changes."""

import torch

from ebbflow.infra.training.preconditioner import AdamPreconditioner
from ebbflow.planners.training.goodput import GradientStatistics

_SECOND = ("exp_avg_sq", "max_exp_avg_sq")


def rescale_moments(
    optimizer: torch.optim.Optimizer, statistics: GradientStatistics, before: float, after: float
) -> bool:
    """Bring Adam's second moments to the level of gradients over another batch.

    ``before`` and ``after`` are batches over the initial one, ``statistics`` those of the gradient at the initial one.
    The mean square of a batch's gradient is ``sqr + var / scale`` in the units of the statistics, which for Adam are
    those of pre-conditioned gradients, so its ratio is that of the second moments; first moments do not depend on the
    batch. Pollux' own library sets all moments to zero instead and begins bias correction anew, which costs a few steps
    of no use at every change. Other optimisers are left alone; tells whether it was done.
    """
    if not AdamPreconditioner.serves(optimizer) or before == after:
        return False
    sqr, var = statistics
    ratio = (sqr + var / after) / (sqr + var / before)
    for state in optimizer.state.values():
        for name in _SECOND:
            if name in state:
                state[name].mul_(ratio)
    return True


def restart_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Set Adam's moments to zero and begin bias correction anew, as Pollux' own library does.

    Other optimisers are left alone; tells whether it was done.
    """
    if not AdamPreconditioner.serves(optimizer):
        return False
    for state in optimizer.state.values():
        for name in ("exp_avg", *_SECOND):
            if name in state:
                state[name].zero_()
        if isinstance(state.get("step"), torch.Tensor):
            state["step"].zero_()
        elif "step" in state:
            state["step"] = 0
    return True
