"""How fast a loop is, in memory that does not grow."""

import resource
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_KEPT = 4096  # newest latencies


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile of ``values``; ``None`` of none. ``share`` is from 0 to 1."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1e6) * len(ordered) // 1_000_000) - 1))]


@dataclass
class LoopMetrics:
    """Counts since the loop began, and times of the newest changes and cycles."""

    cycles: int = 0
    written: int = 0  # cycles that changed something
    changes: int = 0  # that were seen
    dropped: int = 0  # decisions for capacity that had moved on
    rested: int = 0  # cycles put off because the last took longer than the interval
    outages: int = 0  # of the ledger
    away: float = 0.0  # s in them
    answered: int = -1  # revision of the source that the last decision rests on
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))  # s, change seen -> written
    deciding: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))  # s of ``decide``

    def saw(self, stamps: Sequence[float], now: float) -> None:
        """Note that what was seen at ``stamps`` has been answered ``now``."""
        self.changes += len(stamps)
        self.latencies.extend(max(0.0, now - stamp) for stamp in stamps)

    def to_dict(self) -> Mapping[str, Any]:
        """Return plain JSON; seconds are rounded to tenths of a millisecond."""
        latencies, deciding = list(self.latencies), list(self.deciding)
        return {
            "cycles": self.cycles,
            "written": self.written,
            "changes": self.changes,
            "dropped": self.dropped,
            "rested": self.rested,
            "outages": self.outages,
            "away_s": round(self.away, 1),
            "latency_s": _summary(latencies),
            "deciding_s": _summary(deciding),
            "memory_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        }


def _summary(values: Sequence[float]) -> Mapping[str, float | None]:
    return {
        name: None if (found := percentile(values, share)) is None else round(found, 4)
        for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99), ("worst", 1.0))
    }
