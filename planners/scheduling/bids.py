"""Bid tables: what ρ would be with more GPUs, one row per number and locality instead of one per subset.

Themis (NSDI 2020, section 5.2) lets an app list every subset of the offer. Since ρ depends on a subset only through
its size and the level that encloses it together with what is held, O(levels · demand) rows say the same.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import NamedTuple

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity
from ebbflow.planners.model.scheduling import Bidder, Placement, gpus_of
from ebbflow.planners.scheduling.locality import Array, Level, TableBidder

NARROW_FIRST = (Level.MACHINE, Level.RACK, Level.CLUSTER)


@dataclass(frozen=True, eq=False)
class Offer:
    """Free GPUs by machine. Machines are numbered in the order of ``nodes``, racks by first appearance."""

    nodes: tuple[str, ...]
    free: Array  # GPUs, by machine
    rack: Array  # its rack's number, by machine

    def __post_init__(self) -> None:
        if not len(self.nodes) == len(self.free) == len(self.rack):
            raise OptionError("an offer needs one free count and one rack for each node")
        if np.any(np.asarray(self.free) < 0):
            raise OptionError(f"free GPUs must be >= 0; got {int(np.min(self.free))}")

    @classmethod
    def of(cls, capacity: Capacity, used: Mapping[str, int], skip: frozenset[str] = frozenset()) -> "Offer":
        """Return what is free on nodes not in ``skip``, in the order of ``capacity``."""
        nodes = [n for n in capacity.nodes if n.gpus > 0 and n.id not in skip]
        racks: dict[str, int] = {}
        numbers = [racks.setdefault(n.rack, len(racks)) for n in nodes]
        free = [max(n.gpus - used.get(n.id, 0), 0) for n in nodes]
        return cls(tuple(n.id for n in nodes), np.array(free, int), np.array(numbers, int))

    @cached_property
    def total(self) -> int:
        return int(self.free.sum())

    @cached_property
    def rack_free(self) -> Array:
        """Return free GPUs by rack."""
        return np.bincount(self.rack, weights=self.free).astype(int) if len(self.rack) else np.zeros(0, int)

    @cached_property
    def index(self) -> dict[str, int]:
        return {node: i for i, node in enumerate(self.nodes)}


class BidRow(NamedTuple):
    """ρ after winning ``gpus`` inside one unit of ``level``; ``anchor`` is that unit if it must be a given one."""

    gpus: int
    level: Level
    anchor: int  # number of a machine or rack of the offer, -1: any
    rho: float


@dataclass(frozen=True, eq=False)
class BidTable:
    """One app's rows as columns; row 0 is winning nothing. Fewer GPUs come first, narrower levels before looser."""

    app: str
    gpus: Array
    level: Array
    anchor: Array
    rho: Array

    def __post_init__(self) -> None:
        if not len(self.gpus) or self.gpus[0] != 0:
            raise OptionError(f"the bid table of {self.app!r} must begin with the row of no GPUs")
        if not np.all(np.isfinite(self.rho) & (self.rho > 0)):
            raise OptionError(f"every rho of the bid table of {self.app!r} must be finite and > 0")
        for level in np.unique(self.level):
            if len(np.unique(self.anchor[(self.level == level) & (self.gpus > 0)])) > 1:
                raise OptionError(f"the bid table of {self.app!r} has several anchors at one level")

    @property
    def rows(self) -> tuple[BidRow, ...]:
        """Return the rows as values, the first of which wins nothing."""
        columns = zip(self.gpus, self.level, self.anchor, self.rho, strict=True)
        return tuple(BidRow(int(g), Level(int(lv)), int(a), float(r)) for g, lv, a, r in columns)

    @classmethod
    def of(cls, app: str, rows: list[BidRow] | tuple[BidRow, ...]) -> "BidTable":
        """Return the table of ``rows``, the first of which wins nothing."""
        gpus, level, anchor = (np.array([row[k] for row in rows], int) for k in range(3))
        return cls(app, gpus, level, anchor, np.array([row.rho for row in rows], float))

    def scaled(self, factor: float) -> "BidTable":
        """Return the table with every ρ multiplied by ``factor``."""
        return BidTable(self.app, self.gpus, self.level, self.anchor, self.rho * factor)


def prepare_bid(
    app: str,
    bidder: Bidder,
    offer: Offer,
    capacity: Capacity,
    now: float,
    *,
    max_gpus: int,
    min_gpus: int = 1,
    held: Placement = (),
    kappa: float = 2.0,
) -> BidTable | None:
    """Return the pruned table of an app that holds ``held`` under lasting leases; ``None`` when nothing helps it.

    An app that holds nothing has no finite ρ. It is taken as ``kappa`` times ρ on one GPU, which keeps -ln ρ concave
    for kappa >= 2 and serves the starving first; of a gang of m GPUs as kappa · m · ρ on m.
    """
    has = gpus_of(held)
    most = min(max_gpus - has, offer.total)
    least = max(min_gpus - has, 1)
    if most < least:
        return None
    anchors, limits = _reach(offer, held)
    counts = np.arange(most + 1)
    grid = np.full((3, most + 1), inf)
    for narrowness, level in enumerate(NARROW_FIRST):
        fits = (counts >= least) & (counts <= limits[narrowness])
        if level is not Level.MACHINE and not held:
            fits &= counts >= 2  # a single GPU is never spread
            fits &= np.count_nonzero(offer.free if level is Level.RACK else offer.rack_free) > 1
        if fits.any():
            anchor = anchors[narrowness]
            grid[narrowness, fits] = _ask(bidder, offer, capacity, now, held, level, anchor, counts[fits])
    start = bidder.rho(held, capacity, now) if has >= max(min_gpus, 1) else inf
    finite = np.flatnonzero(np.isfinite(grid).any(axis=0))
    if not finite.size:
        return None
    if not np.isfinite(start):
        first = int(finite[0])
        start = kappa * (first + has) * float(grid[:, first].min())
    grid[2, 0] = start
    grid = np.maximum(grid, 1e-12)  # an app that has nothing left to do
    kept = prune_dominated(grid)
    # one pass in order of GPUs, then narrower levels: the transposed grid read row by row
    wins, number = np.nonzero(kept.T)
    if len(wins) == 1:
        return None
    return BidTable(app, wins, number + 1, np.asarray(anchors)[number], grid[number, wins])


def prune_dominated(grid: Array) -> Array:
    """Tell which cells to keep of ρ by (level narrow to loose, GPUs); infinity means no such row.

    A cell goes when another has no more GPUs, an equal or looser level and no larger ρ. Column 0 counts as loosest.
    """
    loosest_first = np.minimum.accumulate(grid[::-1], axis=0)[::-1]  # min over equal or looser levels
    best = np.minimum.accumulate(loosest_first, axis=1)
    before = np.full_like(grid, inf)
    before[:, 1:] = best[:, :-1]  # fewer GPUs
    before[:-1] = np.minimum(before[:-1], best[1:])  # as many at a looser level
    return np.isfinite(grid) & (grid < before)


def _reach(offer: Offer, held: Placement) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the anchor and the most GPUs for each level: inside one machine, one rack, anywhere."""
    if not offer.total:
        return (-1, -1, -1), (0, 0, 0)
    anywhere = offer.total
    if not held:
        return (-1, -1, -1), (int(offer.free.max()), int(offer.rack_free.max()), anywhere)
    machines = [offer.index.get(node, -1) for node, _ in held]
    racks = {int(offer.rack[m]) if m >= 0 else -1 for m in machines}
    one_machine, one_rack = len(machines) == 1 and machines[0] >= 0, len(racks) == 1 and -1 not in racks
    machine = machines[0] if one_machine else -1
    rack = next(iter(racks)) if one_rack else -1
    inside = int(offer.free[machine]) if one_machine else 0
    return (machine, rack, -1), (inside, int(offer.rack_free[rack]) if one_rack else 0, anywhere)


def _ask(
    bidder: Bidder,
    offer: Offer,
    capacity: Capacity,
    now: float,
    held: Placement,
    level: Level,
    anchor: int,
    counts: Array,
) -> Array:
    """Return ρ of ``held`` with each of ``counts`` GPUs more at ``level``."""
    has = gpus_of(held)
    if isinstance(bidder, TableBidder):
        totals = counts + has
        levels = np.where(totals == 1, int(Level.SLOT), int(level))
        return np.asarray(bidder.rho_at(totals, levels, now), float)
    return np.array(
        [bidder.rho(_example(offer, held, level, anchor, int(c)), capacity, now) for c in counts], float
    )


def _example(offer: Offer, held: Placement, level: Level, anchor: int, count: int) -> Placement:
    """Return ``held`` and ``count`` GPUs of the offer at ``level``, spread as widely inside it as they can be."""
    free, rack = offer.free, offer.rack
    if level is Level.MACHINE:
        order = np.array([anchor if anchor >= 0 else int(np.argmax(free))])
    elif level is Level.RACK:
        order = np.flatnonzero(rack == (anchor if anchor >= 0 else int(offer.rack_free.argmax())))
    else:
        order = np.arange(len(free))
    seen: dict[int, int] = {}
    turn = np.empty(len(order), int)  # which machine of its rack it is: racks take turns
    for position, machine in enumerate(order):
        turn[position] = seen[int(rack[machine])] = seen.get(int(rack[machine]), -1) + 1
    order = order[np.argsort(turn, kind="stable")]
    here = {offer.index[node] for node, _ in held if node in offer.index}
    order = np.array([*(m for m in order if m not in here), *(m for m in order if m in here)], int)
    taken = np.zeros(len(order), int)
    while count > 0:
        room = np.flatnonzero(taken < free[order])[:count]
        taken[room] += 1
        count -= len(room)
    merged = dict(held)
    for machine, number in zip(order, taken, strict=True):
        if number:
            node = offer.nodes[int(machine)]
            merged[node] = merged.get(node, 0) + int(number)
    return tuple(merged.items())
