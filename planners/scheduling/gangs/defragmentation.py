"""Moving small jobs so that a large gang finds whole nodes (lessons of the Philly study, ATC 2019)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.placement import FreeCapacity

MOST_MOVES = 8
BENEFIT_FACTOR = 2.0  # by which the waiting saved must exceed the cost of moving


class Resident(NamedTuple):
    """A job that holds GPUs of one node."""

    app: str
    node: str
    gpus: int
    seconds: float = 60.0  # that moving it costs: checkpoint, restart and work lost since the last checkpoint
    movable: bool = True  # has a checkpoint, is on one node only, and will not end before it could be moved


class Move(NamedTuple):
    """Take a job from one node to another."""

    app: str
    gpus: int
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """Moves after which a gang finds its place, their cost and what they save, GPU-seconds."""

    moves: tuple[Move, ...]
    nodes: tuple[str, ...]  # where the gang then fits, emptied ones and others
    cost: float
    benefit: float


def fragmentation(free: Sequence[int], gpus: int) -> float:
    """Return the share of free GPUs that gangs of ``gpus`` on one node cannot use: 1 − Σ⌊free/g⌋·g / Σ free.

    >>> fragmentation([2, 2, 2, 2], 4), fragmentation([2, 2, 2, 2], 2)
    (1.0, 0.0)

    Raises ``OptionError``.
    """
    if gpus < 1:
        raise OptionError(f"gpus must be >= 1; got {gpus}")
    total = sum(free)
    return 1.0 - sum(left // gpus * gpus for left in free) / total if total else 0.0


def plan_migrations(
    room: FreeCapacity, gpus: int, residents: Sequence[Resident], wait: float, seconds: float = 90.0
) -> MigrationPlan | None:
    """Return the cheapest moves after which ``gpus`` GPUs are free on as few nodes as they need, in one rack.

    ``wait`` is how long the gang would wait otherwise and ``seconds`` how long the moves take. ``None``: no moves
    are needed, none suffice (a job goes only to a partly used node with room for all of it), more than eight would
    be, or the benefit, gpus · (wait − seconds), is not twice their cost. Nothing in ``room`` changes.
    """
    racks: dict[str, list[int]] = {}
    for at, node in enumerate(room.nodes):
        racks.setdefault(node.rack, []).append(at)
    plans = []
    for rack in sorted(racks):
        if sum(room.free[at] for at in racks[rack]) >= gpus:
            plan = _in_rack(room, racks[rack], gpus, residents)
            if plan is not None:
                plans.append(plan)
    benefit = gpus * max(0.0, wait - seconds)
    plans = [p for p in plans if len(p.moves) <= MOST_MOVES]
    if not plans or any(not p.moves for p in plans):
        return None
    best = min(plans, key=lambda p: (p.cost, len(p.moves)))
    if benefit <= BENEFIT_FACTOR * best.cost:
        return None
    return MigrationPlan(best.moves, best.nodes, best.cost, benefit)


def _in_rack(
    room: FreeCapacity, members: Sequence[int], gpus: int, residents: Sequence[Resident]
) -> MigrationPlan | None:
    size = max(room.nodes[at].gpus for at in members)
    if size == 0:
        return None
    whole, rest = divmod(gpus, size)
    after = room.copy()
    position = {id_: at for at, id_ in enumerate(room.ids)}
    here: dict[int, list[Resident]] = {}
    for resident in residents:
        here.setdefault(position[resident.node], []).append(resident)
    chosen: list[int] = []
    moves: list[Move] = []
    cost = 0.0
    for need in [size] * whole + ([rest] if rest else []):
        found = _make_room(after, members, need, here, chosen)
        if found is None:
            return None
        at, moved = found
        chosen.append(at)
        for resident, target in moved:
            here[at].remove(resident)
            here.setdefault(target, []).append(resident._replace(node=after.ids[target], movable=False))
            moves.append(Move(resident.app, resident.gpus, resident.node, after.ids[target]))
            cost += resident.gpus * resident.seconds
    return MigrationPlan(tuple(moves), tuple(after.ids[at] for at in chosen), cost, 0.0)


def _make_room(
    after: FreeCapacity, members: Sequence[int], need: int, here: dict[int, list[Resident]], chosen: list[int]
) -> tuple[int, list[tuple[Resident, int]]] | None:
    """Return the cheapest node to bring to ``need`` free GPUs and who goes where; ``after`` then has it so."""

    def cost(at: int) -> tuple[float, int, int]:
        if after.free[at] >= need:  # nothing to do: the fullest that fits
            return 0.0, after.free[at], at
        return sum(r.gpus * r.seconds for r in here.get(at, ())), after.free[at], at

    for at in sorted((at for at in members if at not in chosen and after.nodes[at].gpus >= need), key=cost):
        free = list(after.free)
        moved: list[tuple[Resident, int]] = []
        for resident in sorted(here.get(at, ()), key=lambda r: (-r.gpus, r.app)):
            if free[at] >= need:
                break
            target = _best_fit(after, free, resident, {at, *chosen})
            if target is None:
                break
            free[at] += resident.gpus
            free[target] -= resident.gpus
            moved.append((resident, target))
        if free[at] >= need:
            after.free = free
            return at, moved
    return None


def _best_fit(after: FreeCapacity, free: Sequence[int], resident: Resident, barred: set[int]) -> int | None:
    if not resident.movable:
        return None
    fits = [
        at
        for at, node in enumerate(after.nodes)
        if at not in barred and resident.gpus <= free[at] < node.gpus
    ]
    return min(fits, key=lambda at: (free[at], at), default=None)
