"""What a training says of its progress, as its app's reports need it: the ingredients of ρ.

Work is counted in GPU-seconds on one GPU: what is left of it takes ``work_left`` on one GPU, and on several as much
less as they are faster together. By Pollux' model of the job (OSDI 2021, section 3) once there is one, until then by
the rate of each GPU as measured.
"""

import threading
from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np

from ebbflow.infra.training.channel import Report
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.goodput import GoodputModel
from ebbflow.planners.training.job_report import JobReport


class Figures:
    """Keeps what one training says. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._step = 0
        self._left: float | None = None  # examples, of what ``_pace`` names the rate of
        self._total: float | None = None
        self._pace = "goodput"
        self._measured = 0.0  # examples/s
        self._nodes = self._gpus = 0
        self._job: Mapping[str, Any] = {}
        self._report: JobReport | None = None
        self._model: GoodputModel | None = None
        self._one = 0.0  # examples/s on one GPU, by the model
        self._saved_at: float | None = None

    def hear(self, report: Report) -> None:
        """Take in what a process says."""
        said = report.content
        with self._lock:
            self._step = max(self._step, report.step)
            if report.kind == "step":
                self._hear_step(said)
            elif report.kind == "checkpoint" and "error" not in said:
                self._saved_at = report.time
            elif report.kind == "finished":
                self._left = 0.0 if self._total is not None else None

    def fields(self, *, holding: bool = True) -> dict[str, Any]:
        """Return fields of ``AppReport``; ``holding``: whether the training has GPUs now."""
        with self._lock:
            found: dict[str, Any] = {"step": self._step, "saved_at": self._saved_at, "job": dict(self._job)}
            found["seconds_left"] = None
            if self._left is None or self._total is None:
                return found
            if self._total > 0:
                found["progress"] = min(max(1.0 - self._left / self._total, 0.0), 1.0)
            one = self._on_one()
            if one > 0:
                found |= {"work_left": self._left / one, "work_total": self._total / one}
            rate = self._rate()
            if holding and rate > 0:
                found["seconds_left"] = self._left / rate
            return found

    # --- how ------------------------------------------------------------------------------------------------

    def _hear_step(self, said: Mapping[str, Any]) -> None:
        self._nodes, self._gpus = int(said.get("nodes", 0)), int(said.get("gpus", 0))
        if "examples_left" in said:
            self._left, self._total = float(said["examples_left"]), float(said["examples_total"])
            self._pace = str(said["pace"])
        measured = said.get(self._pace, 0.0)
        if isinstance(measured, int | float) and isfinite(measured) and measured > 0:
            self._measured = float(measured)
        if "job" in said:
            self._hear_job(said["job"])

    def _hear_job(self, said: Mapping[str, Any]) -> None:
        if not _finite(said):
            return
        try:
            report = JobReport.from_dict(said)
            model = report.model
            one = float(model.best(np.array([1]), np.array([1]))[0]) if model is not None else 0.0
        except (OptionError, ArithmeticError, ValueError):
            return  # of no use to anybody
        self._job, self._report = dict(said), report
        self._model, self._one = (model, one) if one > 0 else (None, 0.0)

    def _on_one(self) -> float:
        if self._model is not None and self._pace == "goodput":
            return self._one
        return self._measured / self._gpus if self._gpus else 0.0

    def _rate(self) -> float:
        """Return examples/s on what it holds: by the model where that is of the same GPUs, which is steadier."""
        report, model = self._report, self._model
        if report is None or model is None or self._pace != "goodput":
            return self._measured
        if (report.nodes, report.gpus) != (self._nodes, self._gpus):
            return self._measured
        return float(model.at(report.nodes, report.gpus, report.split))


def _finite(value: Any) -> bool:
    """Tell whether all numbers in plain values are finite: others cannot be kept as JSON."""
    if isinstance(value, Mapping):
        return all(_finite(one) for one in value.values())
    if isinstance(value, list | tuple):
        return all(_finite(one) for one in value)
    return not isinstance(value, float) or isfinite(value)
