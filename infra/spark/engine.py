"""Spark as a ``SqlEngine``."""

import heapq
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import EngineUnavailableError, StageCancelledError
from ebbflow.infra.outputs import count_rows
from ebbflow.infra.protocols import Relation, StageJob, StageProgress, StageResult
from ebbflow.infra.spark import relations
from ebbflow.infra.spark.failures import chain, first_line, parse, translate
from ebbflow.infra.spark.groupwatch import GroupWatch
from ebbflow.infra.spark.metrics import GroupMetrics, StatusApi, group_metrics
from ebbflow.infra.spark.session import DriverProcess, start_session, stop_session
from ebbflow.infra.spark.settings import settings

_POLL = 0.25  # seconds between looks at a running job
_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Running:
    job: StageJob
    pool: int
    cancelled: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)


class SparkEngine:
    """Runs statements on one SparkContext. Every job has its own session, job group and scheduler pool.

    ``StageJob.memory_limit`` has no effect: an executor's memory is fixed when it starts. Progress listeners
    are called from a thread of their own. A job that was finished when its cancellation arrived returns
    its result.
    """

    name: Literal["spark"] = "spark"

    def __init__(
        self, session: Any, process: DriverProcess | None = None, clock: Clock | None = None
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
        self._pools: list[int] = []  # free scheduler pools below _pool_count
        self._pool_count = 0
        self._partitions = 0  # shuffle partitions of jobs that name none; 0: Spark's default
        self._closed = False

    @classmethod
    def start(
        cls,
        master: str,
        *,
        app_name: str = "ebbflow",
        memory: str | None = None,
        conf: Mapping[str, str] | None = None,
        catalog: bool = False,
        clock: Clock | None = None,
    ) -> "SparkEngine":
        """Start a JVM and connect it to ``master``: ``local[N]``, ``spark://HOST:PORT`` or what Spark takes.

        ``memory`` is an executor's heap ("1400m"; see ``executor_memory``), in local mode the driver's.
        ``catalog`` opens the Hive metastore that ``conf`` or hive-site.xml describes. Raises
        ``EngineUnavailableError`` within seconds when Java or PySpark is missing or nobody listens at the
        master's address, and within about a minute when whoever listens is no master.
        """
        chosen = settings(master, app_name=app_name, memory=memory, conf=conf, catalog=catalog)
        session, process = start_session(chosen)
        return cls(session, process, clock)

    @classmethod
    def attach(cls, session: Any, clock: Clock | None = None) -> "SparkEngine":
        """Use a SparkSession that belongs to the caller; ``close`` leaves it running."""
        return cls(session, None, clock)

    def run(self, job: StageJob, on_progress: Callable[[StageProgress], None] | None = None) -> StageResult:
        running = self._admit(job)
        began = self._clock.now()
        watch = GroupWatch(self._context, self._api, job.id, on_progress)
        watcher = threading.Thread(
            target=self._watch, args=(running, watch), name=f"watch-{job.id}", daemon=True
        )
        watcher.start()
        try:
            columns = self._write(running)
            running.done.set()
            watcher.join()
            watch.finish()
            rows = count_rows(job.output_uri)
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
        return _result(rows, columns, seconds, self._metrics(job, watch))

    def cancel(self, job_id: str) -> None:
        with self._lock:
            running = self._running.get(job_id)
        if running is not None:
            running.cancelled.set()
            # jobs that the statement starts after this moment are the watcher's to cancel
            self._cancel_group(job_id)

    def resize(self, cores: float, memory: float) -> None:
        """Later jobs that name no partitions get four a core of this share.

        Executors cannot be capped here: they are given and taken by the cluster.
        """
        self._partitions = max(8, round(4 * cores))

    def tables(self) -> Sequence[Relation]:
        """Return the tables of all databases; those outside the current one as ``database.table``."""
        catalogue = self._session.catalog
        current = catalogue.currentDatabase()
        found = []
        for database in catalogue.listDatabases():
            for table in catalogue.listTables(database.name):
                if table.isTemporary:
                    continue
                name = table.name if database.name == current else f"{database.name}.{table.name}"
                try:
                    frame = self._session.table(
                        f"{relations.quoted(database.name)}.{relations.quoted(table.name)}"
                    )
                    found.append(Relation(name, "file", (), relations.columns(frame), external=True))
                except Exception as error:
                    _log.warning("table %s cannot be read and is left out: %s", name, first_line(error))
        return sorted(found, key=lambda relation: relation.name)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            active = list(self._running.values())
        for running in active:
            running.cancelled.set()
            self._cancel_group(running.job.id)
        deadline = self._clock.now() + 5.0
        for running in active:
            self._clock.wait(running.done, deadline - self._clock.now())
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
            if not self._pools:
                self._pools.append(self._pool_count)
                self._pool_count += 1
            running = _Running(job, heapq.heappop(self._pools))
            self._running[job.id] = running
            return running

    def _leave(self, running: _Running) -> None:
        with self._lock:
            self._running.pop(running.job.id, None)
            heapq.heappush(self._pools, running.pool)

    def _write(self, running: _Running) -> tuple[tuple[str, str], ...]:
        job = running.job
        context = self._context
        context.setJobGroup(job.id, job.name, interruptOnCancel=True)
        # Within one pool Spark runs jobs first come, first served. A pool a job makes them share the cores;
        # numbers are used again, since Spark keeps every pool it has heard of.
        context.setLocalProperty("spark.scheduler.pool", f"ebbflow-{running.pool}")
        try:
            session = self._session.newSession()
            partitions = job.partitions or self._partitions
            if partitions:
                session.conf.set("spark.sql.shuffle.partitions", str(partitions))
            for relation in job.relations:
                relations.register(session, relation)
            frame = relations.storable(session.sql(job.sql))
            columns = relations.columns(frame)
            if running.cancelled.is_set():
                raise StageCancelledError(f"{job.name} was cancelled before it began")
            frame.write.mode("append").parquet(relations.hadoop_uri(job.output_uri))
            return columns
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

    def _cancel_group(self, group: str) -> None:
        try:
            self._context.cancelJobGroup(group)
        except Exception as error:  # a JVM that is gone runs nothing
            _log.debug("cannot cancel %s: %s", group, first_line(error))

    def _meaning(self, error: Exception, running: _Running, watch: GroupWatch) -> Exception:
        job = running.job
        if running.cancelled.is_set():
            return StageCancelledError(f"{job.name} was cancelled")
        if isinstance(error, (EngineUnavailableError, StageCancelledError)):
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
