"""How a worker, or another aggregator, connects to an aggregator; ``WorkerLinks``: all connections of a worker."""

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from zmq import constants
from zmq.error import Again
from zmq.sugar.context import Context
from zmq.sugar.poll import Poller
from zmq.sugar.socket import Socket

from ebbflow.infra.aggregation.frames import MAX_PAYLOAD, AggregatorAddress, TensorFrame, decode, encode
from ebbflow.infra.machine.encrypted_router import CurveKeys

_HEARTBEAT = 2000  # milliseconds between ZeroMQ's own heartbeats, so that a cut link is noticed
_FULL = 1 << 20  # bytes of frames that are sent together
_MOST = 1024  # frames of a message
_RECONNECT = 50, 1000  # milliseconds before the first attempt, and at most


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
    """

    def __init__(self, keys: CurveKeys, wait_s: float) -> None:
        self._keys, self._wait = keys, wait_s
        self._context = Context(io_threads=1)
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

    def disconnect(self, name: str) -> None:
        """End a connection."""
        socket = self.sockets.pop(name)
        self._poller.unregister(socket)
        del self._names[socket]
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
        if not self._context.closed:
            self._context.destroy(linger=0)

    def _send(self, name: str) -> None:
        frames, self._outbox[name] = self._outbox.get(name, []), []
        self._bytes.pop(name, None)
        if frames:
            with contextlib.suppress(Again):  # it takes no more now; what is missing is sent again
                self.sockets[name].send_multipart(encode(frames), copy=False)
