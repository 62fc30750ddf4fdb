"""GPUs that are worth the same: of one type, and for as long as their nodes stay."""

from dataclasses import dataclass
from math import inf

from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.scheduling import View
from ebbflow.planners.scheduling.placement import Room
from ebbflow.planners.scheduling.rho_bounded.outlook import Outlook


@dataclass(frozen=True, slots=True)
class Moves:
    """What moving costs."""

    delay: float  # s that a start takes
    leave: float  # s before a deadline by which an app must be gone: the time to save a checkpoint


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes of one GPU type that leave at ``until`` (s; infinite: not that anybody knows)."""

    type: str
    until: float
    advised: bool  # notices that aren't firm: the last choice among equals
    price: float  # dollars per GPU-hour, of the dearest node
    room: Room

    def time(self, now: float, moves: Moves) -> float:
        """Return the seconds for which its GPUs can still be used."""
        return self.until - moves.leave - now

    def worth(self, outlook: Outlook, now: float, moves: Moves) -> float:
        """Return how fast an app gets on with a gang of these GPUs, over its fastest; 0 or less: rather not at all.

        GPUs that leave are worth it if the app is over in time, or trains on them for longer than it takes to start,
        now and again elsewhere. What that takes is lost.
        """
        rate = outlook.rate(self.type)
        time = self.time(now, moves)
        if time == inf or rate <= 0:
            return rate
        here = bool(outlook.app.held) and self.room.covers(outlook.app.held)
        start = 0.0 if here else moves.delay
        if time <= 0 or start + outlook.left / rate <= time:
            return rate if time > 0 else 0.0
        return rate * (time - start - moves.delay) / time


def groups_of(view: View) -> list[Group]:
    """Return all nodes with GPUs in groups: those that stay, then those that leave, the last first.

    A firm notice ends a node's worth at its deadline; nodes past theirs are left out.
    """
    firm: dict[str, float] = {}
    advised: set[str] = set()
    for notice in view.capacity.notices:
        if notice.kind == "interruption":
            firm[notice.node_id] = min(notice.deadline, firm.get(notice.node_id, inf))
        else:
            advised.add(notice.node_id)
    nodes: dict[tuple[float, bool, str], list[Node]] = {}
    for node in view.capacity.nodes:
        until = firm.get(node.id, inf)
        if node.gpus and until > view.now:
            nodes.setdefault((-until, node.id in advised, node.instance_type), []).append(node)
    return [
        Group(gpu, -until, soft, max(n.price / n.gpus for n in members), Room(members))
        for (until, soft, gpu), members in sorted(nodes.items())
    ]
