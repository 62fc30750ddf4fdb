"""What a recovery policy sees of one job on nodes that come and go, and what it is asked."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol


@dataclass(frozen=True, slots=True)
class RecoveryInput:
    """One job between two steps. Times in seconds."""

    now: float
    nodes: int  # that it trains on
    spare: int  # usable, but not part of it yet
    joining: int  # being set up
    unsaved: float  # work since the last checkpoint
    step: float  # time of one step
    checkpoint: float  # time of one checkpoint
    restart: float  # time of a restart from a checkpoint
    gaps: tuple[float, ...]  # between the moments so far at which it lost nodes; the first from its start
    age: float  # since the last such moment, or its start
    node_seconds: float  # observed
    speed: Callable[[int], float]  # samples/s by nodes
    notice: float = inf  # when a node that it trains on will leave; inf: no notice


class RecoveryPolicy(Protocol):
    """When to save, and when a restart with more nodes is worth its cost. What a loss costs is not its choice."""

    @property
    def name(self) -> str: ...

    def save(self, seen: RecoveryInput) -> bool:
        """Tell whether to save a checkpoint before the next step."""
        ...

    def grow(self, seen: RecoveryInput) -> bool:
        """Tell whether to save and restart now, so that the spare nodes take part."""
        ...
