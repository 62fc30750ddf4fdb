"""Tiresias: discretised two-dimensional attained service (Gu et al., NSDI 2019, section 3).

Jobs sit in a few queues by attained service, GPUs x time. Each pass walks the queues from the first and starts every
gang that still fits; the others wait or are preempted. 2D-LAS needs no knowledge; 2D-Gittins orders by the Gittins
index of a distribution of service demands.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Node
from ebbflow.planners.model.scheduling import App, Decision, Grant, Placement, View, gpus_of
from ebbflow.planners.scheduling.gangs.gittins import Quantum, ServiceDistribution
from ebbflow.planners.scheduling.placement import FreeCapacity, Placer, by_skew

Order = Literal["first-start", "insertion", "submission"]
"""FIFO within a queue: by when a job first ran, by when it entered the queue, or by arrival."""

RESTARTING = 1.0  # s: a job may be restarting, and no closer to its next queue however often one looks


class _JobState(NamedTuple):
    """What the policy remembers of one job."""

    queue: int
    entered: int  # order of entering its queue
    forgiven: float  # GPU-s attained before its last promotion
    waits_since: float  # s: last ran, last promoted, or arrived
    running: bool


@dataclass(frozen=True, slots=True)
class _Memory:
    standings: Mapping[str, _JobState]
    entries: int  # how often anyone entered a queue
    capacity: Capacity
    nodes: tuple[Node, ...]
    room: FreeCapacity  # all of it, free
    grants: Mapping[str, Grant]


class Tiresias:
    """Discretised 2D-LAS, or 2D-Gittins if given a ``distribution``.

    Args:
        thresholds: upper ends of all queues but the last, GPU-s, growing; none makes one queue.
        promote_knob: a waiting job goes back to the first queue once it waited this many times as long as it ran;
            infinite: never.
        order: FIFO key within a queue (2D-LAS, and the last queue of 2D-Gittins).
        distribution: of service demands, GPU-s; ``None``: no prior knowledge.
        quantum: of the Gittins index: the queue's upper end, or the supremum over all.
        refresh: s between decisions while Gittins indices drift.
        count_restarts: whether time spent restarting counts as attained service.
        reserve_after: s after which a job that never ran goes first in the first queue; infinite: never.
        placer: where GPUs are taken.

    Raises ``OptionError``.
    """

    def __init__(
        self,
        thresholds: Sequence[float] = (3600.0,),
        *,
        promote_knob: float = inf,
        order: Order = "first-start",
        distribution: ServiceDistribution | None = None,
        quantum: Quantum = "queue",
        refresh: float = 60.0,
        count_restarts: bool = True,
        reserve_after: float = inf,
        placer: Placer = by_skew,
        name: str = "",
    ) -> None:
        self.thresholds = tuple(thresholds)
        if any(b <= a for a, b in zip((0.0, *self.thresholds), self.thresholds, strict=False)):
            raise OptionError(f"thresholds must be > 0 GPU-s and grow; got {self.thresholds}")
        if promote_knob <= 0 or reserve_after <= 0 or refresh <= 0:
            raise OptionError(
                f"promote_knob, reserve_after and refresh must be > 0; got {promote_knob}, {reserve_after}, {refresh}"
            )
        if order not in ("first-start", "insertion", "submission"):
            raise OptionError(f"order must be first-start, insertion or submission; got {order!r}")
        if quantum not in get_args(Quantum):
            raise OptionError(f"quantum must be {' or '.join(get_args(Quantum))}; got {quantum!r}")
        self.promote_knob, self.order, self.distribution = promote_knob, order, distribution
        self.quantum, self.refresh, self.count_restarts = quantum, refresh, count_restarts
        self.reserve_after, self.placer = reserve_after, placer
        self._ends = (*self.thresholds, inf)
        self._reasons = [f"queue {number} of {len(self._ends)}" for number in range(1, len(self._ends) + 1)]
        self._name = name or ("tiresias-g" if distribution else "tiresias")

    @property
    def name(self) -> str:
        return self._name

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Walk the queues and start every gang that fits."""
        before = memory if isinstance(memory, _Memory) else None
        standings, entries = self._standings(view, before)
        nodes, room = _room(view.capacity, before)
        walk = self._walk(view, standings)
        budget = room.total
        runs: list[App] = []
        for app in walk:
            if app.gpus <= budget:
                budget -= app.gpus
                runs.append(app)
        grants = self._place(view, runs, standings, room, before)
        after: dict[str, _JobState] = {}
        wake = inf
        for app in view.apps:
            standing = standings[app.id]
            running = bool(grants[app.id].placement)
            if running != standing.running:
                waits = standing.waits_since if running else view.now
                standing = standing._replace(running=running, waits_since=waits)
            after[app.id] = standing
            wake = min(wake, self._next(app, standing, view.now))
        if self.distribution and any(standing.running for standing in after.values()):
            wake = min(wake, view.now + self.refresh)
        return Decision(grants, _Memory(after, entries, view.capacity, nodes, room, grants), wake)

    # Queues

    def _attained(self, app: App, standing: _JobState) -> float:
        service = app.service if self.count_restarts else app.service - app.restart_time * app.gpus
        return service - standing.forgiven

    def _standings(self, view: View, before: _Memory | None) -> tuple[dict[str, _JobState], int]:
        """Return where every job stands now: new ones in the first queue, others demoted or promoted."""
        known: Mapping[str, _JobState] = before.standings if before else {}
        entries = before.entries if before else 0
        standings: dict[str, _JobState] = {}
        for app in view.apps:
            standing = known.get(app.id)
            if standing is None:
                standing = _JobState(0, entries, 0.0, app.arrival, False)
                entries += 1
            standings[app.id] = standing
        for app in view.apps:
            standing = standings[app.id]
            queue = standing.queue
            if standing.running:
                attained = self._attained(app, standing)
                while attained >= self._ends[queue]:
                    queue += 1
                if queue != standing.queue:
                    standings[app.id] = standing._replace(queue=queue, entered=entries)
                    entries += 1
            elif queue > 0 and view.now >= self._promotion(app, standing):
                standings[app.id] = standing._replace(
                    queue=0,
                    entered=entries,
                    forgiven=standing.forgiven + self._attained(app, standing),
                    waits_since=view.now,
                )
                entries += 1
        return standings, entries

    def _promotion(self, app: App, standing: _JobState) -> float:
        """Return when a waiting job has waited ``promote_knob`` times as long as it ran."""
        return standing.waits_since + self.promote_knob * self._attained(app, standing) / app.gpus

    def _next(self, app: App, standing: _JobState, now: float) -> float:
        """Return when a job will cross into the next queue, be promoted, or get a reservation."""
        if standing.running:
            end = self._ends[standing.queue]
            if end == inf:
                return inf
            left = (end - self._attained(app, standing)) / app.gpus
            if app.restarts and not self.count_restarts:
                left = max(left, RESTARTING)
            return _after(now, now + left)
        at = inf
        if standing.queue > 0 and self.promote_knob < inf:
            at = self._promotion(app, standing)
        elif app.first_start is None and self.reserve_after < inf:
            at = app.arrival + self.reserve_after
        return at if at > now else inf

    def _walk(self, view: View, standings: Mapping[str, _JobState]) -> list[App]:
        """Return all jobs in the order in which they may take GPUs."""
        reserved = [
            app
            for app in view.apps
            if app.first_start is None and view.now >= app.arrival + self.reserve_after
        ]
        first = {app.id for app in reserved}
        last = len(self.thresholds)
        keys: dict[str, tuple[float, ...]] = {}
        for app in view.apps:
            standing = standings[app.id]
            rank = 0.0
            if self.distribution is not None and standing.queue < last:
                quantum = self._ends[standing.queue] if self.quantum == "queue" else None
                rank = -round(self.distribution.index(self._attained(app, standing), quantum), 12)
            keys[app.id] = (0 if app.id in first else 1, standing.queue, rank, *self._fifo(app, standing))
        return sorted(view.apps, key=lambda app: keys[app.id])

    def _fifo(self, app: App, standing: _JobState) -> tuple[float, ...]:
        if self.order == "insertion":
            return (standing.entered,)
        started = app.first_start if app.first_start is not None and self.order == "first-start" else inf
        return (started, app.arrival, app.number)

    # Places

    def _place(
        self,
        view: View,
        runs: Sequence[App],
        standings: Mapping[str, _JobState],
        room: FreeCapacity,
        before: _Memory | None,
    ) -> dict[str, Grant]:
        """Keep running jobs where they are, unless a node of theirs leaves; place the others in walking order."""
        kept = {app.id: app.held for app in runs if app.held}
        if before is None or before.capacity is not view.capacity:
            gangs = {app.id: app.gpus for app in runs}
            kept = {
                id_: held
                for id_, held in kept.items()
                if room.covers(held) and gpus_of(held) == gangs[id_]  # a lost node may leave a part
            }
        earlier: Mapping[str, Grant] = before.grants if before else {}
        grants: dict[str, Grant] = {}
        free = None
        for app in runs:
            reason = self._reasons[standings[app.id].queue]
            placement: Placement | None = kept.get(app.id)
            grant = earlier.get(app.id)
            if grant is not None and placement and grant.placement is placement and grant.reason is reason:
                grants[app.id] = grant
                continue
            if placement is None:
                if free is None:
                    free = room.copy()
                    for held in kept.values():
                        free.hold(held)
                placement = self.placer(free, app, app.gpus)
                if placement is None:
                    grants[app.id] = Grant(reason="pending (Resources): no placement of its gang")
                    continue
            grants[app.id] = Grant(placement, reason=reason)
        for app in view.apps:
            if app.id not in grants:
                grants[app.id] = _WAIT
        return grants


_WAIT = Grant(reason="pending (Resources): gangs ahead of it leave too few GPUs")


def _after(now: float, at: float) -> float:
    """Return ``at``, moved past ``now`` by the least step of floating point if it isn't."""
    return at if at > now else float(np.nextafter(now, inf))


def _room(capacity: Capacity, before: _Memory | None) -> tuple[tuple[Node, ...], FreeCapacity]:
    if before is not None and before.capacity is capacity:
        return before.nodes, before.room
    nodes = capacity.usable
    return nodes, FreeCapacity(nodes)
