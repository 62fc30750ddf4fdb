"""Streams of bytes over the encrypted channel: what both ends of the tunnel to torch's store have in common.

A message has two frames: a ``StreamMessage`` and, for data, the bytes. Each side may have ``WINDOW`` bytes of a
stream under way; the other side says how many it has passed on (``credit``). So a slow reader holds its own stream
up, and neither side has more than a window of it in memory.
"""

import socket
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal

from zmq import constants

from ebbflow.infra.errors import MessageError
from ebbflow.infra.training.channel import messages

WINDOW = 1 << 20  # bytes of one stream that may be under way in one direction
_CHUNK = 64 << 10  # bytes of one message


@dataclass(frozen=True, slots=True)
class StreamMessage:
    """A word about one stream."""

    do: Literal["open", "data", "credit", "end"]
    stream: int  # chosen by the side that opens it; new for each
    count: int = 0  # open: the generation; credit: bytes that were passed on


KINDS = messages.by_name(StreamMessage)


@dataclass(slots=True)
class _Pipe:
    socket: socket.socket
    credit: int = WINDOW  # bytes that may still be sent to the other side
    outgoing: bytearray = field(default_factory=bytearray)  # for the socket
    ending: bool = False  # closed once ``outgoing`` has been written
    watched: int = 0


class Pipes:
    """The sockets of one side, by stream.

    Args:
        send: sends one message of a stream, and returns whether that could be done.
        watch: has ``on_ready`` called for a descriptor and its events.
        unwatch: ends that.
    """

    def __init__(
        self,
        send: Callable[[Hashable, StreamMessage, bytes], bool],
        watch: Callable[[int, int, Callable[[int], None]], None],
        unwatch: Callable[[int], None],
        number: Callable[[Hashable], int],
    ) -> None:
        self._send, self._watch, self._unwatch, self._number = send, watch, unwatch, number
        self._pipes: dict[Hashable, _Pipe] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._pipes

    @property
    def keys(self) -> list[Hashable]:
        return list(self._pipes)

    def add(self, key: Hashable, connection: socket.socket) -> None:
        """Carry what a socket says and is to hear as the stream ``key``."""
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._pipes[key] = _Pipe(connection)
        self._look(key)

    def receive(self, key: Hashable, message: StreamMessage, data: bytes) -> None:
        """Act on a message about a stream that was opened. Raises ``MessageError`` for what breaks its rules."""
        pipe = self._pipes.get(key)
        if pipe is None:
            return  # it has ended on this side, and the other does not know yet
        if message.do == "end":
            pipe.ending = True
        elif message.do == "credit":
            if not 0 < message.count <= WINDOW - pipe.credit:
                self.drop(key)
                raise MessageError(f"a credit of {message.count} bytes for a stream that lacks fewer")
            pipe.credit += message.count
        else:
            if len(data) > WINDOW - len(pipe.outgoing):
                self.drop(key)
                raise MessageError(f"more than {WINDOW} bytes of a stream under way")
            pipe.outgoing += data
        self._flush(key, pipe)

    def drop(self, key: Hashable, *, notify: bool = True) -> None:
        """End a stream; ``notify``: the other side as well."""
        pipe = self._pipes.pop(key, None)
        if pipe is None:
            return
        if pipe.watched:
            self._unwatch(pipe.socket.fileno())
        pipe.socket.close()
        if notify:
            self._send(key, StreamMessage("end", self._number(key)), b"")

    # --- how ----------------------------------------------------------------------------------------------

    def _on_ready(self, key: Hashable, events: int) -> None:
        pipe = self._pipes.get(key)
        if pipe is None:
            return
        if events & constants.POLLOUT:
            self._flush(key, pipe)
        if key in self._pipes and events & ~constants.POLLOUT:
            self._read(key, pipe)

    def _read(self, key: Hashable, pipe: _Pipe) -> None:
        try:
            data = pipe.socket.recv(max(1, min(_CHUNK, pipe.credit)))
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.drop(key)
            return
        pipe.credit -= len(data)
        if not self._send(key, StreamMessage("data", self._number(key)), data):
            self.drop(key, notify=False)  # the peer is gone
            return
        self._look(key)

    def _flush(self, key: Hashable, pipe: _Pipe) -> None:
        written = 0
        try:
            while pipe.outgoing:
                count = pipe.socket.send(pipe.outgoing[:_CHUNK])
                del pipe.outgoing[:count]
                written += count
        except BlockingIOError:
            pass
        except OSError:
            self.drop(key)
            return
        if written and not pipe.ending:
            self._send(key, StreamMessage("credit", self._number(key), written), b"")
        if pipe.ending and not pipe.outgoing:
            self.drop(key, notify=False)
            return
        self._look(key)

    def _look(self, key: Hashable) -> None:
        """Poll the socket for what it is ready for."""
        pipe = self._pipes[key]
        events = (constants.POLLIN if pipe.credit > 0 and not pipe.ending else 0) | (
            constants.POLLOUT if pipe.outgoing else 0
        )
        if events == pipe.watched:
            return
        descriptor = pipe.socket.fileno()
        if events:
            self._watch(descriptor, events, lambda found: self._on_ready(key, found))
        else:
            self._unwatch(descriptor)
        pipe.watched = events
