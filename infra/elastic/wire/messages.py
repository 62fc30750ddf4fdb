"""Messages between master, workers and servers. Every one travels in an envelope with the job's revision."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from ebbflow.infra.elastic.application import Completion, Key, MicroTask, Value
from ebbflow.infra.elastic.registry import register
from ebbflow.infra.elastic.wire.cache import Increments

Address = str  # of an actor: "master", "n3/worker", "n3/server"
MASTER: Address = "master"


@register
class Place(NamedTuple):
    """Where a shard is, and how often it had moved by then: of two places the one with more moves is true."""

    server: Address
    moves: int


Directory = dict[int, Place]  # by shard


@register
@dataclass(slots=True)
class ExecutorRecord:
    """An executor on its way or in a snapshot: state, tasks that wait for it, and perhaps its input."""

    state: Any
    queue: list[MicroTask]
    input: Any = None


@register
@dataclass(slots=True)
class ShardRecord:
    """A shard on its way or in a snapshot."""

    values: dict[Key, Value]
    waiting: dict[
        Key, tuple[int, Value]
    ]  # increments hidden from tasks up to a version, where reads are isolated
    applied: dict[Address, int]  # number of the last flush of each worker


# --- membership


@register
@dataclass(slots=True)
class Join:
    """A node has started and asks to be let in."""

    node: str


@register
@dataclass(slots=True)
class NodeLoss:
    """A node is gone."""

    node: str
    reason: str


@register
@dataclass(slots=True)
class Scale:
    """Leave (nodes named) in an orderly way."""

    leaving: tuple[str, ...]


@register
@dataclass(slots=True)
class Welcome:
    """To a node that joins: the application, where shards are, and the job's settings."""

    application: Any
    directory: Directory
    settings: dict[str, Any]


@register
@dataclass(slots=True)
class Ready:
    """The actor has what it was last given: a welcome (``sizes`` is ``None``), or executors or shards with bytes."""

    sizes: dict[int, int] | None = None


@register
@dataclass(slots=True)
class Exit:
    """End the process."""


@register
@dataclass(slots=True)
class ActorFailure:
    """An actor cannot continue; ``text`` is a traceback."""

    text: str
    application: bool  # whether the application's code raised


# --- tasks


@register
@dataclass(slots=True)
class Run:
    """Run these micro-tasks."""

    tasks: list[MicroTask]


@register
@dataclass(slots=True)
class Finished:
    """Micro-tasks have been run, with their results."""

    completions: list[Completion]


# --- parameters


@register
@dataclass(slots=True)
class Read:
    """Send the values of ``keys`` at ``version`` or later."""

    shard: int
    keys: list[Key]
    version: int
    reply_to: Address


@register
@dataclass(slots=True)
class Values:
    """The answer to ``Read``."""

    shard: int
    values: dict[Key, Value]
    version: int  # of the request
    place: Place


@register
@dataclass(slots=True)
class Update:
    """Add these increments to a shard."""

    shard: int
    number: int  # of the sender's flush
    increments: Increments
    reply_to: Address


@register
@dataclass(slots=True)
class UpdateAck:
    """The increments of a flush have been added."""

    shard: int
    number: int
    place: Place


# --- moves


@register
@dataclass(slots=True)
class MoveExecutor:
    """Send an executor to ``target``, with its input where that has no other source."""

    executor: int
    target: Address
    with_input: bool


@register
@dataclass(slots=True)
class ExecutorContents:
    """An executor that moves."""

    executor: int
    record: ExecutorRecord


@register
@dataclass(slots=True)
class MoveShard:
    """Send a shard to ``place``."""

    shard: int
    place: Place


@register
@dataclass(slots=True)
class ShardContents:
    """A shard that moves."""

    shard: int
    moves: int
    record: ShardRecord


@register
@dataclass(slots=True)
class MoveAck:
    """An executor or shard is here now."""

    kind: str  # "executor" or "shard"
    item: int
    size: int  # bytes transferred


@register
@dataclass(slots=True)
class Depart:
    """``server`` will leave and owns nothing any more: learn the places, then send it a ``Farewell``."""

    server: Address
    directory: Directory


@register
@dataclass(slots=True)
class AwaitFarewells:
    """To a departing server: forward until all of ``actors`` have said farewell."""

    actors: frozenset[Address]


@register
@dataclass(slots=True)
class Farewell:
    """The last message of its sender to a departing server."""


@register
@dataclass(slots=True)
class DrainAck:
    """No more will come through a departing server; or a worker has nothing running, logged or unreported."""


# --- snapshots and recovery


@register
@dataclass(slots=True)
class Drain:
    """Start no task; when everything is reported, say ``DrainAck``."""


@register
@dataclass(slots=True)
class Capture:
    """Write what you hold to ``path``, or send it along if there is none: as the result, or as ``records``."""

    path: str | None
    records: bool = False


@register
@dataclass(slots=True)
class CaptureResult:
    """What ``Capture`` has written or sends along."""

    items: list[int]
    contents: dict[int, Any] | None
    error: str | None = None  # why nothing was written


@register
@dataclass(slots=True)
class Resume:
    """Start tasks again after a drain."""


@register
@dataclass(slots=True)
class Install:
    """Take these; ``reset`` throws away all else first.

    ``files`` are snapshot files to look in, unless ``contents`` has what is in them; an item that none of them has
    starts in its initial state.
    """

    items: list[int]
    files: list[str]
    reset: bool
    directory: Directory
    initial: dict[int, dict[Key, Value]] | None = None  # of shards
    contents: dict[int, Any] | None = None  # of a snapshot that the actor cannot read itself


@register
@dataclass(slots=True)
class Relocated:
    """Servers died and their shards are elsewhere: send again what they may not have answered."""

    lost: frozenset[Address]
    directory: Directory


@register
@dataclass(slots=True)
class SaveRunning:
    """Refresh a fraction of the running checkpoint in ``folder``."""

    folder: str
    fraction: float
