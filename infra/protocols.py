"""The boundaries between Ebbflow and what it runs on. Real adapters and the simulator implement these."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from ebbflow.planners.model import Capacity
from ebbflow.planners.model.capacity import Notice
from ebbflow.planners.model.fleet import Fleet, Offer, Target
from ebbflow.planners.model.prices import Series

if TYPE_CHECKING:
    from ebbflow.infra.training.channel import RunSettings

# --- tables and checkpoints -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file of a table or checkpoint."""

    path: str  # as pyarrow.fs wants it, without scheme
    size: int  # bytes
    modified: float  # seconds since the Unix epoch; 0 when the storage does not tell


@dataclass(frozen=True, slots=True)
class Relation:
    """Parquet files that an engine can read as a relation."""

    name: str  # the name SQL uses
    scheme: str  # "file" or "s3"
    files: tuple[FileEntry, ...]
    columns: tuple[tuple[str, str], ...]  # (name, Spark SQL type), in order
    external: bool = False  # True: the engine's own catalogue knows it, ``files`` is empty

    @property
    def bytes(self) -> int:
        return sum(f.size for f in self.files)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A durable, complete stage output."""

    fingerprint: str
    uri: str  # folder with its Parquet files
    relation: Relation  # named "ckpt_<fingerprint>"
    rows: int
    bytes: int
    seconds: float  # that the stage took
    created: float  # seconds since the Unix epoch
    sources: Mapping[str, str] = field(default_factory=dict)  # table name -> version


@dataclass(frozen=True, slots=True)
class Attempt:
    """A folder that one run of a stage may write into; nobody reads it until it is committed."""

    fingerprint: str
    id: str
    uri: str  # "file:///..." or "s3://..."


class CheckpointStore(Protocol):
    """Durable stage outputs, by fingerprint. Safe for several processes at once."""

    uri: str

    def begin(self, fingerprint: str) -> Attempt:
        """Make a new folder to write into. Raises ``StorageError``."""
        ...

    def commit(
        self,
        attempt: Attempt,
        *,
        rows: int,
        columns: Sequence[tuple[str, str]],
        seconds: float,
        sources: Mapping[str, str],
    ) -> Checkpoint:
        """Write the manifest, last and atomically; from then on the checkpoint exists.

        If another process has committed a valid one first, that one is returned and this attempt dropped.
        """
        ...

    def discard(self, attempt: Attempt) -> None:
        """Drop an attempt's files; never raises for missing ones."""
        ...

    def find(self, fingerprint: str, sources: Mapping[str, str] | None = None) -> Checkpoint | None:
        """Return the checkpoint if it is whole and of these source versions, else ``None``.

        Whatever is torn, foreign or stale is noted in ``problems`` and left alone.
        """
        ...

    def problems(self) -> list[str]:
        """Return and forget what ``find`` had to ignore, as sentences for people."""
        ...

    def collect(self, budget: int, keep: frozenset[str] = frozenset()) -> int:
        """Delete least recently used checkpoints beyond ``budget`` bytes, never ``keep``; return bytes freed.

        Attempts abandoned for over a day are deleted too.
        """
        ...


# --- SQL engines ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StageJob:
    """One statement to run and where its output goes."""

    id: str  # unique per run of a stage
    name: str  # for people
    sql: str  # in the engine's dialect
    relations: tuple[Relation, ...]  # every table and checkpoint that the statement names
    output_uri: str  # existing empty folder; the engine writes part files into it
    partitions: int = 0  # shuffle partitions; 0: the engine's default
    split_bytes: int = 0  # of a file that one task reads at most; 0: the engine's default


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far a running job is."""

    tasks_total: int
    tasks_done: int
    tasks_failed: int = 0
    tasks_running: int = 0


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a finished job did."""

    rows: int
    columns: tuple[tuple[str, str], ...]  # (name, Spark SQL type)
    seconds: float  # wall
    task_seconds: float  # summed run time of all tasks, failed ones included
    tasks: int
    failed_tasks: int = 0
    retried_stages: int = 0
    shuffle_bytes: int = 0
    spilled_bytes: int = 0
    input_bytes: int = 0


class SqlEngine(Protocol):
    """Runs statements that read Parquet relations and write Parquet folders. Safe for several threads."""

    name: Literal["spark", "duckdb"]

    def run(self, job: StageJob, on_progress: Callable[[StageProgress], None] | None = None) -> StageResult:
        """Run ``job`` to its end in the caller's thread.

        Raises ``StageCancelledError``, ``BroadcastTooLargeError``, ``StageFailedError``, ``StorageFullError``
        or ``EngineUnavailableError``.
        """
        ...

    def cancel(self, job_id: str) -> None:
        """Ask a running job to stop; it raises ``StageCancelledError`` in its thread. Unknown ids are ignored."""
        ...

    def resize(self, cores: float, memory: float) -> None:
        """Hold the engine to this share (memory in GiB) where it can be held; later jobs follow it."""
        ...

    def tables(self) -> Sequence[Relation]:
        """Return the tables that the engine's own catalogue knows, for ``--catalog``."""
        ...

    def close(self) -> None:
        """Stop the engine; running jobs are cancelled. May be called twice."""
        ...


class CapacitySource(Protocol):
    """Where observed capacity comes from."""

    def capacity(self) -> Capacity:
        """Look now and return what is there. The epoch grows whenever nodes or notices differ from the last look.

        A source that cannot be reached for a moment returns the last known capacity; it raises
        ``EngineUnavailableError`` only when it never could be reached.
        """
        ...


# --- queries that share a cluster ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """One active query's claim on a cluster."""

    id: str
    weight: float  # > 0; shares are proportional to it
    limit: float = math.inf  # cores that the query can use at most now
    application: str = ""  # of the engine that runs it, such as Spark's application id


class ShareHandle(Protocol):
    """One's own claim, kept alive until ``leave``."""

    claim: Claim

    def limit(self, cores: float) -> None:
        """Say that the query can use ``cores`` at most from now on."""
        ...

    def leave(self) -> None:
        """Give the claim up. May be called twice; never raises."""
        ...


class ShareRegistry(Protocol):
    """The active queries of one cluster, seen by all that run on it."""

    def join(self, weight: float, *, limit: float = math.inf, application: str = "") -> ShareHandle:
        """Enter a query. Raises ``StorageError``."""
        ...

    def claims(self) -> Sequence[Claim]:
        """Return the claims of all active queries in the order of their arrival.

        A claim whose holder has ended without leaving disappears within seconds. Raises ``StorageError``.
        """
        ...


# --- training on nodes that come and go ---------------------------------------------------------------------

TrainingState = Literal["starting", "running", "stopping", "waiting", "finished", "stopped", "failed"]
GenerationKind = Literal[
    "finished",  # the script came to its end
    "stopped",  # all processes saved and left on request
    "canary",  # the trial steps passed
    "lost",  # a node is gone
    "failed",  # a process ended with an error
    "hung",  # nothing moved any more, although all processes lived
    "unformed",  # the processes never met: rendezvous or node failures before the script ran
    "silent",  # all processes ended well without a word: a script without ElasticRun
]


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One training, however often its processes are started again."""

    id: str  # letters, digits, dashes, dots and underscores
    script: str  # path or s3:// address of a Python file that every node can read
    arguments: tuple[str, ...] = ()
    folder: str = ""  # the run's own folder, a path or s3:// address that all nodes share
    settings: "RunSettings | None" = None  # what the launcher asks of the run; None: the defaults
    environment: Mapping[str, str] = field(default_factory=dict)  # on top of the nodes' own


@dataclass(frozen=True, slots=True)
class RankFailure:
    """How one process ended badly."""

    rank: int | None  # None: the node's agent itself
    node: str
    exit_code: int | None  # None: not known
    signal: str  # such as "SIGKILL"; empty: ended by itself
    error: str  # its first error, with traceback where there is one
    log: str  # the last lines of what it wrote
    time: float  # seconds since the Unix epoch


@dataclass(frozen=True, slots=True)
class GenerationEnd:
    """How one world of processes ended: what a retry policy decides from."""

    generation: int
    kind: GenerationKind
    reason: str  # a sentence for people
    placement: Mapping[str, int]  # node -> slots it ran on
    left: Mapping[str, int]  # nodes of it that can be used again
    failures: tuple[RankFailure, ...]  # the first that failed first
    suspects: tuple[str, ...]  # nodes to blame, where that is known
    started: float  # seconds since the Unix epoch
    ended: float
    first_step: int  # optimiser steps of the whole run before it; -1: it never said
    last_step: int  # the last that it reported or saved
    saved_step: int  # of the newest checkpoint that it reported; -1: none
    idle: int = 0  # generations in a row, this one included, in which no step was won


@dataclass(frozen=True, slots=True)
class Continue:
    """Start the next generation on ``placement``, after ``delay`` seconds, with other settings where given."""

    placement: Mapping[str, int]
    reason: str = ""
    delay: float = 0.0
    then: Mapping[str, int] | None = None  # placement to move to as soon as its nodes are ready
    settings: "RunSettings | None" = None
    environment: Mapping[str, str] = field(default_factory=dict)  # additions


@dataclass(frozen=True, slots=True)
class Halt:
    """Start no further generation by oneself."""

    state: Literal["finished", "stopped", "failed", "waiting"]  # waiting: for ``resize`` to bring nodes
    reason: str = ""


Decide = Callable[[GenerationEnd], Continue | Halt]


@dataclass(frozen=True, slots=True)
class TrainingEvent:
    """Something that happened to a run."""

    number: int  # counts up from 1 over the run's whole life
    time: float  # seconds since the Unix epoch
    kind: str
    generation: int
    content: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingStatus:
    """Where a run stands."""

    state: TrainingState
    generation: int
    placement: Mapping[str, int]  # of the present generation, or the one to come
    step: int  # optimiser steps done in the whole run, as last reported
    reason: str = ""  # why it stands where it stands
    end: GenerationEnd | None = None  # of the last generation that ended


class Trainer(Protocol):
    """Runs one elastic training on nodes. A *placement* says how many slots (GPUs) of which nodes are used.

    Calls return at once; ``events`` and ``status`` tell what came of them. Safe for several threads.
    """

    def launch(self, job: TrainingJob, placement: Mapping[str, int]) -> None:
        """Start the run. Raises ``OptionError`` or ``TrainingError``."""
        ...

    def resize(self, placement: Mapping[str, int], deadline: float | None = None) -> None:
        """Grow, shrink or move: new nodes are made ready, the run saves, and goes on on ``placement``.

        Before ``deadline`` (seconds since the Unix epoch) nothing of the run is left on other nodes, whether the new
        ones are ready or not. A later call replaces one that is not carried out yet. Raises ``TrainingError`` once
        the run has ended.
        """
        ...

    def end_generation(self, number: int, reason: str) -> None:
        """Have this generation save and leave, and let it be decided what follows; no other generation is touched."""
        ...

    def stop(self, deadline: float | None = None) -> None:
        """Save and leave before ``deadline`` (seconds since the Unix epoch); what is left then is ended."""
        ...

    def status(self) -> TrainingStatus:
        """Return where the run stands."""
        ...

    def events(self, after: int = 0) -> Sequence[TrainingEvent]:
        """Return the events with numbers above ``after``, in order."""
        ...

    def wait(self, timeout: float) -> TrainingStatus:
        """Return when the run has ended, or after ``timeout`` seconds, with where it stands then."""
        ...

    def close(self) -> None:
        """End everything at once, without saving; may be called twice."""
        ...


# --- prices ---------------------------------------------------------------------------------------------------


class PriceSource(Protocol):
    """What machines cost, now and before. Safe for several threads."""

    def offers(self, pool: str) -> tuple[Offer, ...]:
        """Return what a pool can be made of, at present prices; sorted by type, zone and market.

        ``interruptions`` of the offers are 0: they are learnt from what was lost, not told by a market. Raises
        ``OptionError`` for an unknown pool, ``InfraError`` when prices cannot be had and none are remembered.
        """
        ...

    def series(self, zone: str, instance_type: str, start: float) -> Series:
        """Return the spot prices from ``start`` (s since the Unix epoch), or as far back as is known, to now.

        Raises ``PriceError`` where there are none, ``InfraError`` when they cannot be had.
        """
        ...

    def on_demand(self, instance_type: str) -> float | None:
        """Return the list price, $/h; ``None`` when it is not known, and ``problems`` says why."""
        ...

    def problems(self) -> list[str]:
        """Return and forget what could not be had, as sentences for people."""
        ...


# --- fleets of nodes that are rented ------------------------------------------------------------------------

AskKind = Literal["size", "on-demand", "protect", "end", "gang"]


@dataclass(frozen=True, slots=True)
class Ask:
    """One thing that was asked of the provider, or that a dry run would ask."""

    kind: AskKind
    of: str  # the pool, gang or node
    value: int = 0  # size: nodes; on-demand: nodes that must be on-demand; end: 1 where a replacement follows
    call: str = ""  # the provider's operation, such as "autoscaling:SetDesiredCapacity"
    parameters: Mapping[str, object] = field(default_factory=dict)  # of the call

    def __str__(self) -> str:
        what = {
            "size": f"{self.of}: {self.value} nodes",
            "on-demand": f"{self.of}: {self.value} nodes on-demand at least",
            "protect": f"{self.of}: keep the provider from choosing nodes to end",
            "end": f"end {self.of}" + (", which is replaced" if self.value else ""),
            "gang": f"{self.of}: {self.value} nodes at once or none",
        }
        return what[self.kind]


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something that was wanted and not asked for."""

    of: str  # the pool, gang or node
    why: str


@dataclass(frozen=True, slots=True)
class Applied:
    """What became of a target."""

    epoch: int  # of the fleet when it was applied
    asked: tuple[Ask, ...] = ()
    refused: tuple[Refusal, ...] = ()
    dry_run: bool = False


class FleetControl(Protocol):
    """Nodes that are rented: what is planned, what was asked for, what has arrived.

    A target is recorded durably before anything is asked for, so a crash at any point leaves nothing but a difference
    between planned and requested, which ``repair`` removes. Nothing that lacks the cluster's tags is ever changed.
    Safe for several threads.
    """

    def observe(self) -> Fleet:
        """Look now. The epoch grows whenever nodes or notices differ from the last look, also after a restart.

        Raises ``AwsError`` (or the provider's own) when the provider does not answer.
        """
        ...

    def take_notices(self, notices: Sequence[Notice]) -> int:
        """Record that nodes will leave, durably; return the epoch afterwards, which has grown if that is news.

        Of one node the firmest notice counts, then the earliest. Notices of nodes that are never seen are dropped
        some minutes after their deadline.
        """
        ...

    def apply(self, target: Target, *, dry_run: bool = False) -> Applied:
        """Plan what ``target`` says, and ask for it.

        Growth is asked for at once. No node is ended here: a smaller target first cancels what has not arrived, and
        its ``drain`` is kept as ``PoolState.draining`` until ``terminate`` ends those nodes, drained. A target for an
        epoch other than the fleet's present one is refused, and a size outside the pool's limits moved to them, with
        the reason. Raises ``OptionError`` for an unknown pool, ``NotOursError``, ``AwsError``.
        """
        ...

    def terminate(self, ids: Sequence[str], *, dry_run: bool = False) -> Applied:
        """End these nodes, in order. They must have been drained: nothing is asked of them any more.

        Those beyond the planned number of their pool are not replaced, others are. Nodes that are gone are refused,
        as are those that would leave a pool below its least. If one of them is not ours ``NotOursError`` is raised
        and nothing is done.
        """
        ...

    def repair(self, *, dry_run: bool = False) -> Applied:
        """Ask again for what is planned and not asked for, and end or adopt what a crash left half done.

        Call it at the start, and now and then; when there is nothing to do it asks for nothing.
        """
        ...

    def close(self) -> None:
        """Let go of connections; nodes stay. May be called twice."""
        ...
