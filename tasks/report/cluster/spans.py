"""What a history of a cluster holds of each node, lease and app."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import OVER, AppSpec, Decided
from ebbflow.tasks.report.cluster.values import PhaseSpan, Sample

Placement = tuple[tuple[str, int], ...]


def number(value: object) -> float | None:
    """Return ``value`` as a finite number, or ``None`` when it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < float("inf") else None


@dataclass(slots=True)
class NodeSpan:
    """One stay of a node."""

    node: Node  # as last described
    since: float
    until: float | None = None
    ending: str = ""
    noticed: float | None = None  # when a firm notice came
    prices: list[tuple[float, float]] = field(default_factory=list)  # (from, dollars per hour)


@dataclass(slots=True)
class LeaseSpan:
    """One lease from its grant to its end."""

    number: int
    app: str
    node: str
    slot: int
    since: float
    price: float
    reason: str
    until: float | None = None
    recalled: float | None = None
    ended_for: str = ""


@dataclass(slots=True)
class AppHistory:
    """One app's life."""

    spec: AppSpec
    number: int  # order of arrival, from 1
    entered: float
    phases: list[PhaseSpan] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    checkpoint: str = ""
    held: list[tuple[float, int]] = field(default_factory=list)  # GPUs of leases that have not ended
    moves: list[tuple[float, Placement]] = field(default_factory=list)  # of those not called back either
    first_lease: float | None = None
    leases: list[int] = field(default_factory=list)
    rhos: list[Sample] = field(default_factory=list)
    goodput: list[Sample] = field(default_factory=list)
    before: float = 0.0  # GPU-seconds of leases that had ended before the first known event

    def active(self, until: float) -> list[tuple[float, float]]:
        """Return the spans in which it was neither over nor not yet there."""
        found: list[tuple[float, float]] = []
        begun: float | None = None
        for span in self.phases:
            if span.phase in OVER and begun is not None:
                found.append((begun, span.at))
                begun = None
            elif span.phase not in OVER and begun is None:
                begun = span.at
        if begun is not None:
            found.append((begun, max(begun, until)))
        return found


@dataclass(frozen=True, slots=True)
class Shown:
    """Which part of a history a page shows."""

    since: float = -inf
    until: float = inf
    pipeline: str = ""  # whose apps; empty: all

    def has(self, at: float, decided: Decided, apps: Mapping[str, AppHistory]) -> bool:
        """Tell whether it shows a decision that is made now, with the apps that there are now."""
        if not self.since <= at <= self.until:
            return False
        if not self.pipeline:
            return True
        if decided.app:
            return decided.app in apps and apps[decided.app].spec.pipeline == self.pipeline
        return any(
            app.phases[-1].phase not in OVER for app in apps.values() if app.spec.pipeline == self.pipeline
        )
