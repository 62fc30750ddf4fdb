"""Gittins indices: the three-job table and bounds."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.gangs.gittins import ServiceDistribution

TABLE = {
    "supremum": "1/8 1/7 1/6 1/3 1/6 1/5 1/4 1/2 1/4 1/3 1/2 1",
    "quantum 4": "1/12 1/11 1/10 1/9 1/8 1/7 1/6 1/5 1/4 1/3 1/2 1",
    "total": "1/8 1/8 1/8 1/8 1/10 1/10 1/10 1/10 1/12 1/12 1/12 1/12",
}


def ratio(text: str) -> float:
    over, _, under = text.partition("/")
    return int(over) / int(under or 1)


@pytest.mark.parametrize("row", TABLE)
def test_three_jobs(row):
    known = ServiceDistribution([4, 8, 12], denominator="total" if row == "total" else "residual")
    quantum = 4 if row == "quantum 4" else None
    indices = [known.index(attained, quantum) for attained in range(12)]
    assert indices == pytest.approx([ratio(text) for text in TABLE[row].split()])


samples = st.lists(st.integers(1, 1000), min_size=1, max_size=30)


@given(samples, st.integers(0, 1100), st.integers(1, 500))
def test_bounds_and_scaling(values, attained, quantum):
    known = ServiceDistribution(values)
    best = known.index(attained)
    survivors = [value for value in values if value > attained]
    if not survivors:
        assert best == 0
        assert known.mean_residual(attained) == inf
        return
    assert 0 < best <= 1 / (min(survivors) - attained) * (1 + 1e-9)
    assert best >= known.index(attained, quantum) * (1 - 1e-9)
    assert known.index(attained, inf) == pytest.approx(1 / known.mean_residual(attained))
    assert ServiceDistribution(values * 2).index(attained, quantum) == pytest.approx(
        known.index(attained, quantum)
    )
    scaled = ServiceDistribution([value * 8 for value in values])
    assert scaled.index(attained * 8, quantum * 8) * 8 == pytest.approx(known.index(attained, quantum))


def test_running_jobs_count_as_censored():
    assert ServiceDistribution.censored([1, 2, 3], []).mean_residual(0) == pytest.approx(2)
    # 1 finishes with 4 at risk (weight 1/4), 3 with 1 at risk (weight 3/4)
    assert ServiceDistribution.censored([1, 3], [2, 2]).mean_residual(0) == pytest.approx(0.25 + 3 * 0.75)
    # nobody is seen to finish after 1: what survives is put at the largest value
    assert ServiceDistribution.censored([1], [5]).mean_residual(0) == pytest.approx(3)


@pytest.mark.parametrize("values", [[], [0.0], [inf], [-1.0]])
def test_bad_samples_are_refused(values):
    with pytest.raises(OptionError, match="service samples"):
        ServiceDistribution(values)


def test_the_supremum_counts_the_sample_at_which_its_quantum_ends():
    value, attained = 925.2528543942791, 186.65621163220982
    assert attained + (value - attained) < value  # rounding: the quantum falls short of the sample
    assert ServiceDistribution([value]).index(attained) == pytest.approx(1 / (value - attained))
