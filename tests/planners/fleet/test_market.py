"""Choice of machines: cheaper ones never get less, no place holds too much, and nothing moves for little."""

from collections import defaultdict
from dataclasses import replace
from math import ceil, inf, isclose

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError, PlanningError
from ebbflow.planners.fleet.market import (
    Choice,
    Interruption,
    SpotObservation,
    Terms,
    by_gpus,
    choose,
    key,
    limit,
    rates,
    with_rates,
)
from ebbflow.planners.hazard import hazard
from ebbflow.planners.model.fleet import Offer

NOTHING_LOST = Interruption(restart=0.0)
SOME = Interruption(restart=180.0, rework=300.0)


def spot(kind: str, zone: str, price: float, rate: float = 0.05, cores: int = 4) -> Offer:
    return Offer(kind, zone, "spot", price, cores, 16.0, 1, rate)


def on_demand(kind: str, price: float, zone: str = "a", cores: int = 4) -> Offer:
    return Offer(kind, zone, "on-demand", price, cores, 16.0, 1)


def nodes(choice: Choice) -> dict[tuple[str, str, str], int]:
    return {key(one.offer): one.nodes for one in choice.allocations}


@st.composite
def markets(draw: st.DrawFn, cores: st.SearchStrategy[int] | None = None) -> list[Offer]:
    types = draw(st.lists(st.sampled_from(["m", "c", "r", "g"]), min_size=1, max_size=4, unique=True))
    zones = draw(st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3, unique=True))
    found: list[Offer] = []
    for kind in types:
        size = draw(st.just(4) if cores is None else cores)
        listed = draw(st.integers(50, 400)) / 100
        found.append(on_demand(kind, listed, zones[0], size))
        for zone in zones:
            price = draw(st.integers(5, 120)) / 100 * listed
            found.append(spot(kind, zone, price, draw(st.integers(0, 100)) / 100, size))
    return found


@st.composite
def terms(draw: st.DrawFn) -> Terms:
    return Terms(
        aversion=draw(st.sampled_from([0.0, 1.0, 5.0, 50.0])),
        per_place=draw(st.sampled_from([0.1, 0.34, 0.5, 1.0])),
        per_zone=draw(st.sampled_from([0.4, 1.0])),
        margin=draw(st.sampled_from([0.0, 0.1, 0.3])),
        min_on_demand_nodes=draw(st.integers(0, 2)),
    )


# --- the formulas ---------------------------------------------------------------------------------------------


def test_what_is_lost_raises_the_price_of_useful_work() -> None:
    # 0.2 interruptions per hour of 480 s each: 2.63 % of the time is lost
    assert SOME.useful(0.2) == pytest.approx(0.973686, abs=1e-6)
    assert SOME.useful(0.0) == 1.0
    assert replace(SOME, span=8).useful(0.2) == pytest.approx(SOME.useful(0.2) ** 8)
    reliable, cheap = spot("m", "a", 1.0, 0.01), spot("m", "b", 0.95, 1.5)
    loose = Terms(aversion=0.0, per_place=1.0)
    assert nodes(choose([reliable, cheap], 40, NOTHING_LOST, terms=loose)) == {key(cheap): 10}
    assert nodes(choose([reliable, cheap], 40, SOME, terms=loose)) == {key(reliable): 10}


def test_rates_are_the_markets_until_a_place_has_a_record_of_its_own() -> None:
    seen = {("m", "a"): SpotObservation(40, 100 * 3600.0), ("m", "b"): SpotObservation(0, 900 * 3600.0)}
    found = rates(seen, [("m", "a"), ("m", "b"), ("c", "a")])
    market = hazard(40, 1000 * 3600.0)
    assert found["c", "a"] == pytest.approx(market)
    assert found["m", "a"] == pytest.approx((market * 24 + 40) / (24 + 100))
    assert found["m", "b"] < market < found["m", "a"]
    learnt = with_rates([spot("m", "a", 1.0, 9.0), on_demand("m", 3.0)], seen)
    assert [one.interruptions for one in learnt] == [found["m", "a"], 0.0]


def test_gamma_posterior_of_nothing_is_the_prior() -> None:
    assert rates({}, [("m", "a")]) == {("m", "a"): pytest.approx(0.05)}


def test_the_limit_is_the_on_demand_price_or_the_ceiling() -> None:
    offer = spot("m", "a", 1.0)
    assert limit(offer, 3.0) == 3.0
    assert limit(offer, 3.0, 2.0) == 2.0
    assert limit(offer, None) is None
    assert limit(offer, None, 2.0) == 2.0
    assert limit(on_demand("m", 3.0), 3.0) is None


def test_shares_solve_the_programme_where_nothing_else_binds() -> None:
    """Σ k_i/k* x_i + a/2 Σ σ_i² x_i² has its least where all used offers have the same derivative."""
    offers = [spot("m", "a", 1.00, 0.5), spot("m", "b", 1.05, 0.5), spot("m", "c", 1.10, 0.9)]
    free = Terms(aversion=3.0, per_place=1.0, margin=0.0)
    found = nodes(choose(offers, 4000.0, NOTHING_LOST, terms=free))
    derivative = []
    for offer in offers:
        lost = 1 - 2.718281828459045**-offer.interruptions
        share = found[key(offer)] / 1000
        derivative.append(offer.price / 1.0 + 3.0 * lost * (1 - lost) * share)
    assert derivative == pytest.approx([derivative[0]] * 3, abs=2e-3)


# --- rules -------------------------------------------------------------------------------------------------------


def test_an_offer_above_its_limit_is_left_out_with_the_reason() -> None:
    choice = choose([spot("m", "a", 3.1), spot("m", "b", 2.0), on_demand("m", 3.0)], 8, SOME)
    left = dict(choice.left_out)
    assert list(left) == [("m", "a", "spot")]
    assert "its price of $3.1/h is above the limit of $3/h" in left["m", "a", "spot"]
    assert nodes(choice)["m", "b", "spot"] == 1
    held = choose([spot("m", "a", 1.2), on_demand("m", 3.0)], 8, SOME, terms=Terms(ceiling=1.0))
    assert nodes(held) == {("m", "a", "on-demand"): 2}
    assert [one.limit for one in choice.allocations] == [None, 3.0]


def test_dry_places_get_nothing_and_on_demand_stands_in() -> None:
    offers = [spot("m", "a", 1.0), spot("m", "b", 1.0), on_demand("m", 3.0)]
    choice = choose(offers, 40, SOME, dry=[("m", "a"), ("m", "b")])
    assert nodes(choice) == {("m", "a", "on-demand"): 10}
    assert choice.on_demand == choice.nodes == 10
    assert {why for _, why in choice.left_out} == {"insufficient capacity"}


def test_without_a_way_the_error_says_what_limits() -> None:
    offers = [spot("m", "a", 1.0), on_demand("m", 3.0)]
    with pytest.raises(
        PlanningError, match=r"can do 20 of 40 units.*spot m in a: 5 nodes, then capped.*per_place 0.5"
    ):
        choose(offers, 40, SOME, terms=Terms(max_on_demand_nodes=0))
    with pytest.raises(PlanningError, match="there are no offers"):
        choose([], 1, SOME)
    with pytest.raises(PlanningError, match="2 on-demand nodes are required; the offers have 0"):
        choose(offers[:1], 1, SOME, terms=Terms(min_on_demand_nodes=2))
    with pytest.raises(PlanningError, match="does no work"):
        choose([replace(offers[0], gpus=0)], 1, SOME, work=by_gpus)


def test_the_last_node_is_the_cheapest_that_is_enough() -> None:
    big, small = spot("big", "a", 1.0, 0.0, 16), spot("small", "a", 0.1, 0.0, 1)
    choice = choose([big, small], 17, NOTHING_LOST, terms=Terms(per_place=1.0, aversion=0.0))
    assert nodes(choice) == {key(big): 1, key(small): 1}
    assert (choice.work, choice.dollars) == (17, pytest.approx(1.1))


def test_no_work_needs_nothing_but_the_base() -> None:
    assert choose([], 0, SOME).allocations == ()
    base = choose([on_demand("m", 3.0), on_demand("c", 2.0)], 0, SOME, terms=Terms(min_on_demand_nodes=2))
    assert nodes(base) == {("c", "a", "on-demand"): 2}


def test_from_on_demand_back_to_spot_only_for_more_than_the_margin() -> None:
    def market(price: float) -> list[Offer]:
        return [spot("m", "a", price, 0.0), on_demand("m", 1.0)]

    wide = Terms(per_place=1.0, margin=0.1)
    held = {("m", "a", "on-demand"): 10}
    assert nodes(choose(market(0.95), 40, SOME, terms=wide, held=held)) == held
    back = nodes(choose(market(0.85), 40, SOME, terms=wide, held=held))
    assert back == {("m", "a", "spot"): 10}
    # and what came back does not leave for as little
    assert nodes(choose(market(0.95), 40, SOME, terms=wide, held=back)) == back


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"aversion": -1.0}, "aversion must be >= 0; got -1"),
        ({"aversion": inf}, "aversion must be >= 0; got inf"),
        ({"per_place": 0.0}, "per_place must be above 0"),
        ({"per_zone": 1.5}, "per_zone must be above 0 and at most 1; got 1.5"),
        ({"margin": 1.0}, "margin must be at least 0 and below 1; got 1"),
        ({"ceiling": 0.0}, "ceiling must be above 0.001"),
        ({"min_on_demand_nodes": 3, "max_on_demand_nodes": 2}, "got 3, 2"),
    ],
)
def test_terms_outside_their_rule_are_refused(options: dict[str, float], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        Terms(**options)


def test_other_bad_input_is_refused() -> None:
    with pytest.raises(OptionError, match="restart must be >= 0 s; got -1"):
        Interruption(-1.0)
    with pytest.raises(OptionError, match="span must be >= 1"):
        Interruption(1.0, span=0)
    with pytest.raises(OptionError, match="need must be >= 0"):
        choose([], -1.0, SOME)
    with pytest.raises(OptionError, match="price of spot m in a must be >= 0; got nan"):
        choose([spot("m", "a", float("nan"))], 1.0, SOME)
    with pytest.raises(OptionError, match="weight must be > 0"):
        rates({}, [], weight=0.0)


# --- properties --------------------------------------------------------------------------------------------------


@given(markets(), terms(), st.integers(1, 60))
def test_the_work_is_done_and_no_place_or_zone_holds_more_than_its_cap(
    offers: list[Offer], how: Terms, units: int
) -> None:
    need = 4.0 * units
    choice = choose(offers, need, SOME, terms=how)  # on-demand is there, so there is a way
    assert choice.work >= need
    assert choice.on_demand >= how.min_on_demand_nodes
    zones: dict[str, int] = defaultdict(int)
    for one in choice.allocations:
        assert one.nodes > 0
        assert one.reason
        if one.offer.market == "spot":
            assert one.nodes <= ceil(how.per_place * units - 1e-9)
            zones[one.offer.zone] += one.nodes
    assert all(count <= ceil(how.per_zone * units - 1e-9) for count in zones.values())
    assert isclose(choice.dollars, sum(one.nodes * one.offer.price for one in choice.allocations))
    # none too many: without any one of them the work would not be done
    spare = choice.work - need
    if choice.on_demand > how.min_on_demand_nodes:
        assert spare < 4.0


@given(markets(st.sampled_from([1, 2, 4, 16])), terms(), st.integers(1, 200))
def test_machines_of_all_sizes_do_the_work(offers: list[Offer], how: Terms, need: int) -> None:
    assert choose(offers, float(need), SOME, terms=how).work >= need * (1 - 1e-9)


@given(markets(), terms(), st.integers(1, 40), st.data())
def test_a_cheaper_offer_never_gets_less_than_an_equal_one(
    offers: list[Offer], how: Terms, units: int, data: st.DataObject
) -> None:
    """Two spot offers of one zone and rate, of which one is cheaper."""
    chosen = data.draw(st.sampled_from([one for one in offers if one.market == "spot"]))
    factor = data.draw(st.integers(1, 100)) / 100
    twin = replace(chosen, instance_type="twin", price=chosen.price * factor)
    found = nodes(choose([*offers, twin], 4.0 * units, SOME, terms=how))
    assume(key(chosen) in found)
    assert found.get(key(twin), 0) >= found[key(chosen)] or factor == 1.0


@given(markets(), terms(), st.integers(1, 40), st.data())
def test_an_offer_that_becomes_cheaper_does_not_lose_nodes(
    offers: list[Offer], how: Terms, units: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(offers) - 1))
    assume(offers[at].market == "spot")
    factor = data.draw(st.integers(1, 99)) / 100
    before = nodes(choose(offers, 4.0 * units, SOME, terms=how))
    cheaper = [*offers[:at], replace(offers[at], price=offers[at].price * factor), *offers[at + 1 :]]
    after = nodes(choose(cheaper, 4.0 * units, SOME, terms=how))
    assert after.get(key(offers[at]), 0) >= before.get(key(offers[at]), 0)


@given(markets(), terms(), st.integers(1, 40), st.randoms(use_true_random=False))
def test_equal_offers_in_any_order_give_equal_choices(
    offers: list[Offer], how: Terms, units: int, shuffle: object
) -> None:
    other = list(offers)
    shuffle.shuffle(other)  # type: ignore[attr-defined]
    assert choose(other, 4.0 * units, SOME, terms=how) == choose(offers, 4.0 * units, SOME, terms=how)


@given(markets(), st.integers(1, 40), st.data())
def test_prices_that_move_within_the_margin_move_no_node(
    offers: list[Offer], units: int, data: st.DataObject
) -> None:
    """Without aversion an offer is taken by its price alone: ± 4 % are less than a margin of 10 %."""
    how = Terms(aversion=0.0, per_place=1.0, margin=0.1)
    before = nodes(choose(offers, 4.0 * units, SOME, terms=how))
    listed = {one.instance_type: one.price for one in offers if one.market == "on-demand"}
    moved = [
        replace(one, price=min(one.price * data.draw(st.integers(96, 104)) / 100, listed[one.instance_type]))
        if one.market == "spot" and one.price <= listed[one.instance_type]
        else one
        for one in offers
    ]
    assert nodes(choose(moved, 4.0 * units, SOME, terms=how, held=before)) == before


@given(markets(), terms(), st.integers(1, 40), st.integers(2, 100))
def test_dearer_money_changes_nothing(offers: list[Offer], how: Terms, units: int, factor: int) -> None:
    dearer = [replace(one, price=one.price * factor) for one in offers]
    assert nodes(choose(dearer, 4.0 * units, SOME, terms=how)) == nodes(
        choose(offers, 4.0 * units, SOME, terms=how)
    )
