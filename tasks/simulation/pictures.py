"""The pictures of a simulation report: who held how many GPUs when, and curves over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ebbflow.infra.simulation.usage import Steps
from ebbflow.tasks.drawing.svg import document, fit, tag, text, ticks, titled
from ebbflow.tasks.drawing.wording import number_text, plural
from ebbflow.tasks.simulation.records import Record, steps_of

ROWS = 40  # apps with a row of their own; the others share one
_ROW = 14.0  # height of a row
_LEAST = 0.4  # units: what is narrower is joined with what follows


@dataclass(frozen=True, slots=True)
class Track:
    """One row: GPUs over time, and from when to when the app was there."""

    name: str
    steps: Steps
    arrival: float
    finish: float


def tracks(record: Record, rows: int = ROWS) -> list[Track]:
    """Return the apps with most GPU time in order of arrival, then all others together."""
    apps = record["usage"]["apps"]
    jobs = sorted(record["jobs"], key=lambda job: -job["gpu_seconds"])
    if len(jobs) > rows:
        jobs, others = jobs[: rows - 1], jobs[rows - 1 :]
    else:
        others = []
    made = [
        Track(job["name"], steps_of(apps[job["name"]]), job["arrival"], job["finish"])
        for job in sorted(jobs, key=lambda job: (job["arrival"], job["name"]))
        if job["name"] in apps
    ]
    if others:
        together = summed([steps_of(apps[job["name"]]) for job in others if job["name"] in apps])
        first, last = min(job["arrival"] for job in others), max(job["finish"] for job in others)
        made.append(Track(plural(len(others), "other"), together, first, last))
    return made


def summed(many: Sequence[Steps]) -> Steps:
    """Return the sum of step functions."""
    moves: dict[float, float] = {}
    for steps in many:
        before = 0.0
        for at, value in zip(steps.times, steps.values, strict=True):
            moves[at] = moves.get(at, 0.0) + value - before
            before = value
    total, found = 0.0, Steps()
    for at in sorted(moves):
        total += moves[at]
        found.set(at, total)
    return found


def allocation_svg(title: str, record: Record, *, width: float = 720) -> str:
    """Draw the GPUs of each app over time, a row each: height is GPUs, a thin line is waiting."""
    rows = tracks(record)
    start, end = record["first_arrival"], max(record["last_finish"], record["first_arrival"] + 1)
    left, right, top = min(150.0, width * 0.27), width - 16.0, 44.0
    most = max((value for row in rows[: ROWS - 1] for value in row.steps.values), default=1.0) or 1.0
    note = f"height: GPUs (at most {most:g}); thin line: waits"
    parts = [
        text(10, 20, fit(title, width - 20, 14), class_="bold", style="font-size:14px"),
        text(10, 36, fit(note, width - 20, 11), class_="soft small"),
    ]

    def x(at: float) -> float:
        return left + (min(max(at, start), end) - start) / (end - start) * (right - left)

    y = top
    for row in rows:
        base = y + _ROW - 2
        peak = max(row.steps.values, default=0.0)
        scale = most if peak <= most else peak
        label = text(
            left - 6, base - 1, fit(row.name, left - 16, 10), text_anchor="end", style="font-size:10px"
        )
        wait = tag(
            "line", x1=x(row.arrival), x2=max(x(row.finish), x(row.arrival) + 1), y1=base, y2=base,
            stroke="var(--soft)", stroke_width=0.8,
        )  # fmt: skip
        shape = tag("path", d=_outline(row.steps, x, base, (_ROW - 3) / scale, end), fill="var(--s0)")
        parts.append(titled(f"{row.name}: up to {peak:g} GPUs", label, wait, shape))
        y += _ROW
    for tick in ticks((end - start) / 3600, max(3, int(width / 110))):
        at = x(start + tick * 3600)
        parts.insert(2, tag("line", x1=at, x2=at, y1=top, y2=y, class_="grid"))
        anchor = "end" if at > right - 16 else "middle"
        parts.append(text(at, y + 14, number_text(tick), text_anchor=anchor, class_="soft small"))
    parts.append(
        text(
            (left + right) / 2,
            y + 30,
            "hours since the first arrival",
            text_anchor="middle",
            class_="soft small",
        )
    )
    held = sum(job["gpu_seconds"] for job in record["jobs"]) / 3600
    words = f"{plural(len(record['jobs']), 'job')}, {number_text(held)} GPU-hours"
    return document(width, y + 38, title, words, parts)


def _outline(steps: Steps, x: Any, base: float, scale: float, end: float) -> str:
    """Return the area under a step function as a path, joining what is too narrow to see."""
    path = []
    ends = [*steps.times[1:], end]
    drawn_to = -1e9
    for start, until, value in zip(steps.times, ends, steps.values, strict=True):
        if value <= 0:
            continue
        from_, to = x(start), x(until)
        if to - from_ < _LEAST and from_ - drawn_to < _LEAST:
            continue
        to = max(to, from_ + _LEAST)
        height = max(value * scale, 1.0)
        path.append(f"M{from_:.1f} {base:.1f}v{-height:.1f}H{to:.1f}V{base:.1f}z")
        drawn_to = to
    return "".join(path) or "M0 0"


def cumulative(steps: Steps, edges: Sequence[float]) -> list[float]:
    """Return the integral of a step function from the first of ``edges`` to each of them."""
    if not steps.times:
        return [0.0] * len(edges)
    times = np.array([*steps.times, max(edges[-1], steps.times[-1]) + 1.0])
    areas = np.concatenate([[0.0], np.cumsum(np.array(steps.values) * np.diff(times))])
    found = np.interp(edges, times, areas)
    return [float(value) for value in found - found[0]]


def edges(record: Record, bins: int = 120) -> list[float]:
    """Return the ends of equal bins over the run, s."""
    start, end = record["first_arrival"], record["last_finish"]
    return [start + (end - start) * number / bins for number in range(bins + 1)]


def utilisation(record: Record) -> list[tuple[float, float]]:
    """Return (hours since the first arrival, % of the GPUs held) over the run."""
    at = edges(record)
    held = cumulative(steps_of(record["usage"]["held"]), at)
    there = cumulative(steps_of(record["usage"]["capacity"]), at)
    points = []
    for middle, (a, b), (c, d) in zip(pairwise(at), pairwise(held), pairwise(there), strict=True):
        hours = (sum(middle) / 2 - at[0]) / 3600
        points.append((hours, 100 * (b - a) / (d - c) if d > c else 0.0))
    return points


def waiting(record: Record) -> list[tuple[float, float]]:
    """Return (hours since the first arrival, mean number of jobs that have arrived and not finished)."""
    there = Steps([], [])
    moves = [(job["arrival"], 1) for job in record["jobs"]] + [(job["finish"], -1) for job in record["jobs"]]
    count = 0
    for at, move in sorted(moves):
        count += move
        there.set(at, count)
    return _means(record, there)


def price(record: Record) -> list[tuple[float, float]]:
    """Return (hours since the first arrival, $/h of all nodes that are there)."""
    return _means(record, steps_of(record["usage"]["price"]))


def _means(record: Record, steps: Steps) -> list[tuple[float, float]]:
    """Return the mean of a step function in each bin of the run."""
    at = edges(record)
    total = cumulative(steps, at)
    width = at[1] - at[0]
    return [
        ((sum(ends) / 2 - at[0]) / 3600, (after - before) / width if width else 0.0)
        for ends, (before, after) in zip(pairwise(at), pairwise(total), strict=True)
    ]


def by_policy(records: Sequence[Record]) -> Mapping[str, list[Record]]:
    """Return the runs of each policy, seeds in order."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(record["policy"], []).append(record)
    return found
