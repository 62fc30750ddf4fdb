"""Prices over time, and what a stay costs by them."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Market
from ebbflow.planners.model.fleet import Offer

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Series:
    """Prices of one zone and type: ``prices[i]`` $/h from ``times[i]``, s since the Unix epoch, until the next.

    >>> series = Series((0.0, 1800.0), (1.0, 3.0))
    >>> series.at(1000.0), series.dollars(0.0, 3600.0)
    (1.0, 2.0)
    """

    times: tuple[float, ...]
    prices: tuple[float, ...]

    @classmethod
    def constant(cls, price: float) -> "Series":
        """Return a price, $/h, that never was another."""
        return cls((-inf,), (price,))

    @property
    def last(self) -> float:
        """The newest price, $/h; it holds until another is known."""
        return self.prices[-1]

    def at(self, time: float) -> float:
        """Return the price at ``time``, which must not be before the first."""
        return self.prices[bisect_right(self.times, time) - 1]

    def covers(self, time: float) -> bool:
        """Tell whether there is a price at ``time``."""
        return bool(self.times) and time >= self.times[0]

    def dollars(self, start: float, end: float) -> float:
        """Return what one machine costs from ``start`` until ``end``, both finite: 0 when it ends before it starts.

        Raises ``OptionError`` when ``start`` is before the first price.
        """
        if end <= start:
            return 0.0
        if not self.covers(start) or not isfinite(end):
            first = f"begin at {self.times[0]:.0f}" if self.times else "are none"
            raise OptionError(f"prices {first}; asked for {start:.0f} to {end:.0f} s")
        at = bisect_right(self.times, start) - 1
        total, since = 0.0, start
        for time, price in zip(self.times[at + 1 :], self.prices[at:], strict=False):
            if time >= end:
                break
            total += price * (time - since)
            since, at = time, at + 1
        return (total + self.prices[at] * (end - since)) / HOUR

    def mean(self, start: float, end: float) -> float:
        """Return the mean price, $/h, over a span of time, which must not be empty."""
        return self.dollars(start, end) * HOUR / (end - start)

    def between(self, start: float, end: float) -> "Series":
        """Return the prices that hold at some time of ``start`` to ``end``; may be empty."""
        first = max(bisect_right(self.times, start) - 1, 0)
        last = bisect_right(self.times, end)
        return Series(self.times[first:last], self.prices[first:last])

    def joined(self, newer: "Series") -> "Series":
        """Return both as one; where both name a moment, ``newer`` is right. Repeated prices are left out."""
        found = dict(zip(self.times, self.prices, strict=True))
        found.update(zip(newer.times, newer.prices, strict=True))
        times: list[float] = []
        prices: list[float] = []
        for time in sorted(found):
            if not prices or found[time] != prices[-1]:
                times.append(time)
                prices.append(found[time])
        return Series(tuple(times), tuple(prices))


@dataclass(frozen=True, slots=True)
class Machine:
    """What one instance type has, and its list price."""

    instance_type: str
    cores: int
    memory: float  # GiB
    gpus: int = 0
    on_demand: float | None = None  # $/h; None: not known


def offers_of(
    machines: Iterable[Machine], zones: Mapping[str, Iterable[str]], spot: Mapping[tuple[str, str], float]
) -> tuple[Offer, ...]:
    """Return what can be had: spot where ``spot`` has a price, $/h by (zone, type), and on-demand in all ``zones``.

    ``zones`` is by instance type. Sorted by type, zone and market, spot last; a type without a list price is not
    offered on-demand. Expected interruptions are left at 0: they are learnt elsewhere.
    """
    found: list[Offer] = []
    for machine in machines:
        kind = machine.instance_type
        for zone in set(zones.get(kind, ())):
            both: tuple[tuple[Market, float | None], ...] = (
                ("on-demand", machine.on_demand),
                ("spot", spot.get((zone, kind))),
            )
            found.extend(
                Offer(kind, zone, market, price, machine.cores, machine.memory, machine.gpus)
                for market, price in both
                if price is not None
            )
    return tuple(sorted(found, key=lambda offer: (offer.instance_type, offer.zone, offer.market)))
