"""Auctions too large to try everything: proofs, packings and payments of the search against the exact programme."""

from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings

from ebbflow.planners.scheduling.auction import exact as auction_exact
from ebbflow.planners.scheduling.auction import relaxation as auction_relaxation
from ebbflow.planners.scheduling.auction.auction import AuctionOptions, auction
from ebbflow.planners.scheduling.auction.exact import solve_exact
from ebbflow.planners.scheduling.auction.packing import pack
from ebbflow.planners.scheduling.auction.payments import kept_fractions
from ebbflow.planners.scheduling.auction.problem import Kind, Problem, Solution
from ebbflow.planners.scheduling.auction.relaxation import Classes, Prices, best_rows, partitions, relax
from ebbflow.planners.scheduling.auction.search import solve_search
from ebbflow.planners.scheduling.bids import BidTable, Offer, prepare_bid
from ebbflow.planners.scheduling.locality import Slowdown
from tests.planners.scheduling.auction_worlds import best_value, capacity, job, worlds


def market(
    seed: int, gpus: int, bidders: int, machine: int = 8, rack: int = 4, held: float = 0.0
) -> tuple[Offer, list[BidTable]]:
    """Return machines with one to ``machine`` GPUs free, and apps of all ages and slowdowns."""
    rng = np.random.default_rng(seed)
    free: list[int] = []
    while sum(free) < gpus:
        free.append(min(int(rng.integers(1, machine + 1)), gpus - sum(free)))
    racks = np.arange(len(free)) // rack
    offer = Offer(tuple(f"m{i}" for i in range(len(free))), np.array(free), racks)
    nodes = capacity([machine + 4] * len(free), racks.tolist())
    tables = []
    for number in range(bidders):
        demand = int(rng.choice([1, 2, 4, 8, 16, 32]))
        slow = float(rng.uniform(1.0, 1.6))
        bidder = job(demand, float(rng.lognormal(6.0, 1.0)), Slowdown(1.0, 1.0, slow, slow * 1.3))
        bidder.arrival = -float(rng.uniform(0.0, 500.0))
        has = ((f"m{rng.integers(len(free))}", 1),) if demand > 1 and rng.random() < held else ()
        table = prepare_bid(f"a{number}", bidder, offer, nodes, 0.0, max_gpus=demand, held=has)
        if table is not None:
            tables.append(table)
    return offer, tables


def check(problem: Problem, solution: Solution) -> None:
    """Every row has a bundle of its size where it must be, and no machine gives more than it has."""
    used = np.zeros(len(problem.offer.free), int)
    for row, bundle in zip(solution.rows, solution.bundles, strict=True):
        assert sum(bundle.values()) == problem.gpus[row]
        racks = {int(problem.offer.rack[m]) for m in bundle}
        if problem.kind[row] == Kind.MACHINE:
            assert len(bundle) == 1
            assert problem.anchor[row] in (-1, *bundle)
        elif problem.kind[row] == Kind.RACK:
            assert len(racks) == 1
            assert problem.anchor[row] in (-1, *racks)
        for machine, gpus in bundle.items():
            used[machine] += gpus
    assert (used <= problem.offer.free).all()
    assert solution.value == pytest.approx(problem.value(solution.rows), abs=1e-9)


@pytest.mark.parametrize(
    ("machine", "rack", "held"), [(8, 4, 0.0), (8, 4, 0.4), (3, 8, 0.0), (16, 4, 0.0), (12, 2, 0.3)]
)
def test_the_search_is_close_to_the_exact_optimum_and_the_bound_above_it(
    machine: int, rack: int, held: float
) -> None:
    offer, tables = market(3, 96, 20, machine, rack, held)
    problem = Problem.of(offer, tables)
    search = solve_search(problem)
    check(problem, search)
    exact = solve_exact(problem, seconds=20.0)
    check(problem, exact)
    assert exact.gap < 1e-4
    assert search.value <= exact.value + 1e-6
    assert search.bound >= exact.value - 1e-6
    assert np.expm1((exact.value - search.value) / problem.apps) < 0.02
    assert search.gap < 0.04


def test_a_thousand_gpus_and_two_hundred_bidders_are_within_one_percent() -> None:
    offer, tables = market(5, 1024, 200, rack=16)
    problem = Problem.of(offer, tables)
    search = solve_search(problem)
    check(problem, search)
    assert search.gap <= 0.01


def test_any_prices_prove_a_bound_and_the_relaxations_are_the_best_of_their_kind() -> None:
    offer, tables = market(1, 48, 10)
    problem = Problem.of(offer, tables)
    exact = solve_exact(problem)
    classes, found = Classes.of(problem), relax(problem, 1e-9)
    rng = np.random.default_rng(0)
    for _ in range(30):
        factor = rng.uniform(0.0, 2.0, len(found.prices.size))
        prices = Prices(
            found.prices.size * factor, found.prices.unit * rng.uniform(0.5, 1.5), found.prices.large,
            found.prices.thresholds,
        )  # fmt: skip
        surplus, _ = best_rows(problem, problem.gain - prices.of(problem))
        bound = classes.bound(prices, surplus)
        assert bound >= exact.value - 1e-6
        assert bound >= found.value - 1e-6
    assert found.bound == pytest.approx(found.value, abs=1e-6)


def test_prices_pay_almost_what_solving_without_each_winner_says() -> None:
    errors = []
    for seed in range(3):
        offer, tables = market(seed, 40, 9, machine=4)
        problem = Problem.of(offer, tables)
        exact = solve_exact(problem)
        winners = problem.gpus[exact.rows] > 0
        true = kept_fractions(problem, exact, "exact")[winners]
        errors.append(np.abs(kept_fractions(problem, exact, "prices")[winners] - true))
        assert (true < 1.0).any()
    assert np.concatenate(errors).mean() < 0.02
    assert np.concatenate(errors).max() < 0.2


@settings(max_examples=30)
@given(worlds())
def test_an_exact_solution_can_always_be_unpacked_from_its_patterns(
    world: tuple[Offer, list[BidTable]],
) -> None:
    offer, tables = world
    problem = Problem.of(offer, tables)

    def full(problem: Problem, *rest: object) -> object:
        return pack(problem, problem.start)[0], [0]

    with patch.object(auction_exact, "pack", full):
        solution = solve_exact(problem)
    check(problem, solution)
    assert solution.value == pytest.approx(best_value(offer, tables), abs=1e-7)


def test_partitions_are_all_multisets_that_fit() -> None:
    everything = frozenset(range(1, 9))
    assert [len(partitions(n, n, everything)) for n in (1, 2, 3, 4, 8)] == [1, 3, 6, 11, 66]
    assert partitions(4, 4, frozenset({2, 3})) == [(2,), (2, 2), (3,)]


def test_a_failing_lp_solver_costs_quality_but_neither_the_answer_nor_its_proof() -> None:
    offer, tables = market(1, 48, 10)
    problem = Problem.of(offer, tables)
    with patch.object(auction_relaxation, "linprog", lambda *_, **__: SimpleNamespace(status=4)):
        search = solve_search(problem)
    check(problem, search)
    assert search.bound >= solve_exact(problem).value - 1e-6
    assert search.gap < 0.1


def test_equal_generators_give_equal_searches() -> None:
    offer, tables = market(2, 200, 40, machine=3)
    runs = [
        auction(offer, tables, AuctionOptions(solver="search"), rng=np.random.default_rng(4))
        for _ in range(2)
    ]
    assert runs[0].grants == runs[1].grants
    assert runs[0].kept == runs[1].kept
