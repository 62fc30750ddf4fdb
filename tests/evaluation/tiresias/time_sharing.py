"""Gandiva's time-sharing (OSDI 2018) as Tiresias' simulation has it (NSDI 2019): gangs take turns.

There, machines are split among gang sizes in proportion to what the jobs of a size ask for, and the jobs of a size
rotate. Every job then runs for the same fraction of time, which is what the rotation here gives directly.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import Decision, Grant, View, gpus_of
from ebbflow.planners.scheduling.placement import FreeCapacity, Placer, fewest_nodes


@dataclass(frozen=True, slots=True)
class Turns:
    """When each app had its last turn (-1: never), and whose turn it is until when."""

    last: Mapping[str, int]
    turn: int
    until: float  # s
    running: frozenset[str]


@dataclass(frozen=True, slots=True)
class TimeSharing:
    """Every ``quantum_s`` the gangs that have waited longest run; GPUs that come free in between are filled."""

    quantum_s: float = 60.0
    placer: Placer = fewest_nodes
    name: str = "time-sharing"

    def __post_init__(self) -> None:
        if not self.quantum_s > 0:
            raise OptionError(f"quantum_s must be > 0; got {self.quantum_s}")

    def decide(self, view: View, memory: Turns | None, rng: np.random.Generator) -> Decision:
        """Return who runs until the end of the quantum."""
        before = memory or Turns({}, -1, -inf, frozenset())
        over = view.now >= before.until
        turn, until = (before.turn + 1, view.now + self.quantum_s) if over else (before.turn, before.until)
        last = {app.id: before.last.get(app.id, -1) for app in view.apps}
        goes_on = frozenset() if over else before.running
        order = sorted(view.apps, key=lambda app: (app.id not in goes_on, last[app.id], app.number))
        room = FreeCapacity(view.capacity.usable)
        budget, runs = room.total, []
        for app in order:
            if app.gpus <= budget:
                budget -= app.gpus
                runs.append(app)
        grants: dict[str, Grant] = {}
        for app in runs:
            if gpus_of(app.held) == app.gpus and room.covers(app.held):
                room.hold(app.held)
                grants[app.id] = Grant(app.held, reason=f"turn {turn}")
        for app in runs:
            if app.id not in grants and (placement := self.placer(room, app, app.gpus)):
                grants[app.id] = Grant(placement, reason=f"turn {turn}")
        last.update(dict.fromkeys(grants, turn))
        waits = Grant(reason="waits for its turn")
        return Decision(
            {app.id: grants.get(app.id, waits) for app in view.apps},
            Turns(last, turn, until, frozenset(grants)),
            until if len(grants) < len(view.apps) else inf,
        )
