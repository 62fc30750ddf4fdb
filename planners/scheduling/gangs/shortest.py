"""Smallest or shortest first, preemptive, with durations known (Tiresias, NSDI 2019, section 2 and Table 1)."""

from ebbflow.planners.model.scheduling import App, View
from ebbflow.planners.scheduling.beliefs import remaining_service, remaining_time
from ebbflow.planners.scheduling.gangs.ordered import Ordered
from ebbflow.planners.scheduling.placement import Placer, by_skew


def smallest_first(placer: Placer = by_skew) -> Ordered:
    """Fewest GPUs first, whatever the duration."""

    def gpus(app: App, view: View) -> tuple[float, ...]:
        return app.gpus, app.arrival

    return Ordered("smallest-first", gpus, placer=placer)


def srtf(placer: Placer = by_skew) -> Ordered:
    """Shortest remaining time first."""

    def left(app: App, view: View) -> tuple[float, ...]:
        return remaining_time(app, app.gpus), app.arrival

    return Ordered("srtf", left, placer=placer)


def srsf(placer: Placer = by_skew) -> Ordered:
    """Shortest remaining service first: remaining time x GPUs."""

    def left(app: App, view: View) -> tuple[float, ...]:
        return remaining_service(app, app.gpus), app.arrival

    return Ordered("srsf", left, placer=placer)
