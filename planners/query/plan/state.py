"""What is known of a running query: the input of progress propagation and re-planning."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage


@dataclass(frozen=True, slots=True)
class StageOutput:
    """A finished stage's checkpoint: actual sizes."""

    fingerprint: str
    rows: int
    bytes: int
    keys: Mapping[str, Sequence[Hashable]] = field(default_factory=dict, compare=False)  # samples, by column


@dataclass(frozen=True, slots=True)
class RunningStage:
    """A stage that runs now."""

    stage: Stage
    started: float  # seconds since the Unix epoch
    tasks_total: int  # as the engine reports; the estimate until it does
    tasks_done: int = 0
    task_seconds_left: float = 0.0  # expected seconds until the tasks now running end
    tasks_running: int | None = None  # as the engine reports; None: it does not, so as many as fit
    tasks_lost: int = 0  # of those done, whose output went with a node: they run again
    task_seconds_spent: float = 0.0  # for which the tasks now running have run, as far as is known
    seconds_seen: float = 0.0  # that its tasks, finished ones included, were seen running, all together


@dataclass(frozen=True, slots=True)
class ExecutionState:
    """Checkpoints of every stage ever run, stages running now, and partial progress by physical key."""

    plan: QueryExecutionPlan
    checkpoints: Mapping[str, StageOutput] = field(default_factory=dict)  # by output_fp
    running: Mapping[str, RunningStage] = field(default_factory=dict)  # by output_fp
    done_tasks: Mapping[str, int] = field(
        default_factory=dict
    )  # by physical_key, where single tasks are kept
    sliced: Mapping[str, float] = field(default_factory=dict)  # fraction of a stage in slices, by output_fp


@dataclass(frozen=True, slots=True)
class Estimate:
    """A candidate's expected remaining time on the present share."""

    plan_id: str
    seconds: float  # infinite when some task fits no node
    reused: int  # stages taken from checkpoints
    adopted: int  # running stages kept
    needed: int  # stages still to start


DecisionKind = Literal["start", "stay", "switch", "wait"]


@dataclass(frozen=True, slots=True)
class ReplanDecision:
    """A decision of the replanner with everything it was based on."""

    kind: DecisionKind
    revision: int
    at: float  # seconds since the Unix epoch
    current: str  # plan id before
    chosen: str  # plan id after
    reason: str
    trigger: str  # what caused the decision, for people: "left: worker-2"
    estimates: tuple[Estimate, ...] = ()
    seconds: float = 0.0  # planner time
