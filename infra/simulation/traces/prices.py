"""Spot price history, and what a cluster costs by it. A price holds until the next one of the same zone and type."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.traces.cluster import CapacityChange, Cluster
from ebbflow.infra.simulation.traces.node_traces import presences
from ebbflow.infra.simulation.traces.rows import positive, read_rows, text
from ebbflow.infra.simulation.traces.workloads import nearest
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.prices import Series


@dataclass(frozen=True, slots=True)
class PriceHistory:
    """Prices by (zone, instance type), known from ``start`` to ``end``, s since the Unix epoch."""

    source: str
    series: Mapping[tuple[str, str], Series]
    start: float
    end: float

    def of(self, node: Node) -> Series:
        """Return the prices of a node's zone and type. Raises ``WorkloadError`` where there are none."""
        found = self.series.get((node.zone, node.instance_type))
        if found is None:
            wanted = f"{node.zone or 'no zone'}/{node.instance_type}"
            close = nearest(wanted, (f"{zone}/{kind}" for zone, kind in self.series))
            raise WorkloadError(f"{self.source}: no prices of zone/type {wanted}; the nearest is {close}")
        return found


def moment(field: str) -> float:
    """Return the seconds since the Unix epoch of an ISO 8601 time; UTC without zone."""
    try:
        found = datetime.fromisoformat(field.strip())
    except ValueError:
        raise ValueError(f"must be an ISO 8601 time; got {field.strip()!r}") from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def read_prices(path: Path, *, product: str = "Linux/UNIX") -> PriceHistory:
    """Read ``timestamp,availability_zone,instance_type,product,spot_price_usd_per_hour`` rows in order of time.

    Rows of other products are not those of our nodes and are left out.

    Raises:
        WorkloadError: malformed row, time going back, or no row of ``product``.
    """
    columns = {
        "timestamp": moment,
        "availability_zone": text,
        "instance_type": text,
        "product": text,
        "spot_price_usd_per_hour": positive,
    }
    rows: dict[tuple[str, str], tuple[list[float], list[float]]] = {}
    first, last = inf, -inf
    for line, (at, zone, kind, sold, price) in read_rows(path, columns):
        if at < last:
            raise WorkloadError(f"{path}, line {line}: time goes back")
        last = at
        if sold != product:
            continue
        first = min(first, at)
        times, prices = rows.setdefault((zone, kind), ([], []))
        times.append(at)
        prices.append(price)
    if not rows:
        raise WorkloadError(f"{path}: has no prices of {product}")
    series = {key: Series(tuple(times), tuple(prices)) for key, (times, prices) in rows.items()}
    return PriceHistory(str(path), series, first, last)


def _is_spot(node: Node) -> bool:
    return node.market == "spot"


def first_moment(cluster: Cluster, history: PriceHistory) -> float:
    """Return the earliest time at which every spot node of ``cluster`` has a price."""
    spot = [one.node for one in presences(cluster) if _is_spot(one.node)]
    return max((history.of(node).times[0] for node in spot), default=history.start)


def with_prices(cluster: Cluster, history: PriceHistory, begin: float) -> Cluster:
    """Return ``cluster`` with spot nodes at the market's price; time 0 of the simulation is ``begin``.

    Raises:
        WorkloadError: a spot node's zone or type has no prices, or none as early as it is there.
    """
    moves: dict[tuple[str, str], Series] = {}
    members: dict[tuple[str, str], list[str]] = {}

    def valued(node: Node, at: float) -> Node:
        if not _is_spot(node):
            return node
        series = history.of(node)
        if begin + at < series.times[0]:
            first = datetime.fromtimestamp(series.times[0], UTC)
            raise WorkloadError(
                f"{history.source}: prices of {node.instance_type} in {node.zone} begin at"
                f" {first:%Y-%m-%dT%H:%M:%SZ}, {series.times[0] - begin - at:.0f} s after they are needed"
            )
        key = node.zone, node.instance_type
        moves[key] = series
        members.setdefault(key, []).append(node.id)
        return replace(node, price=series.at(begin + at))

    nodes = tuple(valued(node, 0.0) for node in cluster.nodes)
    changes = [
        replace(change, add=tuple(valued(node, change.at) for node in change.add))
        for change in cluster.changes
    ]
    for key, series in moves.items():
        ids = sorted(set(members[key]))
        for time, price in zip(series.times, series.prices, strict=True):
            if time > begin:
                changes.append(CapacityChange(time - begin, prices=tuple((id_, price) for id_ in ids)))
    changes.sort(key=lambda change: change.at)
    return Cluster(nodes, tuple(_together(changes)))


def _together(changes: list[CapacityChange]) -> list[CapacityChange]:
    """Return ``changes`` with new prices put into the change of their moment, so that one moment is one change."""
    merged: list[CapacityChange] = []
    for change in changes:
        if merged and merged[-1].at == change.at:
            last = merged[-1]
            merged[-1] = CapacityChange(
                last.at,
                last.add + change.add,
                last.remove + change.remove,
                last.notices + change.notices,
                last.prices + change.prices,
            )
        else:
            merged.append(change)
    return merged


def cost(cluster: Cluster, start: float, end: float, price: Callable[[Node], float]) -> float:
    """Return dollars from ``start`` to ``end``, s, of all nodes that are there, at a constant ``price`` $/h each."""
    return sum(
        Series.constant(price(one.node)).dollars(max(one.start, start), min(one.end, end))
        for one in presences(cluster)
    )
