"""An engine that runs the stages of queries.

Its author implements ``SqlEngine`` and meets three values: a ``StageJob`` names each ``Relation`` that its statement
reads, and ``run`` returns a ``StageResult``; meanwhile it may tell its ``StageProgress``. Where an engine cannot be
held to a share or to files, ``resize`` and ``confine`` do nothing; without a catalogue ``tables`` is empty.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, Protocol

from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation


@dataclass(frozen=True, slots=True)
class TableLog:
    """Which version of a table with a log a relation is. A column that a file has not is NULL there."""

    format: Literal["Delta Lake", "Iceberg"]
    root: str  # the table's directory, or its metadata file, as pyarrow.fs wants it
    version: str  # as the log counts, exact enough to find it again
    stored: tuple[tuple[str, str], ...] = ()  # columns that have another name in all files, with that
    ids: tuple[
        tuple[str, int], ...
    ] = ()  # all columns with their Parquet field ids, where files differ in names
    deleted: tuple[
        tuple[str, bytes], ...
    ] = ()  # paths of files with the numbers of their rows that do not count, see ``infra.tables.logs.deletions``


@dataclass(frozen=True, slots=True)
class Relation:
    """Parquet files that an engine can read as a relation."""

    name: str  # the name SQL uses
    scheme: str  # "file" or "s3"
    files: tuple[FileEntry, ...]
    columns: tuple[tuple[str, str], ...]  # (name, Spark SQL type), in order
    external: bool = False  # True: the engine's own catalogue knows it, ``files`` is empty
    partitions: tuple[
        str, ...
    ] = ()  # columns that are in no file: directories, from the outermost, tell their values
    log: TableLog | None = None  # what tells the files, if not a directory
    json: tuple[str, ...] = ()  # columns of text that are JSON to a statement in DuckDB's own words

    @property
    def bytes(self) -> int:
        return sum(f.size for f in self.files)

    def stored(self, column: str) -> str:
        """Return the name that a column has in the files."""
        return dict(self.log.stored).get(column, column) if self.log is not None else column


@dataclass(frozen=True, slots=True)
class FileLayout:
    """How a job's files are laid out as those of a table."""

    keys: tuple[
        str, ...
    ] = ()  # columns of text that are in no file: a directory ``KEY=VALUE`` in another for each
    ids: tuple[tuple[str, int], ...] = ()  # columns with the Parquet field id that they get


@dataclass(frozen=True, slots=True)
class Arm:
    """A statement in DuckDB's dialect whose rows are some of a job's."""

    sql: str
    sliced: str = ""  # the relation of which each row of it gives rows of its own; empty: there is none


@dataclass(frozen=True, slots=True)
class StageJob:
    """One statement to run and where its output goes."""

    id: str  # unique per run of a stage
    name: str  # for people
    sql: str  # in the engine's dialect
    relations: tuple[Relation, ...]  # every table and checkpoint that the statement names
    output: StorageLocation  # existing empty directory; the engine writes part files into it
    partitions: int = 0  # shuffle partitions; 0: the engine's default
    split_bytes: int = 0  # of a file that one task reads at most; 0: the engine's default
    _: KW_ONLY
    expected: float = 0.0  # core-seconds that it is expected to take; 0: not known
    native: bool = False  # tasks of DuckDB's may take the place of the engine's own operators
    layout: FileLayout | None = None  # of a table's files; ``None``: part files of a checkpoint
    arms: tuple[
        Arm, ...
    ] = ()  # the same rows, for tasks of DuckDB's where the engine itself does not reach the files


@dataclass(frozen=True, slots=True)
class StageProgress:
    """How far a running job is."""

    tasks_total: int
    tasks_done: int
    tasks_failed: int = 0
    tasks_running: int = 0
    native: bool = False  # they are DuckDB's, run by Spark


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
    native: bool = False  # DuckDB's tasks computed it
    remark: str = ""  # why they did not, though they might have


class SqlEngine(Protocol):
    """Runs statements that read Parquet relations and write Parquet directories. Safe for several threads."""

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
        self, relations: Sequence[Relation], folders: Sequence[StorageLocation], everything: bool = False
    ) -> None:
        """Hold later jobs to the files of ``relations`` and to ``folders``, where the engine can be held.

        ``everything`` lifts that, for a user who has allowed functions that read files. Raises
        ``EngineUnavailableError`` where the engine lacks what it needs to reach them.
        """
        ...

    def tables(self, names: Collection[str]) -> Sequence[Relation]:
        """Return those of the named tables that the engine's own catalogue has, for ``--catalog``; a name may have
        its database before it. Raises ``TableError`` for one that cannot be read."""
        ...

    def table_list(self) -> Sequence[str]:
        """Return the names of the tables that the engine's own catalogue has in its current database."""
        ...

    def output_names(self, sql: str, tables: Sequence[Relation]) -> tuple[str, ...] | None:
        """Return the names that the engine gives to the columns of a query's result, in its own dialect; ``None`` if
        it cannot run the query. No table is read."""
        ...

    def close(self) -> None:
        """Stop the engine; running jobs are cancelled. May be called twice."""
        ...
