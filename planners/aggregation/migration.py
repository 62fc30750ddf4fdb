"""How a tensor moves to another aggregator while its training runs: state machines without I/O (AutoPS, Fig. 4.5).

The old host answers the pulls of a round with the new host's address, sends its copy while the workers compute, and
the new one takes their pushes but updates only what is complete. The redirect begins with a round that no worker has
pulled yet, so that no round's gradients are divided between two hosts. Each message may be lost, repeated or late:
its sender repeats it (``outstanding``) until the answer has come, and receivers know by round and migration what is
old.

Payloads are not here: whoever runs a machine keeps parameters, gradients and optimizer state beside it, applies an
update before it sends that step's messages, and adds them to ``Parameters``, ``Push`` and ``CopyData``.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Self

from ebbflow.planners.aggregation.messages import (
    MANAGER,
    Cancel,
    Cancelled,
    CopyBegin,
    CopyData,
    CopyDone,
    CopyReceived,
    Finish,
    Finished,
    Left,
    Message,
    MigrateInit,
    Noted,
    Parameters,
    Pull,
    Push,
    Redirected,
    Sends,
    Sent,
    WorkersDone,
)
from ebbflow.planners.errors import OptionError


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker's part: pulls a round, then pushes its gradient to where the parameters said, and pulls the next.

    Args:
        name: unique among the training's workers.
        host: the tensor's aggregator.
        round: that it pulls.
        computes: whether it has the round's parameters and has not pushed yet.
    """

    name: str
    host: str
    round: int = 0
    computes: bool = False

    def outstanding(self) -> Sends:
        """Return what it sends, and repeats until the next parameters come."""
        if self.computes:
            return ()
        pull = Sent(self.host, Pull(self.name, self.round))
        return (Sent(self.host, Push(self.name, self.round - 1)), pull) if self.round else (pull,)

    def receive(self, message: Message) -> tuple[Self, Sends]:
        """Take parameters; those of another round are old."""
        if not isinstance(message, Parameters) or self.computes or message.round != self.round:
            return self, ()
        return replace(self, host=message.host, computes=True), ()

    def pushed(self) -> tuple[Self, Sends]:
        """Send the gradient, once it is computed, and ask for the next round.

        Raises ``OptionError`` where the worker has no parameters.
        """
        if not self.computes:
            raise OptionError(f"worker {self.name!r} must have parameters before it pushes")
        after = replace(self, round=self.round + 1, computes=False)
        return after, after.outstanding()


Status = Literal["absent", "receiving", "serving"]


@dataclass(frozen=True, slots=True)
class TensorHost:
    """An aggregator's part for one tensor, as its old host, its new one, or while it stays.

    Args:
        name: of the aggregator.
        status: without the tensor, with an incomplete copy, or with the master copy.
        workers: for whose pushes a round waits.
        round: of the parameters that it has, or receives.
        pushes: workers whose gradient of the round is here.
        pulled: workers that were answered in the round.
        waiting: workers that pull the next round.
        early: last push and pull of each worker that came before the copy.
        left: workers that have left.
        migration: the last one that it took part in.
        target: the new host, from ``redirect`` on.
        redirect: first round whose pushes go to the new host.
        copied: whether the new host has the copy.
        owes: whether the pushes of its first round as new host are not complete.
        unnoted: whether the manager lacks this host's notification.
    """

    name: str
    status: Status = "absent"
    workers: frozenset[str] = frozenset()
    round: int = 0
    pushes: frozenset[str] = frozenset()
    pulled: frozenset[str] = frozenset()
    waiting: frozenset[str] = frozenset()
    early: frozenset[Push | Pull] = frozenset()
    left: frozenset[str] = frozenset()
    migration: int = 0
    target: str | None = None
    redirect: int = 0
    copied: bool = False
    owes: bool = False
    unnoted: bool = False

    @property
    def redirects(self) -> bool:
        """Tell whether this round's pushes go to the new host."""
        return self.target is not None and self.round >= self.redirect

    def outstanding(self) -> Sends:
        """Return what it repeats until it is answered."""
        if self.target is not None and self.redirects and self.pulled >= self.workers and not self.copied:
            begin = CopyBegin(self.migration, self.name, self.round, self.workers)
            return Sent(self.target, begin), Sent(self.target, CopyData(self.migration, self.name))
        if self.unnoted and self.target is not None:
            return (Sent(MANAGER, CopyDone(self.migration, self.name)),)
        if self.unnoted:
            return (Sent(MANAGER, WorkersDone(self.migration, self.name)),)
        return ()

    def receive(self, message: Message) -> tuple[Self, Sends, bool]:
        """Take a message.

        Returns:
            the host after it, what it sends, and whether it updates: then the sum of this round's gradients is
            applied before anything is sent.
        """
        match message:
            case Pull():
                return *self._pull(message), False
            case Push():
                return self._push(message)
            case Left(worker):
                return self._without(worker)
            case MigrateInit(migration, target) if self.status == "serving" and migration > self.migration:
                # workers that were answered in this round push to where they were told
                begin = self.round + 1 if self.pulled else self.round
                after = replace(
                    self, migration=migration, target=target, redirect=begin, copied=False, unnoted=False
                )
                return after, after.outstanding(), False
            case CopyBegin(migration, _, number, workers) if migration > self.migration:
                return self._begin(migration, number, workers)
            case CopyData(migration, source) if migration == self.migration:
                return self._complete(migration, source)
            case CopyReceived(migration) if migration == self.migration and self.target and not self.copied:
                after = replace(self, copied=True, unnoted=True)
                return after, after.outstanding(), False
            case Noted(migration) if migration == self.migration:
                return replace(self, unnoted=False), (), False
            case Finish(migration):
                return *self._finish(migration), False
            case Cancel(migration):
                return *self._cancel(migration), False
        return self, (), False

    def _pull(self, message: Pull) -> tuple[Self, Sends]:
        worker = message.worker
        if self.status != "serving":
            return replace(self, early=self._kept(message)), ()
        if message.round == self.round + 1 and not self.redirects:
            return replace(self, waiting=self.waiting | {worker}), ()
        if message.round != self.round:
            return self, ()
        after = replace(self, pulled=self.pulled | {worker})
        copy = after.outstanding() if after.pulled != self.pulled else ()
        return after, (*after._answers([worker]), *copy)

    def _kept(self, message: Push | Pull) -> frozenset[Push | Pull]:
        same = (one for one in self.early if type(one) is type(message) and one.worker == message.worker)
        earlier = next(same, None)
        if earlier is None:
            return self.early | {message}
        return self.early if earlier.round >= message.round else self.early - {earlier} | {message}

    def _answers(self, workers: Iterable[str]) -> Sends:
        host = self.target if self.redirects and self.target else self.name
        return tuple(Sent(worker, Parameters(self.round, host)) for worker in workers)

    def _push(self, message: Push) -> tuple[Self, Sends, bool]:
        if self.status == "absent":
            return replace(self, early=self._kept(message)), (), False
        if message.round != self.round or self.redirects:
            return self, (), False
        return replace(self, pushes=self.pushes | {message.worker})._update()

    def _without(self, worker: str) -> tuple[Self, Sends, bool]:
        after = replace(self, left=self.left | {worker}, workers=self.workers - {worker})
        if after.redirects:
            return after, after.outstanding(), False
        return after._update()

    def _begin(self, migration: int, number: int, workers: frozenset[str]) -> tuple[Self, Sends, bool]:
        after = type(self)(
            self.name, "receiving", workers - self.left, number, early=self.early, left=self.left,
            migration=migration, owes=True,
            pushes=frozenset(one.worker for one in self.early if isinstance(one, Push) and one.round == number),
        )  # fmt: skip
        return after._update()

    def _complete(self, migration: int, source: str) -> tuple[Self, Sends, bool]:
        received = Sent(source, CopyReceived(migration))
        if self.status == "absent":
            return self, (), False
        if self.status == "serving":
            return self, (received,), False
        pulls = (one for one in self.early if isinstance(one, Pull) and one.round == self.round + 1)
        waiting = frozenset(one.worker for one in pulls)
        after, sends, updates = replace(self, status="serving", waiting=waiting, early=frozenset())._update()
        return after, (received, *sends), updates

    def _update(self) -> tuple[Self, Sends, bool]:
        """Notify and update where all pushes of the round are here, and the copy is complete."""
        if self.status == "absent" or not self.workers or not self.pushes >= self.workers:
            return self, (), False
        notified = replace(self, owes=False, unnoted=self.unnoted or self.owes)
        if self.status == "receiving":
            return notified, notified.outstanding(), False
        after = replace(
            notified, round=self.round + 1, pushes=frozenset(), pulled=self.waiting, waiting=frozenset()
        )
        return after, (*after._answers(sorted(self.waiting)), *after.outstanding()), True

    def _finish(self, migration: int) -> tuple[Self, Sends]:
        finished = Sent(MANAGER, Finished(migration))
        if migration == self.migration and self.target is not None:
            return type(self)(self.name, left=self.left, migration=migration), (finished,)
        return self, (finished,) if migration <= self.migration else ()

    def _cancel(self, migration: int) -> tuple[Self, Sends]:
        if migration > self.migration:
            return replace(self, migration=migration, unnoted=False), (Sent(MANAGER, Cancelled(migration)),)
        too_late = self.redirects and (self.pulled or not self.workers)
        if migration < self.migration or self.status != "serving" or too_late:
            return self, (Sent(MANAGER, Redirected(migration)),)
        return replace(self, target=None), (Sent(MANAGER, Cancelled(migration)),)


Phase = Literal["idle", "running", "cancelling", "finishing"]


@dataclass(frozen=True, slots=True)
class MigrationManager:
    """The manager's part for one tensor: one migration after another, each ended or cancelled.

    Args:
        migration: number of the last one.
        source: its old host.
        target: its new host.
        phase: of it.
        copied: whether the old host's notification came.
        pushed: whether the new host's came.
    """

    migration: int = 0
    source: str = ""
    target: str = ""
    phase: Phase = "idle"
    copied: bool = False
    pushed: bool = False

    def start(self, source: str, target: str) -> tuple[Self, Sends]:
        """Begin to move the tensor.

        Args:
            source: host of the tensor.
            target: another host.

        Raises ``OptionError`` while a migration runs, or for a tensor that would stay.
        """
        if self.phase != "idle":
            raise OptionError(f"migration {self.migration} must have ended before another begins")
        if source == target:
            raise OptionError(f"source and target of a migration must differ, and both are {source!r}")
        after = type(self)(self.migration + 1, source, target, "running")
        return after, after.outstanding()

    def cancel(self) -> tuple[Self, Sends]:
        """Ask to end the migration where it began; the old host decides whether that is still possible."""
        if self.phase != "running" or self.copied or self.pushed:
            return self, ()
        after = replace(self, phase="cancelling")
        return after, after.outstanding()

    def outstanding(self) -> Sends:
        """Return what it repeats until it is answered."""
        if self.phase == "running" and not self.copied:
            return (Sent(self.source, MigrateInit(self.migration, self.target)),)
        if self.phase == "cancelling":
            return (Sent(self.source, Cancel(self.migration)),)
        if self.phase == "finishing":
            return (Sent(self.source, Finish(self.migration)),)
        return ()

    def receive(self, message: Message) -> tuple[Self, Sends]:
        """Take a notification or an answer; those of earlier migrations are answered and change nothing."""
        match message:
            case CopyDone(migration, sender) | WorkersDone(migration, sender):
                after = self
                if migration == self.migration and isinstance(message, CopyDone):
                    after = replace(self, copied=True)
                elif migration == self.migration:
                    after = replace(self, pushed=True)
                noted = Sent(sender, Noted(migration))
                both = after.copied and after.pushed and after.phase == "running"
                after = replace(after, phase="finishing") if both else after
                return after, (noted, *after.outstanding()) if both else (noted,)
            case Finished(migration) if migration == self.migration and self.phase == "finishing":
                return replace(self, phase="idle"), ()
            case Cancelled(migration) if migration == self.migration and self.phase == "cancelling":
                return replace(self, phase="idle"), ()
            case Redirected(migration) if migration == self.migration and self.phase == "cancelling":
                both = self.copied and self.pushed
                after = replace(self, phase="finishing" if both else "running")
                return after, after.outstanding()
        return self, ()
