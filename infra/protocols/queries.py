"""Tables, checkpoints and engines of queries, and how queries share a cluster."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import Place

# --- tables and checkpoints -------------------------------------------------------------------------------


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
    place: Place


class CheckpointStore(Protocol):
    """Durable stage outputs, by fingerprint. Safe for several processes at once."""

    place: Place

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
        """Drop an attempt's files; never raises for missing ones, or for those that cannot be deleted now."""
        ...

    def find(
        self, fingerprint: str, sources: Mapping[str, str] | None = None, *, verified: bool = True
    ) -> Checkpoint | None:
        """Return the checkpoint if it is whole and of these source versions, else ``None``.

        ``verified=False`` compares only names and sizes of its files with the manifest, which is quick: ``verify``
        must then be called before the first use. What cannot be used is noted in ``problems``; what is damaged is
        set aside as well, so that nobody meets it again.
        """
        ...

    def verify(self, checkpoint: Checkpoint, *, anew: bool = False) -> bool:
        """Tell whether the checkpoint's files are what was written, to the byte; set aside what is not.

        A file is hashed once, until its size or time changes; ``anew`` hashes it again. Raises ``StorageError``
        for files that cannot be read.
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
    output: Place  # existing empty folder; the engine writes part files into it
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

    def confine(
        self, relations: Sequence[Relation], folders: Sequence[Place], everything: bool = False
    ) -> None:
        """Hold later jobs to the files of ``relations`` and to ``folders``, where the engine can be held.

        ``everything`` lifts that, for a user who has allowed functions that read files.
        """
        ...

    def tables(self) -> Sequence[Relation]:
        """Return the tables that the engine's own catalogue knows, for ``--catalog``."""
        ...

    def close(self) -> None:
        """Stop the engine; running jobs are cancelled. May be called twice."""
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
