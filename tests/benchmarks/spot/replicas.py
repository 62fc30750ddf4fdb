"""The spot-trace replay of recovery by replicas: whole ones train on in place, sharded ones start again from a save.

A model that fits a node has a replica on each. When one is lost, the others make their process group anew and
repeat the step; a node that comes takes the state from a peer between two steps. A larger model is sharded over a few
nodes a replica (HSDP). When one is lost, the survivors of all shards save the last complete step, and all start
again from that on as many whole replicas as there are nodes for. Nothing trains meanwhile.

What counts as lost is what the public in-place model counts, the step under way, but once for losses of one moment.
Nodes without a part in it count as idle. Speeds are those of the public in-place model for the nodes that train.
"""

import heapq
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

from ebbflow.infra.simulation.traces.rows import SpotRow
from ebbflow.planners.model.recovery import RecoveryInput
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.training.saving.checkpointing import WHOLE_RUN, HazardAware, save_interval, state_losses
from tests.benchmarks.spot.models import SpotModel, position
from tests.benchmarks.spot.policy import PolicyReplay
from tests.benchmarks.spot.recovery import PIPELINE_NODES, RENDEZVOUS, Event

SAVED_BYTES = 12  # of a parameter: itself and AdamW's two moments, in single precision
HELD_BYTES = 16  # with its gradient
MEMORY = 0.8 * 48e9  # bytes of a node for these (A40); the rest is for activations and gathered blocks


@dataclass(frozen=True, slots=True)
class RecoveryCosts:
    """What recovery takes: fixed parts, seconds, and Gbit/s at which bytes move.

    Fixed parts were measured on two small replicas over gloo (``training_pauses``; ``restart``: ``elastic_training``,
    with the save, the start and the load of small models), ``copy`` on an H100 (3.2 GB in 0.43 s).
    """

    loss: float = 0.20  # from a SIGKILL to the survivors' next step, in place
    leave: float = 0.04  # a node with a notice leaves in place
    join: float = 0.15  # a node joins in place; the state's transfer is beside
    restart: float = 3.4  # everybody starts again
    link: float = 25.0  # of a node, to peers and to storage
    copy: float = 60.0  # into the host's memory, for which training waits in a save

    def moving(self, size: float) -> float:
        """Return the seconds that ``size`` bytes take over a node's link."""
        return 8e-9 * size / self.link


def shards_of(model: SpotModel) -> int:
    """Return the nodes that hold a replica: as few as have the memory."""
    return int(-(-HELD_BYTES * model.parameters // MEMORY))


class ReplicaReplay(PolicyReplay):
    """Replays a spot trace with recovery by replicas.

    Args:
        model: what trains.
        rows: the trace.
        costs: of recovery.
        notice: ms by which a removal is announced ahead; 0: not at all.
        every: seconds between checkpoints beside, ``None``: as a run chooses them; none are made unless given.
        counts: what a run that chooses takes for a loss of state: as it does by default, each lost node, or as by
            default without the floor for what ends the whole run.
        shards: nodes of a replica; as few as have the memory unless given.
        piped: whether speeds are those of the checkpoint-restart model.
    """

    def __init__(
        self,
        model: SpotModel,
        rows: list[SpotRow],
        costs: RecoveryCosts | None = None,
        *,
        notice: int = 0,
        every: float | None = inf,
        counts: Literal["state", "nodes", "no floor"] = "state",
        shards: int | None = None,
        piped: bool = False,
    ) -> None:
        self.hazard = HazardAware()
        super().__init__(model, rows, self.hazard, notice, strict=True)
        self.costs, self.every, self.piped = costs or RecoveryCosts(), every, piped
        self.counts = counts
        self.shards = shards or shards_of(model)
        self.share = SAVED_BYTES * model.parameters / self.shards  # bytes of a node
        self.parts: dict[int, int] = {}  # node -> which shard it holds
        self.retired: set[int] = set()  # nodes that have left before their removal
        self.anew = True  # whether the pause under way ends with all that are there
        self.delay = 0
        self.last_save = 0
        self.pending: tuple[int, int] | None = None  # of a save: its step's end, and when it is durable

    # --- what things take, ms -------------------------------------------------------------------------------

    def restart_delay(self) -> int:
        """Return what a start of everybody takes, or in place what a node that joins does."""
        moving = self.costs.moving(self.share)
        seconds = self.costs.restart + 2 * moving if self.shards > 1 else self.costs.join + moving
        return round(1000 * seconds)

    def speed(self, nodes: int) -> float:
        place = position(nodes)
        if self.piped or not self.model.in_place[place]:
            return self.model.restarting[place]
        return self.model.in_place[place]

    # --- nodes come and go ----------------------------------------------------------------------------------

    def on_ready(self, event: Event) -> None:
        if event.node not in self.creating:
            return
        self.creating.discard(event.node)
        self.usable[event.node] = None
        if self.state == "stopped" and len(self.there) >= PIPELINE_NODES:
            self._start(event.at)

    def on_remove(self, event: Event) -> None:
        now = event.at
        self._observe(now)
        self.creating.discard(event.node)
        self.usable.pop(event.node, None)
        member, running = event.node in self.members, self.state == "running"
        self.members.discard(event.node)
        if not member and not (self.state == "restarting" and self.anew):
            return
        if running:
            self.book_loss(now)
        elif self.state == "restarting":  # of the try that is given up only the time that passed counts
            self.restart -= self.delay - (now - self.restarting_since)
            self.restarts -= now == self.restarting_since
        saved = self.state == "restarting" and now - self.restarting_since > self.delay / 2
        if self.parts and not saved and not self._covered():
            self._take_back()
        self._recover(now)

    def book_loss(self, now: int) -> None:
        """Book the step under way."""
        self.gaps, self.last_loss = (*self.gaps, self._age(now)), now
        self.fallback += self.step_time
        self.version += 1

    def _covered(self) -> bool:
        """Tell whether each shard is left somewhere."""
        return {part for node, part in self.parts.items() if node in self.usable} == set(range(self.shards))

    def _recover(self, now: int) -> None:
        if len(self.there) < PIPELINE_NODES:
            self.version += 1
            self.state, self.members, self.meeting = "stopped", set(), None
        elif self.shards == 1 and len(self.members) >= PIPELINE_NODES:
            self._pause(now, self.costs.loss, anew=False)
        else:
            self._pause(now, self.costs.restart + 2 * self.costs.moving(self.share), anew=True)

    def _start(self, now: int) -> None:
        self._pause(now, self.costs.restart + self.costs.moving(self.share), anew=True)

    def _pause(self, now: int, seconds: float, *, anew: bool) -> None:
        self.version += 1
        self.delay, self.anew = round(1000 * seconds), anew
        self.state, self.restarting_since = "restarting", now
        self.restart += self.delay
        self.restarts += 1
        self.meeting = Event(now + self.delay, RENDEZVOUS)
        heapq.heappush(self.heap, self.meeting)

    @property
    def there(self) -> list[int]:
        """Return the nodes that may train, in order of becoming usable."""
        return [node for node in self.usable if node not in self.retired]

    def on_rendezvous(self, event: Event) -> None:
        if event is not self.meeting:
            return
        if self.anew:
            there = self.there
            self.members = set(there[: len(there) - len(there) % self.shards])
        self.parts = {
            node: number % self.shards
            for number, node in enumerate(node for node in self.usable if node in self.members)
        }
        self.version += 1
        self.start_training(event.at)

    def start_training(self, now: int) -> None:
        """Train on the members."""
        self.state = "running"
        self.nodes = len(self.members)
        self.step_time = int(self.model.samples / self.speed(self.nodes) * 1000)
        if self.first_start is None:
            self.first_start = self.previous_end = self.last_save = now
        self.begin_step(now)

    # --- steps ----------------------------------------------------------------------------------------------

    def on_step(self, event: Event) -> None:
        if event.version != self.version:
            return
        now = event.at
        self.record(now)
        self.idle += (now - self.previous_end) * (len(self.usable) - len(self.members)) / len(self.usable)
        self.previous_end = now
        now += self._save(now)
        leaving = {
            node for node in self.members & self.leaving.keys() if self.leaving[node] - self.notice <= now
        }
        if leaving:
            self.retired |= leaving
            self.members -= leaving
            if self.shards > 1 or len(self.members) < PIPELINE_NODES:
                self._recover(now)
            else:
                self._pause(now, self.costs.leave, anew=False)
        elif self._spare > 0 and (self.shards == 1 or self.policy.grow(self._seen(now))):
            self._pause(now, self.restart_delay() / 1000, anew=True)
        else:
            self.begin_step(now)

    def _save(self, now: int) -> int:
        """Return the ms that training waits for a checkpoint, if one is due."""
        if self.pending is not None and now >= self.pending[1]:
            self.last_checkpoint, self.pending = self.pending[0], None
        if self.every == inf or self.pending is not None:
            return 0
        stall = 8e-9 * self.share / self.costs.copy
        write = self.costs.moving(self.share)
        every = self.every or save_interval(stall, write, self._losses(now, write))
        if now - self.last_save < 1000 * every:
            return 0
        self.last_save, self.pending = now, (now, now + round(1000 * (stall + write)))
        self.checkpoint += round(1000 * stall)
        self.checkpoints += 1
        return round(1000 * stall)

    def _losses(self, now: int, write: float) -> float:
        """Return the losses of state per second that a run expects."""
        rate, nodes = self.hazard.rate(self._seen(now)), max(len(self.members), 1)
        if self.counts == "nodes":
            return rate
        window = RunSettings().collective_timeout + write
        floor = WHOLE_RUN if self.counts == "state" else 0.0
        return state_losses(rate / nodes, nodes, max(nodes // self.shards, 1), window, whole_run=floor).rate

    def _seen(self, now: int) -> RecoveryInput:
        return replace(super()._seen(now), spare=self._spare, unsaved=0.0)

    @property
    def _spare(self) -> int:
        """Return the nodes that further replicas may have."""
        there = len(self.there)
        return there - there % self.shards - len(self.members)
