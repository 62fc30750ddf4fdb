"""Spark Connect as a ``SqlEngine``.

Such a session runs SQL and tells what that gives. It has no RDDs, so no native stages, and tells nothing of
executors, notices, decommissioning, or how long tasks take.
"""

import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import EngineUnavailableError, StageCancelledError, StageFailedError
from ebbflow.infra.protocols import Relation, StageJob, StageProgress, StageResult
from ebbflow.infra.query.local import LocalCapacity
from ebbflow.infra.query.results import count_rows
from ebbflow.infra.spark import relations
from ebbflow.infra.spark.connect.session import (
    SCHEME,
    address,
    end_session,
    hurry,
    limit,
    limited,
    server_gone,
    translated,
)
from ebbflow.infra.spark.failures import first_line
from ebbflow.infra.spark.relations import hadoop_uri, location
from ebbflow.infra.spark.settings import ExecutorShape, is_local
from ebbflow.infra.storage import files, private
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError

WITHOUT = (
    "Spark Connect tells of no executors, notices or tasks' times: the plan counts on the {cores} cores that the "
    "server has now, whatever becomes of them"
)
NOT_NATIVE = "Spark Connect runs SQL only"
_ZONE = "spark.sql.session.timeZone"
_POLL = 0.25  # seconds between requests to interrupt what was cancelled
_KEPT = 600.0  # seconds after which a session is asked something: servers forget one that is idle for an hour
_LEAVING = 5.0  # seconds to wait for a watcher, which may wait for a server that does not answer
_SETTINGS = {
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # nanoseconds in 96 bits have no year 9999
    # else Spark puts settings and variables of the environment in the place of ${...}, in literals, too
    "spark.sql.variable.substitute": "false",
}
_DENIED = re.compile(r"Permission denied|AccessControlException|Mkdirs failed")
_OTHER_ACCOUNT = (
    "if the server at {server} runs under another account, share a group with it: "
    f"{private.SHARE}=group here, a store that is made by install -d -m 2770 -g GROUP DIRECTORY, and "
    "spark.hadoop.fs.permissions.umask-mode=007 where the server is started"
)
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Running:
    job: StageJob
    cancelled: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    session: Any = None  # the job's own
    seen: tuple[int, int] = (0, 0)  # tasks, bytes read


class ConnectEngine:
    """Runs statements in one session of Spark Connect; each job has a clone of it, with its views and settings.

    The session stays its owner's. What a job writes, this process must see: the store is one that both reach.
    """

    name: Literal["spark"] = "spark"

    def __init__(self, session: Any, clock: Clock | None = None) -> None:
        """Raises ``EngineUnavailableError``."""
        self._clock = clock or SystemClock()
        self.address = address(session)
        self._owner = limited(session)
        with translated("the start", self.address):
            self._owner.conf.get(_ZONE)  # a clone does not tell of a session that a new server has made anew
            self._session = self._owner.cloneSession()
            limit(self._session)
        self._asked = self._clock.now()  # when the sessions that outlive jobs were last asked something
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self._partitions = 0  # shuffle partitions of jobs that name none; 0: Spark's default
        self._closed = False

    def capacity(self, hazard: float = 0.0) -> LocalCapacity:
        """Return the server's cores and memory now, as one node that stays as it is.

        ``hazard``: expected losses per node-hour. Raises ``EngineUnavailableError``.
        """
        with translated("the start", self.address):
            session = self._clone()
            try:
                # Spark cuts a range into as many parts as there are cores
                text = "SELECT DISTINCT part FROM (SELECT spark_partition_id() AS part FROM range(0, 100000))"
                cores = int(session.sql(text).toArrow().num_rows)
                master = session.conf.get("spark.master", "") or ""
                key = "spark.driver.memory" if is_local(master) else "spark.executor.memory"
                heap = session.conf.get(key, "1g") or "1g"
                each = session.conf.get("spark.executor.cores", "") or ""
            finally:
                end_session(session)
        executors = ceil(cores / int(each)) if each.isdigit() and int(each) and not is_local(master) else 1
        try:
            memory = executors * ExecutorShape(1, heap).usable_memory
        except OptionError:  # Spark knows notations that we do not
            memory = executors * ExecutorShape(1, "1g").usable_memory
        return LocalCapacity(
            max(1, cores), memory, self._clock, node=self.address.removeprefix(SCHEME), hazard=hazard
        )

    def native_obstacle(self) -> str:
        """Return why no stage runs natively."""
        return NOT_NATIVE

    def run(self, job: StageJob, on_progress: Callable[[StageProgress], None] | None = None) -> StageResult:
        running = self._admit(job)
        began = self._clock.now()
        watcher = threading.Thread(target=self._watch, args=(running,), name=f"watch-{job.id}", daemon=True)
        watcher.start()
        try:
            with translated(job.name, self.address, job.sql):
                columns = self._write(running, on_progress)
            rows = self._rows(job)
        except Exception as error:
            if running.cancelled.is_set():
                raise StageCancelledError(f"{job.name} was cancelled") from error
            if isinstance(error, StageFailedError) and job.output.local and _DENIED.search(_whole(error)):
                raise StageFailedError(f"{error}; {_OTHER_ACCOUNT.format(server=self.address)}") from error
            raise
        except BaseException:  # the caller's thread was interrupted: the server knows nothing of that
            running.cancelled.set()
            self._interrupt(running)
            raise
        finally:
            running.done.set()
            with self._lock:
                self._running.pop(job.id, None)
            watcher.join(_LEAVING)
            if running.session is not None:
                end_session(running.session)
        tasks, read = running.seen  # nothing where all came and went between two of the server's messages
        remark = NOT_NATIVE if job.native else ""
        return StageResult(
            rows, columns, self._clock.now() - began, 0.0, max(1, tasks), input_bytes=read, remark=remark
        )

    def cancel(self, job_id: str) -> None:
        with self._lock:
            running = self._running.get(job_id)
        if running is not None:
            running.cancelled.set()  # the watcher tells the server, which may not answer

    def resize(self, cores: float, memory: float) -> None:
        """Later jobs that name no partitions get four a core of this share; the server divides its cores itself."""
        self._partitions = max(8, round(4 * cores))

    def confine(
        self, relations: Sequence[Relation], folders: Sequence[StorageLocation], everything: bool = False
    ) -> None:
        """Statements run with all rights of the server. Raises ``EngineUnavailableError`` for object storage that it
        has no client for."""
        remote = [
            location(one.scheme, f.path) for one in relations if one.scheme == "s3" for f in one.files[:1]
        ]
        remote += [hadoop_uri(one.uri) for one in folders if not one.local]
        if not remote:
            return
        try:
            with translated("the start", self.address):
                session = self._clone()
                try:
                    session.read.schema("a INT").parquet(remote[0]).columns  # noqa: B018  looks for the client first
                finally:
                    end_session(session)
        except StageFailedError as error:  # there is no such file, or no right to it: stages will say so
            _log.debug("%s: %s", remote[0], error)

    def tables(self, names: Collection[str]) -> Sequence[Relation]:
        return relations.tables(self._session, names, lambda error: server_gone(error, self.address))

    def table_list(self) -> Sequence[str]:
        with translated("the list of tables", self.address):
            return [table.name for table in self._session.catalog.listTables()]

    def output_names(self, sql: str, tables: Sequence[Relation]) -> tuple[str, ...] | None:
        with translated("the names of columns", self.address):
            session = self._clone()
            try:
                return relations.output_names(session, sql, tables)
            finally:
                end_session(session)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            active = list(self._running.values())
        for running in active:
            running.cancelled.set()
        deadline = self._clock.now() + 5.0
        for running in active:
            self._clock.wait(running.done, deadline - self._clock.now())
        end_session(self._session)

    # --- one job ------------------------------------------------------------------------------------------

    def _admit(self, job: StageJob) -> _Running:
        with self._lock:
            if self._closed:
                raise EngineUnavailableError("this Spark Connect engine was closed")
            if job.id in self._running:
                raise ValueError(f"job ids must be unique; {job.id!r} is running already")
            running = _Running(job)
            self._running[job.id] = running
            return running

    def _clone(self) -> Any:
        """Return a session for one statement, with the settings and views of the one that all come from."""
        session = self._session.cloneSession()
        limit(session)
        for key, value in _SETTINGS.items():
            session.conf.set(key, value)
        return session

    def _write(
        self, running: _Running, on_progress: Callable[[StageProgress], None] | None
    ) -> tuple[tuple[str, str], ...]:
        job = running.job
        session = running.session = self._clone()
        if partitions := job.partitions or self._partitions:
            session.conf.set("spark.sql.shuffle.partitions", str(partitions))
        if job.split_bytes:
            session.conf.set("spark.sql.files.maxPartitionBytes", str(job.split_bytes))
        for relation in job.relations:
            relations.register(session, relation)
        frame = relations.storable(session.sql(job.sql))
        columns = relations.columns(frame)
        if running.cancelled.is_set():
            raise StageCancelledError(f"{job.name} was cancelled before it began")
        reporter = _Reporter(running, on_progress)
        session.registerProgressHandler(reporter)
        relations.write(frame, job)
        reporter.finish()
        return columns

    def _rows(self, job: StageJob) -> int:
        if job.output.local:  # as private as all that is kept, where this process may make them so
            for file in files.listing(job.output.fs(), job.output.root, recursive=True):
                with suppress(OSError):
                    if file.is_file:
                        private.seal(file.path)
        try:
            return count_rows(job.output, below=job.layout is not None)
        except StageFailedError as error:
            raise StageFailedError(
                f"{error}; the store must be a directory that both this process and the server at {self.address} "
                "reach, such as s3://BUCKET/DIRECTORY or a shared file system"
            ) from error

    def _watch(self, running: _Running) -> None:
        """Interrupt what was cancelled, also what it starts only then, and have the server keep the sessions."""
        while not self._clock.wait(running.done, _POLL):
            if running.cancelled.is_set():
                self._interrupt(running)
            else:
                self._keep()

    def _keep(self) -> None:
        """Have the server keep the owner's session and that which jobs' come from, however long the query takes."""
        with self._lock:
            if self._clock.now() - self._asked <= _KEPT:
                return
            self._asked = self._clock.now()
        for session in (self._owner, self._session):
            with suppress(Exception):  # the job's own thread finds out what it means
                session.conf.get(_ZONE)

    def _interrupt(self, running: _Running) -> None:
        session = running.session
        if session is None:
            return
        try:
            hurry(session)  # it is the job's own
            session.interruptAll()
        except Exception as error:  # a server that is gone runs nothing
            _log.debug("cannot cancel %s: %s", running.job.id, first_line(error))


def _whole(error: BaseException) -> str:
    """Return what an error and its cause say."""
    return f"{error} {error.__cause__ or ''}"


class _Reporter:
    """A progress handler of PySpark's: passes on what the server tells of a job."""

    def __init__(self, running: _Running, on_progress: Callable[[StageProgress], None] | None) -> None:
        self._running = running
        self._on_progress = on_progress

    def __call__(
        self, stages: Iterable[Any] | None, inflight_tasks: int, operation_id: str | None, done: bool
    ) -> None:
        known = list(stages or ())
        if not known:
            return
        tasks, finished = sum(s.num_tasks for s in known), sum(s.num_completed_tasks for s in known)
        self._running.seen = (tasks, sum(s.num_bytes_read for s in known))
        self._report(StageProgress(tasks, finished, 0, inflight_tasks))

    def finish(self) -> None:
        """Report that everything is done, also what came and went between two of the server's messages."""
        total = max(1, self._running.seen[0])
        self._report(StageProgress(total, total, 0, 0))

    def _report(self, progress: StageProgress) -> None:
        if self._on_progress is None:
            return
        try:
            self._on_progress(progress)
        except Exception:  # a listener's mistake must not lose the work it listens to
            _log.exception("the progress listener of %s failed; it is not called again", self._running.job.id)
            self._on_progress = None
