"""Population-based training: who copies whom, and with which hyperparameters it continues.

Source: Jaderberg et al., arXiv 1711.09846, 2017, sections 3 and 4.1.1:
truncation selection as *exploit*, perturbation by 0.8 or 1.2 and resampling as *explore*. Members are compared as
they come, by the last epoch that each has reported and that is not beyond the member's own.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import exp, isfinite, log
from typing import Any, Literal, Protocol

import numpy as np

from ebbflow.planners.errors import OptionError

FRACTION = 0.2
"""Of the population: members of the worst fraction copy one of the best."""
FACTORS = (0.8, 1.2)
RESAMPLE = 0.25
"""Probability that a hyperparameter is drawn anew instead of perturbed."""


class Dimension(Protocol):
    """The range of one hyperparameter."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> Literal["float", "log", "int", "choice"]: ...
    @property
    def low(self) -> float: ...
    @property
    def high(self) -> float: ...
    @property
    def choices(self) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class Member:
    """What is known of one member."""

    number: int
    epoch: int  # that ``value`` is of
    value: float  # of the metric, then


def peer_of(
    member: Member, population: Collection[Member], rng: np.random.Generator, *, maximize: bool
) -> int | None:
    """Return the number of the member that ``member`` copies; ``None``: it continues as it is.

    Those that have reported nothing yet, or no number, are left out. At least one is in either fraction where there
    are two, and nobody in both. Of equal ones the one that began earlier is better.

    Raises ``OptionError`` for a member that is not of the population.
    """
    if member not in population:
        raise OptionError(f"member {member.number} must be of the population; it is not")
    known = [one for one in population if isfinite(one.value)]
    sign = -1.0 if maximize else 1.0
    ranked = sorted(known, key=lambda one: (sign * one.value, one.number))
    count = min(max(1, int(FRACTION * len(ranked))), len(ranked) // 2)
    if not count or member not in ranked[-count:]:
        return None
    return ranked[int(rng.integers(count))].number


def explored(
    parameters: Mapping[str, Any], space: Sequence[Dimension], rng: np.random.Generator
) -> dict[str, Any]:
    """Return hyperparameters near ``parameters``, each within its range of ``space``.

    Numbers are multiplied by one of ``FACTORS`` (whole ones move by one at least), a choice becomes the one before or
    after it; with the probability ``RESAMPLE`` either is drawn anew. Raises ``OptionError`` for one that is missing.
    """
    missing = [one.name for one in space if one.name not in parameters]
    if missing:
        raise OptionError(f"hyperparameter {missing[0]} must have a value; it has none")
    return {
        one.name: _drawn(one, rng) if rng.random() < RESAMPLE else _moved(one, parameters[one.name], rng)
        for one in space
    }


def _moved(one: Dimension, value: Any, rng: np.random.Generator) -> Any:
    up = bool(rng.integers(2))
    if one.kind == "choice":
        at = list(one.choices).index(value) + (1 if up else -1)
        return one.choices[min(max(at, 0), len(one.choices) - 1)]
    moved = min(max(value * FACTORS[up], one.low), one.high)
    if one.kind != "int":
        return float(moved)
    if round(moved) == value:
        moved = value + (1 if up else -1)
    return int(min(max(round(moved), one.low), one.high))


def _drawn(one: Dimension, rng: np.random.Generator) -> Any:
    if one.kind == "choice":
        return one.choices[int(rng.integers(len(one.choices)))]
    if one.kind == "int":
        return int(rng.integers(int(one.low), int(one.high) + 1))
    if one.kind == "log":
        return float(min(max(exp(rng.uniform(log(one.low), log(one.high))), one.low), one.high))
    return float(rng.uniform(one.low, one.high))
