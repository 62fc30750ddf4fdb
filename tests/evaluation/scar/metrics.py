"""What the trials say: means with 95 % intervals, reductions against whole checkpoints, and verdicts on claims."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.evaluation.scar.plan import SETTINGS, TRADITIONAL
from tests.evaluation.scar.runs import Way, key_of

Z = 1.96  # of a 95 % interval
NEAR = 15.0  # points beside a published interval that models of this size are allowed

LABELS: Mapping[str, str] = {
    "mlr-8": "MLR (C = 8)",
    "mlr": "MLR (C = 16)",
    "mf": "MF",
    "cnn-shard": "CNN by shard",
    "cnn-layer": "CNN by layer",
    "lda-synthetic": "LDA (synthetic)",
    "lda-reference": "LDA (reference)",
}


class Value(NamedTuple):
    """A mean and the half-width of its 95 % interval."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def shown(self, form: str = "{:.2f}") -> str:
        """Return both as text."""
        return f"{form.format(self.mean)} ± {form.format(self.half)}"


class Trials:
    """All results on one model; the ways of several experiments have the same failures."""

    def __init__(self, name: str, parts: Sequence[Mapping[str, Any]]) -> None:
        first = parts[0]
        if any(
            part["failed"] != first["failed"] or part["criterion"] != first["criterion"] for part in parts
        ):
            raise ValueError(f"experiments on {name} must have the same failures")
        self.name, self.label, self.setting = name, LABELS[name], SETTINGS[name]
        self.count, self.base = len(first["failed"]), float(np.mean(first["base"]))
        self.failed = float(np.mean(first["failed"]))
        self.rework = {key: np.array(values) for part in parts for key, values in part["rework"].items()}
        self.late = {key: count for part in parts for key, count in part["late"].items()}

    def has(self, way: Way) -> bool:
        """Tell whether this way was tried."""
        return key_of(way) in self.rework

    def cost(self, way: Way) -> Value:
        """Return the rework, iterations."""
        values = self.rework[key_of(way)]
        return Value(float(values.mean()), Z * float(values.std(ddof=1)) / len(values) ** 0.5)

    def relative(self, way: Way) -> Value:
        """Return the rework in per cent of that of whole checkpoints, all restored, over the same failures.

        The interval is that of a ratio of two means over paired trials (delta method).
        """
        mine, whole = self.rework[key_of(way)], self.rework[key_of(TRADITIONAL)]
        ratio = float(mine.mean() / whole.mean())
        spread = (mine - ratio * whole).std(ddof=1) / len(mine) ** 0.5 / abs(whole.mean())
        return Value(100 * ratio, 100 * Z * float(spread))

    def saved(self, way: Way) -> Value:
        """Return how much less rework there is than with whole checkpoints, per cent."""
        ratio = self.relative(way)
        return Value(100 - ratio.mean, ratio.half)

    def less(self, way: Way, other: Way) -> bool | None:
        """Tell whether the first way costs less than the other; ``None`` where the paired trials do not tell."""
        change = self.rework[key_of(way)] - self.rework[key_of(other)]
        half = Z * float(change.std(ddof=1)) / len(change) ** 0.5
        return None if abs(change.mean()) <= half else bool(change.mean() < 0)


def trials(found: Mapping[str, Any]) -> list[Trials]:
    """Return the results of every model that was measured."""
    groups = {
        name: [found[key] for key in (f"{name}-partial", f"{name}-priority", f"{name}-total") if key in found]
        for name in SETTINGS
    }
    return [Trials(name, parts) for name, parts in groups.items() if parts]


def against(values: Mapping[str, Value], low: float, high: float) -> str:
    """Return a verdict on a published interval: which models lie in it, which near, which elsewhere.

    A model lies in it if its mean does, and near if its own interval reaches it or it is ``NEAR`` points away.
    """
    inside = [name for name, value in values.items() if low <= value.mean <= high]
    rest = {name: value for name, value in values.items() if name not in inside}
    near = [
        name
        for name, value in rest.items()
        if (value.high >= low and value.low <= high) or low - NEAR <= value.mean <= high + NEAR
    ]
    above = [name for name, value in rest.items() if name not in near and value.mean > high]
    below = [name for name, value in rest.items() if name not in near and value.mean < low]
    words = [
        f"{word}: {', '.join(names)}"
        for word, names in (("inside", inside), ("near", near), ("more", above), ("**less**", below))
        if names
    ]
    return "; ".join(words)


def holds(by_model: Mapping[str, bool | None]) -> str:
    """Return a verdict on a claim about every model: ``None`` where the trials do not tell."""
    yes, no = [[name for name, value in by_model.items() if value is wanted] for wanted in (True, False)]
    open_ = [name for name, value in by_model.items() if value is None]
    if not no and not open_:
        return f"yes: all {len(yes)}"
    words = [f"yes: {', '.join(yes)}"] if yes else []
    words += [f"**no**: {', '.join(no)}"] if no else []
    words += [f"not told by the trials: {', '.join(open_)}"] if open_ else []
    return "; ".join(words)


def span(values: Mapping[str, Value]) -> str:
    """Return the least and the largest mean, per cent."""
    means = [value.mean for value in values.values()]
    return f"{min(means):.0f} to {max(means):.0f} %"
