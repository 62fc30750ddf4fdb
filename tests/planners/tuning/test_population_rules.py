"""Population-based training: who copies whom, and what it continues with."""

from dataclasses import dataclass
from math import nan
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.tuning.population import FRACTION, Member, explored, peer_of


@dataclass(frozen=True)
class Range:
    name: str
    kind: Literal["float", "log", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    choices: tuple[Any, ...] = ()


SPACE = (
    Range("lr", "log", 1e-4, 1.0),
    Range("dropout", "float", 0.0, 0.5),
    Range("layers", "int", 1, 9),
    Range("act", "choice", choices=("relu", "tanh", "gelu")),
)
VALUES = st.lists(st.floats(-5, 5) | st.just(nan), min_size=1, max_size=30)


@given(VALUES, st.booleans(), st.integers(0, 2**32 - 1))
def test_the_worst_copy_the_best_and_nobody_else_does(values: list[float], maximize: bool, seed: int) -> None:
    population = [Member(number, 3, value) for number, value in enumerate(values)]
    known = [one for one in population if one.value == one.value]
    most = max(1, int(FRACTION * len(known)))
    sign = 1.0 if maximize else -1.0
    copies = {}
    for one in population:
        peer = peer_of(one, population, np.random.default_rng(seed), maximize=maximize)
        if peer is not None:
            copies[one.number] = peer
            assert sum(sign * other.value < sign * one.value for other in known) < most
            assert sum(sign * other.value > sign * population[peer].value for other in known) < most
    assert not set(copies) & set(copies.values())
    assert len(copies) == min(most, len(known) // 2)


def test_a_member_alone_or_without_a_number_continues() -> None:
    rng = np.random.default_rng(0)
    alone = Member(0, 1, 0.5)
    assert peer_of(alone, [alone], rng, maximize=True) is None
    assert (
        peer_of(Member(1, 1, nan), [alone, Member(1, 1, nan), Member(2, 1, 1.0)], rng, maximize=True) is None
    )
    assert peer_of(alone, [alone, Member(1, 9, 0.7)], rng, maximize=True) == 1
    assert peer_of(alone, [alone, Member(1, 9, 0.7)], rng, maximize=False) is None
    with pytest.raises(OptionError, match="member 5 must be of the population"):
        peer_of(Member(5, 1, 0.1), [alone], rng, maximize=True)


@given(
    st.floats(1e-4, 1.0), st.floats(0, 0.5), st.integers(1, 9), st.sampled_from(SPACE[3].choices),
    st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_what_is_explored_is_near_or_drawn_anew_and_within_its_range(
    lr: float, dropout: float, layers: int, act: str, seed: int
) -> None:
    before = {"lr": lr, "dropout": dropout, "layers": layers, "act": act}
    after = explored(before, SPACE, np.random.default_rng(seed))
    assert list(after) == list(before)
    assert 1e-4 <= after["lr"] <= 1.0
    assert 0.0 <= after["dropout"] <= 0.5
    assert isinstance(after["layers"], int)
    assert 1 <= after["layers"] <= 9
    assert after["act"] in SPACE[3].choices
    assert after == explored(before, SPACE, np.random.default_rng(seed))


def test_most_numbers_move_by_a_fifth() -> None:
    space = (Range("lr", "log", 1e-4, 1.0),)
    found = [explored({"lr": 0.1}, space, np.random.default_rng(seed))["lr"] for seed in range(400)]
    perturbed = sum(value == pytest.approx(0.08) or value == pytest.approx(0.12) for value in found)
    assert 260 < perturbed < 340, "three of four"
    with pytest.raises(OptionError, match="hyperparameter lr must have a value"):
        explored({}, space, np.random.default_rng(0))
