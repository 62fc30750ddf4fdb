"""The seams of the simulator: how a job truly progresses, and what becomes of lost work."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Protocol

from ebbflow.infra.simulation.traces.workloads import Job
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.scheduling import App, Placement


class JobModel(Protocol):
    """How one job truly progresses; what the scheduler believes is set by ``report``.

    The engine places it, lets it run, and asks how long nothing will change.
    """

    @property
    def done(self) -> bool: ...

    @property
    def steady(self) -> bool:
        """Tell whether its speed is known up to its end as long as its placement stays."""
        ...

    def place(self, placement: Placement, nodes: Mapping[str, Node]) -> None:
        """Continue with ``placement``; empty means that it holds nothing."""
        ...

    def advance(self, seconds: float, interference: float = 0.0) -> float:
        """Train for up to ``seconds`` with the rate lowered by the share ``interference``.

        Returns the seconds used: fewer if it finished on the way.
        """
        ...

    def horizon(self, interference: float = 0.0) -> float:
        """Return the seconds of training until it finishes or, if not ``steady``, until its speed may change."""
        ...

    def complete(self) -> None:
        """Become done: what was left was rounding."""
        ...

    def save(self) -> None:
        """Remember the present progress as the newest checkpoint."""
        ...

    def lose(self, kept: Placement) -> Placement:
        """Some GPUs vanished: go back to the checkpoint and return what it continues with, of ``kept``.

        A gang continues with nothing.
        """
        ...

    def report(self, app: App) -> None:
        """Set on ``app`` what a policy may read: ``remaining``, ``speed``, ``goodput``, ``max_gpus``."""
        ...

    def alone(self) -> float:
        """Return the seconds it takes from start to end on the GPUs that it asks for, well placed and never moved."""
        ...

    def score(self) -> float:
        """Return the placement score of its present placement: 1 as fast as well placed, less if slower (Themis)."""
        ...


ModelOf = Callable[[Job], JobModel]
"""Makes the model of one job of a workload."""


@dataclass(frozen=True, slots=True)
class Saves:
    """When jobs save a checkpoint besides whenever they are preempted."""

    every: float = inf  # s of holding a placement
    on_notice: bool = True  # a loss that was announced loses no work
