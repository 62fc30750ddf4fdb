"""The picture of a run: capacity above, stages below, plan switches through both."""

from ebbflow.tasks.drawing.svg import (
    document,
    fit,
    hatch,
    lanes,
    place_labels,
    tag,
    text,
    text_width,
    ticks,
    titled,
    unique,
)
from ebbflow.tasks.drawing.wording import number_text, plural, seconds_text
from ebbflow.tasks.query.report import MARKS, CapacityReport, QueryReport, StageStatus
from ebbflow.tasks.report.bars import LABEL, Axes, draw_bar, fill_of, place_bars, stroke_of

_LANE = 27.0  # height of a lane of stages
_ROW = 17.0  # height of a row of labels
_PANEL = 96.0  # height of the capacity panel
_EVENT_ROWS = 3  # rows of words for capacity changes, at most


def timeline_svg(report: QueryReport, width: float = 960) -> str:
    """Draw ``report`` over time, ``width`` units wide: 960 suits a page, 400 a phone.

    Above: usable cores as steps with notices, losses and arrivals marked. Below: one bar a stage run, by
    status. Switches are numbered as in the table of switches; a dashed line shows when the first plan was
    expected to finish.
    """
    frame = Axes(width, 50.0, _span(report))
    key = unique(report.started, report.seconds, report.query, width)
    legend, y = _legend(frame, key, 6.0)
    top, lines, y = _top_labels(report, frame, y)
    events, y = _capacity_labels(report, frame, y)
    steps = _capacity(report, frame, y)
    panel_top = y
    y += _PANEL + 20
    bars = place_bars(report.stages, frame)
    rows = lanes([b.extent for b in bars], gap=5)
    bottom = y + (max(rows) + 1 if rows else 1) * _LANE + 4
    drawn = [draw_bar(bar, y + row * _LANE, key) for bar, row in zip(bars, rows, strict=True)]
    if not bars:
        drawn = [text(frame.left + 6, y + 15, "no stage ran", class_="soft")]
    verticals = [
        tag("line", x1=x, x2=x, y1=start, y2=bottom, stroke=colour, stroke_width=1.4, stroke_dasharray=dash)
        for x, start, colour, dash in lines
    ]
    captions = [
        _caption("usable cores", panel_top + _PANEL / 2),
        _caption("stages", (y + bottom) / 2),
    ]
    return document(
        width,
        bottom + 24,
        f"Timeline of {report.name or 'the query'}",
        _description(report),
        [
            _definitions(key),
            *legend,
            tag(
                "rect",
                x=frame.left,
                y=panel_top,
                width=frame.right - frame.left,
                height=_PANEL,
                class_="panel",
            ),
            tag("rect", x=frame.left, y=y, width=frame.right - frame.left, height=bottom - y, class_="panel"),
            *_axis(frame, panel_top, bottom),
            *steps,
            *captions,
            *verticals,
            *events,
            *drawn,
            *top,
        ],
    )


def _span(report: QueryReport) -> float:
    """Return the seconds that the picture covers: everything known, with a little room at the end."""
    ends = [report.seconds, *(s.ended for s in report.stages), *(c.at for c in report.capacity)]
    if report.expected_seconds is not None and report.expected_seconds <= 3 * max(report.seconds, 1e-9):
        ends.append(report.expected_seconds)
    return max(*ends, 0.1) * 1.02


def _definitions(key: str) -> str:
    return tag(
        "defs",
        [
            hatch(f"{key}c", colour="var(--cut)", ground="var(--cut-bg)"),
            hatch(f"{key}r", colour="var(--bg)", ground="var(--reused)", angle=-45, gap=5),
        ],
    )


def _legend(frame: Axes, key: str, y: float) -> tuple[list[str], float]:
    """Draw the legend, wrapped to the width; return it and the y below it."""
    parts: list[str] = []
    x = frame.left
    statuses: tuple[StageStatus, ...] = ("completed", "reused", "cancelled", "failed")
    entries = [(f"{MARKS[s]} {s}", s) for s in statuses]
    for label, status in entries:
        wide = 22 + text_width(label, LABEL) + 14
        if x + wide > frame.right and x > frame.left:
            x, y = frame.left, y + _ROW
        parts += [
            tag(
                "rect", x=x, y=y, width=16, height=11, rx=2, fill=fill_of(status, key),
                stroke=stroke_of(status), stroke_width=1.5,
            ),
            text(x + 22, y + 9.5, label, class_="small"),
        ]  # fmt: skip
        x += wide
    return parts, y + _ROW + 3


def _top_labels(
    report: QueryReport, frame: Axes, y: float
) -> tuple[list[str], list[tuple[float, float, str, str]], float]:
    """Draw the labels of all vertical lines; return them, the lines and the y below them."""
    items: list[tuple[float, str, str, str, str]] = []  # x, label, tooltip, colour, dash
    for number, switch in enumerate(report.switches, 1):
        when = f"switch {number} at {seconds_text(switch.at)}"
        tip = f"{when}: {switch.source} → {switch.target}. {switch.reason}"
        items.append((frame.x(switch.at), f"switch {number}", tip, "var(--switch)", "5 4"))
    expected = report.expected_seconds
    if expected is not None:
        beyond = expected > frame.span
        label = f"expected {seconds_text(expected)}" + (" →" if beyond else "")
        items.append(
            (
                frame.x(expected),
                label,
                "the first plan's finish, as expected at start",
                "var(--expect)",
                "2 3",
            )
        )
    items.append(
        (frame.x(report.seconds), f"done {seconds_text(report.seconds)}", "the result", "var(--ink)", "none")
    )
    widths = [text_width(label, LABEL) + 12 for _, label, *_ in items]
    places = place_labels([(i[0], w) for i, w in zip(items, widths, strict=True)], frame.left, frame.right)
    parts, lines = [], []
    for (x, label, tip, colour, dash), wide, (row, start) in zip(items, widths, places, strict=True):
        top = y + row * _ROW
        lines.append((x, top + 15, colour, dash))
        parts.append(
            titled(
                tip,
                tag(
                    "rect",
                    x=start,
                    y=top,
                    width=wide,
                    height=15,
                    rx=7.5,
                    fill="var(--bg)",
                    stroke=colour,
                    stroke_width=1.2,
                ),
                text(
                    start + wide / 2,
                    top + 11,
                    label,
                    text_anchor="middle",
                    class_="small",
                    style=f"fill:{colour}",
                ),
            )
        )
    return parts, lines, y + (max(row for row, _ in places) + 1) * _ROW + 2


def _events(report: QueryReport) -> list[tuple[CapacityReport, str, str]]:
    """Return (entry, mark, words) of every change after the start."""
    found = []
    for entry in report.capacity:
        for mark, word, nodes in (
            ("▼", "lost", entry.left),
            ("▲", "new", entry.arrived),
            ("!", "notice", entry.noticed),
        ):
            if nodes:
                found.append((entry, mark, f"{word} {nodes[0] if len(nodes) == 1 else len(nodes)}"))
        if entry is not report.capacity[0] and not (entry.left or entry.arrived or entry.noticed):
            found.append((entry, "◆", entry.change or "changed"))
    return found


def _capacity_labels(report: QueryReport, frame: Axes, y: float) -> tuple[list[str], float]:
    """Draw the words for capacity changes above the panel with a line down to its top."""
    events = _events(report)
    labels = [f"{mark} {fit(words, 120, LABEL)}" for _, mark, words in events]
    items = [(frame.x(e.at), text_width(label, LABEL)) for (e, *_), label in zip(events, labels, strict=True)]
    places = place_labels(items, frame.left, frame.right)
    depth = min(max((row for row, _ in places), default=-1) + 1, _EVENT_ROWS)
    bottom = y + depth * _ROW
    stems, words = [], []
    for (entry, mark, _), label, (x, wide), (row, start) in zip(events, labels, items, places, strict=True):
        worded = row < _EVENT_ROWS  # beyond, the line and its tooltip have to do
        base = bottom - (row * _ROW + 5 if worded else 0)
        colour = {"▼": "var(--fail)", "▲": "var(--reused)", "!": "var(--expect)"}.get(mark, "var(--soft)")
        usable = f"{number_text(entry.cores)} cores on {plural(entry.nodes, 'node')}"
        stems.append(tag("line", x1=x, x2=x, y1=base + 3, y2=bottom + _PANEL, stroke=colour, opacity=0.55))
        if not worded:
            stems[-1] = titled(f"{seconds_text(entry.at)}: {entry.change}; {usable}", stems[-1])
            continue
        words.append(
            titled(
                f"{seconds_text(entry.at)}: {entry.change}; {usable}",
                tag("rect", x=start - 2, y=base - 10, width=wide + 4, height=13, fill="var(--bg)"),
                text(
                    start + wide / 2,
                    base,
                    label,
                    text_anchor="middle",
                    class_="small",
                    style=f"fill:{colour}",
                ),
            )
        )
    return stems + words, bottom + (0 if depth else 6)


def _capacity(report: QueryReport, frame: Axes, y: float) -> list[str]:
    """Draw usable cores as a filled step line with its axis."""
    most = max((c.cores for c in report.capacity), default=0.0)
    high = max(most, 1.0) * 1.12

    def level(cores: float) -> float:
        return y + _PANEL * (1 - cores / high)

    marks = [t for t in ticks(high, 4) if t <= most or t == 0]
    parts = []
    for tick in marks:
        parts.append(
            tag("line", x1=frame.left, x2=frame.right, y1=level(tick), y2=level(tick), class_="grid")
        )
        parts.append(
            text(frame.left - 6, level(tick) + 4, number_text(tick), text_anchor="end", class_="soft small")
        )
    if not report.capacity:
        return [*parts, text(frame.left + 6, y + 18, "capacity not recorded", class_="soft")]
    points = []
    for entry, after in zip(report.capacity, [*report.capacity[1:], None], strict=True):
        end = after.at if after else report.seconds
        points += [(frame.x(entry.at), level(entry.cores)), (frame.x(max(end, entry.at)), level(entry.cores))]
    line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
    area = f"{points[0][0]:.1f},{y + _PANEL:.1f} {line} {points[-1][0]:.1f},{y + _PANEL:.1f}"
    return [
        tag("polygon", points=area, fill="var(--area)"),
        *parts,
        tag("polyline", points=line, fill="none", stroke="var(--edge)", stroke_width=2),
    ]


def _caption(words: str, middle: float) -> str:
    return text(
        14.0,
        middle,
        words,
        text_anchor="middle",
        class_="soft small",
        transform=f"rotate(-90 14 {middle:.1f})",
    )


def _axis(frame: Axes, top: float, bottom: float) -> list[str]:
    about = max(3, int(frame.width / 110))
    parts = []
    for tick in ticks(frame.span, about):
        x = frame.x(tick)
        parts.append(tag("line", x1=x, x2=x, y1=top, y2=bottom, class_="grid", opacity=0.6))
        if x + 12 <= frame.width:
            parts.append(
                text(x, bottom + 15, f"{number_text(tick)} s", text_anchor="middle", class_="soft small")
            )
    return parts


def _description(report: QueryReport) -> str:
    """Return the picture in words, for readers who do not see it."""
    parts = [
        f"{seconds_text(report.seconds)} in total",
        plural(len(report.stages), "stage run"),
        plural(len(report.switches), "switch", "switches"),
    ]
    if report.capacity:
        cores = [c.cores for c in report.capacity]
        parts.append(f"between {number_text(min(cores))} and {number_text(max(cores))} cores")
    return ", ".join(parts) + "."
