"""Faults that happen to a local fleet at set times: ``20s:notice:gpu-2:5s``, ``30s:kill:spark-1``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.local_fleet import LocalFleet
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.numbers import is_whole
from ebbflow.tasks.training.faults import FaultSchedule, seconds

FleetFaultKind = Literal["kill", "notice", "advise", "freeze", "thaw", "add", "shut"]

_FORM = (
    "a scripted fault of a fleet looks like 30s:kill:spark-1, 20s:notice:gpu-2:5s, 20s:advise:gpu-2:120s, "
    "40s:freeze:gpu-1, 45s:thaw:gpu-1, 50s:add:gpu, 50s:add:gpu:2 or 60s:shut:gpu:30s; a pool in place of a node "
    "means its oldest node that is not about to leave"
)


@dataclass(frozen=True, slots=True)
class FleetFault:
    """What happens to a fleet ``after`` seconds."""

    after: float
    kind: FleetFaultKind
    of: str  # a node, or a pool
    seconds: float = 0.0  # until the node leaves, or for which the pool gets no node
    count: int = 1  # nodes that are added

    @classmethod
    def parse(cls, text: str) -> "FleetFault":
        """Return the fault that ``text`` describes. Raises ``OptionError``."""
        parts = text.strip().split(":")
        if len(parts) < 3 or not parts[2]:
            raise OptionError(f"{_FORM}; got {text!r}")
        after, kind, of, rest = seconds(parts[0], text, _FORM), parts[1], parts[2], parts[3:]
        if kind in ("kill", "freeze", "thaw") and not rest:
            return cls(after, kind, of)
        if kind in ("notice", "advise", "shut") and len(rest) == 1:
            return cls(after, kind, of, seconds(rest[0], text, _FORM))
        if kind == "add" and (
            not rest or (len(rest) == 1 and is_whole(rest[0]) and 0 < int(rest[0]) <= 1000)
        ):
            return cls(after, "add", of, count=int(rest[0]) if rest else 1)
        raise OptionError(f"{_FORM}; got {text!r}")

    def told(self, of: str) -> str:
        """Return in words what happens to ``of``."""
        match self.kind:
            case "notice":
                return f"notice to {of}: it leaves in {self.seconds:g} s"
            case "advise":
                return f"advice about {of}: it may leave in {self.seconds:g} s"
            case "kill":
                return f"{of} is killed without notice"
            case "freeze":
                return f"{of} stands still"
            case "thaw":
                return f"{of} goes on"
            case "shut":
                return f"there are no {of} nodes to be had for {self.seconds:g} s"
            case _:
                return f"{self.count} more {of} {'nodes' if self.count > 1 else 'node'}"


class FleetFaults(FaultSchedule[FleetFault]):
    """Carries out faults on a fleet in a thread of its own, from ``begin`` on. ``say`` hears of everything."""

    def __init__(
        self, faults: Sequence[FleetFault], fleet: LocalFleet, say: Callable[[str], None], clock: Clock
    ) -> None:
        super().__init__(sorted(faults, key=lambda fault: fault.after), fleet, _nothing, _nothing, say, clock)
        self._fleet = fleet

    def _announce(self, fault: FleetFault) -> None:
        """Say nothing yet: which node is meant is found out when it happens."""

    def _carry_out(self, fault: FleetFault) -> None:
        of = fault.of if fault.kind in ("add", "shut") else self._node(fault)
        self._say(f"scripted: {fault.told(of)}")
        match fault.kind:
            case "kill":
                self._fleet.kill(of)
            case "notice":
                self._fleet.notice(of, fault.seconds)
            case "advise":
                self._fleet.notice(of, fault.seconds, "rebalance")
            case "freeze":
                self._fleet.freeze(of)
            case "thaw":
                self._fleet.thaw(of)
            case "shut":
                self._fleet.shut(of, fault.seconds)
            case "add":
                self._fleet.add(of, fault.count)

    def _node(self, fault: FleetFault) -> str:
        """Return the node that is meant."""
        if self._fleet.book.pool(fault.of) is None:
            return fault.of
        states = ("frozen",) if fault.kind == "thaw" else ("alive",)
        found = [node.id for node in self._fleet.view() if node.pool == fault.of and node.state in states]
        if not found:
            raise ClusterError(f"no node of the pool {fault.of} is {' or '.join(states)} now")
        return found[0]


def _nothing(count: int) -> None:
    """Add or remove no nodes: the faults of a fleet name pools."""
