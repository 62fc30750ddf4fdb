"""Changes appended to one cluster's events, each validated against the state that it meets."""

import secrets
import threading
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sqlalchemy import Connection, bindparam, select

from ebbflow.infra.errors import DoubleBookingError, LedgerError
from ebbflow.infra.ledger import history
from ebbflow.infra.ledger import history as snapshots
from ebbflow.infra.ledger.database.database import Database
from ebbflow.infra.ledger.database.schema import clusters, events
from ebbflow.infra.ledger.history import KnownState
from ebbflow.infra.ledger.rows import codec, projections, remembering
from ebbflow.planners.model.ledger import AppRecord, Change, Event, Granted, Slot
from ebbflow.planners.model.ledger_state import State, fold

_LAST = (
    select(events.c.batch)
    .where(events.c.cluster == clusters.c.cluster, events.c.number == bindparam("known"))
    .scalar_subquery()
)
_LOCKING = (  # SQLite has locked the whole file by then, and knows no FOR UPDATE
    select(clusters.c.number, _LAST.label("batch"))
    .where(clusters.c.cluster == bindparam("of_cluster"))
    .with_for_update(of=clusters)
)
First = Callable[[Connection, State], Sequence[Change]]


class Journal:
    """The events of one cluster and the state that they add up to, as far as it is known here.

    A state that was published is never changed again: what follows is folded into a copy. Safe for several threads.
    """

    def __init__(self, database: Database, cluster: str) -> None:
        self.database = database
        self.cluster = cluster
        self._latest: KnownState | None = None
        self._snapshot: int | None = None  # number of the newest that is known
        self._publishing = threading.Lock()

    def state(self) -> State:
        """Return the present state; only the events are read that are not known yet."""
        known = self._known()
        now = self.database.transact(
            "read the state", lambda c: history.glanced(c, self.cluster, known), mode="glance"
        )
        if now is None:
            now = self.database.read(
                "read the state", lambda c: history.caught_up(c, self.cluster, known), long=True
            )
        return known.state if now is known else self._publish(now).state

    def append(self, changes: Sequence[Change], first: First | None = None) -> tuple[Event, ...]:
        """Write ``changes`` in one transaction, after those that ``first`` returns for the state they meet.

        ``first`` may refuse by raising; it is called within the transaction, and again if that is repeated.
        """
        packed = [codec.pack(change) for change in changes]
        if not packed and first is None:
            return ()
        known = self._known()
        batch = secrets.token_hex(8)

        def work(connection: Connection) -> WriteResult:
            state = self._locked_state(connection, known)
            more = [codec.pack(change) for change in first(connection, state)] if first else []
            return self._write(connection, state, [*more, *packed], batch)

        def landed(connection: Connection, done: WriteResult) -> bool:
            # the server may still be making it final: then it holds the row, and is waited for
            connection.execute(_LOCKING, {"of_cluster": self.cluster, "known": known.state.number}).all()
            mine = (events.c.cluster == self.cluster) & (events.c.batch == batch)
            numbers = [event.number for event in done.events]
            wanted = select(events.c.number).where(mine, events.c.number.in_(numbers[:1]))
            return connection.execute(wanted).scalar() is not None

        done = self.database.transact("write to the ledger", work, landed=landed)
        if done.events:
            self._publish(KnownState(done.state, batch))
        return done.events

    def keep_snapshot(self) -> None:
        """Keep the state beside the events if enough have come since the last time."""
        if self._latest is None:
            return
        state = self._latest.state
        try:
            if self._snapshot is None:
                self._snapshot = self.database.read(
                    "list the snapshots", lambda c: snapshots.last(c, self.cluster)
                )
            if state.number - self._snapshot >= snapshots.EVERY:
                row = snapshots.row_of(self.cluster, state)
                self.database.transact("keep a snapshot", lambda c: snapshots.keep(c, row))
                self._snapshot = state.number
        except LedgerError:
            self._snapshot = None  # nothing is lost: another change will bring another

    def _write(
        self, connection: Connection, state: State, packed: Sequence[codec.StoredChange], batch: str
    ) -> "WriteResult":
        now = self.database.clock.now()
        trial = history.copied(state)
        stored: list[codec.StoredChange] = []
        written: list[Event] = []
        about: list[tuple[int, frozenset[str]]] = []
        for given in packed:
            for change in remembering.completed(connection, self.cluster, trial, given.change):
                if isinstance(change, Granted):
                    _refuse_double_booking(trial, change)
                apps = projections.mentioned(change, trial)
                event = Event(trial.number + 1, now, change)
                forgotten: dict[str, AppRecord] = {}
                fold(trial, event, forgotten)
                known = ChainMap(trial.apps, forgotten) if forgotten else trial.apps
                projections.project(connection, self.cluster, event, known, apps)
                about.append((event.number, apps))
                stored.append(given if change is given.change else codec.pack(change))
                written.append(event)
        if written:
            projections.record(connection, self.cluster, batch, stored, written)
            projections.mention(connection, self.cluster, about)
            projections.head(connection, self.cluster, trial)
        return WriteResult(trial, tuple(written))

    def _locked_state(self, connection: Connection, known: KnownState) -> State:
        """Return the present state, which no other process can change before the transaction ends."""
        number, batch = 0, ""
        for row in connection.execute(_LOCKING, {"of_cluster": self.cluster, "known": known.state.number}):
            number, batch = row.number, row.batch or ""
        if (number, batch) == (known.state.number, known.batch):
            return known.state
        state = history.caught_up(connection, self.cluster, known).state
        if state.number != number:
            raise LedgerError(
                f"cluster {self.cluster!r} has {number} events, but those after {state.number} are missing or beyond "
                "them: restore a backup"
            )
        return state

    def _known(self) -> KnownState:
        known = self._latest
        if known is None:
            known = self._publish(
                self.database.read("read the state", lambda c: history.whole(c, self.cluster), long=True)
            )
        return known

    def _publish(self, known: KnownState) -> KnownState:
        with self._publishing:
            if self._latest is None or known.state.number > self._latest.state.number:
                self._latest = known
            return self._latest


class WriteResult(NamedTuple):
    """What a transaction has written, and the state after it."""

    state: State
    events: tuple[Event, ...]


def _refuse_double_booking(state: State, change: Granted) -> None:
    taken: dict[Slot, int] = {}
    for lease in change.leases:
        slot = Slot(lease.node, lease.slot)
        other = state.booked.get(slot, taken.get(slot))
        if other is not None:
            raise DoubleBookingError(
                f"GPU {lease.slot} of node {lease.node!r} is allocated to lease {other}; "
                f"lease {lease.number} cannot have it"
            )
        taken[slot] = lease.number
