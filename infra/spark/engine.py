"""Spark as a ``SqlEngine``."""

import logging
import threading
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import EngineUnavailableError, StageCancelledError, StageFailedError
from ebbflow.infra.protocols import Relation, StageJob, StageProgress, StageResult
from ebbflow.infra.query.results import count_rows
from ebbflow.infra.spark import checksums as executors
from ebbflow.infra.spark import relations
from ebbflow.infra.spark.failures import chain, first_line, parse, translate
from ebbflow.infra.spark.groupwatch import GroupWatch
from ebbflow.infra.spark.metrics import GroupMetrics, StatusApi, group_metrics
from ebbflow.infra.spark.native.catalyst import NotDoneError, NotNativeError
from ebbflow.infra.spark.native.objects import Mark
from ebbflow.infra.spark.native.probe import WarmUp
from ebbflow.infra.spark.native.stages import Native, NativeStages
from ebbflow.infra.spark.object_storage import missing_client
from ebbflow.infra.spark.relations import Proving
from ebbflow.infra.spark.scheduler.hold import ExecutorHold, drop, hold_of
from ebbflow.infra.spark.scheduler.losses import LostExecutors
from ebbflow.infra.spark.scheduler.pools import Pools
from ebbflow.infra.spark.session import DriverProcess, active_kept, copy_of, start_session, stop_session
from ebbflow.infra.spark.settings import held_shape, settings, stays_on_this_machine
from ebbflow.infra.storage import checksums
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.confinement import AllowedAccess

_POLL = 0.25  # seconds between looks at a running job
_MARKED = 2.0  # s to wait for object storage to have the mark of a cancellation, after its job has ended
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Running:
    job: StageJob
    pool: int
    mark: Mark
    cancelled: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class SparkEngine:
    """Runs statements on one SparkContext. Every job has its own session, job group and scheduler pool.

    An engine is one query's: several may share a context, whose cores they divide by their weights.
    Progress listeners are called from a thread of their own. A job that was finished when its cancellation
    arrived returns its result.

    Raises ``EngineUnavailableError``.
    """

    name: Literal["spark"] = "spark"

    def __init__(
        self,
        session: Any,
        process: DriverProcess | None = None,
        clock: Clock | None = None,
        weight: float = 1.0,
    ) -> None:
        self._session = session
        self._process = process
        self._clock = clock or SystemClock()
        self._owned = process is not None
        context = session.sparkContext
        self._context = context
        self.master: str = context.master
        self.application_id: str = context.applicationId
        if context.uiWebUrl is None:
            raise EngineUnavailableError("Spark's status API is off: set spark.ui.enabled=true")
        self.ui_url: str = context.uiWebUrl
        self._api = StatusApi(self.ui_url, self.application_id)
        self._lock = threading.Lock()
        self._running: dict[str, _Running] = {}
        self._pools = Pools(context, weight)
        self._native = NativeStages(context, owned=self._owned)
        self.warm_up = WarmUp(context, self._native.trouble)
        self._id = uuid.uuid4().hex
        self.shape = held_shape(context) if self._owned else None
        self._hold: ExecutorHold | None = None
        self.lost_executors = LostExecutors(context)
        self._partitions = 0  # shuffle partitions of jobs that name none; 0: Spark's default
        self._closed = False
        self._proving: Proving | None = None
        self._missing: str | None = None  # of Spark's JVM for S3, as far as it was asked
        self._lacking = ""  # the same, where what the engine is confined to is on S3

    @classmethod
    def start(
        cls,
        master: str,
        *,
        app_name: str = "ebbflow",
        memory: str | None = None,
        cores: int | None = None,
        conf: Mapping[str, str] | None = None,
        catalog: bool = False,
        clock: Clock | None = None,
        weight: float = 1.0,
    ) -> "SparkEngine":
        """Start a JVM and connect it to ``master``: ``local[N]``, ``spark://HOST:PORT`` or what Spark takes.

        ``memory`` is an executor's heap ("1400m"; see ``executor_shape``), in local mode the driver's.
        ``cores`` are an executor's; without them it takes all of its worker's, and the application cannot be
        held to a share. An engine of this process that runs with the same settings shares its SparkContext,
        of which Spark allows one; ``weight`` is the query's among those. ``catalog`` opens the Hive metastore
        that ``conf`` or hive-site.xml describes. Raises ``EngineUnavailableError`` within seconds when Java or
        PySpark is missing or nobody listens at the master's address, and within about a minute when whoever
        listens is no master.
        """
        chosen = settings(master, app_name=app_name, memory=memory, cores=cores, conf=conf, catalog=catalog)
        session, process = start_session(chosen)
        return cls(session, process, clock, weight)

    @classmethod
    def attach(cls, session: Any, clock: Clock | None = None, weight: float = 1.0) -> "SparkEngine":
        """Use a SparkSession that belongs to the caller; ``close`` leaves it running, with its executors."""
        return cls(session, None, clock, weight)

    def run(self, job: StageJob, on_progress: Callable[[StageProgress], None] | None = None) -> StageResult:
        running = self._admit(job)
        began = self._clock.now()
        watch = GroupWatch(self._context, self._api, job.id, on_progress)
        watcher = threading.Thread(
            target=self._watch, args=(running, watch), name=f"watch-{job.id}", daemon=True
        )
        watcher.start()
        try:
            with nullcontext() if self._owned else active_kept(self._session):
                columns, native, remark = self._write(running, watch)
            running.done.set()
            watcher.join()
            watch.finish()
            rows = count_rows(job.output, below=job.layout is not None)
            if native is not None and native.rows != rows:
                raise StageFailedError(
                    f"{job.name}: its tasks wrote {native.rows} rows, its files have {rows}"
                )
        except Exception as error:
            running.done.set()
            watcher.join()
            raise self._meaning(error, running, watch) from error
        except BaseException:  # the caller's thread was interrupted: the JVM knows nothing of that
            running.cancelled.set()
            self._cancel_group(job.id)
            raise
        finally:
            running.done.set()
            self._leave(running)
        seconds = self._clock.now() - began
        result = replace(_result(rows, columns, seconds, self._metrics(job, watch)), remark=remark)
        if native is None:
            return result
        return replace(result, native=True, input_bytes=native.read, spilled_bytes=native.spilled)

    def cancel(self, job_id: str) -> None:
        with self._lock:
            running = self._running.get(job_id)
        if running is not None:
            self._stop([running])

    def resize(self, cores: float, memory: float) -> None:
        """Later jobs that name no partitions get four a core of this share. For executors see ``hold``."""
        self._partitions = max(8, round(4 * cores))

    def confine(
        self, relations: Sequence[Relation], folders: Sequence[StorageLocation], everything: bool = False
    ) -> None:
        """Hold native stages; Spark's own statements run with all rights of its driver and its executors."""
        self._lacking = self._lack(relations, folders)
        self._native.confine(AllowedAccess.of(relations, folders, everything))
        self._proving = None if self.native_trouble else Proving(self._job_session, relations)

    def _lack(self, relations: Sequence[Relation], folders: Sequence[StorageLocation]) -> str:
        """Return what Spark's JVM lacks to reach them, and what to do; empty if it lacks nothing."""
        if all(one.scheme == "file" for one in relations) and all(one.local for one in folders):
            return ""
        if self._missing is None:
            self._missing = missing_client(self._context)
        return self._missing

    def spark_sql_obstacle(self) -> str:
        """Return why Spark SQL can run no stage over what the engine is confined to, and what to do; empty if it
        can. Native stages read and write object storage without Spark's JVM."""
        return self._lacking

    def native_obstacle(self) -> str:
        """Return why no stage can run natively; the first call asks an executor, and waits for one."""
        try:
            return self._native.trouble(threading.Event())
        except StageCancelledError:
            return "cancelled"

    @property
    def native_trouble(self) -> str:
        """Return why no stage can run natively, as far as an executor was asked."""
        return self._native.known_trouble

    def hold(self, cores: float | None) -> None:
        """Hold the application to ``cores`` of a standalone cluster, in whole executors; ``None``: to no limit.

        Executors beyond that finish their tasks, hand over their shuffle files and leave. Cheap when nothing
        changes, and to be repeated. Without ``shape`` it does nothing. Raises nothing.
        """
        if self.shape is None or self._closed:
            return
        if self._hold is None:
            if cores is None:
                return
            self._hold = hold_of(self._context, self._api, self.shape.cores)
        self._hold.hold(self._id, cores)

    def checksums(self, scheme: str, entries: Sequence[FileEntry]) -> list[str]:
        """Return the files' checksums (``infra.storage.checksums.of_files``), computed where that is sooner."""
        near = stays_on_this_machine(self.master)
        cores = 0 if near else self._context.defaultParallelism
        reached = scheme == "file" or not self._missing
        if self._closed or not reached or not executors.by_executors(entries, cores, near=near):
            return checksums.of_files(scheme, entries)
        return executors.of_files(self._session, scheme, entries)

    def tables(self, names: Collection[str]) -> Sequence[Relation]:
        """See ``SqlEngine``; tables of the session's catalogues and, where the session was given, its temporary
        views. Raises ``TableError``."""
        return relations.tables(self._session, names)

    def table_list(self) -> Sequence[str]:
        return [table.name for table in self._session.catalog.listTables()]

    def output_names(self, sql: str, tables: Sequence[Relation]) -> tuple[str, ...] | None:
        return relations.output_names(self._job_session(), sql, tables)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            active = list(self._running.values())
        self.warm_up.close()
        self._stop(active)
        deadline = self._clock.now() + 5.0
        for running in active:
            self._clock.wait(running.done, deadline - self._clock.now())
            running.mark.wait(deadline - self._clock.now())
        if self._hold is not None and self._hold.forget(self._id):
            drop(self.application_id)
        self._pools.close()
        if self._owned:
            stop_session(self._session, self._process)

    def __enter__(self) -> "SparkEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one job ------------------------------------------------------------------------------------------

    def _admit(self, job: StageJob) -> _Running:
        with self._lock:
            if self._closed:
                raise EngineUnavailableError("this Spark engine was closed")
            if job.id in self._running:
                raise ValueError(f"job ids must be unique; {job.id!r} is running already")
            running = _Running(job, self._pools.take(), Mark(job))
            self._running[job.id] = running
            return running

    def _job_session(self) -> Any:
        """Return a session for one statement; that of a session that was given has its settings and views."""
        if self._owned:
            session = self._session.newSession()
        else:
            session = copy_of(self._session)
            # the default, nanoseconds in 96 bits, has no year 9999
            session.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        # else Spark puts settings and variables of the environment in the place of ${...}, in literals, too
        session.conf.set("spark.sql.variable.substitute", "false")
        return session

    def _leave(self, running: _Running) -> None:
        with self._lock:
            self._running.pop(running.job.id, None)
            self._pools.give(running.pool)
        running.mark.wait(_MARKED)  # later it would be written into a directory that is gone

    def _write(
        self, running: _Running, watch: GroupWatch
    ) -> tuple[tuple[tuple[str, str], ...], Native | None, str]:
        job = running.job
        context = self._context
        context.setJobGroup(job.id, job.name, interruptOnCancel=True)
        context.setLocalProperty("spark.scheduler.pool", self._pools.name(running.pool))
        try:
            lacking = self._lack(job.relations, [job.output])
            frame = None
            if job.native and self._proving is not None:
                frame = self._proving.frame(job, running.cancelled)
            if frame is None:
                frame = relations.frame_of(self._job_session(), job, lacking=bool(lacking), proven=job.native)
            columns = relations.columns(frame)
            if running.cancelled.is_set():
                raise StageCancelledError(f"{job.name} was cancelled before it began")
            remark = ""
            if job.native or (lacking and job.arms):
                try:
                    return columns, self._native.run(frame, job, columns, running.cancelled, watch.begun), ""
                except NotDoneError as error:
                    if lacking:
                        raise StageFailedError(f"{job.name}: {error}; besides, {lacking}") from error
                    remark = str(error)
                except NotNativeError as error:
                    remark = str(error)
                watch.withdrawn()
            if lacking:  # the frame has no rows
                why = f"; {job.name} runs on Spark SQL, for {remark}" if remark else ""
                raise EngineUnavailableError(f"{lacking}{why}")
            session = self._job_session() if job.native else frame.sparkSession
            if partitions := job.partitions or self._partitions:
                session.conf.set("spark.sql.shuffle.partitions", str(partitions))
            if job.split_bytes:
                session.conf.set("spark.sql.files.maxPartitionBytes", str(job.split_bytes))
            if job.native:  # which looks at the files
                frame = relations.frame_of(session, job)
            relations.write(frame, job)
            return columns, None, remark
        finally:
            self._forget_group()

    def _forget_group(self) -> None:
        # the thread may be the caller's main thread, whose own Spark jobs are none of ours
        try:
            for key in ("spark.jobGroup.id", "spark.job.description", "spark.scheduler.pool"):
                self._context.setLocalProperty(key, None)
            self._context.setLocalProperty("spark.job.interruptOnCancel", None)
        except Exception as error:
            _log.debug("cannot clear the job group: %s", first_line(error))

    def _watch(self, running: _Running, watch: GroupWatch) -> None:
        while not self._clock.wait(running.done, _POLL):
            try:
                watch.look()
                if running.cancelled.is_set() or watch.verdict is not None:
                    self._cancel_group(running.job.id)
            except Exception as error:  # the job's own thread finds out what it means
                _log.debug("cannot look at %s: %s", running.job.id, first_line(error))

    def _stop(self, those: Sequence[_Running]) -> None:
        for running in those:
            running.cancelled.set()
            # jobs that the statement starts after this moment are the watcher's to cancel
            self._cancel_group(running.job.id)
            running.mark.begin()

    def _cancel_group(self, group: str) -> None:
        try:
            self._context.cancelJobGroup(group)
        except Exception as error:  # a JVM that is gone runs nothing
            _log.debug("cannot cancel %s: %s", group, first_line(error))

    def _meaning(self, error: Exception, running: _Running, watch: GroupWatch) -> Exception:
        job = running.job
        if running.cancelled.is_set():
            return StageCancelledError(f"{job.name} was cancelled")
        if isinstance(error, (EngineUnavailableError, StageCancelledError, StageFailedError)):
            return error
        links = parse(watch.verdict) if watch.verdict is not None else chain(error)
        return translate(links, stage=job.name, sql=job.sql)

    def _metrics(self, job: StageJob, watch: GroupWatch) -> GroupMetrics:
        try:
            return group_metrics(self._api, watch.stages(), self._clock)
        except Exception as error:  # the work is done and durable: figures about it are not worth its loss
            _log.warning("no metrics of %s: %s", job.name, first_line(error))
            return GroupMetrics()


def _result(
    rows: int, columns: tuple[tuple[str, str], ...], seconds: float, metrics: GroupMetrics
) -> StageResult:
    return StageResult(
        rows=rows,
        columns=columns,
        seconds=seconds,
        task_seconds=metrics.task_seconds,
        tasks=metrics.tasks,
        failed_tasks=metrics.failed_tasks,
        retried_stages=metrics.retried_stages,
        shuffle_bytes=metrics.shuffle_bytes,
        spilled_bytes=metrics.spilled_bytes,
        input_bytes=metrics.input_bytes,
    )
