"""What a cluster's ledger says now: nodes, leases, apps, the loop itself and its last decisions. Reads only."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ebbflow.infra.ledger import Ledger, UnreadableReport
from ebbflow.planners.model.ledger import OVER, AppRecord, AppReport, Decided, Event, Lease
from ebbflow.planners.model.ledger_state import State
from ebbflow.planners.model.prices import HOUR
from ebbflow.tasks.apps.loop_report import LOOP, LoopStatusRecord
from ebbflow.tasks.apps.loop_report import problems as unread_problems
from ebbflow.tasks.capacity.leadership import LeaseExpiryWatch

_BACK = 50  # decisions among which the newest auctions are looked for
_FAR = 1000  # the same where none of those tells of all apps
_OTHERS = "others"  # among an auction's inputs: how many apps it does not tell of
_GONE = 10.0  # s without a status row after which it is told that the loop says nothing


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node of the cluster, and how much of it is leased."""

    id: str
    market: str
    zone: str
    cores: int
    gpus: int
    leased: int  # GPUs
    price: float  # $/h
    notice: str = ""  # its kind
    leaves_in: float | None = None  # s


@dataclass(frozen=True, slots=True)
class LeaseView:
    """A lease that has not ended."""

    number: int
    app: str
    node: str
    slot: int
    seconds_left: float
    recalled_in: float | None = None  # s to its deadline


@dataclass(frozen=True, slots=True)
class AppView:
    """An app: what it holds, how far it is, what it has cost."""

    id: str
    kind: str
    team: str
    phase: str
    gpus: int  # held
    wanted: int
    rho: float | None
    progress: float | None
    seconds_left: float | None
    dollars: float  # that its leases have cost until now, at their nodes' prices
    silent: float | None  # s since its last report
    reason: str = ""
    since: float = 0.0  # s since the Unix epoch, when it registered


@dataclass(frozen=True, slots=True)
class DecisionView:
    """A decision of the capacity loop with its reason; the newest of several in a row that say the same."""

    number: int
    at: float  # s since the Unix epoch
    kind: str
    app: str
    seconds: float
    reason: str
    times: int = 1  # decisions in a row that say the same
    since: float = 0.0  # s since the Unix epoch, of the first of them


@dataclass(frozen=True, slots=True)
class ClusterView:
    """One look at a cluster."""

    cluster: str
    at: float  # s since the Unix epoch
    revision: int
    events: int
    leader: str  # empty: nobody
    leads: bool  # its lead has not run out
    loop: LoopStatusRecord | None
    loop_silent: float | None  # s since its last row
    nodes: tuple[NodeView, ...]
    leases: tuple[LeaseView, ...]
    apps: tuple[AppView, ...]
    decisions: tuple[DecisionView, ...]  # the newest first
    problems: tuple[str, ...] = ()

    def to_json(self) -> Mapping[str, Any]:
        """Return plain JSON."""
        return asdict(self)


def look(ledger: Ledger, *, decisions: int = 8, over: int = 5) -> ClusterView:
    """Return what the ledger says: its last ``decisions``, equal ones in a row as one, and ``over`` of the apps that
    have ended, the newest.

    Raises ``LedgerError``.
    """
    state, leader, ended = ledger.state(), ledger.leader(), ledger.ended(over)
    active = {record.spec.id for record in state.active()}
    ended = [record for record in ended if record.spec.id not in active]  # it may just have come back
    unread: dict[str, UnreadableReport] = {}
    reports = ledger.reports([LOOP, *active, *(record.spec.id for record in ended)], unread=unread)
    now = ledger.clock.now()
    rho = _rho(reports)
    last = _last(ledger, max(decisions, _BACK))
    row = reports.get(LOOP)
    return ClusterView(
        ledger.cluster,
        now,
        state.revision,
        state.number,
        leader.holder if leader is not None and leader.until > 0 else "",
        leader is not None and leader.alive(now),
        LoopStatusRecord.of(row) if row is not None else None,
        max(0.0, now - row.at) if row is not None else None,
        _nodes(state, now),
        _leases(state, now),
        _views(state, [*state.active(), *ended], reports, rho | _decided_rho(last), now),
        _decision_views(last)[:decisions],
        _problems(state, leader is not None and leader.alive(now), row, now, unread),
    )


def app_views(ledger: Ledger, records: Sequence[AppRecord]) -> tuple[AppView, ...]:
    """Return what the ledger says of single apps, by their records. Raises ``LedgerError``."""
    named = {record.spec.id: record for record in records}
    reports = ledger.reports(list(named), unread={})
    rho = _rho(reports) | _decided_rho(_last(ledger, _BACK))
    return _views(ledger.state(), records, reports, rho, ledger.clock.now())


def _nodes(state: State, now: float) -> tuple[NodeView, ...]:
    leased: dict[str, int] = {}
    for lease in state.leases.values():
        leased[lease.node] = leased.get(lease.node, 0) + 1
    found = []
    for id_, node in sorted(state.nodes.items()):
        notice = state.notices.get(id_)
        found.append(
            NodeView(
                id_,
                node.market,
                node.zone,
                node.cores,
                node.gpus,
                leased.get(id_, 0),
                node.price,
                notice.kind if notice else "",
                notice.deadline - now if notice else None,
            )
        )
    return tuple(found)


def _leases(state: State, now: float) -> tuple[LeaseView, ...]:
    return tuple(
        LeaseView(
            number,
            lease.app,
            lease.node,
            lease.slot,
            lease.until - now,
            None if lease.recalled is None else lease.recalled - now,
        )
        for number, lease in sorted(state.leases.items())
    )


def _views(
    state: State,
    records: Sequence[AppRecord],
    reports: Mapping[str, AppReport],
    rho: Mapping[str, float],
    now: float,
) -> tuple[AppView, ...]:
    held: dict[str, list[Lease]] = {}
    for lease in state.leases.values():
        held.setdefault(lease.app, []).append(lease)
    found = []
    for record in records:
        id_ = record.spec.id
        report = reports.get(id_)
        found.append(
            AppView(
                id_,
                record.spec.kind,
                record.spec.team,
                record.phase,
                len(held.get(id_, ())),
                record.spec.gpus,
                rho.get(id_),
                report.progress if report else None,
                report.seconds_left if report and record.phase not in OVER else None,
                record.dollars + sum(_cost(lease, now) for lease in held.get(id_, ())),
                max(0.0, now - report.at) if report and record.phase not in OVER else None,
                record.reason,
                record.entered,
            )
        )
    return tuple(found)


def _cost(lease: Lease, now: float) -> float:
    """Return the dollars that a lease has cost until ``now``."""
    return max(0.0, now - lease.since) / HOUR * lease.price


def _rho(reports: Mapping[str, AppReport]) -> dict[str, float]:
    """Return what apps say of their own finish-time fairness."""
    return {
        app: float(report.job["rho"])
        for app, report in reports.items()
        if isinstance(report.job.get("rho"), int | float)
    }


def _last(ledger: Ledger, count: int) -> list[Event]:
    """Return the newest decisions, the newest first: ``count``, and more where none of these tells of all apps."""
    for most in (count, max(count, _FAR)):
        found = list(reversed(ledger.events(limit=most, kinds=[Decided], newest=True)))
        if len(found) < most or any(one.inputs.get(_OTHERS) is None for one in _auctions(found)):
            break
    return found


def _decision_views(events: Iterable[Event]) -> tuple[DecisionView, ...]:
    """Return the decisions of ``events``, the newest first; those in a row that say the same are one."""
    found: list[DecisionView] = []
    for event in events:
        if not isinstance(change := event.change, Decided):
            continue
        said = (change.kind, change.app, change.reason)
        if found and said == (found[-1].kind, found[-1].app, found[-1].reason):
            found[-1] = replace(found[-1], times=found[-1].times + 1, since=event.at)
        else:
            at = event.at
            found.append(DecisionView(event.number, at, *said[:2], change.seconds, change.reason, since=at))
    return tuple(found)


def _auctions(decisions: Iterable[Event]) -> Iterator[Decided]:
    for event in decisions:
        change = event.change
        if isinstance(change, Decided) and change.kind == "auction" and "apps" in change.inputs:
            yield change


def _decided_rho(decisions: Sequence[Event]) -> dict[str, float]:
    """Return what each app's finish-time fairness was taken to be by the newest auction that tells of the app.

    Of many apps an auction tells only of those whose share has changed, and now and then of all.
    """
    found: dict[str, float | None] = {}
    for change in _auctions(decisions):
        apps = change.inputs["apps"]
        for app, bid in apps.items() if isinstance(apps, Mapping) else ():
            rho = bid.get("rho") if isinstance(bid, Mapping) else None
            found.setdefault(app, float(rho) if isinstance(rho, int | float) else None)
        if change.inputs.get(_OTHERS) is None:
            break  # whom it does not name took no part in it
    return {app: rho for app, rho in found.items() if rho is not None}


def _problems(
    state: State, leads: bool, row: AppReport | None, now: float, unread: Mapping[str, UnreadableReport]
) -> tuple[str, ...]:
    found = list(LoopStatusRecord.of(row).problems) if row is not None and leads else []
    found += [problem for problem in unread_problems(unread) if problem not in found]
    if not leads:
        waiting = sum(record.phase == "waiting" for record in state.active())
        found.append(
            "no leader in this cluster: apps keep their leases, no new leases are granted"
            + (f"; {waiting} pending" if waiting else "")
            + "; start one: ebbflow capacity start"
        )
    elif row is None or now - row.at > _GONE:
        found.append("the loop is the leader but missed heartbeats: the ledger may be slow")
    return tuple(found)


def wait_for_end(ledger: Ledger, token: int, timeout: float) -> bool:
    """Wait until the loop with ``token`` leads no more; false: it still does after ``timeout`` seconds."""
    end, watched = time.monotonic() + timeout, LeaseExpiryWatch(token, ledger.clock)
    while time.monotonic() < end:
        if watched.over(ledger.leader()):
            return True
        ledger.clock.sleep(0.2)
    return False
