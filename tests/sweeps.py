"""Long sweeps over alike cases: ``make test`` runs some of them, evenly spread, and ``make bench`` all."""

from collections.abc import Iterable
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

Value = TypeVar("Value")


def spread(values: Iterable[Value], step: int, first: int = 0) -> list[Value | ParameterSet]:
    """Return ``values`` to parametrize a test by: all but each ``step``-th from ``first`` on are slow ones."""
    return [
        value if i % step == first else pytest.param(value, marks=pytest.mark.slow)
        for i, value in enumerate(values)
    ]
