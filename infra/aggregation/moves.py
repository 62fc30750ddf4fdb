"""``TensorMoves``: how an aggregator gives tensors to others, and takes theirs, while they are trained.

The old host asks the new one first: from then on what workers send there waits for the copy. It then answers the
pulls of a round with the new host's address, and sends its copy while workers compute. The protocol is that of
``planners.aggregation.migration``, of which the old host runs the manager's part, too.

Copies take a network and processors that workers need, and the first gradients for a new host go over connections
that are to be made. So only so many bytes of a training are on their way at once, and the next tensor follows when
one has moved.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from ebbflow.infra.aggregation.connections import PeerLinks
from ebbflow.infra.aggregation.frames import AggregatorAddress, Kind, TensorFrame
from ebbflow.infra.aggregation.master_copy import TRAINING, MasterCopy
from ebbflow.infra.aggregation.same_machine import may_be_near, share_copy, shared_copy
from ebbflow.infra.errors import AggregationError, InfraError
from ebbflow.infra.machine.memory_segments import MemorySegment, MemorySlot
from ebbflow.planners.aggregation.messages import (
    MANAGER,
    CopyBegin,
    CopyData,
    CopyReceived,
    Noted,
    Pull,
    Sends,
    WorkersDone,
)
from ebbflow.planners.aggregation.migration import MigrationManager

_REPEAT = 2.0  # seconds after which what is not answered is sent again
_REPEAT_COPY = 20.0  # the same of a copy
_GIVE_UP = 30.0  # seconds in which a new host must be ready
_AT_ONCE = 1 << 25  # bytes of a training's tensors that are on their way at once; of a larger one all
_ROUNDS = 3  # that a tensor takes to move: one that has begun, one that pushes to its new host, the end
_LEAST_SHARED = 1 << 20  # bytes of a tensor below which its copy is sent
_MOST_SHARED = 64  # copies in memory at once, each of which has an open file
_SLOW = 5.0  # seconds that a round is taken to last before it was measured

Key = tuple[str, str]  # training, tensor
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Move:
    """A tensor that goes to another aggregator."""

    target: str
    where: AggregatorAddress
    migration: int
    begun: float
    manager: MigrationManager | None = None  # once the new host is ready
    sent: float = 0.0
    copied: float = -inf  # when the copy was sent last
    wire: bool = False  # whether the new host cannot read this process's memory
    shares: bool = False  # whether the copy that was sent last is in memory
    segment: MemorySegment | None = None  # with the copy that was sent last


class TensorMoves:
    """Both sides, in the thread of the aggregator's front.

    Args:
        name: of the aggregator.
        tensors: that it has.
        answer: sends a frame to a connection.
        apart: does its first argument in a thread, then the second in the front's.
        call: does its argument in the front's thread.
        release: takes what has waited for a tensor.
        redirect: sends what a tensor's host sends to workers.
        give_up: ends the wait for a tensor's copy, and what waits for it.
        slots: returns memory of a training for so many bytes of parameters; see ``AggregatorMemory.slots``.
    """

    def __init__(
        self,
        name: str,
        tensors: dict[Key, MasterCopy],
        answer: Callable[[bytes, TensorFrame], None],
        apart: Callable[[Callable[[], None], Callable[[], None]], None],
        call: Callable[[Callable[[], None]], None],
        release: Callable[[MasterCopy], None],
        redirect: Callable[[MasterCopy, Sends], None],
        give_up: Callable[[MasterCopy], None],
        slots: Callable[[str, int], tuple[MemorySlot, ...]],
    ) -> None:
        self._name, self._tensors = name, tensors
        self._answer, self._apart, self._release, self._redirect = answer, apart, release, redirect
        self._give_up, self._slots = give_up, slots
        self._moves: dict[Key, _Move] = {}
        self._wanted: dict[Key, tuple[str, AggregatorAddress]] = {}
        self._at_once: float = _AT_ONCE
        self._links = PeerLinks(lambda who, frame: call(lambda: self._hear(who, frame)))
        self.done = 0  # tensors that were given to others
        self.waited = 0.0  # seconds for which whole rounds of gradients waited for copies

    @property
    def public(self) -> str:
        """Return the key by which it proves itself to other aggregators."""
        return self._links.public

    def address(self, tensor: MasterCopy) -> AggregatorAddress | None:
        """Return where a tensor goes to; ``None`` where it stays."""
        move = self._moves.get((tensor.job_id, tensor.name))
        return None if move is None else move.where

    def close(self) -> None:
        """End the connections to others."""
        self._links.close()

    # --- the old host ---------------------------------------------------------------------------------------

    def want(
        self, targets: Mapping[Key, tuple[str, AggregatorAddress]], within_s: float | None = None
    ) -> None:
        """Give tensors to other aggregators, one after another, instead of those that were named before and stay.

        Args:
            targets: name and address of the aggregator of each tensor.
            within_s: seconds in which they must have moved, however long workers wait for it; ``None``: any time.
        """
        self._wanted = {key: one for key, one in targets.items() if key not in self._moves}
        self._at_once = _AT_ONCE
        if within_s is not None:
            here = [one for key in targets if (one := self._tensors.get(key)) is not None]
            rounds = [found.iteration_us / 1e6 for one in here if (found := one.timing.profile) is not None]
            turns = max(within_s / (_ROUNDS * max(rounds, default=_SLOW)), 1.0)
            self._at_once = max(self._at_once, sum(one.nbytes for one in here) / turns)
        self._start_next()

    def _start_next(self) -> None:
        """Begin with as many tensors of each training as may be on their way: one that pauses holds up no other."""
        under_way: dict[str, int] = {}
        for key in self._moves:
            if (tensor := self._tensors.get(key)) is not None:
                under_way[key[0]] = under_way.get(key[0], 0) + tensor.nbytes
        for key, (target, where) in list(self._wanted.items()):
            tensor, own = self._tensors.get(key), under_way.get(key[0], 0)
            if tensor is None or (own and own + tensor.nbytes > self._at_once):
                continue
            if self._start(key, target, where):
                under_way[key[0]] = own + tensor.nbytes
                del self._wanted[key]

    def _start(self, key: Key, target: str, where: AggregatorAddress) -> bool:
        """Begin to give a tensor to another aggregator; return whether that is possible now."""
        tensor = self._tensors.get(key)
        if tensor is None or key in self._moves or target == self._name:
            return False
        host = tensor.host
        if host.status != "serving" or host.owes or host.unnoted:  # it has just come
            return False
        now = time.monotonic()
        self._moves[key] = _Move(target, where, host.migration + 1, now, sent=now)
        self._send(key, "expect")
        return True

    def repeat(self) -> None:
        """Send again what was not answered."""
        now = time.monotonic()
        for key, move in list(self._moves.items()):
            tensor = self._tensors.get(key)
            if tensor is None:
                del self._moves[key]
            elif move.manager is None and now - move.begun > _GIVE_UP:
                log.warning("aggregator %s did not take tensor %s of %s", move.target, key[1], key[0])
                self._send(key, "forget")
                del self._moves[key]
            elif now - move.sent > _REPEAT:
                move.sent = now
                if move.manager is None:
                    self._send(key, "expect")
                elif not tensor.host.copied:
                    self.carry(tensor, tensor.host.outstanding())
                else:
                    self._send(key, "ask")

    def abandon(self, target: str) -> None:
        """Keep what an aggregator that is lost was to get, where no worker was told of it yet.

        Where one was, all follow, and find a mirror; what was to come from that aggregator is not waited for.
        """
        self._wanted = {key: one for key, one in self._wanted.items() if one[0] != target}
        for one in list(self._tensors.values()):
            if one.source == target and one.host.status == "absent":
                self._give_up(one)
        for key, move in list(self._moves.items()):
            if move.target != target:
                continue
            if move.manager is None:
                del self._moves[key]
                continue
            if (tensor := self._tensors.get(key)) is None:  # its training is over
                del self._moves[key]
                continue
            move.manager, sends = move.manager.cancel()
            self.carry(tensor, sends)
            tensor.mirror |= self._moves.get(key) is move  # this copy is not the one that counts

    def begin_round(self, tensor: MasterCopy) -> None:
        """Take note that a tensor's round has begun: the copy may go, which no update changes any more."""
        if tensor.host.target is not None and tensor.host.redirects:
            tensor.host, sends, _ = tensor.host.receive(Pull(TRAINING, tensor.host.round))
            self.carry(tensor, sends)

    def carry(self, tensor: MasterCopy, sends: Sends) -> None:
        """Deliver what a tensor's host, or the manager of its migration, sends to others than workers."""
        key = tensor.job_id, tensor.name
        for to, message in sends:
            move = self._moves.get(key)
            if to == MANAGER and isinstance(message, WorkersDone) and message.host == self._name:
                self._tell(tensor, "pushed")
            elif to == MANAGER and move is not None and move.manager is not None:
                move.manager, further = move.manager.receive(message)
                self.carry(tensor, further)
                if move.manager.phase == "idle" and self._moves.get(key) is move:
                    self._end(key, tensor)
            elif to == self._name:
                tensor.host, further, _ = tensor.host.receive(message)
                self._redirect(tensor, further)
                self.carry(tensor, further)
            elif isinstance(message, CopyReceived):
                self._tell(tensor, "copied")
            elif isinstance(message, Noted) and move is not None:
                self._send(key, "noted")
            elif isinstance(message, CopyData) and move is not None:
                self._send_copy(key, tensor, move)

    def _end(self, key: Key, tensor: MasterCopy) -> None:
        del self._moves[key]
        if tensor.host.status == "absent":
            self._tensors.pop(key, None)
            self.done += 1
        self._start_next()

    def _hear(self, who: str, frame: TensorFrame) -> None:
        """Take an answer of a new host."""
        key = str(frame.options.get("job", "")), frame.tensor
        move, tensor = self._moves.get(key), self._tensors.get(key)
        if (
            move is None
            or tensor is None
            or (who, frame.options.get("migration")) != (move.target, move.migration)
        ):
            return
        match frame.options.get("do"):
            case "ready" if move.manager is None:
                move.manager, sends = MigrationManager(move.migration - 1).start(self._name, move.target)
                self.carry(tensor, sends)
                self.begin_round(tensor)
            case "refused":
                log.warning("tensor %s of %s stays: %s", key[1], key[0], frame.options.get("why"))
                del self._moves[key]
            case "unread":
                move.wire, move.copied, move.segment = True, -inf, None
                self.carry(tensor, tensor.host.outstanding())
            case "copied":
                move.shares, move.segment = False, None
                self._to_host(tensor, CopyReceived(move.migration))
            case "pushed" if move.manager is not None:
                move.manager, sends = move.manager.receive(WorkersDone(move.migration, move.target))
                self.carry(tensor, sends)

    def _to_host(self, tensor: MasterCopy, message: CopyReceived | Noted) -> None:
        tensor.host, sends, _ = tensor.host.receive(message)
        self.carry(tensor, sends)

    def _send(self, key: Key, do: str) -> None:
        move = self._moves[key]
        options = {"do": do, "job": key[0], "migration": move.migration}
        self._links.send(move.target, move.where, lambda: TensorFrame(Kind.MOVE, key[1], options=options))

    def _send_copy(self, key: Key, tensor: MasterCopy, move: _Move) -> None:
        now, number = time.monotonic(), tensor.host.round
        if now - move.copied <= _REPEAT_COPY:
            return
        move.copied = move.sent = now
        move.shares = False
        near = not move.wire and tensor.nbytes >= _LEAST_SHARED and may_be_near(move.where)
        move.shares = near and sum(one.shares for one in self._moves.values()) < _MOST_SHARED

        def make() -> TensorFrame:
            parts, options = tensor.copied()
            options |= {"do": "copy", "job": key[0], "migration": move.migration}
            if move.shares:
                options["near"] = bool(tensor.near)
                with contextlib.suppress(InfraError):  # the system has no such memory
                    move.segment = share_copy(parts)
                    options["memory"] = list(move.segment.name)
                    return TensorFrame(Kind.MOVE, key[1], number, options=options)
            return TensorFrame(Kind.MOVE, key[1], number, b"".join(parts), options=options)

        self._links.send(move.target, move.where, make)

    # --- the new host ---------------------------------------------------------------------------------------

    def receive(self, who: str, connection: bytes, frame: TensorFrame) -> None:
        """Take what an old host sends.

        Args:
            who: name of the old host.
            connection: of it.
            frame: of the kind ``MOVE``.

        Raises ``AggregationError`` for what is none of it.
        """
        job, migration = frame.options.get("job"), frame.options.get("migration")
        if not isinstance(job, str) or not job or not isinstance(migration, int) or migration < 1:
            raise AggregationError("a move must have the training and the number of the migration")
        key = job, frame.tensor
        tensor = self._tensors.get(key)
        if frame.options.get("do") == "expect":
            self._expect(key, tensor, who, migration, connection)
            return
        if tensor is None or tensor.expects != migration:
            return
        tensor.mover = connection
        match frame.options.get("do"):
            case "copy" if tensor.host.status == "absent":
                self._take_copy(tensor, who, migration, frame)
            case "copy" if tensor.host.status == "serving":
                self._tell(tensor, "copied")
            case "forget" if tensor.host.status == "absent":
                self._give_up(tensor)
            case "noted":
                self._to_host(tensor, Noted(migration))
            case "ask":
                if tensor.host.status == "serving":
                    self._tell(tensor, "copied")
                self.carry(tensor, tensor.host.outstanding())
            case "copy" | "forget":
                pass  # it is being taken
            case _:
                raise AggregationError("a move must be expect, copy, noted, ask or forget")

    def _expect(
        self, key: Key, tensor: MasterCopy | None, who: str, migration: int, connection: bytes
    ) -> None:
        options = {"do": "ready", "job": key[0], "migration": migration}
        if tensor is None or (tensor.host.status == "absent" and tensor.expects < migration):
            waiting = tensor.waiting if tensor is not None else []
            tensor = self._tensors[key] = MasterCopy.expected(self._name, *key, migration)
            tensor.waiting, tensor.source = waiting, who
        elif tensor.expects != migration:
            options |= {"do": "refused", "why": f"aggregator {self._name} has a copy of it already"}
        tensor.mover = connection
        self._answer(connection, TensorFrame(Kind.MOVE, key[1], options=options))

    def _take_copy(self, tensor: MasterCopy, who: str, migration: int, frame: TensorFrame) -> None:
        try:
            frame = shared_copy(frame)
        except InfraError:
            options = {"do": "unread", "job": tensor.job_id, "migration": migration}
            self._answer(tensor.mover, TensorFrame(Kind.MOVE, tensor.name, options=options))
            return
        begin = CopyBegin(migration, who, frame.round, frozenset({TRAINING}))
        tensor.host, _, _ = tensor.host.receive(begin)
        # workers of this machine will read it here: its memory is made while they compute, not when they wait
        near = frame.options.get("near") is True

        def filled() -> None:
            if self._tensors.get((tensor.job_id, tensor.name)) is not tensor:
                return  # its training was removed, or another copy is expected
            if near:
                tensor.slots = self._slots(tensor.job_id, tensor.parameters.nbytes)
                self._apart(tensor.warm, ready)
            else:
                ready()

        def ready() -> None:
            if tensor.awaited:
                self.waited += time.monotonic() - tensor.awaited
                tensor.awaited = 0.0
            tensor.host, sends, _ = tensor.host.receive(CopyData(migration, who))
            self.carry(tensor, sends)
            tensor.busy = False
            self._release(tensor)

        self._apart(lambda: tensor.fill(frame), filled)

    def note_early(self, tensor: MasterCopy, push: TensorFrame) -> None:
        """Take note of a gradient that came before its tensor: with the last of a view the training waits."""
        if tensor.host.status == "serving" or tensor.awaited:
            return
        wanted = push.kind, push.round, push.view
        same = (one for _, one in tensor.waiting if (one.kind, one.round, one.view) == wanted)
        if len({one.place for one in same}) >= push.places:
            tensor.awaited = time.monotonic()

    def _tell(self, tensor: MasterCopy, do: str) -> None:
        options = {"do": do, "job": tensor.job_id, "migration": tensor.host.migration}
        if tensor.mover:
            self._answer(tensor.mover, TensorFrame(Kind.MOVE, tensor.name, options=options))
