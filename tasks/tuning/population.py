"""The members of population-based training: one copies another's checkpoint, or makes room for those behind it."""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ebbflow.infra.errors import StorageError, StorageFullError
from ebbflow.planners.tuning.population import Member, explored, peer_of
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.tuning.request import TuningRequest
from ebbflow.tasks.tuning.study import Study
from ebbflow.tasks.tuning.trial import Trial

if TYPE_CHECKING:
    from ebbflow.infra.training.checkpoints.folder import CheckpointFolder

_COPIES = "ebbflow.copies"  # attribute of a trial: what it has copied, in order
_SPENT = "ebbflow.spent"  # attribute of a trial: GPU-seconds of its runs that are over
_TRIES = 3  # to copy a checkpoint that its run may delete

Move = Literal["", "copies", "yields"]


@dataclass(frozen=True, slots=True)
class Copy:
    """One time that a member took a peer's weights."""

    epoch: int  # of the member, then
    peer: str  # run that was copied
    parameters: Mapping[str, Any]  # with which the member continues


def copies_of(frozen: Any) -> tuple[Copy, ...]:
    """Return what a trial, as Optuna keeps it, has copied so far."""
    return tuple(Copy(**one) for one in frozen.user_attrs.get(_COPIES, ()))


def run_of(frozen: Any) -> str:
    """Return the run that a trial trains in: a new one each time that it has copied another."""
    copies = len(frozen.user_attrs.get(_COPIES, ()))
    return f"trial-{frozen.number:03d}" + (f".{copies}" if copies else "")


def parameters_of(frozen: Any) -> dict[str, Any]:
    """Return the hyperparameters that a trial trains with."""
    copies = copies_of(frozen)
    return dict(copies[-1].parameters if copies else frozen.params)


class Population:
    """Decides for the members that this process runs. For one thread, but for ``seed``."""

    def __init__(self, request: TuningRequest, study: Study) -> None:
        self._request, self._study = request, study

    def move(self, one: Trial, running: Collection[int], idle: Collection[int]) -> Move:
        """Return what a member does that has just ended an epoch; what it copies is in the study then.

        One that is ahead makes room, and is compared once the others are as far.

        Args:
            one: the member.
            running: numbers of the trials that this process runs.
            idle: those of them that wait for a GPU.
        """
        if not self._due(one.epochs):
            return ""
        if self._study.waits(running, idle, one.epochs):
            return "yields"
        return "copies" if self._copies(one) else ""

    def enter(self, one: Trial) -> None:
        """Let a member that begins or continues be what its study says."""
        frozen = self._study.trials()[one.trial.number]
        one.epochs = frozen.last_step or 0
        compared = {copy.epoch for copy in copies_of(frozen)}
        if self._due(one.epochs) and one.epochs not in compared and self._copies(one):
            frozen = self._study.trials()[one.trial.number]
        one.run = run_of(frozen)
        one.parameters = parameters_of(frozen)
        one.copied = tuple(copy.peer for copy in copies_of(frozen))
        one.spent = float(frozen.user_attrs.get(_SPENT, 0.0))

    def _due(self, epoch: int) -> bool:
        return 0 < epoch < (self._request.epochs or 0) and epoch % self._request.population_interval == 0

    def _copies(self, one: Trial) -> bool:
        """Return whether a member copies another, which is in the study then."""
        request, found = self._request, self._study.trials()
        population = [
            Member(frozen.number, upto[-1], frozen.intermediate_values[upto[-1]])
            for frozen in found
            if not frozen.state.is_finished()  # else there is nothing to train on
            and (upto := sorted(step for step in frozen.intermediate_values if step <= one.epochs))
        ]
        me = next((member for member in population if member.number == one.trial.number), None)
        if me is None:
            return False
        rng = np.random.default_rng((request.seed, me.number, one.epochs))
        peer = peer_of(me, population, rng, maximize=request.maximize)
        if peer is None:
            return False
        parameters = explored(parameters_of(found[peer]), request.space, rng)
        copy = Copy(one.epochs, run_of(found[peer]), parameters)
        said = [asdict(each) for each in (*copies_of(found[me.number]), copy)]
        return self._study.remember(one.trial, _COPIES, said)

    def inherit(self, one: Trial) -> None:
        """Give a member with nothing left to train the figures of the peer that it copied last, in the study, too.

        The peer had come to its end by then. A member that has trained since has figures of its own.
        """
        found = self._study.trials()
        copy = copies_of(found[one.trial.number])[-1]
        told = found[int(copy.peer.removeprefix("trial-").partition(".")[0])].intermediate_values
        if one.epochs == copy.epoch and max(told, default=0) > one.epochs:
            one.epochs = max(told)
            one.value = told[one.epochs]
            self._study.report(one.trial, one.epochs, one.value)

    def left(self, one: Trial, gpu_seconds: float) -> None:
        """Note what a member has used that others may run next."""
        self._study.remember(one.trial, _SPENT, one.spent + gpu_seconds)

    def lineage(self, number: int) -> str:
        """Return what a member has copied, for its report; empty: nothing."""
        copies = copies_of(self._study.trials()[number])
        return ", ".join(f"copied {copy.peer} after epoch {copy.epoch}" for copy in copies)

    def seed(self, request: TrainingRequest, copied: tuple[str, ...]) -> str:
        """Put the newest checkpoint of a peer into a member's new run unless there is one; return whose it is.

        A peer that has none is not copied: the member takes that of its own former run, or begins anew. In any
        thread. Raises ``StorageError``.
        """
        from ebbflow.infra.training.checkpoints.folder import CheckpointFolder

        def folder(run: str) -> CheckpointFolder:
            return CheckpointFolder(self._request.trial(run, ()).place.under("checkpoints"))

        own = folder(request.run_id)
        if own.latest() is not None:
            return ""
        stem, _, times = request.run_id.partition(".")
        former = f"{stem}.{int(times) - 1}" if int(times) > 1 else stem
        for run in (copied[-1], former):
            if _takes_newest(own, folder(run)):
                return run
        return ""


def _takes_newest(own: "CheckpointFolder", there: "CheckpointFolder") -> bool:
    """Copy the newest checkpoint of a run, which may delete it meanwhile; return whether there is one."""
    for attempt in range(_TRIES):
        try:
            if (found := there.latest()) is not None:
                own.take_over(there, found)
                return True
        except StorageFullError:
            raise
        except StorageError:
            if attempt == _TRIES - 1:
                raise
    return False
