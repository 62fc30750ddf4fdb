"""The rows of a cluster's page: what each table and figure says, in words."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ebbflow.infra.sim.metrics import UNFAIR
from ebbflow.tasks.cluster_drawing import spark_svg
from ebbflow.tasks.cluster_values import AppRow, CapacityChange, ClusterReport, DecisionRow, MoneyRow, Sample
from ebbflow.tasks.cluster_words import percent, short
from ebbflow.tasks.wording import (
    clock_text,
    count_text,
    dated,
    label_text,
    money_text,
    number_text,
    plural,
    seconds_text,
)

When = Callable[[float], str]
NAME = 80  # characters of a name
_TEXT = 400  # of a reason
_VALUE = 160  # of an input
_FACTS, _TABLES, _ROWS, _COLUMNS = 24, 4, 12, 8


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
            f"{number_text(total.free_hours)} node-hours cost nothing: EC2 took those spot nodes back within"
            " their first hour."
        )
    if money.unpriced:
        notes.append(f"{plural(money.unpriced, 'node')} without a price counted as free.")
    if total.list_dollars is None:
        notes.append("On-demand prices are not known of all types: give them with --on-demand-prices.")
    if money.leased_dollars:
        notes.append(
            f"Leases: {money_text(money.leased_dollars)} at their nodes' prices; GPUs that nobody leased:"
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


# --- decisions ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grid:
    """Values of several things side by side."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]


@dataclass(frozen=True, slots=True)
class Side:
    """What went into a decision, or came out."""

    facts: tuple[tuple[str, str], ...] = ()
    tables: tuple[Grid, ...] = ()
    more: int = 0  # values left out

    @property
    def any(self) -> bool:
        return bool(self.facts or self.tables)


def decision_rows(
    decisions: Sequence[DecisionRow], most: int, when: When = clock_text
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of the table of decisions, the newest first, and what was left out.

    Equal decisions that follow each other are one row. Of more than ``most`` rows those without effect go first,
    then the oldest.
    """
    groups: list[list[DecisionRow]] = []
    for row in decisions:
        last = groups[-1][-1] if groups else None
        same = last is not None and (last.kind, last.app, last.reason, last.outcome, last.became) == (
            row.kind, row.app, row.reason, row.outcome, row.became,
        )  # fmt: skip
        if same:
            groups[-1].append(row)
        else:
            groups.append([row])
    notes = []
    if len(groups) > most:
        by_weight = sorted(groups, key=lambda g: (quiet(g[-1]), -g[-1].number))
        kept = {group[-1].number for group in by_weight[:most]}
        gone = [group for group in groups if group[-1].number not in kept]
        notes.append(
            f"{plural(sum(map(len, gone)), 'decision')}, first those without effect, then the oldest"
        )
        groups = [group for group in groups if group[-1].number in kept]
    return [_decision(group, when) for group in reversed(groups)], notes


def quiet(row: DecisionRow) -> bool:
    """Tell whether a decision left everything as it was, as far as its outcome tells."""
    if row.kind in ("guard", "recovery"):
        return False
    if row.kind == "replan":
        return row.outcome.get("kind", "switch") != "switch"
    if row.kind == "auction" and "placements" in row.outcome:  # those that changed
        return not row.outcome["placements"]
    return not any(row.outcome.values())


def _decision(group: Sequence[DecisionRow], when: When) -> dict[str, Any]:
    row = group[-1]
    notes = []
    if row.seconds > 0:
        slowest = max(one.seconds for one in group)
        notes.append(f"took {'up to ' if len(group) > 1 else ''}{short(slowest)}")
    if row.epoch:
        notes.append(f"for epoch {row.epoch} of the capacity")
    if len(group) > 1:
        notes.append(f"{len(group)} times since {clock_text(group[0].at)}; inputs are the last one's")
    return {
        "number": row.number,
        "at": when(row.at),
        "kind": row.kind,
        "app": label_text(row.app, NAME),
        "reason": label_text(row.reason, _TEXT),
        "became": row.became,
        "count": len(group),
        "quiet": quiet(row),
        "note": "; ".join(notes),
        "inputs": side(row.inputs),
        "outcome": side(row.outcome),
    }


def side(values: Mapping[str, Any]) -> Side:
    """Return plain values as a list of facts, and what has the same keys for several things as tables."""
    facts: list[tuple[str, str]] = []
    tables: list[Grid] = []
    more = 0
    for key, value in values.items():
        rows = _table_of(value)
        if rows is not None:
            if len(tables) < _TABLES:
                grid, rest = _grid(str(key), rows)
                tables.append(grid)
                more += rest
            else:
                more += len(rows)
        elif len(facts) < _FACTS:
            facts.append((label_text(str(key).replace("_", " "), 60), said(value)))
        else:
            more += 1
    return Side(tuple(facts), tuple(tables), more)


def _table_of(value: Any) -> list[tuple[str, Mapping[str, Any]]] | None:
    """Return (name, values) of each row where ``value`` is a table."""
    if isinstance(value, Mapping) and value and all(isinstance(v, Mapping) for v in value.values()):
        return [(str(key), row) for key, row in value.items()]
    if isinstance(value, list | tuple) and value and all(isinstance(v, Mapping) for v in value):
        return [(str(row.get("id", number)), {k: v for k, v in row.items() if k != "id"})
                for number, row in enumerate(value, 1)]  # fmt: skip
    return None


def _grid(name: str, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> tuple[Grid, int]:
    columns = list(dict.fromkeys(str(key) for _, row in rows[:_ROWS] for key in row))[:_COLUMNS]
    shown = tuple(
        {"name": label_text(label, 60), "cells": [said(row[c]) if c in row else "" for c in columns]}
        for label, row in rows[:_ROWS]
    )
    rest = sum(len(row) for _, row in rows[_ROWS:])
    rest += sum(sum(str(key) not in columns for key in row) for _, row in rows[:_ROWS])
    return Grid(
        label_text(name.replace("_", " "), 60),
        tuple(label_text(c.replace("_", " "), 40) for c in columns),
        shown,
    ), rest


def said(value: Any) -> str:
    """Return one plain value for people."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number_text(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**15 else number_text(float(min(max(value, -(10**300)), 10**300)))
    if isinstance(value, Mapping):
        return (
            label_text(", ".join(f"{k} {said(v)}" for k, v in list(value.items())[:_FACTS]), _VALUE) or "none"
        )
    if isinstance(value, list | tuple):
        return label_text(", ".join(said(v) for v in value[:_FACTS]), _VALUE) or "none"
    return label_text(str(value), _VALUE)


# --- capacity -----------------------------------------------------------------------------------------------------

_WORDS = {
    "came": "▲ came", "left": "▽ left", "reclaimed": "▼ taken back", "lost": "✗ lost", "notice": "! notice",
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
