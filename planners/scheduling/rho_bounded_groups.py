"""GPUs that are worth the same: of one type, and for as long as their nodes stay."""

from dataclasses import dataclass
from math import inf

from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.scheduling import App, Placement, View
from ebbflow.planners.scheduling.placement import Placer, Room


@dataclass(slots=True)
class Group:
    """Nodes of one GPU type that leave at ``until`` (s; infinite: not that anybody knows)."""

    type: str
    until: float
    advised: bool  # a notice that isn't firm: the last choice among equals
    price: float  # dollars per GPU-hour, the dearest of its nodes
    room: Room

    @property
    def gpus(self) -> int:
        """Return the free GPUs."""
        return self.room.total


def groups_of(view: View) -> list[Group]:
    """Return the groups of all nodes with GPUs: those that stay first, then the ones that leave last.

    A firm notice ends a node's worth at its deadline; nodes past it are left out.
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
            key = (-until, node.id in advised, node.instance_type)
            nodes.setdefault(key, []).append(node)
    return [
        Group(gpu, -until, soft, max(n.price / n.gpus for n in members), Room(members))
        for (until, soft, gpu), members in sorted(nodes.items())
    ]


def place(group: Group, app: App, placer: Placer) -> Placement | None:
    """Take the gang of ``app`` out of ``group``: where it is, if it can stay, else by ``placer``."""
    return placer(group.room, app, app.gpus) if group.room.total >= app.gpus else None
