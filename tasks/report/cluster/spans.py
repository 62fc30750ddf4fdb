"""What a history of a cluster holds of each node, lease, app and decision."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import inf

from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import OVER, AppSpec, Decided
from ebbflow.tasks.report.cluster.values import DecisionRow, PhaseSpan, Sample

_SMALL = ("pool", "current")  # that others than the page look up
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

    def phase(self, until: float) -> PhaseSpan:
        """Return the phase that it was in at ``until``."""
        known = [span for span in self.phases if span.at <= until]
        return known[-1] if known else self.phases[0]

    def ended(self, until: float) -> float | None:
        """Return since when it is over, as of ``until``; ``None`` while it is not."""
        last = self.phase(until)
        return last.at if last.phase in OVER else None

    def service(self, leases: Mapping[int, LeaseSpan], until: float) -> float:
        """Return the GPU-seconds of all its leases until ``until``; ``leases``: those of its cluster, by number."""
        spans = (leases[number] for number in self.leases)
        return self.before + sum(
            max(0.0, min(until if s.until is None else s.until, until) - s.since) for s in spans
        )

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


def quiet(row: DecisionRow | Decided) -> bool:
    """Tell whether a decision left everything as it was, as far as its outcome tells."""
    if row.kind in ("guard", "recovery"):
        return False
    if row.kind == "replan":
        return row.outcome.get("kind", "switch") != "switch"
    if row.kind == "auction" and "placements" in row.outcome:  # those that changed
        return not row.outcome["placements"]
    return not any(row.outcome.values())


class KeptInputs:
    """Says when a decision's inputs will not be shown any more.

    A page shows ``most`` rows of decisions at most: the newest that changed something, then the newest of the others;
    equal ones that follow each other are one row, with the last one's inputs (``words.decision_rows``).

    Args:
        most: rows.
        strip: called with the place of each decision whose inputs can go.
    """

    def __init__(self, most: int, strip: Callable[[int], None]) -> None:
        self._most, self._strip = most, strip
        self._rows: tuple[deque[deque[int]], deque[deque[int]]] = (deque(), deque())
        self._last: Decided | None = None

    def add(self, place: int, decided: Decided) -> None:
        """Take the next decision that the page may show."""
        rows = self._rows[quiet(decided)]
        before, self._last = self._last, without_inputs(decided)
        if before is not None and _same(before, decided):
            row = rows[-1]
            row.append(place)
            # what followed of a scaling target, which nobody knows yet, can make rows of its own of them
            if len(row) > (self._most if decided.kind == "scaling" else 1):
                self._strip(row.popleft())
            return
        rows.append(deque([place]))
        if len(rows) > self._most:
            for gone in rows.popleft():
                self._strip(gone)


def without_inputs(decided: Decided) -> Decided:
    """Return a decision without its inputs, but for those that are looked up by name."""
    return replace(decided, inputs={name: decided.inputs[name] for name in _SMALL if name in decided.inputs})


def _same(a: Decided, b: Decided) -> bool:
    return (a.kind, a.app, a.reason, a.outcome) == (b.kind, b.app, b.reason, b.outcome)
