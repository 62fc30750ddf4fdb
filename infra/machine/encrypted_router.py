"""``EncryptedRouter``: a port on which only the holders of admitted keys speak (ZeroMQ ROUTER with CURVE25519).

A peer that does not prove an admitted key gets no further than the handshake. Who has sent a message is told by the
key of its connection (ZeroMQ's ``User-Id``, set here when the key was proven), never by what the message says.
Everything runs in one thread.

Connection ids are chosen by ZeroMQ. A peer could try to be called like another one's lost connection and so get what
is sent there; it would have to guess 32 bits, and learn what it is told itself.
"""

import collections
import contextlib
import errno
import logging
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from zmq import constants
from zmq.error import Again, ZMQError
from zmq.sugar.poll import Poller

from ebbflow.infra.errors import InfraError
from ebbflow.infra.machine.message_context import close_context, open_context

_HANDSHAKE = 10_000  # milliseconds for a handshake: who connects and is silent does not stay
_AT_ONCE = 200  # messages taken before other sockets are polled again
_TURN = 250  # milliseconds between two turns at most
_STOOD = 0.5  # s between two turns after which the thread is taken to have stood still
_STOP_TIMEOUT = 10.0  # s for the thread to end

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """A pair of keys, 64 hexadecimal digits each. The secret half shows in no text that is made of it."""

    public: str
    secret: str = field(repr=False)

    @classmethod
    def make(cls) -> Self:
        """Return a new pair."""
        from zmq.backend import curve_keypair
        from zmq.utils import z85

        return cls(*(z85.decode(half).hex() for half in curve_keypair()))


class EncryptedRouter(ABC):
    """Listens from the start; what arrives is handled in the router's thread.

    Args:
        host: address of the interface to listen on.
        port: number; 0: any free one.
        domain: ZeroMQ's name for the port's decisions about keys.
        max_message: maximum bytes of a part of a message.
        owner: whose port it is, for people, such as "the launcher".
        failure: class of the error that is raised when the port is not available.
        pair: its keys; made by default.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        domain: bytes,
        max_message: int,
        owner: str,
        failure: type[InfraError],
        pair: CurveKeys | None = None,
    ) -> None:
        # Seconds for which peers could be heard: while the process or the thread stands still they do not go on.
        self.listened = 0.0
        self._pair = pair or CurveKeys.make()
        self.public = self._pair.public
        self._owner = owner
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._ended = False
        self._context = open_context()  # of its own: each binds the same name for decisions about keys
        self._poller = Poller()
        try:
            self._open(host, port, domain, max_message, failure)
        except BaseException:
            close_context(self._context)
            raise
        self._thread = threading.Thread(target=self._run, name="ebbflow-router", daemon=True)
        self._thread.start()

    # --- for every thread ---------------------------------------------------------------------------------

    def call(self, act: Callable[[], None]) -> None:
        """Schedule ``act`` in the router's thread."""
        self._calls.append(act)
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b".")

    def complete(self, act: Callable[[], None], timeout: float = _STOP_TIMEOUT) -> bool:
        """Do ``act`` in the router's thread and return whether it was done within ``timeout`` seconds."""
        done = threading.Event()

        def acted() -> None:
            try:
                act()
            finally:
                done.set()

        self.call(acted)
        return done.wait(timeout)

    def close(self) -> None:
        """End all connections. May be called twice."""
        if not self._ended:
            self._ended = True
            self.call(lambda: None)
            self._thread.join(_STOP_TIMEOUT)

    # --- for the router's thread --------------------------------------------------------------------------

    def send(self, connection: bytes, *parts: Any, copy: bool = True) -> bool:
        """Send a message, or tell that the connection is gone or takes no more now."""
        try:
            self._router.send_multipart([connection, *parts], constants.NOBLOCK, copy=copy)
        except ZMQError as exc:
            if exc.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            return False
        return True

    def end(self, connection: bytes, first: Any, last: Sequence[Any]) -> None:
        """Close a connection at both ends.

        Args:
            connection: which.
            first: a frame that came from it.
            last: parts of a message, at least one, that may still reach the peer.
        """
        try:
            self._router.send_multipart([connection, *last], constants.NOBLOCK)
        except ZMQError as exc:
            if exc.errno == errno.EHOSTUNREACH:  # the number of its socket may be another's by now
                return
        descriptor = int(frame_property(first, "__fd") or -1)
        with contextlib.suppress(OSError), _socket_of(descriptor) as copy:
            internet = copy.family in (socket.AF_INET, socket.AF_INET6)
            if internet and copy.getsockname()[1] == self.port:
                copy.shutdown(socket.SHUT_RDWR)

    # --- what those that derive from it decide ------------------------------------------------------------

    @abstractmethod
    def is_admitted(self, public: str) -> bool:
        """Return whether the holder of a key may connect; it has proven that it holds it."""

    @abstractmethod
    def on_message(self, connection: bytes, parts: Sequence[Any], first: Any) -> None:
        """Handle a message of a connection; ``first`` is a frame of it with the connection's properties."""

    def on_refused(self, public: str, address: str) -> None:  # noqa: B027 - few need it
        """Handle that a key was refused."""

    def on_open(self, router: Any) -> Sequence[Any]:
        """Set what more there is to set before the port is bound; return the sockets to poll besides."""
        return ()

    def on_polled(self, ready: Mapping[Any, int]) -> None:  # noqa: B027 - few need it
        """Handle what is ready, before messages are taken."""

    def on_taken(self, ready: Mapping[Any, int]) -> None:  # noqa: B027 - few need it
        """Handle what is ready, after all messages that were there are taken."""

    def on_turn_end(self) -> None:  # noqa: B027 - few need it
        """Send what the turn's messages and calls have left to send."""

    def on_close(self, router: Any) -> None:  # noqa: B027 - few need it
        """Close what ``on_open`` opened."""

    def guarded(self, act: Callable[[], None]) -> None:
        """Do ``act``; what it raises is logged and ends nothing."""
        try:
            act()
        except Exception:
            log.exception("the channel of %s could not complete the request", self._owner)

    # --- how ----------------------------------------------------------------------------------------------

    def _open(self, host: str, port: int, domain: bytes, max_message: int, failure: type[InfraError]) -> None:
        self._asked = self._context.socket(constants.REP)  # where ZeroMQ asks who may connect
        self._asked.bind("inproc://zeromq.zap.01")
        router = self._router = self._context.socket(constants.ROUTER)
        router.curve_server = True
        router.curve_secretkey = bytes.fromhex(self._pair.secret)
        router.curve_publickey = bytes.fromhex(self._pair.public)
        router.zap_domain = domain
        router.router_mandatory = 1
        router.linger = 0
        router.maxmsgsize = max_message
        router.handshake_ivl = _HANDSHAKE
        more = self.on_open(router)
        try:
            router.bind(f"tcp://{host}:{port or '*'}")
        except ZMQError as exc:
            why = exc.strerror or str(exc)
            raise failure(f"{self._owner} cannot listen on {host}:{port}: {why}; give another port") from exc
        self.port = int(router.last_endpoint.decode().rstrip("\0").rpartition(":")[2])
        self.address = f"{host}:{self.port}"
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        for one in (self._router, self._asked, *more, self._woken.fileno()):
            self._poller.register(one, constants.POLLIN)

    def _run(self) -> None:
        try:
            begun = time.monotonic()
            while not self._ended:
                ready = dict(self._poller.poll(_TURN))
                before, begun = begun, time.monotonic()
                self.listened += min(begun - before, _STOOD)
                self._turn(ready)
        except BaseException:  # peers notice the silence
            log.exception("the channel of %s has failed", self._owner)
            raise
        finally:
            self._ended = True
            self.on_close(self._router)
            close_context(self._context)
            self._waker.close()
            self._woken.close()

    def _turn(self, ready: Mapping[Any, int]) -> None:
        if self._asked in ready:
            self._decide()
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        while self._calls:
            self.guarded(self._calls.popleft())
        self.on_polled(ready)
        left = _AT_ONCE
        while left and self._take():
            left -= 1
        if left:
            self.on_taken(ready)
        self.on_turn_end()

    def _decide(self) -> None:
        version, request, _, address, _, mechanism, *proofs = self._asked.recv_multipart()
        public = proofs[0].hex() if mechanism == b"CURVE" and len(proofs) == 1 else ""
        admitted = self.is_admitted(public)
        if not admitted:
            self.on_refused(public, address.decode())
        verdict = (b"200", b"", public.encode()) if admitted else (b"400", b"unknown key", b"")
        self._asked.send_multipart([version, request, *verdict, b""])

    def _take(self) -> bool:
        """Take one message, and return whether there was one."""
        try:
            connection, *parts = self._router.recv_multipart(constants.NOBLOCK, copy=False)
        except Again:
            return False
        self.on_message(connection.bytes, parts, parts[0] if parts else connection)
        return True


def _socket_of(descriptor: int) -> socket.socket:
    """Return a socket of its own for what may be one by now or not. Raises ``OSError``."""
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


def frame_property(frame: Any, name: str) -> str:
    """Return a property of the connection that a frame came from, such as ``User-Id``; empty if it has none."""
    try:
        return str(frame.get(name))
    except ZMQError:
        return ""
