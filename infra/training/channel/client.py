"""``MessageClient``: a process' connection to the launcher of its run, encrypted and authenticated at both ends.

ZeroMQ with CURVE (RFC 25/26 of ZeroMQ). The client knows the launcher's public key beforehand, so no other process
can answer in its place; the launcher knows the node's. Keys of a connection are made for it (ephemeral) and nonces
count up within it, so a message that was recorded can be played back neither in its own connection nor in another
one, and a recorded connection as a whole proves nothing to a launcher that makes new ephemeral keys.

The connection is made again when it breaks: what was under way is then lost, so a process that needs an answer asks
again when ``connections`` has grown. The launcher listens before anything of it starts and as long as it lives:
where a connection is refused (no process listens), it is gone.
"""

import contextlib
import errno
import socket
import time
from typing import Any

from zmq import constants
from zmq.error import Again
from zmq.sugar.poll import Poller
from zmq.utils.monitor import parse_monitor_message

from ebbflow.infra.errors import LauncherLostError
from ebbflow.infra.machine.message_context import close_context, open_context
from ebbflow.infra.training.channel import keys
from ebbflow.infra.training.channel.keys import KeyPair
from ebbflow.infra.training.channel.messages import MAX_FRAME

_RECONNECT = (50, 1000)  # milliseconds before a broken connection is made again, at first and at most
_AGAIN = 0.5  # seconds before a refused key is tried again: the launcher may come to know it
_BEAT = (
    5_000,
    20_000,
)  # milliseconds between ZeroMQ's own heartbeats, and without one until the connection is renewed
_HANDSHAKE = 15_000  # milliseconds for a handshake
_PROBE = 1.0  # seconds to find out whether anything listens
_EVENTS = (
    constants.EVENT_HANDSHAKE_SUCCEEDED
    | constants.EVENT_HANDSHAKE_FAILED_AUTH
    | constants.EVENT_DISCONNECTED
    | constants.EVENT_CLOSED
)


class MessageClient:
    """One connection. Used by one thread at a time; never after a fork, by the child.

    Args:
        address: host:port of the launcher.
        server: its public key.
        pair: this node's.
        timeout: seconds without a connection after which the launcher counts as lost.
    """

    def __init__(self, address: str, server: str, pair: KeyPair, *, timeout: float) -> None:
        self._address, self._server, self._pair, self._timeout = address, server, pair, timeout
        self.connections = 0  # made so far
        self._context = open_context()
        self._down: float | None = time.monotonic()  # since when there is no connection
        self._renew: float | None = None  # when to try a refused key again
        self._refused = False
        self.ready: dict[int, int] = {}  # descriptors that are watched and ready -> events
        self._poller = Poller()
        self._open()

    @property
    def connected(self) -> bool:
        return self._down is None

    def send(self, *frames: bytes) -> bool:
        """Send a message, or tell that there is no connection, or none that takes it. Never waits."""
        try:
            self._socket.send_multipart(frames, constants.NOBLOCK)
        except Again:
            return False
        return True

    def receive(self, timeout: float) -> list[bytes] | None:
        """Return the next message.

        Returns ``None`` after ``timeout`` seconds, when a connection has been made, and when a descriptor that is
        watched is ready. Raises ``LauncherLostError``.
        """
        end, before = time.monotonic() + timeout, self.connections
        while True:
            self._follow()
            with contextlib.suppress(Again):
                return list(self._socket.recv_multipart(constants.NOBLOCK))
            left = end - time.monotonic()
            if left <= 0 or self.connections != before or self.ready:
                return None
            if self._renew is not None:
                left = min(left, max(0.0, self._renew - time.monotonic()))
            found = self._poller.poll(left * 1000)
            self.ready = {one: events for one, events in found if isinstance(one, int)}

    def watch(self, descriptor: int, events: int) -> None:
        """Return from ``receive`` when a descriptor can be read or written; ``ready`` then says which."""
        self._poller.register(descriptor, events)
        self.ready.pop(descriptor, None)

    def unwatch(self, descriptor: int) -> None:
        """Stop polling a descriptor."""
        self._poller.unregister(descriptor)
        self.ready.pop(descriptor, None)

    def await_connection(self) -> None:
        """Return once there is a connection. Raises ``LauncherLostError``."""
        while not self.connected:
            self.receive(self._timeout)

    def close(self) -> None:
        """End the connection; what is under way may be lost. May be called twice."""
        if not self._context.closed:
            self._shut()
            close_context(self._context)

    # --- how ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        connection = self._socket = self._context.socket(constants.DEALER)
        connection.curve_serverkey = keys.raw(self._server)
        connection.curve_publickey = keys.raw(self._pair.public)
        connection.curve_secretkey = keys.raw(self._pair.secret)
        connection.linger = 0
        connection.immediate = 1  # nothing is queued for a connection that is yet to be made
        connection.maxmsgsize = 2 * MAX_FRAME
        connection.reconnect_ivl, connection.reconnect_ivl_max = _RECONNECT
        connection.heartbeat_ivl, connection.heartbeat_timeout = _BEAT
        connection.handshake_ivl = _HANDSHAKE
        self._monitor = connection.get_monitor_socket(_EVENTS)
        self._poller.register(connection, constants.POLLIN)
        self._poller.register(self._monitor, constants.POLLIN)
        connection.connect(f"tcp://{self._address}")

    def _shut(self) -> None:
        self._poller.unregister(self._socket)
        self._poller.unregister(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)

    def _follow(self) -> None:
        """Take note of what has become of the connection. Raises ``LauncherLostError``."""
        while self._monitor.get(constants.EVENTS) & constants.POLLIN:
            self._on_event(parse_monitor_message(self._monitor.recv_multipart()))
        now = time.monotonic()
        if self._renew is not None and now >= self._renew:
            self._renew = None
            self._shut()
            self._open()
        if self._down is not None and now - self._down > self._timeout:
            why = "refuses this node's key" if self._refused else "cannot be reached"
            raise LauncherLostError(f"the launcher at {self._address} {why} for {self._timeout:g} s")

    def _on_event(self, event: Any) -> None:
        kind = event["event"]
        if kind == constants.EVENT_HANDSHAKE_SUCCEEDED:
            self.connections += 1
            self._down, self._refused = None, False
            return
        if self._down is None:
            self._down = time.monotonic()
        if kind == constants.EVENT_HANDSHAKE_FAILED_AUTH:
            # ZeroMQ does not try again by itself after that
            self._refused, self._renew = True, time.monotonic() + _AGAIN
        elif kind == constants.EVENT_CLOSED and not _listens(self._address):
            raise LauncherLostError(f"the launcher at {self._address} is gone: nothing listens there")


def _listens(address: str) -> bool:
    """Return whether a process listens there, as far as that can be known: only a refusal says that none does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_PROBE).close()
    except OSError as exc:
        return exc.errno != errno.ECONNREFUSED
    return True
