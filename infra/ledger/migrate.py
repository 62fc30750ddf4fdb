"""A ledger's schema, made or migrated to the current version by the steps in ``migrations``."""

from pathlib import Path

from sqlalchemy import Connection, inspect, text

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger.address import parse
from ebbflow.infra.ledger.database.database import Database, check_file, prepare_file

VERSION_TABLE = "ledger_version"
STEPS = ("0001", "0002", "0003")  # all of ``migrations/versions``, in order
_LOCK = 0x6562_6266_6C6F_7701  # of PostgreSQL, so that one process at a time makes tables


def create_or_migrate(database: Database, *, create: bool = True) -> str:
    """Bring the tables to the newest form; return the form they had, empty where there were none.

    Processes that do so at once wait for each other; a step that fails leaves all as it was. Raises ``LedgerError``
    for tables of a newer Ebbflow, or where there are none and ``create`` is false.
    """
    if database.sqlite:
        if not create and not database.address.path.exists() and not database.address.path.is_symlink():
            raise _nothing(database)
        check_file(database.address.path)
    if database.sqlite and create:
        prepare_file(database)
    found = database.read("read the ledger's schema version", version)
    if found == STEPS[-1]:
        return found
    if not found and not create:
        raise _nothing(database)
    _refuse_newer(found, database)
    return database.transact("create the ledger's tables", lambda c: _upgrade(c, database), mode="migrate")


def migrate_ledger(url: str | None = None, clock: Clock | None = None) -> tuple[str, str]:
    """Migrate the ledger at ``url``, which must exist; return the schema version that it had and has."""
    database = Database(parse(url), clock or SystemClock())
    try:
        return create_or_migrate(database, create=False), STEPS[-1]
    finally:
        database.close()


def version(connection: Connection) -> str:
    """Return the newest step that the tables have been through; empty where there are none."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return ""
    return connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar() or ""


def _upgrade(connection: Connection, database: Database) -> str:
    if not database.sqlite:
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    found = version(connection)  # another may have been faster
    _refuse_newer(found, database)
    if found != STEPS[-1]:
        from alembic import command
        from alembic.config import Config

        config = Config()
        config.set_main_option(
            "script_location", str(Path(__file__).parent / "migrations").replace("%", "%%")
        )
        config.set_main_option("path_separator", "newline")
        config.attributes["connection"] = connection
        command.upgrade(config, "head")
    return found


def _refuse_newer(found: str, database: Database) -> None:
    if found and found not in STEPS:
        raise LedgerError(
            f"the ledger at {database.address} has schema version {found}, of a newer Ebbflow; this one knows "
            f"versions up to {STEPS[-1]}: upgrade Ebbflow, or name another ledger"
        )


def _nothing(database: Database) -> LedgerError:
    return LedgerError(f"there is no ledger at {database.address}; ebbflow capacity start creates one")
