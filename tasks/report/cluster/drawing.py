"""A page's timeline, drawn so that it can be stretched."""

from collections.abc import Iterable

from ebbflow.tasks.drawing.axis import ticks
from ebbflow.tasks.drawing.svg import clean, hatch, tag, text, titled
from ebbflow.tasks.report.cluster.lanes import Bar, Lane, Lanes, Mark
from ebbflow.tasks.report.cluster.values import Sample

TALL = 46.0  # units of a lane of capacity
_STEP = 24.0  # of a lane of GPUs held
BAR = 18.0  # of a row of bars
_LABELLED = 0.15  # per cent of the time below which a bar carries no label

PATTERNS = {
    "tl-reused": ("var(--bg)", "var(--reused)", -45, 5),
    "tl-cut": ("var(--cut)", "var(--cut-bg)", 45, 6),
    "tl-wait": ("var(--soft)", "var(--bg)", 0, 4),
    "tl-lost": ("var(--fail)", "var(--bg)", -45, 5),
    "tl-many": ("var(--soft)", "var(--panel)", 45, 3),
}


def definitions() -> str:
    """Return the patterns of a page's timeline; they must be on the page once."""
    body = [
        hatch(name, colour=ink, ground=ground, angle=angle, gap=gap)
        for name, (ink, ground, angle, gap) in PATTERNS.items()
    ]
    for number, (angle, gap) in enumerate(((45, 9), (-45, 9), (0, 7), (90, 7), (45, 5), (-45, 5))):
        body.append(
            hatch(
                f"tl-c{number}", colour=f"var(--t{number})", ground=f"var(--u{number})", angle=angle, gap=gap
            )
        )
    return tag("svg", tag("defs", body), width=0, height=0, aria_hidden="true", class_="eb defs")


def axis(picture: Lanes) -> tuple[str, str]:
    """Return the labels of the time axis and the lines that go through all lanes."""
    labels, rules = [], []
    for level, marks in enumerate(ticks(picture.since, picture.until)):
        for x, words in marks:
            place = f"{x:.3f}%"
            if 5 <= x <= 95:  # nearer to the edge it would be cut off
                labels.append(
                    tag("text", clean(words), x=place, y=13, text_anchor="middle", class_=f"small k{level}")
                )
            rules.append(tag("line", x1=place, x2=place, y1=0, y2="100%", class_=f"grid k{level}"))
    counts = []
    for marks in ticks(picture.since, picture.until):
        counts.append(len(marks) + (counts[-1] if counts else 0))
    head = tag("svg", labels, class_="axis", width="100%", height=18, aria_hidden="true",
               data_counts=",".join(map(str, counts)))  # fmt: skip
    return head, tag("svg", rules, class_="rules", width="100%", height="100%", aria_hidden="true")


def lane_svg(lane: Lane) -> str:
    """Return one lane, as wide as it is given room."""
    if lane.marks and not lane.bars:
        height = BAR
    elif lane.steps:
        height = TALL if any("there" in bar.style for bar in lane.bars) else _STEP
    else:
        height = lane.rows * BAR
    body = [_bar(bar, height, lane) for bar in lane.bars]
    body += [_mark(mark, height) for mark in lane.marks]
    return tag(
        "svg",
        body,
        class_="lane",
        width="100%",
        height=height,
        role="img",
        aria_label=clean(lane.description or lane.name),
    )


def _bar(bar: Bar, height: float, lane: Lane) -> str:
    x, wide = f"{bar.x0:.3f}%", f"{max(bar.wide, 0.02):.3f}%"
    if lane.steps:
        tall = max(height * bar.value, 2.0)
        y = height - tall
    else:
        y, tall = bar.row * BAR + 1, (BAR - 2) * (1.0 if bar.value >= 1 else bar.value)
        y += (BAR - 2) - tall
    tip = tag("title", clean(bar.tip)) if bar.tip and (bar.wide >= 0.05 or bar.count > 1) else ""
    style = "many" if bar.style == "many" else bar.style
    if not bar.label or bar.wide < _LABELLED:
        return tag("rect", tip, x=x, y=y, width=wide, height=tall, class_=style)
    # a picture in the picture cuts its label off where the bar ends, however it is stretched
    return tag(
        "svg",
        [
            tip,
            tag("rect", width="100%", height="100%", class_=style),
            text(4.0, min(tall - 4.0, 13.0) if tall >= 14 else tall - 1.0, bar.label, class_="small"),
        ],
        x=x, y=y, width=wide, height=tall,
    )  # fmt: skip


def _mark(mark: Mark, height: float) -> str:
    if mark.style.startswith("tick"):
        tall = height * min(1.0, 0.4 + 0.1 * mark.count)
        place = {"x": f"{mark.x:.3f}%", "y": height - tall, "width": 2, "height": tall}
        return tag("rect", tag("title", clean(mark.tip)), class_=mark.style, **place)
    words = clean(mark.sign) + (tag("tspan", f"{mark.count}", class_="count") if mark.count > 1 else "")
    anchor = "start" if mark.x < 1.5 else "end" if mark.x > 98.5 else "middle"
    sign = tag(
        "text",
        words,
        x=f"{mark.x:.3f}%",
        y=height / 2 + 4.5,
        text_anchor=anchor,
        class_=f"sign m-{mark.style}",
    )
    return titled(mark.tip, sign) if mark.tip else sign


def spark_svg(
    samples: Iterable[Sample], since: float, until: float, description: str, most: float | None = None
) -> str:
    """Return a line of ``samples`` over the time from ``since`` to ``until``, as wide as it is given room."""
    points = _few([s for s in samples if since <= s.at <= until])
    span = max(until - since, 1e-6)
    top = most or max((s.value for s in points), default=0.0) or 1.0
    drawn = " ".join(
        f"{(s.at - since) / span * 1000:.1f},{38 - 36 * min(s.value / top, 1.0):.1f}" for s in points
    )
    line = tag("polyline", points=drawn, class_="spark")
    if len(points) == 1:
        x = (points[0].at - since) / span * 1000
        line = tag("line", x1=max(x - 6, 0.0), x2=min(x + 6, 1000.0), y1=3.0, y2=3.0, class_="spark")
    return tag("svg", line, viewBox="0 0 1000 40", preserveAspectRatio="none", width="100%", height=40,
               role="img", aria_label=clean(description))  # fmt: skip


def _few(samples: list[Sample], most: int = 240) -> list[Sample]:
    """Keep the first, the last and of each slice of time the lowest and the highest."""
    if len(samples) <= most:
        return samples
    size = -(-len(samples) * 2 // most)
    kept: list[Sample] = [samples[0]]
    for start in range(1, len(samples) - 1, size):
        part = samples[start : min(start + size, len(samples) - 1)]
        low, high = min(part, key=lambda s: s.value), max(part, key=lambda s: s.value)
        kept += sorted({low.at: low, high.at: high}.values(), key=lambda s: s.at)
    return [*kept, samples[-1]]
