"""Checkpoint intervals, and the recovery policy's rules."""

from dataclasses import replace
from math import exp, inf, nan, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.recovery import RecoveryInput
from ebbflow.planners.training.saving.checkpointing import (
    COMMON_CAUSE,
    WHOLE_RUN,
    HazardAware,
    chance_of_loss,
    daly_interval,
    save_interval,
    state_losses,
    young_interval,
)

SEEN = RecoveryInput(
    now=10_000.0,
    nodes=20,
    spare=0,
    joining=0,
    unsaved=50.0,
    step=10.0,
    checkpoint=12.0,
    restart=70.0,
    gaps=(),
    age=5_000.0,
    node_seconds=200_000.0,
    speed=float,
)


def overhead(interval: float, checkpoint: float, between: float) -> float:
    """Expected time per unit of work with exponential losses (Daly 2006, equation 20), restarts left out."""
    return between * (exp((interval + checkpoint) / between) - 1) / interval


@given(st.floats(1, 100), st.floats(300, 1e6))
def test_daly_is_at_least_as_good_as_young_and_nearly_optimal(checkpoint: float, between: float) -> None:
    daly = daly_interval(checkpoint, between)
    at = overhead(daly, checkpoint, between)
    assert at <= overhead(young_interval(checkpoint, between), checkpoint, between) * (1 + 1e-9)
    best = min(overhead(daly * f, checkpoint, between) for f in (0.5, 0.8, 0.9, 1.0, 1.1, 1.25, 2.0))
    assert at <= best * 1.001


def test_intervals_at_their_limits() -> None:
    assert young_interval(12.5, 3600.0) == pytest.approx(300.0)
    assert daly_interval(100.0, 50.0) == 50.0
    assert daly_interval(10.0, 1e9) == pytest.approx(sqrt(2e10), rel=1e-3)
    assert daly_interval(10.0, inf) == inf
    with pytest.raises(OptionError, match="between_losses"):
        daly_interval(10.0, 0.0)
    with pytest.raises(OptionError, match="checkpoint"):
        young_interval(-1.0, 10.0)


RATES = st.floats(0, 1e-3)
WINDOWS = st.floats(0, 1e5)


@given(RATES, st.integers(1, 64), WINDOWS)
def test_without_replicas_each_lost_node_is_a_loss_of_state(rate: float, nodes: int, window: float) -> None:
    found = state_losses(rate, nodes, 1, window)
    assert found.rate == nodes * rate
    assert found.counted == "each lost node loses state"


@given(RATES, st.integers(2, 64), st.data(), WINDOWS)
def test_replicas_lose_state_more_seldom_the_more_there_are(
    rate: float, nodes: int, data: st.DataObject, window: float
) -> None:
    few = data.draw(st.integers(1, nodes - 1))
    found = [state_losses(rate, nodes, replicas, window).rate for replicas in (1, few, few + 1, nodes)]
    assert found == sorted(found, reverse=True)
    assert found[-1] >= min(nodes * rate, COMMON_CAUSE * rate + WHOLE_RUN)
    assert state_losses(rate, nodes, few, window / 2).rate <= found[1]
    assert state_losses(rate / 2, nodes, few, window).rate <= found[1]


def test_losses_of_state_are_those_of_the_formula() -> None:
    rate, window = 0.05 / 3600, 61.0
    alone = 0.9 * rate
    pair = 2 * alone * (1 - exp(-alone * window)) + 0.1 * rate + 1 / 86400
    assert state_losses(rate, 2, 2, window).rate == pytest.approx(pair)
    assert pair < 2 * rate
    six = 6 * alone * (1 - exp(-alone * window)) ** 2 + 0.1 * rate + 1 / 86400
    assert state_losses(rate, 6, 3, window).rate == pytest.approx(six)
    assert "the loss of all 3 nodes that have a part" in state_losses(rate, 6, 3, window).counted
    seldom = state_losses(1e-8, 4, 4, window)
    assert seldom.rate == 4e-8
    assert "the floor for whole runs" in seldom.counted
    assert state_losses(0.0, 4, 4, window).rate == 0.0
    assert state_losses(rate, 2, 2, 0.0, 0.0, 0.0).rate == 0.0


def test_two_replicas_are_lost_together_as_often_as_in_a_simulation() -> None:
    rate, window, count = 1e-3, 50.0, 100_000
    random = np.random.default_rng(1)
    one, other = (np.cumsum(random.exponential(1 / rate, count)) for _ in range(2))
    seen = min(one[-1], other[-1])
    together = 0
    for first, second in ((one, other), (other, one)):
        following = np.searchsorted(second, first)
        known = following < count
        together += int((second[following[known]] - first[known] <= window).sum())
    assert state_losses(rate, 2, 2, window, 0.0, 0.0).rate == pytest.approx(together / seen, rel=0.05)


def test_the_interval_between_saves_grows_with_what_survives() -> None:
    a_node = 0.05 / 3600
    every = [save_interval(0.5, 2.0, state_losses(a_node, 8, replicas, 62.0).rate) for replicas in (1, 2, 8)]
    assert every[0] == pytest.approx(daly_interval(0.5, 9000.0))
    assert 2.5 * every[0] < every[1] < every[2] < daly_interval(0.5, 86400.0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((-1.0, 2, 2, 1.0), "node_rate must be >= 0"),
        ((nan, 2, 2, 1.0), "node_rate must be >= 0"),
        ((0.1, 2, 2, inf), "window must be >= 0 and finite; got inf"),
        ((0.1, 2, 3, 1.0), "replicas must be between 1 and the nodes, 2; got 3"),
        ((0.1, 2, 0, 1.0), "replicas must be between 1"),
        ((0.1, 2, 2, 1.0, 1.5), "common must be between 0 and 1"),
        ((0.1, 2, 2, 1.0, 0.1, -1.0), "whole_run must be >= 0"),
    ],
)
def test_odd_losses_are_refused(given: tuple[float, ...], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        state_losses(*given)  # type: ignore[arg-type]


def test_chance_without_history_is_memoryless() -> None:
    assert chance_of_loss((), 99.0, 10.0, 30.0, 0.01) == pytest.approx(1 - exp(-0.2))


def test_chance_follows_regular_losses() -> None:
    gaps = (600.0,) * 9
    assert chance_of_loss(gaps, 300.0, 0.0, 100.0, 1e-4) < 0.002
    assert chance_of_loss(gaps, 560.0, 20.0, 60.0, 1e-4) > 0.89


@given(st.lists(st.floats(1, 1e5), max_size=8), st.floats(0, 1e5), st.floats(0.1, 1e4), st.floats(1e-9, 0.1))
def test_chance_is_a_probability(gaps: list[float], age: float, width: float, rate: float) -> None:
    assert 0 <= chance_of_loss(gaps, age, 5.0, 5.0 + width, rate) <= 1


def test_saves_at_dalys_interval_of_the_observed_hazard() -> None:
    policy = HazardAware(prior_losses=0.0)
    calm = replace(SEEN, gaps=(), age=1e5)
    assert not policy.save(replace(calm, unsaved=1e6))  # no loss was ever seen: nothing to fear
    often = replace(SEEN, gaps=tuple(range(100, 2100, 100)), node_seconds=20 * 21_000.0, age=0.0)
    between = 3600 / (20 * (20 / (1 + 20 * 21_000 / 3600)))
    interval = daly_interval(12.0, between)
    assert policy.save(replace(often, unsaved=2 * interval))
    assert not policy.save(replace(often, unsaved=interval / 4))


def test_saves_just_before_an_announced_loss_and_not_when_it_is_too_late() -> None:
    policy = HazardAware()
    assert not policy.save(replace(SEEN, notice=SEEN.now + 100.0))
    assert policy.save(replace(SEEN, notice=SEEN.now + 20.0))
    assert not policy.save(replace(SEEN, notice=SEEN.now + 11.0))
    assert not policy.save(replace(SEEN, unsaved=0.0, notice=SEEN.now + 20.0))


def test_grows_only_when_it_pays() -> None:
    policy = HazardAware()
    more = replace(SEEN, spare=10)
    assert policy.grow(more)
    assert not policy.grow(SEEN)
    assert not policy.grow(replace(more, joining=1))  # wait, and restart once
    assert not policy.grow(replace(more, speed=lambda nodes: 20.0))  # no faster
    stormy = replace(more, gaps=(120.0,) * 50, node_seconds=20 * 6_000.0)
    assert not policy.grow(stormy)  # the next loss comes before the restart has paid
