"""What a ledger holds, in numbers, for people."""

from dataclasses import dataclass

from sqlalchemy import Connection, func, select, text

from ebbflow.infra.ledger import clusters as known_clusters
from ebbflow.infra.ledger.database.database import Database
from ebbflow.infra.ledger.database.schema import apps, clusters, events, metadata, snapshots
from ebbflow.infra.ledger.leadership import Lead, lead_of
from ebbflow.infra.ledger.migrate import version


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
    lead: Lead | None
    apps: int = 0  # that ever entered


def overview(database: Database, cluster: str) -> Overview:
    """Return what the ledger holds of ``cluster``."""
    return database.read("look at the ledger", lambda c: _overview(c, database, cluster))


def _overview(connection: Connection, database: Database, cluster: str) -> Overview:
    row = connection.execute(select(clusters).where(clusters.c.cluster == cluster)).one()
    count = select(func.count()).select_from(events).where(events.c.cluster == cluster)
    kept = select(snapshots.c.number).where(snapshots.c.cluster == cluster).order_by(snapshots.c.number)
    return Overview(
        address=str(database.address),
        form=version(connection),
        bytes=_bytes(connection, database),
        clusters=known_clusters.names(connection),
        cluster=cluster,
        events=connection.execute(count).scalar_one(),
        last=row.number,
        at=row.at,
        pruned=row.pruned,
        snapshots=tuple(connection.execute(kept).scalars()),
        lead=lead_of(connection, cluster),
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
