"""What tests of networks of nodes share: who may make them, and how much a link carries."""

import socket
import subprocess
import threading
import time

import pytest

from ebbflow.infra.errors import ClusterError
from ebbflow.infra.machine.network import links, namespaces


def skip_without_rights() -> None:
    """Skip a test, with the reason, where this process may not make namespaces and limited links."""
    import pyroute2  # noqa: F401 - without it a test fails: it could be installed

    try:
        links.check()
    except ClusterError as error:
        pytest.skip(f"this process may not make network namespaces, which needs root: {error}")


def throughput(sender: str, receiver: str, address: str, seconds: float = 2.0) -> float:
    """Return the Mbit/s that a TCP stream carries from one namespace to another, of this address."""
    listener = namespaces.within(receiver, lambda: socket.create_server((address, 0)))
    ended = []

    def sink() -> None:
        connection, _ = listener.accept()
        while connection.recv(1 << 16):
            pass
        connection.close()
        ended.append(time.monotonic())

    thread = threading.Thread(target=sink, daemon=True)
    thread.start()
    with namespaces.within(
        sender, lambda: socket.create_connection(listener.getsockname(), timeout=10)
    ) as out:
        begun, sent, data = time.monotonic(), 0, b"x" * 65_536
        while time.monotonic() - begun < seconds:
            sent += out.send(data)
    thread.join(150)
    listener.close()
    return sent * 8 / (ended[0] - begun) / 1e6


def left(tag: str) -> list[str]:
    """Return the interfaces and namespaces of this machine with this tag in their names."""
    said = [
        subprocess.run(["ip", *what], capture_output=True, text=True, check=True, timeout=30).stdout
        for what in (("-brief", "link"), ("netns", "list"))
    ]
    return [line.split()[0] for text in said for line in text.splitlines() if tag in line]
