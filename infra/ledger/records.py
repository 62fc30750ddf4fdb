"""``ServiceRecords``: what the processes of a service tell each other over the ledger, and agree on in it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from sqlalchemy import Connection, delete, select

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger.database.database import Database
from ebbflow.infra.ledger.database.schema import records
from ebbflow.infra.ledger.rows import projections, seals


class RecordKey(NamedTuple):
    """What names a record of a cluster."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    """A record.

    Args:
        at: when it was written, seconds since the Unix epoch.
        body: plain values.
    """

    at: float
    body: Mapping[str, Any]


Records = Mapping[RecordKey, ServiceRecord]
Change = Callable[[Records], Mapping[RecordKey, Mapping[str, Any] | None]]
"""Returns the records to write, and with ``None`` those to remove; may be called again."""


class ServiceRecords:
    """Records of one cluster. Safe for several threads and processes; see ``Ledger.records``."""

    def __init__(self, database: Database, cluster: str) -> None:
        self._database, self._cluster = database, cluster

    @property
    def clock(self) -> Clock:
        """Return the clock by which records are dated."""
        return self._database.clock

    def read(self) -> Records:
        """Return all records, as of one moment. Raises ``LedgerError``."""
        return self._database.transact("read the records of a service", self._all, mode="glance")

    def put(self, key: RecordKey, body: Mapping[str, Any]) -> None:
        """Replace a record. Raises ``LedgerError``."""
        row = self._row(key, body)
        self._database.transact(
            "write a record of a service",
            lambda connection: projections.upsert(connection, records, [row]),
            mode="report",
        )

    def write(self, change: Change) -> Records:
        """Change records in one transaction that no other writer is in; return those that were there before.

        Args:
            change: is given all records.

        Raises ``LedgerError``.
        """

        def work(connection: Connection) -> Records:
            if not self._database.sqlite:  # which has locked the file
                connection.exec_driver_sql("LOCK TABLE ledger_records IN SHARE ROW EXCLUSIVE MODE")
            before = self._all(connection)
            for key, body in change(before).items():
                if body is not None:
                    projections.upsert(connection, records, [self._row(key, body)])
                    continue
                mine = (records.c.cluster == self._cluster) & (records.c.kind == key.kind)
                connection.execute(delete(records).where(mine & (records.c.name == key.name)))
            return before

        return self._database.transact("change the records of a service", work)

    def _all(self, connection: Connection) -> Records:
        columns = (records.c.kind, records.c.name, records.c.at, records.c.body)
        found = {}
        for kind, name, at, text in connection.execute(
            select(*columns).where(records.c.cluster == self._cluster)
        ):
            try:
                body = json.loads(seals.unseal(text, kind, name))
            except ValueError as exc:
                raise LedgerError(f"the record {kind} {name!r} of the ledger is damaged") from exc
            found[RecordKey(kind, name)] = ServiceRecord(at, body)
        return found

    def _row(self, key: RecordKey, body: Mapping[str, Any]) -> projections.Row:
        return {
            "cluster": self._cluster,
            "kind": key.kind,
            "name": key.name,
            "at": self.clock.now(),
            "body": seals.seal(json.dumps(dict(body)), key.kind, key.name),
        }
