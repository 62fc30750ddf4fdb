"""The hazard of losing nodes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.hazard import PRIOR_LOSSES, PRIOR_NODE_HOURS, hazard


def test_without_evidence_the_prior_stands() -> None:
    assert hazard(0, 0) == PRIOR_LOSSES / PRIOR_NODE_HOURS


def test_one_node_hour_without_loss_halves_the_default_hazard() -> None:
    assert hazard(0, 3600) == pytest.approx(0.025)


def test_the_posterior_mean_is_gammas() -> None:
    assert hazard(2, 10 * 3600, prior_losses=1, prior_node_hours=20) == pytest.approx(0.1)


@given(st.integers(0, 50), st.floats(0, 1e7))
def test_hazard_grows_with_losses_and_falls_with_time(losses: int, seconds: float) -> None:
    assert hazard(losses + 1, seconds) > hazard(losses, seconds) > 0
    assert hazard(losses, seconds + 60) < hazard(losses, seconds)


@given(st.floats(0.01, 5))
def test_with_much_evidence_the_observed_rate_prevails(rate: float) -> None:
    hours = 1_000_000
    assert hazard(round(rate * hours), hours * 3600) == pytest.approx(rate, rel=1e-2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0), "losses must be >= 0; got -1"),
        ((0, -1), "node_seconds must be >= 0"),
        ((0, float("nan")), "node_seconds"),
        ((0, 0, -1), "prior_losses must be >= 0"),
        ((0, 0, 1, 0), "prior_node_hours must be > 0"),
    ],
)
def test_impossible_counts_are_refused(arguments: tuple[float, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        hazard(*arguments)  # type: ignore[arg-type]
