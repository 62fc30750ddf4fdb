"""What the runs say: totals by world and strategy, with 95 % intervals over the beginnings."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from tests.evaluation.renting.plan import STRATEGIES, WORLDS

Row = Mapping[str, Any]
"""One job under one strategy: ``driver.Outcome`` as JSON, with model, slack and strategy."""


class Value(NamedTuple):
    """A figure over all beginnings, and the half-width of its 95 % interval; NaN with a single beginning."""

    mean: float
    half: float

    def shown(self, form: str = "{:.2f}") -> str:
        """Return both as text."""
        if not np.isfinite(self.mean):
            return "–"
        return form.format(self.mean) + (f" ± {form.format(self.half)}" if np.isfinite(self.half) else "")


Measure = Callable[[Sequence[Row]], float]


def dollars_per_finished(rows: Sequence[Row]) -> float:
    """Return all dollars over the jobs that finished; NaN if none did."""
    finished = sum(row["finished"] for row in rows)
    return sum(row["dollars"] for row in rows) / finished if finished else float("nan")


def dollars_per_timely(rows: Sequence[Row]) -> float:
    """Return all dollars over the jobs that were done in time; NaN if none was."""
    timely = sum(row["in_time"] for row in rows)
    return sum(row["dollars"] for row in rows) / timely if timely else float("nan")


def in_time(rows: Sequence[Row]) -> float:
    """Return the per cent of jobs that finished before their deadline."""
    return 100.0 * sum(row["in_time"] for row in rows) / len(rows)


def availability(rows: Sequence[Row]) -> float:
    """Return the per cent of the jobs' time in which they trained."""
    return 100.0 * sum(row["trained"] for row in rows) / sum(row["seconds"] for row in rows)


def interruptions(rows: Sequence[Row]) -> float:
    """Return the nodes lost per job."""
    return sum(row["interruptions"] for row in rows) / len(rows)


def restarts(rows: Sequence[Row]) -> float:
    """Return the restarts per job, the first start included."""
    return sum(row["restarts"] for row in rows) / len(rows)


def hours(rows: Sequence[Row]) -> float:
    """Return hours per job until it was done or given up."""
    return sum(row["seconds"] for row in rows) / len(rows) / 3600.0


def on_demand(rows: Sequence[Row]) -> float:
    """Return the per cent of the dollars that went into on-demand nodes."""
    total = sum(row["dollars"] for row in rows)
    return 100.0 * sum(row["on_demand_dollars"] for row in rows) / total if total else 0.0


class Runs:
    """The rows of all experiments by world and beginning."""

    def __init__(self, found: Mapping[str, Any]) -> None:
        self.worlds: dict[str, list[list[Row]]] = {
            world: [rows for name, rows in found.items() if name.rpartition("-")[0] == world]
            for world in WORLDS
        }

    def of(self, world: str, strategy: str, keep: Callable[[Row], bool] = lambda _: True) -> list[list[Row]]:
        """Return the rows of one strategy that ``keep`` wants, by beginning."""
        return [
            [row for row in rows if row["strategy"] == strategy and keep(row)] for rows in self.worlds[world]
        ]

    def value(
        self, measure: Measure, world: str, strategy: str, keep: Callable[[Row], bool] = lambda _: True
    ) -> Value:
        """Return the mean over beginnings of a measure."""
        return _mean([measure(rows) for rows in self.of(world, strategy, keep) if rows])

    def difference(
        self,
        measure: Measure,
        world: str,
        first: str,
        second: str,
        keep: Callable[[Row], bool] = lambda _: True,
    ) -> Value:
        """Return the mean over beginnings of ``first``'s measure less ``second``'s, beginning by beginning."""
        pairs = zip(self.of(world, first, keep), self.of(world, second, keep), strict=True)
        return _mean([measure(one) - measure(other) for one, other in pairs if one and other])

    def ratio(
        self,
        measure: Measure,
        world: str,
        first: str,
        second: str,
        keep: Callable[[Row], bool] = lambda _: True,
    ) -> Value:
        """Return the mean over beginnings of ``first``'s measure over ``second``'s, beginning by beginning."""
        pairs = zip(self.of(world, first, keep), self.of(world, second, keep), strict=True)
        return _mean([measure(one) / measure(other) for one, other in pairs if one and other])

    def strategies(self) -> list[str]:
        """Return the strategies in their order."""
        return list(STRATEGIES)


def _mean(values: Sequence[float]) -> Value:
    known = np.array([value for value in values if np.isfinite(value)])
    if not len(known):
        return Value(float("nan"), float("nan"))
    if len(known) == 1:
        return Value(float(known[0]), float("nan"))
    spread = known.std(ddof=1) / np.sqrt(len(known))
    return Value(float(known.mean()), float(stats.t.ppf(0.975, len(known) - 1) * spread))


def verdict(difference: Value, *, less: bool) -> str:
    """Say whether a difference is below (or above) 0 beyond its interval."""
    turned = difference.mean if less else -difference.mean
    if not np.isfinite(difference.half):
        return "not told: too few beginnings"
    if abs(turned) + difference.half < 1e-9:
        return "equal"
    if turned + difference.half < 0:
        return "yes"
    return "**no**" if turned - difference.half > 0 else "not told by the beginnings"
