"""The nodes of one training, as its leases have them; and a pool that starts nothing without a lease."""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import LeaseError
from ebbflow.infra.training.channel.wire import Entry
from ebbflow.infra.training.launcher.pool import Admit, NodePool, admit_none
from ebbflow.planners.model.ledger import Lease
from ebbflow.planners.training.replicas import whole_replicas
from ebbflow.tasks.apps.lease_table import LeaseTable
from ebbflow.tasks.training.capacity import Nodes, Placement

_AVOID = 15.0  # s for which a node that was lost is left alone; longer each time
_MOST_AVOID = 300.0
_ENDING = 20.0  # s that processes of a node get to be gone once it was ended, before others wait no longer
_REPORT_TIMEOUT = 10.0  # s for the ledger to hear of a pool before a node of it is started
_POLL = 0.1  # s between polls for them

Numbers = Callable[[], Collection[int] | None]


def _all() -> None:
    return None


@dataclass(slots=True)
class _Loss:
    leases: frozenset[int]  # that the node had
    until: float
    times: int


class NodeBackoff:
    """Nodes that were lost lately: they are left alone for a while, unless they come with new leases.

    Whether a node is there the ledger says, some time later. Safe for several threads.
    """

    def __init__(self, lease_table: LeaseTable, clock: Clock) -> None:
        self._lease_table, self._clock = lease_table, clock
        self._lock = threading.Lock()
        self._losses: dict[str, _Loss] = {}

    def lost(self, names: Iterable[str]) -> None:
        """Take note that nodes are lost; each time they are left alone for longer."""
        now = self._clock.now()
        leases = self._lease_table.leases
        with self._lock:
            for name in names:
                mine = frozenset(lease.number for lease in leases if lease.node == name)
                before = self._losses.get(name)
                if before is not None and now < before.until and before.leases == mine:
                    continue  # told twice
                times = before.times + 1 if before is not None and before.leases & mine else 0
                until = now + min(_AVOID * 2.0 ** min(times, 30), _MOST_AVOID)
                self._losses[name] = _Loss(mine, until, times)

    def without(self, leases: Iterable[Lease]) -> tuple[Lease, ...]:
        """Return the leases whose nodes are not to be avoided now."""
        found = tuple(leases)
        by_node: dict[str, set[int]] = {}
        for lease in found:
            by_node.setdefault(lease.node, set()).add(lease.number)
        now = self._clock.now()
        with self._lock:
            avoided = {
                name
                for name, numbers in by_node.items()
                if (loss := self._losses.get(name)) is not None
                and now < loss.until
                and numbers <= loss.leases
            }
        return tuple(lease for lease in found if lease.node not in avoided)


class LeasedNodes(Nodes):
    """Which nodes a training has: those of its leases, without those that it lost lately. A node keeps its name.

    Args:
        lease_table: the app's leases.
        most, least: GPUs that the training uses at most, and without which it does not run.
        clock: the app's.
        among: returns the leases that are this training's, of an app with several; ``None``: all.
        avoided: nodes that were lost lately, by any training of the app.
        replica: GPUs that hold one replica of the model.
    """

    def __init__(
        self,
        lease_table: LeaseTable,
        most: int,
        least: int,
        clock: Clock,
        among: Numbers = _all,
        avoided: NodeBackoff | None = None,
        *,
        replica: int = 1,
    ) -> None:
        super().__init__({}, most, least, replica=replica)
        self._lease_table, self._among = lease_table, among
        self._avoided = avoided or NodeBackoff(lease_table, clock)
        self._blamed: frozenset[str] = frozenset()

    @property
    def slots(self) -> int:
        """Return the GPUs of all nodes that are there."""
        return sum(self.there().values())

    def there(self) -> Placement:
        """Return the nodes that are there."""
        among = self._among()
        fine = {lease.node for lease in self._avoided.without(self._lease_table.allowed(among))}
        found = {name: slots for name, slots in self._lease_table.placement(among).items() if name in fine}
        others = {name: slots for name, slots in found.items() if name not in self._blamed}
        return others if sum(whole_replicas(others, self._replica).values()) >= self.least else found

    def remove(self, names: Iterable[str]) -> None:
        """Take note that nodes are lost, or about to be."""
        self._avoided.lost(names)

    def give_up(self, names: Iterable[str]) -> None:
        """Take note that nodes did not start: they are left alone for a while."""
        self.remove(names)

    def replace_nodes(self, names: Iterable[str]) -> None:
        """Leave nodes out as long as the others are enough: what they are replaced by, the capacity loop decides."""
        self._blamed |= frozenset(names)

    def adopt(self, nodes: Mapping[str, int]) -> None:
        """Do nothing: leases determine which nodes there are."""

    def become(self, nodes: Mapping[str, int]) -> None:
        """Do nothing: leases determine which nodes there are."""

    def add(self, count: int) -> list[str]:
        """Do nothing: leases determine which nodes there are."""
        return []

    def newest(self, count: int) -> list[str]:
        """Return the nodes of the newest leases."""
        newest: dict[str, int] = {}
        for lease in self._lease_table.allowed(self._among()):
            newest[lease.node] = lease.number
        there = self.there()
        return sorted(there, key=lambda name: newest.get(name, 0))[max(len(there) - count, 0) :]

    def deadline(self, placement: Mapping[str, int]) -> float | None:
        """Return by when the first GPU that is in use and revoked must be free; ``None``: none is."""
        return min(self._lease_table.due(self._among()).values(), default=None)


class FencedPool:
    """A ``NodePool`` that starts a node only on GPUs that the app has leases on, and says when they are free again.

    Args:
        pool: where nodes are started, under the names that the ledger has for them.
        lease_table: the app's leases.
        left: called with the user of a node when the last of its processes is gone.
        among: see ``LeasedNodes``.
        is_reported: returns whether the ledger knows the pool by its uid. Nothing starts before: the process that
            kills what is left of an app finds it by that.
    """

    def __init__(
        self,
        pool: NodePool,
        lease_table: LeaseTable,
        left: Callable[[str], None],
        clock: Clock,
        among: Numbers = _all,
        is_reported: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._pool, self._lease_table, self._left, self._clock = pool, lease_table, left, clock
        self._among, self._is_reported = among, is_reported
        self._users: dict[str, str] = {}  # by node
        self._ending: dict[str, float] = {}  # nodes that were told to end -> when
        self._lock = threading.RLock()
        self.closed = False

    @property
    def host(self) -> str:
        return self._pool.host

    @property
    def uid(self) -> str:
        return self._pool.uid

    def start(self, name: str, slots: int, entry: Entry, admit: Admit = admit_none) -> None:
        """Start a node; see ``NodePool``. Raises ``LeaseError`` where there are no leases for it."""
        self._await_quiet([name])
        self._await_report(name)
        with self._lock:
            if name in self._ending:  # its user would be forgotten, and with it the lease
                raise LeaseError(
                    f"nothing is started on {name}: its previous processes have not ended for {_ENDING:.0f} s"
                )
            user = f"{self.uid}/{entry.key}"
            leases = self._lease_table.enter(user, name, slots, self._among())
            self._users[name] = user
            try:
                entry = replace(entry, devices=tuple(sorted(lease.slot for lease in leases)))
                self._pool.start(name, slots, entry, admit)
            except BaseException:
                self._end(name)
                raise

    def lost(self, name: str) -> str:
        """Return how a node went that is gone; empty while it is there."""
        how = self._pool.lost(name)
        with self._lock:
            if how and name in self._users and name not in self._ending:
                self._ending[name] = self._clock.now()
            self._settle()
        return how

    def paused(self, name: str) -> bool:
        return self._pool.paused(name)

    def end(self, name: str) -> None:
        """End a node and everything on it at once. Raises ``ClusterError``."""
        with self._lock:
            self._end(name)

    def log(self, name: str) -> str:
        return self._pool.log(name)

    def gone(self, uid: str) -> bool:
        return self._pool.gone(uid)

    def close(self) -> None:
        """End all nodes, and wait, bounded, until their processes are gone: what may still run keeps its leases."""
        try:
            self._pool.close()
        finally:
            with self._lock:
                self._ending |= {name: self._clock.now() for name in self._users if name not in self._ending}
            self._await_quiet(list(self._users))
            self.closed = not self._users

    def node_of(self, user: str) -> str | None:
        """Return the node that ``user`` is entered on here."""
        with self._lock:
            return next((name for name, who in self._users.items() if who == user), None)

    def settle(self) -> None:
        """See whether the processes of nodes that were ended are gone."""
        with self._lock:
            self._settle()

    def _end(self, name: str) -> None:
        try:
            self._pool.end(name)
        finally:
            if name in self._users:
                self._ending.setdefault(name, self._clock.now())
                self._settle()

    def _settle(self) -> None:
        for name in list(self._ending):
            if self._pool.quiet(name):
                del self._ending[name]
                self._left(self._users.pop(name))

    def _await_report(self, name: str) -> None:
        end = self._clock.now() + _REPORT_TIMEOUT
        while not self._is_reported(self.uid):
            if self._clock.now() >= end:
                raise LeaseError(
                    f"nothing is started on {name}: the ledger has received no heartbeat of its processes for "
                    f"{_REPORT_TIMEOUT:.0f} s, so that no other process could end them"
                )
            self._clock.sleep(_POLL)

    def _await_quiet(self, names: Collection[str]) -> None:
        end = self._clock.now() + _ENDING
        while True:
            with self._lock:
                self._settle()
                if not any(name in self._ending for name in names) or self._clock.now() >= end:
                    return
            self._clock.sleep(_POLL)
