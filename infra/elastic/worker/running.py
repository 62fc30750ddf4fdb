"""A running checkpoint of one shard, whose parts were saved at different times (SCAR: CMU-CS-21-135, chapter 3)."""

import os
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from ebbflow.infra.elastic.application import Key, Value
from ebbflow.infra.elastic.wire.messages import ShardRecord
from ebbflow.infra.elastic.wire.snapshot import read, whole, write_quickly

if TYPE_CHECKING:
    from ebbflow.planners.training.saving.partial import Selection


def _priority() -> "Selection":
    from ebbflow.planners.training.saving.partial import PrioritySelection  # SciPy; workers start without

    return PrioritySelection()


@dataclass(slots=True)
class RunningCopy:
    """What would be left of a shard if its server died now."""

    path: str
    number: int
    saved: dict[Key, Value] = field(default_factory=dict)
    selection: "Selection" = field(default_factory=_priority)
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    @classmethod
    def open(cls, folder: str, number: int) -> "RunningCopy":
        """Return the copy of shard ``number`` in ``folder``, which another server may have written."""
        path = path_of(folder, number)
        return cls(path, number, read(path)[number].values if whole(path) else {})

    def refresh(self, values: dict[Key, Value], fraction: float) -> None:
        """Save ``fraction`` of the bytes, those that moved farthest since they were saved; at first all."""
        if not values:
            return
        keys = list(values)
        sizes = [float(max(np.asarray(values[key]).nbytes, 1)) for key in keys]
        distances = [self._distance(key, values[key]) for key in keys]
        if not self.saved:
            chosen = list(range(len(keys)))
        else:
            chosen = self.selection.select(distances, sizes, fraction * sum(sizes), self.rng)
        self.saved.update({keys[place]: values[keys[place]] for place in chosen})
        write_quickly(self.path, {self.number: ShardRecord(self.saved, {}, {})})

    def _distance(self, key: Key, value: Value) -> float:
        if key not in self.saved:
            return inf
        return float(np.linalg.norm(np.ravel(np.asarray(value, float) - np.asarray(self.saved[key], float))))


def path_of(folder: str, number: int) -> str:
    """Return the file of shard ``number``."""
    return os.path.join(folder, f"shard-{number:04}.bin")
