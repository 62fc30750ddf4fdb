"""What a cluster's ledger knows: apps, nodes and leases, the changes that made them so, and how those add up.

A ledger is a list of changes that only grows. ``State`` is what they add up to; folding all of them gives the present
state again. Whoever writes one (``infra.ledger``) numbers and dates it.
"""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node, Notice

AppKind = Literal["query", "training", "tuning"]
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
    """One GPU for one app until a time.

    A lease that is called back is still held until the app has let go of the GPU, or was ended by force: only then
    can the GPU be granted again.
    """

    number: int
    app: str
    node: str
    slot: int
    since: float  # s since the Unix epoch
    until: float
    epoch: int  # of the capacity it was granted on
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

    epoch: int
    nodes: tuple[Node, ...] = ()  # that came or changed
    left: tuple[str, ...] = ()
    notices: tuple[Notice, ...] = ()  # all that hold now
    hazard: float = 0.0  # expected losses per node-hour
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Past:
    """What the state has forgotten of an app that comes back, so that its account goes on."""

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
    epoch: int = 0
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
FENCED = (LoopBegan, CapacityChanged, Granted, Extended, Recalled, Ended)
"""Changes that only the loop with the newest token may write."""


@dataclass(frozen=True, slots=True)
class Event:
    """A change as it stands in the ledger."""

    number: int  # grows by one
    at: float  # s since the Unix epoch
    change: Change


# --- what they add up to ------------------------------------------------------------------------------------


@dataclass(slots=True)
class State:
    """What all changes up to ``number`` add up to. ``fold`` changes it in place.

    Its size is bounded: apps that are over or lost are forgotten some while later (``REMEMBERED``, ``RESUMABLE``);
    only what they have cost stays, by team and by pipeline.
    """

    number: int = 0
    at: float = 0.0  # of the last change
    token: int = 0
    holder: str = ""
    epoch: int = 0
    last_lease: int = 0  # the highest number of a lease so far
    hazard: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    notices: dict[str, Notice] = field(default_factory=dict)
    apps: dict[str, AppRecord] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)  # that have not ended
    booked: dict[Slot, int] = field(default_factory=dict)  # the lease of each GPU that is taken
    teams: dict[str, float] = field(default_factory=dict)  # dollars of forgotten apps
    pipelines: dict[str, float] = field(
        default_factory=dict
    )  # the same, of pipelines with apps that are known

    def held(self, app: str) -> tuple[Lease, ...]:
        """Return the leases of ``app`` that have not ended, by number."""
        return tuple(lease for _, lease in sorted(self.leases.items()) if lease.app == app)

    def active(self) -> tuple[AppRecord, ...]:
        """Return the apps that are not over, in the order of their arrival."""
        return tuple(sorted((a for a in self.apps.values() if a.phase not in OVER), key=lambda a: a.number))


def fold(state: State, event: Event, forgotten: MutableMapping[str, AppRecord] | None = None) -> State:
    """Apply ``event`` to ``state``, in place, and return it; apps that it forgets then are added to ``forgotten``.

    Raises ``OptionError`` for a change that cannot follow: a number that leaves a gap, a GPU that is booked already,
    an app, node or lease that is not there, a token that is not the highest. ``state`` is then as before.
    """
    if event.number != state.number + 1:
        raise OptionError(f"event {event.number} cannot follow event {state.number}")
    _check(state, event)
    change = event.change
    match change:
        case LoopBegan():
            state.token, state.holder = change.token, change.holder
        case CapacityChanged():
            state.epoch, state.hazard = change.epoch, change.hazard
            for node in change.nodes:
                state.nodes[node.id] = node
            for id_ in change.left:
                state.nodes.pop(id_, None)  # may be named twice
            state.notices = {notice.node_id: notice for notice in change.notices}
        case AppEntered():
            _enter(state, change, event)
        case AppMoved():
            record = state.apps[change.app]
            over = event.at if change.phase in GONE else None
            state.apps[change.app] = replace(record, phase=change.phase, reason=change.reason, ended=over)
        case Granted():
            for lease in change.leases:
                state.leases[lease.number] = lease
                state.last_lease = max(state.last_lease, lease.number)
                state.booked[Slot(lease.node, lease.slot)] = lease.number
                record = state.apps[lease.app]
                if record.first_lease is None:
                    state.apps[lease.app] = replace(record, first_lease=lease.since)
        case Extended():
            for number in change.leases:
                state.leases[number] = replace(state.leases[number], until=change.until)
        case Recalled():
            for number in change.leases:
                state.leases[number] = replace(state.leases[number], recalled=change.deadline)
        case Ended():
            for number in change.leases:
                _end(state, number, event.at)
        case Saved():
            state.apps[change.app] = replace(state.apps[change.app], checkpoint=change.uri)
        case Decided():
            pass
    state.number, state.at = event.number, event.at
    if event.number % SWEEP == 0:
        for record in _forget(state):
            if forgotten is not None:
                forgotten[record.spec.id] = record
    return state


def _enter(state: State, change: AppEntered, event: Event) -> None:
    spec, past = change.spec, change.past
    known = state.apps.get(spec.id)
    if known is not None:
        state.apps[spec.id] = replace(known, spec=spec, phase="waiting", reason="", ended=None)
    elif past is None:
        state.apps[spec.id] = AppRecord(spec, event.at, event.number)
    else:
        state.apps[spec.id] = AppRecord(
            spec,
            past.entered,
            past.number,
            service=past.service,
            dollars=past.dollars,
            first_lease=past.first_lease,
            checkpoint=past.checkpoint,
        )
        for sums, name in ((state.teams, past.team), (state.pipelines, past.pipeline)):
            if name in sums:  # its dollars are its own again
                sums[name] = max(0.0, sums[name] - past.dollars)
    if change.pipeline_dollars:  # of the others, so what it has cost itself is no part of it
        state.pipelines[spec.pipeline] = change.pipeline_dollars


def _forget(state: State) -> list[AppRecord]:
    """Let go of apps that are over or lost for long enough, and of what no pipeline needs; return the apps.

    By the time of events, so that a replay forgets the same. A clock that was put back by more than that forgets
    early, which does no harm: whoever comes back is remembered by the tables.
    """
    old = [
        record
        for record in state.apps.values()
        if record.ended is not None and abs(state.at - record.ended) > _remembered(record)
    ]
    if not old:
        return []
    holding = {lease.app for lease in state.leases.values()}
    gone = [record for record in old if record.spec.id not in holding]
    for record in gone:
        del state.apps[record.spec.id]
        for sums, name in ((state.teams, record.spec.team), (state.pipelines, record.spec.pipeline)):
            if name and record.dollars:
                sums[name] = sums.get(name, 0.0) + record.dollars
    there = {record.spec.pipeline for record in state.apps.values()}
    state.pipelines = {name: dollars for name, dollars in state.pipelines.items() if name in there}
    return gone


def _remembered(record: AppRecord) -> float:
    """Return for how long the state keeps an app after its end or loss, s."""
    again = record.phase in ("stopped", "lost") and (record.spec.resume or record.spec.flow_run)
    return RESUMABLE if again else REMEMBERED


def _end(state: State, number: int, at: float) -> None:
    lease = state.leases.pop(number)
    del state.booked[Slot(lease.node, lease.slot)]
    seconds = max(0.0, at - lease.since)
    record = state.apps[lease.app]
    state.apps[lease.app] = replace(
        record,
        service=record.service + seconds,
        dollars=record.dollars + seconds / 3600 * lease.price,
    )


def _check(state: State, event: Event) -> None:
    """Raise ``OptionError`` where the change cannot follow."""
    change = event.change
    if isinstance(change, LoopBegan) and change.token <= state.token:
        raise _wrong(event, f"token {change.token} must be above {state.token}")
    if isinstance(change, CapacityChanged) and (gone := [n for n in change.left if n not in state.nodes]):
        raise _wrong(event, f"node {gone[0]} left, but was not there")
    if isinstance(change, AppMoved | Saved) and change.app not in state.apps:
        raise _wrong(event, f"there is no app {change.app!r}")
    if isinstance(change, Extended | Recalled | Ended):
        for number in change.leases:
            if number not in state.leases:
                raise _wrong(event, f"lease {number} is not held")
        if len(set(change.leases)) != len(change.leases):
            raise _wrong(event, "a lease is named twice")
    if isinstance(change, Granted):
        taken = dict[Slot, int]()
        for lease in change.leases:
            slot = Slot(lease.node, lease.slot)
            node = state.nodes.get(lease.node)
            if lease.app not in state.apps:
                raise _wrong(event, f"lease {lease.number} is for an app that is not there: {lease.app!r}")
            if node is None or not 0 <= lease.slot < node.gpus:
                raise _wrong(event, f"lease {lease.number} is for a GPU that is not there: {slot}")
            other = state.booked.get(slot, taken.get(slot))
            if other is not None:
                raise _wrong(
                    event, f"GPU {slot} is booked by lease {other}; lease {lease.number} cannot have it"
                )
            if lease.number <= state.last_lease or lease.number in taken.values():
                raise _wrong(event, f"lease number {lease.number} was used before")
            taken[slot] = lease.number


def _wrong(event: Event, what: str) -> OptionError:
    return OptionError(f"event {event.number} ({type(event.change).__name__}): {what}")
