"""What bytes cost in a tier of memory or storage, and whether peers' memory is worth using (Infiniswap)."""

from dataclasses import dataclass
from math import inf, isfinite

from ebbflow.planners.errors import OptionError


@dataclass(frozen=True, slots=True)
class Tier:
    """A place for data, as measured.

    Args:
        name: such as ``peer memory``.
        latency_s: seconds to the first byte of a request.
        bytes_per_second: after it.

    Raises ``OptionError`` for a negative latency or a bandwidth that is not positive.
    """

    name: str
    latency_s: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not (isfinite(self.latency_s) and self.latency_s >= 0 and self.bytes_per_second > 0):
            raise OptionError(
                f"tier {self.name}: latency_s must not be negative and bytes_per_second must be positive; "
                f"not {self.latency_s} and {self.bytes_per_second}"
            )


def tier_cost(size: float, tier: Tier, requests: int = 1) -> float:
    """Return the seconds to read or write bytes in a tier, one request after the other.

    Args:
        size: bytes.
        tier: in which they are.
        requests: over which they are spread.

    Raises ``OptionError`` for negative numbers.
    """
    if not size >= 0 or requests < 0:
        raise OptionError(f"size and requests must not be negative, not {size} and {requests}")
    return requests * tier.latency_s + size / tier.bytes_per_second


def written_through(front: Tier, behind: Tier) -> Tier:
    """Return the tier of data that is written to one tier and read from another in front of it.

    A write and a read of some bytes take together what they take in the two tiers.

    Args:
        front: which is read.
        behind: which must have what is written.
    """
    return Tier(
        front.name,
        (front.latency_s + behind.latency_s) / 2,
        2 / (1 / front.bytes_per_second + 1 / behind.bytes_per_second),
    )


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Sizes of a request between which one tier takes less time than another.

    Args:
        above_bytes: requests must be larger.
        below_bytes: requests must be smaller; infinite: there is no limit.
    """

    above_bytes: float
    below_bytes: float

    @property
    def never(self) -> bool:
        """Tell whether no size qualifies."""
        return self.above_bytes >= self.below_bytes

    def includes(self, size: float) -> bool:
        """Tell whether a request of a size takes less time."""
        return self.above_bytes < size < self.below_bytes


def break_even_block(peer: Tier, behind: Tier) -> BreakEven:
    """Return the sizes of a request for which a tier takes less time than the one behind it.

    Args:
        peer: the tier in front.
        behind: the tier behind.
    """
    start = peer.latency_s - behind.latency_s
    rate = 1 / peer.bytes_per_second - 1 / behind.bytes_per_second  # seconds lost per byte
    if rate == 0:
        return BreakEven(0.0, inf) if start < 0 else BreakEven(inf, inf)
    crossing = -start / rate
    if rate < 0:
        return BreakEven(max(crossing, 0.0), inf)
    return BreakEven(0.0, max(crossing, 0.0))


@dataclass(frozen=True, slots=True)
class TierDecision:
    """Whether a tier is used.

    Args:
        enabled: whether it is.
        reason: in words, with the times compared.
    """

    enabled: bool
    reason: str


def peer_tier_enabled(peer: Tier, behind: Tier, block_bytes: int, min_gain: float = 1.0) -> TierDecision:
    """Decide whether requests go to peers' memory before the tier behind it.

    Args:
        peer: peers' memory, as measured.
        behind: the store or local disk behind it, as measured.
        block_bytes: size of a request.
        min_gain: time behind over time at peers that must be exceeded, at least 1: what is gained must also pay for
            misses and evictions.

    Raises ``OptionError`` for numbers outside their ranges.
    """
    if block_bytes < 1 or not min_gain >= 1:
        raise OptionError(
            f"block_bytes must be positive and min_gain at least 1, not {block_bytes} and {min_gain}"
        )
    here, there = tier_cost(block_bytes, peer), tier_cost(block_bytes, behind)
    gain = there / here if here else inf
    request = f"a request of {_size(block_bytes)}"
    times = f"{request} takes {_time(here)} in {peer.name} and {_time(there)} in {behind.name}"
    limits = break_even_block(peer, behind)
    sizes = [f"above {_size(limits.above_bytes)}"] if limits.above_bytes else []
    sizes += [f"below {_size(limits.below_bytes)}"] if isfinite(limits.below_bytes) else []
    worth = f"; requests {' and '.join(sizes)} take less time" if sizes else ""
    if gain > min_gain:
        return TierDecision(True, f"{times}: {gain:.1f} times as fast{worth}")
    rule = f"it must be more than {min_gain:g} times as fast"
    if limits.never:
        return TierDecision(False, f"{times}: {rule}, and no size of a request is")
    return TierDecision(False, f"{times}: {rule}{worth}")


def network_cost_per_month(
    adapter_w: float = 8.41,
    switch_w: float = 231.0,
    machines_per_switch: int = 32,
    opex_per_w: float = 0.04,
    price_per_kwh: float = 0.067,
    pue: float = 1.1,
    hours: float = 720.0,
) -> float:
    """Return what a fast network costs per machine and month, without its purchase (Infiniswap, Table 2.2).

    Args:
        adapter_w: watts of a machine's network adapter.
        switch_w: watts of a switch.
        machines_per_switch: at least 1.
        opex_per_w: dollars of the data center's operation per watt and month.
        price_per_kwh: dollars of electricity.
        pue: power of the data center over that of its machines.
        hours: of a month.

    Raises ``OptionError`` for fewer than one machine.
    """
    if machines_per_switch < 1:
        raise OptionError(f"machines_per_switch must be at least 1, not {machines_per_switch}")
    watts = adapter_w + switch_w / machines_per_switch
    return watts * opex_per_w + watts / 1000 * hours * price_per_kwh * pue


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.3g} {unit}"


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
