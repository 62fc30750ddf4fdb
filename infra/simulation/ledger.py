"""The one place where what a policy grants is checked: capacity, gangs, double allocation."""

from collections.abc import Iterable

from ebbflow.infra.errors import SimulationError
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.scheduling import App, Placement, take


class Ledger:
    """Free GPUs by node. Placements are taken and given back; nothing is ever taken twice."""

    def __init__(self) -> None:
        self.free: dict[str, int] = {}
        self.nodes: dict[str, Node] = {}
        self.gpus = 0

    def add(self, node: Node) -> None:
        """Add a node.

        Raises:
            SimulationError: it is already there.
        """
        if node.id in self.nodes:
            raise SimulationError(f"node {node.id} is added while present")
        self.nodes[node.id] = node
        self.free[node.id] = node.gpus
        self.gpus += node.gpus

    def remove(self, id_: str) -> None:
        """Remove a node that nobody holds any more.

        Raises:
            SimulationError: it isn't there.
        """
        if id_ not in self.nodes:
            raise SimulationError(f"node {id_} is removed while absent")
        self.gpus -= self.nodes.pop(id_).gpus
        del self.free[id_]

    def hold(self, placement: Placement) -> None:
        """Take what was just given back."""
        for id_, gpus in placement:
            self.free[id_] -= gpus

    def give_back(self, placement: Placement) -> None:
        """Give the GPUs of a placement back."""
        for id_, gpus in placement:
            self.free[id_] += gpus

    def take(self, policy: str, app: App, placement: Placement, *, elastic: bool, now: float) -> None:
        """Take the GPUs of a placement, checking that they exist, are free, and are what the app can use.

        Raises:
            SimulationError: naming policy, app, node and rule.
        """
        if what := take(self.free, app, placement, elastic=elastic):
            raise _broken(policy, app, now, what)


def _broken(policy: str, app: App, now: float, what: str) -> SimulationError:
    return SimulationError(f"policy {policy} at {now:g} s gives job {app.id} {what}")


def contended(placements: Iterable[Placement]) -> set[str]:
    """Return the nodes on which two or more jobs that span nodes have GPUs (Pollux, OSDI 2021, section 4.2.1)."""
    once: set[str] = set()
    twice: set[str] = set()
    for placement in placements:
        if len(placement) > 1:
            for id_, _ in placement:
                (twice if id_ in once else once).add(id_)
    return twice


def admissible(app: App, elastic: bool, most: float) -> str:
    """Return why an app could never run if at most ``most`` GPUs will exist at once; empty if it could."""
    needs = app.min_gpus if elastic else app.gpus
    if needs > most:
        return f"needs {needs} GPUs at once; the cluster never has more than {most:g}"
    return ""
