"""A cluster's report in words: what a reader wants to know first, and each decision with its reason."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ebbflow.planners.model.scheduling import UNFAIR
from ebbflow.tasks.drawing.wording import (
    clock_text,
    label_text,
    money_text,
    number_text,
    plural,
    seconds_text,
)
from ebbflow.tasks.report.cluster.spans import quiet
from ebbflow.tasks.report.cluster.values import AppRow, ClusterReport, DecisionRow, MoneyRow

When = Callable[[float], str]
"""Writes a moment, s since the Unix epoch."""
NAME = 80  # characters of a name in a table
_NAME = 60  # characters of a name in a sentence
_ALERTS = 12
_TEXT = 400  # characters of a reason
_VALUE = 160  # of an input
_FACTS, _TABLES, _ROWS, _COLUMNS = 24, 4, 12, 8


@dataclass(frozen=True, slots=True)
class Card:
    """One figure and what it is."""

    value: str
    label: str
    tone: str = ""


def verdict(report: ClusterReport) -> str:
    """Return what happened, in two to four sentences."""
    if not report.apps:
        return "No app has used the cluster in this time."
    states = [("finished", "finished"), ("running", "running"), ("waiting", "waiting"), ("stopped", "stopped"),
              ("failed", "failed"), ("lost", "lost")]  # fmt: skip
    counts = [(word, sum(app.phase == phase for app in report.apps)) for phase, word in states]
    plain_text = ", ".join(f"{count} {word}" for word, count in counts if count)
    sentences = [f"{plural(len(report.apps), 'app')}: {plain_text}."]
    gone = [change for change in report.changes if change.kind in ("reclaimed", "lost")]
    if gone:
        nodes, leases = (
            sum(len(change.nodes) for change in gone),
            sum(change.leases for change in report.changes if change.kind in ("notice", "lost")),
        )
        sentences.append(
            f"{plural(nodes, 'node')} {'was' if nodes == 1 else 'were'} taken away with {plural(leases, 'lease')}"
            f" on {'it' if nodes == 1 else 'them'}; apps continued elsewhere or with another number of GPUs"
            f" {plural(sum(app.restarts for app in report.apps), 'time')}."
        )
    due = [app for app in report.apps if app.deadline_state]
    if due:
        kept = sum(app.deadline_state in ("met", "on course") for app in due)
        missed = sum(app.deadline_state in ("missed", "late") for app in due)
        if missed:
            sentences.append(f"{missed} of {plural(len(due), 'deadline')} missed or about to be.")
        elif kept == len(due):
            sentences.append(f"All of {plural(len(due), 'deadline')} met or on course." if kept > 1
                             else "The one deadline is met or on course.")  # fmt: skip
    if report.fairness.worst is not None:
        worst, above = report.fairness.worst, report.fairness.above
        if above:
            sentences.append(f"{plural(above, 'app')} would have been sooner alone on a fair share.")
        else:
            sentences.append(
                f"No app was worse off than alone on its fair share (worst ρ {number_text(worst)})."
            )
    return " ".join(sentences)


def cards(report: ClusterReport) -> list[Card]:
    """Return the figures of the page's head."""
    found = []
    done = sum(app.phase == "finished" for app in report.apps)
    bad = sum(app.phase in ("failed", "lost") for app in report.apps)
    label = "apps finished" + (f", {bad} failed or lost" if bad else "")
    found.append(Card(f"{done} of {len(report.apps)}", label, "bad" if bad else ""))
    fair = report.fairness
    if fair.worst is not None:
        worst = report.app(fair.worst_app)
        who = label_text(worst.label, 24) if worst else ""
        tone = "bad" if fair.worst > UNFAIR else "good"
        found.append(Card(f"ρ {number_text(fair.worst)}", f"the worst, {who}; up to 1 is fair", tone))
    total = report.money.total
    if total.dollars or total.list_dollars:
        found.append(Card(money_text(total.dollars), against_list(total)))
    if total.idle is not None:
        label = "of GPU time leased"
        if report.money.idle_dollars >= 0.005:
            label += f"; the rest cost {money_text(report.money.idle_dollars)}"
        found.append(Card(percent(1 - total.idle), label))
    due = [app for app in report.apps if app.deadline_state]
    if due:
        kept = sum(app.deadline_state in ("met", "on course") for app in due)
        missed = any(app.deadline_state in ("missed", "late") for app in due)
        tone = "bad" if missed else "good" if kept == len(due) else ""
        found.append(Card(f"{kept} of {len(due)}", "deadlines met or on course", tone))
    gone = sum(len(c.nodes) for c in report.changes if c.kind in ("reclaimed", "lost"))
    noticed = sum(len(c.nodes) for c in report.changes if c.kind == "notice")
    found.append(
        Card(str(gone), f"{'node' if gone == 1 else 'nodes'} taken away, {plural(noticed, 'notice')}")
    )
    plain_text = next((row for row in report.latency if row.name.startswith("a change")), None)
    plain_text = plain_text or next((row for row in report.latency if row.name.startswith("auction")), None)
    if plain_text is not None:
        label = (
            "from a change to new leases"
            if plain_text.name.startswith("a change")
            else "to compute an auction"
        )
        found.append(Card(short(plain_text.p99), f"{label}, 99th percentile"))
    return found


def against_list(row: MoneyRow) -> str:
    """Return a cost against the same time on-demand, in words."""
    if row.list_dollars is None:
        return "spent; an on-demand price is not known"
    if row.saved is None or abs(row.saved) < 0.005:
        return f"spent; on-demand {money_text(row.list_dollars)}"
    word = "less" if row.saved > 0 else "more"
    return f"spent, {percent(abs(row.saved))} {word} than {money_text(row.list_dollars)} on-demand"


def alerts(report: ClusterReport) -> list[str]:
    """Return what needs attention: failures, losses, missed deadlines, overspent budgets."""
    found = []
    for app in report.apps:
        name = label_text(app.label, _NAME)
        if app.phase == "failed":
            found.append(f"{name} has failed{': ' if app.reason else ''}{label_text(app.reason, 200)}")
        if app.phase == "lost":
            found.append(
                f"{name} was marked lost and not resumed{': ' if app.reason else ''}{label_text(app.reason, 200)}"
            )
        if app.deadline_state == "missed":
            found.append(f"{name} missed its deadline{_by(app)}")
        if app.deadline_state == "late":
            found.append(f"{name} is going to miss its deadline{_by(app)}")
        if app.budget is not None and app.dollars > app.budget:
            found.append(f"{name} has cost {money_text(app.dollars)} of a budget of {money_text(app.budget)}")
    limits = {
        a.pipeline: a.pipeline_budget for a in report.apps if a.pipeline and a.pipeline_budget is not None
    }
    for pipeline, limit in limits.items():
        paid = sum(app.dollars for app in report.apps if app.pipeline == pipeline)
        if paid > limit:
            name = label_text(pipeline, _NAME)
            found.append(f"pipeline {name} has cost {money_text(paid)} of a budget of {money_text(limit)}")
    rest = len(found) - _ALERTS
    return found[:_ALERTS] + ([f"and {rest} more"] if rest > 0 else [])


def _by(app: AppRow) -> str:
    return f" by {seconds_text(-app.margin)}" if app.margin is not None and app.margin < 0 else ""


def percent(share: float) -> str:
    """Return a share as ``82 %``."""
    return f"{share:.0%}".replace("%", " %")


def short(seconds: float) -> str:
    """Return a short time: ``3.2 ms`` below a tenth of a second."""
    return f"{seconds * 1000:.1f} ms" if seconds < 0.1 else seconds_text(seconds)


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
    decisions: Sequence[DecisionRow],
    most: int,
    when: When = clock_text,
    names: Mapping[str, str] | None = None,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of the table of decisions, the newest first, and what was left out.

    ``names``: what people call each app.

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
    return [_decision(group, when, names or {}) for group in reversed(groups)], notes


def _decision(group: Sequence[DecisionRow], when: When, names: Mapping[str, str]) -> dict[str, Any]:
    row = group[-1]
    notes = []
    if row.seconds > 0:
        slowest = max(one.seconds for one in group)
        notes.append(f"took {'up to ' if len(group) > 1 else ''}{short(slowest)}")
    if row.revision:
        notes.append(f"for revision {row.revision} of the observed capacity")
    if len(group) > 1:
        notes.append(f"{len(group)} times since {clock_text(group[0].at)}; inputs are the last one's")
    return {
        "number": row.number,
        "at": when(row.at),
        "kind": row.kind,
        "app": label_text(row.app, NAME),
        "named": label_text(names.get(row.app, ""), NAME),
        "reason": label_text(row.reason, _TEXT),
        "became": row.became,
        "count": len(group),
        "quiet": quiet(row),
        "note": "; ".join(notes),
        "inputs": side(row.inputs, names),
        "outcome": side(row.outcome, names),
    }


def side(values: Mapping[str, Any], names: Mapping[str, str] | None = None) -> Side:
    """Return plain values as a list of facts, and what has the same keys for several things as tables."""
    facts: list[tuple[str, str]] = []
    tables: list[Grid] = []
    more = 0
    for key, value in values.items():
        rows = _table_of(value)
        if rows is not None:
            if len(tables) < _TABLES:
                grid, rest = _grid(str(key), [((names or {}).get(label, label), row) for label, row in rows])
                tables.append(grid)
                more += rest
            else:
                more += len(rows)
        elif len(facts) < _FACTS:
            facts.append((label_text(str(key).replace("_", " "), 60), plain_text(value)))
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
        {"name": label_text(label, 60), "cells": [plain_text(row[c]) if c in row else "" for c in columns]}
        for label, row in rows[:_ROWS]
    )
    rest = sum(len(row) for _, row in rows[_ROWS:])
    rest += sum(sum(str(key) not in columns for key in row) for _, row in rows[:_ROWS])
    return Grid(
        label_text(name.replace("_", " "), 60),
        tuple(label_text(c.replace("_", " "), 40) for c in columns),
        shown,
    ), rest


def plain_text(value: Any) -> str:
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
            label_text(", ".join(f"{k} {plain_text(v)}" for k, v in list(value.items())[:_FACTS]), _VALUE)
            or "none"
        )
    if isinstance(value, list | tuple):
        return label_text(", ".join(plain_text(v) for v in value[:_FACTS]), _VALUE) or "none"
    return label_text(str(value), _VALUE)
