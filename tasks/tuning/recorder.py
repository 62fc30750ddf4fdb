"""The account of a tuning run: trials that have ended, work that is left, and the report made of both."""

from collections.abc import Collection, Mapping
from math import inf
from typing import Any

import numpy as np

from ebbflow.infra.clock import Clock
from ebbflow.planners.model.scheduling import gpus_of
from ebbflow.planners.scheduling.locality import Level
from ebbflow.planners.tuning.early_stopping import (
    TrialState,
    epochs_left,
    hyperband_epochs_left,
    rungs,
    work_left,
)
from ebbflow.tasks.training.report import TrainingReport, recorded
from ebbflow.tasks.tuning.population import parameters_of, run_of
from ebbflow.tasks.tuning.report import ResizeReport, TrialEnd, TrialReport, TuningEnd, TuningReport
from ebbflow.tasks.tuning.request import TuningRequest
from ebbflow.tasks.tuning.study import ENDED, Study
from ebbflow.tasks.tuning.trial import Trial, TrialStatus, TuningStatus

_UNKNOWN_EPOCHS = 10**6
_SPENT = ("steps", "seconds", "gpu_seconds", "reason")
_ENDS: Mapping[str, TrialEnd] = {
    "COMPLETE": "complete",
    "PRUNED": "pruned",
    "FAIL": "failed",
}  # as Optuna has them


class TuningRecorder:
    """Keeps the account of one search. Times are seconds since the Unix epoch, effort is in GPU-seconds."""

    def __init__(self, request: TuningRequest, study: Study, clock: Clock) -> None:
        self._request, self._study, self._clock = request, study, clock
        self._begun = clock.now()
        self._ended: dict[int, TrialReport] = {}  # by number
        self._remaining: list[Mapping[str, float]] = []
        self._resizes: list[ResizeReport] = []
        compared = (
            rungs(request.min_epochs, request.epochs, request.reduction_factor) if request.epochs else ()
        )
        self._rungs = compared if request.pruner == "halving" else ()

    def left(self, one: Trial) -> float:
        """Return the epochs that a trial is expected to live yet."""
        if self._request.epochs is None:
            return _UNKNOWN_EPOCHS
        done = min(one.epochs, self._request.epochs)
        if self._request.pruner == "hyperband":
            return hyperband_epochs_left(
                done, self._request.min_epochs, self._request.epochs, self._request.reduction_factor
            )
        return epochs_left(done, self._request.epochs, self._rungs, self._request.reduction_factor)

    def status(self, running: Collection[Trial]) -> TuningStatus:
        """Return where the tuning run stands."""
        now = self._clock.now()
        trials = tuple(
            TrialStatus(
                one.run, one.epochs, self.left(one), gpus_of(one.app.held), _spent(one, now), one.value
            )
            for one in running
        )
        return TuningStatus(trials, self._study.begun(), self._study.ended(), self._study.best_value())

    def look_ahead(self, running: Collection[Trial], gpus: int) -> None:
        """Write down the work left on ``gpus`` GPUs, as a scheduler of several tuning runs would ask for it."""
        if self._request.epochs is None or not running:
            return
        now = self._clock.now()
        states = []
        for one in running:
            seconds = _spent(one, now) / one.epochs if one.epochs else inf
            states.append(TrialState(one.epochs, self.left(one), seconds, self._request.epochs - one.epochs))
        spent = sum(trial.gpu_seconds for trial in self._ended.values())
        app = work_left(states, self._request.most_gpus, spent)
        seconds = float(app.remaining(np.array([max(gpus, 1)]), Level.SLOT)[0])
        self._remaining.append(
            {"at": now - self._begun, "work": sum(job.work for job in app.jobs), "seconds": seconds}
        )

    def resized(self, one: Trial, before: int, after: int, reason: str) -> None:
        """Note that a trial that runs gets other GPUs."""
        self._resizes.append(ResizeReport(self._clock.now() - self._begun, one.run, before, after, reason))

    def details(self, one: Trial, reason: str, report: TrainingReport | None) -> dict[str, Any]:
        """Return what the study keeps of a trial that has ended, for processes that cannot read its run."""
        seconds = self._clock.now() - one.begun if one.begun else 0.0
        spent = one.spent + (report.gpu_seconds if report else 0.0)
        steps = report.steps if report else 0
        return {"steps": steps, "seconds": seconds, "gpu_seconds": spent, "reason": reason}

    def ended(self, one: Trial, state: TrialEnd, reason: str, report: TrainingReport | None) -> None:
        """Note how a trial has ended; ``report`` is of its last stretch."""
        self._ended[one.trial.number] = TrialReport(
            one.trial.number,
            one.run,
            one.parameters,
            state,
            one.value,
            one.epochs,
            **self.details(one, reason, report),
        )

    def report(self, state: TuningEnd, reason: str) -> TuningReport:
        """Return the report of the tuning run, with trials that ended before it was resumed."""
        trials = []
        for frozen in self._study.trials():
            if frozen.number in self._ended:
                trials.append(self._ended[frozen.number])
            elif frozen.state.name in _ENDS:
                trials.append(self._earlier(frozen))
        complete = [trial for trial in trials if trial.state == "complete" and trial.value is not None]
        sign = 1 if self._request.maximize else -1
        best = max(complete, key=lambda trial: sign * float(trial.value or 0.0), default=None)
        return TuningReport(
            self._request.run_id,
            self._request.run_directory,
            self._request.metric,
            self._request.maximize,
            state,
            reason,
            self._begun,
            self._clock.now() - self._begun,
            tuple(trials),
            best,
            sum(trial.gpu_seconds for trial in trials),
            tuple(self._remaining),
            tuple(self._resizes),
        )

    def _earlier(self, frozen: Any) -> TrialReport:
        """Return the report of a trial that ended in an earlier process, or in another one."""
        last = max(frozen.intermediate_values, default=0)
        value = frozen.intermediate_values.get(last, frozen.value)
        run = run_of(frozen)
        spent = {name: one for name, one in frozen.user_attrs.get(ENDED, {}).items() if name in _SPENT}
        if not spent and (done := recorded(self._request.trial(run, ()))) is not None:
            spent = {"steps": done.steps, "seconds": done.seconds, "gpu_seconds": done.gpu_seconds}
        return TrialReport(
            frozen.number, run, parameters_of(frozen), _ENDS[frozen.state.name], value, last, **spent
        )


def _spent(one: Trial, now: float) -> float:
    """Return about how many GPU-seconds a trial has had."""
    if one.nodes is None:
        return one.spent
    return one.spent + one.used + (now - one.since) * max(gpus_of(one.app.held), 1)
