"""Which state a run resumes from, and what is said of the checkpoints that cannot serve."""

import re
from dataclasses import dataclass
from typing import Any, Protocol

from ebbflow.infra.errors import CheckpointsLostError, StorageError
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder, VerifiedCheckpoint
from ebbflow.infra.training.process.agreeing import exchangeable
from ebbflow.infra.training.process.world import World
from ebbflow.infra.training.running_saves import RunningSaves
from ebbflow.infra.training.spill import Spill
from ebbflow.planners.model.trainings import RunSettings

_NAMED = 8  # unusable checkpoints in a message
_STEP = re.compile(r"/(?:corrupt-)?step-(\d{12})-")


class Batch(Protocol):
    """How a step is shared out."""

    total: int  # examples of all processes
    passes: int


@exchangeable
@dataclass(slots=True)
class Choice:
    """What the first process has found; equal on all."""

    found: VerifiedCheckpoint | None = None  # in the run's own directory
    running: int | None = None  # step of the running checkpoint, where that is newer
    passed_over: tuple[str, ...] = ()  # newer checkpoints that cannot serve, and why
    damaged: tuple[str, ...] = ()  # finished ones, where none of them can serve
    taken_from: str = ""  # address of the spilled checkpoint that ``found`` was copied from
    mark: str = ""
    error: StorageError | None = None

    @property
    def step(self) -> int:
        """Return the steps that are done, -1 where nothing was found."""
        full = -1 if self.found is None else self.found.step
        return full if self.running is None else max(full, self.running)

    @property
    def reached(self) -> int:
        """Return the newest step of which there is a checkpoint, whole or not; -1: none."""
        said = (int(step) for text in (*self.passed_over, *self.damaged) for step in _STEP.findall(text))
        return max([self.step, *said])

    @property
    def lost(self) -> bool:
        """Return whether there were checkpoints, none of which can be used."""
        return self.step < 0 and bool(self.damaged)


def choose(
    world: World, folder: CheckpointFolder | None, spill: Spill | None, running: RunningSaves, known: int = -1
) -> Choice:
    """Return the newest state that is whole, the same on all processes. What was spilled is taken over.

    Args:
        world: all call it; the first looks.
        directory: of the full checkpoints; ``None``: nothing is kept, and nothing found.
        spill: where the last one may be instead.
        running: the running checkpoint.
        known: newest step that was saved, as the launcher's journal has it; -1: none.

    Raises ``StorageError`` where storage cannot be read, or a spilled checkpoint not be taken over.
    """
    if folder is None:
        return Choice()
    chosen = Choice()
    if world.rank == 0:
        try:
            chosen = _look(folder, spill, running, known)
        except StorageError as exc:
            chosen.error = exc
    agreed = world.from_first(chosen)
    assert isinstance(agreed, Choice)
    if agreed.error is not None:
        raise agreed.error
    if spill is not None:
        spill.mark = agreed.mark
    return agreed


def check_not_lost(chosen: Choice, restart: bool) -> None:
    """Raise ``CheckpointsLostError`` where a run would begin again although it had something, unless ``restart``."""
    if chosen.lost and not restart:
        more = len(chosen.damaged) - _NAMED
        said = "; ".join(chosen.damaged[:_NAMED]) + (f"; and {more} more" if more > 0 else "")
        raise CheckpointsLostError(
            f"none of the run's checkpoints is usable: {said}. Nothing was deleted, and nothing is trained: restore "
            f"one from a backup, or restart at step 0 (ebbflow train --resume ID --restart, or "
            f"ElasticRun.start(restart=True))"
        )


def describe_damage(chosen: Choice, settings: RunSettings) -> dict[str, Any] | None:
    """Return which checkpoints cannot serve, for a report; ``None`` where all can."""
    damaged = chosen.damaged if chosen.lost else chosen.passed_over
    if not damaged or settings.preflight_steps:
        return None
    restarted = chosen.lost and settings.restart
    return {"checkpoints": list(damaged), "restarted": restarted, "reached": chosen.reached}


def describe_start(world: World, chosen: Choice, batch: Batch, running: RunningSaves) -> dict[str, Any]:
    """Return how training begins, for a report."""
    content: dict[str, Any] = {"world": world.size, "nodes": world.nodes}
    content["restored"] = chosen.step if chosen.step >= 0 else None
    content |= {"batch": batch.total, "passes": batch.passes}
    if (recovered := running.recovered) is not None:  # parameters of several steps
        content |= {"oldest": recovered.oldest, "perturbation": recovered.perturbation}
    return content | {"device": str(world.device)}


def load(chosen: Choice, folder: CheckpointFolder | None, model: Any) -> dict[str, Any] | None:
    """Return the full checkpoint's state. Raises ``OtherModelError`` and ``StorageError``."""
    if folder is None or chosen.found is None:
        return None
    chosen.found.check_model(model)
    return folder.load(chosen.found)


def _look(folder: CheckpointFolder, spill: Spill | None, running: RunningSaves, known: int) -> Choice:
    mark = spill.take_mark() if spill is not None else ""
    found = folder.latest()
    passed = folder.problems()
    taken = ""
    if spill is not None:
        step = -1 if found is None else found.step
        spilled = spill.newest(step)
        passed += spill.problems
        if spilled is not None:
            other, there = spilled
            try:
                folder.take_over(other, there)
            except StorageError as exc:
                raise type(exc)(
                    f"step {there.step} of the run is in {there.uri} and cannot be restored from there: {exc}"
                ) from exc
            found, taken = folder.latest(), there.uri
        if found is not None:
            spill.clear(found.step)
    newest = running.newest(-1 if found is None else found.step)
    passed += running.problems
    damaged: list[str] = []
    if found is None:
        damaged = folder.damaged() + running.problems
        if known > 0 and not damaged:
            damaged = [
                f"step {known} was saved, but there is no complete checkpoint in {folder.uri}",
                *passed,
            ]
    return Choice(found, newest, tuple(passed), tuple(damaged), taken, mark)
