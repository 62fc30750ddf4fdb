"""When an auction is due: after changes, at the ends of leases, when the policy wants it, and after a period."""

from collections.abc import Mapping
from math import inf
from typing import NamedTuple

from ebbflow.planners.capacity.cycle_state import CycleState
from ebbflow.planners.capacity.liveness import AGAIN, LATE, STEPS, LivenessResult
from ebbflow.planners.capacity.values import Memory, Plan
from ebbflow.planners.capacity.view import active

SOON = 0.5  # s between looks while GPUs are waited for


class AuctionInputs(NamedTuple):
    """What an auction depends on besides time and the apps' own figures."""

    revision: int
    closed: frozenset[str]
    apps: tuple[tuple[str, int, int, int, float], ...]
    out: frozenset[str]
    late: frozenset[int]


class AuctionDue(NamedTuple):
    """Whether an auction is due now, why, and since when changes wait for one."""

    now: bool
    why: str
    dirty: float | None


def signs(scene: CycleState, presence: LivenessResult, refused: Mapping[str, str]) -> AuctionInputs:
    """Return what an auction would be decided on now."""
    apps = tuple(
        (r.spec.id, r.spec.gpus, r.spec.min_gpus, r.spec.max_gpus, r.spec.weight) for r in active(scene)
    )
    out = frozenset((*presence.silent, *refused))
    return AuctionInputs(scene.state.revision, frozenset(scene.closed), apps, out, frozenset(presence.late))


def due(scene: CycleState, memory: Memory, found: AuctionInputs) -> AuctionDue:
    """Tell whether an auction is due.

    Changes are gathered for ``debounce_s``, so that a burst of them is decided on once.
    """
    now, settings = scene.now, scene.settings
    change = what_changed(memory.seen, found)
    dirty = (memory.dirty if memory.dirty is not None else now) if change else None
    if dirty is not None and dirty > now:
        dirty = now  # the clock was set back
    if memory.seen is None:
        return AuctionDue(True, "the capacity loop started", dirty)
    if dirty is not None and now >= dirty + settings.debounce_s:
        return AuctionDue(True, change, dirty)
    if not found.apps:
        return AuctionDue(False, "", dirty)
    if now >= memory.asked:
        return AuctionDue(True, "the policy requested a re-plan", dirty)
    if now >= lease_end(memory.plan):
        return AuctionDue(True, "leases expire", dirty)
    if (
        not memory.plan.complete
        and now >= memory.plan.at + settings.termination_grace_s + settings.plan_timeout_s
    ):
        return AuctionDue(True, "the last plan was not applied in time", dirty)
    if now >= memory.decided + settings.interval_s or now < memory.decided:
        return AuctionDue(True, "the auction interval elapsed", dirty)
    return AuctionDue(False, "", dirty)


def what_changed(before: AuctionInputs | None, now: AuctionInputs) -> str:
    """Return what differs, for people; empty: nothing does."""
    if before is None or before == now:
        return ""
    old, new = {a[0] for a in before.apps}, {a[0] for a in now.apps}
    parts = []
    if came := sorted(new - old):
        parts.append(f"{_some(came)} arrived")
    if left := sorted(old - new):
        parts.append(f"{_some(left)} departed")
    if not came and not left and before.apps != now.apps:
        parts.append("resource requests changed")
    if noticed := sorted(now.closed - before.closed):
        parts.append(f"{_some(noticed)} cordoned")
    elif before.revision != now.revision or before.closed != now.closed:
        parts.append("capacity changed")
    if out := sorted(now.out - before.out):
        parts.append(f"{_some(out)} not schedulable")
    elif before.out != now.out:
        parts.append("apps schedulable again")
    if before.late != now.late:
        parts.append("release deadline of GPUs exceeded" if now.late else "overdue GPUs released")
    return ", ".join(parts)


def lease_end(plan: Plan) -> float:
    """Return when the first lease ends by the policy's word."""
    return min((wanted.until for wanted in plan.wanted.values() if wanted.placement), default=inf)


def wake(scene: CycleState, memory: Memory, presence: LivenessResult, refresh: float, waiting: bool) -> float:
    """Return when the loop has something to do even if nothing happens. ``memory`` is the new one."""
    now, settings = scene.now, scene.settings
    times = [refresh]
    if memory.dirty is not None:
        times.append(memory.dirty + settings.debounce_s)
    if memory.plan.wanted:
        times += [memory.asked, lease_end(memory.plan), memory.decided + settings.interval_s]
    if presence.heartbeats:
        times.append(now + settings.heartbeat_timeout_s / STEPS)
    for leases in scene.mine.values():
        times += [lease.recalled + LATE for lease in leases.values() if lease.recalled is not None]
    times += [asked + AGAIN for asked in presence.evicting.values()]
    soonest = min((time for time in times if time > now), default=inf)
    return min(soonest, now + SOON) if waiting or presence.evicting or presence.awaited else soonest


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
