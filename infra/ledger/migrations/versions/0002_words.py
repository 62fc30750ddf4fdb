"""Columns have the field's words. Texts of events stay: their checksums are of what was written."""

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_RENAMED = (
    ("ledger_clusters", "epoch", "revision"),
    ("ledger_clusters", "hazard", "interruption_rate"),
    ("ledger_decisions", "epoch", "revision"),
    ("ledger_leases", "epoch", "revision"),
    ("ledger_leases", "recalled", "preempt_deadline"),
    ("ledger_apps", "entered", "registered"),
    ("ledger_apps", "title", "name"),
    ("ledger_nodes", "came", "joined"),
    ("ledger_nodes", "gone", "left_at"),
)


def upgrade() -> None:
    """Rename the columns."""
    for table, old, new in _RENAMED:
        op.alter_column(table, old, new_column_name=new)
