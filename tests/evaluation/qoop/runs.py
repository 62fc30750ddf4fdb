"""What goes into a simulation of many queries, and what comes out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Resources, Share
from ebbflow.planners.query.plan.qep import QueryExecutionPlan


@dataclass(frozen=True, slots=True)
class Submission:
    """A query that arrives."""

    id: str
    plans: tuple[QueryExecutionPlan, ...]  # its candidates
    at: float  # seconds
    weight: float = 1.0

    @property
    def largest(self) -> Resources:
        """Return the largest demand of any task of any candidate, dimension by dimension."""
        demands = [stage.demand for plan in self.plans for stage in plan.stages]
        return Resources(*(max(column) for column in zip(*demands, strict=True)))

    def check(self, machines: Sequence[Resources]) -> None:
        """Raise ``OptionError`` if some task fits no machine, or an amount of work or time is impossible."""
        largest = self.largest
        if not any(largest.fits(machine) for machine in machines):
            raise OptionError(
                f"every task must fit a machine; {self.id} has tasks of up to {largest.cores:g} cores "
                f"and {largest.memory:.2f} GiB"
            )
        if not 0 <= self.at < inf:
            raise OptionError(f"the arrival of {self.id} must be >= 0 seconds and finite; got {self.at}")

    def at_least(self, share: Share) -> Share:
        """Return ``share``, or one of the query's largest tasks in the dimensions in which that is more."""
        total = Resources(
            *(max(s, d) if s > 0 else s for s, d in zip(share.total, self.largest, strict=True))
        )
        return replace(share, total=total)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a query."""

    id: str
    at: float  # arrival, seconds
    finish: float  # seconds
    plans: tuple[str, ...]  # ids of the plans it ran, in order
    aborted: float  # core-seconds of tasks that were stopped

    @property
    def seconds(self) -> float:
        """Return the completion time from arrival."""
        return self.finish - self.at

    @property
    def switches(self) -> int:
        return len(self.plans) - 1


@dataclass(frozen=True, slots=True)
class Run:
    """A whole simulation."""

    outcomes: tuple[Outcome, ...]  # in the order of submission
    jain: float  # mean of Jain's index of shares (``Fairness.jain``)
    honoured: float  # mean of Jain's index of usable entitlements (``Fairness.honoured``)
    jain_windows: int  # that the means are over
    used: float  # core-seconds that tasks held, aborted ones included
    active: float  # mean number of queries in the system, while there were any
    rounds: int  # of the scheduler
    tasks: int  # started
    decisions: int  # about plans, the first ones included
    planner_seconds: float  # deciding about plans, as ``timer`` tells
    scheduler_seconds: float  # deciding about tasks, as ``timer`` tells

    @property
    def makespan(self) -> float:
        """Return the seconds from the first arrival to the last completion."""
        return max(o.finish for o in self.outcomes) - min(o.at for o in self.outcomes)
