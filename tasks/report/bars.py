"""Stages as bars along a time axis, each with its label, its status told by pattern and mark."""

from collections.abc import Sequence
from dataclasses import dataclass

from ebbflow.tasks.drawing.svg import fit, tag, text, text_width, titled
from ebbflow.tasks.drawing.wording import bytes_text, count_text, seconds_text
from ebbflow.tasks.query.report import MARKS, StageReport, StageStatus

LABEL = 11.0  # font size of labels
_RIGHT = 14.0
_BAR = 20.0  # height of a bar
_WIDEST = 190.0  # a label outside its bar


@dataclass(frozen=True, slots=True)
class Axes:
    """Where things are: seconds to units along x."""

    width: float
    left: float
    span: float  # seconds from left to right

    @property
    def right(self) -> float:
        return self.width - _RIGHT

    def x(self, at: float) -> float:
        """Return the x of ``at`` seconds, within the axis."""
        share = min(max(at, 0.0), self.span) / self.span
        return self.left + share * (self.right - self.left)


@dataclass(frozen=True, slots=True)
class Bar:
    """A stage's bar and the label that belongs to it."""

    stage: StageReport
    x0: float
    x1: float
    label: str
    label_x: float
    inside: bool
    extent: tuple[float, float]  # of bar and label together


def fill_of(status: StageStatus, key: str) -> str:
    """Return a status' fill; the picture defines the patterns ``<key>c`` and ``<key>r``."""
    return {
        "completed": "var(--done)",
        "reused": f"url(#{key}r)",
        "cancelled": f"url(#{key}c)",
        "failed": "var(--bg)",
    }[status]


def stroke_of(status: StageStatus) -> str:
    """Return the colour of a status' outline."""
    return {
        "completed": "var(--done)",
        "reused": "var(--reused)",
        "cancelled": "var(--cut)",
        "failed": "var(--fail)",
    }[status]


def place_bars(stages: Sequence[StageReport], frame: Axes) -> list[Bar]:
    """Return a bar for each stage in order of start; equal names and times keep a fixed order."""
    return [_bar(stage, frame) for stage in sorted(stages, key=lambda s: (s.started, s.ended, s.name))]


def _bar(stage: StageReport, frame: Axes) -> Bar:
    """Place a stage's bar, and its label inside it, right of it, or left of it: wherever it fits."""
    x0 = frame.x(stage.started)
    instant = stage.status == "reused"
    x1 = x0 + 12 if instant else max(frame.x(stage.ended), x0 + 3)
    if x1 > frame.right:
        x0, x1 = x0 - (x1 - frame.right), frame.right
    name = f"{MARKS[stage.status]} {stage.name}"
    wide = text_width(name, LABEL)
    room = x1 - x0 - 12
    if not instant and (wide <= room or room >= 76):
        return Bar(stage, x0, x1, fit(name, room, LABEL), x0 + 6, True, (x0, x1))
    after, before = frame.right - x1 - 6, x0 - frame.left - 6
    label = fit(name, min(_WIDEST, max(after, before)), LABEL)
    wide = text_width(label, LABEL)
    if wide <= after:
        return Bar(stage, x0, x1, label, x1 + 5, False, (x0, x1 + 5 + wide))
    return Bar(stage, x0, x1, label, x0 - 5 - wide, False, (x0 - 5 - wide, x1))


def draw_bar(bar: Bar, y: float, key: str) -> str:
    """Draw a bar at ``y``; patterns are those that ``fill_of`` names with the same ``key``."""
    stage = bar.stage
    colour = stroke_of(stage.status)
    height = _BAR
    shape = tag(
        "rect", x=bar.x0, y=y + 3, width=bar.x1 - bar.x0, height=height, rx=3,
        fill=fill_of(stage.status, key), stroke=colour, stroke_width=1.5,
        stroke_dasharray="4 3" if stage.status == "cancelled" else None,
    )  # fmt: skip
    parts = [shape]
    if stage.status in ("cancelled", "failed"):  # the bar ends in a cut, not in an output
        parts.append(
            tag("line", x1=bar.x1, x2=bar.x1, y1=y, y2=y + height + 6, stroke=colour, stroke_width=3)
        )
    if bar.inside and stage.status == "cancelled":  # stripes would run through the letters
        wide = text_width(bar.label, LABEL)
        parts.append(
            tag("rect", x=bar.label_x - 3, y=y + 6, width=wide + 6, height=14, rx=2, fill="var(--cut-bg)")
        )
    ink = "var(--done-ink)" if bar.inside and stage.status == "completed" else "var(--ink)"
    halo = "small" if bar.inside else "small halo"
    parts.append(text(bar.label_x, y + 17, bar.label, class_=halo, style=f"fill:{ink}"))
    return titled(_tooltip(stage), *parts)


def _tooltip(stage: StageReport) -> str:
    if stage.status == "reused":
        tip = f"reused at {seconds_text(stage.started)}, saving {seconds_text(stage.saved_seconds)}"
    else:
        tip = f"{stage.status}: {seconds_text(stage.started)} to {seconds_text(stage.ended)}"
        if stage.estimated_seconds is not None:
            tip += f" (estimated to take {seconds_text(stage.estimated_seconds)})"
    if stage.status in ("completed", "reused"):
        tip += f"; {count_text(stage.rows)} rows, {bytes_text(stage.bytes)}"
    return "\n".join([stage.name, tip, f"plan {stage.plan}", *([stage.note] if stage.note else [])])
