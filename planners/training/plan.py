"""What is decided of a training before it begins: its settings, its preflight run, and how failures are judged."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from ebbflow.planners import hazard as losses
from ebbflow.planners.model.trainings import PreflightChoice, RetryChoice, RunSettings, SyncRequest
from ebbflow.planners.training.failures import preflight as trials
from ebbflow.planners.training.failures.failures import FailureTable
from ebbflow.planners.training.failures.preflight import GateQuestion, PreflightPlan
from ebbflow.planners.training.failures.retries import BlindRetry, Retries, RetryPolicy

_MAX_DELAY = 1800.0  # s, between two attempts, unless the first delay is longer


@dataclass(frozen=True)
class TrainingPlan:
    """One training, as its supervisor is told of it."""

    settings: RunSettings  # of the run itself, without a preflight
    table: FailureTable  # classifies failures
    retries: Retries  # what follows from their class
    preflight: PreflightPlan | None = None  # the preflight run, if there is one
    why: str = ""  # there is one, or none
    sync: SyncRequest = "allreduce"  # where gradients meet; "auto": what the preflight run shows
    learns: bool = False  # whether the hazard follows what happens
    seed: int = 0  # of the jitter of delays

    @classmethod
    def of(
        cls,
        settings: RunSettings,
        table: FailureTable,
        *,
        placement: Mapping[str, int],
        max_gpus: int,
        hazard: float | None,
        preflight: PreflightChoice,
        preflight_steps: int,
        retry_policy: RetryChoice,
        retry_backoff: float,
        free: bool,
        resumes: bool,
        seed: int = 0,
        sync: SyncRequest = "allreduce",
        replica: int = 1,
    ) -> Self:
        """Return the plan of a training.

        Args:
            settings: what is requested of its processes; ``hazard`` takes the place of theirs.
            table: classifies failures.
            placement: node -> slots that are there.
            max_gpus: GPUs that the run uses at most.
            hazard: losses per node-hour; ``None``: learned from observed interruptions, beginning with the prior.
            preflight: whether a preflight run comes first; ``auto``: where it is worth its GPU time.
            preflight_steps: of the preflight run.
            retry_policy: ``by-class`` of failure, or three ``blind`` ones.
            retry_backoff: seconds before the first retry after a failure of the infrastructure.
            free: whether GPUs cost nothing that anyone else wants.
            resumes: whether the run resumes from a checkpoint.
            seed: of the jitter of delays.
            sync: where gradients meet; ``auto``: decided by what a preflight run measures, which then comes first.
            replica: GPUs that hold one replica of the model.

        Raises ``OptionError`` for a preflight run without steps.
        """
        if sync == "auto":
            settings = replace(settings, sync="allreduce", weighs_sync=True)
            preflight = "always" if preflight == "auto" else preflight
        trial, why = _preflight(
            preflight, preflight_steps, placement, max_gpus, replica, free=free, resumes=resumes
        )
        return cls(
            replace(settings, interruption_rate=losses.hazard(0, 0.0) if hazard is None else hazard),
            table,
            _retries(retry_policy, retry_backoff),
            trial,
            why,
            sync=sync,
            learns=hazard is None,
            seed=seed,
        )

    def hazard(self, lost: int, node_seconds: float) -> float:
        """Return the losses per node-hour to expect after ``lost`` nodes in ``node_seconds``; stated ones stay."""
        return losses.hazard(lost, node_seconds) if self.learns else self.settings.interruption_rate


def _preflight(
    choice: PreflightChoice,
    steps: int,
    placement: Mapping[str, int],
    max_gpus: int,
    replica: int,
    *,
    free: bool,
    resumes: bool,
) -> tuple[PreflightPlan | None, str]:
    """Return the preflight run before a run on ``placement``, if there is one, and why."""
    gpus = min(sum(placement.values()), max_gpus)
    if choice == "never" or not gpus:
        return None, ""
    wanted = trials.plan(gpus, min(len(placement), gpus), steps)
    if replica > 1:
        wanted = replace(wanted, ranks=replica)
    if choice == "always":
        return wanted, "requested"
    if gpus <= wanted.ranks:
        return None, "the run is no larger than a preflight run"
    gate = trials.should_gate(GateQuestion(gpus, wanted.ranks, resumes=resumes, free=free))
    return (wanted if gate.gate else None), gate.reason


def _retries(choice: RetryChoice, retry_backoff: float) -> Retries:
    if choice == "blind":
        return BlindRetry()
    return RetryPolicy(first_delay=retry_backoff, most_delay=max(_MAX_DELAY, retry_backoff))
