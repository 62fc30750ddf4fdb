"""Update rules: SGD, momentum, Adam and AdamW on NumPy arrays, in the order of operations of PyTorch's optimizers.

Parameters and moments are float32, gradients are brought to float32 before they are summed. PyTorch fuses some
multiplications with additions where the processor can, and rounds once there; so after 200 steps parameters agree to
about 1e-6 of their size and not to the bit, except where no sum is rounded.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ebbflow.infra.errors import AggregationError
from ebbflow.planners.errors import OptionError

Floats = npt.NDArray[np.float32]
DType = Literal["float32", "float16", "bfloat16"]

_BLOCK = 1 << 15  # elements: what a block needs fits the second-level cache
_STORED: Mapping[str, str] = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}


def item_size(dtype: str) -> int:
    """Return the bytes of an element of a gradient.

    Raises ``AggregationError`` for a type that gradients do not have.
    """
    if dtype not in _STORED:
        raise AggregationError(f"dtype of a gradient must be one of {', '.join(_STORED)}, not {dtype!r}")
    return np.dtype(_STORED[dtype]).itemsize


def as_float32(data: bytes | bytearray | memoryview, dtype: str) -> Floats:
    """Return numbers that were sent, as float32.

    Args:
        data: little-endian elements, one after the other.
        dtype: of the elements.

    Returns:
        for float32 a view, which is read-only where ``data`` is.

    Raises ``AggregationError`` for an unknown type or a part of an element.
    """
    size = item_size(dtype)
    if len(data) % size:
        raise AggregationError(f"a gradient of {dtype} must have a multiple of {size} bytes, not {len(data)}")
    raw = np.frombuffer(data, _STORED[dtype])
    if dtype == "bfloat16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw.astype(np.float32, copy=False)


def as_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """Return the bits of float32 numbers as bfloat16, rounded to the nearest, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def gradient_sum(gradients: Sequence[Floats]) -> Floats:
    """Return the sum of workers' gradients, added in their order.

    Args:
        gradients: one of each worker, of one length; each weighs what its worker has multiplied its loss by.

    Raises ``AggregationError`` without gradients, and for different lengths.
    """
    if not gradients:
        raise AggregationError("a round must have at least one gradient")
    if len({one.shape for one in gradients}) != 1:
        raise AggregationError(
            f"gradients of a tensor must have one length, not {[len(g) for g in gradients]}"
        )
    if len(gradients) == 1:
        return gradients[0].copy()
    total = gradients[0] + gradients[1]
    for one in gradients[2:]:
        total += one
    return total


def squared_norm(values: Floats) -> float:
    """Return the sum of squares: of blocks in single precision, of all blocks in double."""
    blocks = (values[at : at + _BLOCK] for at in range(0, len(values), _BLOCK))
    return float(sum(float(np.dot(one, one)) for one in blocks))


@dataclass(slots=True)
class OptimizerState:
    """What a rule keeps of a tensor between steps: the number of steps, and moments of the tensor's length."""

    step: int = 0
    moments: dict[str, Floats] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all moments."""
        return sum(one.nbytes for one in list(self.moments.values()))  # an update in a thread may add some


class UpdateRule(Protocol):
    """How parameters follow from a gradient."""

    name: ClassVar[str]

    @property
    def moments(self) -> tuple[str, ...]:
        """Return the names of the arrays that it keeps for each tensor."""

    def update(
        self, parameters: Floats, gradient: Floats, state: OptimizerState, lr: float | None = None
    ) -> None:
        """Apply a gradient to parameters and state in place.

        Args:
            parameters: flat.
            gradient: of the same length; unchanged.
            state: of this tensor.
            lr: learning rate of this step; default: the rule's.

        Raises ``AggregationError`` for lengths that differ; nothing is changed then.
        """


def _number(rule: str, name: str, value: float, least: float, below: float | None = None) -> None:
    if not isfinite(value) or value < least or (below is not None and value >= below):
        upto = "" if below is None else f" and below {below}"
        raise OptionError(f"{name} of {rule} must be at least {least}{upto}, not {value}")


def _begin(rule: UpdateRule, parameters: Floats, gradient: Floats, state: OptimizerState) -> Iterator[slice]:
    """Check lengths, make what is missing of a state, count the step and return the blocks."""
    if parameters.ndim != 1 or parameters.dtype != np.float32:
        raise AggregationError(
            f"parameters must be flat float32, not {parameters.dtype} of {parameters.shape}"
        )
    for name, one in [("gradient", gradient), *state.moments.items()]:
        if one.shape != parameters.shape:
            raise AggregationError(
                f"{name} must have {len(parameters)} elements like its tensor, not {one.shape}"
            )
    for name in rule.moments:
        if name not in state.moments:
            state.moments[name] = np.zeros_like(parameters)
    state.step += 1
    return (slice(at, at + _BLOCK) for at in range(0, len(parameters), _BLOCK))


@dataclass(frozen=True, slots=True)
class Sgd:
    """Stochastic gradient descent, with momentum or without, as ``torch.optim.SGD``.

    Args:
        lr: learning rate.
        momentum: share of the last step's direction that is kept, from 0 to below 1.
        dampening: share of the gradient that momentum does not take in.
        nesterov: whether the gradient counts beside the momentum that it has changed.
        weight_decay: share of the parameters that is added to the gradient.

    Raises ``OptionError`` for a number outside its range, and for Nesterov's momentum without momentum or with
    dampening.
    """

    name: ClassVar[str] = "sgd"
    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _number(self.name, "lr", self.lr, 0)
        _number(self.name, "momentum", self.momentum, 0, 1)
        _number(self.name, "dampening", self.dampening, 0, 1)
        _number(self.name, "weight_decay", self.weight_decay, 0)
        if self.nesterov and (not self.momentum or self.dampening):
            raise OptionError("nesterov of sgd must come with momentum above 0 and dampening 0")

    @property
    def moments(self) -> tuple[str, ...]:
        return ("momentum",) if self.momentum else ()

    def update(
        self, parameters: Floats, gradient: Floats, state: OptimizerState, lr: float | None = None
    ) -> None:
        rate = np.float32(-(self.lr if lr is None else lr))
        for block in _begin(self, parameters, gradient, state):
            own, step = parameters[block], gradient[block]
            if self.weight_decay:
                step = step + np.float32(self.weight_decay) * own
            if self.momentum:
                kept = state.moments["momentum"][block]
                if state.step == 1:
                    kept[:] = step
                else:
                    kept *= np.float32(self.momentum)
                    kept += np.float32(1 - self.dampening) * step
                step = step + np.float32(self.momentum) * kept if self.nesterov else kept
            own += rate * step


@dataclass(frozen=True, slots=True)
class Adam:
    """Adam as ``torch.optim.Adam``; with ``decoupled`` as ``torch.optim.AdamW``.

    Source: Kingma, Ba, arXiv 1412.6980; decoupled decay: Loshchilov, Hutter, arXiv 1711.05101.

    Args:
        lr: learning rate.
        beta1: share of the mean of gradients that a step keeps, from 0 to below 1.
        beta2: the same of the mean of their squares.
        eps: added to the root of the latter.
        weight_decay: share of the parameters that is added to the gradient or, decoupled, taken from them times lr.
        decoupled: whether decay bypasses the moments.

    Raises ``OptionError`` for a number outside its range.
    """

    name: ClassVar[str] = "adam"
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            _number(self.name, name, getattr(self, name), 0)
        for name in ("beta1", "beta2"):
            _number(self.name, name, getattr(self, name), 0, 1)

    @property
    def moments(self) -> tuple[str, ...]:
        return ("mean", "square")

    def update(
        self, parameters: Floats, gradient: Floats, state: OptimizerState, lr: float | None = None
    ) -> None:
        rate = self.lr if lr is None else lr
        blocks = _begin(self, parameters, gradient, state)
        step_size = np.float32(-rate / (1 - self.beta1**state.step))
        root = np.float32(1 / (1 - self.beta2**state.step) ** 0.5)
        keep, take = np.float32(self.beta1), np.float32(1 - self.beta1)
        for block in blocks:
            own, step = parameters[block], gradient[block]
            if self.weight_decay and self.decoupled:
                own *= np.float32(1 - rate * self.weight_decay)
            elif self.weight_decay:
                step = step + np.float32(self.weight_decay) * own
            mean, square = state.moments["mean"][block], state.moments["square"][block]
            if take < 0.5:  # as torch.lerp, which begins at the nearer end
                mean += take * (step - mean)
            else:
                mean[:] = step - (step - mean) * keep
            square *= np.float32(self.beta2)
            square += np.float32(1 - self.beta2) * step * step
            divisor = np.sqrt(square)
            divisor *= root
            divisor += np.float32(self.eps)
            own += step_size * mean / divisor


_RULES: Mapping[str, type[Sgd] | type[Adam]] = {"sgd": Sgd, "adam": Adam}


def rule_values(rule: Sgd | Adam) -> dict[str, Any]:
    """Return a rule as plain values: its name and options."""
    return {"name": rule.name, **asdict(rule)}


def rule_from(values: Mapping[str, Any]) -> Sgd | Adam:
    """Return the rule of plain values.

    Args:
        values: as ``rule_values`` gives them; options may be missing. ``momentum`` and ``adamw`` are names, too: SGD
            with a momentum of 0.9 unless it is given, and Adam with decoupled decay, of 0.01 unless it is given.

    Raises ``OptionError`` for an unknown name or option, or one of another type.
    """
    given = dict(values)
    name = given.pop("name", None)
    if name == "momentum":
        name, given = "sgd", {"momentum": 0.9, **given}
    elif name == "adamw":
        name, given = "adam", {"weight_decay": 0.01, **given, "decoupled": True}
    if name not in _RULES:
        raise OptionError(f"name of an update rule must be one of sgd, momentum, adam, adamw, not {name!r}")
    kind = _RULES[name]
    options = asdict(kind())
    for key, value in given.items():
        if key not in options:
            raise OptionError(f"option of {name} must be one of {', '.join(options)}, not {key!r}")
        wanted = bool if isinstance(options[key], bool) else (int, float)
        if not isinstance(value, wanted) or (wanted is not bool and isinstance(value, bool)):
            raise OptionError(
                f"{key} of {name} must be {'true or false' if wanted is bool else 'a number'}, not {value!r}"
            )
    return kind(**given)
