"""What a training run did and why: the values behind every report, and their JSON form.

All times called ``at``, ``started`` and ``ended`` inside a report are seconds after ``TrainingReport.started``.

What a run believes of its own goodput, and so what more or fewer GPUs would give.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from ebbflow.infra.errors import ReportError
from ebbflow.infra.storage import checksums
from ebbflow.infra.storage.files import write_text
from ebbflow.planners.training.speed.job_report import JobReport
from ebbflow.planners.training.speed.throughput import ThroughputParameters
from ebbflow.tasks.apps.aggregators import AggregationReport
from ebbflow.tasks.drawing.codec import encode, from_text, to_text
from ebbflow.tasks.training.request import TrainingRequest


@dataclass(frozen=True, slots=True)
class BestBatch:
    """The batch with the best predicted goodput on so many GPUs."""

    gpus: int
    nodes: int
    batch: int  # examples of a step on all GPUs
    passes: int
    goodput: float  # examples/s at the initial batch that would make the same progress


@dataclass(frozen=True, slots=True)
class GoodputForecast:
    """A run's report to the GPU scheduler, as of ``at``: every 30 s once a few steps were measured."""

    at: float
    noise_scale: float  # examples
    speed: ThroughputParameters  # what was never measured costs nothing
    best: tuple[BestBatch, ...]  # by GPUs, up to twice the most that the run ever held


def goodput_forecast(at: float, said: Mapping[str, Any]) -> GoodputForecast | None:
    """Return what the report of a job (``JobReport.to_dict``) means; ``None`` before anything was fitted.

    Nodes are taken to be as large as those that the job holds. Raises ``OptionError`` for what is no report.
    """
    report = JobReport.from_dict(said)
    model = report.model
    if model is None:
        return None
    each = -(-report.gpus // report.nodes)
    best = []
    for gpus in range(1, report.max_gpus + 1):
        nodes = -(-gpus // each)
        goodput, split = model.best_split(nodes, gpus)
        best.append(BestBatch(gpus, nodes, split.total(gpus), split.accumulation + 1, goodput))
    noise = report.statistics.noise_scale(report.limits.initial)
    return GoodputForecast(at, noise, model.speed, tuple(best))


FORMAT = 2  # of the JSON form; grows when a key changes its name or meaning

RunState = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class RecoveryReport:
    """What becomes of processes when others are lost, leave or join."""

    way: Literal["in-place", "restart"]
    reason: str  # why that was chosen
    changes: int = 0  # nodes that were lost, left or joined while the others trained on

    @classmethod
    def merged(cls, reports: Sequence["RecoveryReport | None"]) -> "RecoveryReport | None":
        """Return that of several stretches of a training: the last word, and all changes."""
        found = [report for report in reports if report is not None]
        return replace(found[-1], changes=sum(one.changes for one in found)) if found else None


@dataclass(frozen=True, slots=True)
class SavingReport:
    """How often a run saved while it trained, as of its last checkpoint at an interval."""

    interval: float  # seconds between two of them
    hazard: str  # which losses that follows from, and how often they are expected


@dataclass(frozen=True, slots=True)
class PointReport:
    """What the run measured of itself at one moment."""

    at: float
    step: int  # optimizer steps of the whole run
    epoch: int = 0
    gpus: int = 0
    nodes: int = 0
    batch: int = 0  # examples of a step on all GPUs
    passes: int = 1  # accumulation passes of a step
    loss: float | None = None
    throughput: float = 0.0  # examples/s
    goodput: float = 0.0  # examples/s at the initial batch that would have made the same progress
    tokens: float = 0.0  # of an example, the mean since the point before; 0: the script does not say
    noise_scale: float = 0.0  # examples
    progress: float = 0.0  # iterations at the initial batch
    step_seconds: float = 0.0
    sync_seconds: float = 0.0
    learning_rate: float = 0.0
    skipped: int = 0  # steps ignored so far because the gradient was not finite
    lost_steps: int = 0  # done twice so far, after losses
    dollars: float = 0.0  # for the nodes so far


@dataclass(frozen=True, slots=True)
class MetricReport:
    """What the script reported of its model (``run.report(...)``)."""

    at: float
    step: int
    epoch: int
    name: str
    value: float | None


@dataclass(frozen=True, slots=True)
class NodeShare:
    """Slots of one node."""

    node: str
    slots: int


@dataclass(frozen=True, slots=True)
class FailureReport:
    """Why a generation failed."""

    reason: str
    failure_class: str = field(metadata={"json": "class"})
    signature: str
    line: str = ""
    rank: int | None = None
    node: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """One world of processes."""

    number: int
    placement: tuple[NodeShare, ...]
    started: float
    ended: float
    kind: str  # finished, stopped, preflight, lost, failed, hung, unformed, silent
    reason: str
    first_step: int = -1  # of the whole run before it; -1: it never came so far
    last_step: int = -1
    saved_step: int = -1  # of the newest checkpoint that it reported
    lost_steps: int = 0  # done in it, and done again by the next one
    gap_seconds: float | None = (
        None  # without training before its first step; None: it made none, or is the first
    )
    failure: FailureReport | None = None
    decision: str = ""  # what followed
    preflight: bool = field(default=False, metadata={"former": "trial"})
    gpu_seconds: float = 0.0  # of its nodes, each while it was of it

    @property
    def gpus(self) -> int:
        return sum(share.slots for share in self.placement)


@dataclass(frozen=True, slots=True)
class SpilledCheckpoint:
    """A checkpoint that the run's directory could not take, and that lies elsewhere."""

    step: int
    uri: str
    host: str  # whose disk it is, where it is a directory

    def __str__(self) -> str:
        return f"step {self.step} is in {self.uri} on {self.host}"


@dataclass(frozen=True, slots=True)
class EventReport:
    """Something that happened."""

    at: float
    kind: str
    text: str  # for the reader
    node: str = ""


@dataclass(frozen=True, slots=True)
class CommunicationBar:
    """What runs in an iteration on ``compute`` or ``channel K``, s from its beginning."""

    lane: str
    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class PlannedExchange:
    """A plan for the exchange of gradients that all processes of a generation have accepted."""

    at: float
    step: int  # at which it was committed
    version: int
    seconds: float  # predicted, of an iteration with it
    plain_seconds: float  # the same without it
    measured_seconds: float  # of the iterations that were profiled, without it
    choices: dict[str, str] = field(default_factory=dict)  # collective -> algorithm/pieces@channel
    before: tuple[CommunicationBar, ...] = ()
    after: tuple[CommunicationBar, ...] = ()


@dataclass(frozen=True, slots=True)
class CapacityPoint:
    """From ``at`` until the next entry."""

    at: float
    rented: int  # GPUs of all nodes that were there
    used: int  # of them, in the placement


@dataclass(frozen=True)
class TrainingReport:
    """Everything worth knowing about one training run, as far as one launcher saw it."""

    id: str
    script: str
    directory: str = field(metadata={"former": "folder"})  # of the run
    started: float  # seconds since the Unix epoch
    seconds: float  # wall time, from launch to end
    state: RunState
    reason: str
    arguments: tuple[str, ...] = ()
    title: str = ""
    steps: int = 0  # optimizer steps of the whole run at its end
    epoch: int = 0
    resumed_from: int | None = None  # step at which this launcher took over; None: the run began with it
    lost_steps: int = 0
    skipped_steps: int = 0
    own_checkpoints: bool = (
        False  # the script's, of which nothing is known here; steps are those that it printed
    )
    saved_step: int | None = (
        None  # of the newest checkpoint in the run's directory, as far as is known; None: none
    )
    spilled: SpilledCheckpoint | None = None  # a newer one, elsewhere
    unusable: tuple[str, ...] = ()  # checkpoints that were found damaged or of another version, and why
    checkpoints: int = 0
    stall_seconds: float = 0.0  # that checkpoints held training up
    saving: SavingReport | None = None  # None: there was no checkpoint at an interval
    recovery: RecoveryReport | None = None  # None: it never trained
    gpu_seconds: float = 0.0  # held by generations
    rented_gpu_seconds: float = 0.0  # of all nodes that were there
    price: float = 0.0  # dollars per GPU-hour
    dollars: float = 0.0
    goodput_forecast: GoodputForecast | None = field(
        default=None, metadata={"former": "outlook"}
    )  # the newest
    generations: tuple[GenerationReport, ...] = ()
    series: tuple[PointReport, ...] = ()
    metrics: tuple[MetricReport, ...] = ()
    capacity: tuple[CapacityPoint, ...] = ()
    events: tuple[EventReport, ...] = ()
    exchanges: tuple[PlannedExchange, ...] = ()  # plans of planned communication, the latest last
    aggregation: AggregationReport | None = None  # its own aggregators, as a generation ended last

    @property
    def unsaved_steps(self) -> int:
        """Return the steps at the end of the run that its directory has no checkpoint of."""
        return 0 if self.own_checkpoints else max(self.steps - (self.saved_step or 0), 0)

    @property
    def last(self) -> PointReport | None:
        """Return what was measured last."""
        return self.series[-1] if self.series else None

    @property
    def final_metrics(self) -> dict[str, float | None]:
        """Return the last value of each metric."""
        return {m.name: m.value for m in self.metrics}

    @property
    def failure(self) -> FailureReport | None:
        """Return why the last generation failed, if it did."""
        return self.generations[-1].failure if self.generations else None

    def mean_tokens(self, name: str) -> float | None:
        """Return the mean over time of ``throughput`` or ``goodput`` in tokens/s; ``None`` where there are none."""
        series = [replace(one, **{name: getattr(one, name) * one.tokens}) for one in self.series]
        return replace(self, series=tuple(series)).mean(name) if any(one.tokens for one in series) else None

    def mean(self, name: str) -> float | None:
        """Return the mean over time of one figure of ``series``; ``None`` without two points."""
        pairs = list(zip(self.series, self.series[1:], strict=False))
        span = sum(b.at - a.at for a, b in pairs)
        return sum(getattr(b, name) * (b.at - a.at) for a, b in pairs) / span if span > 0 else None

    def to_json(self) -> str:
        """Return the report as JSON text; infinite and undefined numbers are ``null``."""
        return to_text(
            self,
            FORMAT,
            mean_throughput=encode(self.mean("throughput")),
            mean_goodput=encode(self.mean("goodput")),
            mean_token_throughput=encode(self.mean_tokens("throughput")),
            mean_token_goodput=encode(self.mean_tokens("goodput")),
            final_metrics=encode(self.final_metrics),
        )

    @classmethod
    def from_json(cls, text: str) -> "TrainingReport":
        """Read what ``to_json`` of this or an older version wrote. Keys unknown to this version are ignored.

        Raises ``ReportError`` when ``text`` is no report or of a newer format.
        """
        return from_text(cls, text, FORMAT, {1: dict})  # 1: fields read their former key

    def write_json(self, path: Path | str) -> Path:
        """Write the report to ``path`` atomically and return the path."""
        return write_text(path, self.to_json())


def recorded(request: TrainingRequest) -> TrainingReport | None:
    """Return what the last launcher of a run has reported, if it lived to; ``None`` too for a damaged report."""
    try:
        content = checksums.unsealed(request.place.read("report.json"))
        return TrainingReport.from_json(json.dumps(content))
    except (OSError, checksums.DamagedError, ReportError):
        return None


def record(report: TrainingReport, request: TrainingRequest) -> str:
    """Keep a run's report in its directory where that is local, for ``recorded``; return why that was not possible.

    Empty: it was. How the run ended must be heard of nevertheless.
    """
    if not request.place.local:
        return ""
    try:
        sealed = checksums.sealed(json.loads(report.to_json()), indent=1)
        write_text(request.place.path("report.json"), sealed.decode(), kept=True)
    except ReportError as error:
        return str(error)
    return ""
