"""Measures the noise of the gradient while a model trains (McCandlish et al. 2018, A.1; Pollux, OSDI 2021, 3.1).

Two or more gradients of one step over different examples tell it: those of the ranks, or those of the accumulation
passes of a single process. A single process without accumulation compares the steps of a pair, which is right as long
as the true gradient hardly moves between them.

Gradients come weighted. A pass over ``n`` of the ``N`` examples of a step is back-propagated as its mean loss times
``n * world / N``, so that DDP's average over ranks is the exact mean over all examples, whatever the shares. With
``w`` the weight of a sample (a rank's is the sum over its passes) and ``h`` its gradient, ``h / w`` is the mean over
its examples. The sum of ``|h|**2 / w`` over samples, over the number of ranks, then has the expectation
``|g|**2 + c * tr / N`` for ``c`` samples, as if the shares were equal, and the formulas for equal shares apply.

Losses are also multiplied by ``GradientMeter.loss_factor``: with some back ends the average over ranks is a sum of
gradients whose losses were divided.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ebbflow.infra.communication.all_to_all import Submit
from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.gradients.comm_hook import RankSamples
from ebbflow.infra.training.gradients.pass_samples import PassSamples
from ebbflow.infra.training.gradients.preconditioner import AdamPreconditioner
from ebbflow.infra.training.gradients.squares import LocalNorms, Samples, SquareSums
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.speed.goodput import GradientStatistics
from ebbflow.planners.training.speed.noise_scale import SMOOTHING, Average, GradientNoise, from_samples

DENSE = 128  # steps of a process that are all measured
EVERY = 8  # later steps, of which one is: the noise changes slowly

MakeSamples = Callable[[SquareSums, AdamPreconditioner | None], Samples]


class GradientMeter:
    """Squared norms of gradients, step by step, and what they say about the gradient's noise.

    ``model`` may be a ``DistributedDataParallel``, whose communication hook is then ours; several processes need it.
    ``initial`` is M0, the total batch in examples that the learning rate was made for. ``preconditioned`` None means:
    where ``optimizer`` is Adam or AdamW. ``submit`` carries the gradients' buckets out, or DDP's own
    process group. ``samples`` makes what collects gradients where neither DDP nor a single process does, and
    ``refresh`` brings the optimizer's moments up to date before they are used, where they are kept elsewhere.
    ``lost`` takes the error of a reduction whose step will be repeated; it is raised without.

    After the first 128 steps of a process one in ``every`` is measured, and weighs as much as ``every``; whether a
    gradient is finite is known of each.

    A step is ``micro_pass`` around each backward pass, ``local``, an all-reduce that sums, and ``finish``. Whatever
    changes gradients, such as clipping or undoing a loss scale, comes after ``local``.

    Raises ``OptionError`` for ``initial`` or ``every`` < 1 and ``smoothing`` outside [0, 1), and ``TrainingError``
    where pre-conditioning is asked for and ``optimizer`` keeps no second moments.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        initial: int,
        preconditioned: bool | None = None,
        smoothing: float = SMOOTHING,
        every: int = EVERY,
        submit: Submit | None = None,
        samples: MakeSamples | None = None,
        refresh: Callable[[], None] | None = None,
        lost: Callable[[BaseException], None] | None = None,
    ) -> None:
        if initial < 1 or every < 1 or not 0 <= smoothing < 1:
            raise OptionError(
                f"a meter needs initial and every >= 1, 0 <= smoothing < 1; got {initial}, {every}, {smoothing}"
            )
        if preconditioned is None:
            preconditioned = AdamPreconditioner.serves(optimizer)
        elif preconditioned and not AdamPreconditioner.serves(optimizer):
            name = type(optimizer).__name__
            raise TrainingError(f"gradients can be pre-conditioned for Adam and AdamW only; got {name}")
        self._preconditioner = AdamPreconditioner(optimizer, refresh) if preconditioned else None
        self._sums, self._submit, self._lost = SquareSums(), submit, lost
        self._samples: Samples
        if samples is not None:
            self._samples = samples(self._sums, self._preconditioner)
        else:
            self._samples = self._collected(model)
        self._smoothing = smoothing
        self._every = every
        self.steps = 0  # finished by this process, or by the one that it has joined
        self._noise = GradientNoise(initial)
        self._conditioned = False  # whether the averages are of pre-conditioned gradients
        self._scale: float | None = None  # of the step under way
        self.finite = True  # whether the last step's gradient was, on all ranks
        self.sync_seconds = 0.0  # of the last step, mean over ranks

    def follow(self, model: torch.nn.Module) -> None:
        """Take gradients from ``model``, made anew around the same parameters, after this step."""
        self.discard()
        self._samples = self._collected(model)

    def _collected(self, model: torch.nn.Module) -> Samples:
        if isinstance(model, DistributedDataParallel) and model.process_group.size() > 1:
            return RankSamples(model, self._sums, self._preconditioner, self._submit, self._lost)
        trained = [p for p in model.parameters() if p.requires_grad]
        return PassSamples(trained, self._sums, self._preconditioner)

    @property
    def statistics(self) -> GradientStatistics:
        """Return the averages; before the first estimate, a gradient without noise."""
        return self._noise.statistics

    @property
    def noise_scale(self) -> float:
        """Return the gradient noise scale in examples."""
        return self.statistics.noise_scale(self._noise.initial)

    @property
    def loss_factor(self) -> float:
        """Return what each loss is multiplied by besides its weight and loss scale; norms are as without it."""
        return self._samples.loss_factor

    @contextmanager
    def micro_pass(self, *, last: bool, weight: float = 1.0, loss_scale: float = 1.0) -> Iterator[None]:
        """Measure the backward pass inside. ``last``: it ends the step, and DDP reduces in it.

        ``weight`` is what the mean loss was multiplied by (see above), 0 for a pass without examples; ``loss_scale``
        is what mixed precision multiplied it by besides, equal for all passes of a step.
        """
        if self._scale is None:
            measured = self._weight_of_step > 0
            if measured and self._preconditioner is not None:
                self._preconditioner.begin()
            self._samples.begin(measured)
        self._scale = loss_scale
        yield
        self._samples.after_pass(weight, last)

    def local(self, examples: float) -> LocalNorms:
        """Return this rank's share of the norms of a step over ``examples`` examples on all ranks together.

        Waits for a GPU. Raises ``TrainingError`` before the first pass, and where the last one did not synchronize.
        """
        if self._scale is None:
            raise TrainingError("a step has at least one micro_pass")
        scale, self._scale = self._scale, None
        return self._samples.norms(examples, scale)

    def finish(self, summed: Sequence[float], world: int, examples: float) -> GradientStatistics:
        """Take in a step and return the averages; ``summed`` are the sums of ``local`` over ``world`` ranks.

        Sets ``finite``. Where it is false, all ranks must skip the step; the averages have not changed.
        """
        local, samples, total, sync = summed
        self.sync_seconds = sync / world
        self.finite = isfinite(local) and isfinite(total)
        weight = self._weight_of_step
        self.steps += 1
        if not self.finite:
            self._samples.forget()
        if not self.finite or not weight:
            return self.statistics
        conditioned = self._preconditioner is not None and self._preconditioner.on
        if conditioned and not self._conditioned:
            self._noise, self._conditioned = GradientNoise(self._noise.initial), True
        # Adam's first steps are not pre-conditioned; where its moments were reset, averages that are continue without
        if samples >= 2 and conditioned == self._conditioned:
            count, pair = round(samples), self._samples.pair
            whole = pair or examples
            estimate = from_samples(local / world, total, count, whole / count)
            self._noise = self._noise.update(estimate, weight * whole, pair is not None, self._smoothing)
        return self.statistics

    @property
    def _weight_of_step(self) -> int:
        """Return how many steps the present one stands for; 0: its noise is not measured. Equal on all ranks."""
        if self.steps < DENSE:
            return 1
        # two in a row, since a single process compares a pair
        return self._every if self.steps // 2 % self._every == 0 else 0

    def discard(self) -> None:
        """Forget the passes of a step that will not be finished."""
        self._scale = None
        self._samples.forget()

    def state_dict(self) -> dict[str, Any]:
        """Return the averages: the same on all ranks, and good for any number of them."""
        noise = self._noise
        return {
            "initial": noise.initial,
            "sqr": [noise.sqr.biased, noise.sqr.weight],
            "var": [noise.var.biased, noise.var.weight],
            "differenced": noise.differenced,
            "conditioned": self._conditioned,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from averages of another process; those for another M0 or of other norms start from scratch."""
        self.discard()
        initial, wanted = self._noise.initial, self._preconditioner is not None
        if state["initial"] != initial or (state["conditioned"] and not wanted):
            self._noise, self._conditioned = GradientNoise(initial), False
            return
        self._noise = GradientNoise(
            initial, Average(*state["sqr"]), Average(*state["var"]), bool(state["differenced"])
        )
        self._conditioned = bool(state["conditioned"])
