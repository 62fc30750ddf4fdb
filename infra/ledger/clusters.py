"""The clusters that share one database."""

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite

from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger.database.database import Database
from ebbflow.infra.ledger.database.schema import clusters
from ebbflow.planners.model.ledger import State


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
    fields = ("number", "at", "token", "holder", "epoch", "last_lease", "hazard")
    row = {"cluster": cluster, "pruned": 0, **{name: getattr(state, name) for name in fields}}
    module = sqlite if connection.dialect.name == "sqlite" else postgresql
    connection.execute(module.insert(clusters).on_conflict_do_nothing(), row)
