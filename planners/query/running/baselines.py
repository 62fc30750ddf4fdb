"""How the first plan is chosen, and the policies built on it (QOOP, 5.8)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Share
from ebbflow.planners.query.plan.qep import QueryExecutionPlan
from ebbflow.planners.query.plan.state import ExecutionState, ReplanDecision, StageOutput
from ebbflow.planners.query.running.replanner import Assessment, assess, check_candidates, why_nothing_fits


@dataclass(frozen=True, slots=True)
class Launch:
    """What is known when a query is about to begin."""

    candidates: tuple[QueryExecutionPlan, ...]
    share: Share
    assessments: tuple[Assessment, ...]  # of the candidates, in order


@dataclass(frozen=True, slots=True)
class Policy:
    """A way of choosing plans."""

    name: str
    summary: str  # for people
    choose: Callable[[Launch], tuple[QueryExecutionPlan, str]]  # the first plan, and why
    replans: bool = False  # whether the plan may change when the share does


def volcano(candidates: Sequence[QueryExecutionPlan], share: Share) -> QueryExecutionPlan:
    """Return the plan with the least estimated resource consumption: Σ n·τ·Σ_r D_r/R_r over its stages.

    ``share`` only gives the unit R of each dimension; consumption depends on data statistics alone. A
    dimension that the share does not offer is left out, and without cores the share counts as one core and
    1 GiB. Ties go to the plan with the fewest stages that read several stages (the most left-deep one),
    then to the id.
    """
    check_candidates(candidates)
    return min(candidates, key=lambda p: (round(consumption(p, share), 9), _bushy_stages(p), p.id))


def clarinet(
    candidates: Sequence[QueryExecutionPlan],
    share: Share,
    checkpoints: Mapping[str, StageOutput] | None = None,
    max_parallel_stages: int = 0,
) -> QueryExecutionPlan:
    """Return the plan that finishes first on the present share, given ``checkpoints`` from earlier runs.

    Ties go to less total work, then to the id; so does everything when no plan fits the share.
    """
    return _first_finisher(_launch(candidates, share, checkpoints, max_parallel_stages))[0]


def consumption(plan: QueryExecutionPlan, share: Share) -> float:
    """Return Σ n·τ·Σ_r D_r/R_r of ``plan``: seconds of the whole share (QOOP, 5.8)."""
    units = share.total if share.total.cores > 0 else (1.0, 1.0, 0.0, 0.0)
    return sum(
        stage.tasks * stage.duration * sum(d / r for d, r in zip(stage.demand, units, strict=True) if r > 0)
        for stage in plan.stages
    )


def initial(
    candidates: Sequence[QueryExecutionPlan],
    share: Share,
    policy: str,
    *,
    chosen: str | None = None,
    checkpoints: Mapping[str, StageOutput] | None = None,
    now: float = 0.0,
    trigger: str = "the query begins",
    max_parallel_stages: int = 0,
) -> ReplanDecision:
    """Return the decision with which ``policy`` starts: "start", or "wait" when the first plan fits no node.

    ``chosen`` is the id of the plan to start with whatever the policy says. Raises ``OptionError`` for an
    unknown policy or plan.
    """
    launch = _launch(candidates, share, checkpoints, max_parallel_stages)
    if chosen is None:
        plan, why = policy_named(policy).choose(launch)
    else:
        named = [p for p in candidates if p.id == chosen]
        if not named:
            raise OptionError(f"chosen must be one of the candidates; got {chosen!r}")
        plan, why = named[0], "the plan asked for"
    return start_decision(launch, plan, why, now, trigger)


def start_decision(
    launch: Launch, plan: QueryExecutionPlan, why: str, now: float, trigger: str
) -> ReplanDecision:
    """Return the decision to start with ``plan``, or to wait if it does not fit the share."""
    chosen = next(a for p, a in zip(launch.candidates, launch.assessments, strict=True) if p.id == plan.id)
    seconds = chosen.estimate.seconds
    if isfinite(seconds):
        reason = f"start: {plan.id} is {why}; it would finish in {seconds:.1f} s"
    else:
        reason = f"wait: {why_nothing_fits(chosen, launch.share)}"
    return ReplanDecision(
        kind="start" if isfinite(seconds) else "wait",
        revision=launch.share.revision,
        at=now,
        current=plan.id,
        chosen=plan.id,
        reason=reason,
        trigger=trigger,
        estimates=tuple(a.estimate for a in launch.assessments),
    )


def policy_named(name: str) -> Policy:
    """Return the policy called ``name``; raises ``OptionError``."""
    if name not in POLICIES:
        raise OptionError(f"policy must be one of {', '.join(POLICIES)}; got {name!r}")
    return POLICIES[name]


def _launch(
    candidates: Sequence[QueryExecutionPlan],
    share: Share,
    checkpoints: Mapping[str, StageOutput] | None,
    max_parallel_stages: int,
) -> Launch:
    check_candidates(candidates)
    assessments = tuple(
        assess(p, ExecutionState(p, checkpoints or {}), share, None, max_parallel_stages) for p in candidates
    )
    return Launch(tuple(candidates), share, assessments)


def _first_finisher(launch: Launch) -> tuple[QueryExecutionPlan, str]:
    pairs = zip(launch.candidates, launch.assessments, strict=True)
    plan = min(pairs, key=lambda x: (round(x[1].estimate.seconds, 9), x[0].total_work, x[0].id))[0]
    count = len(launch.candidates)
    return plan, f"the first of {count} to finish on the present share" if count > 1 else "the only plan"


def _least_consumer(launch: Launch) -> tuple[QueryExecutionPlan, str]:
    plan = volcano(launch.candidates, launch.share)
    used = consumption(plan, launch.share)
    which = f"the cheapest of {len(launch.candidates)}" if len(launch.candidates) > 1 else "the only plan"
    return plan, f"{which} ({used:.1f} s of the whole share)"


def _only(launch: Launch) -> tuple[QueryExecutionPlan, str]:
    return launch.candidates[0], "the query as one statement"


def _bushy_stages(plan: QueryExecutionPlan) -> int:
    return sum(len(stage.inputs) > 1 for stage in plan.stages)


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        p.name: p
        for p in (
            Policy(
                "qoop", "first to finish, re-planned at every share change", _first_finisher, replans=True
            ),
            Policy("clarinet", "first to finish on the share at the start, then fixed", _first_finisher),
            Policy("volcano", "least resource consumption whatever the share, fixed", _least_consumer),
            Policy("single", "the optimiser's first plan, fixed", _only),
        )
    }
)
