"""How fast a capacity loop looks, leads and gives up. Seconds of a clock that does not jump."""

from dataclasses import dataclass, fields

from ebbflow.planners.errors import OptionError


@dataclass(frozen=True, slots=True)
class LoopIntervals:
    """Times of a loop; what is decided, and how often without a cause, stands in ``planners.capacity.values``."""

    look: float = 0.2  # between looks at the ledger for apps that entered, moved or let go
    source: float = 0.3  # between looks at the capacity
    fleet: float = 5.0  # between looks at the fleet
    settle: float = 0.05  # after a change is seen, for others of the same burst
    lead: float = 15.0  # that a lead holds unless it is renewed, which happens at a third of it
    patience: float = 300.0  # that the ledger may be away before the loop gives up
    stale: float = 60.0  # age of what was last seen beyond which nothing is scaled by it
    status: float = 1.0  # between two status rows
    repair: float = 300.0  # between looks for what was planned and not asked for
    act: float = 15.0  # that an action under way may take when the loop ends; another loop repeats it

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0 and field.name != "settle":
                raise OptionError(f"{field.name} must be > 0 s; got {value}")
        if self.settle < 0:
            raise OptionError(f"settle must be >= 0 s; got {self.settle}")
        if self.lead < 3 * self.look:
            raise OptionError(f"lead must be at least three looks ({3 * self.look:g} s); got {self.lead:g} s")
