"""``AggregatorFront``: the encrypted port of an aggregator, on which only admitted keys speak.

ZeroMQ ROUTER with CURVE. Who sends is told by the key that the connection has proven, never by a message: so a
training reaches its own tensors only. What breaks the form of messages ends that connection and no other.
"""

import collections
import contextlib
import errno
import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from zmq import constants
from zmq.error import Again, ZMQError
from zmq.sugar.context import Context
from zmq.sugar.poll import Poller

from ebbflow.infra.aggregation.frames import MAX_PAYLOAD, Buffer
from ebbflow.infra.errors import AggregationError

_DOMAIN = b"ebbflow-aggregation"
_HANDSHAKE = 10_000  # milliseconds for a handshake
_AT_ONCE = 200  # messages taken before other sockets are polled again
_CLOSING = 10.0  # seconds for the thread to end
_KEY_BYTES = 32

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServiceKeys:
    """A pair of CURVE keys, 64 hexadecimal digits each; the secret half shows in no text that is made of it."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def make(cls) -> "ServiceKeys":
        """Return a new pair."""
        from zmq.backend import curve_keypair
        from zmq.utils import z85

        public, secret = (z85.decode(half).hex() for half in curve_keypair())
        return cls(public, secret)


class Peer(NamedTuple):
    """Who holds an admitted key."""

    job_id: str
    worker: str


Receive = Callable[[Peer, bytes, list[memoryview]], None]  # who, connection, parts of the message


class AggregatorFront:
    """Listens from the start; all that arrives is handed to ``receive`` in the front's thread.

    Args:
        host: address of the interface to listen on.
        port: number; 0: any free one.
        receive: takes a message; an ``AggregationError`` ends the connection that it came from.
        max_payload: maximum bytes of a part of a message.

    Raises ``AggregationError`` when the port is not available.
    """

    def __init__(self, host: str, port: int, receive: Receive, *, max_payload: int = MAX_PAYLOAD) -> None:
        self._receive = receive
        self._keys = ServiceKeys.make()
        self.public = self._keys.public
        self.refused = 0  # messages that ended their connection
        self._peers: dict[str, Peer] = {}  # by public key
        self._ended_connections: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._ended = False
        self._context = Context(io_threads=1)
        self._poller = Poller()
        try:
            self._open(host, port, max_payload)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._thread = threading.Thread(target=self._run, name="ebbflow-aggregator", daemon=True)
        self._thread.start()

    def admit(self, peer: Peer, public: str) -> None:
        """Allow the holder of a key to speak as a worker of a training.

        Raises ``AggregationError`` for what is no key, or for one of another worker.
        """
        try:
            valid = len(bytes.fromhex(public)) == _KEY_BYTES
        except ValueError:
            valid = False
        if not valid:
            raise AggregationError("a key must be 64 hexadecimal digits")
        if self._peers.setdefault(public, peer) != peer:
            raise AggregationError(
                f"a key must be that of one worker, and this one is {self._peers[public]}'s"
            )

    def dismiss(self, peer: Peer) -> None:
        """Take nothing more from a worker."""
        for public in [key for key, one in list(self._peers.items()) if one == peer]:
            self._peers.pop(public, None)

    def call(self, act: Callable[[], None]) -> None:
        """Run ``act`` in the front's thread."""
        self._calls.append(act)
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b".")

    def close(self) -> None:
        """End all connections. May be called twice."""
        if not self._ended:
            self._ended = True
            self.call(lambda: None)
            self._thread.join(_CLOSING)

    def send(self, connection: bytes, parts: Sequence[Buffer]) -> bool:
        """Send a message from the front's thread, or tell that the connection is gone or takes no more now."""
        try:
            self._router.send_multipart([connection, *parts], constants.NOBLOCK, copy=False)
        except ZMQError as exc:
            if exc.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            return False
        return True

    def _open(self, host: str, port: int, max_payload: int) -> None:
        self._asked = self._context.socket(constants.REP)  # where ZeroMQ asks who may connect
        self._asked.bind("inproc://zeromq.zap.01")
        router = self._router = self._context.socket(constants.ROUTER)
        router.curve_server = True
        router.curve_secretkey = bytes.fromhex(self._keys.secret)
        router.curve_publickey = bytes.fromhex(self._keys.public)
        router.zap_domain = _DOMAIN
        router.router_mandatory = 1
        router.linger = 0
        router.maxmsgsize = max_payload
        router.handshake_ivl = _HANDSHAKE
        try:
            router.bind(f"tcp://{host}:{port or '*'}")
        except ZMQError as exc:
            raise AggregationError(
                f"an aggregator cannot listen on {host}:{port}: {exc.strerror or exc}"
            ) from exc
        self.port = int(router.last_endpoint.decode().rstrip("\0").rpartition(":")[2])
        self.address = f"{host}:{self.port}"
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        for one in (self._router, self._asked, self._woken.fileno()):
            self._poller.register(one, constants.POLLIN)

    def _run(self) -> None:
        try:
            while not self._ended:
                self._turn(dict(self._poller.poll()))
        except BaseException:  # agents notice that nothing answers
            log.exception("the front of the aggregator has failed")
            raise
        finally:
            self._ended = True
            self._router.close(linger=0)
            self._asked.close(linger=0)
            self._context.term()
            self._waker.close()
            self._woken.close()

    def _turn(self, ready: dict[Any, int]) -> None:
        if self._asked in ready:
            self._decide()
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        while self._calls:
            try:
                self._calls.popleft()()
            except Exception:
                log.exception("the aggregator could not complete an answer")
        left = _AT_ONCE
        while left and self._take():
            left -= 1

    def _decide(self) -> None:
        version, request, _, _, _, mechanism, *proofs = self._asked.recv_multipart()
        public = proofs[0].hex() if mechanism == b"CURVE" and len(proofs) == 1 else ""
        admitted = public in self._peers
        verdict = (b"200", b"", public.encode()) if admitted else (b"400", b"unknown key", b"")
        self._asked.send_multipart([version, request, *verdict, b""])

    def _take(self) -> bool:
        try:
            connection, *parts = self._router.recv_multipart(constants.NOBLOCK, copy=False)
        except Again:
            return False
        name = connection.bytes
        first = parts[0] if parts else connection
        peer = self._peers.get(_property(first, "User-Id"))
        if peer is None or name in self._ended_connections:
            return True
        try:
            self._receive(peer, name, [memoryview(one.buffer) for one in parts])
        except AggregationError as exc:
            self.refused += 1
            log.warning("a connection of %s of %s is ended: %s", peer.worker, peer.job_id, exc)
            self._end(name, int(_property(first, "__fd") or -1))
        except Exception:
            log.exception("a message of %s of %s could not be handled", peer.worker, peer.job_id)
            self._end(name, int(_property(first, "__fd") or -1))
        return True

    def _end(self, connection: bytes, descriptor: int) -> None:
        """Close a connection at both ends, and take nothing that it has sent before."""
        self._ended_connections[connection] = None
        while len(self._ended_connections) > 1024:
            self._ended_connections.popitem(last=False)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
            copy.shutdown(socket.SHUT_RDWR)


def _property(frame: Any, name: str) -> str:
    try:
        return str(frame.get(name))
    except ZMQError:  # the frame has none
        return ""
