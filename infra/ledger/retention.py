"""Old events let go, on demand only."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sqlalchemy import ColumnElement, Connection, and_, bindparam, delete, func, select, update

from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger import history
from ebbflow.infra.ledger import history as snapshots
from ebbflow.infra.ledger.database.database import Database
from ebbflow.infra.ledger.database.schema import apps, clusters, events, mentions, reports
from ebbflow.infra.ledger.database.schema import snapshots as snapshot_table
from ebbflow.infra.ledger.rows import codec, seals
from ebbflow.planners.model.ledger import GONE, Decided, Event
from ebbflow.planners.model.ledger_state import State

_BATCH = 2000  # rows in one transaction: writers wait for no more than that


@dataclass(frozen=True, slots=True)
class PruneResult:
    """What was let go, or would be."""

    events: int  # dropped; a snapshot holds what they added up to
    payloads: int  # decisions that lost what they were based on, and kept their reason
    up_to: int  # the number of the last event that is gone; 0: none ever was
    reports: int = 0  # the last words of apps that were over by then


def prune(
    database: Database, cluster: str, before: float, *, keep_events: bool, dry_run: bool
) -> PruneResult:
    """See ``Ledger.prune``."""
    done = database.read("list old events", lambda c: _pruned(c, cluster))
    up_to = (
        done if keep_events else database.read("list old events", lambda c: _last_before(c, cluster, before))
    )
    if dry_run:
        return database.read(
            "list old events",
            lambda c: _count_old(c, cluster, before, done, max(done, up_to)),
            long=True,
        )
    if up_to > done:
        state = database.read("replay old events", lambda c: _state_at(c, cluster, up_to), long=True)
        row = snapshots.row_of(cluster, state)
        database.transact("keep a snapshot", lambda c: _begin(c, cluster, up_to, row))
    payloads = _strip(database, cluster, before)
    dropped = _drop(database, cluster, max(done, up_to))
    said = delete(reports).where(_old_reports(cluster, before))
    words = database.transact("delete old reports", lambda c: c.execute(said).rowcount)
    return PruneResult(dropped, payloads, max(done, up_to), words)


def _pruned(connection: Connection, cluster: str) -> int:
    return int(
        connection.execute(select(clusters.c.pruned).where(clusters.c.cluster == cluster)).scalar_one()
    )


def _last_before(connection: Connection, cluster: str, before: float) -> int:
    """Return the last event such that it and all before it are older than ``before``; clocks may have jumped.

    The last event of all stays: by it readers notice what was dropped.
    """
    mine = events.c.cluster == cluster
    last = connection.execute(select(func.max(events.c.number)).where(mine)).scalar() or 0
    newer = select(func.min(events.c.number)).where(mine, events.c.at >= before)
    return max(0, min(connection.execute(newer).scalar() or last, last) - 1)


def _state_at(connection: Connection, cluster: str, number: int) -> State:
    wanted = select(snapshot_table.c.number).where(
        snapshot_table.c.cluster == cluster, snapshot_table.c.number <= number
    )
    state = State()
    for at in connection.execute(wanted.order_by(snapshot_table.c.number.desc())).scalars().all():
        found = history.snapshot(connection, cluster, at)
        if found is not None:
            state = found
            break
    for event in history.stream(connection, cluster, state.number):
        if event.number > number:
            break
        history.advanced(state, event)
    if state.number != number:
        raise LedgerError(
            f"events {state.number + 1} to {number} are missing; run ebbflow ledger verify for details"
        )
    return state


def _begin(connection: Connection, cluster: str, up_to: int, row: dict[str, object]) -> None:
    """Make the snapshot at ``up_to`` the one that the ledger begins from."""
    mine = clusters.c.cluster == cluster
    connection.execute(select(clusters.c.number).where(mine).with_for_update())
    newer = clusters.c.pruned < up_to
    if connection.execute(update(clusters).where(mine, newer), {"pruned": up_to}).rowcount:
        snapshots.keep(connection, row)
        older = snapshot_table.c.number < up_to
        connection.execute(delete(snapshot_table).where(snapshot_table.c.cluster == cluster, older))


def _strip(database: Database, cluster: str, before: float) -> int:
    """Take inputs and outcomes from old decisions."""
    after, stripped = 0, 0
    while True:
        page = database.read("list old decisions", lambda c, after=after: _old(c, cluster, before, after))  # type: ignore[misc]
        if not page:
            return stripped
        bare = [(event, packed) for event, change in page if (packed := _bare(change)) is not None]
        if bare:
            database.transact("compact old decisions", lambda c, bare=bare: _shorten(c, cluster, bare))  # type: ignore[misc]
        stripped += len(bare)
        after = page[-1][0].number


def _old(connection: Connection, cluster: str, before: float, after: int) -> list[tuple[Event, Decided]]:
    wanted = history.following(cluster, after, _BATCH).where(events.c.kind == "decided", events.c.at < before)
    found = [history.event_of(row) for row in connection.execute(wanted)]
    return [(event, event.change) for event in found if isinstance(event.change, Decided)]


def _bare(change: Decided) -> codec.StoredChange | None:
    return codec.pack(replace(change, inputs={}, outcome={})) if change.inputs or change.outcome else None


def _shorten(connection: Connection, cluster: str, bare: Sequence[tuple[Event, codec.StoredChange]]) -> None:
    at = (events.c.cluster == cluster) & (events.c.number == bindparam("at_number"))
    rows = [
        {
            "at_number": event.number,
            "new": seals.seal(packed.body, event.number, float(event.at), packed.kind),
            "as": codec.FORMAT,
        }
        for event, packed in bare
    ]
    connection.execute(update(events).where(at).values(body=bindparam("new"), format=bindparam("as")), rows)


def _drop(database: Database, cluster: str, up_to: int) -> int:
    dropped = 0
    while True:
        gone = database.transact("delete old events", lambda c: _drop_batch(c, cluster, up_to))
        dropped += gone
        if not gone:
            return dropped


def _drop_batch(connection: Connection, cluster: str, up_to: int) -> int:
    mine = (events.c.cluster == cluster) & (events.c.number <= up_to)
    first = connection.execute(select(func.min(events.c.number)).where(mine)).scalar()
    if first is None:
        return 0
    end = min(first + _BATCH - 1, up_to)
    about = (mentions.c.cluster == cluster) & (mentions.c.number <= end)
    connection.execute(delete(mentions).where(about))
    return connection.execute(delete(events).where(mine, events.c.number <= end)).rowcount


def _count_old(connection: Connection, cluster: str, before: float, done: int, up_to: int) -> PruneResult:
    mine = (events.c.cluster == cluster) & (events.c.number > done)
    dropped = connection.execute(select(func.count()).where(mine, events.c.number <= up_to)).scalar_one()
    payloads, after = 0, 0
    while page := _old(connection, cluster, before, after):
        payloads += sum(1 for _, change in page if change.inputs or change.outcome)
        after = page[-1][0].number
    words = select(func.count()).select_from(reports).where(_old_reports(cluster, before))
    return PruneResult(dropped, payloads, up_to, connection.execute(words).scalar_one())


def _old_reports(cluster: str, before: float) -> ColumnElement[bool]:
    """Return which reports are of apps that were over or lost ``before``."""
    over = select(apps.c.app).where(
        apps.c.cluster == cluster, apps.c.phase.in_(sorted(GONE)), apps.c.ended < before
    )
    return and_(reports.c.cluster == cluster, reports.c.app.in_(over))
