"""What a cluster's machines cost, now and before, and what its nodes have cost: for tables and JSON."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ebbflow.infra.aws.fleet.usage import NodeUsage, UsageLog
from ebbflow.infra.errors import InfraError
from ebbflow.infra.protocols import PriceSource
from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.market import Interruption, Place, SpotObservation, with_rates
from ebbflow.planners.fleet.spending import RunCost, UsageInterval, bill
from ebbflow.planners.model.fleet import Offer
from ebbflow.planners.model.prices import HOUR, Series
from ebbflow.tasks.drawing.wording import plural

WEEK = 7 * 86400.0


@dataclass(frozen=True, slots=True)
class OfferRow:
    """One offer of one pool. Prices in dollars per hour."""

    pool: str
    instance_type: str
    zone: str
    market: str
    price: float
    mean: float | None  # of seven days, or as far back as is known
    high: float | None
    on_demand: float | None
    saving: float | None  # against on-demand, a share
    interruptions: float  # expected per node-hour
    useful: float  # per hour that is not lost to interruptions
    cheapest: bool = False  # of the pool, by ``useful``


def offers(
    pool: str,
    found: Sequence[Offer],
    prices: PriceSource,
    book: UsageLog,
    interruption: Interruption,
    now: float,
) -> tuple[list[OfferRow], list[str]]:
    """Return the offers of a pool, the cheapest by useful hour first, and what could not be had.

    On-demand prices are those of a region: they have one row a type.
    """
    once = {(o.instance_type, "" if o.market == "on-demand" else o.zone, o.market): o for o in found}
    rated = with_rates(
        (replace(offer, zone=zone) for (_, zone, _), offer in once.items()), seen_of(book.stays, now)
    )
    listed = {offer.instance_type: offer.price for offer in rated if offer.market == "on-demand"}
    rows, problems = [], []
    for offer in rated:
        mean = high = None
        if offer.market == "spot":
            try:
                mean, high = _week(prices.series(offer.zone, offer.instance_type, now - WEEK), now)
            except InfraError as error:
                problems.append(str(error))
        on_demand = listed.get(offer.instance_type)
        rows.append(
            OfferRow(
                pool,
                offer.instance_type,
                offer.zone,
                offer.market,
                offer.price,
                mean,
                high,
                on_demand,
                1 - offer.price / on_demand if on_demand and offer.market == "spot" else None,
                offer.interruptions,
                offer.price / interruption.useful(offer.interruptions),
            )
        )
    rows.sort(key=lambda row: (row.useful, row.instance_type, row.zone, row.market))
    if rows:
        rows[0] = replace(rows[0], cheapest=True)
    return rows, problems


def _week(series: Series, now: float) -> tuple[float, float]:
    """Return mean and highest price of the last seven days."""
    start = max(now - WEEK, series.times[0])
    if start >= now:
        return series.last, series.last
    return series.mean(start, now), max(series.between(start, now).prices)


def seen_of(stays: Iterable[NodeUsage], now: float) -> dict[Place, SpotObservation]:
    """Return the losses and node-seconds of spot nodes by instance type and zone."""
    found: dict[Place, SpotObservation] = {}
    for stay in stays:
        if stay.spot:
            place = stay.instance_type, stay.zone
            old = found.get(place, SpotObservation(0, 0.0))
            end = now if stay.end is None else stay.end
            found[place] = SpotObservation(
                old.losses + stay.interrupted, old.node_seconds + max(0.0, end - stay.start)
            )
    return found


# --- cost ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CostRow:
    """What one pool has cost, and will if its nodes stay."""

    pool: str
    nodes: int  # that were counted, ended ones too
    bill: RunCost

    def to_json(self) -> dict[str, Any]:
        """Return it as values that JSON has."""
        paid, ahead = self.bill.so_far, self.bill.ahead
        return {
            "pool": self.pool,
            "nodes": self.nodes,
            "dollars": paid.dollars,
            "node_hours": paid.node_hours,
            "free_hours": paid.free_hours,
            "on_demand_dollars": paid.list_dollars,
            "saved": paid.saved,
            "ahead": {
                "hours": ahead.seconds / HOUR,
                "dollars": ahead.expected,
                "least": ahead.least,
                "most": ahead.most,
                "on_demand_dollars": ahead.list_dollars,
            },
        }


@dataclass(frozen=True, slots=True)
class CostReport:
    """What a cluster's nodes cost."""

    cluster: str
    since: float  # seconds since the Unix epoch
    at: float
    pools: tuple[CostRow, ...]
    total: CostRow
    problems: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as values that JSON has."""
        return {
            "cluster": self.cluster,
            "since": self.since,
            "at": self.at,
            "pools": [row.to_json() for row in self.pools],
            "total": self.total.to_json(),
            "problems": list(self.problems),
        }


def cost(cluster: str, book: UsageLog, prices: PriceSource, now: float, seconds: float) -> CostReport:
    """Return what all known nodes have cost until ``now``, and those that are there will in ``seconds`` more.

    A node whose price is not known is left out, and ``problems`` say so.
    """
    series, problems = _series(book.stays, prices)
    listed = {kind: prices.on_demand(kind) for kind in sorted({stay.instance_type for stay in book.stays})}
    problems += prices.problems()

    def priced(stay: NodeUsage) -> bool:
        if not stay.spot:
            return listed[stay.instance_type] is not None
        found = series.get((stay.zone, stay.instance_type))
        return found is not None and found.covers(stay.start)

    known = [stay for stay in book.stays if priced(stay)]
    if left_out := len(book.stays) - len(known):
        problems.append(f"{plural(left_out, 'node')} not counted: there is no price for all of its time")
    if vague := sum(not stay.exact for stay in known):
        problems.append(f"{plural(vague, 'node')} terminated between polls: counted up to the next poll")

    def of(name: str, stays: Sequence[NodeUsage]) -> CostRow:
        found = bill(
            [UsageInterval(stay.node, stay.start, stay.end, stay.interrupted) for stay in stays],
            lambda node: series[node.zone, node.instance_type],
            lambda node: listed[node.instance_type],
            now,
            seconds=seconds,
        )
        return CostRow(name, len(stays), found)

    pools = sorted({stay.pool for stay in known})
    rows = tuple(of(pool or "unassigned", [s for s in known if s.pool == pool]) for pool in pools)
    return CostReport(cluster, book.begin, now, rows, of("all", known), tuple(dict.fromkeys(problems)))


def _series(
    stays: Iterable[NodeUsage], prices: PriceSource
) -> tuple[dict[tuple[str, str], Series], list[str]]:
    """Return the spot prices by zone and type, each from its first stay on, and what could not be had."""
    first: dict[tuple[str, str], float] = {}
    for stay in stays:
        if stay.spot:
            place = stay.zone, stay.instance_type
            first[place] = min(stay.start, first.get(place, stay.start))
    found, problems = {}, []
    for (zone, kind), start in sorted(first.items()):
        try:
            found[zone, kind] = prices.series(zone, kind, start)
        except (InfraError, OptionError) as error:
            problems.append(str(error))
    return found, problems
