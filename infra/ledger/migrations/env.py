"""Alembic's entry: the connection comes from ``ebbflow.infra.ledger.migrate``, in a transaction that it ends."""

from alembic import context

from ebbflow.infra.ledger.database.schema import metadata
from ebbflow.infra.ledger.migrate import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=True,
)
context.run_migrations()
