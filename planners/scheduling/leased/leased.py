"""GPUs in leases, handed out greedily: the common part of the policies that Themis is compared with (NSDI 2020).

Whenever GPUs are free, the app that the rule puts first gets the next one, the best placed for it, or its smallest
gang; then the app that is first now, and so on. Leases run on until they end.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf
from typing import Protocol

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import App, Decision, Grant, Placement, View
from ebbflow.planners.scheduling.locality import Level, Slowdown
from ebbflow.planners.scheduling.placement import FreeCapacity
from ebbflow.planners.scheduling.themis.leases import Counts, Lease, Leases, standings


@dataclass(slots=True)
class AppAllocation:
    """One app while GPUs are handed out."""

    app: App
    live: tuple[Lease, ...]
    counts: Counts  # held under leases that continue, and won
    ended: Counts  # held until now
    won: Counts = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        return sum(self.counts.values())

    @property
    def unmet(self) -> int:
        return max(self.app.max_gpus - self.gpus, 0)


@dataclass(frozen=True, slots=True)
class RoundState:
    """What rules may look at besides the app itself."""

    view: View
    lease_s: float
    room: FreeCapacity
    racks: Mapping[str, str]
    first_seen: Mapping[str, float]  # iterations left when an app was first seen


class Rule(Protocol):
    """Who is next."""

    @property
    def name(self) -> str: ...

    @property
    def looks_at_room(self) -> bool:
        """Whether an app's key depends on which GPUs are free, so that it must be looked at again."""
        ...

    def key(self, desk: AppAllocation, moment: RoundState, rng: np.random.Generator) -> tuple[float, ...]:
        """Return what apps are sorted by, ascending, each time they may get more; submission decides ties."""
        ...

    def chunk(self, desk: AppAllocation, moment: RoundState) -> int:
        """Return how many GPUs the app gets at once."""
        ...


def one_more(desk: AppAllocation) -> int:
    """Return one GPU, or as many as an app with too few to run still needs."""
    return max(desk.app.min_gpus - desk.gpus, 1)


@dataclass(frozen=True, slots=True)
class Memory:
    """The leases, and the work of each app when it was first seen."""

    leases: Leases
    first_seen: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Leased:
    """A policy that hands out free GPUs by ``rule`` in leases of ``lease_s`` (infinite: until the app ends).

    ``before`` may change leases that continue before anything is handed out (migration).
    """

    rule: Rule
    lease_s: float = 600.0
    pool_s: float = 0.0
    before: Callable[[dict[str, AppAllocation], RoundState], None] | None = None
    elastic: bool = True

    def __post_init__(self) -> None:
        if not self.lease_s > 0:
            raise OptionError(f"lease_s must be > 0; got {self.lease_s}")

    @property
    def name(self) -> str:
        return self.rule.name

    def decide(self, view: View, memory: Memory | None, rng: np.random.Generator) -> Decision:
        """Return all leases that continue, and new ones on what is free."""
        room = FreeCapacity(view.capacity.usable)
        desks: dict[str, AppAllocation] = {}
        for standing in standings(view, memory.leases if memory else None, self.lease_s, self.pool_s):
            desk = AppAllocation(standing.app, standing.live, standing.kept, dict(standing.ended))
            desks[standing.app.id] = desk
            room.hold(tuple(desk.counts.items()))
        seen = dict(memory.first_seen) if memory else {}
        seen = {app.id: seen.get(app.id, app.remaining) for app in view.apps}
        racks = {node.id: node.rack for node in view.capacity.nodes}
        moment = RoundState(view, self.lease_s, room, racks, seen)
        if self.before:
            self.before(desks, moment)
        hand_out(desks, self.rule, moment, rng)
        leases = {app: self._leases(desk, view.now) for app, desk in desks.items()}
        grants = {app: self._grant(desks[app], mine) for app, mine in leases.items()}
        ends = [lease.until for mine in leases.values() for lease in mine]
        kept = Leases({app: mine for app, mine in leases.items() if mine})
        return Decision(grants, Memory(kept, seen), min(ends, default=inf))

    def _leases(self, desk: AppAllocation, now: float) -> tuple[Lease, ...]:
        if not desk.won:
            return desk.live
        return (*desk.live, Lease(tuple(sorted(desk.won.items())), now + self.lease_s))

    def _grant(self, desk: AppAllocation, leases: tuple[Lease, ...]) -> Grant:
        if not desk.counts:
            return Grant(reason="pending (Resources): the apps before it took all GPUs")
        held = desk.app.held
        placement: Placement = held if desk.counts == dict(held) else tuple(sorted(desk.counts.items()))
        reason = (
            f"{sum(desk.won.values())} more GPUs: first by {self.name}" if desk.won else "lease continues"
        )
        return Grant(placement, min(lease.until for lease in leases), reason)


def hand_out(
    desks: Mapping[str, AppAllocation], rule: Rule, moment: RoundState, rng: np.random.Generator
) -> None:
    """Give the room's GPUs to the desks by ``rule`` until nobody can use more."""
    room = moment.room
    heap = [
        (rule.key(desk, moment, rng), desk.app.number, app) for app, desk in desks.items() if desk.unmet > 0
    ]
    heapify(heap)
    free = room.total
    while heap and free:
        _, number, app = heappop(heap)
        desk = desks[app]
        if rule.looks_at_room and heap:
            again = (rule.key(desk, moment, rng), number, app)
            if again > heap[0]:
                heappush(heap, again)
                continue
        gpus = min(rule.chunk(desk, moment), desk.unmet)
        if gpus > free:
            gpus = free if desk.gpus + free >= desk.app.min_gpus else 0
        if gpus <= 0:
            continue
        give(desk, gpus, moment)
        free -= gpus
        if desk.unmet > 0:
            heappush(heap, (rule.key(desk, moment, rng), desk.app.number, app))


def give(desk: AppAllocation, gpus: int, moment: RoundState) -> None:
    """Take the best-placed free GPUs for an app: those it just had, then near what it holds, on few nodes."""
    for node, count in best_placed(desk, gpus, moment):
        moment.room.hold(((node, count),))
        desk.counts[node] = desk.counts.get(node, 0) + count
        desk.won[node] = desk.won.get(node, 0) + count


def best_placed(desk: AppAllocation, gpus: int, moment: RoundState) -> Placement:
    """Return which of the free GPUs ``give`` would take."""
    room, counts = moment.room, desk.counts
    free = {node: left for node, left in zip(room.ids, room.free, strict=True) if left > 0}
    near = {moment.racks.get(node, "") for node in counts}
    picks: list[tuple[str, int]] = []
    for node, had in desk.ended.items():
        taken = min(free.get(node, 0), had - desk.won.get(node, 0), gpus)
        if taken > 0:
            picks.append((node, taken))
            free[node] -= taken
            gpus -= taken
    while gpus > 0:

        def worth(node: str, wanted: int = gpus) -> tuple[bool, bool, bool, int, str]:
            left = free[node]
            fits = left >= wanted
            return (
                node not in counts,
                moment.racks.get(node, "") not in near,
                not fits,
                left if fits else -left,
                node,
            )

        best = min((node for node, left in free.items() if left > 0), key=worth)
        taken = min(free[best], gpus)
        picks.append((best, taken))
        free[best] -= taken
        gpus -= taken
    return tuple(picks)


def merged(counts: Counts, more: Placement) -> Placement:
    """Return the placement of ``counts`` and ``more`` together."""
    total = dict(counts)
    for node, gpus in more:
        total[node] = total.get(node, 0) + gpus
    return tuple(sorted(total.items()))


def enclosing(placement: Placement, racks: Mapping[str, str]) -> Level:
    """Return the narrowest level that encloses a placement."""
    if len({racks.get(node, "") for node, _ in placement}) > 1:
        return Level.CLUSTER
    if len(placement) > 1:
        return Level.RACK
    return Level.MACHINE if sum(gpus for _, gpus in placement) > 1 else Level.SLOT


def slowdown_of(app: App) -> Slowdown:
    """Return what is believed of an app before it was profiled: only skewed models suffer from being spread."""
    return Slowdown() if app.skewed else Slowdown(rack=1.0, cluster=1.0)
