from itertools import product
from math import inf

import numpy as np
import pytest
from auction_worlds import capacity, job, satisfied
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity
from ebbflow.planners.model.scheduling import Placement
from ebbflow.planners.scheduling.bids import BidRow, BidTable, Offer, prepare_bid, prune_dominated
from ebbflow.planners.scheduling.finish_time import SingleJob
from ebbflow.planners.scheduling.locality import Level, Slowdown


class OneByOne:
    """A bidder that answers for one placement at a time."""

    def __init__(self, inner: SingleJob):
        self.inner = inner

    def rho(self, placement: Placement, nodes: Capacity, now: float) -> float:
        return self.inner.rho(placement, nodes, now)


@st.composite
def situations(draw: st.DrawFn) -> tuple[Offer, Capacity, SingleJob, Placement, int]:
    count = draw(st.integers(1, 4))
    racks = sorted(draw(st.lists(st.integers(0, 2), min_size=count, max_size=count)))
    order = {r: i for i, r in enumerate(dict.fromkeys(racks))}
    nodes = capacity([6] * count, [order[r] for r in racks])
    free = [draw(st.integers(0, 3)) for _ in range(count)]
    offer = Offer(tuple(n.id for n in nodes.nodes), np.array(free), np.array([order[r] for r in racks]))
    rack = draw(st.floats(1.0, 2.0))
    demand = draw(st.integers(2, 10))
    slowdown = Slowdown(1.0, 1.0, rack, rack * draw(st.floats(1.0, 2.0)))
    where = draw(st.lists(st.integers(0, count - 1), max_size=2, unique=True))
    held = tuple((f"m{m}", draw(st.integers(1, 2))) for m in where)
    return offer, nodes, job(demand, 100.0, slowdown, -draw(st.floats(0.0, 100.0))), held, demand


@given(situations())
def test_a_compressed_table_says_what_listing_every_subset_would(
    situation: tuple[Offer, Capacity, SingleJob, Placement, int],
) -> None:
    offer, nodes, bidder, held, demand = situation
    table = prepare_bid("a", bidder, offer, nodes, 0.0, max_gpus=demand, held=held)
    has = dict(held)
    start = bidder.rho(held, nodes, 0.0)
    best = inf
    for taken in product(*(range(int(f) + 1) for f in offer.free)):
        if not 0 < sum(taken) <= demand - sum(has.values()):
            continue
        merged = dict(has)
        for node, gpus in zip(offer.nodes, taken, strict=True):
            if gpus:
                merged[node] = merged.get(node, 0) + gpus
        exact = bidder.rho(tuple(merged.items()), nodes, 0.0)
        best = min(best, exact)
        if table is None:
            assert exact >= start * (1 - 1e-12)
            continue
        # the app may always leave GPUs of its win unused, so a subset is worth its best part
        parts = [
            bidder.rho(_with(has, offer, part), nodes, 0.0)
            for part in product(*(range(t + 1) for t in taken))
        ]
        known = min(*parts, table.rho[0])
        assert satisfied(offer, table, taken) == pytest.approx(known, rel=1e-9)
    if table is not None:
        assert table.rho.min() == pytest.approx(min(best, table.rho[0]), rel=1e-9)


def _with(has: dict[str, int], offer: Offer, part: tuple[int, ...]) -> Placement:
    merged = dict(has)
    for node, gpus in zip(offer.nodes, part, strict=True):
        if gpus:
            merged[node] = merged.get(node, 0) + gpus
    return tuple(merged.items())


@given(situations())
def test_asking_one_placement_at_a_time_gives_no_better_and_mostly_the_same_table(
    situation: tuple[Offer, Capacity, SingleJob, Placement, int],
) -> None:
    offer, nodes, bidder, held, demand = situation
    fast = prepare_bid("a", bidder, offer, nodes, 0.0, max_gpus=demand, held=held)
    slow = prepare_bid("a", OneByOne(bidder), offer, nodes, 0.0, max_gpus=demand, held=held)
    if fast is None:
        return
    assert slow is not None
    for taken in product(*(range(int(f) + 1) for f in offer.free)):
        assert satisfied(offer, slow, taken) <= satisfied(offer, fast, taken) * (1 + 1e-12)


@given(situations())
def test_after_pruning_more_gpus_and_tighter_places_always_buy_something(
    situation: tuple[Offer, Capacity, SingleJob, Placement, int],
) -> None:
    offer, nodes, bidder, held, demand = situation
    table = prepare_bid("a", bidder, offer, nodes, 0.0, max_gpus=demand, held=held)
    if table is None:
        return
    for row in table.rows[1:]:
        assert row.rho < table.rho[0]
        for other in table.rows:
            if other != row and other.gpus <= row.gpus and other.level >= row.level:
                assert other.rho > row.rho
    assert list(table.gpus) == sorted(table.gpus)


def test_the_papers_table_of_two_gpus() -> None:
    table = BidTable.of(
        "a",
        [
            BidRow(0, Level.CLUSTER, -1, 1.0),
            BidRow(1, Level.SLOT, -1, 200 / 400),
            BidRow(2, Level.CLUSTER, -1, 0.25),
        ],
    )
    assert [(r.gpus, r.rho) for r in table.rows] == [(0, 1.0), (1, 0.5), (2, 0.25)]


def test_holding_nothing_is_kappa_times_one_gpu_and_a_gang_counts_whole() -> None:
    offer = Offer(("m0",), np.array([4]), np.array([0]))
    nodes = capacity([4], [0])
    one = job(4)
    assert prepare_bid("a", one, offer, nodes, 0.0, max_gpus=4).rho[0] == pytest.approx(
        2.0 * one.rho((("m0", 1),), nodes, 0.0)
    )
    gang = prepare_bid("a", one, offer, nodes, 0.0, max_gpus=4, min_gpus=3)
    assert [r.gpus for r in gang.rows] == [0, 3, 4]
    assert gang.rho[0] == pytest.approx(2.0 * 3 * gang.rho[1])


def test_nothing_to_win_is_no_bid() -> None:
    offer = Offer(("m0",), np.array([2]), np.array([0]))
    nodes = capacity([4], [0])
    assert prepare_bid("a", job(4), offer, nodes, 0.0, max_gpus=4, min_gpus=3) is None
    assert prepare_bid("a", job(2), offer, nodes, 0.0, max_gpus=2, held=(("m0", 2),)) is None


def test_pruning_keeps_a_cell_unless_a_cheaper_or_looser_one_is_as_good() -> None:
    grid = np.array([[inf, 5.0, 3.0, 3.0], [inf, 5.0, 3.0, 2.9], [9.0, 6.0, 3.5, 2.9]])
    kept = prune_dominated(grid)
    assert kept.tolist() == [
        [False, False, False, False], [False, True, True, False], [True, True, True, True],
    ]  # fmt: skip


@pytest.mark.parametrize("rho", [[1.0, 0.0], [inf, 1.0], [float("nan"), 1.0]])
def test_a_table_refuses_values_without_a_logarithm(rho: list[float]) -> None:
    with pytest.raises(OptionError, match="every rho"):
        BidTable("a", np.array([0, 1]), np.array([3, 3]), np.array([-1, -1]), np.array(rho))
