"""The transport between processes: ZeroMQ over Unix sockets in a directory that only this user can open."""

import os
from pathlib import Path
from typing import Any

from zmq.constants import LINGER, NOBLOCK, PULL, PUSH, RCVHWM, RECONNECT_IVL, SNDHWM
from zmq.error import Again
from zmq.sugar.context import Context

from ebbflow.infra.elastic.wire import codec
from ebbflow.infra.elastic.wire.messages import Address
from ebbflow.infra.elastic.wire.transport import Envelope
from ebbflow.infra.errors import ElasticError

DELIVERY = 2_000  # milliseconds in which a closing socket still delivers
_LONGEST_PATH = 100  # of a Unix socket's path; the system's limit is 107 characters
_BATCH = 256  # messages taken before the actor works again


def endpoint(folder: str, address: Address) -> str:
    """Return where actor ``address`` listens. Raises ``ElasticError`` for a directory whose path is too long."""
    path = os.path.join(folder, address.replace("/", "-"))
    if len(path) > _LONGEST_PATH:
        raise ElasticError(f"paths of sockets must be at most {_LONGEST_PATH} characters; got {path}")
    return f"ipc://{path}"


class ZmqTransport:
    """One PULL socket to receive from all, one PUSH socket for each actor that was written to. For one thread."""

    def __init__(self, folder: str, address: Address, context: Context) -> None:
        self._folder = folder
        self._context = context
        self._peers: dict[Address, Any] = {}
        self._inbox = context.socket(PULL)
        self._inbox.set(RCVHWM, 0)
        self._inbox.set(LINGER, 0)
        self._inbox.bind(endpoint(folder, address))

    def send(self, to: Address, envelope: Envelope) -> None:
        socket = self._peers.get(to)
        if socket is None:
            socket = self._peers[to] = self._context.socket(PUSH)
            socket.set(SNDHWM, 0)  # a full queue would block the actor; work in flight is bounded by tasks
            socket.set(LINGER, DELIVERY)
            socket.set(RECONNECT_IVL, 10)
            socket.connect(endpoint(self._folder, to))
        socket.send_multipart(codec.encode(envelope), NOBLOCK)

    def receive(self, timeout: float) -> list[Envelope]:
        if not self._inbox.poll(max(0, int(timeout * 1000))):
            return []
        envelopes = []
        try:
            for _ in range(_BATCH):
                frames = self._inbox.recv_multipart(NOBLOCK, copy=False)
                envelopes.append(codec.decode([frame.buffer for frame in frames]))
        except Again:
            pass
        return envelopes

    def forget(self, address: Address) -> None:
        if socket := self._peers.pop(address, None):
            socket.close(linger=0)
        Path(endpoint(self._folder, address).removeprefix("ipc://")).unlink(missing_ok=True)

    def close(self) -> None:
        for socket in self._peers.values():
            socket.close()
        self._inbox.close()
