"""Events and snapshots read back: the state of a cluster, and how it catches up."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import BigInteger, Connection, ScalarSelect, Select, bindparam, select

from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger import codec
from ebbflow.infra.ledger.schema import clusters, events, snapshots
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import Event, State, fold

PAGE = 2000  # events read at once


def copied(state: State) -> State:
    """Return a state of one's own: what is folded into it changes no other."""
    return replace(
        state,
        nodes=dict(state.nodes),
        notices=dict(state.notices),
        apps=dict(state.apps),
        leases=dict(state.leases),
        booked=dict(state.booked),
    )


def event_of(row: Any) -> Event:
    """Return the event of a row of ``events``. Raises ``LedgerError``."""
    return Event(row.number, row.at, codec.unpack(row.kind, row.format, row.body))


_COLUMNS = (events.c.number, events.c.at, events.c.kind, events.c.format, events.c.body)
_FOLLOWING = (
    select(*_COLUMNS)
    .where(events.c.cluster == bindparam("of_cluster"), events.c.number > bindparam("after"))
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
            f"the ledger contradicts itself; ebbflow ledger verify tells more: {error}"
        ) from error


def caught_up(connection: Connection, cluster: str, known: State) -> State:
    """Return the present state. ``known`` is an earlier one, and is itself returned where nothing has followed.

    Raises ``LedgerError``.
    """
    rows = _page(connection, cluster, known.number, PAGE)
    if not rows:
        return known
    if rows[0].number != known.number + 1:  # those between were pruned
        return whole(connection, cluster)
    state = copied(known)
    for row in rows:
        advanced(state, event_of(row))
    if len(rows) >= PAGE:
        for event in stream(connection, cluster, state.number):
            advanced(state, event)
    return state


def whole(connection: Connection, cluster: str) -> State:
    """Return the present state from the newest snapshot that can be read and all events since."""
    gone = connection.execute(select(pruned(cluster))).scalar() or 0
    state = newest_snapshot(connection, cluster) or State()
    if state.number < gone:
        raise LedgerError(
            f"events up to {gone} of cluster {cluster!r} were pruned, and no snapshot that holds them can be read: "
            "restore a back-up"
        )
    for event in stream(connection, cluster, state.number):
        advanced(state, event)
    return state


def origin(connection: Connection, cluster: str) -> State:
    """Return the state before the first event that is there. Raises ``LedgerError``."""
    gone = connection.execute(select(pruned(cluster))).scalar() or 0
    if not gone:
        return State()
    found = snapshot(connection, cluster, gone)
    if found is None:
        raise LedgerError(
            f"events up to {gone} of cluster {cluster!r} were pruned, and the snapshot that holds them cannot be "
            "read: restore a back-up"
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
        state = codec.load(State, row.format, row.body)
    except LedgerError:
        return None  # it can be made again from the events
    return state if state.number == number else None
