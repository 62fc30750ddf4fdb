"""``AllocationStatus``: what an app may use of its leases at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ebbflow.planners.model.ledger import Lease


@dataclass(frozen=True, slots=True)
class AllocationStatus:
    """What an app may use now."""

    leases: tuple[Lease, ...] = ()  # that it may use, by number
    placement: Mapping[str, int] = field(default_factory=dict)  # node -> GPUs
    leaving: Mapping[int, float] = field(
        default_factory=dict
    )  # used leases to be released -> by when (Unix s)
    led: bool = False  # a loop is alive, as far as is known

    @property
    def deadline(self) -> float | None:
        """Return by when the first lease must be free, seconds since the Unix epoch; ``None``: none must."""
        return min(self.leaving.values(), default=None)
