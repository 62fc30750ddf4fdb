"""The rows of a cluster's page: what each table and figure says, in words."""

from collections.abc import Sequence
from typing import Any

from ebbflow.planners.model.scheduling import UNFAIR
from ebbflow.tasks.drawing.wording import (
    clock_text,
    count_text,
    dated,
    label_text,
    money_text,
    number_text,
    plural,
    seconds_text,
)
from ebbflow.tasks.report.cluster.drawing import spark_svg
from ebbflow.tasks.report.cluster.values import AppRow, CapacityChange, ClusterReport, MoneyRow, Sample
from ebbflow.tasks.report.cluster.words import NAME, When, percent

# --- apps -------------------------------------------------------------------------------------------------------


def app_rows(apps: Sequence[AppRow], until: float) -> list[dict[str, Any]]:
    """Return the rows of the table of apps."""
    return [
        {
            "app": app,
            "label": label_text(app.label, NAME),
            "team": label_text(app.team, NAME),
            "pipeline": label_text(app.pipeline, NAME),
            "progress": "" if app.progress is None or app.phase == "finished" else percent(app.progress),
            "reason": label_text(app.reason, 160),
            "rho": rho_text(app),
            "service": "–" if app.kind == "query" else seconds_text(app.service),
            "deadline": deadline_text(app, until),
            "cost": _cost(app),
            "budget": "" if app.budget is None else money_text(app.budget),
        }
        for app in apps
    ]


def rho_text(app: AppRow) -> str:
    """Return ρ, ``≥`` before one that is only bounded."""
    if app.rho.value is None:
        return "–"
    return f"{'≥ ' if app.rho.bound else ''}{number_text(app.rho.value)}"


def deadline_text(app: AppRow, until: float) -> str:
    """Return how an app stands to its deadline."""
    if app.deadline is None:
        return "–"
    margin = "" if app.margin is None else seconds_text(abs(app.margin))
    words = {
        "met": f"✓ met, {margin} early",
        "missed": f"✗ missed by {margin}",
        "on course": f"on course, {margin} to spare",
        "late": f"✗ expected {margin} late",
    }.get(app.deadline_state)
    return words or f"in {seconds_text(app.deadline - until)}"


def _cost(app: AppRow) -> str:
    return "–" if app.kind == "query" and not app.dollars else money_text(app.dollars)


# --- fairness ---------------------------------------------------------------------------------------------------


def fairness_words(report: ClusterReport) -> str:
    """Return what ρ is and how even it was."""
    rule = (
        "ρ is the time to the end here over the time alone on an equal share of the cluster: up to 1 is fair."
    )
    fair = report.fairness
    if fair.worst is None:
        return f"{rule} It is not known of any app yet."
    jain = f" Jain's index over {plural(fair.apps, 'app')}: {number_text(fair.jain or 0)} (1: all alike)."
    return f"{rule} The worst is {number_text(fair.worst)}.{jain if fair.apps > 1 else ''}"


def figures(report: ClusterReport, apps: Sequence[AppRow]) -> list[dict[str, Any]]:
    """Return one figure for each app that has something to show."""
    known = [app.rho.value for app in apps if app.rho.value is not None]
    when = dated(report.since, report.until)
    most = max([1.25, *(min(value, 4.0) for value in known)])
    found = []
    for app in apps:
        lines = [
            _line(app, app.goodput, "goodput", app.goodput_unit, report.until),
            _line(app, app.rhos, "ρ as the policy saw it", "", report.until),
        ]
        if app.kind == "query" and app.rho.value is None and not any(lines):
            continue
        value = app.rho.value
        found.append(
            {
                "number": app.number,
                "label": label_text(app.label, NAME),
                "rho": rho_text(app),
                "width": None if value is None else f"{min(value / most, 1.0) * 100:.1f}",
                "one": f"{100 / most:.1f}",
                "over": value is not None and value > UNFAIR,
                "how": app.rho.how,
                "time": f"{when(app.entered)} to {when(app.ended or report.until)}",
                "lines": [line for line in lines if line],
            }
        )
    return found


def _line(
    app: AppRow, samples: Sequence[Sample], name: str, unit: str, until: float
) -> dict[str, str] | None:
    """Return a line over the app's own time, and what it shows."""
    if not samples:
        return None
    values = [sample.value for sample in samples]
    figure = count_text if max(values) >= 10_000 else number_text
    words = f"{name} {figure(values[0])}"
    if len(values) > 1:
        words += f" → {figure(values[-1])}"
    words += f" {unit}" if unit else ""
    if len(values) > 2:
        words += f", {figure(min(values))} to {figure(max(values))} in between"
    return {
        "words": words,
        "svg": spark_svg(samples, min(app.entered, samples[0].at), app.ended or until, words),
    }


# --- money --------------------------------------------------------------------------------------------------------


def money_rows(report: ClusterReport) -> list[dict[str, Any]]:
    """Return the rows of the table of costs, the total last."""
    rows = report.money.rows
    named = [(f"{row.instance_type}, {row.market}", row, False) for row in rows]
    if len(rows) > 1:
        named.append(("all", report.money.total, True))
    return [_money_row(label_text(kind, NAME), row, total) for kind, row, total in named]


def _money_row(kind: str, row: MoneyRow, total: bool) -> dict[str, Any]:
    return {
        "kind": kind,
        "total": total,
        "nodes": row.nodes,
        "hours": number_text(row.node_hours),
        "dollars": money_text(row.dollars),
        "listed": money_text(row.list_dollars),
        "saved": "–" if row.saved is None else percent(row.saved),
        "gpu_hours": number_text(row.gpu_hours) if row.gpu_hours else "–",
        "idle": "–" if row.idle is None else percent(row.idle),
    }


def money_notes(report: ClusterReport) -> list[str]:
    """Return what is to be known of the costs."""
    money, total = report.money, report.money.total
    notes = ["Compute only, at the prices that the loop saw: volumes, addresses and traffic are not counted."]
    if total.free_hours > 0:
        notes.append(
            f"{number_text(total.free_hours)} node-hours cost nothing: Spot nodes that are interrupted within"
            " their first hour are free, as EC2 bills."
        )
    if money.unpriced:
        notes.append(f"{plural(money.unpriced, 'node')} without a price counted as free.")
    if total.list_dollars is None:
        notes.append("On-demand prices are not known of all types: give them with --on-demand-prices.")
    if money.leased_dollars:
        notes.append(
            f"Leases: {money_text(money.leased_dollars)} at their nodes' prices; GPUs without a lease:"
            f" {money_text(money.idle_dollars)}."
        )
    if report.pipeline:
        notes.append(
            "Nodes are those of the whole cluster in the pipeline's time; leases and teams are its own."
        )
    return notes


def team_rows(report: ClusterReport) -> list[dict[str, Any]]:
    """Return the rows of the table of teams; empty where there is only one without a name."""
    teams = report.money.teams
    if [team.team for team in teams] in ([], [""]):
        return []
    return [
        {
            "team": label_text(team.team, NAME) or "none",
            "apps": team.apps,
            "hours": number_text(team.gpu_hours),
            "dollars": money_text(team.dollars),
        }
        for team in teams
    ]


# --- capacity -----------------------------------------------------------------------------------------------------

_WORDS = {
    "came": "▲ came", "left": "▽ left", "reclaimed": "▼ interrupted", "lost": "✗ lost", "notice": "! notice",
    "advice": "? advice",
}  # fmt: skip


def change_rows(
    changes: Sequence[CapacityChange], most: int, when: When = clock_text
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of the table of capacity changes, the newest first, and what was left out."""
    notes = []
    if len(changes) > most:
        notes.append(f"the {plural(len(changes) - most, 'oldest change', 'oldest changes')}")
    return [_change(change, when) for change in reversed(changes[-most:])], notes


def _change(change: CapacityChange, when: When) -> dict[str, Any]:
    rest = len(change.nodes) - 8
    names = ", ".join(label_text(node, 48) for node in change.nodes[:8]) + (
        f" and {rest} more" if rest > 0 else ""
    )
    more = []
    if change.leases:
        more.append(f"{plural(change.leases, 'lease')} on {'it' if len(change.nodes) == 1 else 'them'}")
    if change.deadline is not None:
        more.append(
            f"deadline {clock_text(change.deadline)}, {seconds_text(change.deadline - change.at)} later"
        )
    told = change.reason.startswith(("arrived", "left:", "notice:"))  # that the nodes are listed already
    if change.reason and not told and change.kind in ("left", "reclaimed", "lost"):
        more.append(label_text(change.reason, 160))
    return {
        "at": when(change.at),
        "kind": {"lost": "failed", "reclaimed": "failed", "came": "finished"}.get(change.kind, "waiting"),
        "words": _WORDS[change.kind],
        "nodes": names,
        "more": "; ".join(more),
    }
