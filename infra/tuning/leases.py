"""Which process runs which trial of a tuning run: a lease on each trial that runs, renewed while its process lives.

The state of a trial in the study says whether it is over; the lease says whose it is until then. A trial whose
process died is claimed by another one under its own number, with the parameters that it has. (Optuna's own remedy,
``RetryHeartbeatStaleTrialCallback``, fails such a trial and adds another one, under another number.)

Times are those of the database, so that clocks of machines need not agree.
"""

import logging
import os
import socket
import threading
import uuid
from typing import Any, Protocol

from sqlalchemy import Connection, bindparam, text

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import LedgerError
from ebbflow.infra.ledger.address import Address
from ebbflow.infra.tuning.database import open_database

SETUP = -1  # in place of a trial's number: the right to add trials to the study
_RENEWALS = 5  # in the time after which a lease counts as abandoned
_LOCK = 0x6562_6266_7475_6E65  # of PostgreSQL, so that one process at a time makes the table
_TABLE = """
CREATE TABLE IF NOT EXISTS tuning_leases (
    study VARCHAR(200) NOT NULL,
    trial INTEGER NOT NULL,
    holder VARCHAR(200) NOT NULL,
    renewed DOUBLE PRECISION NOT NULL,
    PRIMARY KEY (study, trial)
)
"""
_NOW = {
    "sqlite": "((julianday('now') - 2440587.5) * 86400.0)",
    "postgresql": "CAST(extract(epoch FROM clock_timestamp()) AS double precision)",
}  # s since the Unix epoch
_OWN = "WHERE study = :study AND holder = :holder"

log = logging.getLogger(__name__)


class TrialLeases(Protocol):
    """Leases of one process on trials of one tuning run."""

    def taken(self) -> frozenset[int]:
        """Return the trials that cannot be claimed now, those included that this process has."""
        ...

    def claim(self, trial: int) -> bool:
        """Take a trial that nobody runs; return whether this process has it, and had it not before."""
        ...

    def confirm(self, trial: int) -> bool:
        """Return whether this process has the trial still."""
        ...

    def release(self, trial: int) -> None:
        """Give a trial back; one that this process has not is fine."""
        ...

    def lost(self) -> frozenset[int]:
        """Return the trials that others have claimed from this process since it was asked last."""
        ...

    def close(self) -> None:
        """Give all trials back. May be called twice."""
        ...


class SoleLeases:
    """Leases of the only process that runs a tuning run: nobody else has any."""

    def __init__(self) -> None:
        self._held: set[int] = set()

    def taken(self) -> frozenset[int]:
        return frozenset(self._held)

    def claim(self, trial: int) -> bool:
        if trial in self._held:
            return False
        self._held.add(trial)
        return True

    def confirm(self, trial: int) -> bool:
        return trial in self._held

    def release(self, trial: int) -> None:
        self._held.discard(trial)

    def lost(self) -> frozenset[int]:
        return frozenset()

    def close(self) -> None:
        self._held.clear()


class DatabaseLeases:
    """Leases in the study's database, renewed by a thread. Methods may be called in any thread.

    Args:
        address: the database.
        study: name of the study.
        timeout: seconds after which a lease that was not renewed is abandoned; the same for all processes.
        clock: the time, of this process.

    A process claims abandoned leases once it has been renewing its own for ``timeout`` without a break: after an
    outage of the database, or of itself, others get the time to renew theirs. Breaks are those of the database's
    time, which runs on while a machine is suspended. Methods raise ``LedgerError``.
    """

    def __init__(self, address: Address, study: str, timeout: float, clock: Clock) -> None:
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._study, self._timeout, self._clock = study, float(timeout), clock
        self._now = _NOW[address.kind]
        self._lock = threading.Lock()
        self._held: set[int] = set()
        self._lost: set[int] = set()
        self._stop = threading.Event()
        self._database = open_database(address, clock)
        try:
            # the database's time of the last renewal, and since when each came in time
            self._renewed = self._database.transact("make the table of leases", self._make, mode="migrate")
            self._steady_since = self._renewed
        except BaseException:
            self._database.close()
            raise
        self._thread = threading.Thread(target=self._keep, name=f"leases of {study}", daemon=True)
        self._thread.start()

    def taken(self) -> frozenset[int]:
        rows = self._database.read(
            "read the leases",
            lambda c: c.execute(
                text(
                    "SELECT trial FROM tuning_leases WHERE study = :study AND holder <> :holder "
                    f"AND NOT ({self._abandoned})"
                ),
                self._own() | self._steadiness(),
            ).all(),
        )
        with self._lock:
            return frozenset(row[0] for row in rows) | self._held

    def claim(self, trial: int) -> bool:
        with self._lock:
            if trial in self._held:
                return False
        given = self._own(trial) | self._steadiness()

        def work(connection: Connection) -> bool:
            connection.execute(
                text(
                    "INSERT INTO tuning_leases (study, trial, holder, renewed) "
                    f"VALUES (:study, :trial, :holder, {self._now}) ON CONFLICT (study, trial) DO UPDATE "
                    "SET holder = excluded.holder, renewed = excluded.renewed "
                    f"WHERE {self._abandoned}"
                ),
                given,
            )
            # a transaction that is repeated after its connection was lost finds what it has done
            found = connection.execute(
                text(f"SELECT count(*) FROM tuning_leases {_OWN} AND trial = :trial"),
                self._own(trial),
            )
            return bool(found.scalar())

        claimed = self._database.transact("claim a trial", work)
        if claimed:
            with self._lock:
                self._held.add(trial)
                self._lost.discard(trial)
        return claimed

    def confirm(self, trial: int) -> bool:
        def work(connection: Connection) -> bool:
            changed = connection.execute(
                text(f"UPDATE tuning_leases SET renewed = {self._now} {_OWN} AND trial = :trial"),
                self._own(trial),
            )
            return changed.rowcount == 1

        return self._database.transact("renew a lease", work)

    def release(self, trial: int) -> None:
        with self._lock:
            self._held.discard(trial)
            self._lost.discard(trial)
        self._database.transact(
            "release a trial",
            lambda c: c.execute(
                text(f"DELETE FROM tuning_leases {_OWN} AND trial = :trial"),
                self._own(trial),
            ),
        )

    def lost(self) -> frozenset[int]:
        with self._lock:
            found = frozenset(self._lost)
            self._lost.clear()
            return found

    def close(self) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(60.0)
        try:
            self._database.transact(
                "release all trials",
                lambda c: c.execute(text(f"DELETE FROM tuning_leases {_OWN}"), self._own()),
            )
        except LedgerError as error:
            log.warning("%s: they are released after %g s", error, self._timeout)
        finally:
            self._database.close()

    # --- how ------------------------------------------------------------------------------------------------

    def _own(self, trial: int | None = None) -> dict[str, Any]:
        mine = {"study": self._study, "holder": self.holder}
        return mine if trial is None else {**mine, "trial": trial}

    @property
    def _abandoned(self) -> str:
        """Return the condition for a lease of another process to be abandoned, as far as this one may judge."""
        return (
            f"tuning_leases.renewed < {self._now} - :timeout AND {self._now} - :seen <= :timeout / 2 "
            f"AND {self._now} - :steady >= :timeout"
        )

    def _steadiness(self) -> dict[str, float]:
        with self._lock:
            return {"timeout": self._timeout, "seen": self._renewed, "steady": self._steady_since}

    def _make(self, connection: Connection) -> float:
        if not self._database.sqlite:
            connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
        connection.execute(text(_TABLE))
        return self._time(connection)

    def _time(self, connection: Connection) -> float:
        return float(connection.execute(text(f"SELECT {self._now}")).scalar_one())

    def _keep(self) -> None:
        while not self._clock.wait(self._stop, self._timeout / _RENEWALS):
            try:
                self.renew()
            except LedgerError as error:
                log.warning("%s", error)

    def renew(self) -> None:
        """Renew the leases that this process knows it has, and note which of them others have."""
        with self._lock:
            before = set(self._held)

        def work(connection: Connection) -> tuple[float, set[int]]:
            # one that is not known here, as an answer was lost or it could not be given back, is left to run out
            if before:
                renewal = text(f"UPDATE tuning_leases SET renewed = {self._now} {_OWN} AND trial IN :held")
                given = self._own() | {"held": sorted(before)}
                connection.execute(renewal.bindparams(bindparam("held", expanding=True)), given)
            rows = connection.execute(text(f"SELECT trial FROM tuning_leases {_OWN}"), self._own())
            return self._time(connection), {row[0] for row in rows}

        now, mine = self._database.transact("renew the leases", work, mode="write")
        with self._lock:
            if now - self._renewed > self._timeout / 2:
                self._steady_since = now
            self._renewed = now
            gone = (before - mine) & self._held
            self._held -= gone
            self._lost |= gone
