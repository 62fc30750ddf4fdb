"""Peers and messages that a launcher has refused: counted, and told of without letting a peer fill the journal."""

import threading
from dataclasses import dataclass

_QUIET = 30.0  # seconds between two notes of the same peer and reason
_KINDS = 50  # peers and reasons that are told apart; all others are one
_LONGEST = 300  # characters of a reason


@dataclass(frozen=True, slots=True)
class Refusal:
    """One peer that was refused, for one reason, so many times since the last note of it."""

    address: str  # IP address; empty where it is not known
    why: str
    times: int


class Refusals:
    """Counts refusals; ``take`` returns what is to be told now. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[tuple[str, str], int] = {}
        self._told: dict[tuple[str, str], float] = {}
        self.total = 0

    def add(self, address: str, why: str) -> None:
        """Count one refusal."""
        key = address, why[:_LONGEST]
        with self._lock:
            if key not in self._counts and len(self._counts) >= _KINDS:
                key = "", "others"
            self._counts[key] = self._counts.get(key, 0) + 1
            self.total += 1

    def take(self, now: float, *, everything: bool = False) -> list[Refusal]:
        """Return what has come since the last note of the same, at most one each half minute, or ``everything``."""
        found = []
        with self._lock:
            for key, times in self._counts.items():
                told = self._told.get(key)
                if times and (everything or told is None or now - told >= _QUIET):
                    found.append(Refusal(*key, times))
                    self._counts[key], self._told[key] = 0, now
        return found
