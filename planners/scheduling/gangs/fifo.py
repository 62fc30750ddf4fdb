"""First in, first out without preemption (YARN-CS in Tiresias' comparison, NSDI 2019, section 5)."""

from ebbflow.planners.model.scheduling import App, Placement, View
from ebbflow.planners.scheduling.gangs.ordered import Ordered
from ebbflow.planners.scheduling.placement import Placer, Room, consolidated, rack_aware


def _arrival(app: App, view: View) -> tuple[float, ...]:
    return (app.arrival,)


def consolidated_if_possible(room: Room, app: App, gpus: int) -> Placement | None:
    """Consolidate, or wait for it; only a gang that no rack could hold even if empty is spread."""
    placement = consolidated(room, app, gpus)
    if placement is None and consolidated(Room(room.nodes), app, gpus) is None:
        return rack_aware(room, app, gpus)
    return placement


def yarn_cs(placer: Placer = consolidated_if_possible) -> Ordered:
    """By submission; the first gang that finds no place blocks all later ones."""
    return Ordered("yarn-cs", _arrival, preemptive=False, blocking=True, placer=placer)


def best_effort(placer: Placer = consolidated_if_possible) -> Ordered:
    """By submission, but any later gang that fits may start."""
    return Ordered("best-effort", _arrival, preemptive=False, placer=placer)
