"""Learning rates: scaled to the batch during a step, scheduled by progress and not by steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LRScheduler

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.speed.goodput import GradientStatistics, adascale, legw, linear, square_root

RuleName = Literal["auto", "adascale", "square-root", "linear", "legw", "none"]
# scale, statistics, progress -> factor on the learning rate
Rule = Callable[[float, GradientStatistics, float], float]
SchedulerFactory = Callable[[torch.optim.Optimizer], LRScheduler]
ScheduleUnit = Literal["iteration", "epoch"]
BaseRates = list[tuple[LRScheduler, dict[str, list[Any]]]]

_BASE_RATES = ("base_lrs", "max_lrs")  # attributes of schedulers, one rate a group

_RULES: dict[str, Rule] = {
    "adascale": lambda scale, statistics, _: adascale(scale, statistics),
    "square-root": lambda scale, _, __: square_root(scale),
    "linear": lambda scale, _, __: linear(scale),
    "none": lambda _, __, ___: 1.0,
}


def rule_for(name: str, optimizer: torch.optim.Optimizer, warm_up: float = 0.0) -> Rule:
    """Return the rule; ``"auto"`` is AdaScale for SGD and the square root for all that scale gradients by moments.

    ``warm_up`` is of LEGW, in iterations at the initial batch; the others leave it to the scheduler. Raises
    ``OptionError`` for an unknown name, and for a warm-up without LEGW or below 0.
    """
    if not 0 <= warm_up < inf:
        raise OptionError(f"warm_up must be >= 0 iterations and finite; got {warm_up}")
    if name == "legw":
        return lambda scale, _, progress: legw(scale, progress, warm_up)
    if warm_up:
        raise OptionError(
            f'warm_up belongs to learning_rate_rule="legw"; for {name!r} let the scheduler warm up'
        )
    if name == "auto":
        name = "adascale" if isinstance(optimizer, torch.optim.SGD) else "square-root"
    if name not in _RULES:
        raise OptionError(f"learning_rate_rule must be auto, {', '.join(_RULES)} or legw; got {name!r}")
    return _RULES[name]


@contextmanager
def scaled(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Multiply all learning rates by ``factor`` within; schedulers and checkpoints never see it."""
    rates = [group["lr"] for group in optimizer.param_groups]
    if factor != 1.0:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


class ProgressSchedule:
    """A scheduler of torch that is moved on by progress: once an iteration at the initial batch, or once an epoch.

    Raises ``OptionError``.
    """

    def __init__(self, scheduler: LRScheduler, unit: ScheduleUnit = "iteration") -> None:
        if unit not in ("iteration", "epoch"):
            raise OptionError(f"scheduler_unit must be iteration or epoch; got {unit!r}")
        self.scheduler = scheduler
        self._unit = unit
        self._moved = 0

    def follow(self, gained: float, iterations: float) -> None:
        """Move on to ``gained`` iterations, ``iterations`` of which are an epoch."""
        wanted = int((gained if self._unit == "iteration" else gained / iterations) + 1e-6)
        while self._moved < wanted:
            self.scheduler.step()
            self._moved += 1

    def state_dict(self) -> dict[str, Any]:
        return {"moved": self._moved, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a state of ``state_dict``."""
        self._moved = state["moved"]
        self.scheduler.load_state_dict(state["scheduler"])

    def base_rates(self) -> BaseRates:
        """Return what learning rates are computed from, of each scheduler that this one consists of."""
        return [
            (one, {name: list(vars(one)[name]) for name in _BASE_RATES if name in vars(one)})
            for one in _parts(self.scheduler)
        ]

    def rebase(self, rates: BaseRates) -> None:
        """Continue from where it is with other ``base_rates``."""
        for one, own in rates:
            vars(one).update(own)
            one._last_lr = [group["lr"] for group in one.optimizer.param_groups]


def _parts(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """Yield a scheduler and all that ``SequentialLR`` and ``ChainedScheduler`` hold."""
    yield scheduler
    for one in getattr(scheduler, "_schedulers", ()):
        yield from _parts(one)


@contextmanager
def script_hyperparameters(
    optimizer: torch.optim.Optimizer, schedule: ProgressSchedule | None, *, keep: bool
) -> Iterator[None]:
    """Let an optimizer that loads a checkpoint within keep the hyperparameters that its script has made it with.

    The learning rate is as far in its schedule as the checkpoint's. Without ``keep`` all are the checkpoint's.
    """
    own = [{name: one for name, one in group.items() if name != "params"} for group in optimizer.param_groups]
    rates = [] if schedule is None else schedule.base_rates()
    yield
    if not keep:
        return
    for group, mine in zip(optimizer.param_groups, own, strict=True):
        base = group.get("initial_lr", group["lr"])
        along = group["lr"] / base if base else 1.0
        group.update(mine)
        group["lr"] = mine.get("initial_lr", mine["lr"]) * along
    if schedule is not None:
        schedule.rebase(rates)
