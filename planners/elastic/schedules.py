"""Which micro-tasks may start next: bounded staleness, asynchronous, and rotation of blocks.

Each schedule is told of completions and answers with what they release. Its state is plain, so that a snapshot of a
driver can hold it. Iterations and rounds count from 0, executors from 0.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ebbflow.planners.errors import OptionError


class Release(NamedTuple):
    """One micro-task that may start."""

    executor: int
    iteration: int  # of the executor; for a rotation: the round


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if value < 1:
            raise OptionError(f"{name} must be >= 1; got {value}")


@dataclass(slots=True)
class SspSchedule:
    """Stale synchronous parallel: an iteration starts when the one ``staleness`` + 1 before it is complete.

    ``staleness`` 0 is bulk synchronous (BSP). All tasks of an iteration are released by one completion and so carry
    one version: each process fetches a parameter once an iteration. A read in iteration i sees all updates of the
    iterations up to i - staleness - 1. Ho et al., "More effective distributed ML via a stale synchronous parallel
    parameter server", NeurIPS 2013.
    """

    executors: int
    iterations: int
    staleness: int = 0
    done: dict[int, int] = field(default_factory=dict)  # iteration: tasks finished, of those not complete
    completed: int = 0  # iterations of which every task has finished, all before it too

    def __post_init__(self) -> None:
        _check(executors=self.executors, iterations=self.iterations)
        if self.staleness < 0:
            raise OptionError(f"staleness must be >= 0; got {self.staleness}")

    def start(self) -> list[Release]:
        """Return the tasks that need no completion."""
        return [r for i in range(min(self.staleness + 1, self.iterations)) for r in self._all(i)]

    def finish(self, iteration: int) -> list[Release]:
        """Return what the completion of one task of ``iteration`` releases; all tasks of one iteration, or none."""
        self.done[iteration] = self.done.get(iteration, 0) + 1
        if self.done[iteration] < self.executors:
            return []
        while self.done.get(self.completed) == self.executors:
            del self.done[self.completed]
            self.completed += 1
        # Iterations of one executor run in order, so the last task of an iteration comes after all of those before
        following = iteration + self.staleness + 1
        return self._all(following) if following < self.iterations else []

    def _all(self, iteration: int) -> list[Release]:
        return [Release(executor, iteration) for executor in range(self.executors)]


@dataclass(slots=True)
class AsyncSchedule:
    """Every executor continues by itself: unbounded staleness."""

    executors: int
    iterations: int

    def __post_init__(self) -> None:
        _check(executors=self.executors, iterations=self.iterations)

    def start(self) -> list[Release]:
        """Return the first task of each executor."""
        return [Release(executor, 0) for executor in range(self.executors)]

    def finish(self, executor: int, iteration: int) -> list[Release]:
        """Return the executor's next task, if there is one."""
        return [Release(executor, iteration + 1)] if iteration + 1 < self.iterations else []


@dataclass(slots=True)
class BlockRotation:
    """Blocks of parameters go round the executors so that no two ever work on the same block.

    In round r executor i has block (i + r) mod ``blocks``: a Latin square, so that in ``blocks`` rounds, one epoch,
    each executor has each block once. With ``barrier`` a round starts when the one before it is complete; without, a
    task starts when its executor is free and its block's last holder has finished with it.
    """

    executors: int
    blocks: int
    epochs: int = 1
    barrier: bool = False
    finished: list[int] = field(default_factory=list)  # rounds finished by each executor
    released: list[int] = field(default_factory=list)  # rounds released to each executor

    def __post_init__(self) -> None:
        _check(executors=self.executors, blocks=self.blocks, epochs=self.epochs)
        if self.blocks < self.executors:
            raise OptionError(
                f"blocks must be >= executors, or some idle in every round; "
                f"got {self.blocks} blocks, {self.executors} executors"
            )
        self.finished = self.finished or [0] * self.executors
        self.released = self.released or [0] * self.executors

    @property
    def rounds(self) -> int:
        """Rounds of all epochs."""
        return self.blocks * self.epochs

    def block(self, executor: int, round_: int) -> int:
        """Return the block that ``executor`` has in ``round_``."""
        return (executor + round_) % self.blocks

    def start(self) -> list[Release]:
        """Return round 0 of every executor."""
        return self._release(Release(executor, 0) for executor in range(self.executors))

    def finish(self, executor: int, round_: int) -> list[Release]:
        """Return what the completion releases: at most two tasks, or with a barrier a whole round or none."""
        self.finished[executor] = round_ + 1
        if self.barrier:
            if min(self.finished) <= round_:
                return []
            return self._release(Release(e, round_ + 1) for e in range(self.executors))
        return self._release([Release(executor, round_ + 1), self._next_holder(executor, round_)])

    def _release(self, tasks: Iterable[Release]) -> list[Release]:
        ready = []
        for task in tasks:
            if self._ready(task):  # the two that a completion may enable can be one and the same
                self.released[task.executor] = task.iteration + 1
                ready.append(task)
        return ready

    def _ready(self, task: Release) -> bool:
        executor, round_ = task
        if not self.released[executor] == self.finished[executor] == round_ < self.rounds:
            return False
        holder = self._last_holder(executor, round_)
        return holder is None or self.finished[holder.executor] > holder.iteration

    def _last_holder(self, executor: int, round_: int) -> Release | None:
        """Return who had the task's block before; in ``blocks`` rounds everyone has had it once."""
        for back in range(1, min(round_, self.blocks) + 1):
            before = (executor + back) % self.blocks
            if before < self.executors:
                return Release(before, round_ - back)
        return None

    def _next_holder(self, executor: int, round_: int) -> Release:
        for ahead in range(1, self.blocks + 1):
            after = (executor - ahead) % self.blocks
            if after < self.executors:
                break
        return Release(after, round_ + ahead)
