"""A tuning run over hyper-parameters as an app of the cluster: its trials share the app's leases."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from math import isfinite
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import TrainingError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.storage.filesystems import translated
from ebbflow.infra.storage.locks import RunLock
from ebbflow.infra.training.process.channel import Report
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import AppSpec
from ebbflow.tasks.apps.agent import AgentIntervals, AppAgent
from ebbflow.tasks.apps.lease_table import Rules
from ebbflow.tasks.drawing.wording import plural
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.leased.app import without_training
from ebbflow.tasks.training.leased.enforcer import LeaseEnforcer
from ebbflow.tasks.training.leased.metrics import TrainingMetrics
from ebbflow.tasks.training.leased.site import LeasedSite, MakePool, MakeTrainer, await_end_of_earlier
from ebbflow.tasks.training.listening import CompositeTrainingListener, NullTrainingListener, TrainingListener
from ebbflow.tasks.training.report import EventReport, TrainingReport
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.run import run_training
from ebbflow.tasks.tuning.code import FOR_TRIALS
from ebbflow.tasks.tuning.leased_resources import LeasedTrialResources
from ebbflow.tasks.tuning.loop import RunTrial
from ebbflow.tasks.tuning.report import TuningReport
from ebbflow.tasks.tuning.request import TuningRequest
from ebbflow.tasks.tuning.run import run_tuning
from ebbflow.tasks.tuning.trial import TrialStatus, TuningStatus, lineage_of

Say = Callable[[str], None]


def run_tuning_app(
    request: TuningRequest,
    spec: AppSpec,
    ledger: Ledger,
    pool: MakePool,
    notify: Say = lambda _: None,
    *,
    clock: Clock | None = None,
    stop: threading.Event | None = None,
    rules: Rules | None = None,
    pace: AgentIntervals | None = None,
    make: MakeTrainer | None = None,
    options: Mapping[str, Any] | None = None,
    lineage: Mapping[str, Any] | None = None,
    train: RunTrial | None = None,
) -> TuningReport:
    """Run a tuning run as the app of ``spec`` to its end and return what it found.

    Trials begin, grow, pause and continue as leases come and go; each reports what it needs to the GPU scheduler.
    A tuning run that has run before under this id continues with the trials that it had begun.

    Args:
        request: what to search for; where its trials run, the leases determine.
        spec: what the app asks for; see ``specs.tuning_spec``.
        ledger, pool, clock, stop, rules, pace, make, options, lineage: see ``run_training_app``.
        notify: called with sentences for the reader.
        train: trains one trial on the leases it is assigned, instead of our own launcher.

    Raises ``EbbflowError`` when it cannot begin, ``RunLockedError`` when another process runs it.
    """
    request = _held_to(request, spec)
    clock = clock or ledger.clock
    agent = AppAgent(
        ledger,
        spec,
        clock,
        rules=rules,
        pace=pace,
        notify=notify,
        lock=RunLock(request.place.under("app"), spec.id, clock=clock),
        settle=lambda: await_end_of_earlier(_trials_of(request), pool, clock),
    )
    with agent, LeaseEnforcer(agent, clock) as enforcer:
        resources = LeasedTrialResources(request, agent.lease_table, clock)
        trials = Trials(request, agent, enforcer, resources, pool, clock, make, options, lineage or {})
        report = run_tuning(
            request,
            notify,
            resume=request.recorded or bool(request.study),  # as the earlier holder of the lock left it
            train=train or trials.train,
            clock=clock,
            resources=resources,
            stop=stop,
            watch=trials.look,
            ledger=ledger.address,
            cluster=ledger.cluster,
        )
        agent.update_metrics(trials=(), seconds_left=None)
        agent.moved(report.state, report.reason)
    return report


def _held_to(request: TuningRequest, spec: AppSpec) -> TuningRequest:
    most = max(spec.gpus, spec.max_gpus, request.gpus_per_trial)
    return replace(request, run_id=request.run_id or spec.id, nodes=f"local:{most}x1")


def _trials_of(request: TuningRequest) -> list[TrainingRequest]:
    """Return the trials that have been begun."""
    with translated(f"read {request.place}"):
        names = sorted(one.base_name for one in request.place.entries())
        begun = [
            one for one in names if one.startswith("trial-") and request.place.is_file(f"{one}/run.json")
        ]
    return [request.trial(name, ()) for name in begun]


class Trials:
    """Trains the trials of one app, and makes its reports of what they say."""

    def __init__(
        self,
        request: TuningRequest,
        agent: AppAgent,
        enforcer: LeaseEnforcer,
        resources: LeasedTrialResources,
        pool: MakePool,
        clock: Clock,
        make: MakeTrainer | None,
        options: Mapping[str, Any] | None,
        lineage: Mapping[str, Any],
    ) -> None:
        self._lineage = lineage
        self._request, self._agent, self._enforcer, self._resources = request, agent, enforcer, resources
        self._pool, self._clock, self._make, self._options = pool, clock, make, options
        self._lock = threading.Lock()
        self._metrics: dict[str, TrainingMetrics] = {}
        self._epoch_work: dict[str, float] = {}  # GPU-seconds of an epoch, of all trials that ever told
        self._waits_since: float | None = None

    def train(
        self, request: TrainingRequest, listener: TrainingListener, nodes: Nodes, resume: bool
    ) -> TrainingReport:
        """Train one trial on the leases it is assigned. In the trial's thread."""
        site = LeasedSite(
            self._pool,
            self._agent,
            self._enforcer,
            lambda report: self._hear(request.run_id, report),
            self._clock,
            among=lambda: self._resources.assigned(request.run_id),
            make=self._make,
            options=self._options,
        )
        try:
            return run_training(
                request,
                CompositeTrainingListener(listener, _Losses(self._agent, request.run_id)),
                resume=request.launched,
                known=True,
                site=site,
                nodes=nodes,
                clock=self._clock,
                lineage={**self._lineage, **lineage_of(request)},
                code=FOR_TRIALS,
            )
        except (OptionError, TrainingError) as error:
            if not nodes.stopped and nodes.placement() is not None:
                raise
            # what it was about to run on went before it began
            return without_training(request, "stopped", str(error), self._clock.now())

    def _hear(self, run: str, report: Report) -> None:
        with self._lock:
            metrics = self._metrics.setdefault(run, TrainingMetrics())
        metrics.record_report(report)
        if report.kind == "checkpoint" and "uri" in report.content:
            self._agent.saved(str(report.content["uri"]), report.step)

    def look(self, status: TuningStatus) -> None:
        """Report where the tuning run stands."""
        self._report_phase(status)
        trials = tuple(self._trial(one) for one in status.trials)
        known = [one["work_left"] for one in trials if one["work_left"] is not None]
        fields: dict[str, Any] = {"trials": trials, "progress": None, "work_left": None, "work_total": None}
        # trials yet to come are taken to be as long as those that run
        to_come = max(self._request.trials - status.begun, 0)
        usual = self._usual_trial(known)
        if usual is not None:
            left = sum(known) + usual * (len(trials) - len(known) + to_come)
            spent = self._spent(status)
            fields |= {"work_left": left, "work_total": left + spent}
            if left + spent > 0:
                fields["progress"] = spent / (left + spent)
        else:
            fields["progress"] = status.ended / self._request.trials
        gpus = sum(one.gpus for one in status.trials)
        if gpus and fields["work_left"] is not None:
            fields["seconds_left"] = fields["work_left"] / gpus
        else:
            fields["seconds_left"] = None
        fields["saved_at"] = self._saved_at(status)
        self._agent.update_metrics(**fields)

    def _report_phase(self, status: TuningStatus) -> None:
        if any(one.gpus for one in status.trials):
            self._waits_since = None
            self._agent.moved("running")
            best = "" if status.best is None else f", best {self._request.metric} {status.best:.4g}"
            running = plural(sum(one.gpus > 0 for one in status.trials), "trial")
            self._agent.update_metrics(
                message=f"{running} on GPUs, {status.ended} of {self._request.trials} ended{best}"
            )
        elif self._waits_since is None:
            self._waits_since = self._clock.now()
            at = datetime.fromtimestamp(self._waits_since, UTC).strftime("%H:%M:%S UTC")
            reason = f"waits for {plural(self._request.gpus_per_trial, 'GPU')} since {at}"
            self._agent.moved("waiting", reason)
            self._agent.update_metrics(message=reason)

    def _trial(self, one: TrialStatus) -> dict[str, Any]:
        """Return what is said of one trial: its job's report where it has one, and the work that it is expected to
        have left (GPU-seconds on one GPU), given that trials without prospects are stopped."""
        with self._lock:
            metrics = self._metrics.get(one.run)
        reported = metrics.fields(holding=one.gpus > 0) if metrics is not None else {}
        # what it communicates is not bid by: it would only make the report of many trials large
        job = {name: value for name, value in reported.get("job", {}).items() if name != "communication"}
        return {
            **job,
            "id": one.run,
            "gpus_held": one.gpus,
            "max_gpus": self._request.most_gpus,
            "epochs": one.epochs,
            "epochs_left": one.epochs_left,
            "work_left": self._work_left(one, reported),
            "spent": one.spent,
            "value": one.value if one.value is not None and isfinite(one.value) else None,
        }

    def _work_left(self, one: TrialStatus, reported: Mapping[str, Any]) -> float | None:
        epochs = self._request.epochs
        if epochs is None:
            left = reported.get("work_left")
            return float(left) if left is not None else None
        if reported.get("work_total") is not None:
            self._epoch_work[one.run] = reported["work_total"] / epochs
        elif one.epochs:
            self._epoch_work[one.run] = one.spent / one.epochs
        work = self._epoch_work.get(one.run) or self._usual_epoch()
        return None if work is None else one.epochs_left * work

    def _usual_epoch(self) -> float | None:
        known = sorted(self._epoch_work.values())
        return known[len(known) // 2] if known else None

    def _usual_trial(self, known: list[float]) -> float | None:
        """Return GPU-seconds of a trial of which nothing is known; ``None`` where nothing is known of any."""
        epochs, epoch = self._request.epochs, self._usual_epoch()
        if epochs is not None and epoch is not None:
            return epochs * epoch
        return sum(known) / len(known) if known else None

    def _spent(self, status: TuningStatus) -> float:
        """Return GPU-seconds so far: what the ledger has of leases that are over, and what trials have had since."""
        state = self._agent.state
        record = state.apps.get(self._agent.spec.id) if state is not None else None
        ended = record.service if record is not None else 0.0
        now = self._clock.now()
        held = sum(max(0.0, now - lease.since) for lease in self._agent.lease_table.leases)
        return max(ended + held, sum(one.spent for one in status.trials))

    def _saved_at(self, status: TuningStatus) -> float | None:
        """Return when the trial that was saved least recently was saved."""
        with self._lock:
            all_ = [self._metrics.get(one.run) for one in status.trials if one.gpus]
        times = [f.fields()["saved_at"] if f is not None else None for f in all_]
        known = [at for at in times if at is not None]
        return min(known) if known and len(known) == len(times) else None


class _Losses(NullTrainingListener):
    """Writes down what becomes of a trial's nodes."""

    def __init__(self, agent: AppAgent, run: str) -> None:
        self._agent, self._run = agent, run

    def event(self, event: EventReport) -> None:
        if event.kind == "node-lost":
            self._agent.decided(
                "recovery",
                f"{self._run}: {event.text}",
                inputs={"node": event.node, "trial": self._run},
                outcome={"lost": event.node},
            )
