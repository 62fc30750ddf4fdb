"""``SessionLog``: what clients tell a daemon of themselves, for whoever asks how the cluster's memory is used."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from math import isfinite
from typing import Any

from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory.blocks import TierMetrics

KEPT = 64  # sessions, the newest ones, those that have ended too

_NAMES = tuple(one.name for one in fields(TierMetrics))


class SessionLog:
    """The newest metrics of each session. Used by one thread."""

    def __init__(self) -> None:
        self._seen: dict[
            str, tuple[str, str, dict[str, float]]
        ] = {}  # connection, client, metrics; oldest first

    def record(self, connection: str, client: str, told: Mapping[str, Any]) -> None:
        """Keep what a client tells.

        Args:
            connection: key of its connection.
            client: what it calls itself.
            told: ``session``, unique to it on all daemons, and the values of ``TierMetrics``.

        Raises ``MemoryTierError`` for anything else.
        """
        session = told.get("session")
        sound = isinstance(session, str) and 1 <= len(session) <= 64
        metrics: dict[str, float] = {name: told[name] for name in _NAMES if _is_count(told.get(name))}
        if not sound or len(metrics) != len(_NAMES):
            raise MemoryTierError(
                "METRICS must have a session of 1 to 64 letters, and numbers that are not negative"
            )
        assert isinstance(session, str)
        self._seen.pop(session, None)
        self._seen[session] = connection, client, metrics
        while len(self._seen) > KEPT:
            del self._seen[next(iter(self._seen))]

    def rows(self, connections: Collection[str]) -> list[dict[str, Any]]:
        """Return the sessions, oldest first.

        Args:
            connections: keys of those that there are now.
        """
        return [
            {"session": session, "client": client, "connected": connection in connections, **metrics}
            for session, (connection, client, metrics) in self._seen.items()
        ]


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value >= 0
