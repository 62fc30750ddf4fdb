"""Events and snapshots read back: the state of a cluster, and how it catches up.

States kept beside the events, so that opening a long ledger does not replay it all.

What a snapshot at an event holds follows from the events alone, so any process makes the same. The one at which
events were pruned is the only one that cannot be made again; it is never dropped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from sqlalchemy import BigInteger, Connection, ScalarSelect, Select, bindparam, case, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger.database.schema import clusters, events, snapshots
from ebbflow.infra.ledger.rows import codec, seals
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import Event
from ebbflow.planners.model.ledger_state import State, fold

PAGE = 2000  # events read at once
_GLANCE = 200  # rows of a look that mostly finds none


def copied(state: State) -> State:
    """Return a state of one's own: what is folded into it changes no other."""
    return replace(
        state,
        nodes=dict(state.nodes),
        notices=dict(state.notices),
        apps=dict(state.apps),
        leases=dict(state.leases),
        booked=dict(state.booked),
        teams=dict(state.teams),
        pipelines=dict(state.pipelines),
    )


def event_of(row: Any) -> Event:
    """Return the event of a row of ``events``. Raises ``LedgerError``."""
    try:
        body = seals.unseal(row.body, row.number, float(row.at), row.kind)
    except LedgerError as error:
        raise LedgerError(f"event {row.number}: {error}") from error
    return Event(row.number, row.at, codec.unpack(row.kind, row.format, body))


class KnownState(NamedTuple):
    """A state, and which transaction wrote the last event in it: the mark of this very history."""

    state: State
    batch: str = ""


_COLUMNS = (events.c.number, events.c.at, events.c.kind, events.c.format, events.c.body)
_FOLLOWING = (
    select(*_COLUMNS)
    .where(events.c.cluster == bindparam("of_cluster"), events.c.number > bindparam("after"))
    .order_by(events.c.number)
    .limit(bindparam("most", type_=BigInteger))
)


_AND_SINCE = (  # the last known event, without its content, and those after it
    select(
        *_COLUMNS[:-1],
        events.c.batch,
        case((events.c.number > bindparam("after"), events.c.body), else_="").label("body"),
    )
    .where(events.c.cluster == bindparam("of_cluster"), events.c.number >= bindparam("after"))
    .order_by(events.c.number)
    .limit(bindparam("most", type_=BigInteger))
)


def following(cluster: str, after: int, limit: int = PAGE) -> Select[Any]:
    """Return the query of a cluster's events above number ``after``."""
    wanted = select(*_COLUMNS).where(events.c.cluster == cluster, events.c.number > after)
    return wanted.order_by(events.c.number).limit(limit)


def pruned(cluster: str) -> ScalarSelect[int]:
    """Return the query of the last event that was pruned; older ones may be left where pruning was cut short."""
    return select(clusters.c.pruned).where(clusters.c.cluster == cluster).scalar_subquery()


def stream(connection: Connection, cluster: str, after: int, page: int = PAGE) -> Iterator[Event]:
    """Return all events above number ``after``, in order, a page at a time."""
    while True:
        rows = _page(connection, cluster, after, page)
        yield from map(event_of, rows)
        if len(rows) < page:
            return
        after = rows[-1].number


def _page(connection: Connection, cluster: str, after: int, most: int) -> Sequence[Any]:
    return connection.execute(_FOLLOWING, {"of_cluster": cluster, "after": after, "most": most}).all()


def advanced(state: State, event: Event) -> State:
    """Fold ``event`` into ``state``, in place. Raises ``LedgerError`` where the ledger contradicts itself."""
    try:
        return fold(state, event)
    except OptionError as error:
        raise LedgerError(
            f"the ledger is inconsistent; run ebbflow ledger verify for details: {error}"
        ) from error


def glanced(connection: Connection, cluster: str, known: KnownState) -> KnownState | None:
    """Return the present state by a single statement, or ``None`` where it takes more than that.

    ``known`` is an earlier state, and is itself returned where nothing has followed. Raises ``LedgerError``, also
    where the ledger is not the one that ``known`` is of.
    """
    after = known.state.number
    rows = connection.execute(_AND_SINCE, {"of_cluster": cluster, "after": after, "most": _GLANCE}).all()
    if after:
        if not rows or (rows[0].number == after and rows[0].batch != known.batch):
            raise LedgerError(
                f"the ledger of cluster {cluster!r} was replaced by another or an older one: event {after} is not "
                "the one that was there; open it again"
            )
        if rows[0].number != after:  # pruned, with those between
            return None
    new = rows[1:] if after else rows
    if not new:
        return known
    if len(rows) == _GLANCE or new[0].number != after + 1:
        return None
    state = copied(known.state)
    for row in new:
        advanced(state, event_of(row))
    return KnownState(state, new[-1].batch)


def caught_up(connection: Connection, cluster: str, known: KnownState) -> KnownState:
    """Return the present state, within a transaction; see ``glanced``."""
    found = glanced(connection, cluster, known)
    if found is not None:
        return found
    after = known.state.number
    first = connection.execute(_FOLLOWING, {"of_cluster": cluster, "after": after, "most": 1}).first()
    if first is None or first.number != after + 1:
        return whole(connection, cluster)
    state = copied(known.state)
    for event in stream(connection, cluster, after):
        advanced(state, event)
    return KnownState(state, _batch(connection, cluster, state.number))


def whole(connection: Connection, cluster: str) -> KnownState:
    """Return the present state from the newest snapshot that can be read and all events since.

    Raises ``LedgerError``.
    """
    gone = connection.execute(select(pruned(cluster))).scalar() or 0
    state = newest_snapshot(connection, cluster) or State()
    if state.number < gone:
        raise LedgerError(
            f"events up to {gone} of cluster {cluster!r} were pruned, and no snapshot that holds them can be read: "
            "restore a backup"
        )
    for event in stream(connection, cluster, state.number):
        advanced(state, event)
    return KnownState(state, _batch(connection, cluster, state.number))


def _batch(connection: Connection, cluster: str, number: int) -> str:
    mine = (events.c.cluster == cluster) & (events.c.number == number)
    return connection.execute(select(events.c.batch).where(mine)).scalar() or ""


def origin(connection: Connection, cluster: str) -> State:
    """Return the state before the first event that is there. Raises ``LedgerError``."""
    gone = connection.execute(select(pruned(cluster))).scalar() or 0
    if not gone:
        return State()
    found = snapshot(connection, cluster, gone)
    if found is None:
        raise LedgerError(
            f"events up to {gone} of cluster {cluster!r} were pruned, and the snapshot that holds them cannot be "
            "read: restore a backup"
        )
    return found


def newest_snapshot(connection: Connection, cluster: str) -> State | None:
    """Return the newest snapshot that can be read, if any."""
    wanted = (
        select(snapshots.c.number).where(snapshots.c.cluster == cluster).order_by(snapshots.c.number.desc())
    )
    for number in connection.execute(wanted).scalars().all():
        found = snapshot(connection, cluster, number)
        if found is not None:
            return found
    return None


def snapshot(connection: Connection, cluster: str, number: int) -> State | None:
    """Return the snapshot at ``number``; ``None`` where it is missing, damaged or of a newer Ebbflow."""
    row = connection.execute(
        select(snapshots.c.format, snapshots.c.body).where(
            snapshots.c.cluster == cluster, snapshots.c.number == number
        )
    ).one_or_none()
    if row is None:
        return None
    try:
        state = codec.load(State, row.format, seals.unseal(row.body, number))
    except LedgerError:
        return None  # it can be made again from the events
    return state if state.number == number else None


EVERY = 5000  # events


KEPT = 3  # newest ones, so that a damaged one costs some replay and no more


def last(connection: Connection, cluster: str) -> int:
    """Return the number of the newest snapshot's event, 0 where there is none."""
    wanted = select(func.max(snapshots.c.number)).where(snapshots.c.cluster == cluster)
    return connection.execute(wanted).scalar() or 0


def row_of(cluster: str, state: State) -> dict[str, object]:
    """Return a snapshot of ``state`` as its table has it."""
    body = seals.seal(codec.dump_known(state), state.number)
    return {"cluster": cluster, "number": state.number, "at": state.at, "format": codec.FORMAT, "body": body}


def keep(connection: Connection, row: dict[str, object]) -> None:
    """Store a snapshot, and drop those that are older than the newest ``KEPT``."""
    cluster = row["cluster"]
    module = sqlite if connection.dialect.name == "sqlite" else postgresql
    connection.execute(module.insert(snapshots).on_conflict_do_nothing(), row)
    mine = snapshots.c.cluster == cluster
    newest = select(snapshots.c.number).where(mine).order_by(snapshots.c.number.desc()).limit(KEPT)
    base = select(clusters.c.pruned).where(clusters.c.cluster == cluster).scalar_subquery()
    old = snapshots.c.number.not_in(newest.scalar_subquery()) & (snapshots.c.number != base)
    connection.execute(delete(snapshots).where(mine, old))
