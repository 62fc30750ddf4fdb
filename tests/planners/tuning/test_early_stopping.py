"""Rungs, expected lives, and forecasts of learning curves."""

from math import inf

import numpy as np
import optuna
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.locality import Level
from ebbflow.planners.tuning.early_stopping import (
    Curves,
    TrialState,
    brackets,
    epochs_left,
    hyperband_epochs_left,
    rungs,
    work_left,
)


def test_rungs() -> None:
    assert rungs(1, 81, 3) == (1, 3, 9, 27)
    assert rungs(2, 16, 4) == (2, 8)
    assert rungs(5, 5, 2) == ()
    for wrong in ((0, 5, 2), (5, 4, 2), (1, 5, 1)):
        with pytest.raises(OptionError):
            rungs(*wrong)


def test_expected_life() -> None:
    assert epochs_left(0, 9, (1, 3), 3) == pytest.approx(1 + 2 / 3 + 6 / 9)
    assert epochs_left(3, 9, (1, 3), 3) == 6
    assert epochs_left(9, 9, (1, 3), 3) == 0
    assert epochs_left(2.5, 9, (1, 3), 3) == pytest.approx(0.5 + 6 / 3)
    with pytest.raises(OptionError):
        epochs_left(10, 9, (), 3)


@given(st.integers(1, 100), st.integers(2, 5), st.floats(0, 1))
def test_expected_life_is_short_of_the_whole(most: int, factor: int, share: float) -> None:
    done = share * most
    compared = rungs(1, most, factor)
    left = epochs_left(done, most, compared, factor)
    assert 0 <= left <= most - done + 1e-9
    assert epochs_left(done, most, (), factor) == pytest.approx(most - done)


def curve(beta0: float, beta1: float, beta2: float, count: int) -> list[tuple[int, float]]:
    return [(k, 1 / (beta0 * k + beta1) + beta2) for k in range(1, count + 1)]


def test_a_clean_curve_is_forecast() -> None:
    losses = curve(0.5, 1.0, 0.2, 8)
    truth = 1 / (0.5 * 30 + 1) + 0.2
    found = Curves(30, maximise=False).forecast(losses)
    assert found is not None
    assert found.middle == pytest.approx(truth, rel=0.02)
    assert found.low <= found.middle <= found.high
    as_accuracy = Curves(30).forecast([(k, 1 - loss) for k, loss in losses])
    assert as_accuracy is not None
    assert as_accuracy.middle == pytest.approx(1 - truth, rel=0.02)


def test_prospects() -> None:
    poor, curves = curve(0.5, 1.0, 0.5, 8), Curves(30, maximise=False)
    assert curves.hopeless(poor, best=0.3)
    assert not curves.hopeless(poor, best=0.9)
    assert not curves.hopeless(poor, best=None)
    assert not curves.hopeless(poor[:4], best=0.3)  # too few points
    assert curves.hopeless([(k, 0.7) for k in range(1, 9)], best=0.3)  # flat: it ends where it is
    assert not curves.hopeless([(k, -loss) for k, loss in poor], best=0.3)  # no loss


@settings(max_examples=15)
@given(st.integers(0, 50))
def test_noise_rarely_kills_a_winner(seed: int) -> None:
    rng = np.random.default_rng(seed)
    losses = [(k, loss + float(rng.normal(0, 0.01))) for k, loss in curve(0.8, 1.0, 0.1, 10)]
    truth = 1 / (0.8 * 30 + 1) + 0.1
    assert not Curves(30, maximise=False).hopeless(losses, best=truth + 0.02)


def test_outlook_is_what_an_auctioneer_asks_for() -> None:
    trials = [TrialState(3, 6.0, 2.0), TrialState(0, 2.0, inf, longest=9.0)]
    app = work_left(trials, max_gpus=2, spent=10.0)
    assert app.demand == 4
    assert app.total_work == 10 + 6 * 2 + 2 * 2
    # malleable: 12 + 18 GPU-s on two GPUs, none longer than its own work over two
    assert app.remaining(np.array([2, 4]), Level.SLOT) == pytest.approx([15.0, 9.0])


def test_bad_curves() -> None:
    with pytest.raises(OptionError):
        Curves(0)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 200), st.integers(2, 5))
@example(1, 242, 3)  # an exact power, whose logarithm falls short of 5 in floating point
@example(1, 999, 10)
def test_brackets_of_hyperband_are_optunas(least: int, more: int, factor: int) -> None:
    most = least + more
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(pruner=optuna.pruners.HyperbandPruner(least, most, factor))
    pruner = study.pruner
    assert isinstance(pruner, optuna.pruners.HyperbandPruner)
    pruner._try_initialization(study)
    budgets = pruner._trial_allocation_budgets
    assert [share for share, _ in brackets(least, most, factor)] == pytest.approx(
        [budget / sum(budgets) for budget in budgets]
    )
    left = [hyperband_epochs_left(done, least, most, factor) for done in range(most + 1)]
    assert left[-1] == 0
    assert all(0 <= one <= most - done + 1e-9 for done, one in enumerate(left))


def test_a_trial_of_hyperband_lives_longer_than_one_of_halving_and_as_long_once_it_has_survived() -> None:
    assert hyperband_epochs_left(0, 1, 9, 3) > epochs_left(0, 9, (1, 3), 3)
    assert hyperband_epochs_left(5, 1, 9, 3) == pytest.approx(4.0)
