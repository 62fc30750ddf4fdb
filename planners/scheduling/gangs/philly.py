"""Gangs by submission within quotas, with care for locality: Philly, and the lessons of its study (ATC 2019)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Literal, get_args

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import App, Decision, Grant, Placement, View, gpus_of
from ebbflow.planners.scheduling.gangs.defragmentation import MigrationPlan, Move, Resident, plan_migrations
from ebbflow.planners.scheduling.gangs.spread import (
    SLOWDOWNS,
    Spread,
    allowed_level,
    expected_waits,
    feasible,
    place_within,
    spread_of,
)
from ebbflow.planners.scheduling.locality import remaining_time
from ebbflow.planners.scheduling.placement import FreeCapacity

Relaxation = Literal["cost", "attempts", "never", "at-once"]
Cause = Literal["fair share", "borrowed capacity", "fragmentation", "scheduler"]
_DAY = 86_400.0
_REST = 3600.0  # s: nobody is moved more often


def delay_cause(room: FreeCapacity, app: App, level: Spread, used: int, quota: float) -> Cause:
    """Return why a gang waits that may spread as far as ``level``, its team using ``used`` GPUs of its quota."""
    if used + app.gpus > quota:
        return "fair share"
    if room.total < app.gpus:
        return "borrowed capacity"
    return "scheduler" if feasible(room, app, app.gpus, level) else "fragmentation"


@dataclass(frozen=True, slots=True)
class Philly:
    """Whole gangs in order of submission; nobody who runs is preempted, and whoever fits may pass who does not.

    ``relaxation`` says when a gang may spread: ``attempts`` after every five attempts, one each ``retry_s``
    (as studied); ``cost`` when waiting longer is expected to cost more than the slowdown; ``never``; ``at-once``.
    A gang that no rack could hold even if empty may always spread as far as it must. ``defragment`` moves small jobs
    off the nodes that a gang needs where that costs less than waiting or spreading: for one gang a decision, and each
    job once an hour. ``quotas`` are GPUs by team; teams beyond theirs come last, and borrow what is left. Other teams
    have no quota.
    """

    relaxation: Relaxation = "cost"
    defragment: bool = True
    quotas: Mapping[str, int] = field(default_factory=dict)
    retry_s: float = 120.0
    attempts: int = 5
    move_s: float = 60.0
    name: str = "philly"

    def __post_init__(self) -> None:
        if self.relaxation not in get_args(Relaxation):
            raise OptionError(
                f"relaxation must be one of {', '.join(get_args(Relaxation))}; got {self.relaxation!r}"
            )
        if not 0 < self.retry_s < inf:
            raise OptionError(f"retry_s must be > 0 and finite; got {self.retry_s}")
        if self.attempts < 1:
            raise OptionError(f"attempts must be >= 1; got {self.attempts}")

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Return who runs where; a waiting gang's reason names the cause of its delay."""
        before: tuple[dict[str, float], dict[str, float]] = memory or ({}, {})
        desk = _Decision(view, before[1])
        waiting = [app for app in view.apps if app.id not in desk.grants]
        since = {app.id: before[0].get(app.id, view.now) for app in waiting}
        wake, causes = inf, []
        for borrows in (False, True):
            for app in waiting:
                if app.id in desk.grants or (not borrows and desk.used(app) + app.gpus > self._quota(app)):
                    continue
                further = self._start(desk, app, view.now - since[app.id])
                if further is None:
                    continue
                level, seconds = further
                cause = delay_cause(desk.room, app, level, desk.used(app), self._quota(app))
                desk.grants[app.id] = Grant(reason=f"pending: {cause}")
                causes.append(cause)
                wake = min(wake, view.now + min(max(seconds, 1.0), self.retry_s))
        still = {id_: at for id_, at in since.items() if not desk.grants[id_].placement}
        notes = {f"pending: {cause}": float(causes.count(cause)) for cause in sorted(set(causes))}
        return Decision(desk.grants, (still, desk.moved_at), wake, notes)

    def _quota(self, app: App) -> float:
        return self.quotas.get(app.team, inf)

    def _start(self, desk: "_Decision", app: App, waited: float) -> tuple[Spread, float] | None:
        """Start ``app`` if it has a place, by moves if they pay; else return how far it may spread now, and for how
        many seconds no further."""
        room, slowdowns, remaining = desk.room, SLOWDOWNS[app.skewed], min(_left(app), _DAY)
        placement = place_within(room, app, app.gpus, Spread.FEWEST_NODES)
        if placement:
            desk.start(app, placement, "starts")
            return None
        empty = FreeCapacity(room.nodes)
        least = next((level for level in Spread if feasible(empty, app, app.gpus, level)), Spread.ANYWHERE)
        waits = expected_waits(room, app, app.gpus, desk.releases())
        steps = {
            "never": 0,
            "at-once": int(Spread.ANYWHERE),
            "attempts": int(waited / self.retry_s) // self.attempts,
        }
        level, more = Spread(min(steps.get(self.relaxation, 0), Spread.ANYWHERE)), inf
        if self.relaxation == "cost":
            level, more = allowed_level(waits, slowdowns, remaining, waited)
        level = max(level, least)
        if self.defragment and not desk.moves:
            saved = min(waits[to] + (slowdowns[to] - 1) * remaining for to in Spread if to <= level)
            plan = plan_migrations(room, app.gpus, desk.residents(self.move_s), min(saved, _DAY))
            if plan is not None:
                desk.move(app, plan)
                return None
        placement = place_within(room, app, app.gpus, level) if room.total >= app.gpus else None
        if placement:
            desk.start(app, placement, f"starts, {spread_of(placement, room.nodes).name.lower()}")
            return None
        return level, more


class _Decision:
    """One decision in the making."""

    def __init__(self, view: View, moved_at: Mapping[str, float]) -> None:
        self.now = view.now
        self.apps = {app.id: app for app in view.apps}
        self.room = FreeCapacity(view.capacity.usable)
        self.grants: dict[str, Grant] = {}
        self.moves: tuple[Move, ...] = ()
        self.moved_at = {id_: at for id_, at in moved_at.items() if id_ in self.apps}
        for app in view.apps:
            if app.held and self.room.covers(app.held) and gpus_of(app.held) == app.gpus:
                self.room.hold(app.held)
                self.grants[app.id] = Grant(app.held, reason="continues")

    def used(self, app: App) -> int:
        """Return the GPUs that the app's team has."""
        runs = (self.apps[id_] for id_, grant in self.grants.items() if grant.placement)
        return sum(other.gpus for other in runs if other.team == app.team)

    def releases(self) -> list[tuple[float, Placement]]:
        """Return when who runs will give back what."""
        return [(_left(self.apps[id_]), g.placement) for id_, g in self.grants.items() if g.placement]

    def residents(self, seconds: float) -> list[Resident]:
        """Return the jobs on one node each, and whether they can be moved at ``seconds`` s each."""
        found = []
        for id_, grant in self.grants.items():
            app, placement = self.apps[id_], grant.placement
            if len(placement) == 1:
                rested = self.now - self.moved_at.get(id_, -inf) >= _REST
                movable = rested and app.held == placement and _left(app) > seconds
                found.append(Resident(id_, placement[0][0], app.gpus, seconds, movable))
        return found

    def start(self, app: App, placement: Placement, reason: str) -> None:
        self.grants[app.id] = Grant(placement, reason=reason)

    def move(self, app: App, plan: MigrationPlan) -> None:
        """Carry out ``plan`` and start the gang that it is for."""
        self.moves = plan.moves
        for move in plan.moves:
            self.grants[move.app] = Grant(((move.target, move.gpus),), reason=f"preempted for {app.id}")
            self.room.give_back(((move.source, move.gpus),))
            self.room.hold(((move.target, move.gpus),))
            self.moved_at[move.app] = self.now
        placement = place_within(self.room, app, app.gpus, Spread.FEWEST_NODES)
        assert placement is not None  # the plan says so
        self.start(app, placement, f"starts on nodes from which {len(plan.moves)} jobs were migrated")


def _left(app: App) -> float:
    """Return the seconds that ``app`` still runs, infinity where it does not say."""
    try:
        return remaining_time(app, app.gpus)
    except OptionError:
        return inf
