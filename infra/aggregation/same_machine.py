"""How gradients and parameters pass between a worker and an aggregator of the same machine without being sent.

Each side keeps what it has to say in memory that the other reads (``infra.machine.memory_segments``), and the
encrypted connection carries only where it is: a worker's gradient, of which an aggregator's sum is made, and an
aggregator's parameters, two rounds of each tensor by turns. A round's parameters are written over when those of the
round after the next are made, which waits for a gradient of the next from each worker that counts; and a gradient
when its worker begins another view or round, in which no sum of the old one counts any more.

A worker tells an aggregator on a loopback address, with what it asks for, of a segment of its own. An aggregator that
can read it answers by its own, and is sent gradients so from then on; all others are sent everything.

A tensor that moves to an aggregator on a loopback address is copied through a segment of its own, and sent where that
cannot be read.
"""

import ipaddress
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ebbflow.infra.aggregation.frames import MAX_PAYLOAD, AggregatorAddress, Buffer, Kind, TensorFrame
from ebbflow.infra.errors import AggregationError, InfraError
from ebbflow.infra.machine.memory_segments import (
    MemoryArena,
    MemorySegment,
    MemorySlot,
    SegmentName,
    open_segment,
)

LEAST = 1 << 14  # bytes of a tensor below which it is sent
_OPEN = 128  # segments of others that are open at most, in an aggregator for each training
_BYTES = 1 << 38  # that they have together at most
_UNUSED = 60.0  # seconds after which a segment is not kept open any more


def may_be_near(where: AggregatorAddress) -> bool:
    """Tell whether an aggregator may be on this machine: it listens on a loopback address."""
    host = where.address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def share_copy(parts: Iterable[Buffer]) -> MemorySegment:
    """Return a segment with a tensor's copy; it is there until it is dropped. Raises ``InfraError``."""
    values = [np.frombuffer(one, np.uint8) for one in parts]
    segment, at = MemorySegment(sum(len(one) for one in values)), 0
    into = np.frombuffer(segment.view, np.uint8)
    for one in values:
        np.copyto(into[at : at + len(one)], one)
        at += len(one)
    return segment


def shared_copy(frame: TensorFrame) -> TensorFrame:
    """Return the copy of a tensor with what it names. Raises ``InfraError`` where that cannot be read."""
    if "memory" not in frame.options:
        return frame
    name = SegmentName.of(frame.options["memory"])
    if name.size > MAX_PAYLOAD:
        raise InfraError(f"a tensor's copy must have at most {MAX_PAYLOAD} bytes, and has {name.size}")
    return replace(frame, payload=open_segment(name))


class SegmentViews:
    """Segments of other processes that were used of late. For one thread.

    Memory of a process that has ended goes when others are used a minute or two later.
    """

    def __init__(self) -> None:
        self._views: dict[SegmentName, memoryview] = {}
        self._used: dict[SegmentName, float] = {}
        self._swept = time.monotonic()

    def open(self, values: Any) -> memoryview:
        """Return a segment. Raises ``InfraError`` where it cannot be read, or is one too many."""
        name, now = SegmentName.of(values), time.monotonic()
        new = name not in self._views
        if new or now - self._swept > _UNUSED:
            self._swept = now
            for old in [one for one, used in self._used.items() if now - used > _UNUSED and one != name]:
                del self._views[old], self._used[old]
        if new:
            size = sum(one.size for one in self._views) + name.size
            if len(self._views) >= _OPEN or size > _BYTES:
                raise InfraError(
                    f"at most {_OPEN} segments of memory with {_BYTES} bytes together must be in use at once,"
                    f" and this is number {len(self._views) + 1} and would make it {size} bytes"
                )
            self._views[name] = open_segment(name)
        self._used[name] = now
        return self._views[name]

    def payload(self, options: Mapping[str, Any]) -> memoryview:
        """Return the bytes that a frame's options name. Raises ``InfraError`` where there are none."""
        view, at = self.open(options.get("memory")), options.get("at")
        if (
            not isinstance(at, list)
            or len(at) != 2
            or any(isinstance(one, bool) or not isinstance(one, int) or one < 0 for one in at)
            or at[0] + at[1] > len(view)
            or at[1] > MAX_PAYLOAD
        ):
            raise InfraError("a part of a segment must have an offset and a size within it")
        return view[at[0] : at[0] + at[1]]


class WorkerMemory:
    """A worker's side. Used by one thread at once.

    Args:
        wanted: whether to use it.
    """

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted
        self._arena = MemoryArena()
        self._views = SegmentViews()
        self._slots: dict[str, MemorySlot] = {}  # of gradients, by tensor
        self._near: dict[
            str, bool
        ] = {}  # aggregators that may be on this machine: whether they have shown it

    def meet(self, aggregator: str, where: AggregatorAddress) -> None:
        """Take note of an aggregator that is connected to."""
        if self._wanted and may_be_near(where):
            self._near[aggregator] = False

    def refuse(self, aggregator: str) -> bool:
        """Send an aggregator everything from now on; return whether that is new."""
        return self._near.pop(aggregator, None) is not None

    def keep(self, tensor: str, data: Buffer, aggregators: Iterable[str]) -> tuple[Buffer, dict[str, Any]]:
        """Return a gradient, and what names a copy that one of these aggregators can read; nothing where none can.

        To the others it is sent itself, by reference: the copy is written over while it may still be on its way.
        """
        size = len(data)
        if size < LEAST or not any(self._near.get(name) for name in aggregators):
            return data, {}
        slot = self._slots.get(tensor)
        if slot is None or len(slot.view) != size:
            try:
                slot = self._slots[tensor] = self._arena.take(size)
            except InfraError:
                self._near.clear()
                return data, {}
        np.copyto(np.frombuffer(slot.view, np.uint8), np.frombuffer(data, np.uint8))
        segment, at = slot.name
        return data, {"memory": segment, "at": at}

    def outgoing(self, aggregator: str, frames: Iterable[TensorFrame]) -> list[TensorFrame]:
        """Return frames as an aggregator is sent them."""
        near = self._near.get(aggregator)
        return [self._outgoing(near, one) for one in frames]

    def _outgoing(self, near: bool | None, frame: TensorFrame) -> TensorFrame:
        if frame.kind is Kind.PUSH and frame.options:
            return replace(frame, payload=b"") if near else replace(frame, options={})
        if (frame.kind is Kind.PULL and near is not None) or (frame.kind is Kind.COMMIT and near is False):
            try:
                return replace(frame, options={**frame.options, "memory": list(self._arena.name)})
            except InfraError:
                self._near.clear()
        return frame

    def incoming(self, aggregator: str, frame: TensorFrame) -> TensorFrame | None:
        """Return an answer with what it names; ``None`` where that cannot be read.

        What the aggregator has not answered is then to be asked for again, after ``refuse``.
        """
        if frame.kind not in (Kind.PARAMETERS, Kind.COMMITTED) or "memory" not in frame.options:
            return frame
        if frame.kind is Kind.COMMITTED:
            if aggregator in self._near:
                self._near[aggregator] = True
            return frame
        try:
            payload = self._views.payload(frame.options)
        except InfraError:
            return None
        if aggregator in self._near:
            self._near[aggregator] = True
        return replace(frame, payload=payload)


class AggregatorMemory:
    """An aggregator's side, in the thread of its front."""

    def __init__(self) -> None:
        self._views: dict[str, SegmentViews] = {}  # by training, for none is to use up what others need
        self._arenas: dict[str, MemoryArena] = {}  # the same, for none is to read another's

    def reads(self, job_id: str, options: Mapping[str, Any]) -> bool:
        """Tell whether the memory of a training's worker can be read that it tells of with what it asks for."""
        if "memory" not in options:
            return False
        try:
            self._of(job_id).open(options["memory"])
        except InfraError:
            return False
        return True

    def gradient(self, job_id: str, frame: TensorFrame) -> TensorFrame:
        """Return a training's push with what it names. Raises ``AggregationError`` where that cannot be read."""
        if "at" not in frame.options:
            return frame
        try:
            return replace(frame, payload=self._of(job_id).payload(frame.options), options={})
        except InfraError as exc:
            raise AggregationError(str(exc)) from exc

    def slots(self, job_id: str, size: int) -> tuple[MemorySlot, ...]:
        """Return two slots for a tensor's parameters; none where they are small or there is no such memory."""
        if size < LEAST:
            return ()
        arena = self._arenas.setdefault(job_id, MemoryArena())
        try:
            return arena.take(size), arena.take(size)
        except InfraError:
            return ()

    def remove(self, job_id: str) -> None:
        """Forget a training, and what its workers have shared."""
        self._arenas.pop(job_id, None)
        self._views.pop(job_id, None)

    def _of(self, job_id: str) -> SegmentViews:
        return self._views.setdefault(job_id, SegmentViews())
