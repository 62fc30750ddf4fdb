"""A tensor's master copy on an aggregator: parameters, moments, the round's gradients, and what is done to them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

import numpy as np

from ebbflow.infra.aggregation.frames import MAX_PAYLOAD, Buffer, Kind, TensorFrame
from ebbflow.infra.aggregation.rules import (
    Adam,
    Floats,
    OptimizerState,
    Sgd,
    as_float32,
    gradient_sum,
    rule_from,
    rule_values,
    squared_norm,
)
from ebbflow.infra.aggregation.timing import HeldTensor, TensorTiming
from ebbflow.infra.errors import AggregationError
from ebbflow.infra.machine.memory_segments import MemorySlot
from ebbflow.planners.aggregation.migration import TensorHost
from ebbflow.planners.errors import OptionError

TRAINING = "training"  # whose push is a commit, which all workers have agreed on


@dataclass(slots=True)
class MasterCopy:
    """One tensor of a training. An update changes it in a thread of its own; nothing else does meanwhile.

    Args:
        job_id: of the training.
        name: of the tensor.
        host: which round it is in, and who waits for parameters.
        rule: by which it is updated.
        parameters: flat.
        state: of the rule.
        sent: parameters of the round, as they are sent; empty: not made yet.
        view: the newest in which a gradient of the round was pushed.
        gradients: of the round and the view, by place.
        total: their sum, once all are here.
        norm: its squared norm.
        asked: connections that pushed, and wait for it, with the frame to answer.
        busy: whether a sum or an update is under way.
        waiting: what has arrived meanwhile, with its connection.
        mirror: whether another aggregator answers pulls.
        spare: whether it is a copy of an earlier round, which its training renews from time to time.
        mirrored: bytes of payloads that it was sent as a mirror.
        age: rounds by which moments are older than parameters, until the next update.
        timing: of its last rounds.
        mover: connection of the aggregator that it comes from.
        source: name of that aggregator.
        expects: number of the migration by which it comes; 0: none.
        near: connections of workers that read parameters from this machine's memory.
        slots: where they find those of even and of odd rounds.
        shown: round of the parameters that were put there last.
        awaited: when all gradients of the round were here and its copy was not; 0: they were not.
    """

    job_id: str
    name: str
    host: TensorHost
    rule: Sgd | Adam
    parameters: Floats
    state: OptimizerState = field(default_factory=OptimizerState)
    sent: bytes = b""
    view: int = 0
    gradients: dict[int, Floats] = field(default_factory=dict)
    total: Floats | None = None
    norm: float = 0.0
    asked: dict[bytes, TensorFrame] = field(default_factory=dict)
    busy: bool = False
    waiting: list[tuple[bytes, TensorFrame]] = field(default_factory=list)
    mirror: bool = False
    spare: bool = False
    mirrored: int = 0
    age: int = 0
    timing: TensorTiming = field(default_factory=TensorTiming)
    mover: bytes = b""
    source: str = ""
    expects: int = 0
    near: set[bytes] = field(default_factory=set)
    slots: tuple[MemorySlot, ...] = ()
    shown: int = -1
    awaited: float = 0.0

    @classmethod
    def expected(cls, aggregator: str, job_id: str, name: str, migration: int) -> "MasterCopy":
        """Return an empty one, whose copy is on its way; what arrives for it waits."""
        host, nothing = TensorHost(aggregator), np.empty(0, np.float32)
        return cls(job_id, name, host, Sgd(), nothing, busy=True, expects=migration)

    @classmethod
    def of(cls, aggregator: str, job_id: str, frame: TensorFrame) -> "MasterCopy":
        """Return the master copy that an ``INIT`` frame describes.

        Args:
            aggregator: its name.
            job_id: of the training.
            frame: parameters, followed by the moments that ``options`` names; ``round`` is the one they begin.

        Raises ``AggregationError`` for a frame that describes none.
        """
        rule, parameters, state = _contents(frame)
        if (size := parameters.nbytes * (1 + len(rule.moments))) > MAX_PAYLOAD:
            raise AggregationError(
                f"a tensor must have at most {MAX_PAYLOAD} bytes with its moments; {frame.tensor!r} has {size}"
            )
        host = TensorHost(aggregator, "serving", frozenset({TRAINING}), frame.round)
        made = cls(job_id, frame.tensor, host, rule, parameters, state)
        made.mirror = bool(frame.options.get("mirror", False))
        made.spare = bool(frame.options.get("spare", False))
        made.mirrored = len(frame.payload) if made.mirror else 0
        return made

    def renew(self, aggregator: str, frame: TensorFrame) -> None:
        """Take a newer copy in place of an earlier one, as a spare, or parameters to continue with where all others
        of the tensor are gone: these keep the moments that are here. What is not newer changes nothing.

        Args:
            aggregator: where it is.
            frame: as in ``of``.

        Raises ``AggregationError`` for a frame that describes none, or another tensor.
        """
        adopts = bool(frame.options.get("adopt", False))
        newer = frame.round > self.host.round
        if not newer and not (adopts and self.spare and frame.round == self.host.round):
            return
        if not adopts and not self.spare:
            return
        rule, parameters, state = _contents(frame)
        if len(parameters) != len(self.parameters):
            raise AggregationError(
                f"a copy of {frame.tensor!r} must have {len(self.parameters)} elements, not {len(parameters)}"
            )
        self.forget()
        self.mirrored += len(frame.payload) if self.mirror else 0
        if not adopts:
            self.state = state
        elif self.spare:
            self.age = frame.round - self.host.round
            self.spare = self.mirror = False
        self.rule, self.parameters, self.sent, self.shown, self.view = rule, parameters, b"", -1, 0
        self.host = TensorHost(aggregator, "serving", frozenset({TRAINING}), frame.round)

    def fill(self, frame: TensorFrame) -> None:
        """Take the copy of another aggregator. Raises ``AggregationError`` for a frame that has none."""
        self.rule, self.parameters, self.state = _contents(frame)
        self.sent, self.shown = b"", -1

    @property
    def encoded(self) -> bytes:
        """Return the parameters of the round, as they are sent."""
        if not self.sent:
            self.sent = self.parameters.tobytes()
        return self.sent

    def show(self, number: int) -> dict[str, Any]:
        """Return where workers of this machine find the parameters of a round, which are those that are here."""
        slot = self.slots[number % len(self.slots)]
        if self.shown != number:
            np.copyto(np.frombuffer(slot.view, np.float32), self.parameters)
            self.shown = number
        memory, at = slot.name
        return {"memory": memory, "at": at}

    def warm(self) -> None:
        """Write to the memory that workers of this machine will read: the first time it takes longer."""
        for slot in self.slots:
            np.copyto(np.frombuffer(slot.view, np.float32), self.parameters)

    def copied(self) -> tuple[list[Buffer], dict[str, Any]]:
        """Return parameters and moments, one after the other, and what describes them, as ``fill`` takes them."""
        names = list(self.state.moments)
        options = {"rule": rule_values(self.rule), "step": self.state.step, "moments": names}
        return [one.data for one in (self.parameters, *(self.state.moments[name] for name in names))], options

    @property
    def nbytes(self) -> int:
        """Return the bytes of parameters and moments."""
        return self.parameters.nbytes + self.state.nbytes

    @property
    def summary(self) -> HeldTensor:
        """Return what is told of it to others."""
        found = self.timing.profile
        return HeldTensor(
            self.nbytes,
            found.execution_us if found else 0,
            found.iteration_us if found else 0,
            self.host.status != "serving",
            self.mirror,
            self.spare,
            self.host.round,
            self.mirrored,
        )

    def push(self, connection: bytes, frame: TensorFrame) -> bool:
        """Take a gradient, and return whether all are here and have to be summed.

        Raises ``AggregationError`` for one of another length.
        """
        gradient = as_float32(frame.payload, frame.dtype)
        self.mirrored += len(frame.payload) if self.mirror else 0
        if len(gradient) != len(self.parameters):
            raise AggregationError(
                f"a gradient of {frame.tensor!r} must have {len(self.parameters)} elements, not {len(gradient)}"
            )
        if frame.round != self.host.round or frame.view < self.view:
            return False
        if frame.view > self.view:
            self.forget()
            self.view = frame.view
        self.asked[connection] = replace(frame, payload=b"")
        if self.total is not None:
            return False
        self.gradients.setdefault(frame.place, gradient)
        return len(self.gradients) == frame.places

    def sum(self) -> None:
        """Add the gradients up, in the order of places whatever that of arrival: the sum is the same each time."""
        self.total = gradient_sum([self.gradients[place] for place in sorted(self.gradients)])
        self.norm = squared_norm(self.total)
        self.gradients = {}

    def summed(self) -> list[tuple[bytes, TensorFrame]]:
        """Return the answers to those that have pushed."""
        options = {"norm": self.norm if isfinite(self.norm) else repr(self.norm)}
        answers = [
            (one, TensorFrame(Kind.SUMMED, self.name, frame.round, request=frame.request, options=options,
                              view=self.view))
            for one, frame in self.asked.items()
        ]  # fmt: skip
        self.asked = {}
        return answers

    def update(self, options: Mapping[str, Any]) -> None:
        """Carry out what all workers have agreed on.

        Args:
            options: ``lr``, or a whole ``rule``; ``scale`` of the sum; ``square``: factor on second moments before;
                or ``skip``.
        """
        total, self.total = self.total, None
        if total is not None and not options.get("skip"):
            self._apply(total, options)
        if self.slots:
            self.show(self.host.round + 1)

    def _apply(self, total: Floats, options: Mapping[str, Any]) -> None:
        if "rule" in options:
            self.rule = rule_from(options["rule"])
        if (factor := float(options.get("square", 1.0))) != 1.0 and "square" in self.state.moments:
            self.state.moments["square"] *= np.float32(factor)
        if (scale := float(options.get("scale", 1.0))) != 1.0:
            total *= np.float32(scale)
        self.sent = b""
        self.rule.update(self.parameters, total, self.state, options.get("lr"))

    def described(self, frame: TensorFrame) -> TensorFrame:
        """Return the answer to who asks for moments."""
        names = list(self.state.moments)
        options = {"step": self.state.step, "moments": names}
        payload = b"".join(one.tobytes() for one in self.state.moments.values())
        return TensorFrame(
            Kind.STATE, self.name, self.host.round, payload, request=frame.request, options=options
        )

    def forget(self) -> None:
        """Drop what was pushed in the round."""
        self.gradients, self.total, self.asked = {}, None, {}


def _contents(frame: TensorFrame) -> tuple[Sgd | Adam, Floats, OptimizerState]:
    """Return rule, parameters and state that a frame describes. Raises ``AggregationError``."""
    rule, step, names = _described(frame.options)
    values = as_float32(frame.payload, frame.dtype)
    size, rest = divmod(len(values), len(names) + 1)
    if rest or not size:
        raise AggregationError(
            f"{frame.tensor!r} with {len(names)} moments must have a multiple of {len(names) + 1} elements, above"
            f" 0, not {len(values)}"
        )
    parts = [values[i * size : (i + 1) * size].astype(np.float32, copy=True) for i in range(len(names) + 1)]
    return rule, parts[0], OptimizerState(step, dict(zip(names, parts[1:], strict=True)))


def _described(options: Mapping[str, Any]) -> tuple[Sgd | Adam, int, list[str]]:
    """Return rule, step and names of moments of an ``INIT`` frame. Raises ``AggregationError``."""
    rule, step, names = options.get("rule"), options.get("step", 0), options.get("moments", [])
    if not isinstance(rule, dict) or not isinstance(step, int) or not isinstance(names, list):
        raise AggregationError("a tensor must come with rule, step and moments")
    try:
        made = rule_from(rule)
    except OptionError as exc:
        raise AggregationError(str(exc)) from exc
    if names and sorted(names) != sorted(made.moments):
        raise AggregationError(f"moments of {made.name} must be {list(made.moments)} or none, not {names}")
    return made, step, names
