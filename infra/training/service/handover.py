"""What a member tells those that join: the state of the run that is not on aggregators, as plain values."""

import base64
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from ebbflow.infra.aggregation.frames import AggregatorAddress
from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.prepared import PreparedTraining

_TENSOR = "tensor"  # before a tensor's values


def state_of(prepared: PreparedTraining, asked: dict[str, Any], number: int) -> dict[str, Any]:
    """Return what who joins needs.

    Args:
        prepared: the training.
        asked: what the script asks of it.
        number: of the round that begins.
    """
    service = prepared.service
    assert service is not None
    return {
        "table": service.agent.table,
        "spares": service.agent.spares,
        "aggregators": {name: asdict(where) for name, where in service.agent.addresses.items()},
        "asked": packed(asked),
        "number": number,
        "run": packed(prepared.run_state()),
        "extra": packed(prepared.extra_state()),
        "groups": packed(prepared.optimizer.state_dict()["param_groups"]),
        "buffers": packed(dict(prepared.inner.named_buffers())),
        "meter": prepared.meter.steps,
    }


def aggregators_of(
    state: Mapping[str, Any],
) -> tuple[dict[str, AggregatorAddress], dict[str, list[str]], dict[str, list[str]]]:
    """Return where aggregators listen, and which of them each tensor has, and which have earlier copies, of what
    ``state_of`` gave."""
    where = {name: AggregatorAddress(**one) for name, one in state["aggregators"].items()}
    table, spares = ({name: list(hosts) for name, hosts in state[key].items()} for key in ("table", "spares"))
    return where, table, spares


def take_over(prepared: PreparedTraining, state: dict[str, Any]) -> None:
    """Take what ``state_of`` gave."""
    own = prepared.optimizer.state_dict()
    prepared.optimizer.load_state_dict({**own, "param_groups": unpacked(state["groups"])})
    prepared.load_run(unpacked(state["run"]))
    prepared.load_extra(unpacked(state["extra"]))
    prepared.meter.steps = int(state["meter"])
    take_buffers(prepared.inner, state["buffers"])


def take_buffers(model: torch.nn.Module, buffers: Any) -> None:
    """Set a model's buffers to what ``packed`` made of another one's."""
    found = unpacked(buffers)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(found[name])


def check_asked(asked: dict[str, Any], state: dict[str, Any]) -> None:
    """Raise ``TrainingError`` where a process that joins asks for something else than the others."""
    for name, value in unpacked(state["asked"]).items():
        if asked.get(name) != value:
            raise TrainingError(
                f"all processes must ask for the same: {name} is {value!r} in the training and {asked.get(name)!r}"
                " in the process that joins it"
            )


def packed(value: Any) -> Any:
    """Return values with their tensors as text. What cannot be exchanged is left to ``process.agreeing``."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
        data = base64.b64encode(flat.numpy().tobytes()).decode()
        return (_TENSOR, str(value.dtype).removeprefix("torch."), list(value.shape), data)
    return _mapped(value, packed)


def unpacked(value: Any) -> Any:
    """Return what was given to ``packed``. Raises ``TrainingError`` for a tensor of an unknown type."""
    if isinstance(value, tuple) and len(value) == 4 and value[0] == _TENSOR:
        _, kind, shape, data = value
        dtype = getattr(torch, str(kind), None)
        if not isinstance(dtype, torch.dtype):
            raise TrainingError(f"another process sent a tensor of an unknown type: {str(kind)[:40]!r}")
        raw = bytearray(base64.b64decode(data))
        return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).reshape(shape)
    return _mapped(value, unpacked)


def _mapped(value: Any, act: Callable[[Any], Any]) -> Any:
    """Return a container with ``act`` done to what it holds; anything else as it is."""
    if isinstance(value, dict):
        return {name: act(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(act(one) for one in value)
    return value
