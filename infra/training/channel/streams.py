"""``Streams``: the launcher's end of the tunnels by which nodes on other machines reach torch's store.

The store listens on the launcher's loopback interface. A tunnel leads there and nowhere else: a node names a
generation that it has a rank in, and the launcher knows the port.
"""

import collections
import socket
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

from ebbflow.infra.errors import MessageError
from ebbflow.infra.training.channel import messages
from ebbflow.infra.training.channel.pipes import KINDS, Pipes, StreamMessage

if TYPE_CHECKING:
    from ebbflow.infra.training.channel.router import SecureRouter

_LOOPBACK = "127.0.0.1"
_CONNECT = 2.0  # seconds to connect to a port of this machine
_MOST = 512  # streams of one node

PortFor = Callable[[str, int], int]  # port of the store of a generation, for a node


class Streams:
    """All streams of all nodes; used in the router's thread."""

    def __init__(self, router: "SecureRouter") -> None:
        self._router = router
        self._pipes = Pipes(self._send, router.watch, router.unwatch, lambda key: _split(key)[1])
        self._owners: dict[Hashable, tuple[str, int]] = {}  # stream -> node and generation

    def takes(self, frames: Sequence[bytes]) -> bool:
        """Return whether a message is about a stream: it has a second frame."""
        return len(frames) == 2

    def receive(self, node: str, connection: bytes, frames: Sequence[bytes], port_for: PortFor) -> None:
        """Act on a message of a node. Raises ``MessageError``."""
        message: StreamMessage = messages.decode(frames[0], KINDS)
        key = connection, message.stream
        if message.do != "open":
            self._pipes.receive(key, message, frames[1])
            return
        self._owners = {one: owner for one, owner in self._owners.items() if one in self._pipes}
        if key in self._pipes:
            raise MessageError(f"stream {message.stream} is open already")
        if collections.Counter(name for name, _ in self._owners.values())[node] >= _MOST:
            raise MessageError(f"more than {_MOST} streams")
        port = port_for(node, message.count)
        try:
            found = socket.create_connection((_LOOPBACK, port), timeout=_CONNECT)
        except OSError:
            self._send(key, StreamMessage("end", message.stream), b"")
            return
        self._owners[key] = node, message.count
        self._pipes.add(key, found)

    def end(self, generation: int) -> None:
        """End what leads to the store of a generation."""
        for key, (_, number) in list(self._owners.items()):
            if number == generation:
                self._pipes.drop(key)
                del self._owners[key]

    def _send(self, key: Hashable, message: StreamMessage, data: bytes) -> bool:
        return self._router.send(_split(key)[0], messages.encode(message), data)


def _split(key: Hashable) -> tuple[bytes, int]:
    assert isinstance(key, tuple)
    connection, number = key
    return connection, number
