"""What is believed of a live app's speed and work, from what it says of itself.

An app that reports a model of its goodput counts in examples at its initial batch. Any other counts in GPU-seconds,
and its speed is its GPUs. Where it cannot say what it has left, that is taken to be as much as it has had, 600 s on
what it asked for at least: what has lasted for long continues for long.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Any, Literal

import numpy as np

from ebbflow.planners.communication.placement import CommunicationProfile
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import AppReport
from ebbflow.planners.model.scheduling import Goodput, Speed
from ebbflow.planners.scheduling.finish_time import FinishTime, phase_time
from ebbflow.planners.scheduling.locality import Array, Level, Slowdown
from ebbflow.planners.scheduling.placement_cost import ClusterLinks, PlacementCost, placement_cost
from ebbflow.planners.training.speed.goodput import GoodputModel
from ebbflow.planners.training.speed.job_report import JobReport
from ebbflow.planners.training.speed.throughput import with_spread

UNKNOWN = 600.0
"""Seconds on the GPUs asked for that an app is held to need at least while it cannot say."""


class LinearSpeed:
    """Work in GPU-seconds, done in proportion to GPUs up to ``most``."""

    __slots__ = ("most",)

    def __init__(self, most: int) -> None:
        self.most = most

    def iteration_time(self, gpus: int) -> float:
        """Return the seconds of one GPU-second's work on ``gpus`` GPUs."""
        return 1.0 / max(min(gpus, self.most), 1)


class GoodputTable:
    """A goodput that is worked out once for up to ``most`` GPUs on one node and on several, and then looked up."""

    __slots__ = ("_model", "near", "spread")

    def __init__(self, model: Goodput, most: int) -> None:
        counts = np.arange(most + 1)
        self._model = model
        self.near = model.best(np.ones(most + 1, int), counts)
        self.spread = model.best(np.full(most + 1, 2), counts)

    def best(self, nodes: Array, gpus: Array) -> Array:
        """Return what the model says for each pair of node and GPU counts."""
        nodes, gpus = np.asarray(nodes), np.asarray(gpus)
        if gpus.size and gpus.max() >= len(self.near):
            return np.asarray(self._model.best(nodes, gpus))
        return np.asarray(np.where(nodes > 1, self.spread[gpus], self.near[gpus]))


class ModelSpeed:
    """Work in examples at the initial batch, done at the best goodput of up to so many GPUs."""

    __slots__ = ("_near", "_spread")

    def __init__(self, known: GoodputTable) -> None:
        # more GPUs than the largest batch keeps busy are as good as those that it does
        self._near = np.maximum.accumulate(known.near[1:])
        self._spread = np.maximum.accumulate(np.concatenate((self._near[:1], known.spread[2:])))

    def rates(self, gpus: Array, spread: bool) -> Array:
        """Return examples per second for each number of GPUs (>= 1), on one node or several."""
        table = self._spread if spread else self._near
        return np.asarray(table[np.minimum(np.asarray(gpus, int), len(table)) - 1])

    def iteration_time(self, gpus: int) -> float:
        """Return seconds per example on ``gpus`` well-placed GPUs."""
        rate = float(self._near[min(max(gpus, 1), len(self._near)) - 1])
        return 1.0 / rate if rate > 0 else inf


class SearchSpeed:
    """Work of a search in GPU-seconds: its trials run side by side, each on so many GPUs at most."""

    __slots__ = ("_most", "_works")

    def __init__(self, works: Sequence[float], most_each: int) -> None:
        self._works, self._most = tuple(works), most_each

    @property
    def demand(self) -> int:
        """Return the most GPUs that its trials can use."""
        return max(len(self._works) * self._most, 1)

    def seconds(self, gpus: Array) -> Array:
        """Return seconds until all trials have ended, for each number of GPUs."""
        return phase_time(self._works, gpus, self._most, "malleable")

    def iteration_time(self, gpus: int) -> float:
        """Return the seconds of one GPU-second's work of the whole search."""
        total = sum(self._works)
        if total <= 0:
            return 1.0 / max(min(gpus, self.demand), 1)
        return float(self.seconds(np.array([max(gpus, 1)]))[0]) / total


SpreadSource = Literal["fixed factor", "communication profile", "goodput model"]
"""What says how much slower an app is on several nodes: a factor for all apps alike, a prediction from what it sends
and the links of the cluster, or its own model of speed, which knows what was measured there."""


@dataclass(frozen=True, slots=True)
class AppEstimate:
    """What is believed of one app. A unit is an example, or a GPU-second where there is no model."""

    speed: Speed
    left: float  # units
    total: float  # units, of the whole app
    most: int  # GPUs that it can use, as far as it knows
    goodput: Goodput | None = None
    sure: bool = False  # it said itself what it has left
    cost: PlacementCost | None = None  # of placements, where its communication is known
    spread_by: SpreadSource = "fixed factor"

    def slowdowns(self, gpus: Array, level: Level, fixed: Slowdown) -> Array:
        """Return by what the app is slower within ``level`` than ``speed`` says, for each number of GPUs.

        ``fixed``: the factors of an app of which nothing is known. A model of goodput knows nodes, but no racks.
        """
        if self.cost is not None:
            base = Level.RACK if isinstance(self.speed, ModelSpeed) else Level.MACHINE
            return self.cost.slowdowns(gpus, level, base)
        return np.full(np.shape(gpus), 1.0 if isinstance(self.speed, ModelSpeed) else fixed.levels[level])

    def seconds(self, gpus: int) -> float:
        """Return the seconds that are left on ``gpus`` well-placed GPUs; infinite on none."""
        return self.left * self.speed.iteration_time(gpus) if gpus > 0 else inf


def belief(
    report: AppReport | None,
    asked: int,
    most: int,
    service: float,
    search: bool,
    links: ClusterLinks | None = None,
) -> AppEstimate:
    """Return what is believed of an app that asked for ``asked`` GPUs, can use ``most`` and has had ``service``
    GPU-seconds.

    Where it reports its communication, ``links`` of the cluster say what spreading costs it, as long as it was never
    measured on several nodes.
    """
    model, job = _model(report)
    cost = _cost(report, links or ClusterLinks()) if not search else None
    if report is not None and search:
        works = _trials(report)
        if works:
            each = max(min(_most_each(report), most), 1)
            speed = SearchSpeed(works, each)
            left = sum(works)
            return AppEstimate(
                speed, left, _total(report, left, service), min(most, speed.demand), None, True
            )
    if model is None or job is None:
        left, sure = _gpu_seconds(report, asked, service)
        source: SpreadSource = "fixed factor" if cost is None else "communication profile"
        total = _total(report, left, service)
        return AppEstimate(LinearSpeed(most), left, total, most, None, sure, cost, source)
    if job.measured_nodes != 1:
        cost = None  # its speed on several nodes is measured, and has in it what they cost
    elif cost is not None:
        model = _spread(model, job, cost, max(most, asked))
    dares = max(min(most, job.max_gpus), 1)
    known = GoodputTable(model, max(most, asked, 1))
    fast = ModelSpeed(known)
    one = 1.0 / fast.iteration_time(1)
    if report is not None and _good(report.seconds_left) and job.gpus > 0:
        left, sure = float(report.seconds_left or 0.0) * model.at(job.nodes, job.gpus, job.split), True
    else:
        seconds, sure = _gpu_seconds(report, asked, service)
        left = seconds * one
    whole = _share_left(report)
    done = service / max(asked * fast.iteration_time(asked), 1e-12)
    total = left / whole if whole else left + done
    source = "goodput model" if cost is None else "communication profile"
    return AppEstimate(fast, left, max(total, left, 1e-9), dares, known, sure, cost, source)


def _cost(report: AppReport | None, links: ClusterLinks) -> PlacementCost | None:
    """Return what placements cost an app that reports its communication; nothing of a report that makes no sense."""
    said = report.job.get("communication") if report is not None else None
    if said is None:
        return None
    try:
        cost = placement_cost(CommunicationProfile.from_dict(said), links)
        return cost if cost is None or isfinite(cost.seconds(2, Level.CLUSTER)) else None
    except (OptionError, ArithmeticError, ValueError):
        return None


def _spread(model: GoodputModel, job: JobReport, cost: PlacementCost, most: int) -> GoodputModel:
    """Return the model of a job that ran on one node only, with what its communication predicts for several."""
    many = max(min(most, 64), 3)
    pairs = (2, cost.slowdown(2, Level.RACK)), (many, cost.slowdown(many, Level.RACK))
    return replace(model, speed=with_spread(model.speed, job.split.batch, job.split.accumulation, pairs))


def _model(report: AppReport | None) -> tuple[GoodputModel | None, JobReport | None]:
    """Return what a job reports; nothing of a report that makes no sense, since it comes from outside."""
    if report is None or not report.job:
        return None, None
    try:
        job = JobReport.from_dict(report.job)
        model = job.model
        if model is None or not float(model.best(np.array([1]), np.array([1]))[0]) > 0:
            return None, job
        return model, job
    except (OptionError, ArithmeticError, ValueError):
        return None, None


def _good(value: float | None) -> bool:
    return value is not None and isfinite(value) and value >= 0


def _gpu_seconds(report: AppReport | None, asked: int, service: float) -> tuple[float, bool]:
    """Return the GPU-seconds left, and whether the app said so."""
    if report is not None:
        if report.work_left is not None and _good(report.work_left):
            return report.work_left, True
        if report.seconds_left is not None and _good(report.seconds_left) and report.holds:
            return report.seconds_left * len(report.holds), True
        if report.progress is not None and 0 < report.progress <= 1 and service > 0:
            return service / report.progress * (1 - report.progress), True
    return max(service, UNKNOWN * asked), False


def _share_left(report: AppReport | None) -> float:
    """Return which share of all its work an app has left; 0: not known, or nothing."""
    if report is None:
        return 0.0
    left, total = report.work_left, report.work_total
    if left is not None and total is not None and _good(left) and _good(total) and 0 < left <= total:
        return left / total
    if report.progress is not None and 0 <= report.progress < 1:
        return 1.0 - report.progress
    return 0.0


def _total(report: AppReport | None, left: float, service: float) -> float:
    """Return the GPU-seconds of the whole app."""
    if report is not None and report.work_total is not None and _good(report.work_total):
        return max(report.work_total, left, 1e-9)
    return max(left + service, 1e-9)


def _trials(report: AppReport) -> list[float]:
    """Return the GPU-seconds of each trial that runs or is to come; what is not told apart is shared evenly."""
    trials = [one for one in report.trials if isinstance(one, Mapping)]
    told = [_number(one.get("work_left")) for one in trials]
    left = report.work_left if report.work_left is not None and _good(report.work_left) else None
    if not trials or (left is None and any(one is None for one in told)):
        return []
    rest = max((left or 0.0) - sum(one for one in told if one is not None), 0.0)
    unknown = sum(one is None for one in told)
    works = [rest / unknown if one is None else one for one in told]
    mean = sum(works) / len(works)
    if not unknown and mean > 0 and rest > 0:
        more = max(round(rest / mean), 1)  # trials yet to come can run beside those that run
        works += [rest / more] * more
    return [one for one in works if one > 0]


def _most_each(report: AppReport) -> int:
    """Return the GPUs that one trial can use at most."""
    known = [_number(one.get("max_gpus")) for one in report.trials if isinstance(one, Mapping)]
    return max((int(one) for one in known if one is not None and one >= 1), default=1)


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        return None
    return float(value)


@dataclass(slots=True)
class LiveBidder(FinishTime):
    """Finish-time fairness of a live app by what is believed of it (Themis, NSDI 2020, sections 4 and 5.2)."""

    believed: AppEstimate = field(kw_only=True)
    slowdown: Slowdown = field(default_factory=Slowdown)

    def remaining(self, gpus: Array, level: Level) -> Array:
        """Return seconds of work left with ``gpus`` within ``level``; infinite without GPUs."""
        wanted = np.asarray(gpus)
        have = np.clip(wanted, 1, self.demand)
        speed, left = self.believed.speed, self.believed.left
        if isinstance(speed, ModelSpeed):
            rates = speed.rates(have, level > Level.MACHINE)
            with np.errstate(divide="ignore"):
                seconds = np.where(rates > 0, left / np.maximum(rates, 1e-300), np.inf)
        else:
            counts, where = np.unique(have, return_inverse=True)
            times = np.array([speed.iteration_time(int(count)) for count in counts])
            seconds = left * times[where].reshape(have.shape)
        seconds = seconds * self.believed.slowdowns(have, level, self.slowdown)
        return np.where(wanted >= 1, seconds, np.inf)

    @property
    def total_work(self) -> float:
        """Return GPU-seconds of the whole app on the GPUs that it can use."""
        return self.believed.total * self.believed.speed.iteration_time(self.demand) * self.demand

    @property
    def demand(self) -> int:
        return max(self.believed.most, 1)

    @property
    def time_alone(self) -> float:
        """Return T_id = T_cluster * N_avg, s (NSDI 2020, equation 1), by the app's own speed on as many GPUs."""
        gpus = max(min(self.cluster_gpus, self.demand), 1)
        return max(self.believed.total * self.believed.speed.iteration_time(gpus) * self.n_avg, 1e-9)
