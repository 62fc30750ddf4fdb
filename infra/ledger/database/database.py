"""Transactions on the ledger's database: begun in the right way, bounded in time, retried where that is safe.

SQLite: write-ahead log; a writer takes the write lock at once (``BEGIN IMMEDIATE``), so it never finds out at its
end that another was faster. ``synchronous=FULL``: a change that was written survives loss of power; reports are
written with ``NORMAL``, which never damages the file but may lose the last of them. Writers of one process queue for
a lock of their own first, because waiting for SQLite's is a sleep that any other process may win.

PostgreSQL: a write locks its cluster's row; waiting for it, statements and idle transactions have time limits on the
server, connections notice a network that is gone, and each transaction has a limit on our side. Reads see one moment
(``REPEATABLE READ``).
"""

import errno
import random
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine.interfaces import IsolationLevel
from sqlalchemy.exc import DBAPIError, DisconnectionError, SQLAlchemyError
from sqlalchemy.pool import QueuePool

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import LedgerError, LedgerUnavailableError
from ebbflow.infra.ledger.address import Address
from ebbflow.infra.ledger.database import sqlite as forks
from ebbflow.infra.ledger.database import sqlite as gates
from ebbflow.infra.ledger.database import watchdog
from ebbflow.infra.ledger.database.failures import understand
from ebbflow.infra.storage import private

T = TypeVar("T")
Mode = Literal[
    "glance",  # one statement that reads
    "read",
    "replay",  # a long read
    "write",
    "report",  # one statement that writes what may be lost with the machine
    "migrate",
]

LOCK_TIMEOUT = 10.0  # s for a lock: the file's write lock, or the cluster's row
MAKING = 60.0  # s for it while tables are made, which takes others long on a busy machine
STATEMENT = 20.0  # s for a statement of PostgreSQL
SILENCE: Mapping[
    Mode, float
] = {  # s for a whole transaction of PostgreSQL, before its connection is given up
    "glance": 30.0,
    "read": 30.0,
    "report": 30.0,
    "write": 40.0,
    "replay": 3600.0,
    "migrate": 3600.0,
}
CONNECT = 5.0  # s for a new connection
CONNECTION: Mapping[str, Any] = {
    "connect_timeout": int(CONNECT),
    "application_name": "ebbflow",
    "keepalives": 1,
    "keepalives_idle": 5,  # s
    "keepalives_interval": 2,  # s
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,  # ms
}  # of PostgreSQL: a connection notices a network that is gone within about 15 s
ATTEMPTS = 5  # of one transaction that met a deadlock or a lost connection
_PAUSE = 0.02  # s before the second attempt, doubled for each further one
_OPTION = "ebbflow_mode"
_FILE = "ebbflow_file"  # of a connection: which file it has open
_ISOLATION: Mapping[
    Mode, IsolationLevel
] = {  # of PostgreSQL; one statement alone needs no round trips about it
    "glance": "AUTOCOMMIT",
    "read": "REPEATABLE READ",
    "replay": "REPEATABLE READ",
    "write": "READ COMMITTED",
    "report": "AUTOCOMMIT",
    "migrate": "READ COMMITTED",
}
_SMALLEST = 512  # bytes of a SQLite database that is not empty: SQLite takes less for a new one
_NEVER = (errno.ELOOP, errno.ENOTDIR, errno.ENAMETOOLONG)  # errors that waiting does not end
_READING = ("glance", "read", "replay")
_SYNCHRONOUS: Mapping[Mode, str] = {
    "write": "FULL",
    "report": "NORMAL",
    "migrate": "FULL",
}  # of SQLite, of writers
_PROBE = 0.003  # s between attempts to get SQLite's write lock, on average; its own waiting goes up to 0.1 s


class Database:
    """Connections to one ledger's database. Safe for several threads, and for a process that forks."""

    def __init__(self, address: Address, clock: Clock) -> None:
        self.address = address
        self.clock = clock
        self._engine = _engine(address)
        self._gate = gates.gate(address.path) if address.kind == "sqlite" else None
        self._forked = False  # while connections were in use
        forks.watch(self)

    @property
    def sqlite(self) -> bool:
        return self.address.kind == "sqlite"

    def transact(
        self,
        action: str,
        work: Callable[[Connection], T],
        *,
        mode: Mode = "write",
        landed: Callable[[Connection, T], bool] | None = None,
    ) -> T:
        """Return what ``work`` returns in one transaction, made final; all of it or nothing.

        ``work`` may be called again, on a new transaction, after a deadlock or when the connection was lost. Where it
        was lost while the transaction was being made final, ``landed`` is asked whether it is there; without
        ``landed`` it is repeated, which must then do no harm. Raises ``LedgerError`` and whatever ``work`` raises.
        """
        if self._forked:
            raise LedgerError(
                f"this process was forked while {self.address} was in use, and cannot use it safely: start it by "
                "spawn, or fork before the ledger is opened"
            )
        pending: T | None = None
        unsure = False
        for attempt in range(ATTEMPTS):
            committing = False
            try:
                with self._guarded(mode), self._begun(mode) as connection:
                    if unsure and landed is not None and pending is not None and landed(connection, pending):
                        return pending
                    unsure = False
                    pending = work(connection)
                    committing = True
                    connection.commit()
                    return pending
            except SQLAlchemyError as error:
                failure = understand(error, action, self.address)
                if failure.stale:
                    self._engine.dispose()
                unsure = unsure or (committing and failure.lost and mode not in _READING)
                last = attempt == ATTEMPTS - 1
                if last or not (failure.again or failure.lost):
                    if unsure and isinstance(failure.error, LedgerUnavailableError):
                        failure.error.unsure = True
                    raise failure.error from error
            self.clock.sleep(_PAUSE * 2**attempt * (0.5 + random.random()))  # noqa: S311
        raise AssertionError("unreachable")

    def read(self, action: str, work: Callable[[Connection], T], *, long: bool = False) -> T:
        """Return what ``work`` returns in a transaction that changes nothing. It sees one moment."""
        return self.transact(action, work, mode="replay" if long else "read")

    def keep_log(self) -> str:
        """Switch a SQLite file to a write-ahead log, once for all; return the mode that it is in then."""
        end = time.monotonic() + LOCK_TIMEOUT
        while True:
            try:
                with self._guarded("write"), forks.in_use(), self._engine.connect() as connection:
                    raw = connection.connection.driver_connection
                    assert isinstance(raw, sqlite3.Connection)
                    return str(raw.execute("PRAGMA journal_mode=WAL").fetchone()[0])
            except (SQLAlchemyError, sqlite3.Error) as error:
                wrapped = error if isinstance(error, SQLAlchemyError) else DBAPIError(None, None, error)
                name = getattr(getattr(error, "orig", error), "sqlite_errorname", None) or ""
                if not name.startswith("SQLITE_BUSY") or time.monotonic() >= end:
                    raise understand(wrapped, "open the ledger", self.address).error from error
            # SQLite does not wait by itself while another process switches or writes
            self.clock.sleep(_PAUSE)

    def close(self) -> None:
        """Release all connections. May be called twice."""
        self._engine.dispose()

    @contextmanager
    def _guarded(self, mode: Mode) -> Iterator[None]:
        if mode in _READING or self._gate is None:
            yield
            return
        if not self._gate.acquire(timeout=_lock_timeout(mode)):
            raise LedgerUnavailableError(
                f"another thread has been writing to {self.address} for over {_lock_timeout(mode):g} s"
            )
        try:
            yield
        finally:
            self._gate.release()

    @contextmanager
    def _begun(self, mode: Mode) -> Iterator[Connection]:
        # a transaction ends with its connection, unless it was committed
        if self.sqlite:
            with forks.in_use(), self._engine.connect() as connection:
                connection.execution_options(**{_OPTION: mode})
                connection.begin()
                yield connection
            return
        with self._engine.connect() as connection:
            connection.execution_options(isolation_level=_ISOLATION[mode])
            with watchdog.limit(_descriptor(connection), SILENCE[mode]):
                connection.begin()
                try:
                    yield connection
                finally:
                    connection.rollback()  # of what was not committed, within the limit, too

    def before_fork(self) -> None:
        """See ``forks``."""
        if self.sqlite:
            self._engine.dispose()

    def after_fork(self, *, safe: bool) -> None:
        """See ``forks``."""
        self._engine.dispose(close=False)  # the parent's connections are not ours to close
        self._gate = gates.gate(self.address.path) if self.sqlite else None
        self._forked = self.sqlite and not safe


def _descriptor(connection: Connection) -> int:
    return int(connection.connection.driver_connection.fileno())  # type: ignore[union-attr]


def _engine(address: Address) -> Engine:
    try:
        if address.kind == "sqlite":
            return _sqlite(address)
        return _postgresql(address)
    except SQLAlchemyError as error:
        raise understand(error, "use the ledger", address).error from None


def _sqlite(address: Address) -> Engine:
    engine = create_engine(
        address.url,
        poolclass=QueuePool,
        pool_size=4,
        max_overflow=60,
        pool_timeout=LOCK_TIMEOUT,
        hide_parameters=True,
        connect_args={"timeout": LOCK_TIMEOUT, "check_same_thread": False},
    )

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, record: Any) -> None:
        connection.isolation_level = None  # we begin transactions ourselves
        connection.execute("PRAGMA foreign_keys=OFF")
        connection.execute("PRAGMA temp_store=MEMORY")
        record.info[_FILE] = _file(address)

    @event.listens_for(engine, "checkout")
    def look(_: Any, record: Any, __: Any) -> None:
        # a file that was moved or removed is still open here: two loops could lead, each in a file of its own
        if record.info[_FILE] != _file(address):
            raise DisconnectionError("the file was replaced")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        mode = connection.get_execution_options().get(_OPTION, "read")
        if mode in _SYNCHRONOUS:
            connection.exec_driver_sql(f"PRAGMA synchronous={_SYNCHRONOUS[mode]}")
            _lock_file(connection, _lock_timeout(mode))
        elif mode != "glance":
            connection.exec_driver_sql("BEGIN")

    return engine


def _file(address: Address) -> tuple[int, int] | None:
    """Return which file an address leads to now."""
    try:
        found = address.path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _lock_timeout(mode: Mode) -> float:
    return MAKING if mode == "migrate" else LOCK_TIMEOUT


def _lock_file(connection: Connection, timeout: float) -> None:
    """Begin a transaction with the write lock, looking for it often: other processes hold it for milliseconds."""
    raw: Any = connection.connection.driver_connection
    end = time.monotonic() + timeout
    raw.execute("PRAGMA busy_timeout=0")
    try:
        while time.monotonic() < end:
            try:
                raw.execute("BEGIN IMMEDIATE")
                return
            except sqlite3.OperationalError as error:
                if not error.sqlite_errorname.startswith("SQLITE_BUSY"):
                    break
            time.sleep(_PROBE * random.uniform(0.5, 1.5))  # noqa: S311
        connection.exec_driver_sql("BEGIN IMMEDIATE")  # fails, or not, with the error that callers know
    finally:
        raw.execute(f"PRAGMA busy_timeout={int(LOCK_TIMEOUT * 1000)}")


def _postgresql(address: Address) -> Engine:
    engine = create_engine(
        address.url,
        pool_size=4,  # kept where as many were needed at once; hundreds of processes may share one server
        max_overflow=12,
        pool_timeout=LOCK_TIMEOUT,
        pool_use_lifo=True,
        hide_parameters=True,
        connect_args=dict(CONNECTION),
    )

    @event.listens_for(engine, "connect")
    def set_up(connection: Any, _: Any) -> None:
        limits = {
            "lock_timeout": LOCK_TIMEOUT,
            "statement_timeout": STATEMENT,
            "idle_in_transaction_session_timeout": STATEMENT,
        }
        with watchdog.limit(connection.fileno(), STATEMENT):
            with connection.cursor() as cursor:
                cursor.execute(
                    "; ".join(f"SET {name} = {int(value * 1000)}" for name, value in limits.items())
                )
            connection.commit()

    return engine


def check_file(path: Path) -> None:
    """Raise ``LedgerError`` for what is in a ledger's place and can be none, so that nothing is written over it.

    The file is not opened: closing it would drop the locks that SQLite holds on it in this process.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        kind = LedgerError if error.errno in _NEVER else LedgerUnavailableError
        raise kind(f"{path} cannot be a ledger: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        what = "a directory" if stat.S_ISDIR(found.st_mode) else "a pipe, device or socket"
        raise LedgerError(f"{path} cannot be a ledger: it is {what}")
    if 0 < found.st_size < _SMALLEST:
        raise LedgerError(
            f"{path} is no ledger: it has {found.st_size} bytes, a SQLite database at least {_SMALLEST}"
        )


def prepare_file(database: Database) -> None:
    """Make a SQLite file's directory and switch the file to a write-ahead log. Raises ``LedgerError``."""
    path = database.address.path
    try:
        private.make_folder(path.parent)
        private.reserve(path)  # SQLite gives the log's files the mode of this one
    except OSError as error:
        raise LedgerUnavailableError(f"cannot make {path.parent} for the ledger: {error.strerror}") from error
    mode = database.keep_log()
    if mode != "wal":
        raise LedgerError(
            f"{path} cannot keep a write-ahead log (it stays {mode!r}): use a local disk, or PostgreSQL"
        )
