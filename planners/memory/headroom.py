"""How much memory a daemon lends: what the node's own work leaves free above a reserve (Infiniswap)."""

from dataclasses import dataclass
from math import ceil, floor

from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.activity import ExponentialMovingAverage


@dataclass(frozen=True, slots=True)
class MemorySample:
    """A measurement of a node's memory, in bytes.

    Args:
        total: memory, or the limit of the control group.
        used: by all but the daemon's slabs.
    """

    total: int
    used: int


@dataclass(frozen=True, slots=True)
class SlabCounts:
    """Slabs of a daemon.

    Args:
        unmapped: pre-allocated, used by nobody.
        mapped: used by a client.
        evicting: those of the mapped ones whose eviction is under way.
    """

    unmapped: int
    mapped: int
    evicting: int = 0


@dataclass(frozen=True, slots=True)
class Allocate:
    """Pre-allocate ``n`` slabs."""

    n: int


@dataclass(frozen=True, slots=True)
class Release:
    """Release ``n`` unmapped slabs, and decide again: mapped ones may have to follow."""

    n: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Evict ``n`` mapped slabs."""

    n: int


@dataclass(frozen=True, slots=True)
class Hold:
    """Change nothing."""


Action = Allocate | Release | Evict | Hold


def drainable_bytes(bytes_per_second: float, notice_s: float, safety: float = 0.8) -> int:
    """Return how many bytes a node may lend at most so that they leave it between a notice and its end.

    Args:
        bytes_per_second: rate at which the node sends while it drains; at 200 Mbit/s 1 GiB takes 43 s.
        notice_s: seconds from the notice to the end.
        safety: fraction of the notice that may be used, above 0 and at most 1.

    Raises ``OptionError`` for numbers outside their ranges.
    """
    if not bytes_per_second > 0 or not notice_s >= 0 or not 0 < safety <= 1:
        raise OptionError(
            "bytes_per_second must be positive, notice_s not negative, safety above 0 and at most 1; "
            f"not {bytes_per_second}, {notice_s}, {safety}"
        )
    return floor(bytes_per_second * notice_s * safety)


class HeadroomPolicy:
    """Keeps a reserve of free memory for the node's own work: cautious to lend, quick to evict.

    Free memory counts as the smaller of its smoothed and its momentary value, pre-allocated slabs as used. Slabs are
    allocated only where one more than the reserve needs would still fit, so that a slab released is not allocated
    again by the next sample.

    Args:
        slab_bytes: size of a slab.
        headroom_bytes: the reserve (HeadRoom).
        beta: weight of the newest measurement.
        max_lent_bytes: that slabs may take in all (``drainable_bytes``); ``None``: no limit.

    Raises ``OptionError`` for sizes outside their ranges.
    """

    def __init__(
        self, slab_bytes: int, headroom_bytes: int, beta: float = 0.2, max_lent_bytes: int | None = None
    ) -> None:
        if slab_bytes < 1 or headroom_bytes < 0:
            raise OptionError(
                f"slab_bytes must be positive and headroom_bytes not negative, not {slab_bytes} and {headroom_bytes}"
            )
        self.slab_bytes = slab_bytes
        self.headroom_bytes = headroom_bytes
        self._used = ExponentialMovingAverage(beta)
        self._sample = MemorySample(0, 0)
        self.limit(max_lent_bytes)

    def limit(self, max_lent_bytes: int | None) -> None:
        """Set what slabs may take in all; ``None``: no limit. Raises ``OptionError`` for a negative number."""
        if max_lent_bytes is not None and max_lent_bytes < 0:
            raise OptionError(f"max_lent_bytes must not be negative, not {max_lent_bytes}")
        self._max_slabs = None if max_lent_bytes is None else max_lent_bytes // self.slab_bytes

    @property
    def smoothed_used(self) -> float:
        """Return the smoothed bytes used by all but the slabs."""
        return self._used.value

    def free(self, slabs: SlabCounts) -> float:
        """Return the bytes that count as free; negative where slabs and the node's own work need more than it has."""
        used = max(self._used.value, self._sample.used)
        return self._sample.total - used - self.slab_bytes * (slabs.unmapped + slabs.mapped)

    def step(self, sample: MemorySample, slabs: SlabCounts) -> Action:
        """Take a measurement, once per interval, and return what to do.

        Args:
            sample: the measurement.
            slabs: that there are.
        """
        self._sample = sample
        self._used.update(sample.used)
        return self.decide(slabs)

    def decide(self, slabs: SlabCounts) -> Action:
        """Return what to do by the last measurement: again after a release, as slabs are other ones then."""
        lent = slabs.unmapped + slabs.mapped
        surplus = self.free(slabs) - self.headroom_bytes
        excess = 0 if self._max_slabs is None else lent - self._max_slabs
        short = max(ceil(-surplus / self.slab_bytes), excess)
        if short > 0:
            missing = short - slabs.evicting
            if missing > 0 and slabs.unmapped:
                return Release(min(missing, slabs.unmapped))
            victims = min(missing, slabs.mapped - slabs.evicting)
            return Evict(victims) if victims > 0 else Hold()
        if surplus < 2 * self.slab_bytes:
            return Hold()
        room = floor(surplus / self.slab_bytes)
        room = room if self._max_slabs is None else min(room, -excess)
        return Allocate(room) if room > 0 else Hold()
