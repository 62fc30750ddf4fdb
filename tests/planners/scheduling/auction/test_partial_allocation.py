"""The auction: worked examples, what must hold for any tables, and how the solvers and tiers relate."""

from math import exp, log

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.auction.auction import AuctionOptions, Outcome, auction, kept_gpus, released
from ebbflow.planners.scheduling.auction.concave import is_concave
from ebbflow.planners.scheduling.auction.payments import kept_fractions, lower_bounds
from ebbflow.planners.scheduling.auction.problem import Problem
from ebbflow.planners.scheduling.auction.relaxation import relax
from ebbflow.planners.scheduling.auction.search import solve_search
from ebbflow.planners.scheduling.bids import BidRow, BidTable, Offer, prepare_bid
from ebbflow.planners.scheduling.finish_time import Job, SingleJob
from ebbflow.planners.scheduling.locality import Level, Slowdown
from tests.planners.scheduling.auction_worlds import best_value, capacity, flat, linear, plain, worlds
from tests.sweeps import spread

World = tuple[Offer, list[BidTable]]
EXACT = AuctionOptions(solver="exact")


def sizes(bundles: dict[str, dict[int, int]]) -> list[int]:
    return [sum(b.values()) for b in bundles.values()]


def identical(count: int, gpus: int = 8) -> list[BidTable]:
    return [linear(f"a{i}", 0.0, 80.0, 8, gpus) for i in range(count)]


CASES = {
    "two apps, two GPUs": (flat(2), [plain(a, {0: 8, 1: 2, 2: 1}) for a in "ab"], [1, 1], [0.5, 0.5], [1, 1]),
    "four identical": (flat(8), identical(4), [2] * 4, [8 / 18] * 4, [1] * 4),
    "two identical": (flat(8), identical(2), [4, 4], [0.5, 0.5], [2, 2]),
    "elapsed time differs": (
        flat(8), [linear("a", 0, 80, 8, 8), linear("b", 100, 80, 8, 8)], [6, 2], [0.7857142857142857, 0.75], [4, 1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("solver", ["concave", "exact"])
@pytest.mark.parametrize("case", CASES)
def test_worked_examples_to_the_last_digit(case: str, solver: str) -> None:
    offer, tables, won, kept, granted = CASES[case]
    outcome = auction(offer, tables, AuctionOptions(solver=solver))
    assert sizes(outcome.won) == won
    assert list(outcome.kept.values()) == pytest.approx(kept, rel=1e-9)
    assert sizes(outcome.grants) == granted
    assert sum(outcome.leftover.values()) == offer.total - sum(granted)
    assert outcome.gap == pytest.approx(0.0, abs=1e-6)


def test_plain_floor_takes_every_single_gpu_win() -> None:
    offer, tables, *_ = CASES["two apps, two GPUs"]
    outcome = auction(offer, tables, AuctionOptions(rounding="floor"))
    assert sizes(outcome.grants) == [0, 0]
    assert (outcome.leftover, outcome.forfeited) == ({0: 2}, 2)


@pytest.mark.parametrize(("apps", "printed"), [(2, 0.5), (3, 0.444), (4, 0.422), (10, 0.387)])
def test_identical_apps_approach_the_continuous_payment(apps: int, printed: float) -> None:
    exact = ((apps - 1) / apps) ** (apps - 1)
    assert exact == pytest.approx(printed, abs=5e-4)
    gpus = 840 * apps
    tables = [linear(f"a{i}", 0.0, 80.0, gpus, gpus) for i in range(apps)]
    kept = auction(flat(gpus), tables).kept.values()
    assert list(kept) == pytest.approx([exact] * apps, rel=1e-3)


def vgg(split: float, work: float = 1000.0) -> SingleJob:
    s = Slowdown(1.0, 1.0, split, split)
    return SingleJob(cluster_gpus=8, n_avg=2.0, job=Job(work, 0.1, 4, s), iterations_total=work)


def test_two_sensitive_apps_get_a_machine_each_and_pay_nothing() -> None:
    offer = Offer(("m0", "m1"), np.array([4, 4]), np.array([0, 0]))
    nodes = capacity([4, 4], [0, 0])
    tables = [prepare_bid(a, vgg(1.289), offer, nodes, 0.0, max_gpus=4, min_gpus=4) for a in "tp"]
    outcome = auction(offer, tables, EXACT)
    assert sorted(map(sorted, (b.items() for b in outcome.grants.values()))) == [[(0, 4)], [(1, 4)]]
    assert list(outcome.kept.values()) == pytest.approx([1.0, 1.0], abs=1e-9)


def test_the_sensitive_app_gets_the_whole_machine_and_nobody_envies() -> None:
    offer = Offer(("m0", "m1", "m2"), np.array([4, 2, 2]), np.array([0, 0, 0]))
    nodes = capacity([4, 2, 2], [0, 0, 0])
    tables = [prepare_bid(a, vgg(s), offer, nodes, 0.0, max_gpus=4, min_gpus=4)
              for a, s in (("inception", 1.0), ("vgg", 1.289))]  # fmt: skip
    outcome = auction(offer, tables, EXACT)
    assert outcome.grants == {"inception": {1: 2, 2: 2}, "vgg": {0: 4}}
    assert list(outcome.kept.values()) == pytest.approx([1.0, 1.0], abs=1e-9)


@given(worlds())
def test_exact_finds_what_trying_everything_finds(world: World) -> None:
    offer, tables = world
    outcome = auction(offer, tables, EXACT)
    assert outcome.value == pytest.approx(best_value(offer, tables), abs=1e-7)
    assert outcome.bound >= outcome.value - 1e-9


@given(worlds(), st.sampled_from(["auto", "exact", "search"]))
def test_wins_are_exclusive_fit_their_rows_and_payments_are_fractions(world: World, solver: str) -> None:
    offer, tables = world
    outcome = auction(offer, tables, AuctionOptions(solver=solver))
    by_app = {t.app: t for t in tables}
    held = np.zeros(len(offer.free), int)
    for app, bundle in outcome.won.items():
        table = by_app[app]
        row = next(r for r in table.rows if r.rho == outcome.rho[app] and r.gpus == sum(bundle.values()))
        _inside(offer, row, bundle)
        given_ = outcome.grants[app]
        assert all(0 < g <= bundle[m] for m, g in given_.items())
        assert bool(given_) == bool(bundle)  # floor-at-one
        assert 0.0 < outcome.kept[app] <= 1.0
        assert bundle or outcome.kept[app] == 1.0
        for machine, gpus in given_.items():
            held[machine] += gpus
    left = np.array([outcome.leftover.get(m, 0) for m in range(len(offer.free))])
    assert (held + left == offer.free).all()
    assert outcome.bound >= outcome.value - 1e-9


def _inside(offer: Offer, row: BidRow, bundle: dict[int, int]) -> None:
    racks = {int(offer.rack[m]) for m in bundle}
    if row.gpus and row.level == Level.MACHINE:
        assert len(bundle) == 1
        assert row.anchor in (-1, *bundle)
    if row.gpus and row.level == Level.RACK:
        assert len(racks) == 1
        assert row.anchor in (-1, *racks)


@settings(max_examples=30)
@given(worlds())
def test_no_app_could_do_better_alone_with_what_nobody_took(world: World) -> None:
    offer, tables = world
    outcome = auction(offer, tables, AuctionOptions(solver="exact", payments="none"))
    for app in tables:
        spare = np.array(
            [outcome.leftover.get(m, 0) + outcome.won[app.app].get(m, 0) for m in range(len(offer.free))]
        )
        alone = Offer(offer.nodes, spare, offer.rack)
        assert auction(alone, [app], EXACT).rho[app.app] >= outcome.rho[app.app] * (1 - 1e-7)


@settings(max_examples=20)
@given(worlds(apps=3), st.floats(0.01, 100.0))
def test_a_constant_factor_on_one_table_changes_nothing(world: World, factor: float) -> None:
    offer, tables = world
    assume(len(tables) > 1)
    before = auction(offer, tables, EXACT)
    after = auction(offer, [tables[0].scaled(factor), *tables[1:]], EXACT)
    assert after.value == pytest.approx(before.value, abs=1e-7)
    if after.won == before.won:
        assert list(after.kept.values()) == pytest.approx(list(before.kept.values()), abs=1e-6)


@settings(max_examples=30)
@given(worlds(apps=1))
def test_a_single_bidder_keeps_everything(world: World) -> None:
    offer, tables = world
    for solver in ("auto", "exact", "search"):
        assert set(auction(offer, tables, AuctionOptions(solver=solver)).kept.values()) <= {1.0}


@settings(max_examples=25)
@given(worlds())
def test_search_is_below_exact_is_below_the_relaxation_and_tiers_are_ordered(world: World) -> None:
    offer, tables = world
    assume(len(tables) > 1)
    problem = Problem.of(offer, tables)
    assume(offer.total > 0)
    exact = auction(offer, tables, EXACT)
    found = relax(problem, 1e-9)
    search = solve_search(problem, relaxation=found)
    assert search.value <= exact.value + 1e-7
    assert exact.value <= found.bound + 1e-7
    rows = np.array([
        next(r for r in range(len(problem.owner)) if problem.owner[r] == i and problem.tables[i].rho[problem.row[r]]
             == exact.rho[t.app] and problem.gpus[r] == sum(exact.won[t.app].values()))
        for i, t in enumerate(tables)
    ])  # fmt: skip
    solved = type(search)(rows, tuple(exact.won.values()), exact.value, exact.bound)
    tiers = {
        tier: kept_fractions(problem, solved, tier, found) for tier in ("exact", "relaxed", "multipliers")
    }
    assert (tiers["multipliers"] <= tiers["relaxed"] + 1e-6).all()
    assert (tiers["relaxed"] <= tiers["exact"] + 1e-6).all()
    low = lower_bounds(problem, solved, found)
    winners = problem.gpus[rows] > 0
    assert (low <= tiers["exact"] + 1e-6)[winners].all()
    assert (tiers["multipliers"] <= low + 1e-6)[winners].all()


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(1, 200), st.integers(1, 8)), min_size=2, max_size=5),
    st.integers(1, 12),
)
def test_greedy_by_marginal_gain_is_optimal_and_pays_as_if_solved_again(
    apps: list[tuple[float, float, int]], gpus: int
) -> None:
    tables = [linear(f"a{i}", e, w, d, gpus) for i, (e, w, d) in enumerate(apps)]
    offer = flat(gpus)
    assert is_concave(Problem.of(offer, tables))
    greedy = auction(offer, tables, AuctionOptions(solver="concave"))
    assert greedy.value == pytest.approx(best_value(offer, tables), abs=1e-9)
    for app, table in enumerate(tables):
        rest = [t for i, t in enumerate(tables) if i != app]
        without = best_value(offer, rest)
        own = log(table.rho[0] / greedy.rho[table.app])
        assert greedy.kept[table.app] == pytest.approx(
            exp(greedy.value - own - without) if greedy.won[table.app] else 1.0, rel=1e-9
        )
        wins = sum(greedy.won[table.app].values())
        if wins:  # never more than its own last marginal gain for each GPU
            rho = {r.gpus: r.rho for r in table.rows}
            assert greedy.kept[table.app] >= exp(-wins * log(rho[wins - 1] / rho[wins])) - 1e-9


def test_a_single_gpu_has_no_floor_of_one_over_e() -> None:
    outcome = auction(flat(1), [plain(a, {0: 10.0, 1: 1.0}) for a in "ab"])
    assert (sizes(outcome.won), outcome.kept["a"]) == ([1, 0], pytest.approx(0.1, rel=1e-9))


def divisible(parts: int, elapsed: float, bid: float) -> tuple[float, float]:
    """Return the share of one GPU that one of two apps keeps, and its true 1/ρ, when it claims `bid` elapsed."""

    def table(app: str, since: float) -> BidTable:
        return plain(app, {0: 1e9, **{g: since + parts / g for g in range(1, parts + 1)}})

    outcome = auction(flat(parts), [table("a", bid), table("b", 0.0)])
    share = outcome.kept["a"] * sum(outcome.won["a"].values()) / parts
    return share, 1.0 / (elapsed + 1.0 / share)


def test_lying_pays_once_time_has_elapsed() -> None:
    honest, truth = divisible(4000, 4.96, 4.96)
    lied, gained = divisible(4000, 4.96, 0.0)
    assert honest == pytest.approx(0.2061, abs=2e-3)
    assert lied == pytest.approx(0.25, abs=1e-3)
    assert gained / truth == pytest.approx(1.095, abs=0.01)


@pytest.mark.parametrize("others", spread((1, 2, 4), 2))
def test_lying_about_homogeneous_divisible_goods_gains_nothing(others: int) -> None:
    """Nothing elapsed, 1/ρ linear: whatever power of the GPUs an app claims its speed to be, it keeps fewer."""
    parts = 1000

    def kept(power: float) -> float:
        tables = [plain("liar", {0: 1e9, **{g: (parts / g) ** power for g in range(1, parts + 1)}})]
        tables += [
            plain(f"b{i}", {0: 1e9, **{g: parts / g for g in range(1, parts + 1)}}) for i in range(others)
        ]
        outcome = auction(flat(parts), tables)
        return outcome.kept["liar"] * sum(outcome.won["liar"].values()) / parts

    honest = kept(1.0)
    assert honest == pytest.approx((1 / (others + 1)) * (others / (others + 1)) ** others, rel=2e-3)
    for power in (0.3, 0.6, 0.9, 1.1, 1.5, 3.0):
        assert kept(power) <= honest * (1 + 1e-6)
    assert kept(3.0) < 0.9 * honest


@pytest.mark.parametrize(
    ("mode", "expected"), [("floor-at-one", 4), ("floor", 4), ("nearest", 5), ("time", 6)]
)
def test_rounding_modes(mode: str, expected: int) -> None:
    assert kept_gpus(11 / 14, 6, mode) == expected


def test_rounding_never_leaves_part_of_a_gang() -> None:
    assert kept_gpus(0.5, 6, "floor-at-one", least=4) == 4
    assert kept_gpus(0.5, 6, "floor", least=4) == 0
    assert kept_gpus(0.999999, 6, "nearest", least=4) == 6


def test_stochastic_rounding_keeps_the_mean_and_needs_a_generator() -> None:
    rng = np.random.default_rng(0)
    kept = [kept_gpus(0.3, 4, "stochastic", rng=rng) for _ in range(4000)]
    assert set(kept) == {1, 2}
    assert np.mean(kept) == pytest.approx(1.2, abs=0.03)
    assert {kept_gpus(0.5, 4, "stochastic", rng=rng) for _ in range(50)} == {2}
    with pytest.raises(OptionError, match="generator"):
        auction(flat(1), [], AuctionOptions(rounding="stochastic"))


def test_gpus_are_given_up_where_the_bundle_has_fewest() -> None:
    assert released({0: 4, 1: 1, 2: 2}, 2) == {1: 1, 2: 1}


def test_equal_bids_go_to_who_holds_nothing_then_to_the_larger_rho_then_to_the_first() -> None:
    for solver in ("concave", "exact"):
        options = AuctionOptions(solver=solver)
        same = [plain(a, {0: 2.0 * k, 1: 1.0 * k}) for a, k in (("a", 1.0), ("b", 3.0), ("c", 1.0))]
        assert sizes(auction(flat(1), same, options).won) == [0, 1, 0]
        assert sizes(auction(flat(2), same, options).won) == [1, 1, 0]
        spread = [plain("a", {0: 4.0, 1: 2.0, 2: 1.0}), plain("b", {0: 2.0, 1: 1.0})]
        assert sizes(auction(flat(2), spread, options).won) == [1, 1]


def test_winners_stay_where_they_were() -> None:
    offer = Offer(("m0", "m1", "m2"), np.array([4, 4, 4]), np.array([0, 0, 1]))
    nodes = capacity([4, 4, 4], [0, 0, 1])
    tables = [prepare_bid(a, vgg(1.3), offer, nodes, 0.0, max_gpus=4) for a in "abc"]
    before = {"a": {2: 4}, "b": {0: 4}, "c": {1: 4}}
    for solver in ("exact", "search"):
        outcome = auction(offer, tables, AuctionOptions(solver=solver, payments="none"), before=before)
        assert outcome.grants == before


@pytest.mark.parametrize(
    "bad", [{"solver": "magic"}, {"payments": "most"}, {"rounding": "up"}, {"target": -1.0}]
)
def test_unknown_options_are_refused(bad: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        AuctionOptions(**bad)


def test_the_concave_solver_refuses_what_it_cannot_solve() -> None:
    offer = Offer(("m0", "m1"), np.array([4, 4]), np.array([0, 0]))
    table = prepare_bid("a", vgg(1.3), offer, capacity([4, 4], [0, 0]), 0.0, max_gpus=4)
    with pytest.raises(OptionError, match="concave"):
        auction(offer, [table], AuctionOptions(solver="concave"))
    with pytest.raises(OptionError, match="same app"):
        auction(offer, [table, table])


def test_no_bidders_and_no_gpus_are_no_trouble() -> None:
    assert auction(flat(3), []).leftover == {0: 3}
    nothing: Outcome = auction(flat(0), [plain("a", {0: 2.0, 1: 1.0})])
    assert (nothing.grants, nothing.gap, nothing.kept) == ({"a": {}}, 0.0, {"a": 1.0})
