"""What a cluster's ledger knows: apps, nodes and leases, the changes that made them so, and how those add up.

A ledger is a list of changes that only grows. ``State`` is what they add up to; folding all of them gives the present
state again. Whoever writes one (``infra.ledger``) numbers and dates it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ebbflow.planners.model.capacity import Node, Notice

AppKind = Literal["query", "training", "tuning", "elastic", "aggregation"]
AppPhase = Literal[
    "waiting",  # for its first lease or share, or for another after it lost all
    "running",
    "finished",
    "stopped",  # on request; can be resumed
    "failed",  # for good
    "lost",  # its process is gone; can be resumed
]
OVER: frozenset[str] = frozenset({"finished", "stopped", "failed"})
GONE = OVER | {"lost"}
REMEMBERED = 900.0
"""Seconds for which the state keeps an app that is over or lost; the ledger's tables keep it for ever."""
RESUMABLE = 7 * 86_400.0
"""The same of one that was stopped or lost, and that others can start again by what it has said."""
SWEEP = 64  # events from one look for apps that may be forgotten to the next
DecisionKind = Literal["auction", "scaling", "replan", "guard", "recovery"]


class Slot(NamedTuple):
    """One GPU of one node."""

    node: str
    number: int  # from 0


@dataclass(frozen=True, slots=True)
class AppSpec:
    """What an app asked for when it entered."""

    id: str
    kind: AppKind
    team: str = ""
    title: str = ""
    pipeline: str = ""  # the run of a pipeline it belongs to
    gpus: int = 0  # wanted; 0 for a query
    min_gpus: int = 0
    max_gpus: int = 0
    weight: float = 1.0
    deadline: float | None = None  # s since the Unix epoch
    budget: float | None = None  # dollars
    flow_run: str = ""  # of the orchestrator, where there is one
    resume: Mapping[str, Any] = field(default_factory=dict)  # what starts it again; never a secret
    pipeline_budget: float | None = None  # dollars, of all apps of its pipeline
    aggregators: int = 0  # nodes of the cluster's aggregation service that it begins on; 0: none


@dataclass(frozen=True, slots=True)
class AppRecord:
    """An app as the changes have made it."""

    spec: AppSpec
    entered: float  # s since the Unix epoch
    number: int  # of the change that entered it: the order of arrival
    phase: AppPhase = "waiting"
    reason: str = ""
    ended: float | None = None  # s since the Unix epoch: when it ended, or was lost
    service: float = 0.0  # GPU-seconds of leases that have ended
    dollars: float = 0.0  # that those have cost, at their nodes' prices
    first_lease: float | None = None  # s since the Unix epoch
    checkpoint: str = ""  # address of the newest that is known


@dataclass(frozen=True, slots=True)
class AppReport:
    """What an app last said of itself: not a change, only the newest is kept."""

    at: float  # s since the Unix epoch
    holds: tuple[int, ...] = ()  # leases whose GPUs its processes may be using
    released: tuple[
        int, ...
    ] = ()  # leases that were called back, or are over, that no process of it uses any more
    phase: AppPhase = "running"
    progress: float | None = None  # 0 to 1
    step: int = 0
    seconds_left: float | None = None  # with what it holds
    work_left: float | None = None  # GPU-seconds
    work_total: float | None = None  # GPU-seconds
    saved_at: float | None = None  # of its newest checkpoint
    cores: float | None = None  # that a query could use now
    job: Mapping[str, Any] = field(default_factory=dict)  # ``JobReport.to_dict`` of a training
    trials: tuple[Mapping[str, Any], ...] = ()  # the same of each trial of a search, with its id
    message: str = ""
    pools: tuple[str, ...] = ()  # by which its processes on nodes can be told from others: ``NodePool.uid``


@dataclass(frozen=True, slots=True)
class Lease:
    """One GPU for one app until a time; for the aggregation service a node without GPUs, as its slot 0.

    A lease that is called back is still held until the app has let go of the GPU, or was ended by force: only then
    can the GPU be granted again.
    """

    number: int
    app: str
    node: str
    slot: int
    since: float  # s since the Unix epoch
    until: float
    revision: int = field(metadata={"former": "epoch"})  # of the capacity it was granted on
    price: float = 0.0  # dollars per hour of this GPU
    recalled: float | None = None  # s since the Unix epoch, by when it must be free
    reason: str = ""


# --- changes ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoopBegan:
    """A loop has become the one writer of nodes and leases. Its token is higher than all before."""

    token: int
    holder: str


@dataclass(frozen=True, slots=True)
class CapacityChanged:
    """Nodes came, left, changed or got notices."""

    revision: int = field(metadata={"former": "epoch"})
    nodes: tuple[Node, ...] = ()  # that came or changed
    left: tuple[str, ...] = ()
    notices: tuple[Notice, ...] = ()  # all that hold now
    hazard: float = 0.0  # expected losses per node-hour
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Past:
    """What the state has forgotten of an app that comes back, so that its account continues."""

    entered: float  # s since the Unix epoch
    number: int
    service: float = 0.0  # GPU-seconds
    dollars: float = 0.0
    first_lease: float | None = None  # s since the Unix epoch
    checkpoint: str = ""
    team: str = ""  # for which its dollars were counted
    pipeline: str = ""


@dataclass(frozen=True, slots=True)
class AppEntered:
    """An app has arrived, or one that was over or lost has come back.

    The ledger itself adds what the state has forgotten; whoever writes this gives the ``spec`` alone.
    """

    spec: AppSpec
    past: Past | None = None  # None: the state knows the app, or nobody ever did
    pipeline_dollars: float = 0.0  # cost of its pipeline's other apps, where the state has forgotten them all


@dataclass(frozen=True, slots=True)
class AppMoved:
    """An app is in another phase."""

    app: str
    phase: AppPhase
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Granted:
    """Leases, whose numbers nobody had before."""

    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Extended:
    """Leases hold for longer."""

    leases: tuple[int, ...]
    until: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Recalled:
    """Leases are called back: save, and let go of the GPUs before ``deadline``."""

    leases: tuple[int, ...]
    deadline: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """Leases have ended: nobody uses their GPUs any more."""

    leases: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Decided:
    """A decision with its reason and what it was based on; it changes nothing by itself."""

    kind: DecisionKind
    reason: str
    app: str = ""
    revision: int = field(default=0, metadata={"former": "epoch"})
    seconds: float = 0.0  # that it took
    inputs: Mapping[str, Any] = field(default_factory=dict)
    outcome: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Saved:
    """An app has a new checkpoint."""

    app: str
    uri: str
    step: int = 0


Change = (
    LoopBegan
    | CapacityChanged
    | AppEntered
    | AppMoved
    | Granted
    | Extended
    | Recalled
    | Ended
    | Decided
    | Saved
)
CHANGES: Mapping[str, type[Change]] = {
    "leader-elected": LoopBegan,
    "capacity-changed": CapacityChanged,
    "app-registered": AppEntered,
    "app-phase-changed": AppMoved,
    "lease-granted": Granted,
    "lease-extended": Extended,
    "lease-revoked": Recalled,
    "lease-ended": Ended,
    "decided": Decided,
    "checkpoint-saved": Saved,
}
"""Every kind of change by the name under which it is stored."""
FENCED = (LoopBegan, CapacityChanged, Granted, Extended, Recalled, Ended)
"""Changes that only the loop with the newest token may write."""


@dataclass(frozen=True, slots=True)
class Event:
    """A change as it stands in the ledger."""

    number: int  # grows by one
    at: float  # s since the Unix epoch
    change: Change


# --- what they add up to ------------------------------------------------------------------------------------
