"""Ports that are free and stay so until they are used: none of those that the system gives to who asks for any."""

import random
import socket
from contextlib import suppress
from pathlib import Path

_LOWEST = 10_000
_GIVEN = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "127.0.0.1") -> int:
    """Return a TCP port of ``host`` on which nothing listens."""
    end = int(_GIVEN.read_text().split()[0])
    ports = random.SystemRandom()  # other parts of the suite choose theirs at the same time
    while True:
        port = ports.randrange(_LOWEST, end)
        with suppress(OSError), socket.socket() as probe:
            probe.bind((host, port))
            return port
