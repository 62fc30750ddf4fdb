"""Is there enough? What somebody waits for, held against what is there."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.ledger import Slot
from ebbflow.planners.model.ledger_state import State


@dataclass(frozen=True, slots=True)
class UsableCapacity:
    """What a cluster has that may be counted on: nodes with a firm notice are left out."""

    nodes: int = 0
    gpus: int = 0
    cores: int = 0
    memory: float = 0.0  # GiB
    free_gpus: int = 0  # without a lease
    free_cores: int = 0  # without an executor, where that is known; else all


@dataclass(frozen=True, slots=True)
class Need:
    """The least to continue with. Raises ``OptionError`` for a value that breaks its rule, or where all are 0."""

    nodes: int = 0
    gpus: int = 0
    cores: int = 0
    memory: float = 0.0  # GiB
    free: bool = True  # whether GPUs and cores that somebody holds count for nothing

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus", "cores", "memory"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < inf:
                raise OptionError(f"{name} must be a number >= 0 and finite; got {value!r}")
        if not (self.nodes or self.gpus or self.cores or self.memory):
            raise OptionError("name what to wait for: at least one of nodes, gpus, cores and memory above 0")

    def lacking(self, room: UsableCapacity) -> tuple[str, ...]:
        """Return what is short, in words: empty where there is enough."""
        free = " free" if self.free else ""
        rows = (
            (self.nodes, room.nodes, "nodes"),
            (self.gpus, room.free_gpus if self.free else room.gpus, f"GPUs{free}"),
            (self.cores, room.free_cores if self.free else room.cores, f"cores{free}"),
            (self.memory, room.memory, "GiB of memory"),
        )
        return tuple(f"{there:g} of {wanted:g} {what}" for wanted, there, what in rows if there < wanted)


def room(
    nodes: Iterable[Node],
    notices: Iterable[Notice] = (),
    booked: Iterable[Slot] = (),
    used_cores: int = 0,
) -> UsableCapacity:
    """Return what these nodes come to, less those with a firm notice.

    ``booked`` are the GPUs that somebody holds, ``used_cores`` the cores on nodes that stay.
    """
    leaving = {notice.node_id for notice in notices if notice.kind == "interruption"}
    usable = {node.id: node for node in nodes if node.id not in leaving}
    gpus = sum(node.gpus for node in usable.values())
    held = sum(slot.node in usable and usable[slot.node].gpus > 0 for slot in booked)
    cores = sum(node.cores for node in usable.values())
    return UsableCapacity(
        nodes=len(usable),
        gpus=gpus,
        cores=cores,
        memory=sum(node.memory for node in usable.values()),
        free_gpus=max(0, gpus - held),
        free_cores=max(0, cores - used_cores),
    )


def room_of(state: State) -> UsableCapacity:
    """Return what the ledger of a cluster knows of; which cores are busy it does not know."""
    return room(state.nodes.values(), state.notices.values(), state.booked)
