"""A short trial before a whole gang is launched: most errors of a program show on one GPU within minutes.

After the lessons of Jeon et al., ATC 2019, sections 4.2 and 5. Errors between ranks need two of them.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.failures.failures import Failure, FailureClass

STEPS = 20
LIMIT = 300.0  # s


@dataclass(frozen=True, slots=True)
class PreflightPlan:
    """What is tried: ``steps`` training steps, a checkpoint saved and restored again."""

    ranks: int
    nodes: int
    steps: int = STEPS
    limit: float = LIMIT  # s


def plan(gpus: int, nodes: int, steps: int = STEPS, limit: float = LIMIT) -> PreflightPlan:
    """Return the trial of a job that may use ``gpus`` GPUs on ``nodes`` nodes: one rank, or two on two nodes.

    Raises ``OptionError`` for a job without GPUs or nodes, and for a trial without steps or time.
    """
    if not 1 <= nodes <= gpus:
        raise OptionError(f"a job needs 1 <= nodes <= gpus; got {nodes}, {gpus}")
    if steps < 1 or not limit > 0:
        raise OptionError(f"a preflight needs steps >= 1 and limit > 0 s; got {steps}, {limit}")
    return PreflightPlan(1 if gpus == 1 else 2, min(nodes, 2), steps, limit)


@dataclass(frozen=True, slots=True)
class GateQuestion:
    """What is known of a job before it starts; the defaults are those of a new job of an unknown user."""

    gpus: int  # that the gang would hold
    ranks: int  # of the preflight
    early_failures: float = 0.1  # share of such jobs that fail within the limit
    attempts: float = 3.0  # that a failing job takes
    time_to_failure: float = 90.0  # s, mean of min(time to failure, limit)
    wait_cost: float = 0.0  # GPU-s that delaying a good job costs
    limit: float = LIMIT  # s
    free: bool = False  # the trial costs nothing that anyone else wants, such as a CPU in development
    resumes: bool = False  # from a checkpoint


class PreflightDecision(NamedTuple):
    """Whether to try first, and why."""

    gate: bool
    reason: str


def should_gate(job: GateQuestion) -> PreflightDecision:
    """Return whether a trial is worth its GPU time.

    It is if early failures × attempts × GPUs × time to failure > ranks × limit + cost of the wait, in GPU-s.
    Raises ``OptionError`` for a share outside [0, 1] and for negative figures.
    """
    if not 0 <= job.early_failures <= 1 or min(job.attempts, job.time_to_failure, job.wait_cost) < 0:
        raise OptionError(
            "early_failures must be in [0, 1], attempts, time_to_failure and wait_cost >= 0; got "
            f"{job.early_failures}, {job.attempts}, {job.time_to_failure}, {job.wait_cost}"
        )
    if job.resumes:
        return PreflightDecision(False, "it resumes from a checkpoint: it has run before")
    if job.free:
        return PreflightDecision(True, "it costs nothing here: no other app wants these slots")
    saved = job.early_failures * job.attempts * job.gpus * min(job.time_to_failure, job.limit)
    price = job.ranks * job.limit + job.wait_cost
    words = f"it would save {saved / 60:.1f} GPU-min on average and cost at most {price / 60:.1f}"
    return PreflightDecision(saved > price, words)


class PreflightVerdict(NamedTuple):
    """What becomes of the job."""

    outcome: Literal["pass", "fail", "repeat", "inconclusive"]
    admitted: bool
    reason: str


def verdict(failure: Failure | None, steps: int, timed_out: bool, repeated: bool = False) -> PreflightVerdict:
    """Return what a trial says.

    Args:
        failure: why it failed; ``None`` if nothing did.
        steps: training steps that it did.
        timed_out: whether it was ended at its limit.
        repeated: whether it was the second trial.
    """
    if failure is None and timed_out:
        if steps > 0:
            return PreflightVerdict("pass", True, f"slow, but {steps} steps were done")
        return PreflightVerdict("inconclusive", True, "no step within the limit")
    if failure is None:
        return PreflightVerdict("pass", True, f"{steps} steps, a checkpoint saved and restored")
    if failure.failure_class in (FailureClass.USER, FailureClass.DATA, FailureClass.RESOURCE):
        return PreflightVerdict("fail", False, str(failure))
    if not repeated:
        return PreflightVerdict("repeat", False, f"{failure}; repeated on other nodes")
    if failure.failure_class in (FailureClass.ENGINE, FailureClass.UNKNOWN):
        return PreflightVerdict("fail", False, f"{failure}; failed twice")
    return PreflightVerdict("inconclusive", True, f"{failure}; failed twice, but not by the program's fault")
