"""Hysteresis: growth at once, shrinking only after the wish for it has lasted, and neither too often."""

from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import NamedTuple

from ebbflow.planners.errors import OptionError


class DesiredNodes(NamedTuple):
    """How many nodes a rule wanted, and until when."""

    nodes: int
    until: float  # s, when another wish came; infinite for the present one


@dataclass(frozen=True, slots=True)
class StabilizedTarget:
    """What is held, since when, and what was requested lately; ``StabilizationWindow.settle`` returns the next."""

    nodes: int
    grown: float = -inf  # s, when it last grew
    shrunk: float = -inf  # s, when it last shrank
    wishes: tuple[DesiredNodes, ...] = ()  # those that no later one reaches, in order of time
    asked: float = -inf  # s, when the last wish came
    since: float = inf  # s, when wishes below what is held began; infinite while there are none
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StabilizationWindow:
    """Keeps wishes for more and fewer nodes from becoming a flapping fleet.

    Growth is carried out at once, but not within ``between_growths`` of the last. The fleet shrinks only when every
    wish of the last ``window`` seconds was lower, to the highest of those, and no sooner than ``hold`` seconds
    after it last changed. A wish within ``tolerance`` of what is held (a fraction of it) shrinks nothing.

    So a wish that returns to its peak within ``window``, or that stays within ``tolerance`` below it, never shrinks
    the fleet; and between a growth and the shrinking after it there are at least max(``hold``, ``window``) seconds.
    """

    window: float = 600.0  # s
    hold: float = 300.0  # s
    between_growths: float = 0.0  # s
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        for name in ("window", "hold", "between_growths"):
            value = getattr(self, name)
            if not (value >= 0 and isfinite(value)):
                raise OptionError(f"{name} must be >= 0 s and finite; got {value}")
        if not 0 <= self.tolerance < 1:
            raise OptionError(f"tolerance must be in [0, 1), a fraction of the nodes; got {self.tolerance}")

    def settle(self, held: StabilizedTarget, wanted: int, now: float) -> StabilizedTarget:
        """Return what to hold from ``now`` on, with the reason, when ``wanted`` nodes are wished for.

        Times of successive calls must not go back. Raises ``OptionError`` where they do, or for fewer than 0 nodes.
        """
        if wanted < 0:
            raise OptionError(f"wanted must be >= 0 nodes; got {wanted}")
        if now < held.asked:
            raise OptionError(f"time must not go back from {held.asked} to {now} s")
        held = replace(held, wishes=_window(held.wishes, wanted, now, self.window), asked=now)
        if wanted >= held.nodes:
            after = replace(held, since=inf)
            if wanted == held.nodes:
                return replace(after, reason="at desired capacity")
            left = self.between_growths - (now - held.grown)
            if left > 0:
                return replace(
                    after, reason=f"desired {wanted}; {left:.0f} s until scale-out is allowed (cooldown)"
                )
            return replace(after, nodes=wanted, grown=now, reason=f"scale-out from {held.nodes}, immediate")
        since = min(held.since, now)
        after = replace(held, since=since)
        if held.nodes - wanted <= self.tolerance * held.nodes:
            return replace(after, reason=f"desired {wanted}, within the tolerance of {held.nodes}")
        left = self.window - (now - since)
        if left > 0:
            return replace(
                after,
                reason=f"desired {wanted}; scale-in if this holds for {left:.0f} s more (stabilization window)",
            )
        left = self.hold - (now - max(held.grown, held.shrunk))
        if left > 0:
            return replace(
                after, reason=f"desired {wanted}; {left:.0f} s until scale-in is allowed (cooldown)"
            )
        peak = held.wishes[0].nodes
        if held.nodes - peak <= self.tolerance * held.nodes:
            return replace(
                after,
                reason=f"desired up to {peak} in the stabilization window, within the tolerance of {held.nodes}",
            )
        reason = (
            f"scale-in {held.nodes} → {peak}: desired ≤ {peak} nodes for {now - since:.0f} s"
            f" (stabilization window)"
        )
        return replace(after, nodes=peak, shrunk=now, since=now if wanted < peak else inf, reason=reason)


def _window(
    wishes: tuple[DesiredNodes, ...], wanted: int, now: float, window: float
) -> tuple[DesiredNodes, ...]:
    """Return the wishes that can still be the highest of a window that ends now or later; the first is so now."""
    if wishes:
        wishes = (*wishes[:-1], wishes[-1]._replace(until=now))
    kept = (wish for wish in wishes if wish.nodes > wanted and now - wish.until < window)
    return (*kept, DesiredNodes(wanted, inf))
