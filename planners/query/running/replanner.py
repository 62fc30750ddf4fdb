"""Which plan finishes first on the present share, given what is done: the decision of QOOP (5.6, 5.7)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Share
from ebbflow.planners.query.plan.qep import QueryExecutionPlan
from ebbflow.planners.query.plan.state import (
    DecisionKind,
    Estimate,
    ExecutionState,
    ReplanDecision,
    RunningStage,
)
from ebbflow.planners.query.running.packing import Schedule, simulate
from ebbflow.planners.query.running.progress import Remaining, propagate, redone

_NOTABLE = 0.05  # seconds on the links that a reason mentions


@dataclass(frozen=True, slots=True)
class Risk:
    """What is feared of a switch.

    ``error``: how many times longer than expected something may take (q-error, at least 1). What is discarded is
    known to be done, and whatever is to replace it is only expected: it must be better by as much as may be missing.
    ``cancelling``: seconds until cancelled tasks have left their cores; what has no tasks yet holds none.
    ``margin``: seconds that a switch must save at least, whatever it discards: those by which times that short are
    not known.
    """

    error: float = 1.0
    cancelling: float = 0.0
    margin: float = 0.0

    def seconds(self, discarded: Sequence[RunningStage], cores: float) -> float:
        """Return the seconds that count against a plan for which ``discarded`` are given up: (error - 1) times those
        in which ``cores`` would do their work again, and until their tasks have ended.

        >>> Risk(2.0, 1.0).seconds([], 4)
        0.0
        """
        begun = any(map(_has_tasks, discarded))
        return (self.error - 1.0) * redone(discarded, cores) + (self.cancelling if begun else 0.0)


def _has_tasks(running: RunningStage) -> bool:
    """Tell whether tasks of a stage have begun, as the engine says, or as time does where it does not."""
    if running.tasks_running is None:
        return running.tasks_done > 0 or running.task_seconds_spent > 0.0
    return running.tasks_done + running.tasks_running > 0


EXACT = Risk()  # times as expected, as in a simulation


@dataclass(frozen=True, slots=True)
class Assessment:
    """A candidate's estimate with what it is based on."""

    estimate: Estimate
    remaining: Remaining
    schedule: Schedule
    risk: float = 0.0  # seconds that count against it for the running stages that it discards


def assess(
    plan: QueryExecutionPlan,
    state: ExecutionState,
    share: Share,
    now: float | None = None,
    max_parallel_stages: int = 0,
    risk: Risk = EXACT,
) -> Assessment:
    """Return when ``plan`` would finish on ``share``, counted from ``now``.

    The current plan keeps all running stages that it can use. For another plan, a running stage that
    computes the same output in another physical form is estimated both ways, adopted or aborted for the
    plan's own form, and the smaller time counts: always adopting would forbid leaving a badly shaped last
    join, since every plan's last join has the same output_fp (QOOP, 5.5). With k such stages, k + 1
    schedules are simulated. ``risk`` is that of discarding what the current plan has running.
    """
    remaining = propagate(plan, state, now)
    schedule = simulate(remaining, share, max_parallel_stages)
    current = plan.id == state.plan.id
    kept = frozenset[str]() if current else propagate(state.plan, state, now).adopted
    feared = risk.seconds(_discarded(remaining, state, kept), share.total.cores)
    tried: set[str] = set()
    while not current:
        untried = [fp for fp in remaining.foreign if fp not in tried]
        if not untried:
            break
        tried.add(untried[0])
        other = propagate(plan, state, now, remaining.refused | {untried[0]})
        alternative = simulate(other, share, max_parallel_stages)
        loss = risk.seconds(_discarded(other, state, kept), share.total.cores)
        if alternative.seconds + loss < schedule.seconds + feared:
            remaining, schedule, feared = other, alternative, loss
    estimate = Estimate(
        plan.id, schedule.seconds, len(remaining.inputs), len(remaining.adopted), len(remaining.needed)
    )
    return Assessment(estimate, remaining, schedule, feared)


def _discarded(remaining: Remaining, state: ExecutionState, kept: frozenset[str]) -> list[RunningStage]:
    """Return the running stages among ``kept`` that ``remaining`` does without; slices of them that it takes are not
    lost."""
    divided = {r.stage.output_fp for r in remaining.needed if r.stage.slicing is not None}
    taken = divided & state.sliced.keys()
    gone = [state.running[fp] for fp in sorted(kept - remaining.adopted)]
    return [
        replace(r, tasks_done=r.tasks_lost, seconds_seen=0.0) if r.stage.output_fp in taken else r
        for r in gone
    ]


def validate_options(
    hysteresis: float, switch_cost: float, min_share_delta: float, max_parallel_stages: int = 0
) -> None:
    """Raise ``OptionError`` for the first option that breaks its rule."""
    if not 0 <= hysteresis < 1:
        raise OptionError(f"hysteresis must be in [0, 1), a fraction of the remaining time; got {hysteresis}")
    if not 0 <= switch_cost < inf:
        raise OptionError(f"switch_cost must be >= 0 seconds and finite; got {switch_cost}")
    if not 0 <= min_share_delta < 1:
        raise OptionError(
            f"min_share_delta must be in [0, 1), a fraction of the share; got {min_share_delta}"
        )
    if max_parallel_stages < 0:
        raise OptionError(f"max_parallel_stages must be >= 0, 0 meaning no limit; got {max_parallel_stages}")


class Replanner:
    """Chooses among cached plans whenever the share changes.

    ``hysteresis``: least fraction of the remaining time that a switch must save (QOOP, fig. 2.15: 0.10 to
    0.25 do equally well). ``switch_cost``: seconds added to every plan but the current one.
    ``min_share_delta``: share changes below this fraction are not worth a decision.
    ``max_parallel_stages``: how many stages the engine runs at once, 0 for any number. ``risk`` is of switches that
    discard what runs; it may be set anew.
    """

    def __init__(
        self,
        candidates: Sequence[QueryExecutionPlan],
        hysteresis: float = 0.15,
        switch_cost: float = 0.0,
        min_share_delta: float = 0.05,
        max_parallel_stages: int = 0,
        risk: Risk = EXACT,
    ) -> None:
        validate_options(hysteresis, switch_cost, min_share_delta, max_parallel_stages)
        self.hysteresis = hysteresis
        self.switch_cost = switch_cost
        self.min_share_delta = min_share_delta
        self.max_parallel_stages = max_parallel_stages
        self.risk = risk
        self.candidates: tuple[QueryExecutionPlan, ...] = ()
        self.replace_candidates(candidates)

    def replace_candidates(self, candidates: Sequence[QueryExecutionPlan]) -> None:
        """Use these plans from now on, for instance the same ones with better cardinalities."""
        check_candidates(candidates)
        self.candidates = tuple(candidates)

    def assess(self, plan: QueryExecutionPlan, state: ExecutionState, share: Share, now: float) -> Assessment:
        """Return the assessment that ``decide`` uses for ``plan``."""
        return assess(plan, state, share, now, self.max_parallel_stages, self.risk)

    def significant(self, before: Share, after: Share) -> bool:
        """Tell whether the share changed by at least ``min_share_delta`` in any dimension."""
        return share_change(before, after) >= self.min_share_delta

    def decide(self, state: ExecutionState, share: Share, now: float, trigger: str) -> ReplanDecision:
        """Decide whether to stay with ``state.plan``, switch to a better plan, or wait for capacity (QOOP,
        5.7).

        A plan is better if it finishes more than the hysteresis threshold sooner, switch cost and risk included, and
        by more than the risk's margin. The threshold is a fraction of the current plan's time without what absent
        cores make it longer.
        Ties go to the current plan, then to less total work, then to the smaller id. "wait" means that no
        plan fits the share. ``now`` is in seconds since the Unix epoch; ``trigger`` says for people what
        caused the question.
        """
        current = state.plan
        plans = [current, *(p for p in self.candidates if p.id != current.id)]
        assessed = [self.assess(plan, state, share, now) for plan in plans]
        costs = [
            a.estimate.seconds + (self.switch_cost + a.risk if plan is not current else 0.0)
            for plan, a in zip(plans, assessed, strict=True)
        ]

        def preference(i: int) -> tuple[float, bool, float, str]:
            # rounded, so that sums taken in another order still tie
            return round(costs[i], 9), i > 0, plans[i].total_work, plans[i].id

        best = min(range(len(plans)), key=preference)
        kind, reason = self._verdict(plans, assessed, costs, best, share)
        return ReplanDecision(
            kind=kind,
            revision=share.revision,
            at=now,
            current=current.id,
            chosen=plans[best].id if kind == "switch" else current.id,
            reason=f"{kind}: {reason}",
            trigger=trigger,
            estimates=tuple(a.estimate for a in assessed),
        )

    def _verdict(
        self,
        plans: Sequence[QueryExecutionPlan],
        assessed: Sequence[Assessment],
        costs: Sequence[float],
        best: int,
        share: Share,
    ) -> tuple[DecisionKind, str]:
        """Return what to do and why. Plan 0 is the current one."""
        present, wanted = costs[0], costs[best]
        name, rival = plans[0].id, plans[best].id
        if not isfinite(wanted):
            return "wait", why_nothing_fits(assessed[0], share)
        note = self._cost_note(assessed[best])
        gains = f"{_counted(assessed[best].estimate)}{note}{_links(assessed[best], assessed[0])}"
        if not isfinite(present):
            misfit = why_nothing_fits(assessed[0], share)
            return (
                "switch",
                f"{rival} would finish in {wanted:.1f} s, while {name} cannot continue ({misfit}); {gains}",
            )
        if len(plans) == 1:
            return "stay", f"{name} is the only plan and would finish in {present:.1f} s"
        if best == 0:
            i = min(range(1, len(plans)), key=lambda k: (costs[k], plans[k].total_work, plans[k].id))
            if not isfinite(costs[i]):
                return "stay", f"{name} would finish in {present:.1f} s, and no alternative fits the share"
            return "stay", (
                f"{name} would finish in {present:.1f} s, and the best alternative {plans[i].id} "
                f"in {costs[i]:.1f} s{self._cost_note(assessed[i])}"
            )
        idle = share.waited(present)  # the same for each plan, and nothing that is estimated wrongly with it
        saved = (present - wanted) / max(present - idle, 1e-9)
        shown = f"{_percent(saved, self.hysteresis)} sooner"
        if idle >= _NOTABLE:
            shown += f" but for {idle:.1f} s lost to executors that start"
        threshold = f"{100 * self.hysteresis:.3g} %"
        better = f"{rival} would finish in {wanted:.1f} s against {present:.1f} s"
        if saved <= self.hysteresis + 1e-12:
            side = "at" if saved >= self.hysteresis else "below"
            return "stay", f"best alternative {better}, {shown}, {side} the {threshold} threshold{note}"
        if present - wanted <= self.risk.margin:
            least = f"{self.risk.margin:.2f} s, which such short times may be off by"
            return "stay", f"best alternative {better}, {shown}, but not by more than {least}{note}"
        return "switch", f"{better} of {name}, {shown}, above the {threshold} threshold; {gains}"

    def _cost_note(self, assessed: Assessment) -> str:
        said = [(self.switch_cost, "switching"), (assessed.risk, "what it discards")]
        parts = [f"{seconds:.1f} s for {what}" for seconds, what in said if seconds]
        return f" ({' and '.join(parts)} included)" if parts else ""


def check_candidates(candidates: Sequence[QueryExecutionPlan]) -> None:
    """Raise ``OptionError`` unless there is at least one plan and ids are unique."""
    ids = [plan.id for plan in candidates]
    if not ids:
        raise OptionError("candidates must hold at least one plan; got none")
    double = sorted({i for i in ids if ids.count(i) > 1})
    if double:
        raise OptionError(f"candidates must have unique ids; got {', '.join(double)} more than once")


def share_change(before: Share, after: Share) -> float:
    """Return the largest relative change of any dimension of the total or of the largest node."""
    pairs = zip((*before.total, *before.largest), (*after.total, *after.largest), strict=True)
    return max((abs(b - a) / a if a else inf) if a != b else 0.0 for a, b in pairs)


def why_nothing_fits(assessment: Assessment, share: Share) -> str:
    """Say for people why the assessed plan cannot run on ``share``."""
    if share.nodes == 0 or share.total.cores <= 0:
        return "there is no usable node"
    plan = assessment.remaining.plan
    stages = {r.stage.output_fp: r.stage for r in assessment.remaining.stages}
    stage = stages[assessment.schedule.misfit]
    cores, memory = stage.demand.cores, stage.demand.memory
    return (
        f"a task of stage {stage.name} of {plan.id} needs {cores:g} cores and {memory:.2f} GiB; "
        f"the largest node has {share.largest.cores:g} and {share.largest.memory:.2f}, "
        f"the share {share.total.cores:g} and {share.total.memory:.2f}"
    )


def _percent(fraction: float, threshold: float) -> str:
    """Return a percentage with as many digits as it takes to tell it from the threshold."""
    for digits in range(4):
        text = f"{100 * fraction:.{digits}f}"
        if float(text) != round(100 * threshold, digits):
            return f"{text} %"
    return f"{100 * fraction:g} %"


def _links(chosen: Assessment, current: Assessment) -> str:
    """Say for how long two plans keep the links busy, where that differs."""
    one, other = (sum(r.stage.network for r in a.remaining.stages) for a in (chosen, current))
    if abs(one - other) < _NOTABLE:
        return ""
    return f", links busy for {one:.1f} s instead of {other:.1f} s"


def _counted(estimate: Estimate) -> str:
    def some(count: int, what: str) -> str:
        return f"{count} {what}{'' if count == 1 else 's'}"

    parts = [f"{some(estimate.reused, 'checkpoint')} reused", f"{some(estimate.needed, 'stage')} to run"]
    if estimate.adopted:
        parts.insert(1, f"{some(estimate.adopted, 'running stage')} kept")
    return ", ".join(parts)
