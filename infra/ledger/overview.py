"""What a ledger holds, in numbers, for the reader.

The clusters that share one database.
"""

from dataclasses import dataclass

from sqlalchemy import Connection, func, select, text
from sqlalchemy.dialects import postgresql, sqlite

from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger.database.database import Database
from ebbflow.infra.ledger.database.schema import apps, clusters, events, metadata, snapshots
from ebbflow.infra.ledger.leadership import LeaderLease, leader_lease_of
from ebbflow.infra.ledger.migrate import version
from ebbflow.planners.model.ledger_state import State


def names(connection: Connection) -> tuple[str, ...]:
    """Return the clusters that the database holds, sorted."""
    return tuple(connection.execute(select(clusters.c.cluster).order_by(clusters.c.cluster)).scalars())


def enter(database: Database, cluster: str, *, create: bool) -> None:
    """Make room for ``cluster``, or see that it is there.

    Raises ``LedgerError`` where it is missing and ``create`` is false.
    """
    known = database.read("open the ledger", names)
    if cluster in known:
        return
    if not create:
        there = f"there are {', '.join(known)}" if known else "there are none yet"
        raise LedgerError(f"the ledger at {database.address} has no cluster {cluster!r}; {there}")
    database.transact("open the ledger", lambda c: _insert(c, cluster))


def _insert(connection: Connection, cluster: str) -> None:
    state = State()
    fields = ("number", "at", "token", "holder", "revision", "last_lease", "hazard")
    row = {"cluster": cluster, "pruned": 0, **{name: getattr(state, name) for name in fields}}
    module = sqlite if connection.dialect.name == "sqlite" else postgresql
    connection.execute(module.insert(clusters).on_conflict_do_nothing(), row)


@dataclass(frozen=True, slots=True)
class Overview:
    """One cluster's part of a ledger, and the ledger that it is in."""

    address: str  # without password
    form: str  # the newest step its tables have been through
    bytes: int  # of all clusters
    clusters: tuple[str, ...]
    cluster: str
    events: int  # that are there
    last: int  # number of the last event; 0: none
    at: float  # of the last event, s since the Unix epoch
    pruned: int  # events up to this number may be gone
    snapshots: tuple[int, ...]  # numbers of their events
    lead: LeaderLease | None
    apps: int = 0  # that ever entered


def overview(database: Database, cluster: str) -> Overview:
    """Return what the ledger holds of ``cluster``."""
    return database.read("inspect the ledger", lambda c: _overview(c, database, cluster))


def _overview(connection: Connection, database: Database, cluster: str) -> Overview:
    row = connection.execute(select(clusters).where(clusters.c.cluster == cluster)).one()
    count = select(func.count()).select_from(events).where(events.c.cluster == cluster)
    kept = select(snapshots.c.number).where(snapshots.c.cluster == cluster).order_by(snapshots.c.number)
    return Overview(
        address=str(database.address),
        form=version(connection),
        bytes=_bytes(connection, database),
        clusters=names(connection),
        cluster=cluster,
        events=connection.execute(count).scalar_one(),
        last=row.number,
        at=row.at,
        pruned=row.pruned,
        snapshots=tuple(connection.execute(kept).scalars()),
        lead=leader_lease_of(connection, cluster),
        apps=connection.execute(
            select(func.count()).select_from(apps).where(apps.c.cluster == cluster)
        ).scalar_one(),
    )


def _bytes(connection: Connection, database: Database) -> int:
    if database.sqlite:
        path = database.address.path
        files = (path, path.with_name(path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())
    size = text("SELECT pg_total_relation_size(to_regclass(:name))")
    found = (connection.execute(size, {"name": name}).scalar() for name in metadata.tables)
    return sum(int(one or 0) for one in found)
