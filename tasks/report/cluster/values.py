"""What a cluster did and why: the values behind ``ebbflow report``, and their JSON form.

All moments are seconds since the Unix epoch, as in the ledger; money is in dollars, service in GPU-seconds. A report
covers ``since`` to ``until``: what lasted longer is counted for the part inside.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ebbflow.planners.model.ledger import AppKind, AppPhase, DecisionKind
from ebbflow.tasks.apps.aggregators import AggregationReport
from ebbflow.tasks.drawing.codec import from_text, to_text

FORMAT = 2  # of the JSON form; grows when a key changes its name or meaning

ChangeKind = Literal[
    "came",
    "left",
    "reclaimed",  # left after a firm notice: the provider took it back
    "lost",  # left without a notice, with leases on it
    "notice",  # firm: it will leave
    "advice",  # it may leave
]
DeadlineState = Literal["", "met", "missed", "on course", "late", "open"]


@dataclass(frozen=True, slots=True)
class LoopReport:
    """A capacity loop that led the cluster from ``at`` on."""

    at: float
    token: int
    holder: str


@dataclass(frozen=True, slots=True)
class KindCount:
    """Nodes of one instance type and market."""

    instance_type: str
    market: str
    nodes: int
    gpus: int


@dataclass(frozen=True, slots=True)
class CapacityStep:
    """The nodes from ``at`` until the next entry."""

    at: float
    revision: int = field(metadata={"former": "epoch"})
    nodes: int
    gpus: int
    cores: int
    leaving: int = 0  # of the nodes, those with a firm notice
    kinds: tuple[KindCount, ...] = ()


@dataclass(frozen=True, slots=True)
class CapacityChange:
    """Nodes that came, left or got a notice."""

    at: float
    kind: ChangeKind
    nodes: tuple[str, ...]
    revision: int = field(default=0, metadata={"former": "epoch"})
    leases: int = 0  # that were on them
    deadline: float | None = None  # of notices, the first
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One stay of a node."""

    id: str
    instance_type: str
    market: str
    zone: str
    cores: int
    gpus: int
    price: float  # dollars per hour, the last known
    since: float
    until: float | None  # None: it is there
    ending: Literal["", "left", "reclaimed", "lost"] = ""
    gpu_seconds: float = 0.0  # within the report's time
    leased: float = 0.0  # GPU-seconds of them


@dataclass(frozen=True, slots=True)
class LeaseReport:
    """One GPU for one app, for the part within the report's time."""

    number: int
    app: str
    node: str
    slot: int
    since: float
    until: float  # when it ended, or the report's end
    over: bool
    recalled: float | None = None  # when it was called back
    price: float = 0.0  # dollars per hour
    granted_for: str = ""
    ended_for: str = ""

    @property
    def seconds(self) -> float:
        return self.until - self.since


@dataclass(frozen=True, slots=True)
class StageSpan:
    """One run of a query's stage."""

    app: str
    name: str
    status: str  # completed, reused, cancelled, failed or running
    since: float
    until: float
    plan: str = ""
    rows: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class Sample:
    """A figure at a moment."""

    at: float
    value: float


@dataclass(frozen=True, slots=True)
class PhaseSpan:
    """An app's phase from ``at`` until the next entry."""

    at: float
    phase: AppPhase
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RhoReport:
    """Finish-time fairness: time to the end as shared over the time alone on the app's share of the cluster."""

    value: float | None  # None: not known
    bound: bool = False  # the value is the least that it can still be
    how: str = ""  # it was computed, or why it is not known
    share: float | None = None  # GPUs, the mean of what it was entitled to while it was there


@dataclass(frozen=True, slots=True)
class AppRow:
    """One app."""

    id: str
    number: int  # order of arrival, from 1
    kind: AppKind
    team: str
    title: str
    pipeline: str
    phase: AppPhase
    reason: str
    entered: float
    ended: float | None
    gpus: int  # wanted
    held: int  # GPUs, at the report's end
    first_wait: float | None  # s from its arrival to its first lease; None: it has had none
    waited: float  # s in all without a lease, or for a query without a share
    service: float  # GPU-seconds
    leases: int
    restarts: int  # times it continued elsewhere or with another number of GPUs
    returns: int  # times it came back after it was over or lost
    saves: int
    dollars: float
    rho: RhoReport
    weight: float = 1.0
    budget: float | None = None
    pipeline_budget: float | None = None  # of all apps of its pipeline
    deadline: float | None = None
    deadline_state: DeadlineState = ""
    margin: float | None = None  # s before the deadline that it ended, or will; negative: after
    progress: float | None = None  # 0 to 1
    step: int = 0
    seconds_left: float | None = None
    checkpoint: str = ""
    replans: int = 0  # that changed its plan
    phases: tuple[PhaseSpan, ...] = ()
    goodput: tuple[Sample, ...] = ()
    goodput_unit: str = ""
    rhos: tuple[Sample, ...] = ()  # as the policy saw them

    @property
    def label(self) -> str:
        """Return what people call it."""
        return self.title or self.id


DECISIONS = 600  # rows of decisions that a page shows at most


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """A decision with what it was based on."""

    number: int  # of its event
    at: float
    kind: DecisionKind
    app: str
    revision: int = field(metadata={"former": "epoch"})
    reason: str
    seconds: float = 0.0  # that it took
    inputs: Mapping[str, Any] = field(default_factory=dict)
    outcome: Mapping[str, Any] = field(default_factory=dict)
    became: str = ""  # what followed of a scaling target, as far as is known


@dataclass(frozen=True, slots=True)
class MoneyRow:
    """What nodes of one instance type and market have cost."""

    instance_type: str
    market: str
    nodes: int
    node_hours: float
    dollars: float  # billed
    list_dollars: float | None  # the same time on-demand; None: a list price is not known
    free_hours: float = 0.0  # not billed: the provider took the node back within its first hour
    gpu_hours: float = 0.0
    leased_hours: float = 0.0  # GPU-hours of them that were leased

    @property
    def idle(self) -> float | None:
        """Return the share of GPU time that nobody leased; ``None`` without GPUs."""
        return max(0.0, 1 - self.leased_hours / self.gpu_hours) if self.gpu_hours > 0 else None

    @property
    def saved(self) -> float | None:
        """Return the share of the list price that was saved; ``None`` where that is not known or 0."""
        return 1 - self.dollars / self.list_dollars if self.list_dollars else None


@dataclass(frozen=True, slots=True)
class TeamRow:
    """What one team's leases have cost."""

    team: str
    apps: int
    gpu_hours: float
    dollars: float


@dataclass(frozen=True, slots=True)
class MoneyReport:
    """What the cluster has cost."""

    rows: tuple[MoneyRow, ...] = ()
    total: MoneyRow = field(default_factory=lambda: MoneyRow("all", "", 0, 0.0, 0.0, 0.0))
    teams: tuple[TeamRow, ...] = ()
    leased_dollars: float = 0.0  # of leases, at their nodes' prices
    idle_dollars: float = 0.0  # of the time of GPUs that nobody leased, at their nodes' prices
    unpriced: int = 0  # nodes without a price, counted as free


@dataclass(frozen=True, slots=True)
class FairnessReport:
    """How evenly apps were treated, over those whose ρ is known."""

    apps: int
    worst: float | None = None
    worst_app: str = ""
    jain: float | None = None  # of ρ: 1 when all are equal
    above: int = 0  # apps that would have been sooner alone on their share


@dataclass(frozen=True, slots=True)
class LatencyRow:
    """How long something took."""

    name: str
    count: int
    median: float  # s
    p99: float
    most: float


@dataclass(frozen=True)
class ClusterReport:
    """Everything worth knowing about one cluster over a span of time."""

    cluster: str
    since: float
    until: float
    number: int  # of the last event that is in it
    events: int
    pipeline: str = ""
    loops: tuple[LoopReport, ...] = ()
    capacity: tuple[CapacityStep, ...] = ()
    changes: tuple[CapacityChange, ...] = ()
    nodes: tuple[NodeReport, ...] = ()
    apps: tuple[AppRow, ...] = ()
    leases: tuple[LeaseReport, ...] = ()
    stages: tuple[StageSpan, ...] = ()
    decisions: tuple[DecisionRow, ...] = ()
    money: MoneyReport = field(default_factory=MoneyReport)
    fairness: FairnessReport = field(default_factory=lambda: FairnessReport(0))
    latency: tuple[LatencyRow, ...] = ()
    aggregation: AggregationReport | None = None  # shared aggregators, as they are now; None: there are none

    @property
    def seconds(self) -> float:
        return self.until - self.since

    def app(self, id_: str) -> AppRow | None:
        """Return the app called ``id_``, if it is in the report."""
        return next((app for app in self.apps if app.id == id_), None)

    def to_json(self) -> str:
        """Return the report as JSON text; infinite and undefined numbers are ``null``."""
        return to_text(self, FORMAT)

    @classmethod
    def from_json(cls, text: str) -> "ClusterReport":
        """Read what ``to_json`` of this or an older version wrote. Keys unknown to this version are ignored.

        Raises ``ReportError`` when ``text`` is no report or of a newer format.
        """
        return from_text(cls, text, FORMAT, {1: dict})  # 1: fields read their former key
