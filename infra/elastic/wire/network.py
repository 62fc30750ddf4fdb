"""The transport between machines: ZeroMQ over TCP, encrypted and authenticated at both ends (CURVE25519).

The master listens on a port that admits the keys of the job's nodes, which their pool has told it. To a node that has
proven its key it hands the key pair of the job; with that the processes of the job, and no others, reach each other.
The pair is made for one job and is in the memory of its processes only.

Where a connection breaks, what was on its way may be lost, so the node at its other end counts as lost.
"""

import json
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from zmq import constants
from zmq.sugar.context import Context

from ebbflow.infra.clock import Clock
from ebbflow.infra.elastic.wire import codec
from ebbflow.infra.elastic.wire.heartbeats import GO, HEART, SILENCE, LivenessTracker
from ebbflow.infra.elastic.wire.messages import Address
from ebbflow.infra.elastic.wire.transport import Envelope
from ebbflow.infra.elastic.wire.zeromq import DELIVERY
from ebbflow.infra.errors import ElasticError
from ebbflow.infra.machine.encrypted_router import CurveKeys, EncryptedRouter

_DOMAIN = b"ebbflow-elastic"
_BATCH = 256  # messages taken before the actor works again
_PENDING = 0.05  # seconds between looks for an address that is not known yet
_BROKEN = (
    constants.EVENT_DISCONNECTED
    | constants.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | constants.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | constants.EVENT_HANDSHAKE_FAILED_AUTH
)

Route = Callable[[str], tuple[str, str] | None]
"""From a node's name to host:port and public key of its inbox; ``None``: they are not known yet."""


class Inbox(EncryptedRouter):
    """The port of one process: what arrives is put into the queue of the actor that it is for.

    Args:
        host: address to listen on.
        job: the job's keys, which all its processes hold.
        pair: of this port; made by default.
    """

    def __init__(self, host: str, job: CurveKeys, pair: CurveKeys | None = None) -> None:
        self.job = job
        self._queues: dict[Address, queue.SimpleQueue[Envelope]] = {}
        self._lock = threading.Lock()
        super().__init__(
            host, 0, domain=_DOMAIN, max_message=-1, owner="an elastic job", failure=ElasticError, pair=pair
        )

    def queue_of(self, address: Address) -> "queue.SimpleQueue[Envelope]":
        """Return the queue of an actor."""
        with self._lock:
            return self._queues.setdefault(address, queue.SimpleQueue())

    def is_admitted(self, public: str) -> bool:
        return public == self.job.public

    def on_message(self, connection: bytes, parts: Sequence[Any], first: Any) -> None:
        def take() -> None:
            to = bytes(parts[0].buffer).decode()
            self.queue_of(to).put(codec.decode([part.buffer for part in parts[1:]]))

        self.guarded(take)


class MasterInbox(Inbox):
    """The master's port, which also hears the heartbeats of nodes, and tells them where the others listen."""

    def __init__(self, host: str, clock: Clock, silence: float = SILENCE) -> None:
        self.liveness = LivenessTracker(clock, silence)
        self._nodes: set[str] = set()  # public keys
        self._addresses: dict[str, str] = {}  # host:port, by node
        self._version = 0  # of these
        super().__init__(host, CurveKeys.make())

    def admit(self, public: str) -> None:
        """Let the holder of a node's public key speak."""
        self._nodes.add(public)

    def forget(self, node: str) -> None:
        """Tell others of a node no longer."""
        if self._addresses.pop(node, None):
            self._version += 1

    def route(self, node: str) -> tuple[str, str] | None:
        """See ``Route``."""
        address = self._addresses.get(node)
        return None if address is None else (address, self.job.public)

    def is_admitted(self, public: str) -> bool:
        return public in self._nodes or super().is_admitted(public)

    def on_message(self, connection: bytes, parts: Sequence[Any], first: Any) -> None:
        if bytes(parts[0].buffer) != HEART.encode():
            super().on_message(connection, parts, first)
            return
        self.guarded(lambda: self._answer(connection, json.loads(bytes(parts[1].buffer))))

    def _answer(self, connection: bytes, beat: dict[str, Any]) -> None:
        node = str(beat["node"])
        if self.liveness.record(node):
            self.send(connection, GO)
            return
        if beat["address"] and self._addresses.get(node) != beat["address"]:
            self._addresses[node] = str(beat["address"])
            self._version += 1
        for broken in beat["broken"]:
            self.liveness.record_broken(str(broken))
        current = {"version": self._version, "addresses": dict(self._addresses)}
        news = {} if beat["version"] == self._version else current
        secret = {} if beat["address"] else {"public": self.job.public, "secret": self.job.secret}
        self.send(connection, json.dumps({**news, **secret}).encode())


class NetworkTransport:
    """One actor's end; see ``Transport``. For one thread.

    Args:
        address: of the actor.
        inbox: of its process.
        route: tells where a node listens.
        broken: called with the node to which a connection has broken.
    """

    def __init__(self, address: Address, inbox: Inbox, route: Route, broken: Callable[[str], None]) -> None:
        self._inbox, self._route, self._broken = inbox, route, broken
        self._queue = inbox.queue_of(address)
        self._context = Context()
        self._links: dict[str, tuple[Any, Any]] = {}  # socket and its monitor, by node
        self._pending: dict[str, list[list[Any]]] = {}  # by node whose address is not known yet

    def send(self, to: Address, envelope: Envelope) -> None:
        node = to.partition("/")[0]
        self._pending.setdefault(node, []).append([to.encode(), *codec.encode(envelope)])
        self._flush(node)

    def receive(self, timeout: float) -> list[Envelope]:
        for node in list(self._pending):
            self._flush(node)
        self._follow()
        found = []
        try:
            found.append(self._queue.get(timeout=min(timeout, _PENDING) if self._pending else timeout))
            while len(found) < _BATCH:
                found.append(self._queue.get_nowait())
        except (queue.Empty, ValueError):
            pass
        return found

    def forget(self, address: Address) -> None:
        node = address.partition("/")[0]
        self._pending.pop(node, None)
        if link := self._links.pop(node, None):
            _close(link, linger=0)

    def close(self) -> None:
        for link in self._links.values():
            _close(link, linger=DELIVERY)
        self._links.clear()
        self._context.term()

    # --- how ----------------------------------------------------------------------------------------------

    def _flush(self, node: str) -> None:
        link = self._links.get(node) or self._open(node)
        if link is None:
            return
        for frames in self._pending.pop(node, []):
            link[0].send_multipart(frames, constants.NOBLOCK)

    def _open(self, node: str) -> tuple[Any, Any] | None:
        if (place := self._route(node)) is None:
            return None
        address, public = place
        socket: Any = self._context.socket(constants.DEALER)
        socket.curve_serverkey = bytes.fromhex(public)
        socket.curve_publickey = bytes.fromhex(self._inbox.job.public)
        socket.curve_secretkey = bytes.fromhex(self._inbox.job.secret)
        socket.sndhwm = 0  # a full queue would block the actor; work in flight is bounded by tasks
        monitor = socket.get_monitor_socket(_BROKEN)
        socket.connect(f"tcp://{address}")
        self._links[node] = socket, monitor
        return socket, monitor

    def _follow(self) -> None:
        for node, (_, monitor) in list(self._links.items()):
            if monitor.get(constants.EVENTS) & constants.POLLIN:
                self.forget(node)
                self._broken(node)


def _close(link: tuple[Any, Any], linger: int) -> None:
    socket, monitor = link
    socket.disable_monitor()
    monitor.close(linger=0)
    socket.close(linger=linger)


def connect_heart(context: Any, master: str, server: str, pair: CurveKeys) -> Any:
    """Return a socket for heartbeats to the master at host:port, whose public key is ``server``."""
    socket = context.socket(constants.DEALER)
    socket.curve_serverkey = bytes.fromhex(server)
    socket.curve_publickey = bytes.fromhex(pair.public)
    socket.curve_secretkey = bytes.fromhex(pair.secret)
    socket.linger = 0
    socket.immediate = 1
    socket.connect(f"tcp://{master}")
    return socket
