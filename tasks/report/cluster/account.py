"""What one app did within a report's time: its phases, its leases and their money, how fast and how fairly it ran."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from ebbflow.planners.model.ledger import AppReport
from ebbflow.tasks.report.cluster.decisions import changed
from ebbflow.tasks.report.cluster.fairness import ActiveApps, rho
from ebbflow.tasks.report.cluster.history import History, goodput_of
from ebbflow.tasks.report.cluster.spans import AppHistory
from ebbflow.tasks.report.cluster.values import (
    AppRow,
    DeadlineState,
    LeaseReport,
    PhaseSpan,
    RhoReport,
    Sample,
)


@dataclass(frozen=True)
class Period:
    """The part of a history that a report covers, from ``begin`` to ``end`` (s since the Unix epoch).

    ``live``: what apps say now holds at its end; otherwise it is not what they said then.
    """

    history: History
    begin: float
    end: float
    live: bool

    def has(self, at: float) -> bool:
        return self.begin <= at <= self.end

    @cached_property
    def crowd(self) -> ActiveApps:
        """Return the GPUs and the apps that shared them, until its end."""
        return ActiveApps(self.history, self.end)

    @cached_property
    def replans(self) -> Counter[str]:
        """Return how often each app's plan was changed."""
        return Counter(
            decided.app
            for event, decided in self.history.decisions
            if decided.kind == "replan" and self.has(event.at) and changed(decided)
        )


@dataclass(frozen=True)
class AppAccount:
    """One app in a period.

    Args:
        period: what is counted.
        app: its whole life.
        leases: its own, as far as they are in the period.
        said: what it said last; ``None``: nothing yet.
    """

    period: Period
    app: AppHistory
    leases: Sequence[LeaseReport]
    said: AppReport | None = None

    # --- phases ---------------------------------------------------------------------------------------------------

    @cached_property
    def last(self) -> PhaseSpan:
        """Return the phase that it was in at the period's end."""
        return self.app.phase(self.period.end)

    @cached_property
    def ended(self) -> float | None:
        return self.app.ended(self.period.end)

    @property
    def final(self) -> AppReport | None:
        """Return what it said last where that holds at the period's end."""
        return self.said if self.period.live or self.last.phase == "finished" else None

    @property
    def current(self) -> AppReport | None:
        """Return what it says of itself at the period's end while it is not over."""
        return self.final if self.ended is None else None

    @property
    def phases(self) -> tuple[PhaseSpan, ...]:
        """Return its phases within the period, the one that it began in first."""
        begin, end = self.period.begin, self.period.end
        before = [span for span in self.app.phases if span.at <= begin][-1:]
        found = [PhaseSpan(begin, span.phase, span.reason) for span in before]
        for span in self.app.phases:
            if begin < span.at <= end and (not found or found[-1].phase != span.phase):
                found.append(span)
        return tuple(found)

    @property
    def waited(self) -> float:
        """Return the seconds in which it wanted to run and held nothing."""
        begin, end = self.period.begin, self.period.end
        marks = sorted(
            {begin, end}
            | {span.at for span in self.app.phases if begin < span.at < end}
            | {at for at, _ in self.app.held if begin < at < end}
        )
        total, phase, held = 0.0, "", 0
        phases, holds = iter([*self.app.phases, None]), iter([*self.app.held, None])
        next_phase, next_held = next(phases), next(holds)
        for start, stop in pairwise(marks):
            while next_phase is not None and next_phase.at <= start:
                phase, next_phase = next_phase.phase, next(phases)
            while next_held is not None and next_held[0] <= start:
                held, next_held = next_held[1], next(holds)
            idle = phase == "waiting" or (phase == "running" and not held and self.app.spec.kind != "query")
            total += stop - start if idle else 0.0
        return total

    @property
    def restarts(self) -> int:
        """Return how often it continued with another placement than it had, or again after a pause."""
        count, before, paused = 0, (), False
        for at, placement in self.app.moves:
            if at > self.period.end:
                break
            if placement and before and (placement != before or paused):
                count += at >= self.period.begin
            paused = not placement
            before = placement or before
        return count

    # --- leases and money -----------------------------------------------------------------------------------------

    @property
    def held(self) -> int:
        """Return the GPUs that it holds at the period's end."""
        return sum(not lease.over for lease in self.leases)

    @property
    def first_wait(self) -> float | None:
        """Return the time from its registration to its first lease, s; ``None``: it had none by the period's end."""
        first = self.app.first_lease
        if first is None or first > self.period.end:
            return None
        return max(0.0, first - self.app.entered)

    @property
    def service(self) -> float:
        return sum((lease.seconds for lease in self.leases), 0.0)

    @property
    def dollars(self) -> float:
        return sum((lease.seconds / 3600 * lease.price for lease in self.leases), 0.0)

    # --- how fast, and how fairly ---------------------------------------------------------------------------------

    @property
    def seconds_left(self) -> float | None:
        return self.current.seconds_left if self.current is not None else None

    @property
    def progress(self) -> float | None:
        """Return the share of its work that is done, 0 to 1; ``None``: it has never said."""
        if self.last.phase == "finished":
            return 1.0
        return self.final.progress if self.final is not None else None

    @property
    def goodput(self) -> tuple[Sample, ...]:
        """Return the goodput that was known of it, and what it says now, in examples per second."""
        found = [sample for sample in self.app.goodput if self.period.has(sample.at)]
        now = self.current
        if now is not None and (value := goodput_of(now)) is not None and self.period.has(now.at):
            found += [Sample(now.at, value)] if not found or found[-1].at < now.at else []
        return tuple(found)

    @property
    def rho(self) -> RhoReport:
        return rho(self.period.crowd, self.app, self.held, self.final)

    @property
    def deadline(self) -> tuple[DeadlineState, float | None]:
        """Return how it stands to its deadline, and the seconds between its end and it."""
        deadline, now, left = self.app.spec.deadline, self.period.end, self.seconds_left
        if deadline is None:
            return "", None
        if self.last.phase == "finished":
            return ("met" if self.last.at <= deadline else "missed"), deadline - self.last.at
        if now > deadline:
            return "missed", deadline - now
        if self.ended is not None or left is None:
            return "open", None
        return ("on course" if now + left <= deadline else "late"), deadline - now - left

    def row(self) -> AppRow:
        """Return the app as the report lists it."""
        app, spec, has, goodput = self.app, self.app.spec, self.period.has, self.goodput
        state, margin = self.deadline
        return AppRow(
            id=spec.id,
            number=app.number,
            kind=spec.kind,
            team=spec.team,
            title=spec.title,
            pipeline=spec.pipeline,
            phase=self.last.phase,
            reason=self.last.reason or (self.current.message if self.current is not None else ""),
            entered=app.entered,
            ended=self.ended,
            gpus=spec.gpus,
            held=self.held,
            first_wait=self.first_wait,
            waited=self.waited,
            service=self.service,
            leases=len(self.leases),
            restarts=self.restarts,
            returns=sum(map(has, app.returns)),
            saves=sum(map(has, app.saves)),
            dollars=self.dollars,
            rho=self.rho,
            weight=spec.weight,
            budget=spec.budget,
            pipeline_budget=spec.pipeline_budget,
            deadline=spec.deadline,
            deadline_state=state,
            margin=margin,
            progress=self.progress,
            step=self.final.step if self.final is not None else 0,
            seconds_left=self.seconds_left,
            checkpoint=app.checkpoint,
            replans=self.period.replans[spec.id],
            phases=self.phases,
            goodput=goodput,
            goodput_unit="examples/s" if goodput else "",
            rhos=tuple(sample for sample in app.rhos if has(sample.at)),
        )
