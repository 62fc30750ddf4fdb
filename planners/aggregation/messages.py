"""What workers, hosts of a tensor and the manager send each other while the tensor is trained and moved."""

from dataclasses import dataclass
from typing import NamedTuple

MANAGER = "manager"


@dataclass(frozen=True, slots=True)
class Pull:
    """A worker asks for the parameters with which a round begins."""

    worker: str
    round: int


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a round, and the host that takes its gradients."""

    round: int
    host: str


@dataclass(frozen=True, slots=True)
class Push:
    """A worker's gradient of a round."""

    worker: str
    round: int


@dataclass(frozen=True, slots=True)
class Left:
    """A worker has left; no round waits for it."""

    worker: str


@dataclass(frozen=True, slots=True)
class MigrateInit:
    """The manager asks a host to give its tensor to another."""

    migration: int
    target: str


@dataclass(frozen=True, slots=True)
class CopyBegin:
    """What the new host needs to take pushes before the copy is complete."""

    migration: int
    source: str
    round: int
    workers: frozenset[str]


@dataclass(frozen=True, slots=True)
class CopyData:
    """Parameters and optimizer state as the round begins."""

    migration: int
    source: str


@dataclass(frozen=True, slots=True)
class CopyReceived:
    """The new host has the copy."""

    migration: int


@dataclass(frozen=True, slots=True)
class CopyDone:
    """The old host's notification: TENSOR_COPY_DONE."""

    migration: int
    source: str


@dataclass(frozen=True, slots=True)
class WorkersDone:
    """The new host's notification that all workers have pushed to it: WORKER_DONE."""

    migration: int
    host: str


@dataclass(frozen=True, slots=True)
class Noted:
    """The manager has a notification."""

    migration: int


@dataclass(frozen=True, slots=True)
class Finish:
    """The manager lets the old host delete its copy."""

    migration: int


@dataclass(frozen=True, slots=True)
class Finished:
    """The old host has deleted its copy."""

    migration: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """The manager asks the old host to keep its tensor."""

    migration: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The old host keeps its tensor."""

    migration: int


@dataclass(frozen=True, slots=True)
class Redirected:
    """It is too late to cancel: a worker has the new host's address."""

    migration: int


Message = (
    Pull | Parameters | Push | Left | MigrateInit | CopyBegin | CopyData | CopyReceived | CopyDone | WorkersDone
    | Noted | Finish | Finished | Cancel | Cancelled | Redirected
)  # fmt: skip


class Sent(NamedTuple):
    """A message with its receiver."""

    to: str
    message: Message


Sends = tuple[Sent, ...]
