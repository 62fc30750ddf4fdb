"""What is asked of daemons beside blocks: what they lend to whom, and to drain."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory import protocol
from ebbflow.infra.memory.hosting import ask
from ebbflow.infra.memory.peer import PeerAddress, PeerLink
from ebbflow.infra.memory.protocol import Frame, Kind

_END = 20.0  # s, beyond the time for clients, for a daemon to close its connections
_POLL = 0.05  # s between looks for that


def status(address: PeerAddress, token: bytes) -> dict[str, Any]:
    """Return what a daemon lends and what has happened. Raises ``MemoryTierError`` where it does not tell."""
    with _connected(address, token) as link:
        return protocol.unpack_json(_answer(link, Frame(Kind.STATUS), Kind.REPORT).payload)


def drain(address: PeerAddress, token: bytes, within: float, clock: Clock) -> None:
    """Have all clients of a daemon leave it, and wait until it has ended.

    Args:
        address: of the daemon.
        token: of the cluster.
        within: seconds for clients; slabs that are not released by then go with their connections.
        clock: of the wait.

    Raises ``MemoryTierError`` where it does not answer, or does not end.
    """
    with _connected(address, token) as link:
        _answer(link, Frame(Kind.DRAIN, size=int(within * 1000.0)), Kind.ACK)
        end = clock.now() + within + _END
        while not link.ended:
            if clock.now() > end:
                raise MemoryTierError(f"{address.name} has not ended within {within + _END:g} s")
            clock.sleep(_POLL)


@contextmanager
def _connected(address: PeerAddress, token: bytes) -> Iterator[PeerLink]:
    link = PeerLink(
        address, token, f"control by process {os.getpid()}", lambda peer, frame: None, lambda peer: None
    )
    try:
        yield link
    finally:
        link.close()


def _answer(link: PeerLink, frame: Frame, kind: Kind) -> Frame:
    answer = ask(link, frame)
    if answer is None or answer.kind != kind:
        why = "" if answer is None else f": {bytes(answer.payload).decode(errors='replace')}"
        raise MemoryTierError(f"{link.name} has not answered {frame.kind.name} with {kind.name}{why}")
    return answer
