"""A node's way to torch's store, which listens on the launcher's loopback interface, from another machine.

A process of the node, ``python -m ebbflow.infra.training.launcher.tunnel DESCRIPTOR GENERATION PARENT``: it listens
on the node's own loopback interface (the node made the socket, so that its port is known before), and carries each
connection over the encrypted channel. It lives as long as the node's processes of that generation, which end it, and
no longer than the node itself.
"""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Hashable

from zmq import constants

from ebbflow.infra.errors import LauncherLostError
from ebbflow.infra.training.channel import keys, messages
from ebbflow.infra.training.channel.client import MessageClient
from ebbflow.infra.training.channel.pipes import KINDS, Pipes, StreamMessage
from ebbflow.infra.training.process.channel import CHANNEL

_MODULE = "ebbflow.infra.training.launcher.tunnel"
_LOOPBACK = "127.0.0.1"
_BACKLOG = 512
_TIMEOUT = 60.0  # seconds without a connection to the launcher
_TURN = 1.0  # seconds for which nothing may happen before everything is looked at again
_PR_SET_PDEATHSIG = 1


def start(launcher: str, server: str, generation: int) -> tuple["subprocess.Popen[bytes]", int]:
    """Start a tunnel to the store of a generation; return its process and its port on this machine.

    The key comes from this process' environment. Raises ``OSError``.
    """
    with socket.create_server((_LOOPBACK, 0), backlog=_BACKLOG) as listener:
        command = [
            sys.executable,
            "-P",
            "-m",
            _MODULE,
            str(listener.fileno()),
            str(generation),
            str(os.getpid()),
        ]
        process = subprocess.Popen(
            command,
            env={**os.environ, CHANNEL: launcher, keys.SERVER_KEY: server},
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )
        return process, int(listener.getsockname()[1])


class Tunnel:
    """Carries what connects to ``listener`` to the launcher, until that is gone."""

    def __init__(self, client: MessageClient, listener: socket.socket, generation: int) -> None:
        self._client, self._listener, self._generation = client, listener, generation
        self._acts: dict[int, Callable[[int], None]] = {}
        self._pipes = Pipes(self._send, self._watch, self._unwatch, lambda key: int(str(key)))
        self._opened = 0
        listener.setblocking(False)

    def run(self) -> None:
        """Carry until the launcher is gone. Raises ``LauncherLostError``."""
        client = self._client
        client.await_connection()
        self._watch(self._listener.fileno(), constants.POLLIN, lambda _: self._accept())
        made = client.connections
        while True:
            found = client.receive(_TURN)
            if client.connections != made or not client.connected:
                self._break()  # the launcher does not know these streams any more
                made = client.connections
            if found is not None and len(found) == 2:
                message: StreamMessage = messages.decode(found[0], KINDS)
                self._pipes.receive(message.stream, message, found[1])
            ready, client.ready = client.ready, {}
            for descriptor, events in ready.items():
                if (act := self._acts.get(descriptor)) is not None:
                    act(events)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            connection, _ = self._listener.accept()
            self._opened += 1
            if self._send(self._opened, StreamMessage("open", self._opened, self._generation), b""):
                self._pipes.add(self._opened, connection)
            else:
                connection.close()

    def _break(self) -> None:
        for key in self._pipes.keys:
            self._pipes.drop(key, notify=False)

    def _send(self, key: Hashable, message: StreamMessage, data: bytes) -> bool:
        return self._client.send(messages.encode(message), data)

    def _watch(self, descriptor: int, events: int, act: Callable[[int], None]) -> None:
        self._acts[descriptor] = act
        self._client.watch(descriptor, events)

    def _unwatch(self, descriptor: int) -> None:
        self._acts.pop(descriptor, None)
        self._client.unwatch(descriptor)


def main() -> None:
    """Carry until the node or the launcher is gone."""
    descriptor, generation, parent = map(int, sys.argv[1:])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a notice to the node, which ends this process itself
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if os.getppid() != parent:
        return
    server, pair = keys.handed_down(os.environ)
    client = MessageClient(os.environ[CHANNEL], server, pair, timeout=_TIMEOUT)
    with socket.socket(fileno=descriptor) as listener, contextlib.suppress(LauncherLostError):
        Tunnel(client, listener, generation).run()


if __name__ == "__main__":
    main()
