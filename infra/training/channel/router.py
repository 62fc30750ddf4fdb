"""``SecureRouter``: the launcher's end of its channel to nodes, an ``EncryptedRouter``.

What is refused is counted with the peer's address.
"""

import contextlib
import functools
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zmq import constants
from zmq.utils.monitor import parse_monitor_message

from ebbflow.infra.errors import MessageError, TrainingError
from ebbflow.infra.machine.encrypted_router import EncryptedRouter, frame_property
from ebbflow.infra.training.channel import keys
from ebbflow.infra.training.channel.messages import MAX_FRAME
from ebbflow.infra.training.channel.refusals import Refusals

_DOMAIN = b"ebbflow"
_BACKLOG = 512
_ENDING = (
    120.0  # seconds for which a node that is ended may still say a word: it is not heard, and no stranger
)
_FAILED = {
    constants.EVENT_HANDSHAKE_FAILED_PROTOCOL: "it does not speak the encrypted protocol with this run's key",
    constants.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it left before it had proven a key",
}
_EVENTS = (
    constants.EVENT_ACCEPTED
    | constants.EVENT_HANDSHAKE_SUCCEEDED
    | constants.EVENT_DISCONNECTED
    | constants.EVENT_HANDSHAKE_FAILED_AUTH
    | constants.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | constants.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

Receive = Callable[[str, bytes, list[bytes]], None]  # receive(node key, connection id, frames)

log = logging.getLogger(__name__)


class SecureRouter(EncryptedRouter):
    """Listens from the start; ``receive`` is called in the router's thread, and what it raises refuses the message.

    Raises ``TrainingError`` when the port cannot be had.
    """

    def __init__(self, host: str, port: int, receive: Receive) -> None:
        self._receive = receive
        self.refusals = Refusals()
        self._nodes: dict[str, str] = {}  # public key -> node key
        self._former: dict[str, float] = {}  # public key of a node that was ended -> when
        self._watched: dict[int, Callable[[int], None]] = {}
        self._peers: dict[int, str] = {}  # descriptor of a connection that has not spoken yet -> address
        self._silent = 0  # connections that have proven a key and not spoken yet; ZeroMQ does not say which
        self._failure = ""  # of the handshake whose connection ends next
        super().__init__(
            host,
            port,
            domain=_DOMAIN,
            max_message=2 * MAX_FRAME,
            owner="the launcher",
            failure=TrainingError,
        )

    # --- for every thread ---------------------------------------------------------------------------------

    def admit(self, node: str, public: str) -> None:
        """Allow the holder of a public key speak as ``node``. Raises ``TrainingError`` for what is no key."""
        keys.raw(public)
        self._nodes[public] = node

    def public_of(self, node: str) -> str:
        """Return the public key of a node that was admitted; empty for another."""
        return next((public for public, name in list(self._nodes.items()) if name == node), "")

    def dismiss(self, node: str) -> None:
        """Take nothing more from ``node``."""
        for public in [public for public, name in list(self._nodes.items()) if name == node]:
            self._former[public] = time.monotonic()
            self._nodes.pop(public, None)

    # --- for the router's thread --------------------------------------------------------------------------

    def watch(self, descriptor: int, events: int, act: Callable[[int], None]) -> None:
        """Call ``act`` when a descriptor can be read (``POLLIN``) or written (``POLLOUT``)."""
        self._watched[descriptor] = act
        self._poller.register(descriptor, events)

    def unwatch(self, descriptor: int) -> None:
        """Stop polling a descriptor; does nothing where it is not polled."""
        if self._watched.pop(descriptor, None) is not None:
            self._poller.unregister(descriptor)

    # --- how ----------------------------------------------------------------------------------------------

    def on_open(self, router: Any) -> Sequence[Any]:
        router.backlog = _BACKLOG
        self._monitor = router.get_monitor_socket(_EVENTS)
        return (self._monitor,)

    def on_close(self, router: Any) -> None:
        router.disable_monitor()
        self._monitor.close(linger=0)

    def is_admitted(self, public: str) -> bool:
        return public in self._nodes

    def on_refused(self, public: str, address: str) -> None:
        if not self._is_ending(public):
            self.refusals.add(address, "its key is not one of this run's nodes")

    def on_polled(self, ready: Mapping[Any, int]) -> None:
        for descriptor, events in ready.items():
            # an act may end the watch of another descriptor, whose number may then be somebody else's
            act = self._watched.get(descriptor) if isinstance(descriptor, int) else None
            if act is not None:
                self.guarded(functools.partial(act, events))

    def on_taken(self, ready: Mapping[Any, int]) -> None:
        if self._monitor in ready:  # who has spoken is known by now
            while self._monitor.poll(0):
                self._on_event(parse_monitor_message(self._monitor.recv_multipart()))

    def on_message(self, connection: bytes, parts: Sequence[Any], first: Any) -> None:
        if self._peers.pop(int(frame_property(first, "__fd") or -1), None) is not None:
            self._silent -= 1
        public, address = frame_property(first, "User-Id"), frame_property(first, "Peer-Address")
        node = self._nodes.get(public)
        if node is None:
            if not self._is_ending(public):
                self.refusals.add(address, "its node has ended")
            return
        try:
            self._receive(node, connection, [frame.bytes for frame in parts])
        except MessageError as exc:
            self.refusals.add(address, f"node {node}: {exc}")
        except Exception:
            log.exception("a message of %s could not be handled", node)
            self.refusals.add(address, f"node {node}: a message that could not be handled")

    def _is_ending(self, public: str) -> bool:
        """Return whether a key is that of a node that was told to end a while ago at most."""
        return time.monotonic() - self._former.get(public, -_ENDING) < _ENDING

    def _on_event(self, event: Any) -> None:
        kind, descriptor = event["event"], event["value"]
        if kind == constants.EVENT_ACCEPTED:
            self._peers[descriptor] = _peer(descriptor)
        elif kind == constants.EVENT_HANDSHAKE_SUCCEEDED:
            self._silent += 1
        elif kind == constants.EVENT_HANDSHAKE_FAILED_AUTH:
            self._failure = "told"  # where the key was refused
        elif kind in _FAILED:
            self._failure = _FAILED[kind]
        elif kind == constants.EVENT_DISCONNECTED:
            failure, self._failure = self._failure, ""
            address = self._peers.pop(descriptor, None)
            if address is None or failure == "told":
                return
            if not failure and self._silent > 0:
                self._silent -= 1  # such as of a process that was killed before its first message
            else:
                self.refusals.add(address, failure or _FAILED[constants.EVENT_HANDSHAKE_FAILED_PROTOCOL])


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
