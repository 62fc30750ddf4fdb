"""What a task of a native stage does, in a Python worker of an executor: DuckDB computes its slice.

A worker process lives as long as Spark lets it, and keeps its database, since opening one takes a tenth of a second.
The database may touch what the query may and nothing else (``infra.tables.confinement``). What DuckDB refuses is
returned rather than raised: Spark would repeat the task, and it would be refused again.
"""

import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Protocol

from ebbflow.infra.protocols import FileLayout, Relation
from ebbflow.infra.query.duckdb_statements import BATCH, BY_NAME, register_view, scan, selected, streamed
from ebbflow.infra.query.duckdbtypes import quoted
from ebbflow.infra.spark.native.objects import (
    POLL,
    LocalParts,
    ObjectParts,
    Rows,
    one_like,
    read_by_arrow,
    register_objects,
    transient,
)
from ebbflow.infra.storage import files
from ebbflow.infra.storage.filesystems import filesystem, following
from ebbflow.infra.tables.confinement import Ahead, AllowedAccess, configuration, lock

_SPILL = "ebbflow-native-"
_REPEATED = 2  # times that Spark repeats a task whose network has failed

_LITTLE = 64  # MiB of a statement over a small relation
_LATER = 0.25  # s after a task: what it has done is told first
_databases: dict["Settings", Any] = {}  # of this process: one at most
ahead = Ahead()
"""The next database of this process."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a worker's database is held to."""

    access: AllowedAccess
    threads: int
    memory: int  # MiB


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
    layout: FileLayout | None = None  # of a table's files, of which it writes some, in place of a part file
    group: int = 0  # rows of a row group of the file; 0: as many as is usual
    by: str = ""  # rows with each value of this are a file of their own; then ``file`` is a directory of them
    divisible: bool = (
        False  # if Spark repeats the task once another one like it has ended, it is left to several
    )

    def names(self, relation: Relation) -> bool:
        """Tell whether the statement may read ``relation``."""
        name, statement = relation.name.replace('"', '""').lower(), self.statement.lower()
        if name.isidentifier():
            return re.search(rf"\b{name}\b", statement) is not None
        return name in statement


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a slice."""

    rows: int = 0
    read: int = 0  # bytes
    spilled: int = 0  # bytes
    error: str = ""  # why there is no part file
    files: tuple[str, ...] = ()  # paths of files of a layout
    left: bool = False  # it is to be divided among several


class Parts(Protocol):
    """The stage's directory, as one task writes into it."""

    def cancelled(self) -> bool:
        """Tell whether the stage was cancelled."""
        ...

    def unwanted(self) -> bool:
        """Tell the same, or that the directory is gone; asked again and again."""
        ...

    def write(
        self, cursor: Any, statement: str, name: str, check: Callable[[], None], group: int = 0, by: str = ""
    ) -> int:
        """Write a statement's rows as the file ``name``, which appears as a whole; return their number. Row groups
        have ``group`` rows, if it is given. In local file systems ``by`` makes it a directory of files."""
        ...

    def clear(self) -> None:
        """Remove what is not whole."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """The slices of a job."""

    settings: Settings
    folder: str
    parts: tuple[Part, ...]
    scheme: str = "file"
    s3: tuple[
        tuple[str, str], ...
    ] = ()  # ``public_settings`` of the driver; credentials are each executor's own
    last: bool = False  # a task that fails is not repeated

    def run(self, index: int, rows: Iterator[Any]) -> Iterator[Done]:
        """Compute one slice; what Spark calls. An error of the network is raised twice: Spark repeats the task."""
        for _ in rows:  # there are none: Spark keeps a worker that has read to their end
            pass
        part = self.parts[index]
        with following(dict(self.s3)):  # the worker's next task may be another query's
            left = part.divisible and _attempt() > 0 and one_like(self.scheme, self.folder, part.file)
            done = Done(left=True) if left else self._done(part, _connection)
        yield done

    def here(self) -> Done:
        """Compute the only slice in this process, which is no worker: it keeps no database, spills nothing, and ends
        with none of its parents."""
        return self._done(self.parts[0], _passing, worker=False)

    def _done(
        self,
        part: Part,
        connected: Callable[["Settings"], AbstractContextManager[Any]],
        *,
        worker: bool = True,
    ) -> Done:
        output: Parts | None = None
        try:
            output = (
                LocalParts(self.folder) if self.scheme == "file" else ObjectParts(self.scheme, self.folder)
            )
            if output.cancelled():
                raise ValueError("cancelled before it began")
            with connected(self.settings) as cursor, _watched(cursor, output, worker=worker) as check:
                for relation in part.relations:
                    if part.names(relation):  # a view of one takes as long as opening its files
                        _register(cursor, relation, part)
                cursor.execute("SET enable_profiling = 'no_output'")
                made: tuple[str, ...] = ()
                if part.layout is None:
                    rows = output.write(cursor, part.statement, part.file, check, part.group, part.by)
                else:
                    rows, made = self._laid_out(cursor, part, output, check)
                read, spilled = _profile(cursor)
        except Exception as error:
            if not _expected(error):
                raise
            if output is not None:
                output.clear()
            if transient(str(error)) and not self.last and _attempt() < _REPEATED:
                raise
            return Done(error=(str(error).strip() or type(error).__name__).splitlines()[0][:300])
        return Done(int(rows), read, spilled, files=made)

    def _laid_out(
        self, cursor: Any, part: Part, output: Parts, check: Callable[[], None]
    ) -> tuple[int, tuple[str, ...]]:
        """Write a part's rows as files of its layout; return their number and the files' paths. After an error none
        of them is left."""
        assert part.layout is not None
        # names of each try's own: files of one that failed are none of the table's
        stem = f"{part.file.removesuffix('.parquet')}-{uuid.uuid4().hex[:12]}"
        fs = filesystem(self.scheme)
        try:
            reader = cursor.sql(part.statement).to_arrow_reader(BATCH)
            found = streamed(reader, self.folder, part.layout, fs, check, stem)
            check()
            if output.cancelled():  # what it is cancelled for may be that others write the same
                raise ValueError("cancelled")
        except Exception:
            with suppress(OSError):
                for info in files.listing(fs, self.folder, recursive=True):
                    if info.is_file and info.base_name.startswith(stem):
                        fs.delete_file(info.path)
            raise
        return found


def _expected(error: Exception) -> bool:
    """Tell whether an error is of reading, computing or writing, and none of this program's."""
    import duckdb

    arrow = sys.modules.get(
        "pyarrow.lib"
    )  # over local files tasks need none of it, and it takes long to import
    kinds = (duckdb.Error, OSError, ValueError, *(() if arrow is None else (arrow.ArrowException,)))
    return isinstance(error, kinds)


def load() -> None:
    """Have imported what slices of local files need, and DuckDB begun once: most of that is loading its program."""
    import duckdb

    with duckdb.connect(config={**configuration(), "threads": "1", "TimeZone": "UTC"}) as connection:
        connection.execute("SELECT 1").fetchall()


def warm_up() -> None:
    """Do the same, and have the first task's database opened."""
    load()
    ahead.begin()


def _attempt() -> int:
    """Return how often Spark has repeated the task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.attemptNumber() if context is not None else 0


def _register(cursor: Any, relation: Relation, part: Part) -> None:
    sliced = relation.name == part.sliced
    rows = part.rows if sliced else ()
    tests = [] if sliced else [one.test for one in part.ranges if one.relation == relation.name]
    test = " AND ".join(tests) or "true"
    if read_by_arrow(relation) and (relation.files or rows):
        register_objects(cursor, relation, rows, test)
    elif (sliced and (relation.files or rows)) or not relation.columns:
        _register_slice(cursor, relation, rows)
    else:
        register_view(cursor, relation, test)


@contextmanager
def _passing(settings: Settings) -> Iterator[Any]:
    """Give a database for one statement over little."""
    with ahead.take(**_configured(settings), temp_directory="") as connection:
        lock(connection, settings.access)
        yield connection


def told(statement: str, relation: Relation) -> tuple[Any, ...]:
    """Return the first row of a statement over one small relation, computed in this process; none: DuckDB refuses."""
    access = AllowedAccess.of([relation], [])
    with suppress(Exception), _passing(Settings(access, 1, _LITTLE)) as connection:
        _register(connection, relation, Part(statement, (relation,), ""))
        return tuple(connection.execute(statement).fetchone())
    return ()


@contextmanager
def _connection(settings: Settings) -> Iterator[Any]:
    import duckdb

    later: threading.Timer | None = None
    if settings not in _databases:
        while _databases:
            _databases.popitem()[1].close()
        _databases[settings] = _opened(settings)
        later = threading.Timer(_LATER, ahead.begin)
    cursor = _databases[settings].cursor()
    try:
        yield cursor
    except duckdb.FatalException:  # the database is of no use any more
        _databases.pop(settings).close()
        raise
    finally:
        cursor.close()
        if later is not None:
            later.daemon = True
            later.start()


def _opened(settings: Settings) -> Any:
    sweep(_base())
    if threading.current_thread() is threading.main_thread():
        for number in (
            signal.SIGHUP,
            signal.SIGTERM,
        ):  # how Spark ends its workers; it has no handlers of its own
            signal.signal(number, _left_at_once)
    connection = ahead.take(**_configured(settings), temp_directory=str(_spill_folder()))
    lock(connection, settings.access)
    return connection


def _configured(settings: Settings) -> dict[str, str]:
    return {
        "threads": str(settings.threads),
        "memory_limit": f"{settings.memory}MiB",
        "preserve_insertion_order": "true",
    }


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
def _watched(cursor: Any, output: Parts, *, worker: bool = True) -> Iterator[Callable[[], None]]:
    """Interrupt ``cursor`` as soon as nobody wants its result any more; what is given raises ``ValueError`` then. A
    ``worker`` ends with its executor."""
    done, unwanted, parent = threading.Event(), threading.Event(), os.getppid()

    def watch() -> None:
        while not done.wait(POLL):
            if worker and os.getppid() != parent:  # the executor is gone
                _left_at_once()
            if unwanted.is_set() or output.unwanted():
                unwanted.set()
                if not done.is_set():
                    cursor.interrupt()

    def check() -> None:
        if unwanted.is_set():
            raise ValueError("cancelled")

    thread = threading.Thread(target=watch, name="ebbflow-native", daemon=True)
    thread.start()
    try:
        yield check
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
