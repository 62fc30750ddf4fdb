"""The nodes of a run as its launcher sees them: started, ready, lost."""

import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.training.channel.wire import Entry, Heartbeat, Order, is_loopback
from ebbflow.infra.training.launcher.pool import NodePool

if TYPE_CHECKING:
    from ebbflow.infra.training.channel.exchange import Exchange, Wire

Note = Callable[..., None]  # note(kind, **content)


@dataclass(frozen=True, slots=True)
class Loss:
    """How a node went."""

    how: str
    hung: bool = False  # it was there but did not move


@dataclass(slots=True)
class SlotTime:
    """The time that nodes spend in a generation, which they may join and leave while it runs.

    Args:
        begun: when those came that are not said to have come later. Times are in seconds, of one clock.
    """

    begun: float
    _since: dict[str, float] = field(default_factory=dict)  # of those that came later
    _spent: float = 0.0  # slot-seconds of those that have left
    _left: set[str] = field(default_factory=set)

    def enter(self, name: str, now: float) -> None:
        """Take note that a node has come."""
        self._since[name] = now
        self._left.discard(name)

    def leave(self, name: str, slots: int, now: float) -> None:
        """Take note that a node has left; may be called twice."""
        if name not in self._left:
            self._left.add(name)
            self._spent += slots * (now - self._since.pop(name, self.begun))

    def total(self, there: Mapping[str, int], now: float) -> float:
        """Return the slot-seconds so far, with nodes and their slots, of which some may have left."""
        stay = [(self._since.get(name, self.begun), n) for name, n in there.items() if name not in self._left]
        return self._spent + sum(n * (now - since) for since, n in stay)


@dataclass(slots=True)
class Member:
    """One node that has been started."""

    name: str
    slots: int
    key: str
    wire: "Wire"
    started: float
    heard: float  # at its latest sign of life, or its start, in seconds for which the launcher has listened
    beat: Heartbeat | None = None
    paused: float | None = None  # since when it is known to be paused, in the same seconds

    @property
    def ready(self) -> bool:
        return self.beat is not None and not self.beat.preparing

    @property
    def problem(self) -> str:
        """Return why it cannot prepare the user's code; empty where that is not known."""
        return self.beat.problem if self.beat is not None else ""

    @property
    def notice(self) -> float | None:
        return self.beat.notice if self.beat else None


class Members:
    """Starts and ends nodes, and follows their signs of life. Used by the launcher's loop only."""

    def __init__(
        self,
        pool: NodePool,
        exchange: "Exchange",
        run: str,
        clock: Clock,
        note: Note,
        *,
        grace: float,
        preload: tuple[str, ...],
        silence: float,
        stopped: float,
        prepare: Order | None = None,
    ) -> None:
        self._pool, self._exchange, self._run = pool, exchange, run
        self._clock, self._note = clock, note
        self._grace, self._preload = grace, preload
        self._silence, self._stopped = silence, stopped
        self._prepare = prepare  # what a node does first
        self._members: dict[str, Member] = {}
        self.named: set[str] = set()  # all names ever used
        self.refused: dict[str, str] = {}  # why a node could not be started

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def __contains__(self, name: str) -> bool:
        return name in self._members

    @property
    def names(self) -> list[str]:
        return list(self._members)

    def start(self, placement: Mapping[str, int]) -> None:
        """Start the nodes of ``placement`` that are not there; ``refused`` says of those that cannot be why."""
        for name, slots in placement.items():
            if name in self._members and self._members[name].slots != slots:
                self.end([name])  # its share of the machine was made for another number of slots
            if name not in self._members:
                key = f"{name}-{secrets.token_hex(4)}"
                entry = Entry(
                    launcher=self._exchange.address,
                    server=self._exchange.public,
                    run=self._run,
                    name=name,
                    key=key,
                    address="",
                    folder="",
                    preload=self._preload,
                    grace=self._grace,
                    tunnel=not is_loopback(self._pool.host),
                    prepare=self._prepare is not None,
                )
                self.named.add(name)
                wire = self._exchange.wire(key)
                try:
                    self._pool.start(name, slots, entry, wire.admit)
                except ClusterError as exc:
                    wire.close()
                    self.refused[name] = str(exc)
                    self._note("node-refused", node=name, why=str(exc))
                    continue
                if self._prepare is not None:
                    wire.send(self._prepare)
                now, heard = self._clock.now(), self._exchange.listened
                self._members[name] = Member(name, slots, key, wire, now, heard)
                self._note("node-started", node=name, slots=slots)

    def end(self, names: Iterable[str]) -> None:
        """End nodes that are not needed any more."""
        for name in names:
            if (member := self._members.pop(name, None)) is None:
                continue
            member.wire.close()
            try:
                self._pool.end(name)
                self._note("node-ended", node=name)
            except ClusterError as exc:  # its name is not used again; the training continues without it
                self._note("node-stuck", node=name, why=str(exc))

    def look(self) -> dict[str, Loss]:
        """Take note of all signs of life and return the nodes lost since the last look, and how they went."""
        gone: dict[str, Loss] = {}
        for name, member in list(self._members.items()):
            try:
                how = self._pool.lost(name)
            except ClusterError as exc:
                how = str(exc)
            if not how:
                self._hear(member)
            loss = Loss(how) if how else self._heartbeat_loss(member)
            if loss is not None:
                gone[name] = loss
                self._note("node-lost", node=name, how=loss.how)  # its processes take their time to end
                self.end([name])
        return gone

    def late(self, name: str, bound: float) -> bool:
        """Return whether a node is over ``bound`` s behind: since it was started, or last said that it prepares."""
        member = self._members[name]
        behind = not member.ready and self._exchange.listened - member.heard > bound
        return bool(member.problem) or behind

    def usable(self, placement: Mapping[str, int], more: Iterable[str] = ()) -> dict[str, int]:
        """Return the slots of nodes of ``placement``, and of ``more``, that are there and have no notice."""
        there = {**placement, **{name: self[name].slots for name in more if name in self}}
        return {name: slots for name, slots in there.items() if name in self and self[name].notice is None}

    def problems(self) -> dict[str, str]:
        """Return why nodes cannot prepare the user's code, by node."""
        return {name: member.problem for name, member in self._members.items() if member.problem}

    def send(self, name: str, order: Order) -> None:
        self._members[name].wire.send(order)

    def log(self, name: str) -> str:
        return self._pool.log(name)

    def _hear(self, member: Member) -> None:
        """Take note of a node's sign of life, where there is a new one."""
        beat, name = member.wire.beat(), member.name
        if beat is None or (member.beat is not None and beat.number == member.beat.number):
            return
        if beat.problem and not member.problem:
            self._note("node-unprepared", node=name, problem=beat.problem)
        elif beat.preparing and member.beat is None:
            self._note("node-prepares", node=name)
        elif not (beat.preparing or member.ready):
            self._note("node-ready", node=name, seconds=round(self._clock.now() - member.started, 3))
        if beat.notice is not None and beat.notice != member.notice:
            self._note("node-notice", node=name, deadline=beat.notice)
        member.beat, member.heard = beat, self._exchange.listened

    def _heartbeat_loss(self, member: Member) -> Loss | None:
        """Tell how a node that does not move any more shows that; ``None`` for one that moves."""
        now = self._exchange.listened
        if not self._pool.paused(member.name):
            member.paused = None
        elif member.paused is None:
            member.paused = now
        elif now - member.paused >= self._stopped:
            return Loss(f"it was paused for {self._stopped:g} s", hung=True)
        if member.ready and now - member.heard >= self._silence:
            return Loss(f"it missed heartbeats for {self._silence:g} s", hung=True)
        return None
