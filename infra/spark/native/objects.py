"""Part files of native stages, and their tables in object storage: tasks reach that by pyarrow's client, and need no
JVM's.

A table is an Arrow scan in DuckDB, which asks it for the columns of the statement and for the rows that pass its
simple conditions; row groups that have none by their statistics are not read. A scan holds some row groups' columns.
"""

import os
import shutil
import threading
import uuid
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import InfraError, StageFailedError
from ebbflow.infra.protocols import Relation, StageJob
from ebbflow.infra.query.duckdb_statements import dataset, selected, written
from ebbflow.infra.query.duckdbtypes import quoted
from ebbflow.infra.spark.native.catalyst import NotNativeError
from ebbflow.infra.storage import files, private
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.filesystems import filesystem
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.logs import deletions
from ebbflow.infra.tables.logs.scans import Touched, check_all, scannable

POLL = 0.2  # seconds between a task's looks at whether it is still wanted
CANCELLED = ".cancelled"  # in the stage's directory: its tasks are to stop
EVERY = 10  # of a task's looks at whether it is still wanted one that asks object storage, by one request...
_FOLDER = 10  # ...and of these one whether the stage's directory is there, which takes several
_ANSWER = 1.0  # s that object storage may take to answer such a look
_LEAVE = 5.0  # s in which tasks of a cancelled stage remove their files; a killed one does not
_REACHED = ("file", "s3")  # what tasks read and write
_PATTERN = frozenset("*?[]{}\\")  # in a path, DuckDB takes these for a pattern
_BATCH = 1 << 16  # rows
_FILE = "__ebbflow_file"  # the column by whose values rows are divided among files
_LARGE = (
    64 << 20
)  # bytes of a file that is scanned row group by row group, for which its footer is read first
_AHEAD = 1  # batches, and files, that are read before they are asked for
_TRANSIENT = (
    "NETWORK_CONNECTION", "curlCode", "SLOW_DOWN", "REQUEST_TIMEOUT", "INTERNAL_FAILURE", "SERVICE_UNAVAILABLE",
    "HTTP status 5",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a Parquet file."""

    path: str
    first: int
    last: int  # the last one itself


def read_by_arrow(relation: Relation) -> bool:
    """Tell whether tasks read the files of a relation by Arrow, and not by DuckDB's own reader."""
    return relation.scheme != "file" or bool(relation.log is not None and relation.log.deleted)


def check_places(job: StageJob) -> None:
    """Raise ``NotNativeError`` where tasks cannot read what a stage reads, or write its output."""
    if any(scheme not in _REACHED for scheme in (job.output.scheme, *(r.scheme for r in job.relations))):
        raise NotNativeError("its tables or the store are in no file system and not on S3")
    for relation in job.relations:
        if relation.external:
            raise NotNativeError(f"the table {relation.name} is in Spark's catalogue only")
        if read_by_arrow(relation) and relation.log is not None and relation.log.ids:
            why = "have deleted rows" if relation.log.deleted else "are in object storage"
            raise NotNativeError(f"files of {relation.name} {why}, and have columns under several names")
        if relation.scheme == "file" and any(_PATTERN & set(f.path) for f in relation.files):
            raise NotNativeError(f"a file of {relation.name} has a name that DuckDB takes for a pattern")


def transient(message: str) -> bool:
    """Tell whether an error's message is pyarrow's of S3 that another try may not meet."""
    return "AWS Error" in message and any(sign in message for sign in _TRANSIENT)


def register_objects(cursor: Any, relation: Relation, rows: tuple[Rows, ...], test: str) -> None:
    """Make the files of ``relation`` and ``rows`` of other files a view, as ``register_view`` does with files.

    Of what tasks have written the columns are as they are. Raises ``OSError`` and ``ValueError``."""
    source = f"__files_of_{relation.name}"
    cursor.register(source, scanned(relation, rows))
    columns = selected(relation) or "*"
    cursor.execute(
        f"CREATE TEMP VIEW {quoted(relation.name)} AS "
        f"SELECT * FROM (SELECT {columns} FROM {quoted(source)}) WHERE {test}"
    )


def scanned(relation: Relation, rows: tuple[Rows, ...] = ()) -> Any:
    """Return what is not deleted of the files of ``relation``, and of ``rows`` of other files, as a dataset whose
    scans read little ahead.

    Raises ``OSError``, and ``ValueError`` for rows that are no whole row groups.
    """
    whole = {file.path: file.size for file in relation.files}
    others = dict.fromkeys(some.path for some in rows)
    files = (*relation.files, *(FileEntry(path, 1, 0.0) for path in others if path not in whole))
    relation = replace(relation, files=files)
    found, gone = dataset(relation), deletions.of(relation)
    fragments: list[Any] = []
    touched: list[Touched] = []
    for fragment in found.get_fragments():
        path = fragment.path
        groups = [one for some in rows if some.path == path for one in _groups(fragment, some)]
        if path in gone:
            only = None if path in whole else frozenset(groups)
            touched.append(Touched(fragment, gone[path], only))
            continue
        if path in whole:  # what is read ahead of a fragment stays in memory until its end
            fragments += fragment.split_by_row_group() if whole[path] > _LARGE else [fragment]
        fragments += [fragment.subset(row_group_ids=[number]) for number in groups]
    check_all(touched, gone)
    return scannable(
        found,
        fragments,
        touched,
        batch_size=_BATCH,
        batch_readahead=_AHEAD,
        fragment_readahead=_AHEAD,
        use_threads=False,  # a task has its cores; requests have threads of their own
    )


def _groups(fragment: Any, some: Rows) -> list[int]:
    """Return the numbers of the row groups of a file that hold ``some`` of its rows."""
    first, found, count = 0, [], 0
    for group in fragment.row_groups:
        if group.num_rows and some.first <= first and first + group.num_rows - 1 <= some.last:
            found.append(int(group.id))
            count += group.num_rows
        first += group.num_rows
    if count != some.last - some.first + 1:
        raise ValueError(f"{some.path} has other row groups than when it was planned")
    return found


class LocalParts:
    """``Parts`` in a file system."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._unfinished = ""

    def cancelled(self) -> bool:
        return os.path.exists(f"{self._folder}/{CANCELLED}")

    def unwanted(self) -> bool:
        return self.cancelled() or not os.path.isdir(self._folder)

    def write(
        self, cursor: Any, statement: str, name: str, check: Callable[[], None], group: int = 0, by: str = ""
    ) -> int:
        # another container's processes have the same numbers
        own = f"{uuid.uuid4().hex[:8]}-{os.getpid()}"
        self._unfinished = f"{self._folder}/.{name.lstrip('.')}-{own}.tmp"
        path = self._unfinished.replace("'", "''")
        options = f"FORMAT parquet, ROW_GROUP_SIZE {group}" if group else "FORMAT parquet"
        if by:
            private.make_folder(self._unfinished)
            statement, options = (
                f"SELECT *, {by} AS {_FILE} FROM ({statement})",
                f"{options}, PARTITION_BY ({_FILE})",
            )
        (rows,) = cursor.execute(f"COPY ({statement}) TO '{path}' ({options})").fetchone()
        if by:
            self._keep(name)
        else:
            private.seal(self._unfinished)
            os.replace(
                self._unfinished, f"{self._folder}/{name}"
            )  # a task that Spark runs twice leaves one file
        return int(rows)

    def _keep(self, name: str) -> None:
        """Give a directory of files its name, unless the same task of Spark's, run twice, has made it already."""
        for number, path in enumerate(sorted(Path(self._unfinished).glob("*/*"))):
            private.seal(path)
            path.rename(f"{self._unfinished}/{number:05d}.parquet")
        try:
            os.rename(self._unfinished, f"{self._folder}/{name}")
        except OSError:
            if not os.path.isdir(f"{self._folder}/{name}"):
                raise
            self.clear()

    def clear(self) -> None:
        with suppress(OSError):
            os.unlink(self._unfinished)
        shutil.rmtree(self._unfinished, ignore_errors=True)


class ObjectParts:
    """The stage's directory in object storage, as one task writes into it; see ``worker.Parts``."""

    def __init__(self, scheme: str, folder: str) -> None:
        self._scheme = scheme
        self._fs = filesystem(scheme)
        self._folder = folder
        self._unfinished = ""
        self._looks = 0
        self._seen = False  # some stores know no empty directory

    def cancelled(self) -> bool:
        try:
            self._fs.open_input_file(f"{self._folder}/{CANCELLED}").close()  # no more than one HEAD
        except FileNotFoundError:
            return False
        return True

    def unwanted(self) -> bool:
        self._looks += 1
        if self._looks % EVERY:
            return False
        with suppress(OSError):  # whether it can be written will be seen
            # at first, too: a directory may be there, and then be gone
            folder = self._looks == EVERY or self._looks % (EVERY * _FOLDER) == 0
            return self.cancelled() or (folder and self._gone())
        return False

    def _gone(self) -> bool:
        there = _is_there(self._fs.get_file_info(self._folder))
        gone = self._seen and not there
        self._seen = self._seen or there
        return gone

    def write(
        self, cursor: Any, statement: str, name: str, check: Callable[[], None], group: int = 0, by: str = ""
    ) -> int:
        if by:
            raise ValueError("in object storage, what a task writes is one file")
        self._unfinished = f"{self._folder}/.{name.lstrip('.')}-{uuid.uuid4().hex[:12]}.tmp"
        rows = written(cursor, statement, self._scheme, self._unfinished, check, group=group)
        check()
        if self.cancelled():  # what it is cancelled for may be that others write the same
            raise ValueError("cancelled")
        # closing an upload completes it, after an error too: only the name says that it is whole
        self._fs.move(self._unfinished, f"{self._folder}/{name}")
        return rows

    def clear(self) -> None:
        with suppress(OSError):
            if self._unfinished:
                self._fs.delete_file(self._unfinished)


def _is_there(info: Any) -> bool:
    from pyarrow.fs import FileType

    return bool(info.type != FileType.NotFound)


def one_like(scheme: str, folder: str, name: str) -> bool:
    """Tell whether a stage's directory is known to have another file with ``name`` but for its number."""
    names: list[str] = []
    with suppress(OSError):
        names = [info.base_name for info in files.listing(filesystem(scheme), folder)]
    return any(one.rpartition("-")[0] == name.rpartition("-")[0] for one in names if one != name)


def names_in(output: StorageLocation) -> list[str]:
    """Return the names in a stage's directory. Raises ``OSError``."""
    return os.listdir(output.root) if output.local else [info.base_name for info in output.entries()]


def unfinished(output: StorageLocation) -> bool:
    """Tell whether tasks still have files in a stage's directory that are not whole."""
    with suppress(OSError):
        return any(name.startswith(".") and name.endswith(".tmp") for name in names_in(output))
    return False


def mark(job: StageJob) -> bool:
    """Mark a stage as cancelled, for its tasks to see; return whether it is."""
    with suppress(OSError, InfraError):
        if job.output.local:
            with private.open_file(job.output.path(CANCELLED), "w"):  # a directory that is gone stays so
                pass
        else:
            job.output.write(CANCELLED, b"")
        return True
    return False


class Mark:
    """The mark of a job's cancellation, which a thread writes: object storage may not answer for long."""

    def __init__(self, job: StageJob) -> None:
        self._job = job
        self._lock = threading.Lock()
        self._written = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Have it written, unless it is, or is being; wait for nothing. Jobs without native tasks need none."""
        if not (self._job.native or self._job.arms):
            return
        with self._lock:
            if not self._written and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._write, name="ebbflow-cancel", daemon=True)
                self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait, no longer than ``seconds``, for what was begun."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(max(0.0, seconds))

    def _write(self) -> None:
        self._written = mark(self._job)


def until_tasks_have_left(output: StorageLocation) -> None:
    """Wait, bounded, until each task has seen the mark of its stage, which is there, and has removed its unfinished
    file. In object storage that file does not show before it is whole."""
    clock = SystemClock()
    least = POLL * 2 if output.local else POLL * (2 + EVERY) + _ANSWER
    began = clock.now()
    while clock.now() - began < least or (clock.now() - began < _LEAVE and unfinished(output)):
        clock.sleep(0.05 if output.local else 0.5)


def tidy(job: StageJob) -> None:
    """Mark a cancelled stage, and remove what its tasks leave once they have seen it."""
    mark(job)
    until_tasks_have_left(job.output)
    remove_hidden(job.output)


def tidy_within(seconds: float, job: StageJob) -> None:
    """Tidy in a thread, and wait for that no longer than ``seconds``."""
    thread = threading.Thread(target=tidy, args=(job,), name="ebbflow-cancel", daemon=True)
    thread.start()
    thread.join(seconds)


def rows_of(output: StorageLocation, name: str) -> int | None:
    """Return the rows of a part that is written, a file or a directory of files; ``None`` for one that is not.

    Raises ``OSError``.
    """
    import pyarrow.parquet as pq

    fs = output.fs()
    info = fs.get_file_info(output.path(name))
    if not _is_there(info):
        return None
    found = [info] if info.is_file else files.listing(fs, info.path)
    return sum(int(pq.read_metadata(one.path, filesystem=fs).num_rows) for one in found if one.is_file)


def remove_hidden(output: StorageLocation) -> None:
    """Remove what tasks have left in a stage's directory besides its part files.

    The mark of a cancellation stays: a task may begin only now, and must see it.
    """
    with suppress(OSError):
        for name in names_in(output):
            if name.startswith((".native-", ".part-")):
                with suppress(OSError):
                    if output.local and os.path.isdir(output.path(name)):
                        output.remove_folder(name)
                    else:
                        output.remove(name)


def remove_others(output: StorageLocation, kept: Collection[str]) -> None:
    """Remove what tries of tasks that failed have left of a table's files; those ``kept``, by path, stay."""
    for info in files.listing(output.fs(), output.root, recursive=True):
        if info.is_file and info.path.endswith(".parquet") and info.path not in kept:
            output.fs().delete_file(info.path)


def withdraw(job: StageJob) -> None:
    """Remove the parts that tasks have written, to which Spark SQL would add its own. Raises ``StageFailedError``."""
    try:
        for name in names_in(job.output):
            if name.startswith("part-"):
                job.output.remove(name)
        left = [name for name in names_in(job.output) if name.startswith("part-")]
    except FileNotFoundError:
        return
    except OSError as error:
        raise StageFailedError(
            f"{job.name}: what its native tasks wrote cannot be removed: {error}"
        ) from error
    if left:
        raise StageFailedError(f"{job.name}: what its native tasks wrote is still there: {left[0]}")
