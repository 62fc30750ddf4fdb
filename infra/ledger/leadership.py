"""Who may write nodes and leases: one loop, told from older ones by a token that only grows."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from sqlalchemy import ColumnElement, Connection, select, update

from ebbflow.infra.errors import LedgerBusyError, StaleLoopError
from ebbflow.infra.ledger.database.schema import leads
from ebbflow.infra.ledger.rows import projections
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import Change, Event, LoopBegan
from ebbflow.planners.model.ledger_state import State

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from ebbflow.infra.ledger.journal import Journal


_LONGEST = 200  # characters of a loop's name


@dataclass(frozen=True, slots=True)
class LeaderLease:
    """Who leads, as the ledger has it."""

    token: int
    holder: str
    until: float  # s since the Unix epoch; 0: resigned
    seconds: float  # that a renewal is good for

    def alive(self, now: float) -> bool:
        """Return whether the lead holds at ``now``, s since the Unix epoch. See ``Ledger.lead``."""
        return self.until != 0 and now < self.until <= now + 2 * self.seconds


class Leadership:
    """The right to write nodes and leases, until another takes over. Safe for several threads."""

    def __init__(self, journal: "Journal", holder: str, seconds: float, token: int, until: float) -> None:
        """Use ``Ledger.lead``."""
        self.holder = holder
        self.seconds = seconds
        self.token = token
        self._journal = journal
        self._until = until
        self._resigned = False

    @property
    def until(self) -> float:
        """Return when the lead ends unless it is renewed, s since the Unix epoch."""
        return self._until

    def write(self, changes: "Sequence[Change]") -> tuple[Event, ...]:
        """Write any changes but ``LoopBegan``, all or none, and return them as they stand in the ledger.

        A lead that has expired while no other loop took over still writes. Raises ``StaleLoopError`` when another
        has taken over or this one has resigned, ``DoubleBookingError`` for a GPU that is taken, ``OptionError`` for
        a change that cannot follow, ``LedgerUnavailableError`` when the database does not answer.
        """
        if any(isinstance(change, LoopBegan) for change in changes):
            raise OptionError("LoopBegan is written by ledger.lead alone")
        if not changes:
            return ()
        written = self._journal.append(changes, self._check)
        self._journal.keep_snapshot()
        return written

    def renew(self) -> None:
        """Lead for another ``seconds`` from now. Raises ``StaleLoopError``, ``LedgerUnavailableError``."""
        self._check_resigned()
        until = self._journal.database.clock.now() + self.seconds
        mine = self._row() & (leads.c.until != 0)

        def work(connection: Connection) -> int:
            return connection.execute(update(leads).where(mine), {"until": until}).rowcount

        if self._journal.database.transact("renew the leader lease", work, mode="report") != 1:
            raise self._stale()
        self._until = until

    def resign(self) -> None:
        """Lead no more; another may begin at once. Does nothing where another has already."""
        self._resigned = True
        given_up = update(leads).where(self._row())
        self._journal.database.transact("resign", lambda c: c.execute(given_up, {"until": 0.0}).rowcount)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: "type[BaseException] | None",
        error: "BaseException | None",
        trace: "TracebackType | None",
    ) -> None:
        self.resign()

    def __repr__(self) -> str:
        return f"Leadership({self.holder!r}, token={self.token})"

    def _check(self, connection: Connection, state: State) -> "Sequence[Change]":
        self._check_resigned()
        if state.token != self.token:
            raise self._stale()
        return ()

    def _row(self) -> ColumnElement[bool]:
        return (leads.c.cluster == self._journal.cluster) & (leads.c.token == self.token)

    def _check_resigned(self) -> None:
        if self._resigned:
            raise StaleLoopError(
                f"loop {self.holder!r} has resigned its leader lease {self.token}: acquire it again first"
            )

    def _stale(self) -> StaleLoopError:
        return StaleLoopError(
            f"loop {self.holder!r} (fencing token {self.token}) is no longer the leader: another has taken over; "
            "nothing was written"
        )


def leader_lease_of(connection: Connection, cluster: str) -> LeaderLease | None:
    """Return the row of ``leads`` of a cluster."""
    columns = (leads.c.token, leads.c.holder, leads.c.until, leads.c.seconds)
    row = connection.execute(select(*columns).where(leads.c.cluster == cluster)).one_or_none()
    return None if row is None else LeaderLease(*row)


def begin_leadership(
    journal: "Journal", holder: str, seconds: float, *, take_over: bool = False
) -> Leadership:
    """Become the leader; see ``Ledger.lead``. Raises ``OptionError``."""
    if not holder or len(holder) > _LONGEST or not holder.isprintable():
        raise OptionError(f"a loop's name has 1 to {_LONGEST} printable characters; got {holder!r:.220}")
    if not 0 < seconds < float("inf"):
        raise OptionError(f"a leader lease lasts a positive number of seconds; got {seconds!r}")
    found = {"token": 0, "until": 0.0}

    def first(connection: Connection, state: State) -> "Sequence[Change]":
        now = journal.database.clock.now()
        held = leader_lease_of(connection, journal.cluster)
        if held is not None and held.alive(now) and held.holder != holder and not take_over:
            raise LedgerBusyError(
                f"loop {held.holder!r} is the leader of cluster {journal.cluster!r}; its lease expires in "
                f"{held.until - now:.0f} s unless it renews: stop it, or wait until then",
                holder=held.holder,
                until=held.until,
            )
        token = max(state.token, held.token if held else 0) + 1
        found.update(token=token, until=now + seconds)
        row = {
            "cluster": journal.cluster,
            "token": token,
            "holder": holder,
            "until": now + seconds,
            "seconds": seconds,
        }
        projections.upsert(connection, leads, [row])
        return [LoopBegan(token, holder)]

    journal.append((), first)
    return Leadership(journal, holder, float(seconds), int(found["token"]), found["until"])
