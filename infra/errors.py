"""Errors of the adapters; all are ``EbbflowError``.

InfraError
├── EngineError
│   ├── EngineUnavailableError   no Java, master unreachable, package missing
│   ├── StageFailedError         the engine ran the statement and it failed
│   │   └── BroadcastTooLargeError   a broadcast did not fit; run the stage without it
│   └── StageCancelledError      cancelled by us, not a failure
├── TableError                   missing folder, no Parquet in it, corrupt file
├── StorageError                 the checkpoint store cannot be read or written
│   └── StorageFullError         no space left; finished checkpoints are kept
├── ClusterError                 the local cluster cannot do what was asked
├── WorkloadError                a workload, profile or trace that breaks its format; file, line and reason
├── SimulationError              a simulated policy broke a rule: capacity, a gang, or no progress
└── DataError                    benchmark data cannot be made
"""

from ebbflow.planners.errors import EbbflowError


class InfraError(EbbflowError):
    """Base of the adapters' errors."""


class EngineError(InfraError):
    """A SQL engine's error."""


class EngineUnavailableError(EngineError):
    """The engine cannot be started or reached; the message says what to install or check."""


class StageFailedError(EngineError):
    """The engine ran a stage's statement and it failed."""


class BroadcastTooLargeError(StageFailedError):
    """A broadcast relation did not fit in memory."""


class StageCancelledError(EngineError):
    """The stage was cancelled on request."""


class TableError(InfraError):
    """A folder or file that cannot serve as a table."""


class StorageError(InfraError):
    """The checkpoint store cannot be read or written."""


class StorageFullError(StorageError):
    """No space left where checkpoints are written."""


class ClusterError(InfraError):
    """The local cluster cannot do what was asked."""


class WorkloadError(InfraError):
    """A workload, profile or trace that breaks its format; the message names file, line and reason."""


class SimulationError(InfraError):
    """A simulated policy broke a rule that no cluster could follow: capacity, a gang, or no progress."""


class DataError(InfraError):
    """Benchmark data cannot be made."""
