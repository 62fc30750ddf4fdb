"""Which state a run resumes from, and what is said of the checkpoints that cannot serve."""

import logging
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

from ebbflow.infra.errors import CheckpointsLostError, StorageError
from ebbflow.infra.training.checkpoints.folder import TIMEOUT, CheckpointFolder, VerifiedCheckpoint
from ebbflow.infra.training.checkpoints.sharded_files import DamagedPartError
from ebbflow.infra.training.checkpoints.shards import Cut
from ebbflow.infra.training.checkpoints.writer import BackgroundWriter
from ebbflow.infra.training.process.agreeing import exchangeable
from ebbflow.infra.training.process.generation import Generation
from ebbflow.infra.training.process.leaving import RunStopped
from ebbflow.infra.training.process.world import World
from ebbflow.infra.training.retrying import may_pass, retried, shown_alive
from ebbflow.infra.training.running_saves import RunningSaves
from ebbflow.infra.training.spill import Spill
from ebbflow.planners.model.trainings import RunSettings

TOGETHER = 1.0  # seconds that processes wait at most before they tell one another that they still read
_NAMED = 8  # unusable checkpoints in a message
_STEP = re.compile(r"/(?:corrupt-)?step-(\d{12})-")

log = logging.getLogger(__name__)

Result = TypeVar("Result")


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
        return self.full if self.running is None else max(self.full, self.running)

    @property
    def full(self) -> int:
        """Return the steps of the full checkpoint, -1 where none was found."""
        return -1 if self.found is None else self.found.step

    @property
    def reached(self) -> int:
        """Return the newest step of which there is a checkpoint, whole or not; -1: none."""
        said = (int(step) for text in (*self.passed_over, *self.damaged) for step in _STEP.findall(text))
        return max([self.step, *said])

    @property
    def lost(self) -> bool:
        """Return whether there were checkpoints, none of which can be used."""
        return self.step < 0 and bool(self.damaged)

    def become(self, other: "Choice") -> None:
        """Be another choice, for all who have this one."""
        for field in fields(self):
            setattr(self, field.name, getattr(other, field.name))


class _StopRequestedError(StorageError):
    """This process was asked to stop, for the reason that is the message, while it waited for storage."""


class PatientReader:
    """Reads what a run begins with, for ``final_save_timeout`` seconds where storage is away for a moment."""

    def __init__(self, generation: Generation) -> None:
        self._main, self._clock, self.post = generation.is_main, generation.clock, generation.link.post
        self._limit, self._link = generation.settings.final_save_timeout, generation.link

    def read(self, work: Callable[[], Result]) -> Result:
        """Return what ``work`` reads.

        Raises its ``StorageError``, one that says what to do after the limit, or one for ``leave`` where this process
        is asked to stop meanwhile.
        """
        begun = self._clock.now()
        end = begun + self._limit
        with ExitStack() as shown:

            def check_stop() -> None:
                if self._link.stop is not None:
                    raise _StopRequestedError(self._link.stop.reason)

            def more(error: StorageError, soon: bool) -> bool:
                if may_pass(error):
                    check_stop()
                return soon and may_pass(error)

            def attempt() -> Result:
                if waited:
                    check_stop()
                return work()

            waited: list[StorageError] = []

            def say(error: StorageError, pause: float) -> None:
                waited.append(error)
                log.warning("the run's checkpoints cannot be read, retrying in %g s: %s", pause, error)
                if self._main:
                    self.post("saving", 0, {"reading": True, "error": str(error), "again_in": pause})
                shown.close()
                # a read that hangs after that is to be found out
                shown.enter_context(shown_alive(self.post, self._clock, 0, end + TIMEOUT))

            try:
                return retried(attempt, self._clock, end, say, more)
            except StorageError as exc:
                if not may_pass(exc):
                    raise
                error = exc
        raise StorageError(
            f"the run's checkpoints cannot be read (retried for {self._clock.now() - begun:.0f} s): {error}; nothing "
            "was changed, and nothing is trained: once its directory can be read, resume the run "
            "(ebbflow train --resume ID)"
        )

    def together(self, world: World, work: Callable[[], Result]) -> Result:
        """Return what ``work`` reads, all processes at a time, so that none waits long in a collective.

        What one cannot read is an error of all, as are damaged parts and requests to stop, which go first. Raises as
        ``read`` and ``leave`` do.
        """
        found, error = None, None
        try:
            found = _patiently(world, partial(self.read, work))
        except StorageError as exc:
            error = exc
        errors = [one for one in world.from_all(error) if one is not None]
        if errors:
            self.leave(
                max(
                    errors,
                    key=lambda one: (isinstance(one, _StopRequestedError), isinstance(one, DamagedPartError)),
                )
            )
        return found  # type: ignore[return-value]

    def leave(self, error: StorageError) -> NoReturn:
        """Raise what all processes have agreed on: ``RunStopped`` where one was asked to stop, else the error."""
        if not isinstance(error, _StopRequestedError):
            raise error
        if self._main:
            said = {"reason": str(error), "saved": False, "error": "the run's checkpoints were waited for"}
            self.post("stopped", 0, said)
        raise RunStopped(str(error))


def choose(
    world: World,
    folder: CheckpointFolder | None,
    spill: Spill | None,
    running: RunningSaves,
    reader: PatientReader,
    known: int = -1,
    restart: bool = False,
) -> Choice:
    """Return the newest state that is whole, the same on all processes. What was spilled is taken over.

    Args:
        world: all call it; the first looks.
        folder: of the full checkpoints; ``None``: nothing is kept, or the others have looked, and nothing is found.
        spill: where the last one may be instead.
        running: the running checkpoint.
        reader: waits for storage that is away for a moment.
        known: newest step that was saved, as the launcher's journal has it; -1: none.
        restart: whether the run begins again where all that was saved is gone.

    Raises ``StorageError`` where storage cannot be read, or a spilled checkpoint not be taken over, and
    ``RunStopped`` where a process is asked to stop while it waits.
    """
    if folder is None:
        if spill is not None:  # what others have looked for: this process may have to save for them
            try:
                reader.read(spill.known_mark)
            except StorageError as exc:
                reader.leave(exc)
        return Choice()

    passed: list[str] = []  # also what was found, and perhaps set aside, by a look that has failed

    def look() -> Choice:
        try:
            return reader.read(lambda: _look(folder, spill, running, known, restart, passed))
        except StorageError as exc:
            return Choice(error=exc)

    agreed = world.from_first(_patiently(world, look if world.rank == 0 else None))
    assert isinstance(agreed, Choice)
    if agreed.error is not None:
        reader.leave(agreed.error)
    if spill is not None:
        spill.mark = agreed.mark
    return agreed


def look_back(
    world: World,
    folder: CheckpointFolder | None,
    spill: Spill | None,
    running: RunningSaves,
    settings: RunSettings,
    reader: PatientReader,
) -> Choice:
    """Return the newest state that is whole, see ``choose``, once the first process has reported what is damaged.

    Raises ``CheckpointsLostError`` where a run would begin again although it had something, and ``StorageError``.
    """
    chosen = choose(world, folder, spill, running, reader, settings.saved_step, settings.restart)
    if world.rank == 0 and (said := describe_damage(chosen, settings)) is not None:
        reader.post("damaged", max(chosen.step, 0), said)  # before anything else can go wrong
    check_not_lost(chosen, settings.restart or settings.preflight_steps > 0)
    return chosen


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


def describe_start(
    world: World, chosen: Choice, batch: Batch, running: RunningSaves, settings: RunSettings
) -> dict[str, Any]:
    """Return how training begins, for a report, with why changes of nodes restart it where that is not asked for."""
    asked = settings.recovery == "restart" or settings.sync == "service" or settings.preflight_steps > 0
    fixed = world.fixed or ("" if asked else settings.restarts)
    content: dict[str, Any] = {"world": world.size, "nodes": world.nodes}
    recovered = running.recovered  # perhaps not what was found, which nodes' memory had
    step = chosen.full if recovered is None else recovered.iteration
    content["restored"] = step if step >= 0 else None
    content |= {"batch": batch.total, "passes": batch.passes, "fixed": fixed}
    content |= {"recovery": "in-place" if world.elastic else "restart"}
    content["why"] = (
        world.fixed
        or settings.restarts
        or (
            "gradients meet at aggregators"
            if settings.sync == "service"
            else "each process has the whole model"
        )
    )
    if recovered is not None:  # parameters of several steps
        content |= {"oldest": recovered.oldest, "perturbation": recovered.perturbation}
    return content | {"device": str(world.device)}


def load(
    world: World,
    chosen: Choice,
    look: Callable[[], Choice],
    folder: CheckpointFolder | None,
    model: Any,
    reader: PatientReader,
    cut: Cut | None = None,
) -> dict[str, Any] | None:
    """Return the full checkpoint's state, or the parts of it that ``cut`` wants.

    The parts of a sharded one are compared here, by those who read them; where one is damaged for anybody, all look
    again, and ``chosen`` becomes what they find.

    Args:
        world: all call it.
        chosen: what was found.
        look: finds it; collective, see ``look_back``.
        folder: of the full checkpoints.
        model: that takes it up.
        reader: waits for storage that is away for a moment.
        cut: which parts.

    Raises ``OtherModelError``, ``CheckpointsLostError``, ``StorageError`` and ``RunStopped``.
    """
    while folder is not None and (found := chosen.found) is not None:
        found.check_model(model)
        try:
            return reader.together(world, partial(folder.load, found, cut=cut))
        except DamagedPartError as exc:
            damage = exc
        if world.rank == 0:
            folder.set_aside(found, str(damage))
        chosen.become(look())
    return None


def _patiently(world: World, work: Callable[[], Result] | None) -> Result | None:
    """Return the result of this process' work, if it has any, once all are done; no collective takes long."""
    reader: BackgroundWriter[Result] = BackgroundWriter("the search for a checkpoint")
    if world.size == 1:
        return work() if work is not None else None
    if work is not None:
        reader.start(work)
    while world.sum([float(reader.busy)])[0]:
        reader.join(TOGETHER)
    return reader.wait(0.0)


def _look(
    folder: CheckpointFolder,
    spill: Spill | None,
    running: RunningSaves,
    known: int,
    restart: bool,
    passed: list[str],
) -> Choice:
    if spill is not None:
        spill.take_mark(create=known <= 0 or restart)
    found = folder.latest()
    passed += folder.problems()
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
            if spill is not None and newest is None and not spill.take_mark(create=restart):
                raise StorageError(
                    f"step {known} of the run was saved, and neither it nor the run's mark is in {folder.uri} or "
                    "above it: what is there is not the run's directory; is it mounted?"
                )
            damaged = [
                f"step {known} was saved, but there is no complete checkpoint in {folder.uri}",
                *dict.fromkeys(passed),
            ]
    if spill is not None and not spill.mark:  # a copy that came without it
        spill.take_mark()
    mark = spill.mark if spill is not None else ""
    return Choice(found, newest, tuple(dict.fromkeys(passed)), tuple(damaged), taken, mark)
