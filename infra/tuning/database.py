"""Optuna's storage in a database: the study of a tuning run that several processes run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import LedgerError, LedgerUnavailableError
from ebbflow.infra.ledger.address import Address
from ebbflow.infra.ledger.database.database import (
    CONNECTION,
    LOCK_TIMEOUT,
    STATEMENT,
    Database,
    check_file,
    prepare_file,
)
from ebbflow.infra.ledger.database.failures import understand

_ATTEMPTS = 5  # to make tables that others make at the same time
_PAUSE = 0.5  # s between them


def open_database(address: Address, clock: Clock) -> Database:
    """Return connections to the database of a study; a SQLite file is made. Raises ``LedgerError``."""
    database = Database(address, clock)
    if database.sqlite:
        check_file(address.path)
        prepare_file(database)
    return database


def open_storage(address: Address, clock: Clock) -> Any:
    """Return Optuna's own storage in a database, with tables of Optuna's, made where there are none.

    A new connection is given up after ``CONNECT`` seconds, a statement by the server after ``STATEMENT``, and what
    waits for a server that is gone as ``CONNECTION`` says. Raises ``LedgerError``: also for tables of another version
    of Optuna's, and for those of another program under the same names.
    """
    from optuna.storages import RDBStorage

    options: dict[str, Any] = {"hide_parameters": True}
    if address.kind == "sqlite":
        options["connect_args"] = {"timeout": LOCK_TIMEOUT}
    else:
        limit = int(STATEMENT * 1000)
        options["pool_pre_ping"] = True
        options["connect_args"] = {
            **CONNECTION,
            "options": f"-c statement_timeout={limit} -c idle_in_transaction_session_timeout={limit}",
        }
    url = address.url.render_as_string(hide_password=False)
    for attempt in range(_ATTEMPTS):
        try:
            with study_errors("open the study", address):
                return RDBStorage(url, engine_kwargs=dict(options))
        except LedgerUnavailableError:
            raise
        except LedgerError:
            if attempt == _ATTEMPTS - 1:
                raise
            clock.sleep(_PAUSE)
        except RuntimeError as error:
            raise LedgerError(
                f"{address} has tables that this version of Optuna cannot use: {address.hide(str(error))[:300]}"
            ) from None
    raise AssertionError("unreachable")


@contextmanager
def study_errors(action: str, address: Address | None) -> Iterator[None]:
    """Raise errors of a study's database in the block as ``LedgerError``; those of a journal are translated there.

    ``LedgerUnavailableError`` is one that may well end by itself.
    """
    from optuna.exceptions import StorageInternalError

    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        if address is None:
            raise
        cause = error if isinstance(error, SQLAlchemyError) else error.__cause__
        if isinstance(cause, SQLAlchemyError):
            raise understand(cause, action, address).error from None
        raise LedgerUnavailableError(address.hide(f"cannot {action} at {address}: {error}")) from None
