"""Decisions in words: each with its reason, what it was based on and what came of it.

Which decisions keep what went into them, for a page that follows a ledger for months.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ebbflow.planners.model.ledger import Decided
from ebbflow.tasks.drawing.wording import clock_text, label_text, number_text, plural
from ebbflow.tasks.report.cluster.values import DecisionRow
from ebbflow.tasks.report.cluster.words import NAME, When, short

_TEXT = 400  # characters of a reason
_VALUE = 160  # of an input
_FACTS, _TABLES, _ROWS, _COLUMNS = 24, 4, 12, 8


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


def quiet(row: DecisionRow | Decided) -> bool:
    """Tell whether a decision left everything as it was, as far as its outcome tells."""
    if row.kind in ("guard", "recovery"):
        return False
    if row.kind == "replan":
        return row.outcome.get("kind", "switch") != "switch"
    if row.kind == "auction" and "placements" in row.outcome:  # those that changed
        return not row.outcome["placements"]
    return not any(row.outcome.values())


def _decision(group: Sequence[DecisionRow], when: When, names: Mapping[str, str]) -> dict[str, Any]:
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


_SMALL = ("pool", "current")  # that others than the page look up


Taken = Callable[[int], None]


class KeptInputs:
    """Says when a decision's inputs will not be shown any more.

    A page shows ``most`` rows of decisions at most: the newest that changed something, then the newest of the others;
    equal ones that follow each other are one row, with the last one's inputs (``cluster_explained.decision_rows``).

    Args:
        most: rows.
        strip: called with the place of each decision whose inputs can go.
    """

    def __init__(self, most: int, strip: Taken) -> None:
        self._most, self._strip = most, strip
        self._rows: tuple[deque[deque[int]], deque[deque[int]]] = (deque(), deque())
        self._last: Decided | None = None

    def add(self, place: int, decided: Decided) -> None:
        """Take the next decision that the page may show."""
        rows = self._rows[quiet(decided)]
        before, self._last = self._last, without_inputs(decided)
        if before is not None and _same(before, decided):
            row = rows[-1]
            row.append(place)
            # what followed of a scaling target, which nobody knows yet, can make rows of its own of them
            if len(row) > (self._most if decided.kind == "scaling" else 1):
                self._strip(row.popleft())
            return
        rows.append(deque([place]))
        if len(rows) > self._most:
            for gone in rows.popleft():
                self._strip(gone)


def without_inputs(decided: Decided) -> Decided:
    """Return a decision without its inputs, but for those that are looked up by name."""
    return replace(decided, inputs={name: decided.inputs[name] for name in _SMALL if name in decided.inputs})


def _same(a: Decided, b: Decided) -> bool:
    return (a.kind, a.app, a.reason, a.outcome) == (b.kind, b.app, b.reason, b.outcome)
