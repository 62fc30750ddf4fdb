"""Adam's pre-conditioner as a factor on each element of the gradient (Pollux, OSDI 2021, 3.1 and appendix A.1).

P = 1 / (sqrt(v) + eps), with v the bias-corrected second moment. The noise scale of a step is unbiased whatever P is,
as long as P does not depend on that step's gradient and is the same for the gradients compared. So P is taken from
the steps before, and made from scratch only as often as v can have changed.

Adam's moments when the batch changes.

Pollux' own library sets them to zero and begins bias correction from scratch. Under ten changes of batch between M0
and 16 M0 that ended at a higher loss after equal progress than the fixed batch did; with second moments at their new
level it ended at a lower one (scikit-learn's digits, eight seeds).
"""

from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from ebbflow.infra.training.checkpoints.shards import local
from ebbflow.infra.training.gradients.squares import in_pieces, pieces
from ebbflow.planners.training.speed.goodput import GradientStatistics

IDENTITY_STEPS = 5  # Adam's second moments mean little before
WINDOW_SHARE = 16  # P is made from scratch when a sixteenth of the steps that v remembers is new
MOST_STEPS_KEPT = 64


class AdamPreconditioner:
    """P of every parameter of an Adam or AdamW ``optimizer``, in tensors of the parameters' own layout.

    An element whose second moment is exactly 0 was never reached by a gradient and has no scale yet: its factor is 0,
    not 1/eps, or the first gradient that reaches it would drown all others.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, refresh: Callable[[], None] | None = None) -> None:
        """``refresh`` brings the optimizer's moments up to date, where they are kept elsewhere."""
        self._optimizer, self._refresh = optimizer, refresh
        self._factors: dict[Tensor, Tensor] = {}
        self._flat: dict[int, tuple[tuple[int, ...], Tensor]] = {}  # by bucket: its parameters, their factors
        self._made_at = -1  # the step at which the factors were made; -1: never
        self.on = False

    @staticmethod
    def serves(optimizer: torch.optim.Optimizer) -> bool:
        """Return whether ``optimizer`` scales gradients as Adam does."""
        return isinstance(optimizer, (torch.optim.Adam, torch.optim.AdamW))

    def begin(self) -> bool:
        """Inspect the optimizer before an iteration; return whether gradients are pre-conditioned in it."""
        step = self._step()
        self.on = step >= IDENTITY_STEPS
        if self.on and (step < self._made_at or step >= self._made_at + _kept(self._made_at)):
            if self._refresh is not None:
                self._refresh()
            self._fill(self._factors)
            self._made_at = step
        return self.on

    def of(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the factors of ``parameters``; only while ``on``."""
        missing = {p: torch.empty_like(p) for p in parameters if p not in self._factors}
        if missing:
            self._fill(missing)
            self._factors.update(missing)
        return [self._factors[p] for p in parameters]

    def of_bucket(self, bucket: Any) -> Tensor:
        """Return the factors of a ``GradBucket``'s parameters as one vector, laid out as the bucket is."""
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        known = self._flat.get(bucket.index())
        if known is not None and known[0] == key:
            return known[1]
        buffer = bucket.buffer()  # DDP rearranges its buckets after the first iteration
        flat = torch.zeros_like(buffer)
        start = buffer.storage_offset()
        views = {
            parameter: flat.as_strided(gradient.size(), gradient.stride(), gradient.storage_offset() - start)
            for parameter, gradient in zip(parameters, bucket.gradients(), strict=True)
        }
        self._fill(views)
        self._factors.update(views)
        self._flat[bucket.index()] = (key, flat)
        return flat

    def _step(self) -> int:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter)
                if state:
                    return int(state["step"])
        return 0

    def _fill(self, wanted: Mapping[Tensor, Tensor]) -> None:
        """Write the factors of some parameters; 0 for those that the optimizer has never moved."""
        with torch.no_grad():
            for group in self._optimizer.param_groups:
                beta, eps = float(group["betas"][1]), float(group["eps"])
                name = "max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"
                moved = [p for p in group["params"] if p in wanted and self._optimizer.state.get(p)]
                if moved:
                    states = [self._optimizer.state[p] for p in moved]
                    steps = torch.stack([torch.as_tensor(state["step"]).float() for state in states]).tolist()
                    roots = [sqrt(1.0 - beta**step) for step in steps]
                    _factors([wanted[p] for p in moved], [state[name] for state in states], roots, eps)
            for parameter, factor in wanted.items():
                if not self._optimizer.state.get(parameter):
                    factor.zero_()


def _factors(out: list[Tensor], moments: list[Tensor], roots: list[float], eps: float) -> None:
    """Write 1 / (sqrt(moment) / root + eps), 0 where a moment is 0."""
    out, moments = [local(factor) for factor in out], [local(moment) for moment in moments]
    if in_pieces(moments[0]):
        for factor, moment, root in zip(out, moments, roots, strict=True):
            alike = factor.is_contiguous() and moment.is_contiguous()
            target = factor if alike else torch.empty_like(moment, memory_format=torch.contiguous_format)
            for f, m in pieces(target, moment.contiguous()):
                torch.sqrt(m, out=f).div_(root).add_(eps).reciprocal_().mul_(m != 0)
            if not alike:
                factor.copy_(target)
        return
    found = torch._foreach_sqrt(moments)
    torch._foreach_div_(found, roots)
    torch._foreach_add_(found, eps)
    torch._foreach_reciprocal_(found)
    torch._foreach_mul_(found, [(moment != 0).to(moment.dtype) for moment in moments])
    torch._foreach_copy_(out, found)


def _kept(made_at: int) -> int:
    return 0 if made_at < 0 else max(1, min(made_at // WINDOW_SHARE, MOST_STEPS_KEPT))


_SECOND = ("exp_avg_sq", "max_exp_avg_sq")


def rescale_moments(
    optimizer: torch.optim.Optimizer, statistics: GradientStatistics, before: float, after: float
) -> float:
    """Bring Adam's second moments to the level of gradients over another batch.

    ``before`` and ``after`` are batches over the initial one; ``statistics`` are the gradient's at the initial one.
    The mean square of a batch's gradient is ``sqr + var / scale`` in their units, which for Adam are those of
    pre-conditioned gradients, so its ratio is that of the second moments. First moments do not depend on the batch.
    Other optimizers are left alone; returns the ratio, 1 where nothing was done.
    """
    if not AdamPreconditioner.serves(optimizer) or before == after:
        return 1.0
    sqr, var = statistics
    ratio = (sqr + var / after) / (sqr + var / before)
    for state in optimizer.state.values():
        for name in _SECOND:
            if name in state:
                state[name].mul_(ratio)
    return float(ratio)
