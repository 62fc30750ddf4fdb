"""How a worker, or another aggregator, connects to an aggregator.

``WorkerLinks``: all connections of a worker; ``PeerLinks``: those over which an aggregator gives others tensors.
"""

import collections
import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from zmq import constants
from zmq.error import Again
from zmq.sugar.context import Context
from zmq.sugar.poll import Poller
from zmq.sugar.socket import Socket

from ebbflow.infra.aggregation.frames import (
    MAX_PAYLOAD,
    AggregatorAddress,
    Buffer,
    TensorFrame,
    decode,
    encode,
)
from ebbflow.infra.aggregation.same_machine import WorkerMemory
from ebbflow.infra.errors import AggregationError
from ebbflow.infra.machine.encrypted_router import CurveKeys
from ebbflow.infra.machine.message_context import close_context, open_context

log = logging.getLogger(__name__)

_HEARTBEAT = 2000  # milliseconds between ZeroMQ's own heartbeats, so that a cut link is noticed
_FULL = 1 << 20  # bytes of frames that are sent together
_MOST = 1024  # frames of a message
_RECONNECT = 50, 1000  # milliseconds before the first attempt, and at most
_STOP_TIMEOUT = 10.0  # seconds for the thread to end


def connect(context: "Context[Socket[bytes]]", keys: CurveKeys, where: AggregatorAddress) -> "Socket[bytes]":
    """Return a socket that connects to an aggregator, and again whenever the connection ends.

    Args:
        context: that the socket belongs to.
        keys: by which the caller proves itself.
        where: the aggregator listens.
    """
    one = context.socket(constants.DEALER)
    one.curve_serverkey = bytes.fromhex(where.public)
    one.curve_publickey = bytes.fromhex(keys.public)
    one.curve_secretkey = bytes.fromhex(keys.secret)
    one.linger = 0
    one.maxmsgsize = MAX_PAYLOAD
    one.reconnect_ivl, one.reconnect_ivl_max = _RECONNECT
    one.heartbeat_ivl = _HEARTBEAT
    one.connect(f"tcp://{where.address}")
    return one


Watch = Callable[[bool], None]
"""Called while answers are waited for, with whether they depend on other workers; ends the wait by raising."""
Offer = Callable[[str], tuple[Buffer, Mapping[str, Any], int]]
"""Returns float32 parameters of a tensor as they are here, its options as in ``init``, and the round that begins."""


@dataclass(slots=True)
class ExpectedAnswer:
    """An answer that is due, and what is sent again until it has come."""

    frames: tuple[TensorFrame, ...]
    round: int
    view: int
    sent: float = 0.0
    answer: TensorFrame | None = None


class WorkerLinks:
    """A worker's connections to aggregators, and the frames that are sent over them together. For one thread at once.

    Args:
        keys: by which the worker proves itself.
        wait_s: seconds that a full connection is waited for; what it does not take then is dropped.
        memory: through which gradients and parameters pass where an aggregator is on the same machine.
    """

    def __init__(self, keys: CurveKeys, wait_s: float, memory: WorkerMemory) -> None:
        self._keys, self._wait, self._memory = keys, wait_s, memory
        self._context = open_context()
        self._poller = Poller()
        self.sockets: dict[str, Socket[bytes]] = {}
        self.where: dict[str, AggregatorAddress] = {}
        self._names: dict[Socket[bytes], str] = {}
        self._outbox: dict[str, list[TensorFrame]] = {}
        self._bytes: dict[str, int] = {}

    def connect(self, name: str, where: AggregatorAddress) -> None:
        """Connect to an aggregator."""
        one = connect(self._context, self._keys, where)
        one.sndtimeo = max(round(self._wait * 1000), 1)
        self._poller.register(one, constants.POLLIN)
        self.sockets[name], self._names[one], self.where[name] = one, name, where
        self._memory.meet(name, where)

    def disconnect(self, name: str) -> None:
        """End a connection."""
        socket = self.sockets.pop(name)
        self._poller.unregister(socket)
        del self._names[socket]
        self._memory.refuse(name)
        socket.close(linger=0)
        self._outbox.pop(name, None)

    def queue(self, name: str, frames: Iterable[TensorFrame]) -> None:
        """Send frames with others, or by ``flush``."""
        box, added = self._outbox.setdefault(name, []), list(frames)
        box += added
        self._bytes[name] = self._bytes.get(name, 0) + sum(len(one.payload) for one in added)
        if self._bytes[name] >= _FULL or len(box) >= _MOST:
            self._send(name)

    def flush(self) -> None:
        """Send what is queued."""
        for name in list(self._outbox):
            self._send(name)

    def forget(self) -> None:
        """Do not send what is queued."""
        self._outbox, self._bytes = {}, {}

    def received(self, timeout: float) -> Iterator[tuple[str, TensorFrame]]:
        """Yield what has arrived, after ``timeout`` seconds at most. Raises ``AggregationError`` for a bad frame."""
        for ready, _ in self._poller.poll(timeout * 1000):
            parts = ready.recv_multipart(copy=False)
            for frame in decode([memoryview(one.buffer) for one in parts]):
                yield self._names[ready], frame

    def close(self) -> None:
        """End all connections. May be called twice."""
        close_context(self._context)

    def _send(self, name: str) -> None:
        frames, self._outbox[name] = self._outbox.get(name, []), []
        self._bytes.pop(name, None)
        if frames:
            parts = encode(self._memory.outgoing(name, frames))
            with contextlib.suppress(Again):  # it takes no more now; what is missing is sent again
                self.sockets[name].send_multipart(parts, copy=False)


Hear = Callable[[str, TensorFrame], None]  # who, and what it answers; called in the thread


class PeerLinks:
    """Connects to aggregators when they are named first.

    Args:
        hear: takes their answers.
    """

    def __init__(self, hear: Hear) -> None:
        self._hear, self._keys = hear, CurveKeys.make()
        self.public = self._keys.public
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._context = open_context()
        self._poller = Poller()
        self._poller.register(self._woken.fileno(), constants.POLLIN)
        self._sockets: dict[str, tuple[AggregatorAddress, Socket[bytes]]] = {}
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="ebbflow-migration", daemon=True)
        self._thread.start()

    def send(self, name: str, where: AggregatorAddress, make: Callable[[], TensorFrame]) -> None:
        """Send a frame, which is made in the thread; it is lost where the connection takes no more."""
        self._call(lambda: self._send(name, where, make))

    def close(self) -> None:
        """End the connections and the thread. May be called twice."""
        if not self._ended:
            self._ended = True
            self._call(lambda: None)
            self._thread.join(_STOP_TIMEOUT)

    # --- in the thread ------------------------------------------------------------------------------------

    def _call(self, act: Callable[[], None]) -> None:
        self._calls.append(act)
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b".")

    def _run(self) -> None:
        try:
            while not self._ended:
                ready = dict(self._poller.poll())
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
                while self._calls:
                    try:
                        self._calls.popleft()()
                    except AggregationError:
                        log.exception("a tensor could not be sent to another aggregator")
                for name, (_, one) in list(self._sockets.items()):
                    if one in ready:
                        self._take(name, one)
        finally:
            close_context(self._context)
            self._waker.close()
            self._woken.close()

    def _take(self, name: str, one: "Socket[bytes]") -> None:
        with contextlib.suppress(Again):
            while True:
                parts = one.recv_multipart(constants.NOBLOCK, copy=False)
                try:
                    for frame in decode([memoryview(part.buffer) for part in parts]):
                        self._hear(name, frame)
                except AggregationError as exc:
                    log.warning("an answer of aggregator %s is ignored: %s", name, exc)

    def _send(self, name: str, where: AggregatorAddress, make: Callable[[], TensorFrame]) -> None:
        known = self._sockets.get(name)
        if known is not None and known[0] != where:  # another process has its name
            self._poller.unregister(known[1])
            known[1].close(linger=0)
            known = None
        if known is None:
            known = self._sockets[name] = where, connect(self._context, self._keys, where)
            self._poller.register(known[1], constants.POLLIN)
        with contextlib.suppress(Again):
            known[1].send_multipart(encode([make()]), constants.NOBLOCK, copy=False)
