"""What policies compute from an app's own report of its speed and remaining work."""

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import App


def iteration_time(app: App, gpus: int) -> float:
    """Return seconds per iteration on ``gpus`` well-placed GPUs.

    Without a reported speed it follows from the fastest throughput, taken as linear in GPUs. Raises ``OptionError``
    for an app that reports neither.
    """
    if app.speed is not None:
        return app.speed.iteration_time(gpus)
    fastest = max(app.throughputs.values(), default=0.0)
    if not fastest > 0:
        raise OptionError(f"app {app.id!r} reports neither a speed nor a throughput above 0")
    return app.gpus / gpus / fastest


def remaining_time(app: App, gpus: int) -> float:
    """Return the seconds that are left on ``gpus`` well-placed GPUs."""
    return max(app.remaining, 0.0) * iteration_time(app, gpus)


def remaining_service(app: App, gpus: int) -> float:
    """Return the GPU-seconds that are left on ``gpus`` well-placed GPUs."""
    return gpus * remaining_time(app, gpus)


def throughput(app: App, gpu: str) -> float:
    """Return iterations/s of the app's gang on GPUs of type ``gpu``, 0 where it cannot run.

    An app that reports no throughputs by type is as fast on all of them. Raises ``OptionError`` for an app that
    reports no speed either.
    """
    if app.throughputs:
        return app.throughputs.get(gpu, 0.0)
    return 1 / iteration_time(app, app.gpus)
