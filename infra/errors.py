"""Errors of the adapters; all are ``EbbflowError``.

InfraError
├── EngineError
│   ├── EngineUnavailableError   no Java, master unreachable, package missing
│   │   └── EngineLostError      gone for good in mid-query
│   ├── StageFailedError         the engine ran the statement and it failed
│   │   ├── BroadcastTooLargeError   a broadcast did not fit; run the stage without it
│   │   └── DamagedInputError    what it reads is not what was written; compute that again first
│   └── StageCancelledError      cancelled by us, not a failure
├── TableError                   missing directory, no Parquet in it, corrupt file
├── StorageError                 the checkpoint store cannot be read or written
│   ├── StorageFullError         no space left; finished checkpoints are kept
│   ├── OtherModelError          a checkpoint of another model; the parameters that differ are named
│   ├── UnusableCheckpointError  a checkpoint was read, and is not what was written or of another version
│   ├── CheckpointsLostError     a run had checkpoints, and none of them can be used
│   └── RunLockedError           another process runs under this id, or has taken it over
├── ClusterError                 the local cluster cannot do what was asked
│   └── LeaseError               a GPU that an app may not use, or not any more
├── ElasticError                 an elastic job cannot continue: workers, messages or snapshots failed it
│   └── MicroTaskError           the application raised; its traceback is in the message
├── AggregationError             a gradient, tensor or message that an aggregator cannot take
├── MemoryTierError              a peer that lends memory refuses, breaks the protocol or is gone
├── WorkloadError                a workload, profile or trace that breaks its format; file, line and reason
├── TrainingError                a training cannot be launched, changed or carried on
│   ├── DatasetError             data that a training cannot be run on
│   ├── MessageError             a message between a launcher and its processes that breaks its form
│   └── LauncherLostError        the launcher cannot be reached, does not answer, or refuses this process
├── SettingsError                what Terraform has written lacks an output or holds one of another form
├── AwsError                     AWS refused a call, or answered what cannot be used
│   ├── AwsUnavailableError      no answer in time, an error on AWS's side, or throttled beyond the retries
│   ├── CredentialsError         missing, expired or without the right; the message says what to do
│   ├── InsufficientCapacityError    AWS has no such machines now, or the account may have no more of them
│   │   └── SpotPriceTooHighError    the spot price is above the limit
│   ├── NotOursError             it does not carry this cluster's tags; nothing was done
│   └── NoticeError              a message about a node that cannot be read, or its queue that cannot be used
├── LedgerError                  the ledger cannot be used as it is: made by a newer Ebbflow, damaged, misaddressed
│   ├── LedgerUnavailableError   its database does not answer, is full or locked for too long; later it may work
│   ├── LedgerBusyError          another loop leads
│   ├── StaleLoopError           another loop has taken over, or this one has resigned; nothing was written
│   └── DoubleBookingError       a GPU that a lease has already; nothing was written
├── PipelineRunError             a pipeline's run that cannot be begun or resumed
├── PriceError                   a price that is not known
├── SimulationError              a simulated policy broke a rule: capacity, a gang, or no progress
└── DataError                    benchmark data cannot be made
"""

from collections.abc import Collection

from ebbflow.planners.errors import EbbflowError


class InfraError(EbbflowError):
    """Base of the adapters' errors."""


class EngineError(InfraError):
    """A SQL engine's error."""


class EngineUnavailableError(EngineError):
    """The engine cannot be started or reached; the message says what to install or check."""


class EngineLostError(EngineUnavailableError):
    """The engine is gone for good: whoever waits for it waits for nothing. What it has finished is kept."""


class StageFailedError(EngineError):
    """The engine ran a stage's statement and it failed."""


class BroadcastTooLargeError(StageFailedError):
    """A broadcast relation did not fit in memory."""


class DamagedInputError(StageFailedError):
    """A stage has not begun, since checkpoints that it reads are not what was written.

    ``fingerprints`` are theirs; they have been set aside.
    """

    def __init__(self, message: str, fingerprints: Collection[str]) -> None:
        super().__init__(message)
        self.fingerprints = frozenset(fingerprints)


class StageCancelledError(EngineError):
    """The stage was cancelled on request."""


class TableError(InfraError):
    """A directory or file that cannot serve as a table."""


class StorageError(InfraError):
    """The checkpoint store cannot be read or written."""


class StorageFullError(StorageError):
    """No space left where checkpoints are written."""


class OtherModelError(StorageError):
    """A checkpoint of another model; the message names the parameters that differ."""


class UnusableCheckpointError(StorageError):
    """A checkpoint was read and cannot serve: not what was written, or of another version. To wait does not help."""


class CheckpointsLostError(StorageError):
    """A run had checkpoints, none of which can be used; the message names each, why, and what to do."""


class RunLockedError(StorageError):
    """A run's id is held by another process; the message says by whom, since when and how to take over."""


class ClusterError(InfraError):
    """The local cluster cannot do what was asked."""


class LeaseError(ClusterError):
    """An app has no lease on a GPU, or none any more, or cannot tell; the message says which. Nothing was started."""


class ElasticError(InfraError):
    """An elastic job cannot continue: no workers, too many losses, a snapshot that cannot be read."""


class MicroTaskError(ElasticError):
    """A micro-task or driver of the application raised; the message holds its traceback."""


class AggregationError(InfraError):
    """A gradient, tensor or message that an aggregator cannot take, or an aggregator that does not answer."""


class MemoryTierError(InfraError):
    """A peer that lends memory, or a message of one, that breaks a rule; or the tier cannot be used as asked."""


class WorkloadError(InfraError):
    """A workload, profile or trace that breaks its format; the message names file, line and reason."""


class TrainingError(InfraError):
    """A training that cannot be launched, changed or carried on; the message says what to do."""


class DatasetError(TrainingError):
    """Data that a training cannot be run on; the message names the rule."""


class MessageError(TrainingError):
    """A message between a launcher and its processes that breaks its form; it was not acted on."""


class LauncherLostError(TrainingError, RuntimeError):
    """The launcher is gone, does not answer in time, or refuses this process' key."""


class SettingsError(InfraError):
    """What Terraform has written cannot be used; the message names the output and the rule."""


class AwsError(InfraError):
    """AWS refused a call, or answered what cannot be used; ``code`` is AWS's own, empty where there is none."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class AwsUnavailableError(AwsError):
    """No answer in time, an error on AWS's side, or throttled beyond the retries. Later it may work."""


class CredentialsError(AwsError):
    """Credentials that are missing, expired or without the right; the message says what to do."""


class InsufficientCapacityError(AwsError):
    """AWS has no such machines now, or the account may have no more of them."""


class SpotPriceTooHighError(InsufficientCapacityError):
    """The spot price is above the limit that was set."""


class NotOursError(AwsError):
    """What is to be changed does not carry this cluster's tags. Nothing was done."""


class NoticeError(AwsError):
    """A message about a node that cannot be read, or its queue that cannot be used; the message names the rule."""


class LedgerError(InfraError):
    """The ledger cannot be used as it is; the message says why and what to do."""


class LedgerUnavailableError(LedgerError):
    """The ledger's database does not answer, is full, or was locked for too long. Later it may work.

    ``unsure`` is true when the connection was lost while a change was being made final and could not be had again:
    the change may or may not be in the ledger. Its state tells once the ledger answers.
    """

    def __init__(self, message: str, *, unsure: bool = False) -> None:
        super().__init__(message)
        self.unsure = unsure


class LedgerBusyError(LedgerError):
    """Another loop leads; ``holder`` is its name and ``until`` the end of its lead, s since the Unix epoch."""

    def __init__(self, message: str, *, holder: str = "", until: float = 0.0) -> None:
        super().__init__(message)
        self.holder = holder
        self.until = until


class StaleLoopError(LedgerError):
    """Another loop has taken over, or this one has resigned. Nothing was written."""


class DoubleBookingError(LedgerError):
    """A GPU that a lease has already, so that no other can be granted on it. Nothing was written."""


class PipelineRunError(InfraError):
    """A pipeline's run that cannot be begun or resumed; the message says what to do."""


class PriceError(InfraError):
    """A price that is not known; the message names the machine and what is known instead."""


class SimulationError(InfraError):
    """A simulated policy broke a rule that no cluster could follow: capacity, a gang, or no progress."""


class DataError(InfraError):
    """Benchmark data cannot be made."""


class ReportError(EbbflowError):
    """A text that is not a report, one of a format that this version cannot read, or a place to write none."""
