"""Competitive ratios over many instances (QOOP, section 6)."""

import numpy as np
import pytest

from ebbflow.planners.errors import OptionError
from tests.evaluation.qoop.adversary import PLANS, _choice, instances, measure, retained
from tests.evaluation.qoop.competitive import AbstractQEP, OnlineGreedyPlanner, filter_qeps


@pytest.mark.parametrize("separated", [True, False])
def test_no_ratio_exceeds_the_theorem(separated: bool) -> None:
    found = measure(np.random.default_rng(11), 1500, separated=separated)
    assert all(r.kept for r in found)
    assert max(r.largest for r in found) > (1.8 if separated else 2.5)  # the adversaries do press


def test_plans_and_choices_are_those_of_the_planner_one_by_one() -> None:
    rng = np.random.default_rng(5)
    demand, work = instances(rng, 200, False)
    kept = retained(work)
    present = np.isfinite(demand).sum(1)
    for row in range(200):
        n = int(present[row])
        plans = [AbstractQEP(demand[row, i], work[row, i] / demand[row, i]) for i in range(n)]
        mine = [i for i in range(PLANS) if kept[row, i]]
        assert [plans[i] for i in mine] == list(filter_qeps(plans))
        online = OnlineGreedyPlanner(plans)
        allocation = demand[row, int(rng.integers(0, n))] * 1.01
        chosen = online.choose(allocation)
        choice, left = _choice(
            demand[[row]], np.where(kept, work, np.inf)[[row]], kept[[row]], np.array([allocation])
        )
        assert chosen is not None
        assert mine[chosen] == choice[0]
        assert left[0] == pytest.approx(online.remaining[chosen])


def test_separated_instances_halve_and_bad_counts_are_refused() -> None:
    demand, work = instances(np.random.default_rng(6), 500, True)
    both = np.isfinite(work[:, 1:])
    assert np.all(work[:, 1:][both] <= work[:, :-1][both] / 2 * (1 + 1e-12))
    assert np.all(demand[:, 1:][both] > demand[:, :-1][both])
    with pytest.raises(OptionError, match="count"):
        measure(np.random.default_rng(1), 0, separated=True)
