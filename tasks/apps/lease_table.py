"""Which leases an app has, may use, uses and has let go of: what keeps it off the GPUs of others.

Everything an app starts on a GPU is entered here before it starts and taken out after the last of its processes is
gone. A lease that is called back, or is over, is reported as released only when it is not entered, and a lease that
was released is never entered again: both under one lock, so there is no moment at which a released GPU is in use.
"""

import threading
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import LeaseError, LedgerError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import Lease
from ebbflow.tasks.apps.loop_report import LOOP, LoopStatusRecord

Number = int


@dataclass(frozen=True, slots=True)
class Rules:
    """When a lease counts as over. Raises ``OptionError``."""

    grace: float = 60.0  # s beyond a lease's end for which GPUs may be kept while no loop is alive
    leave: float = (
        10.0  # s before a lease's end at which its GPU is begun to be left; a quarter of it at most
    )
    fence: float = 5.0  # s since the ledger last answered, beyond which nothing is started on a GPU

    def __post_init__(self) -> None:
        for name in ("grace", "leave", "fence"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise OptionError(f"{name} must be >= 0 s and finite; got {getattr(self, name)}")


def rules_of(ledger: Ledger) -> Rules:
    """Return when leases count as over for the loop that led the cluster last; the defaults where it does not say."""
    with suppress(LedgerError):
        if (said := ledger.reports([LOOP]).get(LOOP)) is not None:
            grace = LoopStatusRecord.of(said).grace
            return Rules() if grace is None else Rules(grace=grace)
    return Rules()


class LeaseTable:
    """The leases of one app. Safe for several threads.

    Before ``settle`` nothing may be used and nothing is released: processes of the app's earlier self may be there.
    """

    def __init__(self, app: str, clock: Clock, rules: Rules | None = None) -> None:
        self.app = app
        self._clock, self._rules = clock, rules or Rules()
        self._lock = threading.RLock()
        self._leases: dict[Number, Lease] = {}  # that have not ended, as last read
        self._users: dict[Number, str] = {}  # what is entered, by lease
        self._known: dict[Number, Lease] = {}  # entered ones, also after their end
        self._released: set[Number] = set()
        self._lead_until = 0.0  # of the loop's lead, as last read
        self._read_at: float | None = None
        self._settled = False

    # --- what the ledger says -------------------------------------------------------------------------------

    def learn(self, leases: Iterable[Lease], lead_until: float, at: float | None = None) -> None:
        """Take in the app's leases that have not ended, and until when the loop's lead holds, as read ``at``."""
        with self._lock:
            self._leases = {lease.number: lease for lease in leases if lease.app == self.app}
            self._known |= {number: self._leases[number] for number in self._users if number in self._leases}
            self._released &= self._leases.keys()
            self._lead_until = lead_until
            self._read_at = self._clock.now() if at is None else at

    def settle(self) -> None:
        """Begin: nothing of an earlier self is left."""
        with self._lock:
            self._settled = True

    @property
    def leases(self) -> tuple[Lease, ...]:
        """Return the leases that have not ended, by number."""
        with self._lock:
            return tuple(lease for _, lease in sorted(self._leases.items()))

    @property
    def silence(self) -> float:
        """Return for how long the ledger has not answered, s; infinite before it ever did."""
        with self._lock:
            return float("inf") if self._read_at is None else max(0.0, self._clock.now() - self._read_at)

    @property
    def led(self) -> bool:
        """Tell whether a loop is alive, as far as is known."""
        with self._lock:
            return self._clock.now() < self._lead_until

    # --- what may be used -----------------------------------------------------------------------------------

    def allowed(self, among: Collection[Number] | None = None) -> tuple[Lease, ...]:
        """Return the leases that may be used now, by number: not called back, not over, not released."""
        with self._lock:
            if not self._settled:
                return ()
            return tuple(
                lease
                for number, lease in sorted(self._leases.items())
                if (among is None or number in among) and self._may(lease)
            )

    def placement(self, among: Collection[Number] | None = None) -> dict[str, int]:
        """Return the GPUs to be used now, by node.

        On a node in use whose leases have changed these are the ones that can stay in use: others are added once what
        runs there has left the lost ones, since a process cannot change its GPU.
        """
        with self._lock:
            allowed = {lease.number: lease for lease in self.allowed(among)}
            counts: dict[str, int] = {}
            for lease in allowed.values():
                counts[lease.node] = counts.get(lease.node, 0) + 1
            for node, used in self._used_by_node(among).items():
                if not used <= allowed.keys():
                    counts[node] = len(used & allowed.keys())
            return {node: count for node, count in counts.items() if count}

    def due(self, among: Collection[Number] | None = None) -> dict[Number, float]:
        """Return the leases that are used and may not be, and by when each must be free (s since the Unix epoch).

        0 for one that has ended: somebody else may have the GPU already.
        """
        with self._lock:
            found = {}
            for number in self._users:
                if among is not None and number not in among:
                    continue
                lease = self._leases.get(number)
                if lease is None:
                    found[number] = 0.0
                elif not self._may(lease):
                    found[number] = self._deadline(lease)
            return found

    # --- what is used ---------------------------------------------------------------------------------------

    def enter(
        self, user: str, node: str, count: int, among: Collection[Number] | None = None
    ) -> tuple[Lease, ...]:
        """Enter ``user`` on ``count`` GPUs of ``node`` and return their leases. Call it before anything starts there.

        Raises ``LeaseError``: too few leases that may be used, or the ledger has been away for too long to be sure.
        """
        with self._lock:
            if user in self._users.values():
                raise LeaseError(f"{user} is on {node} already")
            if self.silence > self._rules.fence:
                raise LeaseError(
                    f"no process is started on {node}: the ledger has not responded for {self.silence:.0f} s, so the "
                    "lease may have expired"
                )
            free = [
                lease
                for lease in self.allowed(among)
                if lease.node == node and lease.number not in self._users
            ]
            if len(free) < count:
                raise LeaseError(
                    f"{user} needs {count} GPUs of {node}; {self.app} has leases on {len(free)} that are free"
                )
            taken = tuple(free[:count])
            for lease in taken:
                self._users[lease.number] = user
                self._known[lease.number] = lease
            return taken

    def leave(self, user: str) -> None:
        """Take ``user`` out: none of its processes is left. Nothing happens for one that is not entered."""
        with self._lock:
            for number in [number for number, who in self._users.items() if who == user]:
                del self._users[number]
                del self._known[number]

    def users(self, numbers: Iterable[Number]) -> dict[str, str]:
        """Return who is entered on these leases, and on which node."""
        with self._lock:
            return {self._users[n]: self._known[n].node for n in numbers if n in self._users}

    def used(self) -> frozenset[Number]:
        """Return the leases that are in use."""
        with self._lock:
            return frozenset(self._users)

    # --- what is let go of ----------------------------------------------------------------------------------

    def release(self, numbers: Iterable[Number] | None = None) -> frozenset[Number]:
        """Release leases, by default all, that are not in use, and return those that are released now."""
        with self._lock:
            if not self._settled:
                return frozenset()
            wanted = self._leases.keys() if numbers is None else set(numbers) & self._leases.keys()
            new = wanted - self._users.keys() - self._released
            self._released |= new
            return frozenset(new)

    def account(self) -> tuple[tuple[Number, ...], tuple[Number, ...]]:
        """Return the leases that may be in use, and those that are let go of: what the app reports.

        Called back ones, and those that are over, are let go of here if nothing uses them.
        """
        with self._lock:
            self.release([n for n, lease in self._leases.items() if self._over(lease)])
            holds = (self._leases.keys() - self._released) | self._users.keys()
            return tuple(sorted(holds)), tuple(sorted(self._released))

    # --- how ------------------------------------------------------------------------------------------------

    def _end(self, lease: Lease) -> float:
        """Return when a lease that is not called back ends: later while no loop is there to extend it."""
        return lease.until if self.led else lease.until + self._rules.grace

    def _deadline(self, lease: Lease) -> float:
        end = self._end(lease)
        return end if lease.recalled is None else min(end, lease.recalled)

    def _may(self, lease: Lease) -> bool:
        if lease.number in self._released or lease.recalled is not None:
            return False
        leave = min(self._rules.leave, (lease.until - lease.since) / 4)
        return self._clock.now() < self._end(lease) - leave

    def _over(self, lease: Lease) -> bool:
        return lease.recalled is not None or self._clock.now() >= self._end(lease)

    def _used_by_node(self, among: Collection[Number] | None) -> dict[str, set[Number]]:
        found: dict[str, set[Number]] = {}
        for number in self._users:
            if among is None or number in among:
                found.setdefault(self._known[number].node, set()).add(number)
        return found
