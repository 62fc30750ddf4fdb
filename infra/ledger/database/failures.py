"""What a database's errors mean."""

import re
from dataclasses import dataclass

from sqlalchemy.exc import DBAPIError, IntegrityError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from ebbflow.infra.errors import DoubleBookingError, LedgerError, LedgerUnavailableError
from ebbflow.infra.ledger.address import Address

_BOOKED = "ledger_one_lease_per_gpu"
# https://www.postgresql.org/docs/15/errcodes-appendix.html
_AGAIN = frozenset({"40001", "40P01"})  # serialization failure, deadlock
_LATER = ("08", "53", "57", "58", "XX", "25006", "55P03", "55006")
_ADVICE = {
    "28": "check user and password, and pg_hba.conf",
    "3D": "create the database first: createdb NAME",
    "42501": "the user needs the privilege to create and alter tables in the database",
    "53100": "the server's disk is full",
    "53300": "the server allows no more connections: raise max_connections or put a pooler before it",
    "55P03": "another transaction held the cluster's row for too long",
    "57014": "the statement took longer than its time limit",
    "25006": "the server is read-only, as a standby is",
}
_SQLITE_LATER = {
    "SQLITE_FULL": "the disk is full",
    "SQLITE_IOERR": "the file cannot be read or written: the disk may be full or gone",
    "SQLITE_BUSY": "other processes have kept it locked for too long",
    "SQLITE_LOCKED": "it is locked",
    "SQLITE_CANTOPEN": "the file cannot be opened",
    "SQLITE_READONLY": "the file or its directory is read-only",
    "SQLITE_PROTOCOL": "its locks cannot be acquired",
    "SQLITE_NOMEM": "there is no memory left",
}
_SQLITE_BROKEN = {
    "SQLITE_CORRUPT": "the file is damaged: restore a copy, or move it away to start with an empty ledger",
    "SQLITE_NOTADB": "the file is no SQLite database",
}


@dataclass(frozen=True)
class Failure:
    """One error of a database, understood."""

    error: LedgerError
    again: bool = False  # the same transaction may well succeed at once
    lost: bool = False  # the connection is gone
    stale: bool = False  # open connections stay as they are, even once the cause is gone


def understand(error: SQLAlchemyError, action: str, address: Address) -> Failure:
    """Return what ``error``, which happened while trying to ``action``, means."""
    if isinstance(error, PoolTimeoutError):
        return Failure(
            LedgerUnavailableError(f"cannot {action}: all connections to {address} are in use for too long")
        )
    if not isinstance(error, DBAPIError):
        return Failure(LedgerError(address.hide(f"cannot {action} at {address}: {error}")))
    said = _one_line(address.hide(str(error.orig)))
    if isinstance(error, IntegrityError) and (_BOOKED in said or "leases.slot" in said):
        return Failure(DoubleBookingError(f"cannot {action}: a GPU is allocated already ({said})"))
    if address.kind == "sqlite":
        return _sqlite(error, f"cannot {action} at {address}: {said}")
    return _postgresql(error, f"cannot {action} at {address}: {said}")


def _sqlite(error: DBAPIError, message: str) -> Failure:
    name = getattr(error.orig, "sqlite_errorname", "") or ""
    for prefix, meaning in _SQLITE_LATER.items():
        if name.startswith(prefix):
            # SQLite opens a file that may only be read for reading, and keeps it so
            stale = prefix == "SQLITE_READONLY"
            return Failure(LedgerUnavailableError(f"{message} ({meaning})"), stale=stale)
    for prefix, meaning in _SQLITE_BROKEN.items():
        if name.startswith(prefix):
            return Failure(LedgerError(f"{message} ({meaning})"))
    if "no such table: ledger_" in message:
        message = f"{message} (the file was removed or replaced: restore it, or open it again to start empty)"
    return Failure(LedgerError(message))


def _postgresql(error: DBAPIError, message: str) -> Failure:
    state = getattr(error.orig, "sqlstate", None) or ""
    advice = next((text for code, text in _ADVICE.items() if state.startswith(code)), "")
    if advice:
        message = f"{message} ({advice})"
    if state in _AGAIN:
        return Failure(LedgerUnavailableError(message), again=True)
    if error.connection_invalidated:
        return Failure(LedgerUnavailableError(message), lost=True)
    if state.startswith(_LATER):
        return Failure(LedgerUnavailableError(message))
    # a server that cannot be reached gives no code; one that refuses says so in words
    if not state and type(error.orig).__name__ in ("OperationalError", "ConnectionTimeout", "InterfaceError"):
        if re.search(
            r"password|authentication|pg_hba|role .* does not exist|database .* does not exist", message
        ):
            return Failure(LedgerError(f"{message} (check user, password and database)"))
        return Failure(LedgerUnavailableError(message))
    return Failure(LedgerError(message))


def _one_line(text: str) -> str:
    return " ".join(text.split())[:500]
