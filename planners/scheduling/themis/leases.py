"""Who holds which GPUs under which lease, after whatever happened since the last round (Themis, NSDI 2020, section
4)."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ebbflow.planners.model.scheduling import App, Placement, View

Counts = dict[str, int]
"""GPUs by node id."""


@dataclass(frozen=True, slots=True)
class Lease:
    """GPUs won together and given back together."""

    gpus: Placement
    until: float  # s


@dataclass(frozen=True, slots=True)
class Leases:
    """What Themis remembers between rounds: the leases of each app, the oldest first, and the rounds so far."""

    of: Mapping[str, tuple[Lease, ...]]
    rounds: int = 0


@dataclass(frozen=True, slots=True)
class BidderState:
    """One app at the start of a round."""

    app: App
    live: tuple[Lease, ...]  # leases that continue
    ended: Counts  # GPUs whose lease just ended, on nodes that can be leased again
    lost: int  # GPUs that went with their node

    @property
    def kept(self) -> Counts:
        return added(lease.gpus for lease in self.live)

    @property
    def unmet(self) -> int:
        return max(self.app.max_gpus - sum(self.kept.values()), 0)


def added(placements: Iterable[Placement]) -> Counts:
    """Return GPUs by node over several placements."""
    total: Counts = {}
    for placement in placements:
        for node, gpus in placement:
            total[node] = total.get(node, 0) + gpus
    return total


def firm_deadlines(view: View) -> dict[str, float]:
    """Return when nodes with a firm notice leave, s."""
    return {n.node_id: n.deadline for n in view.capacity.notices if n.kind == "interruption"}


def standings(view: View, memory: Leases | None, lease_s: float, pool_s: float) -> list[BidderState]:
    """Return every app's leases, trimmed to what it still holds on nodes that are still there.

    A lost node ends a lease early; a firm notice ends it at the deadline. GPUs held without a lease are leased until
    ``App.lease_until``, at most ``lease_s`` from now. What an app cannot use (above its demand, or fewer than its
    gang) it gives back.
    """
    size = {n.id: n.gpus for n in view.capacity.nodes}
    leaves = firm_deadlines(view)
    room = dict(size)
    found = []
    for app in view.apps:
        known = memory.of.get(app.id, ()) if memory else ()
        holds = {node: gpus for node, gpus in app.held if node in size}
        lost = sum(gpus for node, gpus in app.held if node not in size)
        adopted = Lease(app.held, min(app.lease_until, view.now + lease_s))
        live, ended = [], Counts()
        for lease in (*known, adopted):
            stays: Counts = {}
            for node, gpus in lease.gpus:
                mine = min(gpus, holds.get(node, 0), room.get(node, 0))
                if not mine:
                    continue
                holds[node] -= mine
                room[node] -= mine
                if min(lease.until, leaves.get(node, lease.until)) > view.now + pool_s:
                    stays[node] = mine
                elif node not in leaves:
                    ended[node] = ended.get(node, 0) + mine
            end = min([lease.until, *(leaves[node] for node in stays if node in leaves)])
            if stays:
                live.append(Lease(tuple(stays.items()), end))
        found.append(_usable(BidderState(app, tuple(live), ended, lost), leaves))
    return found


def _usable(standing: BidderState, leaves: Mapping[str, float]) -> BidderState:
    """Return the standing without GPUs above the app's demand, and without any if its gang cannot run on them."""
    app = standing.app
    surplus = sum(standing.kept.values()) - app.max_gpus
    live, ended = list(standing.live), dict(standing.ended)
    if 0 < sum(standing.kept.values()) < app.min_gpus:
        surplus = app.max_gpus  # all of it: a gang bids whole, and prefers what it had
    elif surplus <= 0:
        return standing
    while surplus > 0 and live:
        lease = live.pop()  # the youngest first
        stays = dict(lease.gpus)
        for node in sorted(stays, key=lambda n: (stays[n], n)):
            back = min(stays[node], surplus)
            stays[node] -= back
            surplus -= back
            if back and node not in leaves:
                ended[node] = ended.get(node, 0) + back
        if any(stays.values()):
            live.append(Lease(tuple((n, g) for n, g in stays.items() if g), lease.until))
    return BidderState(app, tuple(live), ended, standing.lost)
