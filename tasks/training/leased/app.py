"""A training as an app of the cluster: it runs on the GPUs that it has leases on, and nowhere else.

One report of a training that ran in several stretches, with waits between them.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import TrainingError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.storage.locks import RunLock
from ebbflow.infra.training.launcher.journal import Journal
from ebbflow.infra.training.process.channel import Report
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import AppPhase, AppSpec
from ebbflow.tasks.apps.agent import AgentIntervals, AppAgent
from ebbflow.tasks.apps.lease_table import Rules
from ebbflow.tasks.drawing.wording import plural
from ebbflow.tasks.training.leased.enforcer import LeaseEnforcer
from ebbflow.tasks.training.leased.fairness import auctioned_rho
from ebbflow.tasks.training.leased.metrics import TrainingMetrics
from ebbflow.tasks.training.leased.nodes import LeasedNodes
from ebbflow.tasks.training.leased.site import LeasedSite, MakePool, MakeTrainer, await_end_of_earlier
from ebbflow.tasks.training.leased.spec import held_to
from ebbflow.tasks.training.listening import CompositeTrainingListener, NullTrainingListener, TrainingListener
from ebbflow.tasks.training.report import (
    CapacityPoint,
    EventReport,
    MetricReport,
    PointReport,
    RecoveryReport,
    RunState,
    TrainingReport,
    record,
    recorded,
)
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.run import run_training

Deliver = Callable[[TrainingReport, TrainingRequest], object]
Timed = TypeVar("Timed", PointReport, MetricReport, CapacityPoint, EventReport)


def merge_reports(reports: Sequence[TrainingReport]) -> TrainingReport:
    """Return one report of a training's stretches, in order: sums, and all that happened, as of the first's start.

    GPUs were not rented between two stretches. How it ended is what the last says.
    """
    if len(reports) == 1:
        return reports[0]
    first, last = reports[0], reports[-1]
    shifts = [report.started - first.started for report in reports]
    trained = [report for report in reports if report.steps or report.generations]
    capacity: list[CapacityPoint] = []
    for report, shift in zip(reports, shifts, strict=True):
        capacity += [*_moved(report.capacity, shift), CapacityPoint(report.seconds + shift, 0, 0)]
    return replace(
        last,
        started=first.started,
        seconds=last.started + last.seconds - first.started,
        steps=max(report.steps for report in reports),
        epoch=max(report.epoch for report in reports),
        resumed_from=first.resumed_from,
        lost_steps=sum(report.lost_steps for report in reports),
        skipped_steps=max(report.skipped_steps for report in reports),
        saved_step=next((r.saved_step for r in reversed(reports) if r.saved_step is not None), None),
        spilled=trained[-1].spilled if trained else None,
        unusable=tuple(dict.fromkeys(text for report in reports for text in report.unusable)),
        checkpoints=sum(report.checkpoints for report in reports),
        stall_seconds=sum(report.stall_seconds for report in reports),
        saving=next((one.saving for one in reversed(trained) if one.saving), None),
        recovery=RecoveryReport.merged([report.recovery for report in reports]),
        gpu_seconds=sum(report.gpu_seconds for report in reports),
        rented_gpu_seconds=sum(report.rented_gpu_seconds for report in reports),
        price=max(report.price for report in reports),
        dollars=sum(report.dollars for report in reports),
        goodput_forecast=next((r.goodput_forecast for r in reversed(trained) if r.goodput_forecast), None),
        aggregation=next((r.aggregation for r in reversed(trained) if r.aggregation), None),
        generations=tuple(
            replace(g, started=g.started + shift, ended=g.ended + shift)
            for report, shift in zip(reports, shifts, strict=True)
            for g in report.generations
        ),
        series=_all([report.series for report in reports], shifts),
        metrics=_all([report.metrics for report in reports], shifts),
        capacity=tuple(capacity[:-1]),
        events=_all([report.events for report in reports], shifts),
    )


def _all(parts: Sequence[tuple[Timed, ...]], shifts: Sequence[float]) -> tuple[Timed, ...]:
    return tuple(one for part, shift in zip(parts, shifts, strict=True) for one in _moved(part, shift))


def _moved(part: tuple[Timed, ...], shift: float) -> list[Timed]:
    return [replace(one, at=one.at + shift) for one in part]


LEAVING = 3.0  # s before a deadline by which a run that stops has to be saved; what is left then is still to be ended
_LEAST = 1.0  # s to save in, however late it is
_POLL = 0.25  # s between polls for leases
_FRUITLESS = 20  # attempts in a row in which nodes were lost and no step was won: then it has failed


def run_training_app(
    request: TrainingRequest,
    spec: AppSpec,
    ledger: Ledger,
    pool: MakePool,
    listener: TrainingListener | None = None,
    *,
    clock: Clock | None = None,
    seed: int = 0,
    stop: threading.Event | None = None,
    save: float | None = None,
    rules: Rules | None = None,
    pace: AgentIntervals | None = None,
    make: MakeTrainer | None = None,
    options: Mapping[str, Any] | None = None,
    deliver: Deliver = lambda *_: None,
    lineage: Mapping[str, Any] | None = None,
) -> TrainingReport:
    """Run ``request`` as the app of ``spec`` to its end and return what happened, over all its stretches.

    It enters the ledger, waits for leases, trains on them, follows them as they change (saving and leaving before a
    lease's deadline), waits saved where it has lost too many, and continues when there are enough again. An app that
    has run before under this id resumes from its newest checkpoint, once nothing of its earlier self is left.

    Args:
        request: what to run; its id and GPUs are those of ``spec``, its nodes those of the leases.
        spec: what the app asks for; see ``specs.training_spec``.
        ledger: the cluster's.
        pool: makes pools of the cluster's nodes, such as ``lambda: fleet.nodes_for(spec.id)``.
        listener: hears what happens.
        clock: the ledger's unless given.
        seed: of the jitter of delays.
        stop: set by others to let it save and leave; its state is then ``stopped``, and it can be resumed.
        save: seconds that it then gets at most, where that is less than the request's ``grace``.
        rules: when leases count as over.
        pace: of the agent.
        make, options: of the launcher; see ``LeasedSite``.
        deliver: called with the report of each stretch when it ends, so that there is one while the app waits, and
            with the whole one; ``tasks.report.training.deliver`` writes the files that the request names.
        lineage: where its data come from; see ``run_training``.

    Raises:
        RunLockedError: another process runs this app.
        EbbflowError: it could not begin; how a training ended, the report says.
    """
    request = held_to(request, spec)
    clock = clock or ledger.clock
    if (done := _finished(request, clock.now())) is not None:
        with AppAgent(ledger, spec, clock, rules=rules, pace=pace) as agent:
            agent.moved("finished", "it was finished already")
        return done
    app_events = _AppEvents(listener or NullTrainingListener(), clock)
    agent = AppAgent(
        ledger,
        spec,
        clock,
        rules=rules,
        pace=pace,
        notify=lambda text: app_events.notify("ledger", text),
        lock=RunLock(request.place.under("app"), spec.id, clock=clock),
        settle=lambda: await_end_of_earlier([request], pool, clock),
    )
    with agent, LeaseEnforcer(agent, clock) as enforcer:
        metrics = TrainingMetrics()
        on_report = AppReporter(agent, metrics)
        site = LeasedSite(pool, agent, enforcer, on_report, clock, make=make, options=options)
        app = _App(
            request,
            agent,
            metrics,
            site,
            app_events,
            clock,
            stop or threading.Event(),
            save,
            seed,
            deliver,
            lineage=lineage,
            fairness=partial(auctioned_rho, ledger, spec.id),
        )
        report = app.run()
        agent.moved(_PHASES[report.state], report.reason)
        agent.update_metrics(**metrics.fields(holding=False))
    return report


_PHASES: Mapping[str, AppPhase] = {"finished": "finished", "stopped": "stopped", "failed": "failed"}


class AppReporter:
    """Passes what processes report to the app's reports."""

    def __init__(self, agent: AppAgent, metrics: TrainingMetrics) -> None:
        self._agent, self._metrics = agent, metrics

    def __call__(self, report: Report) -> None:
        self._metrics.record_report(report)
        if report.kind == "checkpoint" and "uri" in report.content:
            self._agent.saved(str(report.content["uri"]), report.step)
        self._agent.update_metrics(**self._metrics.fields())


class _AppEvents:
    """Passes on what the app itself has to say, as events of its training."""

    def __init__(self, listener: TrainingListener, clock: Clock) -> None:
        self.listener, self._clock = listener, clock
        self.begun = clock.now()

    def notify(self, kind: str, text: str) -> None:
        self.listener.event(EventReport(self._clock.now() - self.begun, kind, text))


class _App(NullTrainingListener):
    """One app: stretches of training, and waits between them. Listens to its own training."""

    def __init__(
        self,
        request: TrainingRequest,
        agent: AppAgent,
        metrics: TrainingMetrics,
        site: LeasedSite,
        app_events: _AppEvents,
        clock: Clock,
        stop: threading.Event,
        save: float | None,
        seed: int,
        deliver: Deliver,
        *,
        lineage: Mapping[str, Any] | None,
        fairness: Callable[[], float | None],
    ) -> None:
        self._request, self._agent, self._metrics, self._site = request, agent, metrics, site
        self._app_events, self._clock, self._stop, self._save, self._seed = (
            app_events,
            clock,
            stop,
            save,
            seed,
        )
        self._deliver, self._lineage, self._fairness = deliver, lineage, fairness
        self._nodes = LeasedNodes(
            agent.lease_table, request.most_gpus, request.min_gpus, clock, replica=request.replica_gpus
        )
        self._yielded = ""  # why the present stretch was ended
        self._lost = False  # a node, in the present stretch
        self._failed_attempts = 0
        self._reports: list[TrainingReport] = []

    def run(self) -> TrainingReport:
        """Train to the end."""
        why = "no lease yet"
        while self._await_leases(why):
            report = self._run_attempt()
            if report is None:  # what it was about to run on went before it began
                continue
            self._reports.append(report)
            self._deliver(report, self._request)
            if not (self._yielded and report.state == "stopped") or self._stop.is_set():
                break
            why = self._yielded
            self._check_failed_attempts(report)
        else:
            why = f"stopped while waiting for GPUs: {why}"
            self._reports.append(without_training(self._request, "stopped", why, self._clock.now()))
        report = merge_reports(self._reports)
        if len(self._reports) > 1:
            record(report, self._request)  # instead of the last stretch's
            self._deliver(report, self._request)
        return report

    # --- waiting --------------------------------------------------------------------------------------------

    def _await_leases(self, why: str) -> bool:
        """Wait until there are leases to run on; return whether there are. False: somebody wants the app to end."""
        since = self._clock.now()
        wanted = plural(self._nodes.least, "GPU")
        at = datetime.fromtimestamp(since, UTC).strftime("%H:%M:%S UTC")
        reason = f"waits for {wanted} since {at}: {why}"
        first = True
        while not self._stop.is_set():
            if self._nodes.placement() is not None and self._agent.away is None:
                return True
            if first:
                first = False
                self._agent.moved("waiting", reason)
                self._app_events.notify("waiting", reason)
            self._agent.update_metrics(message=reason, **self._metrics.fields(holding=False))
            self._agent.wait(_POLL)
        return False

    # --- training -------------------------------------------------------------------------------------------

    def _run_attempt(self) -> TrainingReport | None:
        """Train on the leases that there are until the training ends, or too few are left."""
        request = self._priced()
        self._nodes.restart()
        self._yielded, self._lost = "", False
        gpus = plural(self._nodes.slots, "GPU")
        self._agent.moved("running", f"on {gpus}")
        self._agent.update_metrics(message="")
        try:
            return run_training(
                request,
                CompositeTrainingListener(self, self._app_events.listener),
                resume=request.launched,
                known=True,
                site=self._site,
                nodes=self._nodes,
                clock=self._clock,
                seed=self._seed,
                lineage=self._lineage,
                fairness=self._fairness,
            )
        except OptionError:
            if self._nodes.placement() is None:
                return None
            raise

    def _priced(self) -> TrainingRequest:
        """Return the request with what a GPU of the leases costs on average."""
        leases = self._agent.lease_table.allowed()
        price = sum(lease.price for lease in leases) / len(leases) if leases else 0.0
        # the word to begin again is spent once there is a checkpoint again
        restart = self._request.restart and all(report.saved_step is None for report in self._reports)
        return replace(self._request, price=price, restart=restart)

    def _check_failed_attempts(self, report: TrainingReport) -> None:
        won = any(g.last_step > g.first_step >= 0 for g in report.generations)
        self._failed_attempts = self._failed_attempts + 1 if self._lost and not won else 0
        if self._failed_attempts >= _FRUITLESS:
            raise TrainingError(
                f"nodes were lost {_FRUITLESS} times in a row before a step completed: {report.reason}"
            )

    # --- what happens while it trains -----------------------------------------------------------------------

    def tick(self) -> None:
        """Let the training save and leave where too few GPUs are left for it, or somebody wants that."""
        if self._nodes.stopped:
            return
        if self._stop.is_set():
            save = self._save
            if save is None or save >= self._request.termination_grace:
                self._nodes.stop()
            else:
                self._nodes.stop(self._clock.now() + save)
        elif self._nodes.placement() is None:
            left = self._nodes.slots
            self._yielded = f"{plural(left, 'GPU')} left, {self._nodes.least} required"
            by = self._nodes.deadline({})
            now = self._clock.now()
            self._nodes.stop(None if by is None else max(by - LEAVING, now + _LEAST))

    def event(self, event: EventReport) -> None:
        """Write down what becomes of nodes, where the ledger does not know it."""
        if event.kind == "node-lost":
            self._lost = True
            self._agent.decided(
                "recovery",
                f"{event.text}; the training continues on the remaining GPUs",
                inputs={"node": event.node},
                outcome={"lost": event.node},
            )
        elif event.kind in ("failure", "preflight", "decision"):
            self._agent.update_metrics(message=event.text[:500])


def _finished(request: TrainingRequest, now: float) -> TrainingReport | None:
    """Return the report of a run of this id that has finished, but whose app did not live to say so."""
    if not request.launched or Journal(request.place).read_run()[2] != "finished":
        return None
    reason = "it was finished already"
    done = recorded(request) or without_training(request, "finished", reason, now)
    return done if done.state == "finished" else replace(done, state="finished", reason=reason)


def without_training(request: TrainingRequest, state: RunState, reason: str, now: float) -> TrainingReport:
    """Return the report of an app that did not train."""
    return TrainingReport(
        id=request.run_id,
        script=request.script,
        directory=request.run_directory,
        started=now,
        seconds=0.0,
        state=state,
        reason=reason,
        arguments=request.arguments,
        title=request.name,
    )
