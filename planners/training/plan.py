"""What is decided of a training before it begins: its settings, its trial, and how failures are judged."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self

from ebbflow.planners import hazard as losses
from ebbflow.planners.model.trainings import CanaryChoice, RetryChoice, RunSettings
from ebbflow.planners.training.failures import canary as trials
from ebbflow.planners.training.failures.canary import CanaryPlan, GateQuestion
from ebbflow.planners.training.failures.failures import FailureTable
from ebbflow.planners.training.failures.retries import BlindRetry, Retries, RetryPolicy

_MAX_DELAY = 1800.0  # s, between two attempts, unless the first delay is longer


@dataclass(frozen=True)
class TrainingPlan:
    """One training, as its supervisor is told of it."""

    settings: RunSettings  # of the run itself, without a canary
    table: FailureTable  # classifies failures
    retries: Retries  # what follows from their class
    canary: CanaryPlan | None = None  # the trial that comes first, if one does
    why: str = ""  # there is one, or none
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
        canary: CanaryChoice,
        canary_steps: int,
        retries: RetryChoice,
        back_off: float,
        free: bool,
        resumes: bool,
        seed: int = 0,
    ) -> Self:
        """Return the plan of a training.

        Args:
            settings: what is asked of its processes; ``hazard`` takes the place of theirs.
            table: classifies failures.
            placement: node -> slots that are there.
            max_gpus: GPUs that the run uses at most.
            hazard: losses per node-hour; ``None``: learnt from what happens, beginning with the prior.
            canary: whether a trial comes first; ``auto``: where it is worth its GPU time.
            canary_steps: of the trial.
            retries: ``by-class`` of failure, or three ``blind`` ones.
            back_off: seconds before the first retry after a failure of the infrastructure.
            free: whether GPUs cost nothing that anyone else wants.
            resumes: whether the run goes on from a checkpoint.
            seed: of the jitter of delays.

        Raises ``OptionError`` for a trial without steps.
        """
        trial, why = _canary(canary, canary_steps, placement, max_gpus, free=free, resumes=resumes)
        return cls(
            replace(settings, hazard=losses.hazard(0, 0.0) if hazard is None else hazard),
            table,
            _retries(retries, back_off),
            trial,
            why,
            learns=hazard is None,
            seed=seed,
        )

    def hazard(self, lost: int, node_seconds: float) -> float:
        """Return the losses per node-hour to expect after ``lost`` nodes in ``node_seconds``; stated ones stay."""
        return losses.hazard(lost, node_seconds) if self.learns else self.settings.hazard


def _canary(
    choice: CanaryChoice,
    steps: int,
    placement: Mapping[str, int],
    max_gpus: int,
    *,
    free: bool,
    resumes: bool,
) -> tuple[CanaryPlan | None, str]:
    """Return the trial that comes before a run on ``placement``, if one does, and why."""
    gpus = min(sum(placement.values()), max_gpus)
    if choice == "never" or not gpus:
        return None, ""
    wanted = trials.plan(gpus, min(len(placement), gpus), steps)
    if choice == "always":
        return wanted, "asked for"
    if gpus <= wanted.ranks:
        return None, "the run is no larger than a trial"
    gate = trials.should_gate(GateQuestion(gpus, wanted.ranks, resumes=resumes, free=free))
    return (wanted if gate.gate else None), gate.reason


def _retries(choice: RetryChoice, back_off: float) -> Retries:
    if choice == "blind":
        return BlindRetry()
    return RetryPolicy(first_delay=back_off, most_delay=max(_MAX_DELAY, back_off))
