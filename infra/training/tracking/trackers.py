"""What a tracker does for one run, whichever it is."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

_ODD = re.compile(r"[^\w\-. :/]")
_LONG = 200  # characters


@dataclass(frozen=True, slots=True)
class Row:
    """Values of metrics at one step.

    Args:
        step: optimizer steps of the whole run.
        time: seconds since the Unix epoch.
        values: by metric.
    """

    step: int
    time: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run as a tracker is to show it.

    Args:
        run: its ID.
        name: for people.
        key: by which the tracker finds it again.
        known: the tracker's own ID of it, as far as it is recorded.
        place: the run's directory, a path or ``s3://`` address, for files of the tracker that stay with the run.
        parent: the search that it is a trial of; empty: of none.
    """

    run: str
    name: str
    key: str
    known: str = ""
    place: str = "."
    parent: str = ""


@dataclass(slots=True)
class Reached:
    """What a tracker has of a run.

    Args:
        steps: the highest step of each metric.
        rows: the highest step below or at which nothing can be added; -1: each metric counts by itself.
        whole: whether the tracker has all values up to ``rows``, as far as anyone can know.
    """

    steps: dict[str, int] = field(default_factory=dict)
    rows: int = -1
    whole: bool = False

    def missing(self, row: Row) -> dict[str, float]:
        """Return the values of a row that the tracker has not."""
        if self.whole and row.step <= self.rows:
            return {}
        return {key: value for key, value in row.values.items() if row.step > self.steps.get(key, -1)}

    def add(self, row: Row) -> None:
        """Take note that a row is there."""
        for key in row.values:
            self.steps[key] = max(self.steps.get(key, -1), row.step)


def common_name(text: str) -> str:
    """Return the name of a metric, param or tag as all trackers take it: letters, digits, ``_ - . :`` and blanks.

    Its parts between ``/`` are neither empty nor ``.`` or ``..``, and it does not begin with ``..``: MLflow takes
    names for paths.
    """
    parts = [part for part in _ODD.sub("_", text[:_LONG]).split("/") if part not in ("", ".", "..")]
    name = "/".join(parts) or "_"
    return f"_{name[1:]}" if name.startswith("..") else name


class Tracker(Protocol):
    """One run in one tracker. One thread calls it; everything may raise any error, after which ``open`` is called."""

    def open(self, run: TrackedRun) -> tuple[str, Reached]:
        """Create the run or continue it; return the tracker's ID of it and what it has."""
        ...

    def describe(self, params: Mapping[str, str], tags: Mapping[str, str]) -> None:
        """Say what the run was asked for (the first word counts) and what it is (the last word counts)."""
        ...

    def log(self, rows: Sequence[Row]) -> None:
        """Add rows, in order of their steps."""
        ...

    def close(self, state: str) -> None:
        """End the run as ``finished``, ``failed`` or ``stopped``; one that is stopped may be continued."""
        ...
