"""Who gets how many GPUs where, when apps can use more or fewer: Pollux' objective, weighted, floored and capped.

The weights make its mean of speed-ups stand for the mean completion time; floors keep the bound on finish-time
fairness; caps leave GPUs alone that cost more than the goodput they add.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity
from ebbflow.planners.model.scheduling import App, Decision, Goodput, Grant, Placement, Speed, View, gpus_of
from ebbflow.planners.scheduling.goodput.objective import FLOOR, Objective, Problem, most_gpus, problem_of
from ebbflow.planners.scheduling.goodput.pollux import decision_of
from ebbflow.planners.scheduling.goodput.search import SearchBudget, local_search
from ebbflow.planners.scheduling.rho_bounded.forecast import AppForecast, Group, Moves
from ebbflow.planners.scheduling.rho_bounded.rollout import MARGIN

EXPONENT = -0.3  # of the mean; nearer to 0 than Pollux' -1, since the weights say who comes first
PRESSED = 10.0 / FLOOR  # cost of an app below its floor; its term is less than 1 / FLOOR even without GPUs

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Elastic:
    """How GPUs are shared out. ``scaling`` is the p of speed-ups that grow as GPUs to the power of p."""

    rho: float
    scaling: float
    moves: Moves
    value: float | None  # dollars that a GPU-hour at one GPU's goodput is worth
    effort: SearchBudget

    def __post_init__(self) -> None:
        if not 0 <= self.scaling < 1:
            raise OptionError(f"scaling must be >= 0 and < 1; got {self.scaling}")

    def decide(
        self, view: View, forecasts: Sequence[AppForecast], groups: Sequence[Group], rng: np.random.Generator
    ) -> Decision:
        """Return what everyone holds: the search's allocation, and what else is worth having on GPUs that leave."""
        staying = self._staying(forecasts, groups, view.now)
        rest = [o for o in forecasts if o.app.id not in staying]
        price = _mean_price(groups)
        floors = {o.app.id: self._floor(o, view.now) for o in rest}
        weights = size_weights([_service(o) for o in rest], self.scaling)
        apps = [
            replace(
                o.app,
                goodput=_goodput(o.app),
                weight=o.app.weight * w,
                max_gpus=max(self._cap(o, price), floors[o.app.id]),
            )
            for o, w in zip(rest, weights, strict=True)
        ]
        capacity = _staying_nodes(view.capacity, groups)
        seen = View(view.now, apps, capacity)
        problem = floored(problem_of(seen, Objective(p=EXPONENT, restart_delay=self.moves.delay)), floors)
        rows, _ = local_search(problem, rng, self.effort)
        decision = decision_of(seen, problem, rows, None)
        grants = {**decision.grants, **staying}
        idle = [o for o in rest if not grants[o.app.id].placement]
        grants |= self._on_leaving(idle, groups, grants, view.now)
        pressed = float(sum(f > 0 for f in floors.values()))
        return Decision(grants, notes={**decision.notes, "pressed": pressed})

    def _floor(self, forecast: AppForecast, now: float) -> int:
        """Return the fewest GPUs that finish an app within the bound if it can't wait any longer; 0 if it can."""
        app = forecast.app
        latest = app.arrival + self.rho * (1.0 - MARGIN) * forecast.fair
        if now + forecast.left + self.moves.delay < latest:
            return 0
        most = most_gpus(app, app.max_gpus)
        asked = min(max(app.gpus, app.min_gpus), most)
        left, goodput = _left(app), _goodput(app)
        if goodput is None or not isfinite(left):
            return asked
        table = goodput_table(goodput, most)
        late = app.arrival + self.rho * forecast.fair - now - (0.0 if app.held else self.moves.delay)
        enough = np.flatnonzero(table * max(late, 0.0) >= left)
        return max(int(enough[0]), 1) if enough.size and enough[0] <= asked else asked

    def _cap(self, forecast: AppForecast, price: float) -> int:
        """Return the most GPUs of which each adds goodput that is worth its price."""
        app = forecast.app
        if self.value is None or price <= 0:
            return app.max_gpus
        table = goodput_table(_goodput(app), app.max_gpus)
        if len(table) < 2 or table[1] <= 0:
            return app.max_gpus
        pays = np.diff(table) / table[1] * self.value >= price
        return 0 if not pays[0] else int(pays.argmin()) if not pays.all() else app.max_gpus

    def _staying(
        self, forecasts: Sequence[AppForecast], groups: Sequence[Group], now: float
    ) -> dict[str, Grant]:
        """Return who is over before its leaving GPUs are, and so continues where it is."""
        found = {}
        for forecast in forecasts:
            app = forecast.app
            for group in groups:
                here = group.until < inf and app.held and group.room.covers(app.held)
                if here and _time_where_it_is(forecast) <= group.time(now, self.moves):
                    group.room.hold(app.held)
                    until = group.until - self.moves.leave
                    found[app.id] = Grant(app.held, until, "completes before its GPUs terminate")
        return found

    def _on_leaving(
        self, idle: Sequence[AppForecast], groups: Sequence[Group], grants: Mapping[str, Grant], now: float
    ) -> dict[str, Grant]:
        """Give GPUs of single nodes that leave to apps that would hold nothing, if they gain by it."""
        found: dict[str, Grant] = {}
        for forecast in sorted(idle, key=lambda o: (o.left, o.app.number)):
            app = forecast.app
            for group in groups:
                room = group.room
                most = min(max(room.free, default=0), most_gpus(app, app.max_gpus))
                if group.until == inf or most < max(app.min_gpus, 1):
                    continue
                if group.worth(forecast, now, self.moves) <= 0:
                    continue
                kept = group.room.covers(app.held) and app.held and _fits(room, app.held)
                at = room.free.index(max(room.free))
                placement = app.held if kept else room.take([(at, most)])
                if kept:
                    room.hold(app.held)
                reason = f"{gpus_of(placement)} GPUs until they terminate"
                found[app.id] = Grant(placement, group.until - self.moves.leave, reason)
                break
        return found


class SpeedAsGoodput:
    """The goodput of an app with a fixed batch: iterations per second."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed

    def best(self, nodes: NDArray[Any], gpus: NDArray[Any]) -> Array:
        """Return iterations/s for each pair of node and GPU counts; nodes don't matter."""
        return np.array([1.0 / self.speed.iteration_time(int(k)) if k > 0 else 0.0 for k in gpus])


def size_weights(sizes: Sequence[float], scaling: float, exponent: float = EXPONENT) -> Array:
    """Return a weight in (0, 1] for each app's term of the mean: the smaller an app, the larger.

    heSRPT (Berg, Vesilo, Harchol-Balter, Performance 2020) minimises the mean completion time of apps whose speed
    grows as GPUs**p: the i-th largest of n gets (i/n)**c - ((i-1)/n)**c of the GPUs, c = 1 / (1 - p). Minimising
    Σ w (GPUs**p)**-q gives GPUs as w**(1 / (1 + p q)), so the weights are these shares to the power of 1 + p q.
    Of equal sizes the first counts as the larger.
    """
    rank = np.empty(len(sizes))
    rank[np.argsort(-np.asarray(sizes, float), kind="stable")] = np.arange(1, len(sizes) + 1)
    c = 1.0 / (1.0 - scaling)
    share = (rank**c - (rank - 1) ** c) ** (1.0 - scaling * exponent)
    return np.asarray(share / share.max(initial=1e-300))


def floored(problem: Problem, floors: Mapping[str, int]) -> Problem:
    """Return ``problem`` with a high cost on every row below its app's floor, so that as few as possible are."""
    changed, kept = problem.changed.copy(), problem.kept.copy()
    held = problem.current.sum(axis=1)
    top = float(problem.weight.max(initial=1.0))
    for j, id_ in enumerate(problem.ids):
        floor = min(floors.get(id_, 0), changed.shape[2])
        changed[j, :, :floor] += PRESSED * top
        if held[j] < floor:
            kept[j] += PRESSED * top
    return replace(problem, changed=changed, kept=kept)


def goodput_table(goodput: Goodput | None, most: int, several: bool = False) -> Array:
    """Return goodput by GPUs, 0 to ``most``, on one node or several; without a model it is the GPUs."""
    counts = np.arange(most + 1)
    if goodput is None:
        return counts.astype(float)
    nodes = np.minimum(counts, 2 if several else 1)
    return np.asarray(goodput.best(nodes, counts))


def _goodput(app: App) -> Goodput | None:
    if app.goodput is not None:
        return app.goodput
    return SpeedAsGoodput(app.speed) if app.speed is not None else None


def _left(app: App) -> float:
    """Return what an app has left in the unit of its goodput."""
    return app.goodput_left if app.goodput is not None else app.remaining


def _time_where_it_is(forecast: AppForecast) -> float:
    """Return the seconds that an app has left on the GPUs that it holds."""
    app = forecast.app
    gpus, goodput = gpus_of(app.held), _goodput(app)
    if goodput is None or not isfinite(_left(app)):
        return forecast.left * app.gpus / gpus
    rate = float(goodput_table(goodput, gpus, len(app.held) > 1)[-1])
    return _left(app) / rate if rate > 0 else inf


def _service(forecast: AppForecast) -> float:
    """Return the seconds that an app has left on one GPU, or on what it asks for if it can't use just one."""
    app = forecast.app
    left, goodput = _left(app), _goodput(app)
    if goodput is None or not isfinite(left):
        return forecast.left * app.gpus
    one = float(goodput_table(goodput, 1)[1])
    return left / one if one > 0 else forecast.left * app.gpus


def _mean_price(groups: Sequence[Group]) -> float:
    gpus = sum(g.room.total for g in groups if g.until == inf)
    return sum(g.price * g.room.total for g in groups if g.until == inf) / gpus if gpus else 0.0


def _staying_nodes(capacity: Capacity, groups: Sequence[Group]) -> Capacity:
    stay = {id_ for group in groups if group.until == inf for id_ in group.room.ids}
    return replace(capacity, nodes=tuple(n for n in capacity.nodes if n.id in stay))


def _fits(room: Any, placement: Placement) -> bool:
    free = dict(zip(room.ids, room.free, strict=True))
    return all(free.get(node, 0) >= gpus for node, gpus in placement)
