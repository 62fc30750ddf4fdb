"""Who is still there: leases that end because their app let go, its node left or it was ended by force; apps that
fell silent.

The leases of a node that is not seen any more end at once. Its machine may be there all the same, with its processes:
then it is seen again, often by the next look. So a node that comes back is closed until the apps that had it have let
go, or what they left is ended by force. No time is set for that: who is silent lets go when its lease and the grace
are over, and who is not says whether it has.

Silence is measured in the loop's own time, a short step at most for each cycle: an outage of the ledger, a loop that
was away or a clock that jumps makes nobody silent.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from ebbflow.planners.capacity.cycle_state import CycleState
from ebbflow.planners.capacity.values import Evict, LastHeartbeat, Memory, OrphanedLease, SchedulerInput
from ebbflow.planners.model.ledger import OVER, AppMoved, Change, Decided, Ended, Lease

STEPS = 3  # cycles at least between an app's last word and its loss
LATE = 2.0  # s after a deadline: the time that killing takes, and that clocks differ
AGAIN = 5.0  # s between calls to end the same by force
LET_GO = "released by the app"


@dataclass(slots=True)
class LivenessResult:
    """What was found out, and what follows from it."""

    heartbeats: dict[str, LastHeartbeat]
    evicting: dict[tuple[str, str], float]
    changes: list[Change] = field(default_factory=list)
    evict: list[Evict] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)  # apps that do not take part, with the reason
    late: set[int] = field(default_factory=set)  # leases that ought to have been let go of
    left: dict[int, OrphanedLease] = field(
        default_factory=dict
    )  # leases of nodes that left, not let go of for certain
    awaited: set[str] = field(default_factory=set)  # nodes that are back and closed because of them
    returned: dict[str, dict[str, int]] = field(
        default_factory=dict
    )  # GPUs that apps gave back unasked, by node


def look(scene: CycleState, situation: SchedulerInput, memory: Memory) -> LivenessResult:
    """Return who is there, and end what has ended in ``scene``."""
    found = LivenessResult(_heartbeats(scene, memory), {})
    ended: dict[str, list[Lease]] = {}
    for leases in scene.mine.values():
        for lease in leases.values():
            why = _over(scene, situation, memory, lease, found)
            if why:
                ended.setdefault(why, []).append(lease)
                if why == LET_GO and lease.recalled is None:
                    counts = found.returned.setdefault(lease.app, {})
                    counts[lease.node] = counts.get(lease.node, 0) + 1
    for why, some in ended.items():
        found.changes.append(Ended(tuple(sorted(lease.number for lease in some)), why))
        scene.end(some)
    _left(scene, situation, memory, [lease for some in ended.values() for lease in some], found)
    _record_lost_nodes(scene, ended, found)
    _by_force(scene, memory, found)
    _lost(scene, found)
    return found


def _heartbeats(scene: CycleState, memory: Memory) -> dict[str, LastHeartbeat]:
    """Return for how long each app has been quiet."""
    most = scene.settings.heartbeat_timeout_s / STEPS
    step = min(max(scene.now - memory.at, 0.0), most) if memory.at > 0 else 0.0
    found = {}
    known = {record.spec.id: record for record in scene.active}
    known |= {id_: scene.state.apps[id_] for id_ in scene.mine}
    for id_, record in known.items():
        report = scene.report(id_)
        reported = (report.at if report is not None else 0.0, record.phase)
        before = memory.heartbeats.get(id_)
        # an app that is lost and enters again has said something, too
        if before is None or before.reported != reported:
            found[id_] = LastHeartbeat(reported)
        else:
            found[id_] = LastHeartbeat(reported, before.quiet + step)
    return found


def is_silent(scene: CycleState, found: LivenessResult, app: str) -> bool:
    """Tell whether an app has said nothing for too long."""
    heartbeats = found.heartbeats.get(app)
    return heartbeats is None or heartbeats.quiet >= scene.settings.heartbeat_timeout_s


def _over(
    scene: CycleState, situation: SchedulerInput, memory: Memory, lease: Lease, found: LivenessResult
) -> str:
    """Return why nobody uses the GPU of a lease any more; empty: somebody may."""
    app = lease.app
    if lease.node not in scene.state.nodes:
        return f"{lease.node} is gone"
    report = scene.report(app)
    if report is not None and lease.number in report.released:
        return LET_GO
    return _unused(scene, situation, memory, lease, is_silent(scene, found, app))


def _unused(scene: CycleState, situation: SchedulerInput, memory: Memory, lease: Lease, silent: bool) -> str:
    """Return why an app uses the GPU of a lease no more without a word of its own about it; empty: it may."""
    app = lease.app
    if (app, lease.node) in situation.evicted and (app, lease.node) in memory.evicting:
        return "terminated by the lease enforcer"
    report, record = scene.report(app), scene.state.apps.get(app)
    over = record is not None and record.phase in OVER
    if over and report is not None and report.phase in OVER and not report.holds:
        return f"the app has {report.phase}"
    # it may not have heard that it was called back, and keeps what it has for the grace while it hears nothing
    end = lease.until + scene.settings.termination_grace_s + LATE
    return "heartbeats missed until its lease expired" if silent and scene.now >= end else ""


def _left(
    scene: CycleState,
    situation: SchedulerInput,
    memory: Memory,
    ended: Iterable[Lease],
    found: LivenessResult,
) -> None:
    """Note which leases ended with their node and may still be used, and close the nodes among them that are back."""
    left = {number: one for number, one in memory.left.items() if number not in scene.state.leases}
    for lease in ended:
        if lease.node not in scene.state.nodes:
            report = scene.report(lease.app)
            left[lease.number] = OrphanedLease(lease, scene.now, report.at if report is not None else None)
    for number, one in left.items():
        mute = one.mute or is_silent(scene, found, one.lease.app)
        if _unused(scene, situation, memory, one.lease, mute) or (not mute and _has_let_go(scene, one)):
            continue
        found.left[number] = replace(one, mute=mute)
        node = one.lease.node
        if node in scene.state.nodes:
            found.awaited.add(node)
            if node not in scene.closed:
                scene.close(node, f"{node} is reachable again; {one.lease.app} may still use it")


def _has_let_go(scene: CycleState, left: OrphanedLease) -> bool:
    """Tell whether an app has said that it does not use a GPU whose lease ended with the node."""
    report, number = scene.report(left.lease.app), left.lease.number
    if report is None:
        return False
    # only another report than the last before the end can know of it
    return number in report.released or (report.at != left.reported and number not in report.holds)


def _record_lost_nodes(scene: CycleState, ended: dict[str, list[Lease]], found: LivenessResult) -> None:
    """Say which apps lost GPUs with nodes that left before they had let go."""
    lost: dict[str, dict[str, int]] = {}
    for some in ended.values():
        for lease in some:
            if lease.node not in scene.state.nodes:
                apps = lost.setdefault(lease.node, {})
                apps[lease.app] = apps.get(lease.app, 0) + 1
    for node, apps in sorted(lost.items()):
        reported = ", ".join(f"{app} {gpus}" for app, gpus in sorted(apps.items()))
        found.changes.append(
            Decided(
                "recovery",
                f"{node} terminated while apps held its GPUs: {reported}",
                revision=scene.state.revision,
                inputs={"node": node},
                outcome={"gpus": dict(sorted(apps.items()))},
            )
        )


def _by_force(scene: CycleState, memory: Memory, found: LivenessResult) -> None:
    """Ask for the end of what did not let go in time, and of what silent apps left behind."""
    late: dict[tuple[str, str], str] = {}
    for app, leases in scene.mine.items():
        quiet = is_silent(scene, found, app)
        gone = scene.state.apps[app].phase == "lost"
        if quiet or gone:
            found.silent[app] = "marked lost" if gone else "missed heartbeats (heartbeat timeout)"
        for lease in leases.values():
            if quiet or gone:
                late[app, lease.node] = found.silent[app]
            elif lease.recalled is not None and scene.now >= lease.recalled + LATE:
                late.setdefault((app, lease.node), f"release deadline of {lease.node} exceeded")
                found.late.add(lease.number)
    for one in found.left.values():
        app, node = one.lease.app, one.lease.node
        if node in found.awaited:
            if one.mute:
                late.setdefault((app, node), f"{node} is reachable again; the app missed heartbeats")
            elif scene.now >= one.at + scene.settings.termination_grace_s + LATE:
                late.setdefault((app, node), f"{node} is reachable again; its release deadline is exceeded")
    for (app, node), why in sorted(late.items()):
        asked = memory.evicting.get((app, node))
        if asked is None or scene.now - asked >= AGAIN or scene.now < asked:
            found.evict.append(Evict(app, node, why))
            if asked is None:
                found.changes.append(
                    Decided(
                        "recovery",
                        f"the capacity loop terminates remaining processes of {app} on {node}: {why}",
                        app,
                        scene.state.revision,
                        outcome={"evict": node},
                    )
                )
            asked = scene.now
        found.evicting[app, node] = asked


def _lost(scene: CycleState, found: LivenessResult) -> None:
    """Move silent apps of which nothing is left to "lost"."""
    for record in scene.active:
        id_ = record.spec.id
        if not is_silent(scene, found, id_):
            continue
        found.silent[id_] = "missed heartbeats (heartbeat timeout)"
        if id_ in scene.mine:
            continue
        why = f"no heartbeat for {found.heartbeats[id_].quiet:.0f} s and no process left (heartbeat timeout)"
        found.changes.append(AppMoved(id_, "lost", why))
        found.changes.append(
            Decided(
                "recovery", f"{id_} marked lost: {why}", id_, scene.state.revision, outcome={"phase": "lost"}
            )
        )
