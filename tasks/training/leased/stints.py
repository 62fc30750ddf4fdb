"""One report of a training that ran in several stretches, with waits between them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from ebbflow.tasks.training.report import (
    CapacityPoint,
    EventReport,
    MetricReport,
    PointReport,
    TrainingReport,
)

Timed = TypeVar("Timed", PointReport, MetricReport, CapacityPoint, EventReport)


def together(reports: Sequence[TrainingReport]) -> TrainingReport:
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
        gpu_seconds=sum(report.gpu_seconds for report in reports),
        rented_gpu_seconds=sum(report.rented_gpu_seconds for report in reports),
        price=max(report.price for report in reports),
        dollars=sum(report.dollars for report in reports),
        outlook=next((report.outlook for report in reversed(trained) if report.outlook), None),
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
