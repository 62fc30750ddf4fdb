"""From what a plan wants everyone to hold, and the leases there are, to what is granted, extended and called back.

Nothing is granted that anybody may still use. What must wait for others stays in the plan and is granted in a later
cycle, as soon as they have let go. A gang is granted whole or not at all, and gives all of its GPUs back when it
loses one: so no two gangs can each hold a part of what both need.

Nodes of shared aggregators are leased to the service as soon as one serves there, until it has ended.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite

from ebbflow.planners.capacity.admission import TeamHeadroom
from ebbflow.planners.capacity.cycle_state import CycleState, bounds, is_gang, placement_of
from ebbflow.planners.capacity.values import DesiredAllocation, Plan
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.ledger import (
    GONE,
    AppEntered,
    AppMoved,
    AppRecord,
    AppSpec,
    Change,
    Ended,
    Extended,
    Granted,
    Lease,
    Recalled,
)

SERVICE = "aggregation-service"
"""ID of the app that has the leases on nodes of shared aggregators, each as slot 0."""
_EMPTY = 600.0  # s for an aggregator that is not needed to give its tensors away
HEAD = 10.0  # s before a lease's end at which apps begin to leave, if nobody has extended it

Counts = dict[str, int]


@dataclass(slots=True)
class Moves:
    """What is to be changed now."""

    granted: list[Lease] = field(default_factory=list)
    recalled: dict[tuple[float, str], list[int]] = field(default_factory=dict)  # by deadline and reason
    extended: dict[tuple[float, str], list[int]] = field(default_factory=dict)  # by end and reason
    waiting: dict[str, str] = field(default_factory=dict)  # apps whose GPUs others still hold
    refresh: float = inf  # when leases are to be extended again

    @property
    def changes(self) -> list[Change]:
        """Return the changes: what is called back, what continues, what is new."""
        found: list[Change] = [
            Recalled(tuple(sorted(numbers)), deadline, why)
            for (deadline, why), numbers in sorted(self.recalled.items())
        ]
        found += [
            Extended(tuple(sorted(numbers)), until, why)
            for (until, why), numbers in sorted(self.extended.items())
        ]
        if self.granted:
            found.append(Granted(tuple(self.granted)))
        return found


@dataclass(slots=True)
class _PendingGrant:
    """One app while its leases are settled."""

    record: AppRecord
    wanted: DesiredAllocation
    live: list[Lease]  # not called back, on open nodes
    gang: bool
    undecided: bool = False  # a part of marked lost, and where it goes is not decided
    keep: list[Lease] = field(default_factory=list)
    surplus: list[Lease] = field(default_factory=list)
    missing: Counts = field(default_factory=dict)


def carry_out(
    scene: CycleState, plan: Plan, silent: Collection[str], late: Collection[int], *, undecided: bool = False
) -> Moves:
    """Return what brings the leases nearer to ``plan``.

    Leases of ``silent`` apps are left alone: they may not hear that they are called back, so these last to their end.
    ``late`` ones ought to be free and are not. While it is ``undecided`` what follows from the newest changes, a gang
    that they have broken keeps the rest, and an app that the plan does not know what it has.
    """
    moves = Moves()
    _close(scene, moves)
    desks = _desks(scene, plan, silent, undecided)
    for app in scene.mine:
        if app in desks or app in silent:
            continue
        if undecided and scene.trains(scene.state.apps[app]):
            continue  # it takes part again, after a silence or a loss
        _recall_all(scene, app, moves)
    wanted = {node for desk in desks.values() for node in desk.missing}
    nodes = {node.id: node for node in scene.usable}
    free = {id_: scene.free(nodes[id_]) for id_ in sorted(wanted)}
    short = _contested(scene, desks, free, late)
    rooms = TeamHeadroom(scene)
    number = scene.state.last_lease
    patient = scene.now < plan.at + scene.settings.termination_grace_s
    for desk in desks.values():
        taken = _taken(desk, free, patient)
        if taken and not _fits(rooms, desk, taken, nodes):
            taken = {}
        if taken:
            for node, count in sorted(taken.items()):
                for slot in free[node][:count]:
                    number += 1
                    moves.granted.append(_lease(scene, desk, nodes[node], slot, number))
                del free[node][:count]
        _let_go(scene, desk, taken, short, moves)
        _count(rooms, desk, taken, nodes)
        if sum(desk.missing.values()) > sum(taken.values()):
            at = ", ".join(sorted(node for node in desk.missing if desk.missing[node] > taken.get(node, 0)))
            moves.waiting[desk.record.spec.id] = f"pending (Resources): other apps still hold GPUs of {at}"
        _extend(scene, desk, moves)
    return moves


def without(plan: Plan, returned: Mapping[str, Counts], scene: CycleState) -> Plan:
    """Return the plan without GPUs that apps gave back unasked: they get none for them before the next auction."""
    wanted = dict(plan.wanted)
    for app, counts in returned.items():
        if app not in wanted:
            continue
        left = tuple((n, g - counts.get(n, 0)) for n, g in wanted[app].placement if g > counts.get(n, 0))
        if is_gang(scene.state.apps[app], scene.settings.elastic):
            left = ()
        wanted[app] = replace(wanted[app], placement=left, reason="the app released GPUs")
    return replace(plan, wanted=wanted)


def end_of(scene: CycleState, until: float) -> float:
    """Return when a lease ends that the policy gives until ``until``.

    The policy decides anew at that moment; its holder then has the grace to save before the lease itself is over.
    """
    settings = scene.settings
    return until + settings.termination_grace_s + HEAD if isfinite(until) else scene.now + settings.lease_s


def _close(scene: CycleState, moves: Moves) -> None:
    """Call back what is on nodes that leave, or are drained."""
    for leases in scene.mine.values():
        for lease in leases.values():
            if lease.node not in scene.closed:
                continue
            by, why = scene.closed[lease.node]
            deadline = by if isfinite(by) else scene.now + scene.settings.termination_grace_s
            known = lease.recalled
            # of what is called back already the deadline only ever comes nearer
            if known is None or (isfinite(by) and deadline < known - 1e-6 and known > scene.now):
                moves.recalled.setdefault((deadline, why), []).append(lease.number)


def _desks(
    scene: CycleState, plan: Plan, silent: Collection[str], undecided: bool
) -> dict[str, _PendingGrant]:
    """Return for each app of the plan what it keeps, has beyond the plan and lacks."""
    desks = {}
    for app, wanted in plan.wanted.items():
        record = scene.state.apps.get(app)
        if record is None or not scene.trains(record) or app in silent:
            continue
        live = scene.live(app)
        there = {n: gpus for n, gpus in wanted.placement if n not in scene.closed and n in scene.state.nodes}
        left = dict(there)
        gang = is_gang(record, scene.settings.elastic)
        lost = gang and len(there) < len(wanted.placement)
        if lost:
            left = dict(placement_of(live)) if undecided else {}
        desk = _PendingGrant(record, wanted, live, gang, lost and undecided)
        for lease in sorted(live, key=lambda one: (one.node, one.slot)):
            if left.get(lease.node, 0) > 0:
                left[lease.node] -= 1
                desk.keep.append(lease)
            else:
                desk.surplus.append(lease)
        desk.missing = {node: gpus for node, gpus in left.items() if gpus > 0}
        desks[app] = desk
    return desks


def _contested(
    scene: CycleState,
    desks: Mapping[str, _PendingGrant],
    free: Mapping[str, list[int]],
    late: Collection[int],
) -> Counts:
    """Return how many GPUs are wanted on each node beyond those that are free or called back already."""
    short: Counts = {}
    for desk in desks.values():
        for node, gpus in desk.missing.items():
            short[node] = short.get(node, 0) + gpus
    short = {node: gpus - len(free[node]) for node, gpus in short.items()}
    for leases in scene.mine.values():
        for lease in leases.values():
            if lease.recalled is not None and lease.node in short and lease.number not in late:
                short[lease.node] -= 1
    return short


def _fits(rooms: TeamHeadroom, desk: _PendingGrant, taken: Counts, nodes: Mapping[str, Node]) -> bool:
    """Tell whether an app's team may have ``taken`` too, with what a move gives back."""
    gpus = sum(taken.values()) - len(desk.surplus)
    rate = _rate(taken, nodes) - sum(lease.price for lease in desk.surplus)
    return rooms.fits(desk.record.spec.team, gpus, rate)


def _count(rooms: TeamHeadroom, desk: _PendingGrant, taken: Counts, nodes: Mapping[str, Node]) -> None:
    """Count what an app has after its turn."""
    gone = sum(lease.price for lease in desk.live) - sum(lease.price for lease in desk.keep)
    gpus = sum(taken.values()) + len(desk.keep) - len(desk.live)
    rooms.add(desk.record.spec.team, gpus, _rate(taken, nodes) - gone)


def _rate(taken: Counts, nodes: Mapping[str, Node]) -> float:
    return sum(gpus * nodes[id_].price / nodes[id_].gpus for id_, gpus in taken.items())


def _taken(desk: _PendingGrant, free: Mapping[str, list[int]], patient: bool) -> Counts:
    """Return what an app gets now of what it lacks."""
    if not desk.missing:
        return {}
    there = {node: min(gpus, len(free.get(node, ()))) for node, gpus in desk.missing.items()}
    there = {node: gpus for node, gpus in there.items() if gpus > 0}
    # what it lacks is no more than what is left of its share: a node of it may have gone since it was decided
    if len(desk.keep) + sum(there.values()) < bounds(desk.record)[0]:
        return {}
    if there == desk.missing:
        return there
    if desk.gang or desk.surplus:
        return {}  # a gang, or an app that moves, goes at once
    # an app that runs waits a while for all of its share: each change of it costs a restart
    return {} if desk.keep and patient else there


def _let_go(scene: CycleState, desk: _PendingGrant, taken: Counts, short: Counts, moves: Moves) -> None:
    """Call back what an app has beyond the plan, unless it waits for a better place that nobody else delays."""
    surplus = desk.surplus
    moving = bool(desk.missing) and not taken
    if moving and surplus:
        contested = [lease for lease in surplus if short.get(lease.node, 0) > 0]
        if not contested:
            desk.keep += surplus  # it works on here until its new place is free
            return
        if not desk.gang and len(desk.keep) + len(surplus) - len(contested) >= bounds(desk.record)[0]:
            desk.keep += [lease for lease in surplus if lease not in contested]
            surplus = contested
    deadline = scene.now + scene.settings.termination_grace_s
    broken = desk.gang and not desk.undecided and bool(desk.keep) and not _whole(desk, taken)
    if not desk.gang and not taken and desk.keep and len(desk.keep) < bounds(desk.record)[0]:
        broken = True  # too few to run on
    if broken:
        surplus, desk.keep = [*surplus, *desk.keep], []
    for lease in surplus:
        moves.recalled.setdefault((deadline, _why(desk, lease)), []).append(lease.number)


def _whole(desk: _PendingGrant, taken: Counts) -> bool:
    """Tell whether a gang has all its GPUs after this cycle."""
    return len(desk.keep) + sum(taken.values()) == bounds(desk.record)[1]


def _why(desk: _PendingGrant, lease: Lease) -> str:
    if not desk.wanted.placement:
        return desk.wanted.reason or "pending (Priority)"
    return (
        f"preempted: the app migrates to {placement_text(desk.wanted)}"
        if desk.missing
        else f"preempted: its allocation is now {placement_text(desk.wanted)}"
    )


def placement_text(wanted: DesiredAllocation) -> str:
    """Return a placement for people."""
    return ", ".join(f"{gpus} of {node}" for node, gpus in wanted.placement) or "nothing"


def _recall_all(scene: CycleState, app: str, moves: Moves) -> None:
    """Call back all that an app holds that the plan does not know."""
    record = scene.state.apps[app]
    why = f"the app has {record.phase}" if not scene.trains(record) else "the app is not schedulable"
    deadline = scene.now + scene.settings.termination_grace_s
    for lease in scene.live(app):
        moves.recalled.setdefault((deadline, why), []).append(lease.number)


def _extend(scene: CycleState, desk: _PendingGrant, moves: Moves) -> None:
    """Let what an app keeps continue before it ends."""
    settings = scene.settings
    end = end_of(scene, desk.wanted.until)
    slack = min(max(settings.lease_s / 2, 1.5 * HEAD), 0.9 * settings.lease_s)
    for lease in desk.keep:
        if isfinite(desk.wanted.until):
            late = end > lease.until + 0.5
        else:
            late = lease.until - scene.now < slack
            moves.refresh = min(moves.refresh, (end if late else lease.until) - slack)
        if late:
            moves.extended.setdefault((end, desk.wanted.reason), []).append(lease.number)


def _lease(scene: CycleState, desk: _PendingGrant, node: Node, slot: int, number: int) -> Lease:
    return Lease(
        number,
        desk.record.spec.id,
        node.id,
        slot,
        scene.now,
        end_of(scene, desk.wanted.until),
        scene.state.revision,
        node.price / node.gpus,
        None,
        desk.wanted.reason,
    )


def serving(scene: CycleState, last: int) -> tuple[list[Change], tuple[tuple[str, float], ...]]:
    """Return what changes of the leases on aggregators' nodes, and which aggregators must be empty by when.

    Args:
        scene: of the cycle.
        last: the highest number of a lease, those included that are granted in this cycle.
    """
    found, state, now = scene.aggregation, scene.state, scene.now
    held = {lease.node: lease for lease in state.leases.values() if lease.app == SERVICE}
    if found is None:  # whether they serve is not known
        there = dict.fromkeys(held, "")
    else:
        there = {one.node: one.aggregator for one in found.nodes if one.node in state.nodes}
    changes: list[Change] = []
    for node, lease in sorted(held.items()):
        if node not in state.nodes:
            changes.append(Ended((lease.number,), f"{node} is gone"))
        elif node not in there:
            changes.append(Ended((lease.number,), f"the aggregator on {node} has ended"))
        elif node in scene.closed and lease.recalled is None:
            by, why = scene.closed[node]
            changes.append(Recalled((lease.number,), by if isfinite(by) else now + _EMPTY, why))
        elif (
            node not in scene.closed
            and lease.recalled is None
            and lease.until - now < scene.settings.lease_s / 2
        ):
            changes.append(Extended((lease.number,), now + scene.settings.lease_s, "its aggregator serves"))
    if found is None:
        return changes, ()
    granted = []
    for node, name in sorted(there.items()):
        if node in held or node in scene.closed or state.nodes[node].gpus:
            continue  # nodes with GPUs are leased by slot to who trains on them
        last += 1
        until, price = now + scene.settings.lease_s, state.nodes[node].price
        why = f"aggregator {name.partition('@')[0]} serves the cluster's trainings"
        granted.append(Lease(last, SERVICE, node, 0, now, until, state.revision, price, None, why))
    record = state.apps.get(SERVICE)
    if granted:
        if record is None or record.phase in GONE:
            spec = AppSpec(SERVICE, "aggregation", title="shared aggregators")
            changes += [AppEntered(spec), AppMoved(SERVICE, "running")]
        changes.append(Granted(tuple(granted)))
    elif record is not None and record.phase not in GONE and not there:
        changes.append(AppMoved(SERVICE, "finished", "no aggregator serves"))
    drains = []
    for one in found.nodes:
        if one.node in scene.closed:
            by = scene.closed[one.node][0]
            by = by if isfinite(by) else now + _EMPTY
            if one.draining is None or (by < one.draining - 1.0 and isfinite(scene.closed[one.node][0])):
                drains.append((one.aggregator, by))
    return changes, tuple(drains)
