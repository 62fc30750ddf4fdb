"""What happened to each node, app and lease, gathered from a ledger's events one by one."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import (
    AppEntered,
    AppMoved,
    AppReport,
    CapacityChanged,
    Decided,
    Ended,
    Event,
    Granted,
    LoopBegan,
    Recalled,
    Saved,
)
from ebbflow.planners.model.ledger_state import State, fold
from ebbflow.tasks.report.cluster.spans import (
    AppHistory,
    KeptInputs,
    LeaseSpan,
    NodeSpan,
    Shown,
    number,
    without_inputs,
)
from ebbflow.tasks.report.cluster.values import (
    DECISIONS,
    CapacityChange,
    CapacityStep,
    KindCount,
    LoopReport,
    PhaseSpan,
    Sample,
)

_MOVE = 1.0  # s within which recalls and grants belong to one move
_SAMPLES = 4000  # of one figure of one app; beyond, every second one is dropped


class History:
    """Events in, what they mean out. ``add`` them all, from the first, in order.

    ``origin`` is the state before the first event, where older ones are not kept any more; it is changed. ``shown``
    is the part that a page shows which follows it: of other decisions, and of those that are too old for the page, it
    does not keep what went into them.
    """

    def __init__(self, origin: State | None = None, shown: "Shown | None" = None) -> None:
        self.state = State() if origin is None else origin
        self.events = 0
        self.times: list[float] = []  # of all events
        self.nodes: list[NodeSpan] = []
        self.steps: list[CapacityStep] = []
        self.changes: list[CapacityChange] = []
        self.leases: dict[int, LeaseSpan] = {}
        self.apps: dict[str, AppHistory] = {}
        self.decisions: list[tuple[Event, Decided]] = []
        self._shown, self._inputs = shown, KeptInputs(DECISIONS, self._strip)
        self.loops: list[LoopReport] = []
        self.teams: list[tuple[float, dict[str, float]]] = []  # (from, weights of teams that have one)
        self._present: dict[str, NodeSpan] = {}
        self._kinds: Counter[tuple[str, str]] = Counter()
        self._gpus: Counter[tuple[str, str]] = Counter()
        self._cores = 0
        self._held: dict[str, dict[int, LeaseSpan]] = {}
        if self.state.number:
            self._begin(self.state)

    @classmethod
    def of(cls, events: Iterable[Event]) -> "History":
        """Return the history of ``events``. Raises ``OptionError`` for one that cannot follow."""
        history = cls()
        for event in events:
            history.add(event)
        return history

    @property
    def first(self) -> float:
        """Return when the first event was, s since the Unix epoch; 0 before any."""
        return self.times[0] if self.times else 0.0

    def _begin(self, state: State) -> None:
        """Take what was there before the first event."""
        self.times.append(state.at)
        for node in state.nodes.values():
            span = self._present[node.id] = NodeSpan(node, state.at, prices=[(state.at, node.price)])
            self.nodes.append(span)
            self._count(node, 1)
        self._step(state.at, state.revision, sum(n.kind == "interruption" for n in state.notices.values()))
        for record in sorted(state.apps.values(), key=lambda a: a.number):
            app = AppHistory(record.spec, len(self.apps) + 1, record.entered)
            app.phases.append(PhaseSpan(record.entered, record.phase, record.reason))
            if record.ended is not None:
                app.phases = [
                    PhaseSpan(record.entered, "running"),
                    PhaseSpan(record.ended, record.phase, record.reason),
                ]
            app.first_lease, app.before, app.checkpoint = (
                record.first_lease,
                record.service,
                record.checkpoint,
            )
            self.apps[record.spec.id] = app
        for number_, lease in sorted(state.leases.items()):
            held = LeaseSpan(
                number_, lease.app, lease.node, lease.slot, lease.since, lease.price, lease.reason
            )
            held.recalled = None if lease.recalled is None else state.at
            self.leases[number_] = held
            self.apps[lease.app].leases.append(number_)
            self._held.setdefault(lease.app, {})[number_] = held
        self._moved(state.at, list(self._held))

    def add(self, event: Event) -> None:
        """Take the next event. Raises ``OptionError`` when it cannot follow; nothing has then changed."""
        told = set[tuple[str, str]]()
        if isinstance(event.change, CapacityChanged):
            told = {(n.node_id, n.kind) for n in self.state.notices.values()}
        fold(self.state, event)
        self.events += 1
        # writers' clocks differ: what is written later is not shown as earlier
        at = max(event.at, self.times[-1]) if self.times else event.at
        self.times.append(at)
        match event.change:
            case LoopBegan(token, holder):
                self.loops.append(LoopReport(at, token, holder))
            case CapacityChanged() as change:
                self._capacity(at, change, told)
            case AppEntered() as entered:
                self._enter(at, entered)
            case AppMoved(app, phase, reason):
                self.apps[app].phases.append(PhaseSpan(at, phase, reason))
            case Granted(leases):
                for one in leases:
                    span = LeaseSpan(
                        one.number, one.app, one.node, one.slot, one.since, one.price, one.reason
                    )
                    self.leases[one.number] = span
                    app = self.apps[one.app]
                    app.leases.append(one.number)
                    app.first_lease = one.since if app.first_lease is None else app.first_lease
                    self._held.setdefault(one.app, {})[one.number] = span
                self._moved(at, {one.app for one in leases})
            case Recalled(numbers, _, reason):
                for number in numbers:
                    self.leases[number].recalled = at
                    self.leases[number].ended_for = reason
                self._moved(at, {self.leases[number].app for number in numbers})
            case Ended(numbers, reason):
                for number in numbers:
                    span = self.leases[number]
                    span.until = max(at, span.since)
                    span.ended_for = reason or span.ended_for
                    del self._held[span.app][number]
                self._moved(at, {self.leases[number].app for number in numbers})
            case Saved(app_id, uri):
                self.apps[app_id].saves.append(at)
                self.apps[app_id].checkpoint = uri
            case Decided() as decided:
                self._metrics(at, decided)
                self._decide(replace(event, at=at), decided)

    def note(self, reports: Mapping[str, AppReport]) -> None:
        """Take what apps say of themselves now: the ledger keeps only the newest, a live report all it saw."""
        for id_, report in reports.items():
            if (app := self.apps.get(id_)) is not None and (value := goodput_of(report)) is not None:
                _append(app.goodput, report.at, value)

    def _decide(self, event: Event, decided: Decided) -> None:
        place = len(self.decisions)
        self.decisions.append((event, decided))
        if self._shown is None:
            return
        if self._shown.has(event.at, decided, self.apps):
            self._inputs.add(place, decided)
        else:
            self._strip(place)

    def _strip(self, place: int) -> None:
        event, decided = self.decisions[place]
        small = without_inputs(decided)
        self.decisions[place] = replace(event, change=small), small

    def _enter(self, at: float, change: AppEntered) -> None:
        spec, past = change.spec, change.past
        known = self.apps.get(spec.id)
        if known is None and past is not None:  # it was there before the first known event
            known = self.apps[spec.id] = AppHistory(spec, len(self.apps) + 1, past.entered)
            known.first_lease, known.before, known.checkpoint = (
                past.first_lease,
                past.service,
                past.checkpoint,
            )
            known.returns.append(at)
        elif known is None:
            known = self.apps[spec.id] = AppHistory(spec, len(self.apps) + 1, at)
        else:
            known.spec = spec
            known.returns.append(at)
        known.phases.append(PhaseSpan(at, "waiting"))

    def _moved(self, at: float, apps: Iterable[str]) -> None:
        """Note what ``apps`` hold from ``at`` on."""
        for id_ in apps:
            app, held = self.apps[id_], self._held.get(id_, {})
            app.held.append((at, len(held)))
            counts = Counter(span.node for span in held.values() if span.recalled is None)
            placement = tuple(sorted(counts.items()))
            if app.moves and app.moves[-1][0] >= at - _MOVE:
                app.moves[-1] = (app.moves[-1][0], placement)
            else:
                app.moves.append((at, placement))

    def _capacity(self, at: float, change: CapacityChanged, told: set[tuple[str, str]]) -> None:
        """Take a change of capacity; ``told``: nodes and kinds of the notices before it."""
        came = []
        for node in change.nodes:
            span = self._present.get(node.id)
            if span is None:
                span = self._present[node.id] = NodeSpan(node, at)
                self.nodes.append(span)
                came.append(node.id)
            else:
                self._count(span.node, -1)
                span.node = node
            self._count(node, 1)
            if not span.prices or span.prices[-1][1] != node.price:
                span.prices.append((at, node.price))
        left: dict[str, list[str]] = {}
        for id_ in change.left:
            span = self._present.pop(id_, None)
            if span is None:  # named twice
                continue
            self._count(span.node, -1)
            span.until = at
            span.ending = (
                "reclaimed" if (id_, "interruption") in told else "lost" if self._on({id_}) else "left"
            )
            left.setdefault(span.ending, []).append(id_)
        news: dict[str, list[str]] = {}
        for notice in change.notices:
            firm = notice.kind == "interruption"
            if firm and (span := self._present.get(notice.node_id)) is not None and span.noticed is None:
                span.noticed = at
            if (notice.node_id, notice.kind) not in told:
                news.setdefault("notice" if firm else "advice", []).append(notice.node_id)
        deadlines = {n.node_id: n.deadline for n in change.notices}
        parts: list[tuple[Any, list[str]]] = [("came", came), *left.items(), *news.items()]
        for kind, nodes in parts:
            if nodes:
                first = min((deadlines[n] for n in nodes if n in deadlines), default=None)
                on = 0 if kind == "came" else self._on(set(nodes))
                self.changes.append(
                    CapacityChange(at, kind, tuple(nodes), change.revision, on, first, change.reason)
                )
        leaving = sum(n.kind == "interruption" and n.node_id in self._present for n in change.notices)
        self._step(at, change.revision, leaving)

    def _step(self, at: float, revision: int, leaving: int) -> None:
        """Note what is there from ``at`` on."""
        kinds = tuple(
            KindCount(kind, market, count, self._gpus[kind, market])
            for (kind, market), count in sorted(self._kinds.items())
            if count
        )
        gpus = sum(kind.gpus for kind in kinds)
        self.steps.append(CapacityStep(at, revision, len(self._present), gpus, self._cores, leaving, kinds))

    def _count(self, node: Node, sign: int) -> None:
        self._kinds[node.instance_type, node.market] += sign
        self._gpus[node.instance_type, node.market] += sign * node.gpus
        self._cores += sign * node.cores

    def _on(self, nodes: set[str]) -> int:
        """Return how many leases that have not ended are on ``nodes``."""
        return sum(slot.node in nodes for slot in self.state.booked)

    def _metrics(self, at: float, decided: Decided) -> None:
        """Take ρ and goodput of apps, and the weights of teams, from an auction's inputs."""
        if decided.kind != "auction":
            return
        said = decided.inputs.get("teams")
        weights = (
            {str(k): w for k, v in said.items() if (w := number(v))} if isinstance(said, Mapping) else {}
        )
        if not self.teams or self.teams[-1][1] != weights:
            self.teams.append((at, weights))
        for id_, said in metrics_of(decided).items():
            if (app := self.apps.get(id_)) is None:
                continue
            if (rho := number(said.get("rho"))) is not None:
                _append(app.rhos, at, rho)
            if (goodput := number(said.get("goodput"))) is not None:
                _append(app.goodput, at, goodput)


def metrics_of(decided: Decided) -> dict[str, Mapping[str, Any]]:
    """Return what an auction was told of each app: ``inputs["apps"]``, by id or as a list of objects with ``id``."""
    apps = decided.inputs.get("apps")
    if isinstance(apps, Mapping):
        return {str(id_): said for id_, said in apps.items() if isinstance(said, Mapping)}
    if isinstance(apps, list | tuple):
        return {str(said["id"]): said for said in apps if isinstance(said, Mapping) and "id" in said}
    return {}


def goodput_of(report: AppReport) -> float | None:
    """Return the goodput that an app reports, for a search that of all its trials; ``None`` where it says none."""
    if report.trials:
        values = [v for trial in report.trials if (v := number(trial.get("goodput"))) is not None]
        return sum(values) if values else None
    return number(report.job.get("goodput"))


def _append(series: list[Sample], at: float, value: float) -> None:
    """Add a figure in order of time, and thin the series where it has become long."""
    if series and series[-1].at >= at:
        return
    series.append(Sample(at, value))
    if len(series) > _SAMPLES:
        del series[1:-1:2]
