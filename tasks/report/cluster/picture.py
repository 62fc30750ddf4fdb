"""A cluster's time as one picture, for places that take no page."""

from ebbflow.tasks.drawing.axis import ticks
from ebbflow.tasks.drawing.svg import document, fit, hatch, tag, text
from ebbflow.tasks.drawing.wording import dated, label_text, number_text, plural, seconds_text
from ebbflow.tasks.report.cluster.drawing import BAR, PATTERNS, TALL
from ebbflow.tasks.report.cluster.lanes import Bar, Lane, Mark, lanes
from ebbflow.tasks.report.cluster.values import ClusterReport

_LEFT, _RIGHT = 150.0, 14.0


def cluster_svg(report: ClusterReport, width: float = 960, *, apps: int = 20) -> str:
    """Return one picture of the cluster's time for places that take no page: capacity above, apps below.

    It stays below 200 kB whatever happened: of ``apps`` those with the most GPU time are drawn, and bars too narrow
    to be seen are drawn as one.
    """
    picture = lanes(report, bars=900, apps=apps, nodes=0)
    room = width - _LEFT - _RIGHT
    parts = [
        tag("defs", [hatch(n, colour=i, ground=g, angle=a, gap=p) for n, (i, g, a, p) in PATTERNS.items()])
    ]
    y = 26.0
    when = dated(report.since, report.until)
    head = f"{label_text(report.cluster, 80)}: {when(report.since)} to {when(report.until)} UTC"
    parts.append(text(10.0, 18.0, fit(head, width - 20, 14), class_="bold", style="font-size:14px"))
    body: list[str] = []
    for lane in (*picture.capacity, *picture.events, *picture.apps):
        tall = TALL if any("there" in bar.style for bar in lane.bars) else lane.rows * BAR
        name = fit(lane.name, _LEFT - 20, 11)
        body.append(text(_LEFT - 8, y + tall / 2 + 4, name, text_anchor="end", class_="small"))
        body += [_fixed(bar, y, tall, room, lane) for bar in lane.bars]
        body += [_signed(mark, y, tall, room) for mark in lane.marks]
        y += tall + 6
    for x, words in ticks(report.since, report.until, most=8, levels=1)[0]:
        at = _LEFT + x / 100 * room
        parts.append(tag("line", x1=at, x2=at, y1=26.0, y2=y, class_="grid"))
        parts.append(text(at, y + 13, words, text_anchor="middle", class_="soft small"))
    worst = report.fairness.worst
    description = (
        f"{plural(len(report.apps), 'app')} and {plural(len(report.nodes), 'node')} in"
        f" {seconds_text(report.seconds)}; worst ρ {'not known' if worst is None else number_text(worst)}"
    )
    left_out = f"; {'; '.join(picture.left_out)}" if picture.left_out else ""
    return document(
        width, y + 22, f"Cluster {label_text(report.cluster, 80)}", description + left_out, [*parts, *body]
    )


_PAINT = {
    "there": "var(--area)", "used": "var(--edge)", "waiting": "url(#tl-wait)", "lost": "url(#tl-lost)",
    "running": "var(--area)", "many": "url(#tl-many)", "stage completed": "var(--done)",
    "stage reused": "url(#tl-reused)", "stage cancelled": "url(#tl-cut)", "stage failed": "var(--bg)",
    "stage running": "var(--area)",
}  # fmt: skip


def _fixed(bar: Bar, y: float, tall: float, room: float, lane: Lane) -> str:
    height = max(tall * bar.value, 2.0) if lane.steps else (BAR - 2) * bar.value
    top = y + tall - height if lane.steps else y + bar.row * BAR + 1 + (BAR - 2) - height
    number = bar.style[-1] if bar.style.startswith("held c") else ""
    paint = f"var(--s{number})" if number else _PAINT.get(bar.style, "var(--area)")
    stroke = "var(--fail)" if bar.style == "stage failed" else None
    return tag(
        "rect", x=_LEFT + bar.x0 / 100 * room, y=top, width=max(bar.wide / 100 * room, 0.6), height=height,
        fill=paint, stroke=stroke,
    )  # fmt: skip


def _signed(mark: Mark, y: float, tall: float, room: float) -> str:
    x = _LEFT + mark.x / 100 * room
    if mark.style.startswith("tick"):
        return tag("rect", x=x, y=y + tall / 2, width=1.2, height=tall / 2, fill="var(--edge)")
    words = mark.sign + (str(mark.count) if mark.count > 1 else "")
    anchor = "start" if mark.x < 1.5 else "end" if mark.x > 98.5 else "middle"
    return text(x, y + tall / 2 + 4, words, text_anchor=anchor, class_="small")
