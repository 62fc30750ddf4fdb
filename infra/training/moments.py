"""Adam's moments when the batch changes."""

import torch
from torch import Tensor

from ebbflow.infra.training.preconditioner import AdamPreconditioner

_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def restart_moments(optimizer: torch.optim.Optimizer) -> bool:
    """Set Adam's moments to zero and begin bias correction anew, as Pollux does when the batch changes.

    They were averages over gradients of another noise. Other optimisers are left alone; tells whether it was done.
    """
    if not AdamPreconditioner.serves(optimizer):
        return False
    for state in optimizer.state.values():
        for name in _MOMENTS:
            if name in state:
                state[name].zero_()
        if isinstance(state.get("step"), Tensor):
            state["step"].zero_()
        elif "step" in state:
            state["step"] = 0
    return True
