"""The spot-trace replay for a recovery policy of our own: one restart for losses of one moment, growth, notices.

Speeds, costs and the accounting of losses are those of checkpoint–restart (``CheckpointRestart``). Different are:
losses of one moment cost one restart; nodes that take no part can leave without one; nothing restarts with too few
nodes; a checkpoint counts if it was finished before the loss; and the policy says when to save and when to grow.
"""

import heapq
from math import inf

from ebbflow.infra.simulation.traces.rows import SpotRow
from ebbflow.planners.model.recovery import RecoveryInput, RecoveryPolicy
from tests.benchmarks.spot.models import SpotModel, position
from tests.benchmarks.spot.recovery import CHECKPOINT, HOUR, PIPELINE_NODES, RENDEZVOUS, Event, Replay


class PolicyReplay(Replay):
    """Replays a spot trace under ``policy``.

    ``notice`` is how many ms ahead a removal is announced (0: not at all). In the public engine steps go on until a
    restart is over; with ``strict`` nothing trains between a loss and the end of the restart.
    """

    def __init__(
        self,
        model: SpotModel,
        rows: list[SpotRow],
        policy: RecoveryPolicy,
        notice: int = 0,
        strict: bool = False,
    ) -> None:
        super().__init__(model, rows)
        self.policy, self.notice, self.strict = policy, notice, strict
        self.leaving = _leaving(rows) if notice else {}
        self.members: set[int] = set()  # nodes of the running system
        self.last_checkpoint: int | None = None
        self.unsaved = 0  # ms of step time
        self.gaps: tuple[float, ...] = ()  # s between losses
        self.last_loss: int | None = None
        self.booked = 0  # entries of the records that no later loss takes back again
        self.node_ms = 0
        self.node_since = 0
        self.saving_since: int | None = None
        self.meeting: Event | None = None  # the rendezvous that counts
        self.restarting_since = 0

    def restart_delay(self) -> int:
        return self.model.restart_on(self.nodes) - self.model.checkpoint

    def speed(self, nodes: int) -> float:
        return self.model.restarting[position(nodes)]

    def on_add(self, event: Event) -> None:
        self._observe(event.at)
        super().on_add(event)

    def on_ready(self, event: Event) -> None:
        if event.node not in self.creating:
            return
        self.creating.discard(event.node)
        self.usable[event.node] = None
        if self.state == "stopped":
            self._restart_or_stop(event.at)
        elif self.state == "restarting":
            self.listed.append(event.node)

    def on_remove(self, event: Event) -> None:
        now = event.at
        self._observe(now)
        self.creating.discard(event.node)
        self.usable.pop(event.node, None)
        member = event.node in self.members
        self.members.discard(event.node)
        if member:
            self.book_loss(now)
        if self.state == "restarting" and event.node in self.listed:
            self.listed.remove(event.node)
            if now > self.restarting_since or len(self.usable) < PIPELINE_NODES:
                # Those who had met so far meet again; of the first try only the time that passed counts.
                self.restart -= self.restart_delay() - (now - self.restarting_since)
                self._restart_or_stop(now)
        elif self.state == "running" and member:
            self._restart_or_stop(now)

    def book_loss(self, now: int) -> None:
        """Take back what was not saved."""
        if now != self.last_loss:
            self.gaps, self.last_loss = (*self.gaps, self._age(now)), now
        self._take_back()
        saving, self.saving_since = self.saving_since, None
        if saving is not None:
            self.checkpoint += now - saving
        if self.strict:
            self.version += 1
            self.members = set()
        elif saving is not None:
            self.version += 1
            self.begin_step(now)

    def _take_back(self) -> None:
        """Book the steps since the last checkpoint or loss by the rule of ``lose_since``, each in one loss only."""
        kept = self.booked
        if self.last_checkpoint is not None and self.last_checkpoint / HOUR in self.times:
            kept = max(kept, self.times.index(self.last_checkpoint / HOUR))
        elif self.last_checkpoint is not None:
            kept = len(self.times)
        lost = len(self.times) - kept
        if lost > 0:
            self.values[kept:] = [0.0] * lost
            self.fallback += (lost - 1) * self.step_time
        self.booked = len(self.times)
        self.unsaved = 0

    def _age(self, now: int) -> float:
        since = self.last_loss if self.last_loss is not None else self.first_start
        return (now - (now if since is None else since)) / 1000

    def _restart_or_stop(self, now: int) -> None:
        if len(self.usable) >= PIPELINE_NODES:
            self.begin_restart(now)
        else:
            self.version += 1
            self.state, self.listed, self.members, self.meeting = "stopped", [], set(), None

    def begin_restart(self, now: int) -> None:
        delay = self.restart_delay()
        self.state, self.listed, self.restarting_since = "restarting", list(self.usable), now
        self.restart += delay
        self.restarts += 1
        self.meeting = Event(now + delay, RENDEZVOUS)
        heapq.heappush(self.heap, self.meeting)

    def on_rendezvous(self, event: Event) -> None:
        if event is not self.meeting:
            return
        self.version += 1
        self.saving_since = None
        self.listed = []
        self.members = set(self.usable)
        self.start_training(event.at)

    def on_checkpoint(self, event: Event) -> None:
        """A checkpoint is finished."""
        if event.version != self.version:
            return
        self.saving_since = None
        self.checkpoint += self.model.checkpoint
        self.checkpoints += 1
        self.last_checkpoint = event.at
        self.previous_end = event.at
        self.unsaved = 0
        self._go_on(event.at)

    def on_step(self, event: Event) -> None:
        if event.version != self.version:
            return
        now = event.at
        self.record(now)
        self.idle += (now - self.previous_end) * self.model.idle_of(self.nodes) / len(self.usable)
        self.previous_end = now
        self.unsaved += self.step_time
        seen = self._seen(now)
        if self.policy.save(seen) or self._grows(seen):
            self.saving_since = now
            self.push(now + self.model.checkpoint, CHECKPOINT)
        else:
            self.begin_step(now)

    def _grows(self, seen: RecoveryInput) -> bool:
        return self.state == "running" and self.policy.grow(seen)

    def _go_on(self, now: int) -> None:
        """Train on after a checkpoint, on more nodes if that pays."""
        if self._grows(self._seen(now)):
            if self.strict:
                self.version += 1
            self.begin_restart(now)
            if self.strict:
                return
        self.begin_step(now)

    def _observe(self, now: int) -> None:
        """Count the node time up to ``now``, before nodes come or leave."""
        self.node_ms += (now - self.node_since) * (len(self.usable) + len(self.creating))
        self.node_since = now

    def _seen(self, now: int) -> RecoveryInput:
        self._observe(now)
        return RecoveryInput(
            now=now / 1000,
            nodes=len(self.members),
            spare=len(self.usable) - len(self.members),
            joining=len(self.creating),
            unsaved=self.unsaved / 1000,
            step=self.step_time / 1000,
            checkpoint=self.model.checkpoint / 1000,
            restart=self.restart_delay() / 1000,
            gaps=self.gaps,
            age=self._age(now),
            node_seconds=self.node_ms / 1000,
            speed=self.speed,
            notice=self._announced(now) / 1000,
        )

    def _announced(self, now: int) -> float:
        """Return when the first member with a notice leaves."""
        times = (self.leaving.get(node, inf) for node in self.members)
        return min((at for at in times if at - self.notice <= now), default=inf)


def _leaving(rows: list[SpotRow]) -> dict[int, int]:
    """Return when each node, numbered by the row that adds it, leaves."""
    added: dict[str, int] = {}
    leaves: dict[int, int] = {}
    for number, row in enumerate(rows):
        if row.kind == "add":
            added[row.node] = number
        else:
            leaves[added[row.node]] = row.at
    return leaves
