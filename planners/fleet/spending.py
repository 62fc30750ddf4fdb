"""What a job or a pool has cost, and what it will have cost when it ends.

Rules applied (Amazon EC2 User Guide, Billing for interrupted Spot Instances; per-second billing, October 2017), for
Linux without a distribution's own hourly charge: a node is billed from its start to its end by the second, 60 s at
least; a spot node at the spot price of its zone and type, which may change while it runs; and a spot node that EC2
itself interrupts within the first hour costs nothing. Ended by its owner, it costs what it ran. Volumes, addresses
and traffic are not counted.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf, isfinite

import numpy as np
from numpy.typing import NDArray

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.prices import HOUR, Series

LEAST = 60.0
"""Seconds that are billed at least for each start of a node."""
FREE = HOUR
"""Seconds within which an interruption by EC2 makes a spot node free."""

PricesOf = Callable[[Node], Series]
"""The spot prices of a node's zone and type, from its start on."""
ListOf = Callable[[Node], float | None]
"""The on-demand price of a node's type, $/h; None where it is not known."""


@dataclass(frozen=True, slots=True)
class UsageInterval:
    """A node that is rented from ``start``, s since the Unix epoch, until ``end``; None: it is there yet."""

    node: Node
    start: float
    end: float | None = None
    interrupted: bool = False  # EC2 took it back; false: it was ended by its owner
    part: float = 1.0  # of the node that the job had, 0 to 1: what is asked for of a shared node

    def __post_init__(self) -> None:
        if self.end is not None and not self.end >= self.start:
            raise OptionError(f"{self.node.id}: end must not be before start; got {self.start}, {self.end}")
        if not 0 <= self.part <= 1:
            raise OptionError(f"{self.node.id}: part must be 0 to 1; got {self.part}")

    def free(self, now: float) -> bool:
        """Tell whether an interruption, which is over by ``now``, came so soon that nothing is billed."""
        return (
            self.node.market == "spot"
            and self.interrupted
            and self.end is not None
            and self.end <= now
            and self.end - self.start < FREE
        )

    def until(self, now: float) -> float:
        """Return the moment up to which is billed, ``now`` being the latest that anything is known of."""
        end = now if self.end is None else min(self.end, now)
        return max(end, self.start + LEAST) if now >= self.start else self.start


@dataclass(frozen=True, slots=True)
class Cost:
    """Dollars of some stays over a span of time."""

    dollars: float = 0.0
    list_dollars: float | None = 0.0  # the same time at list prices; None: one of them is not known
    node_hours: float = 0.0  # billed
    free_hours: float = 0.0  # not billed, for EC2 interrupted within the first hour

    def plus(self, other: "Cost") -> "Cost":
        """Return both together."""
        known = None
        if self.list_dollars is not None and other.list_dollars is not None:
            known = self.list_dollars + other.list_dollars
        return Cost(
            self.dollars + other.dollars,
            known,
            self.node_hours + other.node_hours,
            self.free_hours + other.free_hours,
        )

    @property
    def saved(self) -> float | None:
        """Return the share of the list price that was saved; None where that is not known or 0."""
        if not self.list_dollars:
            return None
        return 1 - self.dollars / self.list_dollars


def spent(stays: Iterable[UsageInterval], prices: PricesOf, listed: ListOf, now: float) -> Cost:
    """Return what ``stays`` cost until ``now``.

    An on-demand node costs its list price; ``node.price`` stands in where that is not known. Raises ``OptionError``
    when prices begin after a node's start, and for a node without any price.
    """
    total = Cost()
    for stay in stays:
        total = total.plus(_cost(stay, prices, listed, now))
    return total


def _cost(stay: UsageInterval, prices: PricesOf, listed: ListOf, now: float) -> Cost:
    until = stay.until(now)
    hours = (until - stay.start) / HOUR * stay.part
    rate = listed(stay.node)
    at_list = None if rate is None else rate * hours
    if stay.free(now):
        return Cost(0.0, at_list, 0.0, hours)
    if stay.node.market == "spot":
        return Cost(prices(stay.node).dollars(stay.start, until) * stay.part, at_list, hours)
    dollars = _flat(stay.node, rate) * hours
    return Cost(dollars, dollars, hours)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What some nodes will cost from now on."""

    expected: float  # dollars
    least: float  # dollars, at the lowest mean price over as long a time that the history knows
    most: float  # dollars, at the highest
    list_dollars: float | None  # the same time on-demand; None: a list price is not known
    seconds: float


def forecast(
    stays: Iterable[UsageInterval], prices: PricesOf, listed: ListOf, now: float, seconds: float
) -> Forecast:
    """Return what those of ``stays`` that are there at ``now`` will cost for ``seconds`` more.

    Expected is the present price held. The range is that of mean prices over all windows of this length in the known
    history (all of it where it is shorter), the present price included. It is ours, and no confidence interval: a
    price that never was is not in it. Raises ``OptionError``.
    """
    if not (seconds >= 0 and isfinite(seconds)):
        raise OptionError(f"seconds must be >= 0; got {seconds}")
    expected = least = most = 0.0
    at_list: float | None = 0.0
    for stay in stays:
        if not stay.start <= now < (inf if stay.end is None else stay.end):
            continue
        hours = seconds / HOUR * stay.part
        rate = listed(stay.node)
        at_list = None if rate is None or at_list is None else at_list + rate * hours
        if stay.node.market == "spot":
            series = prices(stay.node)
            price = series.at(now)
            low, high = extremes(series, now, seconds)
        else:
            price = low = high = _flat(stay.node, rate)
        expected += price * hours
        least += low * hours
        most += high * hours
    return Forecast(expected, least, most, at_list, seconds)


def extremes(series: Series, now: float, seconds: float) -> tuple[float, float]:
    """Return the lowest and highest mean price, $/h, of windows of ``seconds`` until ``now``, and of the price now.

    The mean of a step function over a sliding window is piecewise linear in where the window begins, so its extremes
    are at windows that begin or end with a change.
    """
    price = series.at(now)
    first = series.times[0]
    if not isfinite(first) or now <= first:
        return price, price
    long = min(seconds, now - first)
    known = series.between(first, now)
    times, values = np.array(known.times), np.array(known.prices)
    if long <= 0:
        return float(values.min()), float(values.max())
    begun = np.concatenate((times, times - long, [now - long]))
    begun = begun[(begun >= first) & (begun <= now - long)]
    paid = np.concatenate(([0.0], np.cumsum(values[:-1] * np.diff(times))))

    def until(moments: NDArray[np.float64]) -> NDArray[np.float64]:
        at = np.searchsorted(times, moments, side="right") - 1
        return np.asarray(paid[at] + values[at] * (moments - times[at]))

    means = (until(begun + long) - until(begun)) / long
    return min(float(means.min()), price), max(float(means.max()), price)


def _flat(node: Node, rate: float | None) -> float:
    """Return the price of an on-demand node, $/h."""
    price = node.price if rate is None else rate
    if not (price > 0 and isfinite(price)):
        raise OptionError(f"{node.id}: the on-demand price of {node.instance_type} is not known")
    return price


@dataclass(frozen=True, slots=True)
class RunCost:
    """What a run has cost and will have cost."""

    so_far: Cost
    ahead: Forecast

    @property
    def dollars(self) -> float:
        """Return the expected total."""
        return self.so_far.dollars + self.ahead.expected

    @property
    def on_demand(self) -> float | None:
        """Return the total at list prices; None where one is not known."""
        if self.so_far.list_dollars is None or self.ahead.list_dollars is None:
            return None
        return self.so_far.list_dollars + self.ahead.list_dollars

    def __str__(self) -> str:
        paid, listed = self.so_far.dollars, self.on_demand
        against = "on-demand prices are not known" if listed is None else f"${listed:.2f} on-demand"
        return (
            f"${paid:.2f} so far for {self.so_far.node_hours:.4g} node-hours; ${self.dollars:.2f} in all expected"
            f" (${paid + self.ahead.least:.2f} to ${paid + self.ahead.most:.2f} by past prices); {against}"
        )


def bill(
    stays: Iterable[UsageInterval], prices: PricesOf, listed: ListOf, now: float, *, seconds: float = 0.0
) -> RunCost:
    """Return what a run has cost and will cost, if its nodes that are there stay ``seconds`` more."""
    stays = tuple(stays)
    return RunCost(spent(stays, prices, listed, now), forecast(stays, prices, listed, now, seconds))
