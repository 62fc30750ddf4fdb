"""Optimus: GPUs by marginal gain in remaining time (Peng et al., EuroSys 2018, section 4), for all-reduce training.

Every job gets one GPU, then each further GPU goes to the job whose remaining time it shortens most. Parameter servers
and workers as two kinds of task: ``optimus_tasks``.
"""

from heapq import heapify, heappop, heappush
from math import inf
from typing import Any

import numpy as np

from ebbflow.planners.errors import OptionError, PlanningError
from ebbflow.planners.model.scheduling import App, Decision, Grant, Placement, View, gpus_of
from ebbflow.planners.scheduling.placement import FreeCapacity, Placer, most_free_first


class Optimus:
    """Marginal gains on reported speed and remaining iterations.

    A gain of zero or less ends a job's growth, unless ``look_ahead`` finds that several GPUs at once help where one
    does not.

    Args:
        look_ahead: GPUs tried at once where fewer bring nothing; 1 as in the paper.
        young_factor: gains of a job with less than a tenth of its predicted time behind it are multiplied by this
            (paper: slightly below 1, since early predictions are unreliable).
        restart_cost: s; a job is resized only if that saves more than twice this. 0 always resizes.
        interval: s after which it wants to be asked again.
        placer: where GPUs are taken; jobs with fewer GPUs first.

    Raises ``OptionError``.
    """

    elastic = True

    def __init__(
        self,
        *,
        look_ahead: int = 1,
        young_factor: float = 1.0,
        restart_cost: float = 0.0,
        interval: float = 600.0,
        placer: Placer = most_free_first,
        name: str = "optimus",
    ) -> None:
        if look_ahead < 1:
            raise OptionError(f"look_ahead must be >= 1; got {look_ahead}")
        if not 0 < young_factor <= 1:
            raise OptionError(f"young_factor must be > 0 and <= 1; got {young_factor}")
        if restart_cost < 0 or interval <= 0:
            raise OptionError(f"restart_cost must be >= 0 and interval > 0 s; got {restart_cost}, {interval}")
        self.look_ahead, self.young_factor, self.restart_cost = look_ahead, young_factor, restart_cost
        self.interval, self.placer, self.name = interval, placer, name

    def decide(self, view: View, memory: Any, rng: np.random.Generator) -> Decision:
        """Hand out GPUs one by one, then place the jobs whose number changed."""
        room = FreeCapacity(view.capacity.usable)
        wanted = self._allocate(view.apps, room.total)
        grants: dict[str, Grant] = {}
        moved: list[tuple[int, App]] = []
        for app, gpus in zip(view.apps, wanted, strict=True):
            if app.held and gpus_of(app.held) == gpus and room.covers(app.held):
                room.hold(app.held)
                grants[app.id] = Grant(app.held, reason=f"keeps {gpus} GPUs")
            elif gpus:
                moved.append((gpus, app))
            else:
                grants[app.id] = Grant(reason="pending (Resources): earlier jobs hold all GPUs")
        moved.sort(key=lambda entry: entry[0])
        for gpus, app in moved:
            placement: Placement | None = self.placer(room, app, gpus)
            if placement is None:
                grants[app.id] = Grant(reason=f"pending (Resources): no placement of its {gpus} GPUs")
            else:
                grants[app.id] = Grant(placement, reason=f"{gpus} GPUs by marginal gain")
        return Decision(grants, wake=view.now + self.interval)

    def _allocate(self, apps: list[App] | tuple[App, ...], budget: int) -> list[int]:
        """Return the GPUs of each app."""
        gpus = [0] * len(apps)
        heap: list[tuple[float, int, int]] = []
        for number, app in enumerate(apps):
            if app.speed is None:
                raise PlanningError(f"optimus needs the speed of app {app.id}; the app reports none")
            least = min(app.min_gpus, app.max_gpus)
            if budget < least:
                continue
            gpus[number] = least
            budget -= least
            if budget > 0:
                self._offer(heap, number, app, least)
        heapify(heap)
        while budget > 0 and heap:
            _, number, more = heappop(heap)
            if more > budget:
                continue
            gpus[number] += more
            budget -= more
            self._offer(heap, number, apps[number], gpus[number])
        return self._settled(apps, gpus)

    def _offer(self, heap: list[tuple[float, int, int]], number: int, app: App, held: int) -> None:
        """Put the next step of an app on the heap if it helps: (minus gain per GPU, order, GPUs)."""
        assert app.speed is not None
        now = app.speed.iteration_time(held)
        factor = self.young_factor if _young(app, now) else 1.0
        for more in range(1, self.look_ahead + 1):
            if held + more > app.max_gpus:
                return
            gain = (now - app.speed.iteration_time(held + more)) * app.remaining * factor / more
            if gain > 0:
                heappush(heap, (-gain, number, more))
                return

    def _settled(self, apps: list[App] | tuple[App, ...], gpus: list[int]) -> list[int]:
        """Return ``gpus`` without growth that its restart would eat up."""
        if not self.restart_cost:
            return gpus
        settled = gpus.copy()
        for number, app in enumerate(apps):
            held = gpus_of(app.held)
            if not held or not 0 < held < gpus[number] or app.remaining == inf:
                continue
            assert app.speed is not None
            saved = (app.speed.iteration_time(held) - app.speed.iteration_time(gpus[number])) * app.remaining
            if saved <= 2 * self.restart_cost:
                settled[number] = held
        return settled


def _young(app: App, iteration_time: float) -> bool:
    return app.run_time < (app.run_time + app.remaining * iteration_time) / 10
