"""A tuning run over hyperparameters: trainings of one goal share nodes; those without prospects are stopped."""

import queue
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from typing import Any

import numpy as np

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import StorageError, StorageFullError, TrainingError
from ebbflow.infra.packages import require
from ebbflow.infra.storage.files import write_text
from ebbflow.infra.storage.locks import RunLock
from ebbflow.planners.model.capacity import Capacity
from ebbflow.planners.model.scheduling import App, Placement, View, gpus_of
from ebbflow.planners.scheduling.gangs.las import leased_las
from ebbflow.planners.training.failures.failures import FailureReason
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.listening import TrainingListener
from ebbflow.tasks.training.report import TrainingReport, recorded
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.run import run_training
from ebbflow.tasks.tuning.recorder import TuningRecorder
from ebbflow.tasks.tuning.report import TrialEnd, TuningEnd, TuningReport
from ebbflow.tasks.tuning.request import TuningRequest
from ebbflow.tasks.tuning.resources import OwnTrialResources, TrialResources
from ebbflow.tasks.tuning.study import Study, as_arguments
from ebbflow.tasks.tuning.trial import Reporter, Trial, TuningStatus

SAME_FAILURES = 3  # trials that fail alike before the tuning run gives up
_PAUSE = 0.2  # s between looks

Say = Callable[[str], None]
Watch = Callable[[TuningStatus], None]
RunTrial = Callable[[TrainingRequest, TrainingListener, Nodes, bool], TrainingReport]


def run_trial(
    request: TrainingRequest, listener: TrainingListener, nodes: Nodes, resume: bool
) -> TrainingReport:
    """Train one trial to its end, on nodes that come and go."""
    return run_training(request, listener, resume=resume, nodes=nodes)


def new_tuning_id() -> str:
    """Return an id for a tuning run."""
    return f"tune-{uuid.uuid4().hex[:8]}"


def run_tuning(
    request: TuningRequest,
    notify: Say = lambda _: None,
    *,
    resume: bool = False,
    train: RunTrial = run_trial,
    clock: Clock | None = None,
    resources: TrialResources | None = None,
    stop: threading.Event | None = None,
    watch: Watch | None = None,
) -> TuningReport:
    """Run a tuning run to its end and return what it found. An interrupt saves the trials that run and leaves.

    Args:
        request: what to search for.
        notify: called with sentences for the reader.
        resume: continue with the tuning run of this id.
        train: trains one trial.
        clock: the time.
        resources: the GPUs of its trials, which may come and go: a trial that loses too many is paused; it resumes
            from its checkpoint when there are enough again. Those of the request's nodes by default.
        stop: set by others, it acts as an interrupt does.
        watch: called several times a second with where the tuning run stands.

    Raises ``EbbflowError`` when it cannot begin, ``RunLockedError`` when another process runs it, ``TrainingError``
    for an id that is taken, ``StorageFullError`` on a full disk: the tuning run can be resumed.
    """
    request = request if request.run_id else replace(request, run_id=new_tuning_id())
    if not resume and request.recorded:
        raise TrainingError(
            f"there is a tuning run {request.run_id!r} in {request.runs_dir} already: resume it (ebbflow tune "
            f"--resume {request.run_id}), or choose another run ID"
        )
    if train is run_trial:
        require("torch", "a training", "train")
    with RunLock(request.place, request.run_id, clock=clock):
        study = Study(request)
        request.save()
        tuning = _TuningRun(
            request,
            study,
            notify,
            train,
            clock or SystemClock(),
            resources or OwnTrialResources(request),
            stop or threading.Event(),
            watch,
        )
        report = tuning.run()
        write_text(request.place.path("report.json"), report.to_json(), kept=True)
    return report


class _TuningRun:
    """The loop of a tuning run; all but the trainings themselves happens in its thread."""

    def __init__(
        self,
        request: TuningRequest,
        study: Study,
        notify: Say,
        train: RunTrial,
        clock: Clock,
        resources: TrialResources,
        stop: threading.Event,
        watch: Watch | None,
    ) -> None:
        self._request, self._study, self._notify, self._train = request, study, notify, train
        self._clock, self._resources, self._stop, self._watch = clock, resources, stop, watch
        self._leaving = False
        self._running: dict[str, Trial] = {}
        self._recorder = TuningRecorder(request, study, clock)
        self._inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._policy = leased_las(inf)  # equal service; GPUs are kept until a trial ends
        self._memory: Any = None
        self._rng = np.random.default_rng(request.seed)
        self._signatures: dict[str, int] = {}
        self._nodes = resources.nodes()

    def run(self) -> TuningReport:
        """Run all trials that are left."""
        for trial in self._study.unfinished():
            self._enter(trial, resumes=True)
        state: TuningEnd = "finished"
        reason = "all trials have ended"
        try:
            while self._step():
                pass
            if self._given_up:
                state, reason = (
                    "failed",
                    f"{SAME_FAILURES} trials failed with the same error: {self._given_up}",
                )
            elif self._stop.is_set():
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            self._notify("interrupted: running trials save and exit")
            state, reason = "stopped", "interrupted"
            self._leave()
        except BaseException:
            self._leave()
            raise
        return self._recorder.report(state, reason)

    def _step(self) -> bool:
        """Hand GPUs out, take in what trials report; return whether there is more to do."""
        if self._stop.is_set():
            return False
        self._nodes = self._resources.nodes()
        self._fill()
        if not self._running and self._study.begun() >= self._request.trials:
            return False
        self._share()
        if self._watch is not None:
            self._watch(self._recorder.status(self._running.values()))
        try:
            self._take(self._inbox.get(timeout=_PAUSE))
            while True:
                self._take(self._inbox.get_nowait())
        except queue.Empty:
            pass
        if self._given_up:
            self._leave()
            return False
        return True

    @property
    def _given_up(self) -> str:
        return next((line for line, times in self._signatures.items() if times >= SAME_FAILURES), "")

    # --- who runs, and where ------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Begin as many trials as there is room for."""
        resources = sum(node.gpus for node in self._nodes) // self._request.gpus_per_trial
        while len(self._running) < resources and self._study.begun() < self._request.trials:
            self._enter(self._study.ask(), resumes=False)

    def _enter(self, trial: Any, *, resumes: bool) -> None:
        request, now = self._request, self._clock.now()
        parameters = self._study.arguments(trial)
        run = f"trial-{trial.number:03d}"
        app = App(run, trial.number, now, request.gpus_per_trial, request.gpus_per_trial, request.most_gpus)
        one = self._running[run] = Trial(trial, app, run, parameters, resumes)
        if resumes and (told := self._study.values(trial)):
            one.epochs, one.value = told[-1]
        shown = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in parameters.items())
        self._notify(f"{run}: {'resumes, ' if resumes else ''}{', '.join(shown)}")

    def _share(self) -> None:
        """Let the policy hand out free GPUs: equal service to all trials."""
        now = self._clock.now()
        for one in self._running.values():
            one.app.remaining = self._recorder.left(one)
            if not one.pausing:
                one.app.held = self._resources.held(one)
                if one.nodes is not None and gpus_of(one.app.held) < one.app.min_gpus:
                    self._pause(one)
        apps = tuple(
            sorted((o.app for o in self._running.values() if not o.pausing), key=lambda app: app.number)
        )
        capacity = Capacity(0, self._nodes, at=now)
        decision = self._policy.decide(View(now, apps, capacity), self._memory, self._rng)
        self._memory = decision.memory
        for run, grant in decision.grants.items():
            one = self._running[run]
            if gpus_of(grant.placement) < one.app.min_gpus:
                continue
            if set(grant.placement) != set(one.app.held):
                self._place(one, grant.placement)
            else:
                self._resources.recover(one)

    def _place(self, one: Trial, placement: Placement) -> None:
        """Give a trial these GPUs, and let it begin or continue if it does not run."""
        self._resources.give(one, placement)
        one.app.held = placement
        if one.thread is None:
            one.since = self._clock.now()
            one.begun = one.begun or one.since
            one.thread = threading.Thread(
                target=partial(self._work, one), name=f"ebbflow-{one.run}", daemon=True
            )
            one.thread.start()

    def _pause(self, one: Trial) -> None:
        """Let a trial that has lost too many GPUs save and leave; it continues when there are some again."""
        assert one.nodes is not None
        one.pausing, one.app.held = True, ()
        self._notify(f"{one.run}: paused, too few GPUs left")
        one.nodes.stop(self._resources.deadline(one))

    def _paused(self, one: Trial, report: TrainingReport) -> None:
        one.spent += report.gpu_seconds
        one.nodes, one.thread = None, None
        one.pausing, one.resumes = False, True

    def _work(self, one: Trial) -> None:
        """Train a trial, in its own thread."""
        assert one.nodes is not None
        arguments = self._request.arguments + as_arguments(one.parameters)
        try:
            request = self._request.trial(one.run, arguments)
            resumes = one.resumes and request.recorded
            done = recorded(request) if resumes else None
            if done is not None and done.state == "finished":  # but the tuning run did not live to hear of it
                reporter = Reporter(self._inbox, one.run, self._request.metric)
                for said in done.metrics:
                    if said.value is not None:
                        reporter.metrics(said.step, said.epoch, {said.name: said.value})
                self._inbox.put(("ended", one.run, done, None))
                return
            report = self._train(
                request, Reporter(self._inbox, one.run, self._request.metric), one.nodes, resumes
            )
            self._inbox.put(("ended", one.run, report, None))
        except Exception as error:
            self._inbox.put(("ended", one.run, None, error))

    # --- what trials report ----------------------------------------------------------------------------------

    def _take(self, said: tuple[Any, ...]) -> None:
        one = self._running.get(said[1])
        if one is None:
            return
        if said[0] == "metric":
            self._metric(one, said[2], said[3])
        else:
            self._end(one, said[2], said[3])
            if (full := _full(said[2], said[3])) is not None:  # the next trial would meet the same disk
                raise full

    def _metric(self, one: Trial, epoch: int, value: float) -> None:
        if one.pruned or epoch <= one.epochs:
            return  # an epoch that was told before a restart
        one.epochs = epoch
        if isfinite(value):
            one.value = value
        if not isfinite(value) or self._study.report(one.trial, epoch, value):
            one.pruned = True
            self._notify(f"{one.run}: stopped after epoch {epoch}, {self._request.metric} {value:.4g}")
            assert one.nodes is not None
            one.nodes.stop()
        self._recorder.look_ahead(self._running.values(), sum(node.gpus for node in self._nodes))

    def _end(self, one: Trial, report: TrainingReport | None, error: Exception | None) -> None:
        self._resources.take_back(one)
        if report is not None and report.state == "stopped" and not (one.pruned or self._leaving):
            self._paused(one, report)
            return
        del self._running[one.run]
        state, reason = self._outcome(one, report, error)
        if state != "stopped":
            self._study.tell(one.trial, one.value, state)
        self._recorder.ended(one, state, reason, report)
        if state == "complete":
            self._notify(f"{one.run}: {self._request.metric} {one.value:.4g} after {one.epochs} epochs")
        elif state == "failed":
            self._notify(f"{one.run}: failed: {reason}")

    def _outcome(
        self, one: Trial, report: TrainingReport | None, error: Exception | None
    ) -> tuple[TrialEnd, str]:
        if (full := _full(report, error)) is not None:
            return "stopped", str(full)  # no fault of the trial's: it continues when the tuning run does
        if report is None or report.state == "failed":
            reason = str(error) if report is None else report.reason
            failure = report.failure if report else None
            mark = failure.line if failure and failure.failure_class in ("user", "data") else ""
            if mark or report is None:
                self._signatures[mark or reason] = self._signatures.get(mark or reason, 0) + 1
            return "failed", reason
        if one.pruned:
            return "pruned", f"stopped early (pruned) after epoch {one.epochs}"
        if report.state == "stopped":
            return "stopped", report.reason
        if one.value is None:
            line = (
                f"the script never reported {self._request.metric} (run.report({self._request.metric}=...))"
            )
            self._signatures[line] = self._signatures.get(line, 0) + 1
            return "failed", line
        return "complete", ""

    def _leave(self) -> None:
        """Let all trials that run save and leave, and wait for them."""
        self._leaving = True
        for one in list(self._running.values()):
            if one.nodes is None:
                del self._running[one.run]
            else:
                one.nodes.stop()
        end = self._clock.now() + 2 * self._request.termination_grace + 60.0
        while self._running and self._clock.now() < end:
            try:
                said = self._inbox.get(timeout=_PAUSE)
            except queue.Empty:
                continue
            if said[0] == "ended" and (one := self._running.get(said[1])) is not None:
                with suppress(
                    StorageError
                ):  # not written down: a tuning run that continues sees it for itself
                    self._end(one, said[2], said[3])


def _full(report: TrainingReport | None, error: Exception | None) -> StorageFullError | None:
    """Return the error of a trial that found no space, for its files or for its last checkpoint."""
    if isinstance(error, StorageFullError):
        return error
    failure = report.failure if report is not None and report.state == "failed" else None
    if report is not None and failure is not None and failure.reason == FailureReason.NO_SPACE:
        return StorageFullError(report.reason)
    return None
