"""Where GPUs are taken, apart from who gets them.

A placer takes the GPUs of one app out of a ``FreeCapacity`` and returns the placement in the order of taking, or
``None`` and takes nothing where its rule finds no place.
"""

from collections.abc import Callable, Iterable, Sequence

from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.scheduling import App, Placement


class FreeCapacity:
    """Free GPUs by node, in the order of the nodes."""

    __slots__ = ("_index", "free", "ids", "nodes")

    def __init__(self, nodes: Sequence[Node], held: Iterable[Placement] = ()) -> None:
        """Count what is free on ``nodes`` once ``held`` is taken out; GPUs held on other nodes don't matter."""
        self.nodes = nodes
        self.ids = [node.id for node in nodes]
        self.free = [node.gpus for node in nodes]
        self._index = {id_: at for at, id_ in enumerate(self.ids)}
        for placement in held:
            self.hold(placement)

    def copy(self) -> "FreeCapacity":
        """Return an independent copy."""
        other = FreeCapacity.__new__(FreeCapacity)
        other.nodes, other.ids, other._index = self.nodes, self.ids, self._index
        other.free = self.free.copy()
        return other

    def hold(self, placement: Placement) -> None:
        """Take ``placement`` out."""
        for id_, gpus in placement:
            at = self._index.get(id_)
            if at is not None:
                self.free[at] -= gpus

    def give_back(self, placement: Placement) -> None:
        """Put ``placement`` back."""
        for id_, gpus in placement:
            at = self._index.get(id_)
            if at is not None:
                self.free[at] += gpus

    def covers(self, placement: Placement) -> bool:
        """Tell whether all nodes of ``placement`` are among these."""
        return all(id_ in self._index for id_, _ in placement)

    @property
    def total(self) -> int:
        return sum(self.free)

    def take(self, picks: Sequence[tuple[int, int]]) -> Placement:
        """Take (position of the node, GPUs) and return them as a placement."""
        for at, gpus in picks:
            self.free[at] -= gpus
        return tuple((self.ids[at], gpus) for at, gpus in picks)


Placer = Callable[[FreeCapacity, App, int], Placement | None]
"""Takes that many GPUs for an app out of a room."""


def most_free_first(room: FreeCapacity, app: App, gpus: int) -> Placement | None:
    """Take from the node with most free GPUs, the first among equals, until it is enough (AdaptDL's simulator)."""
    free = room.free
    picks: list[tuple[int, int]] = []
    if room.total < gpus:
        return None
    while gpus > 0:
        most = max(free)
        at = free.index(most)
        taken = min(most, gpus)
        picks.append((at, taken))
        free[at] -= taken
        gpus -= taken
    return tuple((room.ids[at], taken) for at, taken in picks)


def fewest_nodes(room: FreeCapacity, app: App, gpus: int) -> Placement | None:
    """Take as few nodes as the free GPUs allow, leaving the least behind on the last one (Tiresias, section 3.4).

    One node with enough is best, the fullest of these; otherwise the nodes with most free GPUs, the last one again
    the fullest that covers the rest.
    """
    free = room.free
    if sum(free) < gpus:
        return None
    order = sorted(range(len(free)), key=lambda at: (-free[at], at))
    picks: list[tuple[int, int]] = []
    for number, at in enumerate(order):
        if free[at] >= gpus:
            last = min((other for other in order[number:] if free[other] >= gpus), key=lambda o: (free[o], o))
            picks.append((last, gpus))
            break
        picks.append((at, free[at]))
        gpus -= free[at]
    return room.take(picks)


def fill_fragments(room: FreeCapacity, app: App, gpus: int) -> Placement | None:
    """Take the nodes with least free GPUs first, so that whole nodes stay whole (Tiresias, section 3.4)."""
    free = room.free
    if sum(free) < gpus:
        return None
    picks: list[tuple[int, int]] = []
    for at in sorted((at for at, left in enumerate(free) if left), key=lambda at: (free[at], at)):
        taken = min(free[at], gpus)
        picks.append((at, taken))
        gpus -= taken
        if not gpus:
            break
    return room.take(picks)


def by_skew(room: FreeCapacity, app: App, gpus: int) -> Placement | None:
    """Consolidate apps whose model is skewed, fill fragments with all others (Tiresias, NSDI 2019, section 3.4)."""
    place = fewest_nodes if app.skewed and gpus > 1 else fill_fragments
    return place(room, app, gpus)


def consolidated(room: FreeCapacity, app: App, gpus: int) -> Placement | None:
    """Take no more nodes than ``gpus`` needs on empty ones, all in one rack, or nothing (YARN-CS).

    Up to a node's GPUs: one node, the fullest that fits. More: entirely free nodes of one rack, and one node there
    with the rest, the fullest that fits. The rack with the fewest free GPUs that can serve is taken.
    """
    racks: dict[str, list[int]] = {}
    for at, node in enumerate(room.nodes):
        racks.setdefault(node.rack, []).append(at)
    free = room.free
    for members in sorted(racks.values(), key=lambda m: (sum(free[at] for at in m), m[0])):
        picks = _whole(room, members, gpus)
        if picks is not None:
            return room.take(picks)
    return None


def _whole(room: FreeCapacity, members: Sequence[int], gpus: int) -> list[tuple[int, int]] | None:
    size = max(room.nodes[at].gpus for at in members)
    if size == 0:
        return None
    whole, rest = divmod(gpus, size)
    empty = [at for at in members if room.free[at] == size]
    if len(empty) < whole:
        return None
    picks = [(at, size) for at in empty[:whole]]
    if rest:
        taken = set(empty[:whole])
        fits = [at for at in members if at not in taken and room.free[at] >= rest]
        if not fits:
            return None
        picks.append((min(fits, key=lambda at: (room.free[at], at)), rest))
    return picks


def rack_aware(room: FreeCapacity, app: App, gpus: int) -> Placement | None:
    """Stay in one rack if any can serve (the one with the least room), else take the emptiest racks first.

    Within a rack as few nodes as its free GPUs allow.
    """
    racks: dict[str, list[int]] = {}
    for at, node in enumerate(room.nodes):
        racks.setdefault(node.rack, []).append(at)
    room_of = [(sum(room.free[at] for at in members), members) for members in racks.values()]
    if sum(left for left, _ in room_of) < gpus:
        return None
    fits = [entry for entry in room_of if entry[0] >= gpus]
    chosen = (
        [min(fits, key=lambda e: (e[0], e[1][0]))]
        if fits
        else sorted(room_of, key=lambda e: (-e[0], e[1][0]))
    )
    placement: list[tuple[str, int]] = []
    for left, members in chosen:
        wanted = min(left, gpus)
        if not wanted:
            break
        part = FreeCapacity([room.nodes[at] for at in members])
        part.free = [room.free[at] for at in members]
        picked = fewest_nodes(part, app, wanted)
        assert picked is not None  # the rack's room was counted above
        room.hold(picked)
        placement += picked
        gpus -= wanted
    return tuple(placement)
