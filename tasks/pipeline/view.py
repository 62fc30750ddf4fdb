"""What happens in a pipeline's cluster right now: the report of its ledger, read on as it grows."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.pipeline.record import app_id
from ebbflow.tasks.report.cluster.history import History
from ebbflow.tasks.report.cluster.report import cluster_report
from ebbflow.tasks.report.cluster.spans import Shown
from ebbflow.tasks.report.cluster.values import ClusterReport

_PAGE = 1000  # events a read
EVERY = 1.0  # s between two looks
_SHARE = 4.0  # times its own cost between two looks: a large ledger is looked at less often


@dataclass
class ClusterView:
    """Reads a ledger on from where it was: once a second, or less often where that takes long. For one thread."""

    ledger: Ledger
    clock: Clock
    cluster: str
    pipeline: str  # the run whose apps are looked at
    listed: Mapping[str, float] = field(default_factory=dict)  # on-demand prices by instance type, $/h
    problem: str = ""  # why the last look failed
    _history: History | None = None
    _due: float = float("-inf")
    _last: ClusterReport | None = None

    def look(self, *, now: bool = False) -> ClusterReport | None:
        """Return the newest report; the one before while the ledger does not answer; ``None`` before the first.

        ``now``: look even if the last look was a moment ago.
        """
        at = self.clock.now()
        if not now and at < self._due:
            return self._last
        try:
            if self._history is None:
                # older events may have been pruned
                self._history = History(self.ledger.origin(), Shown(pipeline=self.pipeline))
            history = self._history
            while found := self.ledger.events(history.state.number, _PAGE):
                for event in found:
                    history.add(event)
                if len(found) < _PAGE:
                    break
            reports = self.ledger.reports(unread={})
            history.note(reports)
            self._last = self._shortened(
                cluster_report(
                    history,
                    reports,
                    cluster=self.cluster,
                    now=at,
                    pipeline=self.pipeline,
                    listed=self.listed,
                )
            )
            self.problem = ""
        except (LedgerError, OptionError) as error:
            self.problem = str(error)
        self._due = at + max(EVERY, _SHARE * (self.clock.now() - at))
        return self._last

    def _shortened(self, report: ClusterReport) -> ClusterReport:
        """Call the pipeline's own apps by their steps' names in what was decided: all begin with the run's id."""
        prefix = app_id(self.pipeline, "")
        decisions = tuple(
            replace(one, reason=one.reason.replace(prefix, "")) if prefix in one.reason else one
            for one in report.decisions
        )
        return replace(report, decisions=decisions)

    @property
    def history(self) -> History:
        """Return all that is known so far; its ``state`` is the cluster's."""
        return self._history or History()
