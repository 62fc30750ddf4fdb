"""``ServiceOptimizer``: an optimizer whose parameters are updated by aggregators.

Hooks push each gradient as the last backward pass of a step makes it, and parameters are waited for where the model
needs them. The script's own optimizer stays what schedulers move and checkpoints save: its learning rates go along
with each step, and its moments are fetched when they are needed.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from math import inf
from typing import Any

import numpy as np
import torch

from ebbflow.infra.aggregation.agent import AggregationAgent
from ebbflow.infra.aggregation.frames import Buffer, TensorFrame
from ebbflow.infra.aggregation.rules import Adam, Sgd, rule_values
from ebbflow.infra.training.process.world import ViewChangedError
from ebbflow.infra.training.service.world import ServiceWorld
from ebbflow.planners.aggregation.membership import View
from ebbflow.planners.errors import OptionError

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
_MOMENTS = {"momentum": "momentum_buffer", "mean": "exp_avg", "square": "exp_avg_sq"}  # as torch calls them
_CLIP_EPSILON = 1e-6  # as in torch.nn.utils.clip_grad_norm_

Ready = Callable[[str, torch.Tensor], None]
"""Told of each gradient that is pushed: name and values."""


def trained(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that an optimizer trains, by their names in the model.

    Raises ``OptionError`` for an optimizer or parameters that aggregators cannot take over.
    """
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = {name: p for name, p in model.named_parameters() if id(p) in given and p.requires_grad}
    if len(found) != len(given):
        raise OptionError("with sync='service' an optimizer must train parameters of the model alone")
    for name, parameter in found.items():
        if parameter.dtype not in _DTYPES:
            kinds = ", ".join(_DTYPES.values())
            raise OptionError(
                f"with sync='service' parameters must be of {kinds}; {name!r} is of {parameter.dtype}"
            )
    for group in optimizer.param_groups:
        rule_of(optimizer, group)
    return found


def rule_of(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Sgd | Adam:
    """Return the update rule of a parameter group.

    Raises ``OptionError`` for an optimizer that aggregators do not know, or an option of it.
    """
    kind = type(optimizer)
    known = kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)
    odd = next((name for name in ("amsgrad", "maximize", "differentiable") if group.get(name)), None)
    if not known or odd:
        raise OptionError(
            "with sync='service' the optimizer must be torch.optim.SGD, Adam or AdamW without amsgrad, maximize and"
            f" differentiable; got {kind.__name__}{f' with {odd}' if odd else ''}"
        )
    rate, decay = float(group["lr"]), float(group["weight_decay"])
    if kind is torch.optim.SGD:
        return Sgd(
            rate,
            float(group["momentum"]),
            float(group["dampening"]),
            bool(group["nesterov"]),
            decay,
        )
    beta1, beta2 = map(float, group["betas"])
    decoupled = kind is torch.optim.AdamW or bool(group.get("decoupled_weight_decay"))
    return Adam(rate, beta1, beta2, float(group["eps"]), decay, decoupled)


class ServiceOptimizer:
    """Trains a model's parameters on aggregators. ``pushing`` is set for the last pass of a step.

    Args:
        world: the training's processes.
        model: as it is called.
        optimizer: the script's.
        parameters: that it trains, by name.
        agent: connected to the aggregators that hold them.
    """

    def __init__(
        self,
        world: ServiceWorld,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        agent: AggregationAgent,
    ) -> None:
        self.world, self._optimizer, self._agent = world, optimizer, agent
        self._parameters = dict(parameters)
        self._groups = {id(p): at for at, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._rules = [rule_of(optimizer, group) for group in optimizer.param_groups]
        self._lock = threading.RLock()
        self._pending: set[str] = set()  # parameters that are on their way
        self._pushed: set[str] = set()
        self._square = 1.0  # on second moments, with the next step
        self.number = 0  # of the round that begins
        self.norm = 0.0  # of the last step's gradient
        self.pushing = False
        self.on_push: Ready = lambda name, gradient: None
        self.age = (
            0  # rounds by which moments of tensors of a lost aggregator were older, the most since ``told``
        )
        self.mirror_every = 1  # rounds; above 1 the first process brings spares up to date
        self._mirrored: int | None = None  # round that this process has brought spares to
        agent.offer = self._offered
        world.on_loss(self.without)
        for name, parameter in self._parameters.items():
            parameter.register_post_accumulate_grad_hook(self._hook(name))
        self._wait_in(model)
        model.register_state_dict_pre_hook(lambda *_: self.settle())

    @property
    def names(self) -> list[str]:
        """Return the names of the parameters, in the model's order."""
        return list(self._parameters)

    @property
    def agent(self) -> AggregationAgent:
        """Return this process's connections to the aggregators."""
        return self._agent

    def parameter(self, name: str) -> torch.nn.Parameter:
        """Return a parameter."""
        return self._parameters[name]

    # --- the beginning --------------------------------------------------------------------------------------

    def hand_over(self) -> None:
        """Give the aggregators parameters and moments as they are here."""
        self._agent.init(*self._described(self._parameters), self.number)
        self._mirrored = self.number

    def mirror(self) -> None:
        """Bring spares to the round that begins, where they are ``mirror_every`` rounds old or of an unknown age.

        One process of the training does this, after a step.
        """
        if self._mirrored is not None and self.number - self._mirrored < self.mirror_every:
            return
        names = list(self._agent.spares)
        if names:
            self.fetch_moments(names)
            kept = [name for name in names if name not in self._agent.adopted]
            self._agent.refresh(*self._described(kept), self.number)
        self._mirrored = self.number

    def _described(self, names: Iterable[str]) -> tuple[dict[str, Buffer], dict[str, dict[str, Any]]]:
        """Return parameters and moments as they are here, and what describes them."""
        data: dict[str, Buffer] = {}
        options: dict[str, dict[str, Any]] = {}
        for name in names:
            parameter = self._parameters[name]
            rule = self._rules[self._groups[id(parameter)]]
            state = self._optimizer.state.get(parameter, {})
            moments = [one for one in rule.moments if state.get(_MOMENTS[one]) is not None]
            parts = [parameter.detach(), *(state[_MOMENTS[one]] for one in moments)]
            flat = torch.cat([one.to("cpu", torch.float32).reshape(-1) for one in parts])
            step = int(state["step"]) if "step" in state else int(bool(moments))
            data[name] = memoryview(flat.numpy()).cast("B")
            options[name] = {"rule": rule_values(rule), "step": step, "moments": moments}
        return data, options

    def _offered(self, name: str) -> tuple[Buffer, dict[str, Any], int]:
        """Return a parameter as it is here; see ``infra.aggregation.agent.Offer``."""
        parameter = self._parameters[name]
        flat = parameter.detach().to("cpu", torch.float32).reshape(-1).clone()
        rule = self._rules[self._groups[id(parameter)]]
        return memoryview(flat.numpy()).cast("B"), {"rule": rule_values(rule), "step": 0}, self.number

    def pull(self) -> None:
        """Ask for the parameters of the round that begins."""
        with self._lock:
            self._pending = set(self._parameters)
            self._agent.pull(self._parameters, self.number)

    # --- a step ---------------------------------------------------------------------------------------------

    def squares(self) -> dict[str, float]:
        """Return the squared norm of each summed gradient, once all workers have pushed theirs.

        Raises ``ViewChangedError`` where one of them is lost before, and ``OptionError`` for a parameter that no
        gradient has reached.
        """
        if missing := self._parameters.keys() - self._pushed:
            raise OptionError(
                f"with sync='service' the loss must depend on every parameter; {min(missing)!r} got no gradient"
            )
        found = self._agent.norms(self._parameters)
        total = sum(found.values())
        self.norm = total**0.5 if total < inf else inf
        return found

    def sums(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return summed gradients, after ``squares``."""
        found = self._agent.sums(names, self.number, self.world.view.number)
        return {name: self._shaped(name, frame) for name, frame in found.items()}

    def step(self, view: int, clip: float | None) -> None:
        """Let aggregators update; learning rates are the optimizer's at this moment.

        Args:
            view: number of the view that has agreed on the step.
            clip: largest norm of the whole gradient; ``None``: any.
        """
        scale = min(1.0, clip / (self.norm + _CLIP_EPSILON)) if clip is not None else 1.0
        options = []
        for at, group in enumerate(self._optimizer.param_groups):
            values: dict[str, Any] = {"lr": float(group["lr"]), "scale": scale, "square": self._square}
            rule = rule_of(self._optimizer, group)
            if rule != self._rules[at]:
                self._rules[at] = rule
                values["rule"] = rule_values(rule)
            options.append(values)
        self._square = 1.0
        for parameter in self._parameters.values():
            if isinstance(self._rules[self._groups[id(parameter)]], Adam):
                state = self._optimizer.state[parameter]
                state["step"] = torch.tensor(float(state.get("step", 0.0)) + 1.0)
        self._commit({name: options[self._groups[id(p)]] for name, p in self._parameters.items()}, view)

    def skip(self, view: int) -> None:
        """Let aggregators drop a step whose gradient is not finite."""
        self._commit({name: {"skip": True} for name in self._parameters}, view)

    def scale_squares(self, ratio: float) -> None:
        """Multiply second moments by ``ratio`` before the next update."""
        self._square *= ratio

    def abandon(self) -> None:
        """Forget what was pushed of a step that is not finished."""
        self._pushed.clear()
        self._agent.abandon()

    # --- what is here ---------------------------------------------------------------------------------------

    def need(self, names: Iterable[str]) -> None:
        """Wait for parameters."""
        with self._lock:
            wanted = self._pending.intersection(names) if self._pending else set()
            if not wanted:
                return
            found = self._agent.parameters(wanted)
            with torch.no_grad():
                for name, frame in found.items():
                    self._take(name, frame)
                    self.age = max(self.age, int(frame.options.get("age", 0)))
            self._pending -= wanted

    def settle(self) -> None:
        """Wait for all parameters."""
        self.need(self._parameters)

    def fetch_moments(self, names: Iterable[str] | None = None) -> None:
        """Bring the optimizer's state to what aggregators have, of all parameters or those named."""
        with self._lock:
            self.settle()
            wanted = self._parameters if names is None else names
            for name, frame in self._agent.states(wanted, self.number).items():
                parameter, moments = self._parameters[name], frame.options["moments"]
                if not moments:
                    continue
                values = torch.frombuffer(bytearray(frame.payload), dtype=torch.float32)
                state = self._optimizer.state[parameter]
                for one, part in zip(moments, values.chunk(len(moments)), strict=True):
                    state[_MOMENTS[one]] = part.reshape(parameter.shape).to(parameter.device, parameter.dtype)
                if isinstance(self._rules[self._groups[id(parameter)]], Adam):
                    state["step"] = torch.tensor(float(frame.options["step"]))

    def without(self, view: View) -> None:
        """Do without the aggregators that a view has lost. Raises ``AggregationError`` where they had no mirrors.

        What continues on a spare is pulled before it is used again: all processes then have the same.
        """
        with self._lock:
            for name in view.lost:
                self._agent.drop(name)
            self._pending |= self._agent.adopted

    def watch(self, others: bool) -> None:
        """Look for a new view while an answer is waited for; see ``infra.aggregation.agent.Watch``.

        Raises ``ViewChangedError`` where the answer depends on workers of the old one.
        """
        if not self.world.changed:
            return
        if others:
            self.world.retry_in_new_view()
            raise ViewChangedError
        self.without(self.world.newest())

    def close(self) -> None:
        """End the connections."""
        self._agent.close()

    # --- how ------------------------------------------------------------------------------------------------

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def ready(parameter: torch.Tensor) -> None:
            if self.pushing and parameter.grad is not None:
                self._push(name, parameter.grad)

        return ready

    def _push(self, name: str, gradient: torch.Tensor) -> None:
        self.on_push(name, gradient)
        flat = gradient.detach().to("cpu").contiguous().view(-1)
        raw = flat.view(torch.int16) if flat.dtype == torch.bfloat16 else flat
        world = self.world
        self._agent.push(
            name, memoryview(raw.numpy()).cast("B"), self.number, world.view.number, world.rank, world.size,
            dtype=_DTYPES[gradient.dtype],
        )  # fmt: skip
        self._pushed.add(name)

    def _commit(self, options: dict[str, dict[str, Any]], view: int) -> None:
        with self._lock:
            self._pending -= self._agent.adopted  # its sum is gone, and ``commit`` takes what is here
            self.settle()
            self._agent.commit(options, self.number, view)
            self._pending = set(self._parameters)
            self._pushed.clear()
            self.number += 1
            # nobody can end the next round without this process, so the state stays what it is
            if self.mirror_every > 1 and self.world.rank == 0:
                self.mirror()

    def _take(self, name: str, frame: TensorFrame) -> None:
        """Take what a frame has as a parameter."""
        own = self._parameters[name].detach()
        if own.device.type == "cpu" and own.dtype is torch.float32 and own.is_contiguous():
            np.copyto(own.view(-1).numpy(), np.frombuffer(frame.payload, np.float32))  # not by a second copy
        else:
            own.copy_(self._shaped(name, frame))

    def _shaped(self, name: str, frame: TensorFrame) -> torch.Tensor:
        values = torch.frombuffer(bytearray(frame.payload), dtype=torch.float32)
        parameter = self._parameters[name]
        return values.view(parameter.shape).to(parameter.device)

    def _wait_in(self, module: torch.nn.Module) -> None:
        """Let a module wait for its parameters before it is called, a plain container for nothing.

        A module may use parameters of modules below without calling them, as attention does: so it waits for those,
        too.
        """
        if type(module) in _CONTAINERS:
            for child in module.children():
                self._wait_in(child)
            return
        own = {id(parameter) for parameter in module.parameters()}
        names = [name for name, parameter in self._parameters.items() if id(parameter) in own]
        if names:
            module.register_forward_pre_hook(lambda *_: self.need(names))
