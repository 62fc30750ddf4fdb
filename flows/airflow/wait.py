"""Looks at what a cluster has, for those who wait for it: by its ledger, or by its Spark master."""

from typing import Protocol
from urllib.parse import urlsplit

import httpx

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.spark.master_api import MasterView, get_master, new_client
from ebbflow.infra.spark.masters import find_master
from ebbflow.planners.capacity.need import UsableCapacity, room, room_of
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node

_TIMEOUT = 5.0  # seconds for a master's answer


class CapacityProbe(Protocol):
    """Where somebody sees how much room there is. Safe for several threads, one look at a time."""

    def look(self) -> UsableCapacity:
        """Look now. Raises ``InfraError`` when nothing can be seen."""
        ...

    def close(self) -> None:
        """Close connections. May be called twice."""
        ...


class LedgerProbe:
    """The ledger that a capacity loop keeps; raises ``LedgerError`` where there is none.

    Nodes that no loop sees any more count until a loop says otherwise.
    """

    def __init__(self, url: str | None = None, cluster: str = "local") -> None:
        self._ledger = Ledger.open(url, cluster=cluster, create=False)

    def look(self) -> UsableCapacity:
        """See ``CapacityProbe``."""
        return room_of(self._ledger.state())

    def close(self) -> None:
        """See ``CapacityProbe``."""
        self._ledger.close()


class MasterProbe:
    """A standalone Spark master: workers that are alive, and the cores that no application holds.

    Raises ``OptionError``.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith("spark://") or not urlsplit(url).hostname:
            raise OptionError(f"master must be spark://HOST:PORT; got {url!r}")
        self._url = url
        self._client = new_client(_TIMEOUT)

    def look(self) -> UsableCapacity:
        """See ``CapacityProbe``. Raises ``EngineUnavailableError``."""
        master = find_master(self._url)
        if master is None:
            raise EngineUnavailableError(
                f"the Spark master {self._url} does not answer, or has no worker yet; its pages must be reachable"
            )
        try:
            return workers_room(get_master(self._client, master.ui))
        except (httpx.HTTPError, ValueError) as error:
            raise EngineUnavailableError(f"the Spark master {self._url} does not answer: {error}") from error

    def close(self) -> None:
        """See ``CapacityProbe``."""
        self._client.close()


def workers_room(view: MasterView) -> UsableCapacity:
    """Return what the workers of a master come to that are alive."""
    alive = [worker for worker in view.workers if worker.state == "ALIVE"]
    nodes = [Node(worker.id, worker.cores, worker.memory / 1024, worker.host) for worker in alive]
    return room(nodes, used_cores=sum(worker.cores_used for worker in alive))


def lookout(*, master: str | None = None, ledger: str | None = None, cluster: str = "local") -> CapacityProbe:
    """Return where to look: at ``master`` where one is named, else in the ledger.

    Raises ``OptionError`` for both at once.
    """
    if master and ledger:
        raise OptionError("look at a master or in a ledger, not both")
    return MasterProbe(master) if master else LedgerProbe(ledger, cluster)
