"""The state of a training, from the first process to those that join, over the process group.

What is no tensor travels as JSON (``process.agreeing``). Tensors travel as their bytes, many at a time, along a
chain: each that joins passes on what it receives. So the first sends once, and those that know the state nothing.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.prepared import PreparedTraining
from ebbflow.infra.training.process import agreeing
from ebbflow.infra.training.service.handover import packed

_TENSOR = "tensor"  # before a tensor's type and shape
_CHUNK = 32 << 20  # bytes that are sent at a time
_LARGE = 1 << 20  # bytes of a tensor that is sent by itself, from and to where it is
_UNDER_WAY = 4  # chunks that are sent at a time

State = dict[str, Any]


def check(value: Any) -> None:
    """Raise ``TrainingError`` for what cannot be handed over."""
    agreeing.to_text(_outline(value, []))


def exchange(
    prepared: PreparedTraining,
    asked: State,
    joining: Sequence[int],
    *,
    knows: bool,
    expect: Callable[[int], None] = lambda _: None,
) -> State | None:
    """Return the training's state as the group's first process has it; ``None`` where that has none, and to processes
    that know it. Collective.

    Args:
        prepared: the training; the parameters of one that is not known change here.
        asked: what the script asks of it.
        joining: ranks of the processes that do not know its state.
        knows: whether this process knows it.
        expect: called with the bytes of its tensors before they are sent: others may wait that long.

    Raises ``RuntimeError`` where a process is lost.
    """
    tensors: list[torch.Tensor] = []
    gives = dist.get_rank() == 0
    outline = _outline(state_of(prepared, asked), tensors) if gives and knows else None
    outline = agreeing.from_first(outline)
    if outline is None:
        return None
    sizes: list[int] = []
    _filled(outline, lambda kind, shape: sizes.append(_size(kind, shape)))
    expect(sum(sizes))
    if not (gives or dist.get_rank() in joining):
        return None
    if not gives:
        _prepare(outline, tensors, prepared.inner.state_dict())
    _pass_on(tensors, [0, *joining])
    if gives:
        return None
    found = iter(tensors)
    state: State = _filled(outline, lambda kind, shape: next(found))
    return state


def take(prepared: PreparedTraining, state: State) -> None:
    """Take over what ``exchange`` returned."""
    prepared.inner.load_state_dict(state["model"])
    with torch.no_grad():
        for name, buffer in prepared.inner.named_buffers():
            buffer.copy_(state["buffers"][name])
    for parameter, trained in zip(prepared.inner.parameters(), state["trained"], strict=True):
        parameter.requires_grad_(trained)
    prepared.optimizer.load_state_dict(state["optimizer"])
    prepared.load_run(state["run"])
    prepared.load_extra(state["extra"])
    prepared.meter.steps = int(state["meter"])


def state_of(prepared: PreparedTraining, asked: State) -> State:
    """Return all that a process that joins takes over."""
    return {
        "asked": packed(asked),
        "model": dict(prepared.inner.state_dict()),
        "trained": [one.requires_grad for one in prepared.inner.parameters()],
        "buffers": dict(prepared.inner.named_buffers()),
        "optimizer": prepared.optimizer.state_dict(),
        "run": prepared.run_state(),
        "extra": prepared.extra_state(),
        "meter": prepared.meter.steps,
    }


def _outline(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Return a value with its tensors described, which are put into ``tensors``."""
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return (_TENSOR, str(value.dtype).removeprefix("torch."), list(value.shape))
    if isinstance(value, dict):
        return {name: _outline(one, tensors) for name, one in value.items()}
    if isinstance(value, tuple | list):
        kind = tuple if isinstance(value, tuple) else list
        return kind(_outline(one, tensors) for one in value)
    return value


def _filled(outline: Any, tensor: Callable[[str, list[int]], torch.Tensor]) -> Any:
    """Return a value with tensors where ``_outline`` has described them."""
    if isinstance(outline, tuple) and len(outline) == 3 and outline[0] == _TENSOR:
        return tensor(str(outline[1]), list(outline[2]))
    if isinstance(outline, dict):
        return {name: _filled(one, tensor) for name, one in outline.items()}
    if isinstance(outline, tuple | list):
        return type(outline)(_filled(one, tensor) for one in outline)
    return outline


def _prepare(outline: State, tensors: list[torch.Tensor], own: State) -> None:
    """Put what is to be received into ``tensors``: where they can, the model's own, by name."""
    for part, said in outline.items():
        for name, one in (said if part == "model" else {"": said}).items():
            mine = own.get(name) if part == "model" else None
            _filled(one, partial(_noted, tensors, mine=mine))


def _type(kind: str) -> torch.dtype:
    dtype = getattr(torch, kind, None)
    if not isinstance(dtype, torch.dtype):
        raise TrainingError(f"another process sent a tensor of an unknown type: {kind[:40]!r}")
    return dtype


def _size(kind: str, shape: list[int]) -> int:
    return int(_type(kind).itemsize) * math.prod(shape)


def _noted(tensors: list[torch.Tensor], kind: str, shape: list[int], mine: Any) -> torch.Tensor:
    dtype = _type(kind)
    fits = isinstance(mine, torch.Tensor) and mine.dtype == dtype and list(mine.shape) == shape
    if fits and mine.device.type == "cpu" and mine.is_contiguous():
        tensors.append(mine.detach())
    else:
        tensors.append(torch.empty(shape, dtype=dtype))
    return tensors[-1]


def _pass_on(tensors: list[torch.Tensor], chain: list[int]) -> None:
    """Send the values of the first of ``chain`` into the tensors of the others, from each to the next."""
    place = chain.index(dist.get_rank())
    receives, sends = place > 0, place + 1 < len(chain)
    under_way: deque[tuple[dist.Work, torch.Tensor]] = deque()  # a buffer must outlive its sending
    for part in _parts([_bytes(one) for one in tensors]):
        alone = len(part) == 1
        if alone:
            sent = part[0]
        elif receives:
            sent = torch.empty(sum(one.numel() for one in part), dtype=torch.uint8)
        else:
            sent = torch.cat(part)
        if receives:
            dist.recv(sent, group_src=chain[place - 1])
        if sends:
            under_way.append((dist.isend(sent, group_dst=chain[place + 1]), sent))
            if len(under_way) > _UNDER_WAY:
                under_way.popleft()[0].wait()
        if receives and not alone:
            for one, value in zip(part, sent.split([one.numel() for one in part]), strict=True):
                one.copy_(value)
    for work, _ in under_way:
        work.wait()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu").contiguous().reshape(-1).view(torch.uint8)


def _parts(flat: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield what is sent at a time: small ones together, pieces of large ones alone."""
    part: list[torch.Tensor] = []
    size = 0
    for one in flat:
        if one.numel() >= _LARGE:
            yield from ([piece] for piece in one.split(_CHUNK))
            continue
        if part and size + one.numel() > _CHUNK:
            yield part
            part, size = [], 0
        part.append(one)
        size += one.numel()
    if part:
        yield part
