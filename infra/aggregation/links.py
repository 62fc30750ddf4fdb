"""``PeerLinks``: an aggregator's connections to others, over which it gives them tensors, in a thread of its own."""

import collections
import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from zmq import constants
from zmq.error import Again
from zmq.sugar.context import Context
from zmq.sugar.poll import Poller
from zmq.sugar.socket import Socket

from ebbflow.infra.aggregation.connections import connect
from ebbflow.infra.aggregation.frames import AggregatorAddress, TensorFrame, decode, encode
from ebbflow.infra.errors import AggregationError
from ebbflow.infra.machine.encrypted_router import CurveKeys

_STOP_TIMEOUT = 10.0  # seconds for the thread to end

Hear = Callable[[str, TensorFrame], None]  # who, and what it answers; called in the thread

log = logging.getLogger(__name__)


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
        self._context = Context(io_threads=1)
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
            self._context.destroy(linger=0)
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
