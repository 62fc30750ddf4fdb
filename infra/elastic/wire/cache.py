"""Per process: cached parameters with their tags, and the increments that have not been sent yet."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ebbflow.infra.elastic.application import Key, Value
from ebbflow.planners.elastic.causality import is_hit

Combine = Callable[[Key, Value, Value], Value]
Increments = dict[
    tuple[Key, int], Value
]  # by key and version of the task; the version is 0 unless reads are isolated


@dataclass(slots=True)
class Entry:
    """A value and the version of the task it was fetched for."""

    value: Value
    tag: int


class ParameterCache:
    """Values that tasks may use again (Litz, section 3.3); tags never decrease."""

    def __init__(self) -> None:
        self._entries: dict[Key, Entry] = {}

    def missing(self, keys: Iterable[Key], version: int) -> list[Key]:
        """Return those of ``keys`` that a task of ``version`` has to fetch."""
        return [
            key
            for key in dict.fromkeys(keys)
            if (entry := self._entries.get(key)) is None or not is_hit(version, entry.tag)
        ]

    def value(self, key: Key) -> Value:
        """Return the cached value; the caller has checked that it may be used."""
        return self._entries[key].value

    def tag(self, key: Key) -> int | None:
        """Return the tag of ``key``; ``None`` if it is not cached."""
        return entry.tag if (entry := self._entries.get(key)) else None

    def store(self, key: Key, value: Value, version: int) -> None:
        """Take a server's answer to a request for ``version``, unless a newer one is here already."""
        entry = self._entries.get(key)
        if entry is None or version >= entry.tag:
            self._entries[key] = Entry(_read_only(value), version)

    def fold(self, increments: Increments, combine: Combine) -> None:
        """Add increments that are being sent, so that a process's own updates do not vanish from its cache.

        Only when they are sent, not when they are acknowledged: a value fetched in between has them already.
        """
        for (key, _), increment in increments.items():
            if entry := self._entries.get(key):
                entry.value = _read_only(combine(key, entry.value, increment))

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()


def _read_only(value: Value) -> Any:
    if isinstance(value, np.ndarray) and value.flags.writeable:
        value = value.view()
        value.flags.writeable = False
    return value


class UpdateLog:
    """Increments of one process, combined by key until they are sent (Litz, section 3.3)."""

    def __init__(self, combine: Combine, isolated: bool) -> None:
        self._combine = combine
        self._isolated = isolated
        self._increments: Increments = {}

    def __bool__(self) -> bool:
        return bool(self._increments)

    def add(self, key: Key, increment: Value, version: int) -> None:
        """Combine an increment of a task of ``version`` with what is here."""
        place = (key, version if self._isolated else 0)
        if place in self._increments:
            increment = self._combine(key, self._increments[place], increment)
        self._increments[place] = increment

    def take(self) -> Increments:
        """Return everything and start from scratch."""
        taken, self._increments = self._increments, {}
        return taken
