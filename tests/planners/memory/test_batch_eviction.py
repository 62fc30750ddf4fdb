"""Which slabs are evicted: the least active of a sample, as probable as published."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.eviction import (
    CheckActivity,
    MappedSlab,
    choose_victims,
    lightly_active_probability,
    sample_candidates,
    select_victims,
)

BUSY = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
CURVE = {
    0: (0.5987, 0.3487, 0.1074, 0.0282, 0.0060, 0.0010),
    1: (0.8981, 0.6974, 0.3221, 0.1130, 0.0302, 0.0059),
    2: (0.9804, 0.8891, 0.5583, 0.2528, 0.0834, 0.0193),
    5: (0.9999, 0.9978, 0.9389, 0.7216, 0.4032, 0.1509),
    10: (1.0000, 1.0000, 0.9994, 0.9829, 0.8725, 0.5881),
}
PROBABILITY = st.floats(0, 1)


def _slabs(n: int) -> list[MappedSlab]:
    return [MappedSlab(handle, f"client{handle % 4}", float(handle)) for handle in range(n)]


@pytest.mark.parametrize(("extra", "busy"), [(extra, busy) for extra in CURVE for busy in BUSY])
def test_the_curve_of_ten_evictions(extra: int, busy: float) -> None:
    expected = CURVE[extra][BUSY.index(busy)]
    assert lightly_active_probability(10, extra, busy) == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize(
    ("needed", "extra", "busy", "expected"),
    [(2, 1, 0.2, 0.896), (2, 0, 0.2, 0.64), (1, 1, 0.5, 0.75), (1, 0, 0.3, 0.7)],
)
def test_small_cases(needed: int, extra: int, busy: float, expected: float) -> None:
    assert lightly_active_probability(needed, extra, busy) == pytest.approx(expected)


@given(st.integers(0, 12), st.integers(0, 12), PROBABILITY, PROBABILITY)
def test_the_probability_grows_with_the_sample_and_falls_with_busy_slabs(
    needed: int, extra: int, one: float, other: float
) -> None:
    low, high = sorted((one, other))
    at = lightly_active_probability
    assert 0 <= at(needed, extra, high) <= at(needed, extra, low) + 1e-9 <= 1 + 1e-9
    assert at(needed, extra, low) <= at(needed, extra + 1, low) + 1e-9
    assert at(needed, extra, 0) == 1
    assert at(needed + 1, extra, 1) == 0


@pytest.mark.parametrize(("needed", "extra", "busy"), [(10, 2, 0.2), (10, 10, 0.5), (2, 1, 0.3), (5, 0, 0.1)])
def test_rounds_of_eviction_are_as_lucky_as_the_formula(needed: int, extra: int, busy: float) -> None:
    """Whole rounds on a daemon with many slabs: all victims idle, within three standard errors."""
    rng, rounds, slabs, lucky = np.random.default_rng(0), 1500, _slabs(400), 0
    for _ in range(rounds):
        active = dict(enumerate(np.where(rng.random(len(slabs)) < busy, 100.0, 0.0)))
        victims = select_victims(sample_candidates(slabs, needed, extra, rng), active, needed)
        lucky += all(active[one.slab] == 0 for one in victims)
    expected = lightly_active_probability(needed, extra, busy)
    error = (expected * (1 - expected) / rounds) ** 0.5
    assert abs(lucky / rounds - expected) <= 3 * error


def test_the_eviction_of_the_sources_figure() -> None:
    """Three devices are asked, two slabs go."""
    slabs = [MappedSlab(n, owner) for n, owner in enumerate("abc")]
    round_ = choose_victims(slabs, 2, 1, np.random.default_rng(0))
    asked = next(round_)
    assert isinstance(asked, CheckActivity)
    assert dict(asked.slabs) == {"a": (0,), "b": (1,), "c": (2,)}
    with pytest.raises(StopIteration) as end:
        round_.send({0: 31.0, 1: 2.0, 2: 9.0})
    decision = end.value.value
    assert [one.owner for one in decision.victims] == ["b", "c"]
    assert decision.messages == 3 + 3 + 2 * 2
    assert (
        decision.reason == "2 least active of 3 sampled slabs of 3 clients (3 answered), at most 9 blocks/s"
    )


def test_equally_active_slabs_go_by_their_age() -> None:
    slabs = [
        MappedSlab(3, "a", 5.0),
        MappedSlab(1, "a", 5.0),
        MappedSlab(2, "b", 4.0),
        MappedSlab(0, "b", 9.0),
    ]
    assert [one.slab for one in select_victims(slabs, {0: 0.0}, 3)] == [2, 1, 3]
    assert select_victims(slabs, {}, 0) == ()


@given(st.integers(0, 40), st.integers(0, 12), st.integers(0, 12), st.integers(0, 10**6), st.data())
def test_victims_are_the_lowest_of_the_sample(
    total: int, needed: int, extra: int, seed: int, data: st.DataObject
) -> None:
    slabs = _slabs(total)
    activity = {one.slab: data.draw(st.floats(0, 100)) for one in slabs}
    silent = data.draw(st.sets(st.sampled_from(["client0", "client1", "client2", "client3"])))
    round_ = choose_victims(slabs, needed, extra, np.random.default_rng(seed))
    if not total or needed + extra == 0:
        assert list(round_) == []
        return
    asked = next(round_)
    sample = {slab for own in asked.slabs.values() for slab in own}
    assert len(sample) == sum(map(len, asked.slabs.values())) == min(total, needed + extra)
    answers = {
        slab: activity[slab] for owner, own in asked.slabs.items() if owner not in silent for slab in own
    }
    with pytest.raises(StopIteration) as stop:
        round_.send(answers)
    decision = stop.value.value
    chosen = {one.slab for one in decision.victims}
    assert chosen <= sample
    assert len(chosen) == min(needed, len(sample))
    spared = [answers.get(slab, 0.0) for slab in sample - chosen]
    assert not (chosen and spared) or max(answers.get(slab, 0.0) for slab in chosen) <= min(spared)
    assert decision.messages <= 2 * (needed + extra) + 2 * needed


def test_numbers_outside_their_ranges_are_refused() -> None:
    rng = np.random.default_rng(0)
    for call in (
        lambda: lightly_active_probability(-1, 0, 0.5),
        lambda: sample_candidates([], 0, -1, rng),
    ):
        with pytest.raises(OptionError, match="needed and extra must not be negative"):
            call()
    with pytest.raises(OptionError, match=r"busy must be a probability, not 1\.1"):
        lightly_active_probability(1, 1, 1.1)
