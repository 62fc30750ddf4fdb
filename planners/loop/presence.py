"""Who is still there: leases that end because their app let go, its node left or it was ended by force; apps that
fell silent.

Silence is measured in the loop's own time, a short step at most for each cycle: an outage of the ledger, a loop that
was away or a clock that jumps makes nobody silent.
"""

from dataclasses import dataclass, field

from ebbflow.planners.loop.scene import Scene
from ebbflow.planners.loop.values import Evict, Heard, Memory, Situation
from ebbflow.planners.model.ledger import (
    OVER,
    AppMoved,
    Change,
    Decided,
    Ended,
    Lease,
)

STEPS = 3  # cycles at least between an app's last word and its loss
LATE = 2.0  # s after a deadline: the time that killing takes, and that clocks differ
AGAIN = 5.0  # s between calls to end the same by force
LET_GO = "let go"


@dataclass(slots=True)
class Presence:
    """What was found out, and what follows from it."""

    heard: dict[str, Heard]
    evicting: dict[tuple[str, str], float]
    changes: list[Change] = field(default_factory=list)
    evict: list[Evict] = field(default_factory=list)
    silent: dict[str, str] = field(default_factory=dict)  # apps that do not take part, with the reason
    late: set[int] = field(default_factory=set)  # leases that ought to have been let go of
    returned: dict[str, dict[str, int]] = field(
        default_factory=dict
    )  # GPUs that apps gave back unasked, by node


def look(scene: Scene, situation: Situation, memory: Memory) -> Presence:
    """Return who is there, and end what has ended in ``scene``."""
    found = Presence(_heard(scene, memory), {})
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
    _tell_of_nodes(scene, ended, found)
    _by_force(scene, memory, found)
    _lost(scene, found)
    return found


def _heard(scene: Scene, memory: Memory) -> dict[str, Heard]:
    """Return for how long each app has been quiet."""
    most = scene.settings.silent_s / STEPS
    step = min(max(scene.now - memory.at, 0.0), most) if memory.at > 0 else 0.0
    found = {}
    known = {record.spec.id: record for record in scene.active}
    known |= {id_: scene.state.apps[id_] for id_ in scene.mine}
    for id_, record in known.items():
        report = scene.report(id_)
        said = (report.at if report is not None else 0.0, record.phase)
        before = memory.heard.get(id_)
        # an app that is lost and enters again has said something, too
        if before is None or before.said != said:
            found[id_] = Heard(said)
        else:
            found[id_] = Heard(said, before.quiet + step)
    return found


def is_silent(scene: Scene, found: Presence, app: str) -> bool:
    """Tell whether an app has said nothing for too long."""
    heard = found.heard.get(app)
    return heard is None or heard.quiet >= scene.settings.silent_s


def _over(scene: Scene, situation: Situation, memory: Memory, lease: Lease, found: Presence) -> str:
    """Return why nobody uses the GPU of a lease any more; empty: somebody may."""
    app = lease.app
    if lease.node not in scene.state.nodes:
        return f"{lease.node} is gone"
    report = scene.report(app)
    if report is not None and lease.number in report.released:
        return LET_GO
    if (app, lease.node) in situation.evicted and (app, lease.node) in memory.evicting:
        return "ended by force"
    record = scene.state.apps[app]
    if record.phase in OVER and report is not None and report.phase in OVER and not report.holds:
        return f"the app has {record.phase}"
    # it may not have heard that it was called back, and keeps what it has for the grace while it hears nothing
    end = lease.until + scene.settings.grace_s + LATE
    return "silent until its lease had ended" if is_silent(scene, found, app) and scene.now >= end else ""


def _tell_of_nodes(scene: Scene, ended: dict[str, list[Lease]], found: Presence) -> None:
    """Say which apps lost GPUs with nodes that left before they had let go."""
    lost: dict[str, dict[str, int]] = {}
    for some in ended.values():
        for lease in some:
            if lease.node not in scene.state.nodes:
                apps = lost.setdefault(lease.node, {})
                apps[lease.app] = apps.get(lease.app, 0) + 1
    for node, apps in sorted(lost.items()):
        said = ", ".join(f"{app} {gpus}" for app, gpus in sorted(apps.items()))
        found.changes.append(
            Decided(
                "recovery",
                f"{node} left while apps held its GPUs: {said}",
                epoch=scene.state.epoch,
                inputs={"node": node},
                outcome={"gpus": dict(sorted(apps.items()))},
            )
        )


def _by_force(scene: Scene, memory: Memory, found: Presence) -> None:
    """Ask for the end of what did not let go in time, and of what silent apps left behind."""
    late: dict[tuple[str, str], str] = {}
    for app, leases in scene.mine.items():
        quiet = is_silent(scene, found, app)
        gone = scene.state.apps[app].phase == "lost"
        if quiet or gone:
            found.silent[app] = "it is lost" if gone else "it has been silent for too long"
        for lease in leases.values():
            if quiet or gone:
                late[app, lease.node] = found.silent[app]
            elif lease.recalled is not None and scene.now >= lease.recalled + LATE:
                late.setdefault((app, lease.node), f"{lease.node} was to be free by now")
                found.late.add(lease.number)
    for (app, node), why in sorted(late.items()):
        asked = memory.evicting.get((app, node))
        if asked is None or scene.now - asked >= AGAIN or scene.now < asked:
            found.evict.append(Evict(app, node, why))
            if asked is None:
                found.changes.append(
                    Decided(
                        "recovery",
                        f"what is left of {app} on {node} is ended: {why}",
                        app,
                        scene.state.epoch,
                        outcome={"evict": node},
                    )
                )
            asked = scene.now
        found.evicting[app, node] = asked


def _lost(scene: Scene, found: Presence) -> None:
    """Move silent apps of which nothing is left to "lost"."""
    for record in scene.active:
        id_ = record.spec.id
        if not is_silent(scene, found, id_):
            continue
        found.silent[id_] = "it has been silent for too long"
        if id_ in scene.mine:
            continue
        why = f"nothing was heard of it for {found.heard[id_].quiet:.0f} s, and nothing of it is left"
        found.changes.append(AppMoved(id_, "lost", why))
        found.changes.append(
            Decided("recovery", f"{id_} is lost: {why}", id_, scene.state.epoch, outcome={"phase": "lost"})
        )
