"""A cluster's time as lanes of bars: where each bar is and what it says, before anything is drawn.

Places are per cent of the report's time, so that a page can be stretched without drawing anew. Bars too narrow to be
seen are drawn as one, so that a picture of any number of events stays small.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ebbflow.tasks.drawing.axis import natural
from ebbflow.tasks.drawing.svg import lanes as rows_of
from ebbflow.tasks.drawing.wording import clock_text, label_text, number_text, plural, seconds_text
from ebbflow.tasks.query.report import MARKS
from ebbflow.tasks.report.cluster.values import AppRow, ClusterReport, LeaseReport, NodeReport

ENDS = {"finished": "✓", "failed": "✗", "stopped": "■", "lost": "?"}
_STAGES: dict[str, str] = {**MARKS}
_NEAR = 1.6  # per cent of the time within which signs are drawn as one
_SIGNS = 16  # in a lane; more are drawn as lines
_NAME = 48  # characters of a name in a label


@dataclass(frozen=True, slots=True)
class Bar:
    """Something from ``x0`` to ``x1``, per cent."""

    x0: float
    x1: float
    style: str  # CSS classes
    label: str = ""
    tip: str = ""
    value: float = 1.0  # height, 0 to 1
    row: int = 0
    count: int = 1  # bars that it stands for

    @property
    def wide(self) -> float:
        return self.x1 - self.x0


@dataclass(frozen=True, slots=True)
class Mark:
    """A sign at a moment."""

    x: float
    sign: str
    style: str
    tip: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Lane:
    """One line of the picture."""

    name: str
    note: str = ""  # beside the name
    bars: tuple[Bar, ...] = ()
    marks: tuple[Mark, ...] = ()
    rows: int = 1
    steps: bool = False  # bars have heights: a step line
    description: str = ""  # in words, for readers who do not see it


@dataclass(frozen=True, slots=True)
class Lanes:
    """The whole picture."""

    since: float
    until: float
    capacity: tuple[Lane, ...]
    events: tuple[Lane, ...]
    apps: tuple[Lane, ...]
    nodes: tuple[Lane, ...]
    left_out: tuple[str, ...] = ()

    @property
    def drawn(self) -> int:
        """Return how many bars and marks there are."""
        every = (*self.capacity, *self.events, *self.apps, *self.nodes)
        return sum(len(lane.bars) + len(lane.marks) for lane in every)


class _Scale:
    def __init__(self, report: ClusterReport) -> None:
        self._since, self._span = report.since, max(report.seconds, 1e-6)

    def __call__(self, at: float) -> float:
        return min(max((at - self._since) / self._span, 0.0), 1.0) * 100


def lanes(report: ClusterReport, *, bars: int = 9000, apps: int = 60, nodes: int = 32) -> Lanes:
    """Return the picture of ``report`` with at most about ``bars`` bars, ``apps`` apps and ``nodes`` nodes."""
    whole = _lanes(report, apps, nodes)
    made, least = whole, 0.0
    for least in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0):
        made = replace(
            whole,
            capacity=tuple(_thin(lane, least) for lane in whole.capacity),
            apps=tuple(_thin(lane, least) for lane in whole.apps),
            nodes=tuple(_thin(lane, least) for lane in whole.nodes),
        )
        if made.drawn <= bars:
            break
    merged = sum(bar.count - 1 for lane in (*made.apps, *made.nodes) for bar in lane.bars if bar.count > 1)
    if merged:
        shortest = seconds_text(report.seconds * least / 100)
        note = f"{plural(merged, 'bar')} shorter than {shortest} drawn together with their neighbours"
        made = replace(made, left_out=(*made.left_out, note))
    return made


def _lanes(report: ClusterReport, apps: int, nodes: int) -> Lanes:
    x = _Scale(report)
    shown_apps = sorted(report.apps, key=lambda a: (-a.service, a.number))[:apps]
    shown_apps.sort(key=lambda a: a.number)
    busy = sorted(_by_node(report).items(), key=lambda item: (-item[1], item[0]))
    shown_nodes = {name for name, _ in busy[:nodes]}
    out = []
    if len(report.apps) > apps:
        out.append(f"{plural(len(report.apps) - apps, 'app')} with less GPU time")
    if len(busy) > nodes:
        out.append(f"the GPUs of {plural(len(busy) - nodes, 'node')} with less leased time")
    by_app: dict[str, list[LeaseReport]] = defaultdict(list)
    report = replace(report, leases=apart(report.leases))
    for lease in report.leases:
        by_app[lease.app].append(lease)
    return Lanes(
        report.since,
        report.until,
        _capacity(report, x),
        _events(report, x),
        tuple(_app(report, app, by_app[app.id], x) for app in shown_apps),
        tuple(_nodes(report, shown_nodes, x)),
        tuple(out),
    )


def _by_node(report: ClusterReport) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for stay in report.nodes:
        if stay.gpus:
            found[stay.id] += stay.leased
    return found


def apart(leases: Sequence[LeaseReport]) -> tuple[LeaseReport, ...]:
    """Return leases of which no two of one GPU overlap.

    A lease counts from when it was decided on, and the one before it ends when that is written, a moment later.
    """
    ends: dict[tuple[str, int], float] = {}
    found = []
    for lease in sorted(leases, key=lambda one: one.number):
        begin = min(max(lease.since, ends.get((lease.node, lease.slot), lease.since)), lease.until)
        found.append(lease if begin == lease.since else replace(lease, since=begin))
        ends[lease.node, lease.slot] = lease.until
    return tuple(found)


def held_over_time(leases: Iterable[LeaseReport]) -> list[tuple[float, float, int]]:
    """Return (from, to, GPUs held) wherever that is above 0."""
    moves: dict[float, int] = defaultdict(int)
    for lease in leases:
        moves[lease.since] += 1
        moves[lease.until] -= 1
    found: list[tuple[float, float, int]] = []
    held = 0
    for at, after in pairwise([*sorted(moves), float("inf")]):
        held += moves[at]
        if held > 0 and after < float("inf"):
            found.append((at, after, held))
    return found


def _thin(lane: Lane, least: float) -> Lane:
    """Draw neighbours that are narrower than ``least`` as one; what lies behind others is a layer of its own."""
    layers: dict[str, list[Bar]] = defaultdict(list)
    for bar in lane.bars:
        layers[bar.style if bar.style in ("node", "there", "used") else ""].append(bar)
    ordered = sorted(layers.items(), key=lambda item: item[0] != "node")  # else as they came
    return replace(lane, bars=tuple(bar for _, bars in ordered for bar in _thinned(bars, least)))


def _thinned(bars: Sequence[Bar], least: float) -> tuple[Bar, ...]:
    """Draw neighbours that are narrower than ``least`` as one."""
    found: list[Bar] = []
    for bar in sorted(bars, key=lambda b: (b.row, b.x0, b.x1)):
        last = found[-1] if found else None
        near = last is not None and last.row == bar.row and bar.x0 - last.x1 < least
        if last is None or not near or bar.wide >= least or last.wide >= max(least, 0.02) * 4:
            found.append(bar)
            continue
        count = last.count + bar.count
        style = last.style if last.style == bar.style else "many"
        found[-1] = Bar(
            last.x0, max(last.x1, bar.x1), style, "", f"{count} short ones", max(last.value, bar.value),
            bar.row, count,
        )  # fmt: skip
    return tuple(found)


def _capacity(report: ClusterReport, x: _Scale) -> tuple[Lane, ...]:
    found = []
    ends = [*(step.at for step in report.capacity[1:]), report.until]
    steps = list(zip(report.capacity, ends, strict=False))
    for name, unit, key in (("GPUs", "GPU", "gpus"), ("cores", "core", "cores")):
        most = max((getattr(step, key) for step in report.capacity), default=0)
        if not most:
            continue
        low = min(getattr(step, key) for step in report.capacity)
        bars = [
            Bar(
                x(step.at), x(end), "there", "",
                f"{clock_text(step.at)}: {plural(getattr(step, key), unit)} on {plural(step.nodes, 'node')}",
                getattr(step, key) / most,
            )
            for step, end in steps
            if getattr(step, key) and end > step.at
        ]  # fmt: skip
        note = f"{low} to {most} there" if low != most else f"{most} there"
        if key == "gpus":
            used = [
                Bar(x(a), x(b), "used", "", f"{clock_text(a)}: {held} leased", min(1.0, held / most))
                for a, b, held in held_over_time(report.leases)
            ]
            bars += used
            note += ", filled: leased"
        description = f"{name} over time: {note}; {plural(len(report.capacity), 'level')}"
        found.append(Lane(name, note, tuple(bars), steps=True, description=description))
    return tuple(found)


def _events(report: ClusterReport, x: _Scale) -> tuple[Lane, ...]:
    found = []
    signs = (
        ("came", "nodes that came", "▲", "came"),
        ("left", "nodes that left", "▽", "left"),
        ("reclaimed", "nodes interrupted", "▼", "gone"),
        ("lost", "nodes lost without notice", "✗", "gone"),
        ("notice", "notices", "!", "told"),
        ("advice", "advice of a likely loss", "?", "told"),
    )
    for kind, name, sign, style in signs:
        changes = [change for change in report.changes if change.kind == kind]
        marks = [
            Mark(
                x(c.at),
                sign,
                style,
                f"{clock_text(c.at)} {label_text(', '.join(c.nodes[:6]), 80)}",
                len(c.nodes),
            )
            for c in changes
        ]
        if marks:
            total = sum(len(change.nodes) for change in changes)
            found.append(Lane(name, f"{total:,}", marks=_gathered(marks), description=f"{name}: {total}"))
    names = {
        "auction": ("auctions", "◆"),
        "scaling": ("scaling", "↕"),
        "replan": ("re-plans", "⇄"),
        "guard": ("the guard said no", "⊘"),
        "recovery": ("recoveries", "↺"),
    }
    for kind, (name, sign) in names.items():
        rows = [d for d in report.decisions if d.kind == kind]
        if rows:
            marks = [
                Mark(x(d.at), sign, kind, f"{clock_text(d.at)} {label_text(d.reason, 120)}") for d in rows
            ]
            if len(marks) > _SIGNS:
                marks = [replace(mark, sign="", style=f"tick m-{kind}") for mark in marks]
            near = 0.3 if len(marks) > _SIGNS else _NEAR
            found.append(
                Lane(name, f"{len(rows):,}", marks=_gathered(marks, near), description=f"{name}: {len(rows)}")
            )
    return tuple(found)


def _gathered(marks: Sequence[Mark], near: float = _NEAR) -> tuple[Mark, ...]:
    """Draw marks that would touch as one with their count."""
    found: list[Mark] = []
    for mark in sorted(marks, key=lambda m: m.x):
        if found and mark.x - found[-1].x < near:
            last = found[-1]
            count = last.count + mark.count
            tip = last.tip if last.tip.endswith("…") else f"{last.tip} …"
            found[-1] = replace(last, count=count, tip=tip)
        else:
            found.append(mark)
    return tuple(found)


def _app(report: ClusterReport, app: AppRow, leases: Sequence[LeaseReport], x: _Scale) -> Lane:
    bars: list[Bar] = []
    for span, after in pairwise([*app.phases, None]):
        assert span is not None
        end = report.until if after is None else after.at
        if span.phase in ("waiting", "lost") and end > span.at:
            tip = f"{span.phase} for {seconds_text(end - span.at)}{': ' if span.reason else ''}{span.reason}"
            bars.append(Bar(x(span.at), x(end), span.phase, "", label_text(tip, 160), 0.25))
        elif span.phase == "running" and app.kind == "query" and end > span.at:
            tip = f"running for {seconds_text(end - span.at)}"
            bars.append(Bar(x(span.at), x(end), "running", "", tip, 0.25))
    stages = [stage for stage in report.stages if stage.app == app.id]
    places = rows_of([(stage.since, max(stage.until, stage.since + 1e-6)) for stage in stages])
    for stage, row in zip(stages, places, strict=True):
        style = stage.status if stage.status in _STAGES else "running"
        label = f"{_STAGES.get(stage.status, '')} {label_text(stage.name, 60)}".strip()
        tip = f"{label_text(stage.status, 20)} {label_text(stage.name, 80)}"
        tip += f": {seconds_text(stage.until - stage.since)}"
        bars.append(Bar(x(stage.since), x(stage.until), f"stage {style}", label, tip, 1.0, row))
    rows = max(places, default=0) + 1
    held = held_over_time(leases)
    most = max((count for _, _, count in held), default=1)
    colour = f"c{app.number % 6}"
    bars += [
        Bar(x(a), x(b), f"held {colour}", str(count),
            f"{clock_text(a)} to {clock_text(b)}: {plural(count, 'GPU')}", count / most)
        for a, b, count in held
    ]  # fmt: skip
    marks = []
    if app.ended is not None and app.ended <= report.until:
        marks.append(
            Mark(
                x(app.ended), ENDS.get(app.phase, ""), app.phase, label_text(f"{app.phase} {app.reason}", 160)
            )
        )
    if app.deadline is not None and report.since <= app.deadline <= report.until:
        marks.append(Mark(x(app.deadline), "⚑", "deadline", f"deadline {clock_text(app.deadline)}"))
    note = f"{label_text(app.team, 40) + ' · ' if app.team else ''}{app.kind} · {app.phase}"
    if held:
        note += f" · up to {plural(most, 'GPU')}"
    description = (
        f"{label_text(app.label, _NAME)}, {app.kind}, {app.phase}: {plural(app.leases, 'lease')}, "
        f"{number_text(app.service / 3600)} GPU-hours, waited {seconds_text(app.waited)}"
    )
    if stages:
        description += f", {plural(len(stages), 'stage run')}"
    name = f"{app.number} {label_text(app.label, _NAME)}"
    return Lane(name, note, tuple(bars), tuple(marks), rows, steps=not stages, description=description)


def _nodes(report: ClusterReport, shown: set[str], x: _Scale) -> Iterable[Lane]:
    apps = {app.id: app for app in report.apps}
    stays: dict[str, list[NodeReport]] = defaultdict(list)
    for stay in report.nodes:
        if stay.id in shown:
            stays[stay.id].append(stay)
    leases: dict[str, list[LeaseReport]] = defaultdict(list)
    for lease in report.leases:
        if lease.node in shown:
            leases[lease.node].append(lease)
    for name, mine in sorted(stays.items(), key=lambda item: (item[1][0].since, natural(item[0]))):
        gpus = max(stay.gpus for stay in mine)
        bars = []
        for stay in mine:
            end = report.until if stay.until is None else stay.until
            tip = f"there from {clock_text(stay.since)} to {clock_text(end)}"
            bars += [Bar(x(stay.since), x(end), "node", "", tip, 1.0, row) for row in range(stay.gpus)]
        held = []
        for lease in leases[name]:
            app = apps.get(lease.app)
            label = f"{app.number} {label_text(app.label, _NAME)}" if app else label_text(lease.app, _NAME)
            tip = f"{label}: {clock_text(lease.since)} to {clock_text(lease.until)}"
            if lease.recalled is not None:
                tip += f", revoked {clock_text(lease.recalled)}: {label_text(lease.ended_for, 80)}"
            style = f"held c{app.number % 6}" if app else "held"
            held.append(Bar(x(lease.since), x(lease.until), style, label, tip, 1.0, lease.slot))
            if lease.recalled is not None and lease.until > lease.recalled:
                held.append(
                    Bar(
                        x(max(lease.recalled, lease.since)),
                        x(lease.until),
                        "recall",
                        "",
                        tip,
                        1.0,
                        lease.slot,
                    )
                )
        marks = tuple(
            Mark(
                x(stay.until), {"left": "▽", "reclaimed": "▼", "lost": "✗"}[stay.ending], "gone", stay.ending
            )
            for stay in mine
            if stay.until is not None and stay.ending
        )
        last = mine[-1]
        share = sum(s.leased for s in mine) / max(sum(s.gpu_seconds for s in mine), 1e-9)
        kind = label_text(last.instance_type, 40)
        note = f"{kind} · {last.market} · {plural(gpus, 'GPU')} · {share:.0%} leased"
        description = f"{label_text(name, _NAME)}: {note.replace(' · ', ', ')}"
        yield Lane(label_text(name, _NAME), note.replace("%", " %"), (*bars, *held), marks, gpus,
                   description=description)  # fmt: skip
