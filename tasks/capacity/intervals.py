"""How often a capacity loop polls, and how long it waits. Seconds of a clock that does not jump."""

from dataclasses import dataclass, fields

from ebbflow.planners.errors import OptionError


@dataclass(frozen=True, slots=True)
class LoopIntervals:
    """Intervals and timeouts of a loop, the section ``intervals`` of the configuration file.

    What is decided, and how often without a cause, stands in ``planners.capacity.values``. Raises ``OptionError``.
    """

    poll_interval: float = (
        0.2  # between polls of the ledger for apps that registered, changed or released GPUs
    )
    capacity_poll_interval: float = 0.3  # between polls of the capacity
    fleet_poll_interval: float = 5.0  # between polls of the fleet
    batch_delay: float = 0.05  # after an observed change, for others of the same burst
    leader_lease: float = 15.0  # of the leadership, which is renewed at a third of it
    ledger_timeout: float = 300.0  # of a ledger that does not respond, after which the loop ends
    observation_max_age: float = 60.0  # of an observation by which nodes are launched or terminated
    status_interval: float = 1.0  # between two status records
    reconcile_interval: float = 300.0  # between checks for planned changes that were not requested
    action_timeout: float = 15.0  # of an action under way when the loop ends; another loop repeats it

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value > 0 and field.name != "batch_delay":
                raise OptionError(f"{field.name} must be > 0 s; got {value}")
        if self.batch_delay < 0:
            raise OptionError(f"batch_delay must be >= 0 s; got {self.batch_delay}")
        if self.leader_lease < 3 * self.poll_interval:
            raise OptionError(
                f"leader_lease must be at least three poll intervals ({3 * self.poll_interval:g} s); "
                f"got {self.leader_lease:g} s"
            )
