"""Finds the node that holds all others up, from the ranks' own times of a step."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ebbflow.planners.training.failures.stragglers import StragglerWatch, late_workers


@dataclass(slots=True)
class Lateness:
    """Turns reports of rank times into the rank to replace, by the rule of
    ``planners.training.failures.stragglers``."""

    window: int = 20  # reports
    share: float = 0.5  # of the median step that a rank must come late
    pause: float = 300.0  # seconds between replacements
    _rows: deque[Sequence[float]] = field(default_factory=deque)
    _watch: StragglerWatch = field(init=False)

    def __post_init__(self) -> None:
        self._watch = StragglerWatch(pause=self.pause)

    def restart(self) -> None:
        """Forget the times of a generation that has ended."""
        self._rows.clear()

    def look(self, now: float, ready: object) -> int | None:
        """Take the seconds after which each rank was ready to exchange gradients, and return the rank to replace."""
        if not isinstance(ready, Sequence) or len(ready) < 2:
            return None
        self._rows.append([float(seconds) for seconds in ready])
        if len(self._rows) < self.window:
            return None
        rows = [row for row in self._rows if len(row) == len(ready)]
        self._rows.clear()
        step = float(np.median([max(row) for row in rows])) if rows else 0.0
        return self._watch.look(now, late_workers(rows, step, self.share)) if step > 0 else None
