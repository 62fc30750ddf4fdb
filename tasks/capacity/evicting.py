"""Ending by force what an app still runs on a node."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ebbflow.infra.errors import AwsError


class Evictor(Protocol):
    """Kills what an app still runs on a node. Safe for several threads; a second call for the same is harmless."""

    def evict(self, app: str, node: str) -> bool:
        """Return once no process of ``app`` uses ``node``: true; false: it cannot be reached, wait for the lease.

        Raises an ``InfraError`` when it was tried and failed; the caller tries again later.
        """
        ...


class Occupied(Protocol):
    """Which app runs on which node."""

    @property
    def app(self) -> str: ...

    @property
    def node(self) -> str: ...


class Occupancy(Protocol):
    """Nodes of this machine, whose processes carry their app's mark; ``LocalFleet`` is one."""

    def evict(self, app: str, node: str) -> bool: ...

    def occupants(self) -> Sequence[Occupied]: ...


class LocalEvictor:
    """Processes of this machine, in whichever process they were started."""

    def __init__(self, fleet: Occupancy) -> None:
        self._fleet = fleet

    def evict(self, app: str, node: str) -> bool:
        """See ``Evictor``. Raises ``ClusterError``."""
        return self._fleet.evict(app, node)

    def present(self) -> Sequence[tuple[str, str]]:
        """Return (app, node) pairs of which processes live. Raises ``ClusterError``."""
        return sorted({(one.app, one.node) for one in self._fleet.occupants()})


class Remote(Protocol):
    """Stops a training's processes on a node of AWS; ``RemoteRunner`` is one."""

    def stop_torch(self, node: str, name: str) -> "RemoteOutcome": ...


class RemoteOutcome(Protocol):
    """What became of it (``infra.aws.remote.Outcome``)."""

    @property
    def status(self) -> str: ...


class RemoteEvictor:
    """Processes of AWS nodes, through Systems Manager: the node's service for the app is stopped.

    ``names`` returns the names of the services that may run for an app on any node; of none nothing is certain.
    """

    def __init__(self, runner: Remote, names: Callable[[str], Sequence[str]]) -> None:
        self._runner, self._names = runner, names

    def evict(self, app: str, node: str) -> bool:
        """See ``Evictor``. Raises ``AwsError``."""
        services = self._names(app)
        for name in services:
            outcome = self._runner.stop_torch(node, name)  # no token: a second eviction must be sent, too
            if outcome.status == "gone":
                return True  # with the machine went all that ran there
            if outcome.status == "absent":
                return False
            if outcome.status != "done":
                raise AwsError(f"{name} on {node} could not be stopped: {outcome}")
        return bool(services)
