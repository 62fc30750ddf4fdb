"""The loop's own row among the reports of the ledger: what it is doing, and how to ask it to stop.

Reports that this version of Ebbflow cannot read: they are left out, and named among the problems.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ebbflow.infra.ledger import UnreadableReport
from ebbflow.planners.model.ledger import AppReport
from ebbflow.tasks.drawing.wording import shorten

LOOP = "_loop"
"""Under this id a loop reports what it is doing. Apps' ids begin with a letter or digit."""
STOP = "_stop"
"""Under this id somebody asks the loop with a token to stop."""
RESERVED = frozenset({LOOP, STOP})


@dataclass(frozen=True, slots=True)
class LoopStatusRecord:
    """What a loop says of itself about every second. Plain values, for people and pages."""

    token: int
    holder: str
    policy: str
    started: float  # s since the Unix epoch
    phase: str = "running"  # or "stopped"
    cycles: int = 0
    capacity_age: float | None = None  # s; None: never seen
    fleet_age: float | None = None
    doing: int = 0  # things asked of fleet and nodes, not done
    queued: int = 0  # events that listeners have not heard
    dropped_events: int = 0
    clock_off: float = 0.0  # s by which the machine's clock has jumped since the start
    problems: tuple[str, ...] = ()
    metrics: Mapping[str, Any] = field(default_factory=dict)  # ``LoopMetrics.to_dict``
    grace: float | None = (
        None  # s beyond a lease's end that a silent app may keep its GPU; None: it did not say
    )

    def report(self, at: float) -> AppReport:
        """Return it as the ledger keeps it."""
        row = {name: getattr(self, name) for name in self.__slots__}
        row["problems"] = list(self.problems)
        message = "; ".join(self.problems)
        phase = "running" if self.phase == "running" else "stopped"
        return AppReport(at, phase=phase, job=row, message=message)  # type: ignore[arg-type]

    @classmethod
    def of(cls, report: AppReport) -> "LoopStatusRecord":
        """Read it; what another version wrote beyond this one's fields is left out."""
        known = {name: report.job[name] for name in cls.__slots__ if name in report.job}
        if "figures" in report.job:  # its former key
            known.setdefault("metrics", report.job["figures"])
        known["problems"] = tuple(known.get("problems", ()))
        return cls(**known)


def stop_request(token: int, at: float) -> AppReport:
    """Return what asks the loop with ``token`` to stop; another loop takes no notice."""
    return AppReport(at, job={"token": token})


def asked_to_stop(reports: Mapping[str, AppReport], token: int) -> bool:
    """Tell whether the loop with ``token`` was asked to stop."""
    found = reports.get(STOP)
    return found is not None and found.job.get("token") == token


_NAMED = 3  # of which the reason is given too


_LONG = 300  # characters of one reason


def problems(unread: Mapping[str, UnreadableReport]) -> tuple[str, ...]:
    """Return a sentence for each report that cannot be read; of many only how many more there are."""
    named = sorted(unread.items())
    found = [f"the report of {app} is ignored: {shorten(one.why, _LONG)}" for app, one in named[:_NAMED]]
    if len(named) > _NAMED:
        found.append(f"the reports of {len(named) - _NAMED} more apps are ignored too")
    return tuple(found)
