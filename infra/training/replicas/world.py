"""``ReplicaWorld``: the processes of one generation, which all-reduce gradients, and come and go meanwhile.

Who is there is agreed over the launcher's channel (``process.members``); gradients meet in a process group that is
made anew for whoever is there, as torchft does (Meta 2024). Nothing is said to the launcher while nobody comes or
goes: the small all-reduce that ends a step also says whether a process has heard of a change.

A loss can strike between two processes' ends of one step. So each keeps the sums with which it ended its last one.
Who has ended fewer steps than another takes the sums from there: its own gradients are reduced already, as nobody
ends a step to which not all have contributed. Everybody else repeats the step that is under way.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist

from ebbflow.infra.training.process import agreeing, nccl
from ebbflow.infra.training.process.channel import CHANNEL, Channel, StopRequest
from ebbflow.infra.training.process.members import MemberWorld
from ebbflow.infra.training.process.world import (
    ViewChangedError,
    World,
    backends,
    group_store,
    peer_lost,
)
from ebbflow.infra.training.replicas.groups import (
    FORM,
    Connections,
    GroupState,
    await_release,
    collectives,
    second_of_two,
)
from ebbflow.infra.training.replicas.store import FAILED, WatchedStore

SLOWEST = 5e6  # bytes/s at which a training's state is taken to reach a process that joins, at least
_TRIES = 5  # groups of the same processes that may break before they have ended a step

log = logging.getLogger(__name__)


class ReplicaWorld(MemberWorld):
    """One process's place among those that all-reduce gradients; see ``MemberWorld``."""

    __slots__ = ("_group",)

    _group: GroupState

    def __init__(
        self,
        signals: Channel,
        channel: Channel,
        member: int,
        slots: int,
        device: torch.device,
        *,
        later: bool = False,
    ) -> None:
        super().__init__(signals, channel, member, slots, device, later=later)
        object.__setattr__(self, "_group", GroupState(ended=-1 if later else 0))

    @classmethod
    def join_replicas(
        cls,
        signals: Channel,
        timeout: float,
        environment: Mapping[str, str] = os.environ,
        *,
        forced: bool = False,
    ) -> Self:
        """Join the others, and make their process group.

        One that comes later is the second of two until it enters, and exchanges nothing. Where members change
        whatever the script does, it is alone: the script may wait for what it exchanges.

        ``timeout``: seconds after which a collective that hangs is an error.

        Raises ``LauncherLostError``, and ``TrainingError`` where the others cannot be reached.
        """
        made = cls.join_members(signals, environment)
        made._group.timeout = timeout
        made._group.store = group_store(environment, FORM)
        launcher = environment.get(CHANNEL, "").rpartition(":")[2]
        made._group.spared = frozenset(map(int, (environment["MASTER_PORT"], launcher)))
        nccl.prepare()
        if made.later and not forced:
            second_of_two()
        else:
            made.form(alone=made.later)
        return made

    # --- who is there ---------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Return its place among the members; one that has not entered comes after the first."""
        members = self.view.members
        return members.index(self._seat.member) if self._seat.member in members else max(1, len(members))

    @property
    def size(self) -> int:
        """Return the number of members; one that has not entered counts another, which speaks for all."""
        return len(self.view.members) or 2

    @property
    def elastic(self) -> bool:
        """Tell whether processes come and go while the others train on."""
        return not self._group.fixed

    @property
    def fixed(self) -> str:
        """Return why the members cannot change; empty where they can."""
        return self._group.fixed

    @property
    def epoch(self) -> int:
        """Return a number that changes with the group."""
        return self._group.epoch

    @property
    def joining(self) -> tuple[int, ...]:
        """Return the ranks of the group's members that do not know the training's state yet."""
        return self._group.joining

    def expect(self, size: int) -> None:
        """Let collectives take as long as it takes besides that one process sends ``size`` bytes to another."""
        if self.whole and self.size > 1:
            timeout = timedelta(seconds=self._group.timeout + size / SLOWEST)
            dist.distributed_c10d._set_pg_timeout(timeout)

    @property
    def knows(self) -> bool:
        """Tell whether this process knows the training's state."""
        return self._group.ended >= 0

    def took_over(self) -> None:
        """Take note that this process knows the training's state, as the first one does."""
        self._group.ended = self._group.tried[0]
        self._group.sums = None

    def fix(self, reason: str) -> None:
        """Let a loss end the generation. ``reason``: why members cannot change."""
        self._group.fixed = reason

    def found(self, reason: str) -> None:
        """Take note of why members cannot change; all follow once they have agreed on it, at the end of a step."""
        self._group.found = self._group.found or reason

    @property
    def exchanged(self) -> bool:
        """Tell whether others than the run have exchanged something in the group."""
        return collectives(self.device) != self._group.counted

    def watch(self) -> None:
        """Look for what the script exchanges from now on."""
        self._group.counted, self._group.watches = collectives(self.device), True

    @property
    def asked(self) -> bool:
        """Tell whether the script has asked, outside of its epochs, if this process is the first."""
        return self._group.asked

    def is_first(self) -> bool:
        """Tell the script whether this is the first process, which it may be later or no more."""
        self._group.asked = True
        return self.rank == 0

    @contextmanager
    def within(self) -> Iterator[None]:
        """Enter what the run exchanges itself; see ``World.within``."""
        if self._group.watches and not self._group.fixed and self.exchanged:
            self.found("the script exchanges values among its processes by itself")
        try:
            yield
        finally:
            self._group.counted = collectives(self.device)

    def heard(self, stop: StopRequest | None) -> None:
        """End what still waits for members that the launcher has given up: a machine that vanished says nothing."""
        group = self._group
        connections, away = group.connections, not group.fixed and self.changed
        late = self._losses.look(lost=away or (stop is not None and stop.lost))
        if late and away and connections is not None:
            log.warning("members are lost and their connections are open: %d are ended", connections.cut())
            if group.connections is connections:  # else there is another group already
                group.connections = None

    # --- the group ------------------------------------------------------------------------------------------

    def lost(self, error: BaseException) -> bool:
        """Take note of an error in a collective; return whether the step is to be repeated for it."""
        if self._group.fixed or not (self._group.broken or peer_lost(error)):
            return False
        self.broke(error)
        return True

    def broke(self, error: BaseException) -> None:
        """Take note that the group cannot be used any more."""
        error.__context__ = None
        # without the frames that it came through, which hold the group, and so connections that peers wait on
        self._group.broken = self._group.broken or error.with_traceback(None)

    def before_end(self, release: Callable[[], None]) -> None:
        """Call ``release`` before a group is ended: connections close with the last that holds it."""
        self._group.release = release

    @property
    def whole(self) -> bool:
        """Tell whether the group can be used, as far as is known."""
        return self._group.broken is None

    def form(self, *, alone: bool = False) -> None:
        """Make the process group of the members; its failure is noted, see ``whole``."""
        self._dissolve()
        group = self._group
        size = 1 if alone else self.size
        first, store = group.epoch == 0, dist.HashStore()
        if size > 1:
            store = dist.PrefixStore(f"replicas-{self.view.number}-{group.epoch}", group.store)
        if size > 1 and not first:
            store = WatchedStore(store, lambda: self.changed, FORM)
        made = Connections(group.spared) if size > 1 else None
        try:
            dist.init_process_group(
                backends(self.device),
                store=store,
                rank=0 if size == 1 else self.rank,
                world_size=size,
                timeout=timedelta(seconds=group.timeout if first else min(group.timeout, FORM)),
            )
            if not first:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=group.timeout))
            if isinstance(store, WatchedStore):
                store.patience = group.timeout  # of groups that the script makes within this one
            if made is not None:
                made.take()
                group.connections = made
        except (RuntimeError, ViewChangedError) as exc:
            if first:
                raise
            # whoever meets it repeats nothing where members are fixed: it is a loss then
            self.broke(dist.DistNetworkError(str(exc)) if isinstance(exc, ViewChangedError) else exc)
            try:
                store.set(FAILED, b"1")  # those that still wait need not
            except RuntimeError:
                log.debug("the store cannot be reached", exc_info=True)
        group.counted = collectives(self.device)

    def _dissolve(self) -> None:
        """End the group, so that those that wait in it go on."""
        self._group.broken = self._group.connections = None
        self._losses.reset()
        group = dist.group.WORLD if dist.is_initialized() else None
        self._group.release()
        if group is not None:
            nccl.dissolve(self.fix)
            await_release(group)
        nccl.begun()

    # --- what they agree on ---------------------------------------------------------------------------------

    def stay(self) -> None:
        """Before a step: take up who is there. Raises ``RunStopped`` where this process was asked to leave."""
        group = self._group
        if not group.fixed:
            if group.broken is not None or self.changed:
                self.settle()
            elif group.due or group.asks:
                self.settle(boundary=True)
        MemberWorld.stay(self)

    def sum_step(self, values: Sequence[float]) -> list[float]:
        """Return the sums with which a step ends. Raises ``ViewChangedError``: then it has not ended."""
        group = self._group
        if group.broken is None:
            signals = self._seat.signals
            try:
                *sums, due, asks = World.sum(
                    self, [*values, float(signals.due), float(bool(group.found) and not group.fixed)]
                )
            except RuntimeError as exc:
                if group.fixed:
                    raise
                self.broke(exc)
            else:
                group.ended, group.sums, group.due, group.asks = group.ended + 1, sums, due > 0, asks > 0
                return sums
        if group.fixed and group.broken is not None:
            raise group.broken
        before = group.ended
        self.settle()
        if group.ended > before and group.sums is not None:
            return group.sums
        raise ViewChangedError

    def repeat_broken(self) -> None:
        """Raise ``ViewChangedError`` where processes were lost while gradients were exchanged."""
        group = self._group
        if group.broken is not None and not group.fixed:
            self.settle()
            raise ViewChangedError

    def settle(self, *, boundary: bool = False) -> None:
        """Agree on who is there and where each is, and make their group; ``epoch`` is another one then.

        ``boundary``: all have ended a step, and members come and leave; nothing changes where none do. Where one has
        found that they cannot, this was the last time.

        Raises ``RunStopped``, and what broke the group where the same processes break one after another, or where
        it is the last time and their group cannot be made.
        """
        group, cause = self._group, self._group.broken
        group.due = self._seat.signals.due = group.asks = False
        if boundary:
            nccl.finish(self.device)  # before they agree: then no group is ended that another is in
        else:
            self._dissolve()
        while True:
            number = self.view.number
            said = {"ended": group.ended, "sums": group.sums, "boundary": boundary, "fixed": group.found}
            found = self._once(agreeing.to_text(said), boundary=boundary)
            if self._seat.retired:
                return
            where = [one if isinstance(one, dict) and "ended" in one else None for one in found or ()]
            standings = [one for one in where if one is not None]
            complete = found is not None and len(standings) == len(where)
            reason = next((str(one["fixed"]) for one in standings if one["fixed"]), "")
            if (
                boundary
                and complete
                and self.view.number == number
                and all(one["boundary"] for one in standings)
            ):
                group.fixed = reason
                return
            if boundary:
                boundary = False
                self._dissolve()
            if complete and self.view.number == number:
                break
        top = max(standings, key=lambda one: int(one["ended"]))
        if 0 <= group.ended < top["ended"]:
            group.ended, group.sums = int(top["ended"]), list(top["sums"])
        group.joining = tuple(rank for rank, one in enumerate(standings) if one["ended"] < 0)
        group.epoch = self._seat.index
        self._count(int(top["ended"]), cause)
        group.fixed = reason
        self.form()  # also where a step fails: a script may ask for its rank before the next
        if reason and group.broken is not None:
            raise group.broken

    def _count(self, ended: int, cause: BaseException | None) -> None:
        """Take note of a new group, and raise ``cause`` where too many of the same came to nothing."""
        group, tried = self._group, (ended, self.view.members)
        group.tries = group.tries + 1 if tried == group.tried else 0
        group.tried = tried
        if group.tries >= _TRIES and cause is not None:
            raise cause

    def from_first(self, value: object) -> object:
        """Return what the first member gives. Raises ``ViewChangedError`` where another group was agreed on instead.

        Those whose group broke meanwhile make another, and so must those that are here.
        """
        if self._group.fixed:
            return World.from_first(self, value)
        found = self._once(agreeing.to_text({"value": value if self.rank == 0 else None}))
        if found is not None and all(isinstance(one, dict) and "value" in one for one in found):
            return found[0]["value"]
        self.settle()
        raise ViewChangedError

    def from_first_of(self, make: Callable[[], object]) -> object:
        """Return what the first member makes; another one is asked where that is lost meanwhile."""
        if self._group.fixed:
            return World.from_first(self, make() if self.rank == 0 else None)
        return self._told(lambda: make() if self.rank == 0 else None)[0]

    def from_all(self, value: object) -> list[Any]:
        """Return what each member gives, by rank."""
        return World.from_all(self, value) if self._group.fixed else self._told(lambda: value)

    def leave(self) -> None:
        """End communication; may be called twice."""
        MemberWorld.leave(self)
        self._dissolve()

    def _told(self, make: Callable[[], object]) -> list[Any]:
        while True:
            found = self._once(agreeing.to_text({"value": make()}))
            if found is not None and all(isinstance(one, dict) and "value" in one for one in found):
                return [one["value"] for one in found]
            self.settle()
