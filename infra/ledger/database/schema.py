"""The ledger's tables. ``events`` is the truth; all others but ``reports``, ``leads`` and ``records`` follow from it.

Their names start with ``ledger_``, because other programs' tables may be in the same database. ``migrations`` makes
them; a test compares the two. Times are seconds since the Unix epoch, money is
dollars. A column's ``key`` is the field of the value that it holds.
"""

from sqlalchemy import (
    BigInteger,
    Column,
    Double,
    Index,
    Integer,
    MetaData,
    PrimaryKeyConstraint,
    Table,
    Text,
    text,
)

metadata = MetaData()

clusters = Table(
    "ledger_clusters",
    metadata,
    Column("cluster", Text, nullable=False),
    Column("number", BigInteger, nullable=False),  # of the last event; its row is what writers queue for
    Column("at", Double, nullable=False),  # of the last event
    Column("token", BigInteger, nullable=False),
    Column("holder", Text, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("last_lease", BigInteger, nullable=False),
    Column("interruption_rate", Double, key="hazard", nullable=False),
    Column("pruned", BigInteger, nullable=False),  # events up to this one may be gone; a snapshot has them
    PrimaryKeyConstraint("cluster"),
)

events = Table(
    "ledger_events",
    metadata,
    Column("cluster", Text, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),
    Column("format", Integer, nullable=False),
    Column("batch", Text, nullable=False),  # the transaction that wrote it
    Column("body", Text, nullable=False),  # JSON
    PrimaryKeyConstraint("cluster", "number"),
    Index("ledger_events_by_kind", "cluster", "kind", "number"),
)

mentions = Table(  # which events are about which app
    "ledger_mentions",
    metadata,
    Column("cluster", Text, nullable=False),
    Column("app", Text, nullable=False),
    Column("number", BigInteger, nullable=False),
    PrimaryKeyConstraint("cluster", "app", "number"),
    Index("ledger_mentions_by_number", "cluster", "number"),
    sqlite_with_rowid=False,
)

snapshots = Table(
    "ledger_snapshots",
    metadata,
    Column("cluster", Text, nullable=False),
    Column("number", BigInteger, nullable=False),  # of the last event in it
    Column("at", Double, nullable=False),
    Column("format", Integer, nullable=False),
    Column("body", Text, nullable=False),  # JSON
    PrimaryKeyConstraint("cluster", "number"),
)

leads = Table(
    "ledger_leads",
    metadata,
    Column("cluster", Text, nullable=False),
    Column("token", BigInteger, nullable=False),
    Column("holder", Text, nullable=False),
    Column("until", Double, nullable=False),  # 0: resigned
    Column("seconds", Double, nullable=False),  # that a renewal is good for
    PrimaryKeyConstraint("cluster"),
)

nodes = Table(
    "ledger_nodes",
    metadata,
    Column("cluster", Text, nullable=False),
    Column("node", Text, nullable=False),
    Column("cores", Integer, nullable=False),
    Column("memory", Double, nullable=False),  # GiB
    Column("host", Text, nullable=False),
    Column("instance_type", Text, nullable=False),
    Column("market", Text, nullable=False),
    Column("zone", Text, nullable=False),
    Column("rack", Text, nullable=False),
    Column("gpus", Integer, nullable=False),
    Column("price", Double, nullable=False),  # dollars per hour
    Column("joined", Double, key="came", nullable=False),  # the last time
    Column("left_at", Double, key="gone"),  # null: it is there
    PrimaryKeyConstraint("cluster", "node"),
)

notices = Table(
    "ledger_notices",
    metadata,
    Column("cluster", Text, nullable=False),
    Column("node", Text, nullable=False),
    Column("deadline", Double, nullable=False),
    Column("kind", Text, nullable=False),
    PrimaryKeyConstraint("cluster", "node"),
)

apps = Table(
    "ledger_apps",
    metadata,
    Column("cluster", Text, nullable=False),
    Column("app", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("team", Text, nullable=False),
    Column("name", Text, key="title", nullable=False),
    Column("pipeline", Text, nullable=False),
    Column("phase", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("registered", Double, key="entered", nullable=False),
    Column("number", BigInteger, nullable=False),  # of the event that entered it
    Column("ended", Double),
    Column("service", Double, nullable=False),  # GPU-seconds
    Column("dollars", Double, nullable=False),
    Column("first_lease", Double),
    Column("checkpoint", Text, nullable=False),
    Column("spec", Text, nullable=False),  # JSON
    PrimaryKeyConstraint("cluster", "app"),
)

leases = Table(
    "ledger_leases",
    metadata,
    Column("cluster", Text, nullable=False),
    Column("lease", BigInteger, nullable=False),
    Column("app", Text, nullable=False),
    Column("node", Text, nullable=False),
    Column("slot", Integer, nullable=False),
    Column("since", Double, nullable=False),
    Column("until", Double, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("price", Double, nullable=False),  # dollars per hour
    Column("preempt_deadline", Double, key="recalled"),
    Column("reason", Text, nullable=False),
    Column("ended", Double),  # null: it is held
    Column("ended_reason", Text, nullable=False),
    PrimaryKeyConstraint("cluster", "lease"),
    Index("ledger_leases_by_app", "cluster", "app"),
    Index(  # the database's own wall against double booking
        "ledger_one_lease_per_gpu",
        "cluster",
        "node",
        "slot",
        unique=True,
        sqlite_where=text("ended IS NULL"),
        postgresql_where=text("ended IS NULL"),
    ),
)

reports = Table(
    "ledger_reports",
    metadata,
    Column("cluster", Text, nullable=False),
    Column("app", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("format", Integer, nullable=False),
    Column("body", Text, nullable=False),  # JSON
    PrimaryKeyConstraint("cluster", "app"),
)

decisions = Table(  # what they were based on stands in the event
    "ledger_decisions",
    metadata,
    Column("cluster", Text, nullable=False),
    Column("number", BigInteger, nullable=False),  # of the event
    Column("at", Double, nullable=False),
    Column("kind", Text, nullable=False),
    Column("app", Text, nullable=False),
    Column("revision", BigInteger, nullable=False),
    Column("seconds", Double, nullable=False),
    Column("reason", Text, nullable=False),
    PrimaryKeyConstraint("cluster", "number"),
    Index("ledger_decisions_by_kind", "cluster", "kind", "number"),
)

checkpoints = Table(
    "ledger_checkpoints",
    metadata,
    Column("cluster", Text, nullable=False),
    Column("number", BigInteger, nullable=False),  # of the event
    Column("app", Text, nullable=False),
    Column("uri", Text, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    PrimaryKeyConstraint("cluster", "number"),
    Index("ledger_checkpoints_by_app", "cluster", "app", "number"),
)

records = Table(  # what a service's processes share: who serves, for whom, and what is to be where
    "ledger_records",
    metadata,
    Column("cluster", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("body", Text, nullable=False),  # JSON
    PrimaryKeyConstraint("cluster", "kind", "name"),
)
