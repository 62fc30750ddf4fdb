"""What a training says of its progress, as its app's reports need it: the ingredients of ρ.

How fast a training gets on is measured, with all that it does between steps: Pollux' model of the job (OSDI 2021,
section 3) knows only its steps. What a script waits for outside of them, such as an evaluation after each pass, is so
a part of its work: it would take its time on a share of its own, too. The measure is over the last minute, or over
several of the longest waits. On GPUs that it has only just got, a training is taken to wait for the same share of its
time as before.

Work is counted in GPU-seconds on one GPU: what is left of it takes ``work_left`` there, and on several GPUs as much
less as they are faster together, by that model where there is one, in proportion to their number until then.
"""

import logging
import threading
from collections import deque
from collections.abc import Mapping
from itertools import pairwise
from math import isfinite
from typing import Any

import numpy as np

from ebbflow.infra.training.process.channel import Report
from ebbflow.planners.communication.placement import CommunicationProfile
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.speed.goodput import GoodputModel
from ebbflow.planners.training.speed.job_report import JobReport

log = logging.getLogger(__name__)

_WINDOW = 60.0  # s over which progress is measured
_WAITS = 4.0  # times the longest wait between two steps, over which it is measured instead
_MOST = 1800.0  # s over which it is measured at most: a hitch must be forgotten
_POINTS = 256  # that are kept of them
_LEAST = 2.0  # s of it before that says more than the training itself


class TrainingMetrics:
    """Keeps what one training says. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = 0
        self._left: float | None = None  # examples, of what ``_pace`` names the rate of
        self._total: float | None = None
        self._pace = "goodput"
        self._reported_rate = 0.0  # examples/s, as the training has it
        self._done: deque[tuple[float, float]] = (
            deque()
        )  # when (Unix s), and examples so far, on the same GPUs
        self._reported = 0.0  # Unix time, s, of the last step on the same GPUs
        self._longest = 0.0  # s between two steps on them
        self._busy = 1.0  # measured rate over the told one, as last known: the share of time in steps
        self._nodes = self._gpus = 0
        self._job: Mapping[str, Any] = {}
        self._report: JobReport | None = None
        self._model: GoodputModel | None = None
        self._one = 0.0  # examples/s on one GPU, by the model
        self._saved_at: float | None = None
        self._communication: Mapping[str, Any] = {}  # ``CommunicationProfile.to_dict``, the newest

    def record_report(self, report: Report) -> None:
        """Take in what a process reports."""
        content = report.content
        with self._lock:
            self._step = max(self._step, report.step)
            if report.kind == "step":
                self._hear_step(content, report.time)
            elif report.kind == "checkpoint" and "error" not in content:
                self._saved_at = report.time
            elif report.kind == "communication" and content.get("state") == "profiled":
                self._hear_profile(content.get("profile"))
            elif report.kind == "finished":
                self._left = 0.0 if self._total is not None else None

    def fields(self, *, holding: bool = True) -> dict[str, Any]:
        """Return fields of ``AppReport``; ``holding``: whether the training has GPUs now."""
        with self._lock:
            job = {**self._job, **({"communication": self._communication} if self._communication else {})}
            found: dict[str, Any] = {"step": self._step, "saved_at": self._saved_at, "job": job}
            found["seconds_left"] = None
            if self._left is None or self._total is None:
                return found
            if self._total > 0:
                found["progress"] = min(max(1.0 - self._left / self._total, 0.0), 1.0)
            rate = self._rate()
            one = rate / self._speedup() if self._gpus else 0.0
            if one > 0:
                found |= {"work_left": self._left / one, "work_total": self._total / one}
            if holding and rate > 0:
                found["seconds_left"] = self._left / rate
            return found

    # --- how ------------------------------------------------------------------------------------------------

    def _hear_step(self, content: Mapping[str, Any], at: float) -> None:
        placed = int(content.get("nodes", 0)), int(content.get("gpus", 0))
        if placed != (self._nodes, self._gpus):
            self._forget()
            self._nodes, self._gpus = placed
        if "examples_left" in content:
            self._left, self._total = float(content["examples_left"]), float(content["examples_total"])
            self._pace = str(content["pace"])
            if self._done and self._total - self._left < self._done[-1][1]:
                self._forget()  # it resumes from a checkpoint
            self._keep(at, self._total - self._left)
        told = content.get(self._pace, 0.0)
        if isinstance(told, int | float) and isfinite(told) and told > 0:
            self._reported_rate = float(told)
        if "job" in content:
            self._hear_job(content["job"])

    def _forget(self) -> None:
        """Begin to measure from scratch."""
        if (measured := self._measured()) is not None and self._reported_rate > 0:
            self._busy = min(measured / self._reported_rate, 1.0)
        self._done.clear()
        self._longest = 0.0

    def _keep(self, at: float, done: float) -> None:
        if self._done:
            self._longest = max(self._longest, at - self._reported)
        self._reported = at
        window = min(max(_WINDOW, _WAITS * self._longest), _MOST)
        if len(self._done) > 1 and self._done[-1][0] - self._done[-2][0] < window / _POINTS:
            self._done[-1] = (at, done)
        else:
            self._done.append((at, done))
        if self._done[0][0] < at - window:
            while self._done[0][0] < at - window:
                self._done.popleft()
            times = [time for time, _ in self._done]
            self._longest = max((after - before for before, after in pairwise(times)), default=0.0)

    def _hear_job(self, content: Mapping[str, Any]) -> None:
        if not _finite(content):
            return
        try:
            report = JobReport.from_dict(content)
            model = report.model
            one = float(model.best(np.array([1]), np.array([1]))[0]) if model is not None else 0.0
        except (OptionError, ArithmeticError, ValueError):
            return  # of no use to anybody
        self._job, self._report = dict(content), report
        self._model, self._one = (model, one) if one > 0 else (None, 0.0)

    def _hear_profile(self, said: Any) -> None:
        try:
            self._communication = CommunicationProfile.from_dict(said).to_dict()
        except OptionError as error:
            log.warning("a profile of the training's communication is ignored: %s", error)

    def _rate(self) -> float:
        """Return examples/s on what it holds, or held last."""
        measured = self._measured()
        return self._reported_rate * self._busy if measured is None else measured

    def _measured(self) -> float | None:
        """Return examples/s as they were done; ``None`` while too few were."""
        if len(self._done) > 1:
            (begun, before), (now, done) = self._done[0], self._done[-1]
            if now - begun >= _LEAST and done > before:
                return (done - before) / (now - begun)
        return None

    def _speedup(self) -> float:
        """Return how many times faster than one GPU those are that it holds, or held last."""
        report, model = self._report, self._model
        known = report is not None and (report.nodes, report.gpus) == (self._nodes, self._gpus)
        if report is None or model is None or not known or self._pace != "goodput":
            return float(self._gpus)
        return max(float(model.at(report.nodes, report.gpus, report.split)) / self._one, 1e-9)


def _finite(value: Any) -> bool:
    """Return whether all numbers in plain values are finite: others cannot be kept as JSON."""
    if isinstance(value, Mapping):
        return all(_finite(one) for one in value.values())
    if isinstance(value, list | tuple):
        return all(_finite(one) for one in value)
    return not isinstance(value, float) or isfinite(value)
