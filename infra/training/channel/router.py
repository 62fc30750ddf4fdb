"""``SecureRouter``: the launcher's end of the encrypted channel, which only admitted keys can speak on.

ZeroMQ ROUTER with CURVE. A peer that does not prove an admitted key gets no further than the handshake: it can
neither read nor write anything. Who has sent a message is told by the key of its connection (ZeroMQ's ``User-Id``,
set here when the key was proven), never by what the message says. Everything runs in one thread; what is refused is
counted with the peer's address.

Connection ids are chosen by ZeroMQ. A node could try to be called like another one's lost connection and so get what
is sent there; it would have to guess 32 bits, and learn what it is told itself.
"""

import collections
import contextlib
import errno
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from zmq import constants
from zmq.error import Again, ZMQError
from zmq.sugar.context import Context
from zmq.sugar.poll import Poller
from zmq.utils.monitor import parse_monitor_message

from ebbflow.infra.errors import MessageError, TrainingError
from ebbflow.infra.training.channel import keys
from ebbflow.infra.training.channel.keys import KeyPair
from ebbflow.infra.training.channel.messages import MAX_FRAME
from ebbflow.infra.training.channel.refusals import Refusals

_DOMAIN = b"ebbflow"
_BACKLOG = 512
_HANDSHAKE = 10_000  # milliseconds for a handshake: who connects and is silent does not stay
_AT_ONCE = 200  # messages taken before other sockets are looked at again
_ENDING = (
    120.0  # seconds for which a node that is ended may still say a word: it is not heard, and no stranger
)
_CLOSING = 10.0  # seconds for the thread to end
_FAILED = {
    constants.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak the encrypted protocol with this run's key",
    constants.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it left before it had proven a key",
}
_EVENTS = (
    constants.EVENT_ACCEPTED
    | constants.EVENT_DISCONNECTED
    | constants.EVENT_HANDSHAKE_FAILED_AUTH
    | constants.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | constants.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

Receive = Callable[[str, bytes, list[bytes]], None]  # receive(node key, connection id, frames)

log = logging.getLogger(__name__)


class SecureRouter:
    """Listens from the start; ``receive`` is called in the router's thread, and what it raises refuses the message.

    Raises ``TrainingError`` when the port cannot be had.
    """

    def __init__(self, host: str, port: int, receive: Receive) -> None:
        self._receive = receive
        self._pair = KeyPair.make()
        self.public = self._pair.public
        self.refusals = Refusals()
        self._nodes: dict[str, str] = {}  # public key -> node key
        self._former: dict[str, float] = {}  # public key of a node that was ended -> when
        self._calls: collections.deque[Callable[[], None]] = collections.deque()
        self._watched: dict[int, Callable[[int], None]] = {}
        self._peers: dict[int, str] = {}  # descriptor of a connection that has not spoken yet -> address
        self._failure = ""  # of the handshake whose connection ends next
        self._ended = False
        self._context = Context(io_threads=1)
        self._poller = Poller()
        try:
            self._open(host, port)
        except BaseException:
            self._context.destroy(linger=0)  # with all its sockets
            raise
        self._thread = threading.Thread(target=self._run, name="ebbflow-router", daemon=True)
        self._thread.start()

    # --- for every thread ---------------------------------------------------------------------------------

    def admit(self, node: str, public: str) -> None:
        """Allow the holder of a public key speak as ``node``. Raises ``TrainingError`` for what is no key."""
        keys.raw(public)
        self._nodes[public] = node

    def dismiss(self, node: str) -> None:
        """Take nothing more from ``node``."""
        for public in [public for public, name in list(self._nodes.items()) if name == node]:
            self._former[public] = time.monotonic()
            self._nodes.pop(public, None)

    def call(self, act: Callable[[], None]) -> None:
        """Schedule ``act`` in the router's thread."""
        self._calls.append(act)
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b".")

    def close(self) -> None:
        """End all connections. May be called twice."""
        if not self._ended:
            self._ended = True
            self.call(lambda: None)
            self._thread.join(_CLOSING)

    # --- for the router's thread --------------------------------------------------------------------------

    def send(self, connection: bytes, *frames: bytes) -> bool:
        """Send a message, or tell that the connection is gone or takes no more now."""
        try:
            self._router.send_multipart([connection, *frames], constants.NOBLOCK)
        except ZMQError as exc:
            if exc.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            return False
        return True

    def watch(self, descriptor: int, events: int, act: Callable[[int], None]) -> None:
        """Call ``act`` when a descriptor can be read (``POLLIN``) or written (``POLLOUT``)."""
        self._watched[descriptor] = act
        self._poller.register(descriptor, events)

    def unwatch(self, descriptor: int) -> None:
        """Stop polling a descriptor; does nothing where it is not polled."""
        if self._watched.pop(descriptor, None) is not None:
            self._poller.unregister(descriptor)

    # --- how ----------------------------------------------------------------------------------------------

    def _open(self, host: str, port: int) -> None:
        self._keys = self._context.socket(constants.REP)  # where ZeroMQ asks who may connect
        self._keys.bind("inproc://zeromq.zap.01")
        router = self._router = self._context.socket(constants.ROUTER)
        router.curve_server = True
        router.curve_secretkey = keys.raw(self._pair.secret)
        router.curve_publickey = keys.raw(self._pair.public)
        router.zap_domain = _DOMAIN
        router.router_mandatory = 1
        router.linger = 0
        router.backlog = _BACKLOG
        router.maxmsgsize = 2 * MAX_FRAME
        router.handshake_ivl = _HANDSHAKE
        self._monitor = router.get_monitor_socket(_EVENTS)
        try:
            router.bind(f"tcp://{host}:{port or '*'}")
        except ZMQError as exc:
            why = exc.strerror or str(exc)
            raise TrainingError(
                f"the launcher cannot listen on {host}:{port}: {why}; give another port"
            ) from exc
        self.port = int(router.last_endpoint.decode().rstrip("\0").rpartition(":")[2])
        self.address = f"{host}:{self.port}"
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        for one in (self._router, self._keys, self._monitor, self._woken.fileno()):
            self._poller.register(one, constants.POLLIN)

    def _run(self) -> None:
        try:
            while not self._ended:
                self._turn(self._poller.poll())
        except BaseException:  # nodes notice the silence
            log.exception("the launcher's channel has failed")
            raise
        finally:
            self._ended = True
            self._router.disable_monitor()
            self._monitor.close(linger=0)
            self._router.close(linger=0)
            self._keys.close(linger=0)
            self._context.term()
            self._waker.close()
            self._woken.close()

    def _turn(self, found: Iterable[tuple[Any, int]]) -> None:
        ready = dict(found)
        if self._keys in ready:
            self._decide()
        if self._woken.fileno() in ready:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        while self._calls:
            self._guarded(self._calls.popleft())
        for descriptor, events in ready.items():
            # an act may end the watch of another descriptor, whose number may then be somebody else's
            act = self._watched.get(descriptor) if isinstance(descriptor, int) else None
            if act is not None:
                self._guarded(functools.partial(act, events))
        left = _AT_ONCE
        while left and self._take():
            left -= 1
        if left and self._monitor in ready:  # who has spoken is known by now
            while self._monitor.poll(0):
                self._on_event(parse_monitor_message(self._monitor.recv_multipart()))

    def _decide(self) -> None:
        """Answer whether a peer may connect; it has proven that it holds the key it shows."""
        version, request, _, address, _, mechanism, *proofs = self._keys.recv_multipart()
        public = proofs[0].hex() if mechanism == b"CURVE" and len(proofs) == 1 else ""
        admitted = public in self._nodes
        if not admitted and not self._is_ending(public):
            self.refusals.add(address.decode(), "its key is not one of this run's nodes")
        verdict = (b"200", b"", public.encode()) if admitted else (b"400", b"unknown key", b"")
        self._keys.send_multipart([version, request, *verdict, b""])

    def _take(self) -> bool:
        """Take one message, and return whether there was one."""
        try:
            connection, *frames = self._router.recv_multipart(constants.NOBLOCK, copy=False)
        except Again:
            return False
        first = frames[0] if frames else connection
        self._peers.pop(int(_property(first, "__fd") or -1), None)
        public, address = _property(first, "User-Id"), _property(first, "Peer-Address")
        node = self._nodes.get(public)
        if node is None:
            if not self._is_ending(public):
                self.refusals.add(address, "its node has ended")
            return True
        try:
            self._receive(node, connection.bytes, [frame.bytes for frame in frames])
        except MessageError as exc:
            self.refusals.add(address, f"node {node}: {exc}")
        except Exception:
            log.exception("a message of %s could not be handled", node)
            self.refusals.add(address, f"node {node}: a message that could not be handled")
        return True

    def _is_ending(self, public: str) -> bool:
        """Return whether a key is that of a node that was told to end a while ago at most."""
        return time.monotonic() - self._former.get(public, -_ENDING) < _ENDING

    def _on_event(self, event: Any) -> None:
        kind, descriptor = event["event"], event["value"]
        if kind == constants.EVENT_ACCEPTED:
            self._peers[descriptor] = _peer(descriptor)
        elif kind == constants.EVENT_HANDSHAKE_FAILED_AUTH:
            self._failure = "told"  # where the key was refused
        elif kind in _FAILED:
            self._failure = _FAILED[kind]
        elif kind == constants.EVENT_DISCONNECTED:
            failure, self._failure = self._failure, ""
            address = self._peers.pop(descriptor, None)
            if address is not None and failure != "told":
                self.refusals.add(address, failure or _FAILED[constants.EVENT_HANDSHAKE_FAILED_PROTOCOL])

    def _guarded(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:
            log.exception("the launcher's channel could not complete the request")


def _property(frame: Any, name: str) -> str:
    try:
        return str(frame.get(name))
    except ZMQError:  # the frame has none
        return ""


def _peer(descriptor: int) -> str:
    """Return the IP address at the other end of a connection of ZeroMQ's; empty when it is gone already.

    As good as can be had: ZeroMQ tells of a connection when it may have ended. Keys that are refused come with the
    address from ZeroMQ itself.
    """
    with contextlib.suppress(OSError):
        copy = os.dup(descriptor)
        try:
            with socket.socket(fileno=copy) as found:
                copy = -1
                return str(found.getpeername()[0])
        finally:
            if copy >= 0:
                os.close(copy)
    return ""
