"""What a task of a native stage does, in a Python worker of an executor: DuckDB computes its slice.

A worker process lives as long as Spark lets it, and keeps its database, since opening one takes a tenth of a second.
The database may touch what the query may and nothing else (``infra.tables.confinement``). What DuckDB refuses is
returned rather than raised: Spark would repeat the task, and it would be refused again.
"""

import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from ebbflow.infra.protocols import Relation
from ebbflow.infra.query.duckdb_statements import BY_NAME, register_view, scan, selected
from ebbflow.infra.query.duckdbtypes import quoted
from ebbflow.infra.storage import private
from ebbflow.infra.tables.confinement import AllowedAccess, configuration, lock

CANCELLED = ".cancelled"  # in the stage's folder: its tasks are to stop
_SPILL = "ebbflow-native-"
POLL = 0.2  # seconds between looks at whether the task is still wanted

_databases: dict["Settings", Any] = {}  # of this process: one at most


@dataclass(frozen=True, slots=True)
class Settings:
    """What a worker's database is held to."""

    access: AllowedAccess
    threads: int
    memory: int  # MiB


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a Parquet file."""

    path: str
    first: int
    last: int  # the last one itself


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Values of a relation's column outside of which a slice needs no row of it."""

    relation: str
    column: str
    low: int | date
    high: int | date  # itself one of them

    @property
    def test(self) -> str:
        """Return it as a condition."""
        low, high = (f"DATE '{v}'" if isinstance(v, date) else str(v) for v in (self.low, self.high))
        return f"{quoted(self.column)} BETWEEN {low} AND {high}"


@dataclass(frozen=True, slots=True)
class Part:
    """One slice: its statement, and the part file that it writes."""

    statement: str
    relations: tuple[Relation, ...]  # named as the statement names them
    file: str  # in the stage's directory
    sliced: str = ""  # the relation that is cut: beside its files, it has ``rows``
    rows: tuple[Rows, ...] = ()
    ranges: tuple[KeyRange, ...] = ()  # of other relations


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a slice."""

    rows: int = 0
    read: int = 0  # bytes
    spilled: int = 0  # bytes
    error: str = ""  # why there is no part file


@dataclass(frozen=True, slots=True)
class Work:
    """The slices of a job."""

    settings: Settings
    folder: str
    parts: tuple[Part, ...]

    def run(self, index: int, _: Iterator[Any]) -> Iterator[Done]:
        """Compute one slice; what Spark calls."""
        import duckdb

        part = self.parts[index]
        target = f"{self.folder}/{part.file}"
        unfinished = f"{self.folder}/.{part.file.lstrip('.')}-{os.getpid()}.tmp"
        try:
            if os.path.exists(f"{self.folder}/{CANCELLED}"):
                raise ValueError("cancelled before it began")
            with _connection(self.settings) as cursor, _watched(cursor, self.folder):
                for relation in part.relations:
                    if relation.name == part.sliced or not relation.columns:
                        _register_slice(cursor, relation, part.rows)
                    else:
                        tests = [one.test for one in part.ranges if one.relation == relation.name]
                        register_view(cursor, relation, " AND ".join(tests) or "true")
                cursor.execute("SET enable_profiling = 'no_output'")
                path = unfinished.replace("'", "''")
                (rows,) = cursor.execute(f"COPY ({part.statement}) TO '{path}' (FORMAT parquet)").fetchone()
                read, spilled = _profile(cursor)
            private.seal(unfinished)
            os.replace(unfinished, target)  # a task that Spark runs twice leaves one file
        except (duckdb.Error, OSError, ValueError) as error:
            with suppress(OSError):
                os.unlink(unfinished)
            yield Done(error=(str(error).strip() or type(error).__name__).splitlines()[0][:300])
            return
        yield Done(int(rows), read, spilled)


@contextmanager
def _connection(settings: Settings) -> Iterator[Any]:
    import duckdb

    if settings not in _databases:
        while _databases:
            _databases.popitem()[1].close()
        _databases[settings] = _opened(settings)
    cursor = _databases[settings].cursor()
    try:
        yield cursor
    except duckdb.FatalException:  # the database is of no use any more
        _databases.pop(settings).close()
        raise
    finally:
        cursor.close()


def _opened(settings: Settings) -> Any:
    import duckdb

    sweep(_base())
    if threading.current_thread() is threading.main_thread():
        for number in (
            signal.SIGHUP,
            signal.SIGTERM,
        ):  # how Spark ends its workers; it has no handlers of its own
            signal.signal(number, _left_at_once)
    connection = duckdb.connect(
        config={
            **configuration(),
            "threads": str(settings.threads),
            "memory_limit": f"{settings.memory}MiB",
            "temp_directory": str(_spill_folder()),
            "preserve_insertion_order": "true",
        }
    )
    lock(connection, settings.access)
    return connection


def _base() -> Path:
    return Path(os.environ.get("SPARK_LOCAL_DIRS", tempfile.gettempdir()).split(",")[0])


def _spill_folder() -> Path:
    return _base() / f"{_SPILL}{os.getpid()}"


def sweep(base: Path) -> None:
    """Remove what workers of this machine that were killed have spilled into ``base``."""
    for left in base.glob(f"{_SPILL}*"):
        if not Path(f"/proc/{left.name.removeprefix(_SPILL)}").exists():
            shutil.rmtree(left, ignore_errors=True)


def _left_at_once(*_: object) -> None:
    """End this process, leaving no spill file. Whatever it has written of a slice has no name yet."""
    shutil.rmtree(_spill_folder(), ignore_errors=True)
    os._exit(1)


@contextmanager
def _watched(cursor: Any, folder: str) -> Iterator[None]:
    """Interrupt ``cursor`` as soon as nobody wants its result any more."""
    done, parent = threading.Event(), os.getppid()

    def watch() -> None:
        while not done.wait(POLL):
            if os.getppid() != parent:  # the executor is gone
                _left_at_once()
            if os.path.exists(f"{folder}/{CANCELLED}") or not os.path.isdir(folder):
                cursor.interrupt()

    thread = threading.Thread(target=watch, name="ebbflow-native", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _register_slice(cursor: Any, relation: Relation, rows: tuple[Rows, ...]) -> None:
    """Make the files and ``rows`` of other files a view, as ``register_view`` does with files; of what tasks have
    written the columns are as they are."""
    columns = selected(relation) or "*"
    sources = []
    if relation.files:
        sources.append(scan(relation, [f.path for f in relation.files], BY_NAME))
    for some in rows:
        source = scan(relation, [some.path], "file_row_number = true")
        sources.append(f"{source} WHERE file_row_number BETWEEN {some.first} AND {some.last}")
    arms = " UNION ALL ".join(f"SELECT {columns} FROM {source}" for source in sources)
    cursor.execute(f"CREATE TEMP VIEW {quoted(relation.name)} AS {arms}")


def _profile(cursor: Any) -> tuple[int, int]:
    with suppress(Exception):
        told = json.loads(cursor.get_profiling_information(format="json"))
        return int(told["io"]["total_bytes_read"]), int(told["system"]["peak_temp_dir_size"])
    return 0, 0
