"""The aggregators of a launcher's run, and the workers of a generation that train over them.

Aggregators are processes beside the launcher, which is not interrupted as workers' nodes are. They outlive a
generation; one that has ended is replaced before the next.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ebbflow.infra.aggregation.process import AggregatorProcess
from ebbflow.infra.errors import AggregationError
from ebbflow.infra.training.channel.exchange import Exchange, GenerationChannel
from ebbflow.infra.training.channel.meeting import Meeting
from ebbflow.infra.training.channel.wire import Heartbeat, Order
from ebbflow.infra.training.launcher.members import Members
from ebbflow.infra.training.service.joining import AGGREGATORS
from ebbflow.infra.training.service.world import COMES_LATER
from ebbflow.planners.aggregation.membership import Membership
from ebbflow.planners.training.failures.recovery import WorkerLoss, recovery_of


class AggregatorGroup:
    """Starts and ends a run's aggregators. Used by one thread.

    Args:
        host: address of the interface that they listen on.
        count: number of them.
    """

    def __init__(self, host: str, count: int) -> None:
        self._host, self._count = host, count
        self._started = 0
        self._processes: dict[str, AggregatorProcess] = {}

    def start(self) -> None:
        """Start what is missing. Raises ``AggregationError``."""
        for name in [name for name, one in self._processes.items() if one.ended]:
            self._processes.pop(name).close()
        while len(self._processes) < self._count:
            self._started += 1
            name = f"aggregator-{self._started}"
            self._processes[name] = AggregatorProcess(name, self._host, linger_s=_LINGER)

    @property
    def environment(self) -> dict[str, str]:
        """Return what workers need to find them."""
        found = [
            {"name": name, "address": one.where.address, "public": one.where.public}
            for name, one in self._processes.items()
        ]
        return {AGGREGATORS: json.dumps(found)}

    @property
    def pids(self) -> dict[str, int]:
        """Return their process IDs, by name."""
        return {name: one.pid for name, one in self._processes.items()}

    def ended(self) -> list[str]:
        """Return those whose process is gone."""
        return [name for name, one in self._processes.items() if one.ended]

    def admit(self, job_id: str, peers: Mapping[str, str]) -> None:
        """Admit nodes of a generation by their public keys. Raises ``AggregationError``."""
        self._all(do="admit", job=job_id, workers=dict(peers))

    def remove(self, job_id: str) -> None:
        """Forget a generation's tensors and nodes."""
        self._all(do="remove", job=job_id)

    def status(self) -> dict[str, dict[str, int]]:
        """Return the counts of each that runs."""
        found = {}
        for name, one in self._processes.items():
            if not one.ended:
                found[name] = {key: value for key, value in one.command(do="status").items() if key != "done"}
        return found

    def close(self) -> None:
        """End all of them. May be called twice."""
        for one in self._processes.values():
            one.close()
        self._processes = {}

    def _all(self, **values: object) -> None:
        for one in self._processes.values():
            try:
                one.command(**values)
            except AggregationError:
                if not one.ended:
                    raise


_LINGER = 30.0  # seconds that aggregators outlive a launcher that is gone, in which workers save


@dataclass(slots=True)
class Workforce:
    """The workers of one generation over the aggregation service, as its launcher sees them.

    Args:
        aggregators: that they train over.
        exchange: with their nodes.
        number: of the generation.
        silence: seconds without a sign of life after which a worker is lost.
        mirrors: further aggregators that hold each tensor.
    """

    aggregators: AggregatorGroup
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
    _channel: GenerationChannel | None = None
    _lost: set[str] = field(default_factory=set)  # aggregators
    _next: int = 0

    def open(self, ranks: Mapping[str, range], by_key: Mapping[str, range], store: int) -> GenerationChannel:
        """Begin: return the channel to the workers. ``by_key`` has the ranks by their nodes' key names."""
        self.ranks = dict(ranks)
        self.started = dict.fromkeys(ranks, 1)
        self._next = max(own.stop for own in ranks.values())
        self.meeting = Meeting(Membership(range(self._next)))
        self.aggregators.admit(self._job, {key: self.exchange.public_of(key) for key in by_key})
        self._channel = self.exchange.open(self.number, by_key, store, self.meeting)
        return self._channel

    def close(self) -> None:
        """End: its tensors are forgotten."""
        self.aggregators.remove(self._job)

    @property
    def formed(self) -> bool:
        """Tell whether all that began have met."""
        return self.meeting.membership.formed

    def take_in(self, name: str, key: str, slots: int) -> range:
        """Return the ranks of a node's processes, which are to join the others."""
        own = range(self._next, self._next + slots)
        self._next = own.stop
        self.ranks[name] = own
        self.started[name] = self.started.get(name, 0) + 1
        self.gone.pop(name, None)
        self.retired.discard(name)
        self.aggregators.admit(self._job, {key: self.exchange.public_of(key)})
        assert self._channel is not None
        self._channel.extend(key, own)
        return own

    def orders(
        self, placement: Mapping[str, int], order: Order, members: Members, logs: Mapping[str, str]
    ) -> dict[str, Order]:
        """Return what to send to nodes whose processes are to join the others.

        Args:
            placement: slots of each.
            order: as the generation's.
            members: all nodes.
            logs: directory of each node's logs.
        """
        found = {}
        for name, slots in placement.items():
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

    def recovers(self, left: int, minimum: int, *, stopping: bool, script_failed: bool) -> bool:
        """Return whether the others train on with ``left`` slots; see ``WorkerLoss``."""
        loss = WorkerLoss(
            service=True,
            formed=self.formed,
            left=left,
            minimum=minimum,
            stopping=stopping,
            script_failed=script_failed,
        )
        return recovery_of(loss).in_place

    def leave_dead(self, name: str, beat: Heartbeat | None) -> None:
        """Let the others train on without processes of a node that it shows as gone."""
        for rank in beat.ranks if beat is not None and beat.generation == self.number else ():
            if rank.state in "XZ" and rank.rank in self.ranks.get(name, ()):
                self.leave_rank(rank.rank)

    def leave(self, name: str, how: str) -> None:
        """Let the others train on without a node's workers, at once."""
        self.gone[name] = how
        for rank in self.ranks.pop(name, range(0)):
            self.leave_rank(rank)

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

    def silent(self) -> dict[str, str]:
        """Return nodes of members that show no sign of life, and how long."""
        if not self.formed:
            return {}
        now, members = time.monotonic(), set(self.meeting.membership.view.members)
        found = {}
        for name, own in self.ranks.items():
            for rank in members.intersection(own):
                if now - self.meeting.heard.setdefault(rank, now) > self.silence:
                    found[name] = f"rank {rank} showed no sign of life for {self.silence:g} s"
        return found

    @property
    def has_copies(self) -> bool:
        """Tell whether every tensor is still on an aggregator, whichever have ended."""
        return len(self._lost) <= self.mirrors

    def lost_aggregators(self) -> list[str]:
        """Return aggregators that ended since the last look, of which the workers are told."""
        fresh = [name for name in self.aggregators.ended() if name not in self._lost]
        for name in fresh:
            self._lost.add(name)
            assert self._channel is not None
            self._channel.meet(lambda meeting, name=name: meeting.membership.lose_aggregator(name))  # type: ignore[misc]
        return fresh

    @property
    def _job(self) -> str:
        return f"generation-{self.number}"
