"""How far a gang may spread, and when to stop waiting for a better place (lessons of the Philly study, ATC 2019).

Levels: as few nodes as it needs, in one rack; one rack; anywhere.
"""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from math import inf

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.scheduling import App, Placement, gpus_of
from ebbflow.planners.scheduling.placement import FreeCapacity, consolidated, rack_aware


class Spread(IntEnum):
    """How far apart a gang's GPUs are, best first."""

    FEWEST_NODES = 0
    ONE_RACK = 1
    ANYWHERE = 2


SLOWDOWNS = {False: (1.0, 1.0, 1.05), True: (1.0, 1.1, 1.5)}
"""Step time by level over that of the best, for models whose tensors are even and for skewed ones, until measured."""


def place_within(room: FreeCapacity, app: App, gpus: int, level: Spread) -> Placement | None:
    """Take ``gpus`` GPUs at ``level`` or better, the best level first; ``None`` takes nothing."""
    placement = consolidated(room, app, gpus)
    if placement is None and level >= Spread.ONE_RACK and (level > Spread.ONE_RACK or _rack_fits(room, gpus)):
        placement = rack_aware(room, app, gpus)
    return placement


def feasible(room: FreeCapacity, app: App, gpus: int, level: Spread) -> bool:
    """Tell whether ``gpus`` GPUs are free at ``level`` or better."""
    if level == Spread.ANYWHERE:
        return room.total >= gpus
    if level == Spread.ONE_RACK and _rack_fits(room, gpus):
        return True
    return consolidated(room.copy(), app, gpus) is not None


def spread_of(placement: Placement, nodes: Iterable[Node]) -> Spread:
    """Return how far ``placement`` is spread over ``nodes``."""
    known = {node.id: node for node in nodes}
    taken = [known[id_] for id_, _ in placement]
    if len({node.rack for node in taken}) > 1:
        return Spread.ANYWHERE
    gpus, needed = gpus_of(placement), 0
    for size in sorted((node.gpus for node in taken), reverse=True):
        if gpus <= 0:
            break
        gpus -= size
        needed += 1
    return Spread.FEWEST_NODES if len(placement) <= needed else Spread.ONE_RACK


def expected_waits(
    room: FreeCapacity,
    app: App,
    gpus: int,
    releases: Sequence[tuple[float, Placement]],
    unknown: float = 600.0,
) -> tuple[float, ...]:
    """Return the seconds until each level becomes feasible, if nothing is started before.

    ``releases`` are (seconds from now, placement given back) in any order; those at infinity are never given back.
    A level that no known release makes feasible takes ``unknown`` s if it fits the nodes at all, else for ever.
    """
    waits = [inf] * len(Spread)
    for level in Spread:
        if feasible(FreeCapacity(room.nodes), app, gpus, level):
            waits[level] = unknown
    later = room.copy()
    open_ = [level for level in Spread if waits[level] < inf]
    for seconds, placement in [(0.0, ()), *sorted((r for r in releases if r[0] < inf), key=lambda r: r[0])]:
        later.give_back(placement)
        found = [level for level in open_ if feasible(later, app, gpus, level)]
        for level in found:
            waits[level] = max(seconds, 0.0)
        open_ = [level for level in open_ if level not in found]
        if not open_:
            break
    return tuple(waits)


def best_level(waits: Sequence[float], slowdowns: Sequence[float], remaining: float) -> Spread:
    """Return the level at which the app is expected to finish first: least waiting + slowdown · remaining time.

    ``waits`` are seconds until each level is feasible, ``remaining`` the seconds left at the best level. Of equal
    levels the better one. Raises ``OptionError`` for a slowdown below 1 or one that falls with the distance.
    """
    if any(s < 1 for s in slowdowns) or list(slowdowns) != sorted(slowdowns):
        raise OptionError(f"slowdowns must be >= 1 and grow with the distance; got {tuple(slowdowns)}")
    return min(Spread, key=lambda level: (waits[level] + slowdowns[level] * remaining, level))


def allowed_level(
    waits: Sequence[float], slowdowns: Sequence[float], remaining: float, waited: float
) -> tuple[Spread, float]:
    """Return how far the app may spread now, and after how many seconds more it may spread further.

    The best level at first. Whoever has waited as long as the next level would cost may take that as well (the rule
    of ski rental: waiting and slowdown together at most twice the better of the two).
    """
    level = best_level(waits, slowdowns, remaining)
    while level < Spread.ANYWHERE:
        further = Spread(level + 1)
        price = (slowdowns[further] - 1) * remaining + waits[further]
        if waited < price:
            return level, price - waited
        level = further
    return level, inf


def _rack_fits(room: FreeCapacity, gpus: int) -> bool:
    racks: dict[str, int] = {}
    for at, node in enumerate(room.nodes):
        racks[node.rack] = racks.get(node.rack, 0) + room.free[at]
    return max(racks.values(), default=0) >= gpus
