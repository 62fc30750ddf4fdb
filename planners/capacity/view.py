"""What policies see of live apps: the same values as in the simulator, from leases and the apps' own reports."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import inf, isfinite

from ebbflow.planners.capacity.cycle_state import CycleState, bounds, is_gang, is_trainer, needs, placement_of
from ebbflow.planners.capacity.estimates import AppEstimate, LiveBidder, belief
from ebbflow.planners.capacity.values import AppHistoryRecord, Memory, Team
from ebbflow.planners.model.capacity import Capacity, Node
from ebbflow.planners.model.ledger import AppRecord, AppSpec
from ebbflow.planners.model.scheduling import App, Placement, View, gpus_of


@dataclass(frozen=True, slots=True)
class PolicyView:
    """A view for a policy, what else is known of its apps, and who was left out, with the reason."""

    view: View
    records: Mapping[str, AppRecord]
    beliefs: Mapping[str, AppEstimate]
    left_out: Mapping[str, str]


def active(scene: CycleState) -> list[AppRecord]:
    """Return the apps that may hold GPUs, in the order of their arrival."""
    return [record for record in scene.active if is_trainer(record)]


def lives(scene: CycleState, memory: Memory) -> tuple[dict[str, AppHistoryRecord], tuple[float, float]]:
    """Return what is known of each app's life up to now, and the integral of the number of apps."""
    apps = active(scene)
    passed = max(scene.now - memory.at, 0.0) if isfinite(memory.at) else 0.0
    area = memory.crowd[0] + memory.crowd[1] * passed
    found: dict[str, AppHistoryRecord] = {}
    for record in apps:
        id_ = record.spec.id
        held = placement_of(lease for lease in scene.held(id_) if lease.recalled is None)
        gpus = gpus_of(held)
        before = memory.ran.get(id_)
        if before is None:
            seconds = service_of(scene, record) / max(gpus, bounds(record)[1])
            found[id_] = AppHistoryRecord(area, scene.now, seconds, 0, gpus, held)
            continue
        again = bool(held) and held != before.held and before.most > 0
        found[id_] = AppHistoryRecord(
            before.crowd,
            before.since,
            before.seconds + (passed if before.held else 0.0),
            before.restarts + again,
            max(before.most, gpus),
            held,
        )
    return found, (area, float(len(apps)))


def look(
    scene: CycleState,
    memory: Memory,
    lives: Mapping[str, AppHistoryRecord],
    crowd: tuple[float, float],
    stuck: Collection[int],
    out: Mapping[str, str],
    most_ever: float,
) -> PolicyView:
    """Return what the policy is to see.

    ``stuck`` are leases that nobody knows when they end: their GPUs are not there for anybody. ``out`` are apps that
    take no part, with the reason. ``most_ever`` is the number of GPUs that the cluster could have at once.
    """
    settings, elastic = scene.settings, scene.settings.elastic
    left_out = dict(out)
    nodes = without_stuck(scene, stuck)
    total = sum(node.gpus for node in nodes)
    records, taking = {}, []
    for record in active(scene):
        id_ = record.spec.id
        if id_ in left_out:
            continue
        least = needs(record, elastic)
        if least > total:
            more = "" if least <= most_ever else f"; the cluster's maximum is {most_ever:g}"
            left_out[id_] = f"needs a gang of {least} GPUs (all-or-nothing); {total} exist{more}"
            continue
        records[id_] = record
        taking.append(record)
    held = standing(scene, memory, taking, nodes)
    types = {node.instance_type for node in nodes}
    weights = team_weights([record.spec for record in taking], settings.teams)
    apps, beliefs = [], {}
    for record in taking:
        id_ = record.spec.id
        app, believed = _app(scene, record, lives.get(id_), crowd, held[id_], types, total)
        app.weight = weights[id_] * pressure(
            believed, record, scene.now, settings.deadline_priority_boost_max
        )
        beliefs[id_] = believed
        apps.append(app)
    notices = tuple(n for n in scene.state.notices.values() if n.kind == "rebalance")
    capacity = Capacity(scene.state.revision, nodes, notices, scene.now, scene.state.hazard)
    return PolicyView(View(scene.now, apps, capacity), records, beliefs, left_out)


def without_stuck(scene: CycleState, leases: Collection[int]) -> tuple[Node, ...]:
    """Return the usable nodes with the GPUs that none of ``leases`` holds."""
    stuck: dict[str, int] = {}
    for number in leases:
        node = scene.state.leases[number].node
        stuck[node] = stuck.get(node, 0) + 1
    if not stuck:
        return scene.usable
    shrunk = (replace(n, gpus=n.gpus - stuck[n.id]) if n.id in stuck else n for n in scene.usable)
    return tuple(node for node in shrunk if node.gpus > 0)


def standing(
    scene: CycleState, memory: Memory, records: list[AppRecord], nodes: tuple[Node, ...]
) -> dict[str, Placement]:
    """Return what each app holds for the policy: what the standing plan promised it, else its leases.

    A promise that waits for others to let go counts as held, or the policy would take it back the next time it is
    asked. A gang of which a part is lost holds nothing.
    """
    elastic = scene.settings.elastic
    room = {node.id: node.gpus for node in nodes}
    held: dict[str, Placement] = {}
    live = {record.spec.id: placement_of(scene.live(record.spec.id)) for record in records}
    for placement in live.values():
        for node, gpus in placement:
            room[node] = room.get(node, 0) - gpus
    for record in records:
        id_ = record.spec.id
        has = live[id_]
        promised = memory.plan.wanted.get(id_)
        wish = promised.placement if promised is not None else ()
        if wish and wish != has:
            for node, gpus in has:
                room[node] += gpus
            if all(room.get(node, 0) >= gpus for node, gpus in wish):
                has = tuple(sorted(wish))
            for node, gpus in has:
                room[node] -= gpus
        if has and is_gang(record, elastic) and gpus_of(has) != bounds(record)[1]:
            has = ()
        held[id_] = has
    return held


def team_weights(specs: Collection[AppSpec], teams: Mapping[str, Team]) -> dict[str, float]:
    """Return the weight of each app.

    A team with settings of its own has its weight for all its apps together, times the mean number of apps a team;
    among them their own weights decide. An app of another team counts by its own weight.
    """
    sums: dict[str, float] = {}
    counts: dict[str, int] = {}
    for spec in specs:
        name = spec.team
        if name in teams:
            sums[name] = sums.get(name, 0.0) + spec.weight
            counts[name] = counts.get(name, 0) + 1
    mean = sum(counts.values()) / len(counts) if counts else 1.0
    found = {}
    for spec in specs:
        team = teams.get(spec.team)
        own = spec.weight if spec.weight > 0 and isfinite(spec.weight) else 1.0
        if team is None or not sums[spec.team] > 0:
            found[spec.id] = own
        else:
            found[spec.id] = team.weight * own / sums[spec.team] * mean
    return found


def pressure(believed: AppEstimate, record: AppRecord, now: float, most: float) -> float:
    """Return times how much an app counts because of its deadline: twice the time that it needs on what it asked for
    over the time that it has, from 1 to ``most``.

    It does not depend on what the app holds, so getting more GPUs does not make it lose them again.
    """
    deadline = record.spec.deadline
    if deadline is None or not deadline > now:
        return 1.0
    return min(max(2.0 * believed.seconds(bounds(record)[1]) / (deadline - now), 1.0), most)


def service_of(scene: CycleState, record: AppRecord) -> float:
    """Return the GPU-seconds that an app has had, those of running leases up to now."""
    running = sum(max(0.0, scene.now - lease.since) for lease in scene.held(record.spec.id))
    return record.service + running


def _app(
    scene: CycleState,
    record: AppRecord,
    ran: AppHistoryRecord | None,
    crowd: tuple[float, float],
    held: Placement,
    types: set[str],
    cluster: int,
) -> tuple[App, AppEstimate]:
    spec = record.spec
    least, asked, most = bounds(record)
    service = service_of(scene, record)
    report = scene.report(spec.id)
    believed = belief(report, asked, most, service, spec.kind == "tuning", scene.links)
    gpus = gpus_of(held)
    if is_gang(record, True):
        least = most = asked
    else:
        most = min(most, max(believed.most, asked, gpus))
    ends = [lease.until for lease in scene.live(spec.id)]
    area, apps = crowd
    ran = ran or AppHistoryRecord(area, scene.now)
    lived = scene.now - ran.since
    bidder = LiveBidder(
        arrival=record.entered,
        cluster_gpus=max(cluster, 1),
        n_avg=max((area - ran.crowd) / lived if lived > 0 else apps, 1.0),
        believed=replace(believed, most=most),
    )
    each = believed.speed.iteration_time(asked)
    rate = 1.0 / each if each > 0 else 0.0
    return (
        App(
            id=spec.id,
            number=record.number,
            arrival=record.entered,
            gpus=asked,
            min_gpus=least,
            max_gpus=most,
            team=spec.team,
            model=spec.title or spec.kind,
            held=held,
            lease_until=min(ends, default=inf),
            service=service,
            run_time=ran.seconds,
            first_start=record.first_lease,
            restarts=ran.restarts,
            # policies let an app have twice what it ever had; what its user asked for it may have at once
            most_gpus=max(ran.most, gpus, (asked + 1) // 2),
            remaining=believed.left,
            throughputs=dict.fromkeys(sorted(types), rate),
            speed=believed.speed,
            goodput=believed.goodput,
            goodput_left=believed.left if believed.goodput is not None else inf,
            bidder=bidder,
        ),
        believed,
    )
