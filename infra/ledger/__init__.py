"""The ledger: the durable record of apps, nodes, leases and decisions, in SQLite or PostgreSQL."""

from ebbflow.infra.ledger.audit import audit
from ebbflow.infra.ledger.leadership import Lead, Leadership
from ebbflow.infra.ledger.ledger import Ledger, UnreadableReport
from ebbflow.infra.ledger.migrate import migrate_ledger
from ebbflow.infra.ledger.overview import Overview
from ebbflow.infra.ledger.retention import Pruned

__all__ = [
    "Lead",
    "Leadership",
    "Ledger",
    "Overview",
    "Pruned",
    "UnreadableReport",
    "audit",
    "migrate_ledger",
]
