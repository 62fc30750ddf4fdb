"""The workers of a generation that come and go while the others train on."""

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ebbflow.infra.errors import InfraError
from ebbflow.infra.training.channel.exchange import Exchange, GenerationChannel
from ebbflow.infra.training.channel.meeting import Meeting
from ebbflow.infra.training.channel.wire import Heartbeat, Order
from ebbflow.infra.training.launcher.members import Members
from ebbflow.infra.training.process.channel import Report
from ebbflow.infra.training.process.members import COMES_LATER
from ebbflow.infra.training.service.aggregator_sets import AggregatorSet
from ebbflow.planners.aggregation.membership import Membership
from ebbflow.planners.training.failures.recovery import Recovery, WorkerLoss, recovery_of

log = logging.getLogger(__name__)


_UNKNOWN = "no process is left that knows the state of the training"
_STARTS = 3  # times that a node's processes are started within a generation
_SETTLED = 60.0  # seconds of training with the others after which they count anew
_ADMISSION = 300.0  # seconds in which aggregators must admit a node that joins


@dataclass(slots=True)
class Workforce:
    """The workers of one generation that come and go, as its launcher sees them.

    Args:
        aggregators: that they train over; ``None`` where they all-reduce gradients.
        exchange: with their nodes.
        number: of the generation.
        silence: seconds without a sign of life after which a worker is lost.
        mirrors: further aggregators that hold each tensor.
    """

    aggregators: AggregatorSet | None
    exchange: Exchange
    number: int
    silence: float
    mirrors: int = 0
    meeting: Meeting = field(init=False)
    ranks: dict[str, range] = field(default_factory=dict)  # by node
    started: dict[str, int] = field(default_factory=dict)  # times, by node
    idle: list[str] = field(default_factory=list)  # nodes that are there, and whose processes are gone
    gone: dict[str, str] = field(default_factory=dict)  # nodes that left while others trained on, and how
    retired: set[str] = field(default_factory=set)  # nodes that were asked to leave
    obstacle: str = ""  # why they cannot change, of what the script asks for or does
    first: str = ""  # why the first of them must stay
    begun: bool = False  # whether the script has said whether they can
    _channel: GenerationChannel | None = None
    _dismissed: set[str] = field(default_factory=set)  # nodes whose workers need not wait to join any more
    _since: dict[str, float] = field(default_factory=dict)  # when nodes' workers were found to train
    _asked: dict[str, float] = field(default_factory=dict)  # when aggregators were asked to admit nodes
    _lost: set[str] = field(default_factory=set)  # aggregators
    _deserted: bool = False
    _next: int = 0

    def open(self, ranks: Mapping[str, range], by_key: Mapping[str, range], store: int) -> GenerationChannel:
        """Begin: return the channel to the workers. ``by_key`` has the ranks by their nodes' key names."""
        self.ranks = dict(ranks)
        self.started = dict.fromkeys(ranks, 1)
        self._next = max(own.stop for own in ranks.values())
        self.meeting = Meeting(Membership(range(self._next)))
        if self.aggregators is not None:
            self.aggregators.admit(self._job, self._publics(by_key))
        self._channel = self.exchange.open(self.number, by_key, store, self.meeting)
        return self._channel

    def close(self) -> None:
        """End: its tensors are forgotten, at once where aggregators can be told."""
        try:
            if self.aggregators is not None:
                self.aggregators.remove(self._job)
        except InfraError as exc:
            log.warning("tensors of %s are not removed: %s", self._job, exc)

    @property
    def formed(self) -> bool:
        """Tell whether all that began have met, and those that all-reduce gradients train."""
        return self.meeting.membership.formed and (self.begun or self.aggregators is not None)

    @property
    def changes(self) -> bool:
        """Tell whether workers may come and go."""
        return self.formed and not self.obstacle

    def hear(self, report: Report) -> bool:
        """Take note of what a process says of them; return whether some wait for a change that cannot be any more."""
        if report.kind not in ("started", "members"):
            return False
        self.obstacle = str(report.content.get("fixed", ""))
        self.first = self.first or str(report.content.get("first", ""))
        self.begun = self.begun or report.kind == "members" or bool(self.obstacle)
        waiting = any(name in self.retired or self.outside(name) for name in self.ranks)
        return bool(self.obstacle) and self.formed and waiting

    def must_stay(self, name: str) -> str:
        """Return why the others do not train on without a node; empty where they do."""
        members = self.meeting.membership.view.members
        return self.first if members and members[0] in self.ranks.get(name, ()) else ""

    def member(self, rank: int) -> int:
        """Return the rank, as the launcher numbers them, of the worker that is at this place among the members."""
        members = self.meeting.membership.view.members
        return members[rank] if 0 <= rank < len(members) else rank

    def may_start(self, name: str) -> bool:
        """Tell whether processes may be started on a node: not where they were lost again and again."""
        return self.started.get(name, 0) < _STARTS

    def joining(self, name: str) -> bool:
        """Tell whether a node's workers were to take over the training's state, and have never trained yet."""
        return self.formed and self.outside(name) and name not in self._since

    def deserted(self, names: Iterable[str]) -> str:
        """Return that all which trained are gone, where those that are left would wait forever to join; else nothing.

        Two can be lost so close together that neither loss shows it. ``names``: the nodes whose agents run.
        """
        left = list(names)
        if self.formed and not self.meeting.membership.view.members and left and all(map(self.joining, left)):
            self._deserted = True
        return _UNKNOWN if self._deserted else ""

    def outside(self, name: str) -> bool:
        """Tell whether none of a node's workers trains with the others yet."""
        return not set(self.ranks.get(name, ())) & set(self.meeting.membership.view.members)

    def take_in(self, name: str, key: str, slots: int) -> range:
        """Return the ranks of a node's processes, which are to join the others."""
        own = range(self._next, self._next + slots)
        self._next = own.stop
        self.ranks[name] = own
        self.started[name] = self.started.get(name, 0) + 1
        self.gone.pop(name, None)
        self._since.pop(name, None)
        self.retired.discard(name)
        assert self._channel is not None
        self._channel.extend(key, own)
        return own

    def orders(
        self, placement: Mapping[str, int], order: Order, members: Members, logs: Mapping[str, str]
    ) -> dict[str, Order]:
        """Return what to send to nodes whose processes are to join the others, as far as aggregators admit them.

        Args:
            placement: slots of each.
            order: as the generation's.
            members: all nodes.
            logs: directory of each node's logs.
        """
        found = {}
        for name, slots in placement.items():
            if not self._admits(name, members[name].key):
                continue
            own = self.take_in(name, members[name].key, slots)
            members[name].wire.forget_end(self.number)
            found[name] = replace(
                order,
                nodes=1,
                slots=slots,
                node=0,
                first_rank=own.start,
                world=own.stop,
                logs=logs[name],
                environment={**order.environment, COMES_LATER: "1"},
            )
        return found

    def recovery(
        self, name: str, left: int, minimum: int, *, stopping: bool, script_failed: bool
    ) -> Recovery:
        """Return whether the others train on with ``left`` slots, ``name``'s not counted; see ``WorkerLoss``."""
        loss = WorkerLoss(
            service=self.aggregators is not None,
            replicas=self.aggregators is None,
            obstacle=self.obstacle or self._none_but(name) or self.must_stay(name),
            formed=self.formed,
            left=left,
            minimum=minimum,
            stopping=stopping,
            script_failed=script_failed and not self.joining(name),
        )
        return recovery_of(loss)

    def _none_but(self, name: str) -> str:
        """Return that no process is left that can tell those that join where the training is; empty otherwise.

        Aggregators have parameters and moments. How far the training is in its data is known to its workers alone.
        """
        if not self.formed or any(not self.outside(node) for node in self.ranks if node != name):
            return ""
        return _UNKNOWN

    def follow(self, name: str, beat: Heartbeat | None) -> None:
        """Take note of whether a node's workers train; let the others train on without those it shows as gone.

        In an all-reduce without all of the node's: its agent ends the others, of which one loss after another would
        break the group.
        """
        now, own = time.monotonic(), self.ranks.get(name, range(0))
        if not self.outside(name) and now - self._since.setdefault(name, now) >= _SETTLED:
            self.started[name] = 1
        for rank in beat.ranks if beat is not None and beat.generation == self.number else ():
            if rank.state in "XZ" and rank.rank in own:
                for one in own if self.aggregators is None else (rank.rank,):
                    self.leave_rank(one)

    def leave(self, name: str, how: str) -> None:
        """Let the others train on without a node's workers, at once."""
        self.gone[name] = how
        for rank in self.ranks.pop(name, range(0)):
            self.leave_rank(rank)

    def end_node(self, name: str) -> None:
        """Let the others end their step, and save, without a node's workers."""
        met = self.meeting.membership.formed and not self.obstacle  # whether or not they may change
        for rank in self.ranks.get(name, ()) if met else ():
            self.leave_rank(rank)

    def stranded(self, names: Iterable[str]) -> list[str]:
        """Return nodes, once, whose workers wait to join a training that has ended without them."""
        left = [name for name in names if name not in self._dismissed]
        if not all(self.joining(name) for name in left):
            return []
        self._dismissed.update(left)
        return left

    def leave_rank(self, rank: int) -> None:
        """Let the others train on without a worker."""
        assert self._channel is not None
        self._channel.meet(lambda meeting: meeting.membership.leave(rank))

    def retire(self, name: str) -> None:
        """Let a node's workers leave at the end of a step."""
        assert self._channel is not None
        self.retired.add(name)
        for rank in self.ranks.get(name, range(0)):
            self._channel.meet(lambda meeting, rank=rank: meeting.membership.retire(rank))  # type: ignore[misc]

    def stay(self, name: str) -> None:
        """Let a node's workers train on which were asked to leave, unless they have."""
        own = self.ranks.get(name, range(0))

        def withdraw(meeting: Meeting) -> None:
            if set(own) & set(meeting.membership.view.members):
                self.retired.discard(name)
            for rank in own:
                meeting.membership.stay(rank)

        assert self._channel is not None
        self._channel.meet(withdraw)

    def silent(self) -> dict[str, str]:
        """Return nodes of members that show no sign of life while others do, and how long.

        Where nobody does it may be the launcher that hears nobody, and those that it would end train on.
        """
        if not self.formed:
            return {}
        now = self.exchange.listened
        members = self.meeting.membership.view.members
        heard = {rank: self.meeting.heard.setdefault(rank, now) for rank in members}
        latest = max(heard.values(), default=now)
        found = {}
        for name, own in self.ranks.items():
            for rank in heard.keys() & set(own):
                if latest - heard[rank] > self.silence:
                    found[name] = f"rank {rank} showed no sign of life for {self.silence:g} s"
        return found

    @property
    def has_state(self) -> bool:
        """Tell whether a process still knows where the training is, and every tensor is on an aggregator."""
        return not self._deserted and len(self._lost) <= self.mirrors

    def lost_aggregators(self) -> list[str]:
        """Return aggregators that ended since the last look, of which the workers are told."""
        ended = self.aggregators.ended() if self.aggregators is not None else []
        fresh = [name for name in ended if name not in self._lost]
        for name in fresh:
            self._lost.add(name)
            assert self._channel is not None
            self._channel.meet(lambda meeting, name=name: meeting.membership.lose_aggregator(name))  # type: ignore[misc]
        return fresh

    def _admits(self, name: str, key: str) -> bool:
        """Return whether a node may join; one that aggregators do not admit in time does not start again."""
        if self.aggregators is None:
            return True
        now, why = time.monotonic(), f"no admission in {_ADMISSION:g} s"
        late = now - self._asked.setdefault(name, now) > _ADMISSION
        try:
            peers = self._publics([key])
            if peers and self.aggregators.admits(self._job, peers):
                del self._asked[name]
                return True
        except InfraError as exc:
            late, why = True, str(exc)
        if late:
            log.warning("node %s does not join: %s", name, why)
            self.started[name] = _STARTS
            del self._asked[name]
        return False

    def _publics(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the public keys of nodes that are there."""
        found = {key: self.exchange.public_of(key) for key in keys}
        return {key: public for key, public in found.items() if public}

    @property
    def _job(self) -> str:
        return f"generation-{self.number}"
