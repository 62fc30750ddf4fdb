"""DuckDB as a ``SqlEngine``: in this process, without a JVM."""

import importlib.util
import json
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import (
    EngineUnavailableError,
    StageCancelledError,
    StageFailedError,
    StorageFullError,
    TableError,
)
from ebbflow.infra.machine.granted import granted_cores
from ebbflow.infra.protocols import FileLayout, Relation, StageJob, StageProgress, StageResult
from ebbflow.infra.query.duckdb_statements import (
    BATCH,
    copied,
    output_names,
    register_view,
    storable,
    streamed,
    written,
)
from ebbflow.infra.query.results import count_rows
from ebbflow.infra.storage import private
from ebbflow.infra.storage.filesystems import filesystem, translated
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.storage.scratch import ScratchFolder
from ebbflow.infra.tables.confinement import NOTHING, Ahead, AllowedAccess, lock

_POLL = 0.1  # seconds between looks at a running job
_PART = "part-00000.parquet"
_CTRL_C = "Query interrupted"  # what DuckDB makes of a KeyboardInterrupt in the main thread
_HELD = "file system operations are disabled by configuration"
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Running:
    job: StageJob
    connection: Any  # of the database
    cursor: Any
    cancelled: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class DuckDbEngine:
    """Runs statements in one in-memory database; every job has a connection and temporary views of its own.

    Statements read the files of the relations and the directories that ``confine`` or their jobs name, and no
    others; their text has no say in it. A job that names more places moves the engine to another database.

    Threads and memory belong to the database as a whole, so ``StageJob.partitions`` and ``split_bytes`` have
    no effect. ``StageProgress`` counts hundredths of the statement. Progress listeners are called from a
    thread of their own. A job that was finished when its cancellation arrived returns its result.
    Jobs may read and write in ``scratch`` as well, a directory that goes with the engine.
    """

    name: Literal["duckdb"] = "duckdb"

    def __init__(self, folder: ScratchFolder, clock: Clock) -> None:
        self._connection: Any = None  # to the database, from the first job on
        self._ahead = Ahead()  # opens it while the query is planned
        self._reach = NOTHING  # of the database
        self._left: list[Any] = []  # databases that were moved from, to be closed as the next job runs
        self._settings: dict[str, str] = {}  # of the share
        self._folder = folder  # for what does not fit in memory
        self.scratch = StorageLocation(folder.path / "shared")
        with translated(f"make {self.scratch}"):
            private.make_folder(self.scratch.root)
        self._own = AllowedAccess.of((), (self.scratch,))
        self._clock = clock
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self._closed = False

    @classmethod
    def start(
        cls, threads: int | None = None, memory_gb: float | None = None, *, clock: Clock | None = None
    ) -> "DuckDbEngine":
        """Return an engine with ``threads`` threads (those that are granted) and ``memory_gb`` GiB (80 % of all).

        Raises ``EngineUnavailableError`` without DuckDB, ``StorageError`` where there is no room to spill.
        """
        if importlib.util.find_spec("duckdb") is None:
            raise EngineUnavailableError("DuckDB is missing: pip install duckdb")
        engine = cls(ScratchFolder("duckdb"), clock or SystemClock())
        engine._set("threads", str(max(1, ceil(granted_cores()) if threads is None else int(threads))))
        if memory_gb is not None:
            engine._set("memory_limit", f"{_mib(memory_gb)}MiB")
        engine._ahead.begin()
        return engine

    def confine(
        self, relations: Sequence[Relation], folders: Sequence[StorageLocation], everything: bool = False
    ) -> None:
        """Hold statements to the files of ``relations`` and to ``folders``; ``everything`` lifts that."""
        reach = AllowedAccess.of(relations, folders, everything)
        with self._lock:
            if not self._closed and self._reach != reach:
                self._move(reach)

    def run(self, job: StageJob, on_progress: Callable[[StageProgress], None] | None = None) -> StageResult:
        running = self._admit(job)
        began = self._clock.now()
        listener = _Listener(job.id, on_progress)
        watcher = threading.Thread(
            target=self._watch, args=(running, listener), name=f"watch-{job.id}", daemon=True
        )
        watcher.start()
        try:
            with _translated(running):
                rows, columns = self._write(running)
                profile = _profile(running.cursor)  # of the last statement
                threads = int(_scalar(running.cursor, "SELECT current_setting('threads')"))
        except BaseException as error:
            if not isinstance(error, Exception):
                running.cancelled.set()
                running.cursor.interrupt()
            raise
        finally:
            running.done.set()
            watcher.join()
            self._leave(running)
        listener.report(100.0)
        seconds = self._clock.now() - began
        return StageResult(
            rows=rows,
            columns=columns,
            seconds=seconds,
            task_seconds=profile.get("cpu", seconds),
            tasks=threads,
            spilled_bytes=int(profile.get("spilled", 0)),
            input_bytes=int(profile.get("read", 0)),
        )

    def cancel(self, job_id: str) -> None:
        with self._lock:
            running = self._running.get(job_id)
            if running is not None:
                running.cancelled.set()
                # between two statements an interrupt is lost: the watcher repeats it
                running.cursor.interrupt()

    def resize(self, cores: float, memory: float) -> None:
        """Hold the database to ``cores`` threads (at least one) and ``memory`` GiB; zero leaves either alone.

        Running statements follow at their next task. Memory is raised to what they hold already.
        """
        with self._lock:
            if self._closed:
                return
            if cores > 0:
                self._set("threads", str(max(1, round(cores))))
            if memory > 0:
                import duckdb

                # below what running statements have pinned, DuckDB refuses; the next resize will do it
                with suppress(duckdb.Error):
                    self._set("memory_limit", f"{_mib(memory)}MiB")

    def _move(self, reach: AllowedAccess) -> None:
        """Continue with a database of this reach: another one, for a lock cannot be undone."""
        if self._connection is not None:
            self._left.append(self._connection)
            self._connection = None
            self._ahead.begin()
        self._reach = reach

    def _database(self) -> Any:
        """Return a connection to the database, which is open and locked from now on."""
        if self._connection is None:
            with translated("make a directory for what does not fit in memory"):
                spills = tempfile.mkdtemp(dir=self._folder.path)  # files of all databases have the same names
            connection = self._ahead.take(**self._settings, temp_directory=spills)
            lock(connection, self._reach.joined(self._own))
            self._connection = connection
        return self._connection

    def _close_left(self) -> None:
        used = [running.connection for running in self._running.values()]
        for connection in [c for c in self._left if not any(c is u for u in used)]:
            self._left.remove(connection)
            connection.close()

    def _set(self, name: str, value: str) -> None:
        if self._connection is not None and self._settings.get(name) != value:  # else it frees what it keeps
            # A connection serves one call at a time and refuses a second: this one may be handing out a cursor.
            with self._connection.cursor() as cursor:
                cursor.execute(f"SET GLOBAL {name} = '{value}'")
        self._settings[name] = value

    def tables(self, names: Collection[str]) -> Sequence[Relation]:
        """Return nothing: the database is in memory and empty."""
        return ()

    def table_list(self) -> Sequence[str]:
        """Return nothing, as ``tables``."""
        return ()

    def output_names(self, sql: str, tables: Sequence[Relation]) -> tuple[str, ...] | None:
        return output_names(sql, tables)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            active = list(self._running.values())
            for running in active:
                running.cancelled.set()
                running.cursor.interrupt()
        deadline = self._clock.now() + 10.0
        for running in active:
            self._clock.wait(running.done, deadline - self._clock.now())
        for connection in (*self._left, self._connection):
            if connection is not None:
                connection.close()
        self._ahead.close()
        self._folder.close()

    def __enter__(self) -> "DuckDbEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one job ------------------------------------------------------------------------------------------

    def _admit(self, job: StageJob) -> _Running:
        with self._lock:
            if self._closed:
                raise EngineUnavailableError("this DuckDB engine was closed")
            if job.id in self._running:
                raise ValueError(f"job ids must be unique; {job.id!r} is running already")
            needed = AllowedAccess.of(job.relations, [job.output])
            if not self._reach.joined(self._own).covers(needed):
                self._move(self._reach.joined(needed))
            connection = self._database()
            running = _Running(job, connection, connection.cursor())
            self._running[job.id] = running
            return running

    def _leave(self, running: _Running) -> None:
        with self._lock:
            self._running.pop(running.job.id, None)
            running.cursor.close()
            self._close_left()

    def _write(self, running: _Running) -> tuple[int, tuple[tuple[str, str], ...]]:
        job, cursor = running.job, running.cursor
        cursor.execute("SET enable_progress_bar = true")
        cursor.execute("SET enable_progress_bar_print = false")
        cursor.execute("SET progress_bar_time = 0")
        for relation in job.relations:
            register_view(cursor, relation, own=True)
        statement, columns, own = storable(cursor, job)
        cursor.execute("SET enable_profiling = 'no_output'")
        if running.cancelled.is_set():
            raise StageCancelledError(f"{job.name} was cancelled before it began")
        part = job.output.path(_PART)
        if job.output.local:
            divided = job.layout is not None and bool(job.layout.keys)
            target = job.output.path("data") if divided else part
            cursor.execute(copied(statement, target, job.layout, own))
            told = cursor.fetchone()  # nothing where several statements were made of one, as of PIVOT ... ON
            rows = int(told[0]) if told is not None else count_rows(job.output)
            if not divided:
                private.seal(part)
            return rows, columns
        if job.layout is not None:
            return _stream_files(running, statement, job.layout), columns
        rows = written(cursor, statement, job.output.scheme, part, lambda: _check(running), own=own)
        return rows, columns

    def _watch(self, running: _Running, listener: "_Listener") -> None:
        with self._lock:  # here it holds up no statement
            self._close_left()
        while not self._clock.wait(running.done, _POLL):
            if running.cancelled.is_set():
                running.cursor.interrupt()
            else:
                with suppress(Exception):  # not every statement knows its progress
                    listener.report(float(running.cursor.query_progress()))


class _Listener:
    """Passes on progress that only grows; each sub-statement of a job would start at zero again."""

    def __init__(self, job: str, on_progress: Callable[[StageProgress], None] | None) -> None:
        self._job = job
        self._on_progress = on_progress
        self._done = 0

    def report(self, percent: float) -> None:
        self._done = max(self._done, min(100, int(percent)))
        if self._on_progress is None:
            return
        try:
            self._on_progress(StageProgress(100, self._done, 0, 0 if self._done == 100 else 1))
        except Exception:  # a listener's mistake must not lose the work it listens to
            _log.exception("the progress listener of %s failed; it is not called again", self._job)
            self._on_progress = None


def _check(running: _Running) -> None:
    if running.cancelled.is_set():
        raise StageCancelledError(f"{running.job.name} was cancelled")


def _stream_files(running: _Running, statement: str, layout: FileLayout) -> int:
    """Write the result as files of ``layout`` through pyarrow; return its rows."""
    output, reader = running.job.output, running.cursor.sql(statement).to_arrow_reader(BATCH)
    fs = filesystem(output.scheme)
    return streamed(reader, output.root, layout, fs, lambda: _check(running))[0]


@contextmanager
def _translated(running: _Running) -> Iterator[None]:
    """Turn DuckDB's and Arrow's errors into ours, the most specific first."""
    import duckdb
    import pyarrow as pa

    name = running.job.name
    try:
        yield
    except duckdb.InterruptException as error:
        raise StageCancelledError(f"{name} was cancelled") from error
    except (duckdb.Error, pa.ArrowException, OSError, ValueError, NotImplementedError) as error:
        if running.cancelled.is_set():
            raise StageCancelledError(f"{name} was cancelled") from error
        text = str(error)
        if "No space left on device" in text or "Disk quota exceeded" in text:
            raise StorageFullError(f"no space left while writing {name}: {_reason(error)}") from error
        if _HELD in text:
            raise StageFailedError(f"{name}: {_held(running.job, _reason(error))}") from error
        raise StageFailedError(f"{name}: {_reason(error)}") from error
    except TableError as error:  # a footer: what is read is gone, or damaged
        if running.cancelled.is_set():
            raise StageCancelledError(f"{name} was cancelled") from error
        raise StageFailedError(f"{name}: {error}") from error
    except RuntimeError as error:
        if str(error) == _CTRL_C:
            raise KeyboardInterrupt from error
        raise


def _held(job: StageJob, reason: str) -> str:
    """Return what DuckDB's refusal to open a file means: of one that is gone it looks for others like it."""
    for relation in job.relations:
        for file in relation.files if relation.scheme == "file" else ():
            if not os.path.exists(file.path):
                return f"No such file: {file.path} of the table {relation.name}"
    return f"the statement reaches beyond its tables and the store ({reason})"


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    # up to the excerpt of the statement ("LINE 1: ...") or the first paragraph's end
    kept = []
    for line in lines:
        if not line or line.startswith("LINE "):
            break
        kept.append(line)
    return " ".join(kept)[:500] or type(error).__name__


def _profile(cursor: Any) -> dict[str, float]:
    """Return CPU seconds over all threads ("cpu"), bytes read and bytes spilled, as far as DuckDB tells."""
    with suppress(Exception):
        told = json.loads(cursor.get_profiling_information(format="json"))
        return {
            "cpu": float(told["query"]["cpu_time"]),
            "read": float(told["io"]["total_bytes_read"]),
            "spilled": float(told["system"]["peak_temp_dir_size"]),
        }
    return {}


def _scalar(cursor: Any, statement: str) -> Any:
    row = cursor.execute(statement).fetchone()
    assert row is not None
    return row[0]


def _mib(gib: float) -> int:
    return max(64, round(gib * 1024))
