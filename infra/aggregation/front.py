"""``AggregatorFront``: the encrypted port of an aggregator, on which only admitted keys speak.

Who sends is told by the key that the connection has proven: so a training reaches its own tensors only. What breaks
the form of messages ends that connection and no other. See ``infra.machine.encrypted_router``.
"""

import collections
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ebbflow.infra.aggregation.frames import MAX_PAYLOAD, Kind, TensorFrame, encode
from ebbflow.infra.errors import AggregationError
from ebbflow.infra.machine.encrypted_router import EncryptedRouter, frame_property

_DOMAIN = b"ebbflow-aggregation"
_KEY_BYTES = 32

log = logging.getLogger(__name__)


class Peer(NamedTuple):
    """Who holds an admitted key."""

    job_id: str
    worker: str


Receive = Callable[[Peer, bytes, list[memoryview]], None]  # who, connection, parts of the message
Flush = Callable[[], None]  # messages that were there are taken


class AggregatorFront(EncryptedRouter):
    """Listens from the start; all that arrives is handed to ``receive`` in the front's thread.

    Args:
        host: address of the interface to listen on.
        port: number; 0: any free one.
        receive: takes a message; an ``AggregationError`` ends the connection that it came from.
        flush: called in the front's thread once the messages that were there are taken, and after other work.
        max_payload: maximum bytes of a part of a message.

    Raises ``AggregationError`` when the port is not available.
    """

    def __init__(
        self,
        host: str,
        port: int,
        receive: Receive,
        flush: Flush = lambda: None,
        *,
        max_payload: int = MAX_PAYLOAD,
    ) -> None:
        self._receive, self._flush = receive, flush
        self.refused = 0  # messages that ended their connection
        self._peers: dict[str, Peer] = {}  # by public key
        self._ended_connections: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        super().__init__(
            host,
            port,
            domain=_DOMAIN,
            max_message=max_payload,
            owner="an aggregator",
            failure=AggregationError,
        )

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

    def is_admitted(self, public: str) -> bool:
        return public in self._peers

    def on_message(self, connection: bytes, parts: Sequence[Any], first: Any) -> None:
        peer = self._peers.get(frame_property(first, "User-Id"))
        if peer is None or connection in self._ended_connections:
            return
        try:
            self._receive(peer, connection, [memoryview(one.buffer) for one in parts])
        except AggregationError as exc:
            log.warning("a connection of %s of %s is ended: %s", peer.worker, peer.job_id, exc)
            self.refused += 1
            self._end(connection, first)
        except Exception:
            log.exception("a message of %s of %s could not be handled", peer.worker, peer.job_id)
            self._end(connection, first)

    def on_turn_end(self) -> None:
        self._flush()

    def _end(self, connection: bytes, first: Any) -> None:
        """Close a connection, and take nothing that it has sent before."""
        self._ended_connections[connection] = None
        while len(self._ended_connections) > 1024:
            self._ended_connections.popitem(last=False)
        why = TensorFrame(
            Kind.ERROR, "", options={"error": "the connection is ended: a message broke the protocol"}
        )
        self.end(connection, first, encode([why]))
