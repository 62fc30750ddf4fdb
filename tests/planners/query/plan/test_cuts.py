import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.model import Share
from ebbflow.planners.query.plan.cuts import (
    MAX_CUTS,
    SWITCH_PROBABILITY,
    NodeCost,
    every_join,
    expected_seconds,
    loss_rate,
    place,
)
from ebbflow.planners.query.plan.trees import Join, Leaf, joins

CHAIN = Join(Join(Join(Leaf(0), Leaf(1), "sort_merge"), Leaf(2), "sort_merge"), Leaf(3), "sort_merge")
BUSHY = Join(Join(Leaf(0), Leaf(1), "sort_merge"), Join(Leaf(2), Leaf(3), "sort_merge"), "sort_merge")
HOUR = 3600.0


def share(hazard, nodes=4):
    return Share.uniform(nodes * 2, nodes * 8, nodes=nodes, hazard=hazard)


def flat(tree, seconds=100.0, materialise=1.0, shared=1.0):
    return {j.mask: NodeCost(seconds, materialise, shared) for j in joins(tree)}


trees = st.sampled_from([CHAIN, BUSHY])
seconds = st.floats(0.1, 2000.0)


@st.composite
def costed(draw):
    tree = draw(trees)
    costs = {
        j.mask: NodeCost(draw(seconds), draw(st.floats(0.01, 300.0)), draw(st.floats(0.1, 1.0)))
        for j in joins(tree)
    }
    return tree, costs


def test_a_cut_above_every_join_is_one_join_a_stage():
    assert every_join(BUSHY) == {0b0011, 0b1100, 0b1111}


def test_losses_add_up_over_nodes():
    assert loss_rate(share(0.5, nodes=4)) == pytest.approx(2.0 / HOUR)


def test_the_formula_worked_by_hand():
    tree = Join(Join(Leaf(0), Leaf(1), "sort_merge"), Leaf(2), "sort_merge")
    costs = {0b011: NodeCost(100.0, 7.0, shared=0.5), 0b111: NodeCost(50.0, 3.0)}
    given_share = share(HOUR / 3 * 0.001, nodes=3)  # 0.001 losses a second
    risk = 0.001 * (1 / 2 + SWITCH_PROBABILITY) / 2
    uncut = 170.0
    assert expected_seconds(tree, frozenset(), costs, given_share, 20.0) == pytest.approx(
        uncut * (1 + risk * uncut)
    )
    cut = 100 * (1 + risk * 100) + 7.0 * 1.25 + 70 * (1 + risk * 70)
    assert expected_seconds(tree, frozenset({0b011}), costs, given_share, 20.0) == pytest.approx(cut)


def test_without_losses_a_cut_only_costs():
    plans = place(CHAIN, flat(CHAIN), share(0.0), 10.0)
    assert plans[0].masks == frozenset()
    assert plans[0].seconds == pytest.approx(310.0)


def test_frequent_losses_place_cuts():
    assert place(CHAIN, flat(CHAIN), share(20.0), 10.0)[0].masks


def test_a_checkpoint_that_other_candidates_share_is_preferred():
    costs = flat(BUSHY) | {0b0011: NodeCost(100.0, 20.0, 0.2), 0b1100: NodeCost(100.0, 20.0, 1.0)}
    singles = [p for p in place(BUSHY, costs, share(20.0), 10.0, keep=99) if p.masks in ({0b0011}, {0b1100})]
    assert singles[0].masks == {0b1100}


@given(costed(), st.floats(0.0, 60.0), st.floats(0.0, 500.0))
def test_the_best_is_the_best_of_all_sets_that_could_pay(case, hazard, top):
    tree, costs = case
    given_share = share(hazard)
    uncut = expected_seconds(tree, frozenset(), costs, given_share, top)
    worth = [m for m in costs if costs[m].materialise < 0.5 * uncut]
    every = [
        frozenset(masks)
        for size in range(min(MAX_CUTS, len(worth)) + 1)
        for masks in itertools.combinations(worth, size)
    ]
    best = min(expected_seconds(tree, masks, costs, given_share, top) for masks in every)
    plans = place(tree, costs, given_share, top)
    assert plans[0].seconds == pytest.approx(best)
    assert [p.seconds for p in plans] == sorted(p.seconds for p in plans)
    assert any(not p.masks for p in plans)


@given(costed(), st.floats(0.0, 500.0), st.floats(0.0, 30.0), st.floats(0.0, 30.0))
def test_more_losses_never_make_cutting_save_less(case, top, one, other):
    tree, costs = case

    def saved(hazard):
        plans = place(tree, costs, share(hazard), top, keep=99)
        uncut = next(p.seconds for p in plans if not p.masks)
        return uncut - plans[0].seconds

    low, high = sorted((one, other))
    assert saved(low) <= saved(high) * (1 + 1e-9) + 1e-9


@given(costed(), st.floats(0.0, 30.0), st.integers(1, 5))
def test_at_most_as_many_as_asked_for_are_returned(case, hazard, keep):
    plans = place(*case, share(hazard), 5.0, keep=keep)
    assert 1 <= len(plans) <= keep
    assert len({p.masks for p in plans}) == len(plans)
