"""A cluster's report that follows its ledger while somebody looks at it."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Protocol

from ebbflow.infra.clock import Clock
from ebbflow.infra.ledger import UnreadableReport
from ebbflow.infra.machine.page_server import PageResponse
from ebbflow.planners.errors import EbbflowError
from ebbflow.planners.model.ledger import AppReport, Event
from ebbflow.planners.model.ledger_state import State
from ebbflow.tasks.apps.aggregators import AggregationReport
from ebbflow.tasks.drawing.wording import clock_text, printable
from ebbflow.tasks.report.cluster.history import History
from ebbflow.tasks.report.cluster.page import cluster_html, cluster_parts, digest, page_policy
from ebbflow.tasks.report.cluster.report import ClusterReport, cluster_report
from ebbflow.tasks.report.cluster.spans import Shown

_BATCH = 5000  # events of one read
_LEAST = 1.0  # s between looks at the ledger
_SHARE = 4.0  # times its own cost that is waited after a look: a large ledger is looked at less often


class Lead(Protocol):
    """What is read of a leader's lease."""

    def alive(self, now: float) -> bool: ...


class Source(Protocol):
    """What is read of a ledger."""

    def events(self, after: int = 0, limit: int = 1000) -> Sequence[Event]: ...
    def reports(self, *, unread: dict[str, UnreadableReport] | None = None) -> Mapping[str, AppReport]: ...
    def origin(self) -> State: ...
    def leader(self) -> Lead | None: ...


class ClusterFollower:
    """Reads a ledger's news and tells what they add up to. Safe for several threads.

    ``aggregation`` tells of the cluster's shared aggregators; it is asked at each look.
    """

    def __init__(
        self,
        source: Source,
        clock: Clock,
        *,
        cluster: str = "local",
        since: float | None = None,
        until: float | None = None,
        pipeline: str = "",
        listed: Mapping[str, float] | None = None,
        aggregation: Callable[[], AggregationReport | None] = lambda: None,
    ) -> None:
        self._aggregation = aggregation
        self._source, self._clock = source, clock
        self._cluster, self._since, self._until = cluster, since, until
        self._pipeline, self._listed = pipeline, listed
        self._lock = threading.Lock()
        self._history: History | None = None
        self._report: ClusterReport | None = None
        self._parts: dict[str, str] = {}
        self._problem = ""
        self._due = 0.0
        self._seen = 0.0

    def look(self) -> ClusterReport:
        """Read what is new and return the report. Raises ``InfraError`` when the ledger does not answer."""
        if self._history is None:
            since = -inf if self._since is None else self._since
            until = inf if self._until is None else self._until
            self._history = History(self._source.origin(), Shown(since, until, self._pipeline))
        while batch := self._source.events(self._history.state.number, _BATCH):
            for event in batch:
                self._history.add(event)
        reports = self._source.reports(unread={})
        self._history.note(reports)
        now = self._clock.now()
        lead = self._source.leader()
        # without a loop nothing happens that anybody knows of: time stands where the last word was
        said = max((report.at for report in reports.values() if report.at <= now), default=0.0)
        return cluster_report(
            self._history,
            reports,
            cluster=self._cluster,
            now=now if lead is not None and lead.alive(now) else said,
            since=self._since,
            until=self._until,
            pipeline=self._pipeline,
            listed=self._listed,
            aggregation=self._aggregation(),
        )

    def answer(self, path: str, query: Mapping[str, str]) -> PageResponse | None:
        """Answer a browser: the page, its parts that are not as ``query`` has them, or the report as JSON."""
        if path not in ("/", "/live.json", "/report.json"):
            return None
        with self._lock:
            self._refresh()
            report = self._report
            if report is None:
                return PageResponse(f"{self._problem}\n", "text/plain; charset=utf-8", 503)
            if path == "/":
                return PageResponse(cluster_html(report, live=True), policy=page_policy())
            if path == "/report.json":
                return PageResponse(report.to_json(), "application/json")
            parts = [
                (name, found, part)
                for name, part in self._parts.items()
                if query.get(name) != (found := digest(part))
            ]
            wait = max(2.0, self._due - self._clock.now())
            at = f"{clock_text(self._seen)} UTC"
            body = {"at": at, "problem": self._problem, "wait": min(wait, 60.0), "parts": parts}
            return PageResponse(json.dumps(body, ensure_ascii=True), "application/json")

    def _refresh(self) -> None:
        """Look again where the last look is long enough ago; what was seen before stays when that fails."""
        began = self._clock.now()
        if began < self._due:
            return
        try:
            self._report = self.look()
            self._parts = {name: str(part) for name, part in cluster_parts(self._report).items()}
            self._problem, self._seen = "", began
        except EbbflowError as error:
            since = (
                f" since {clock_text(self._seen)} UTC; this is what was there then" if self._report else ""
            )
            self._problem = f"The ledger cannot be read{since}: {printable(str(error))}"
        self._due = began + max(_LEAST, _SHARE * (self._clock.now() - began))
