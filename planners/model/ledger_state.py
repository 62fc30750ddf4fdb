"""What the events of a ledger add up to: the state after each, and which events it refuses."""

from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.ledger import (
    GONE,
    OVER,
    REMEMBERED,
    RESUMABLE,
    SWEEP,
    AppEntered,
    AppMoved,
    AppRecord,
    CapacityChanged,
    Decided,
    Ended,
    Event,
    Extended,
    Granted,
    Lease,
    LoopBegan,
    Recalled,
    Saved,
    Slot,
)


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
    revision: int = field(default=0, metadata={"former": "epoch"})
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
            state.revision, state.hazard = change.revision, change.hazard
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
    """Remove apps that are over or lost for long enough, and what no pipeline needs; return the apps.

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
            serving = (
                state.apps[lease.app].spec.kind == "aggregation"
            )  # a node without GPUs is one slot to it
            if node is None or not 0 <= lease.slot < (node.gpus or serving):
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
