"""The ledger: the durable record of apps, nodes, leases and decisions, in SQLite or PostgreSQL."""

from ebbflow.infra.ledger.audit import audit
from ebbflow.infra.ledger.leadership import LeaderLease, Leadership
from ebbflow.infra.ledger.ledger import Ledger, UnreadableReport
from ebbflow.infra.ledger.migrate import migrate_ledger
from ebbflow.infra.ledger.overview import Overview
from ebbflow.infra.ledger.retention import PruneResult

__all__ = [
    "LeaderLease",
    "Leadership",
    "Ledger",
    "Overview",
    "PruneResult",
    "UnreadableReport",
    "audit",
    "migrate_ledger",
]
