"""Small auctions whose optimum can be found by trying everything, and tables written by hand."""

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from math import inf, log

import numpy as np
from hypothesis import strategies as st

from ebbflow.planners.model.capacity import Capacity, Node
from ebbflow.planners.scheduling.bids import BidTable, Offer, prepare_bid
from ebbflow.planners.scheduling.finish_time import Job, SingleJob
from ebbflow.planners.scheduling.locality import Level, Slowdown


def capacity(gpus: Sequence[int], racks: Sequence[int]) -> Capacity:
    """Return nodes m0, m1, ... in racks r0, ..."""
    return Capacity(
        0,
        tuple(
            Node(f"m{i}", 8, 1.0, rack=f"r{r}", gpus=g)
            for i, (g, r) in enumerate(zip(gpus, racks, strict=True))
        ),
    )


def flat(gpus: int) -> Offer:
    """Return one machine, so that placement does not matter."""
    return Offer(("m0",), np.array([gpus]), np.array([0]))


def plain(app: str, rhos: Mapping[int, float]) -> BidTable:
    """Return a table of ρ by number of GPUs wherever they are."""
    gpus = np.array(list(rhos))
    where = np.full(len(gpus), int(Level.CLUSTER))
    return BidTable(app, gpus, where, np.full(len(gpus), -1), np.array(list(rhos.values()), float))


def linear(app: str, elapsed: float, work: float, demand: int, gpus: int, kappa: float = 2.0) -> BidTable:
    """Return ρ(g) = elapsed + work / min(g, demand), κ·ρ(1) for nothing."""
    rhos = {g: elapsed + work / g for g in range(1, min(demand, gpus) + 1)}
    return plain(app, {0: kappa * rhos[1], **rhos})


def job(
    demand: int, left: float = 100.0, slowdown: Slowdown | None = None, arrival: float = 0.0
) -> SingleJob:
    """Return an app of one job of `left` iterations of a second on one GPU, on a cluster of 16 GPUs."""
    work = Job(left, 1.0, demand, slowdown or Slowdown())
    return SingleJob(arrival=arrival, cluster_gpus=16, n_avg=2.0, job=work, iterations_total=left)


def satisfied(offer: Offer, table: BidTable, taken: Sequence[int]) -> float:
    """Return the smallest ρ of the rows that a bundle (GPUs by machine) satisfies."""
    best = inf
    used = [m for m, g in enumerate(taken) if g]
    by_rack = np.bincount(offer.rack, weights=taken, minlength=len(offer.rack_free))
    for row in table.rows:
        if row.gpus == 0 or row.level == Level.CLUSTER:
            most = sum(taken)
        elif row.level == Level.RACK:
            most = by_rack[row.anchor] if row.anchor >= 0 else by_rack.max()
        else:
            most = taken[row.anchor] if row.anchor >= 0 else max((taken[m] for m in used), default=0)
        if row.gpus <= most:
            best = min(best, row.rho)
    return best


def best_value(offer: Offer, tables: Sequence[BidTable]) -> float:
    """Return the optimal Σ ln(ρ of nothing / ρ) by trying every bundle for every app."""
    bundles = list(product(*(range(int(f) + 1) for f in offer.free)))
    worth = [{b: log(t.rho[0] / satisfied(offer, t, b)) for b in bundles} for t in tables]

    @cache
    def best(app: int, free: tuple[int, ...]) -> float:
        if app == len(tables):
            return 0.0
        return max(
            worth[app][taken] + best(app + 1, tuple(f - t for f, t in zip(free, taken, strict=True)))
            for taken in product(*(range(f + 1) for f in free))
        )

    return best(0, tuple(int(f) for f in offer.free))


@st.composite
def worlds(draw: st.DrawFn, apps: int = 4, gpus: int = 8) -> tuple[Offer, list[BidTable]]:
    """Draw an offer of at most ``gpus`` GPUs on at most four machines and at most ``apps`` tables."""
    count = draw(st.integers(1, 4))
    racks = [0, *(draw(st.integers(0, 2)) for _ in range(count - 1))]
    order = {r: i for i, r in enumerate(dict.fromkeys(racks))}
    room, free = gpus, []
    for _ in range(count):
        free.append(draw(st.integers(0, min(4, room))))
        room -= free[-1]
    offer = Offer(tuple(f"m{i}" for i in range(count)), np.array(free), np.array([order[r] for r in racks]))
    nodes = capacity([8] * count, [order[r] for r in racks])
    tables = []
    for number in range(draw(st.integers(1, apps))):
        rack = draw(st.floats(1.0, 2.0))
        slowdown = Slowdown(1.0, 1.0, rack, rack * draw(st.floats(1.0, 2.0)))
        demand = draw(st.integers(1, 8))
        bidder = job(demand, draw(st.floats(1.0, 200.0)), slowdown, -draw(st.floats(0.0, 100.0)))
        held = ()
        if demand > 1 and draw(st.booleans()):
            held = ((f"m{draw(st.integers(0, count - 1))}", draw(st.integers(1, min(demand - 1, 3)))),)
        least = draw(st.integers(1, demand)) if draw(st.booleans()) else 1
        table = prepare_bid(
            f"a{number}", bidder, offer, nodes, 0.0, max_gpus=demand, min_gpus=least, held=held
        )
        if table is not None:
            tables.append(table)
    return offer, tables
