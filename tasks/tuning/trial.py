"""One trial of a tuning run that runs: its training, and what it says."""

import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal

from ebbflow.planners.model.scheduling import App
from ebbflow.planners.tuning.promise import TrialRank
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.listening import NullTrainingListener
from ebbflow.tasks.training.report import GoodputForecast, PointReport
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.tuning.request import Parameter


@dataclass(slots=True)
class Trial:
    """One trial that runs."""

    trial: Any  # Optuna's
    app: App
    run: str
    parameters: dict[str, Any]
    resumes: bool
    nodes: Nodes | None = None  # None: it does not run
    thread: threading.Thread | None = None
    names: dict[str, dict[str, int]] = field(
        default_factory=dict
    )  # node -> names that the run knows it by, slots
    turns: int = 0
    pruned: bool = False
    leaves: Literal["", "copies", "yields"] = (
        ""  # a member of a population that was requested to save and leave
    )
    copied: tuple[str, ...] = ()  # runs whose checkpoints it took, in order
    heard: bool = False  # whether it has reported since it was taken
    lost: bool = False  # another process runs it
    locked_since: float = 0.0  # when its run was first found locked
    not_before: float = 0.0  # when it may run next
    pausing: bool = False  # it was requested to save and leave until there are GPUs for it again
    epochs: int = 0
    value: float | None = None
    begun: float = 0.0  # when it got its first GPU
    spent: float = 0.0  # GPU-seconds, before it was paused last
    since: float = 0.0  # when the present stretch began, or its GPUs were changed last
    used: float = 0.0  # GPU-seconds of the present stretch, before ``since``
    rank: TrialRank = field(default_factory=TrialRank)
    trains_on: int = 0  # GPUs, as it said last
    tried: set[int] = field(default_factory=set)  # numbers of GPUs that it has trained on
    shrunk_at: float = -inf  # when GPUs were taken from it last
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TrialStatus:
    """A trial that has begun and not ended."""

    run: str
    epochs: int  # done
    epochs_left: float  # that it is expected to live yet
    gpus: int  # that it has now; 0: it waits
    spent: float  # GPU-seconds so far
    value: float | None  # of the metric, as last reported


@dataclass(frozen=True, slots=True)
class TuningStatus:
    """Where a tuning run stands."""

    trials: tuple[TrialStatus, ...]
    begun: int  # trials so far, those included that have ended
    ended: int
    best: float | None  # of the metric, over complete trials


class Reporter(NullTrainingListener):
    """Puts a trial's metric, the GPUs that it trains on and its goodput into the tuning run's inbox."""

    def __init__(self, inbox: "queue.SimpleQueue[tuple[Any, ...]]", run: str, metric: str) -> None:
        self._inbox, self._run, self._metric = inbox, run, metric
        self._reports = self._gpus = 0

    def point(self, point: PointReport) -> None:
        if point.gpus != self._gpus:
            self._gpus = point.gpus
            self._inbox.put(("gpus", self._run, point.gpus))

    def forecast(self, forecast: GoodputForecast) -> None:
        best = sorted(forecast.best, key=lambda one: one.gpus)
        self._inbox.put(("goodput", self._run, tuple(one.goodput for one in best)))

    def metrics(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        if self._metric in values:
            self._reports = max(self._reports + 1, epoch + 1)
            self._inbox.put(("metric", self._run, self._reports, float(values[self._metric])))


def suggested(trial: Any, parameter: Parameter) -> Any:
    """Return the value that Optuna draws of a parameter for one of its trials."""
    match parameter.kind:
        case "choice":
            return trial.suggest_categorical(parameter.name, list(parameter.choices))
        case "int":
            return trial.suggest_int(parameter.name, int(parameter.low), int(parameter.high))
        case _:
            return trial.suggest_float(
                parameter.name, parameter.low, parameter.high, log=parameter.kind == "log"
            )


def as_arguments(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return parameters as a script's options."""
    found: list[str] = []
    for name, value in values.items():
        found += [f"--{name}", repr(value) if isinstance(value, float) else str(value)]
    return tuple(found)


def lineage_of(request: TrainingRequest) -> dict[str, str]:
    """Return what trackers hear of a trial beside its training: the tuning run that it belongs to, and its number."""
    return {"tuning": request.name.partition("/")[0], "tuning.trial": request.run_id} if request.track else {}
