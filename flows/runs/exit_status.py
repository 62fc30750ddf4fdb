"""Exit statuses of commands: one table, the same everywhere."""

from enum import IntEnum

from ebbflow.infra.errors import (
    DatasetError,
    LedgerUnavailableError,
    ReportError,
    SettingsError,
    StaleLoopError,
    TableError,
    WorkloadError,
)
from ebbflow.planners.errors import EbbflowError, OptionError, PlanningError

_USAGE = (OptionError, PlanningError, SettingsError, WorkloadError, DatasetError, TableError, ReportError)


class ExitStatus(IntEnum):
    """What the status of a command means."""

    DONE = 0
    FAILED = 1  # a run, a step or a query failed, a request was rejected, a check says no
    USAGE = 2  # an option, a file or the SQL is wrong
    DIFFERENT = 3  # a result differs from DuckDB's (--verify)
    LEDGER = 4  # the ledger does not respond
    TAKEN_OVER = 5  # another capacity loop became the leader
    INTERRUPTED = 130  # by Ctrl-C or SIGTERM; finished work is kept


def status_of(error: EbbflowError) -> ExitStatus:
    """Return the status of a command that ends with ``error``."""
    match error:
        case error if isinstance(error, _USAGE):
            return ExitStatus.USAGE
        case LedgerUnavailableError():
            return ExitStatus.LEDGER
        case StaleLoopError():
            return ExitStatus.TAKEN_OVER
        case _:
            return ExitStatus.FAILED
