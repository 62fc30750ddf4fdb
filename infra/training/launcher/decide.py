"""What follows when a generation has ended, unless the caller knows better (``planners.training.retries``)."""

from collections.abc import Callable

from ebbflow.infra.protocols import Continue, GenerationEnd, Halt
from ebbflow.infra.training.launcher.placement import fresh

_STUBBORN = 3  # generations without progress before a failure that may pass counts as one that does not


class Persist:
    """Go on with what is left, replace what hung, stop at errors of the script.

    Args:
        minimum: slots below which the run waits for ``resize`` to bring more.
        replace: whether a node that hung is replaced by a new one of its size, or left out.
        names: returns all node names used so far.
    """

    def __init__(self, minimum: int, replace: bool, names: Callable[[], set[str]]) -> None:
        self._minimum, self._replace, self._names = minimum, replace, names

    def __call__(self, end: GenerationEnd) -> Continue | Halt:
        if end.kind in ("finished", "canary"):
            return Halt("finished", end.reason)
        if end.kind == "silent":
            return Halt("failed", end.reason)
        if end.kind == "failed" and not (end.failures and end.failures[0].signal):
            return Halt("failed", end.reason)  # an error of the script's own
        if end.idle >= _STUBBORN:
            return Halt("failed", f"{end.reason} (no step won in {end.idle} generations)")
        left = dict(end.left)
        if end.kind in ("hung", "unformed"):
            left = self._without(end)
        if sum(left.values()) < self._minimum:
            return Halt(
                "waiting", f"{sum(left.values())} slots are left, {self._minimum} are needed: {end.reason}"
            )
        delay = 0.0 if end.kind in ("stopped", "lost", "hung") else min(2.0**end.idle, 30.0)
        return Continue(left, end.reason, delay)

    def _without(self, end: GenerationEnd) -> dict[str, int]:
        """Return what is left without the nodes to blame, each replaced where that is wanted."""
        left = {name: slots for name, slots in end.left.items() if name not in end.suspects}
        taken = self._names()
        for suspect in end.suspects if self._replace else ():
            if suspect in end.placement:
                name = fresh(taken)
                taken = {*taken, name}
                left[name] = end.placement[suspect]
        return left
