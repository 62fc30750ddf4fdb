"""The tables as they were first."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "ledger_apps",
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("app", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("team", sa.Text(), nullable=False),
        sa.Column("title", sa.Text(), nullable=False),
        sa.Column("pipeline", sa.Text(), nullable=False),
        sa.Column("phase", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("entered", sa.Double(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("ended", sa.Double(), nullable=True),
        sa.Column("service", sa.Double(), nullable=False),
        sa.Column("dollars", sa.Double(), nullable=False),
        sa.Column("first_lease", sa.Double(), nullable=True),
        sa.Column("checkpoint", sa.Text(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "app"),
    )
    op.create_table(
        "ledger_checkpoints",
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("app", sa.Text(), nullable=False),
        sa.Column("uri", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "number"),
    )
    op.create_index(
        "ledger_checkpoints_by_app", "ledger_checkpoints", ["cluster", "app", "number"], unique=False
    )
    op.create_table(
        "ledger_clusters",
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("last_lease", sa.BigInteger(), nullable=False),
        sa.Column("hazard", sa.Double(), nullable=False),
        sa.Column("pruned", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("cluster"),
    )
    op.create_table(
        "ledger_decisions",
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("app", sa.Text(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "number"),
    )
    op.create_index(
        "ledger_decisions_by_kind", "ledger_decisions", ["cluster", "kind", "number"], unique=False
    )
    op.create_table(
        "ledger_events",
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("format", sa.Integer(), nullable=False),
        sa.Column("batch", sa.Text(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "number"),
    )
    op.create_index("ledger_events_by_kind", "ledger_events", ["cluster", "kind", "number"], unique=False)
    op.create_table(
        "ledger_leads",
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.Column("seconds", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("cluster"),
    )
    op.create_table(
        "ledger_leases",
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("lease", sa.BigInteger(), nullable=False),
        sa.Column("app", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("price", sa.Double(), nullable=False),
        sa.Column("recalled", sa.Double(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("ended", sa.Double(), nullable=True),
        sa.Column("ended_reason", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "lease"),
    )
    op.create_index("ledger_leases_by_app", "ledger_leases", ["cluster", "app"], unique=False)
    op.create_index(
        "ledger_one_lease_per_gpu",
        "ledger_leases",
        ["cluster", "node", "slot"],
        unique=True,
        sqlite_where=sa.text("ended IS NULL"),
        postgresql_where=sa.text("ended IS NULL"),
    )
    op.create_table(
        "ledger_mentions",
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("app", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "app", "number"),
        sqlite_with_rowid=False,
    )
    op.create_index("ledger_mentions_by_number", "ledger_mentions", ["cluster", "number"], unique=False)
    op.create_table(
        "ledger_nodes",
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("cores", sa.Integer(), nullable=False),
        sa.Column("memory", sa.Double(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("instance_type", sa.Text(), nullable=False),
        sa.Column("market", sa.Text(), nullable=False),
        sa.Column("zone", sa.Text(), nullable=False),
        sa.Column("rack", sa.Text(), nullable=False),
        sa.Column("gpus", sa.Integer(), nullable=False),
        sa.Column("price", sa.Double(), nullable=False),
        sa.Column("came", sa.Double(), nullable=False),
        sa.Column("gone", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("cluster", "node"),
    )
    op.create_table(
        "ledger_notices",
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "node"),
    )
    op.create_table(
        "ledger_reports",
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("app", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("format", sa.Integer(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "app"),
    )
    op.create_table(
        "ledger_snapshots",
        sa.Column("cluster", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("format", sa.Integer(), nullable=False),
        sa.Column("body", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("cluster", "number"),
    )
