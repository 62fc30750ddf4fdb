"""Results as they come: one JSON object a line, appended as soon as it is known."""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ebbflow.planners.errors import OptionError
from tests.benchmarks.sql.cases import Query, Run
from tests.benchmarks.sql.metrics import Metrics

FILE = "runs.jsonl"


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """Something that was done to the cluster during a run."""

    at: float  # seconds after the query was handed over
    what: str  # notice, kill, add (asked for), up (registered)
    node: str
    workers: int  # up, not under notice, from then on


@dataclass(frozen=True)
class Record:
    """One finished run."""

    suite: str
    query: int
    schedule: str
    pair: int
    system: str
    order: int  # place in its round, from 0
    ok: bool
    wall: float  # seconds until the result was complete, or until the run failed
    right: bool | None = None  # None: DuckDB could not run the query, or the run failed
    error: str = ""
    span: float = 0.0  # seconds that the schedule was scaled by
    hazard: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # ``Metrics``
    happenings: tuple[ClusterEvent, ...] = ()
    statements: int = 1  # that were handed to Spark
    switches: int = 0  # of plan
    started: float = 0.0  # seconds since the Unix epoch
    load: float = 0.0  # load average of the machine at the end
    note: str = ""

    @classmethod
    def of(cls, run: Run, metrics: Metrics | None, **others: Any) -> "Record":
        """Return the record of ``run``."""
        figures = {k: round(v, 4) for k, v in asdict(metrics).items()} if metrics else {}
        query = run.query
        return cls(query.suite, query.number, run.schedule, run.pair, run.system, metrics=figures, **others)

    @property
    def key(self) -> str:
        """Return what tells runs apart, as ``Run.key``."""
        return f"{self.suite}-q{self.query}/{self.schedule}/{self.pair}/{self.system}"

    @property
    def case(self) -> tuple[str, int, str]:
        return (self.suite, self.query, self.schedule)

    @property
    def seconds(self) -> float:
        """Return the completion time; infinite for a run that did not complete, or not rightly."""
        return self.wall if self.ok and self.right is not False else math.inf


# of a setup: runs of which one of these differs cannot be compared
_COMPARED = ("tables", "workers", "cpus", "memory", "conf", "stages", "class_archive", "seed", "scaled_by")


class Journal:
    """The file of records in a folder. A line that was torn by a crash is passed over."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE
        self.setup: dict[str, Any] = {}
        self.spans: dict[str, float] = {}
        self.records: dict[str, Record] = {}  # by key, the latest of each
        self.baselines: dict[str, list[Record]] = {}  # undisturbed runs of plain Spark, by query
        for line in self._lines():
            self._take(line)

    def add(self, record: Record) -> None:
        self._append({"kind": "run", **asdict(record)})

    def add_baseline(self, record: Record) -> None:
        self._append({"kind": "baseline", **asdict(record)})

    def add_span(self, query: Query, span: float) -> None:
        """Fix by what a query's schedules are scaled, for all later runs."""
        self._append({"kind": "span", "query": query.name, "seconds": round(span, 3)})

    def add_setup(self, setup: dict[str, Any]) -> None:
        """Note under what conditions the runs from here on are made.

        Raises ``OptionError`` when earlier ones were made on other data or another cluster.
        """
        for key in _COMPARED:
            if self.setup and self.setup.get(key) != setup.get(key):
                raise OptionError(
                    f"{self.path} has runs with {key} {self.setup.get(key)!r}, now it is {setup.get(key)!r}: "
                    "they cannot be compared; name another folder with --out"
                )
        self._append({"kind": "setup", **setup})

    def done(self, runs: tuple[Run, ...]) -> bool:
        """Tell whether a whole round is there; half a round is run again, so that its runs stay together."""
        return all(run.key in self.records for run in runs)

    def _append(self, line: dict[str, Any]) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                if file.tell() and not _ends_whole(self.path):
                    file.write("\n")
                file.write(json.dumps(line, allow_nan=False) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise OptionError(f"cannot write {self.path}: {error.strerror or error}") from error
        self._take(json.loads(json.dumps(line)))

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"cannot read {self.path}: {error}") from error
        for line in text.splitlines():
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                yield found

    def _take(self, line: dict[str, Any]) -> None:
        kind = line.pop("kind", "")
        if kind == "setup":
            self.setup = line
        elif kind == "span":
            self.spans[line["query"]] = float(line["seconds"])
        elif kind in ("run", "baseline"):
            happenings = tuple(ClusterEvent(**h) for h in line.pop("happenings"))
            record = Record(**line, happenings=happenings)
            if kind == "run":
                self.records[record.key] = record
            else:
                self.baselines.setdefault(f"{record.suite}-q{record.query}", []).append(record)


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
