"""The GPUs of a tuning run and their trials: those of its own nodes, or leased ones."""

from typing import Protocol

from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.scheduling import Placement, gpus_of
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.tuning.request import TuningRequest
from ebbflow.tasks.tuning.trial import Trial


class TrialResources(Protocol):
    """What a tuning run may use now. Called in the tuning run's thread."""

    def nodes(self) -> tuple[Node, ...]:
        """Return the nodes with the GPUs that its trials may have now, those included that they have."""
        ...

    def held(self, one: Trial) -> Placement:
        """Return what a trial still has of what it was given."""
        ...

    def give(self, one: Trial, placement: Placement) -> None:
        """Give a trial these GPUs instead of those that it has; its ``nodes`` are there afterwards."""
        ...

    def recover(self, one: Trial) -> None:
        """See to a trial that keeps what it has: its processes may be gone from a node that is still there."""
        ...

    def deadline(self, one: Trial) -> float | None:
        """Return by when a trial that is to pause must be gone (s since the Unix epoch); ``None``: its own grace."""
        ...

    def take_back(self, one: Trial) -> None:
        """Take note that nothing of a trial runs any more."""
        ...


class OwnTrialResources:
    """The search's own nodes, which stay. A run never uses a name twice: a node that comes back has another one."""

    def __init__(self, request: TuningRequest) -> None:
        self._request = request
        self._nodes = tuple(Node(name, slots, 0.0, gpus=slots) for name, slots in request.placement.items())

    def nodes(self) -> tuple[Node, ...]:
        """See ``TrialResources``."""
        return self._nodes

    def held(self, one: Trial) -> Placement:
        """See ``TrialResources``."""
        return one.app.held

    def give(self, one: Trial, placement: Placement) -> None:
        """See ``TrialResources``."""
        before = dict(one.app.held)
        for node in list(one.names):
            if node not in dict(placement):
                del one.names[node]
        wanted = {}
        for node, slots in placement:
            if node not in one.names or before.get(node) != slots:
                one.turns += 1
                one.names[node] = f"{node}.{one.turns}"
            wanted[one.names[node]] = slots
        if one.nodes is None:
            one.nodes = Nodes(wanted, self._request.most_gpus, self._request.gpus_per_trial)
        else:
            one.nodes.become(wanted)

    def recover(self, one: Trial) -> None:
        """See ``TrialResources``."""
        if one.nodes is not None and one.nodes.slots < gpus_of(one.app.held):
            one.names.clear()  # its processes are gone, the node is not
            self.give(one, one.app.held)

    def deadline(self, one: Trial) -> float | None:
        """See ``TrialResources``."""
        return None

    def take_back(self, one: Trial) -> None:
        """See ``TrialResources``."""
