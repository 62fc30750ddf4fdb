"""States kept beside the events, so that opening a long ledger does not replay it all.

What a snapshot at an event holds follows from the events alone, so whoever makes it makes the same. The one at which
events were pruned is the only one that cannot be made again; it is never dropped.
"""

from sqlalchemy import Connection, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from ebbflow.infra.ledger.database.schema import clusters, snapshots
from ebbflow.infra.ledger.rows import codec, seals
from ebbflow.planners.model.ledger import State

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
