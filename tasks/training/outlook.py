"""What a run believes of its own goodput, and so what more or fewer GPUs would give."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebbflow.planners.training.speed.job_report import JobReport
from ebbflow.planners.training.speed.throughput import ThroughputParameters


@dataclass(frozen=True, slots=True)
class BestBatch:
    """The batch with the best predicted goodput on so many GPUs."""

    gpus: int
    nodes: int
    batch: int  # examples of a step on all GPUs
    passes: int
    goodput: float  # examples/s at the initial batch that would make the same progress


@dataclass(frozen=True, slots=True)
class Outlook:
    """A run's report to whoever hands GPUs out, as of ``at``: every 30 s once a few steps were measured."""

    at: float
    noise_scale: float  # examples
    speed: ThroughputParameters  # what was never measured costs nothing
    best: tuple[BestBatch, ...]  # by GPUs, up to twice the most that the run ever held


def outlook(at: float, said: Mapping[str, Any]) -> Outlook | None:
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
    return Outlook(at, noise, model.speed, tuple(best))
