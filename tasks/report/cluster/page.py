"""A cluster's report as one page: no network, readable without colour, on a phone and on paper.

The page is made of parts, each with a digest of what it says, so that a page that is served live fetches only those
that have changed (``templates/cluster.js``).
"""

import hashlib
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

from markupsafe import Markup

from ebbflow.planners.model.ledger import DecisionKind
from ebbflow.tasks.drawing.svg import STYLE
from ebbflow.tasks.drawing.wording import clock_text, dated, label_text, plural
from ebbflow.tasks.report.aggregation import aggregation_rows
from ebbflow.tasks.report.cluster.drawing import axis, definitions, lane_svg
from ebbflow.tasks.report.cluster.lanes import lanes
from ebbflow.tasks.report.cluster.report import ClusterReport
from ebbflow.tasks.report.cluster.tables import (
    app_rows,
    change_rows,
    fairness_words,
    figures,
    money_notes,
    money_rows,
    team_rows,
)
from ebbflow.tasks.report.cluster.values import DECISIONS
from ebbflow.tasks.report.cluster.words import NAME, alerts, cards, decision_rows, short, verdict
from ebbflow.tasks.report.query import environment, trusted

PARTS = ("head", "timeline", "apps", "fairness", "money", "aggregation", "decisions", "capacity", "loop")
MOST = 5_000_000  # bytes of a page
_SIGNS = {
    "finished": "✓", "running": "▶", "waiting": "…", "stopped": "■", "failed": "✗", "lost": "?",
    "auction": "◆", "scaling": "↕", "replan": "⇄", "guard": "⊘", "recovery": "↺",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class PageLimits:
    """How much of everything a page shows."""

    bars: int = 9000
    apps: int = 200
    lanes: int = 60  # apps in the timeline
    figures: int = 60
    nodes: int = 32
    decisions: int = DECISIONS
    changes: int = 300

    def smaller(self) -> "PageLimits":
        """Return a third of it."""
        return PageLimits(*(max(4, getattr(self, name) // 3) for name in self.__slots__))


def cluster_html(report: ClusterReport, *, live: bool = False, most: int = MOST) -> str:
    """Return ``report`` as one self-contained page of less than ``most`` bytes; all text from it is escaped.

    A ``live`` page fetches its parts anew from ``live.json`` beside it.
    """
    room = PageLimits()
    for _ in range(4):
        html = _page(report, cluster_parts(report, room), live)
        if len(html.encode()) < most:
            break
        room = room.smaller()
    return html


def cluster_parts(report: ClusterReport, room: PageLimits | None = None) -> dict[str, Markup]:
    """Return the parts of the page by name."""
    room = room or PageLimits()
    picture = lanes(report, bars=room.bars, apps=room.lanes, nodes=room.nodes)
    labels, rules = axis(picture)
    when = dated(report.since, report.until)
    names = {app.id: f"{app.number} {app.title}" for app in report.apps if app.title and app.title != app.id}
    shown = list(report.apps[: room.apps])
    drawn = figures(report, report.apps)
    rows, rows_left_out = decision_rows(report.decisions, room.decisions, when, names)
    changes, changes_left_out = change_rows(report.changes, room.changes, when)
    values: dict[str, Any] = {
        "report": report,
        "cluster": label_text(report.cluster, NAME),
        "pipeline": label_text(report.pipeline, NAME),
        "signs": _SIGNS,
        "verdict": verdict(report),
        "cards": cards(report),
        "alerts": alerts(report),
        "picture": picture,
        "axis": trusted(labels),
        "rules": trusted(rules),
        "draw": lambda lane: trusted(lane_svg(lane)),
        "rows": app_rows(shown, report.until),
        "rows_left_out": _rest(len(report.apps) - len(shown), "app"),
        "fairness_words": fairness_words(report),
        "figures": [_figure(figure) for figure in drawn[: room.figures]],
        "figures_left_out": _rest(len(drawn) - room.figures, "app"),
        "money_rows": money_rows(report),
        "money_notes": money_notes(report),
        "team_rows": team_rows(report),
        "service": aggregation_rows(report.aggregation, room.apps),
        "decision_rows": rows,
        "decisions_left_out": rows_left_out,
        "changes": changes,
        "changes_left_out": changes_left_out,
        "latency": report.latency,
        "loops": _loops(report),
        "short": short,
    }
    module = environment().get_template("cluster_parts.html.j2").make_module(values)
    return {name: Markup(getattr(module, name)()) for name in PARTS}  # noqa: S704 - escaped by the template


def page_policy() -> str:
    """Return the Content-Security-Policy that a live page is served with."""
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_script()[1]}'; connect-src 'self';"
        " frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )


def digest(part: str) -> str:
    """Return what tells one state of a part from another."""
    return hashlib.sha256(part.encode()).hexdigest()[:12]


def _page(report: ClusterReport, parts: Mapping[str, Markup], live: bool) -> str:
    script, script_hash = _script()
    return (
        environment()
        .get_template("cluster.html.j2")
        .render(
            name=label_text(report.cluster, NAME),
            rendered=parts,
            digests={name: digest(part) for name, part in parts.items()},
            definitions=trusted(definitions()),
            picture_style=trusted(STYLE),
            kinds=get_args(DecisionKind),
            script=script,
            script_hash=script_hash,
            live=live,
            signs=_SIGNS,
        )
    )


@cache
def _script() -> tuple[Markup, str]:
    """Return the page's script and what its policy knows it by: no other script runs."""
    text = (Path(__file__).parents[1] / "templates" / "cluster.js").read_text(encoding="utf-8")
    known = b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return trusted(text), f"sha256-{known}"


def _figure(figure: dict[str, Any]) -> dict[str, Any]:
    lines = [{**line, "svg": trusted(line["svg"])} for line in figure["lines"]]
    return {**figure, "lines": lines}


def _rest(count: int, noun: str) -> list[str]:
    return [plural(count, noun)] if count > 0 else []


def _loops(report: ClusterReport) -> str:
    if not report.loops:
        return ""
    said = [
        f"{label_text(x.holder, 60)} since {clock_text(x.at)} (token {x.token})" for x in report.loops[-5:]
    ]
    more = f" and {len(report.loops) - 5} before" if len(report.loops) > 5 else ""
    return f"Led by {'; '.join(said)}{more}."
