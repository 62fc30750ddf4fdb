"""The cluster, the one Spark application that all systems share, and the tables they read."""

import os
import sys
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from ebbflow.infra.clock import Clock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
from ebbflow.infra.spark.cluster.options import parse_memory
from ebbflow.infra.spark.failures import first_line
from ebbflow.infra.spark.master_api import get_executors, new_client
from ebbflow.infra.spark.metrics import StatusApi
from ebbflow.infra.spark.relations import quoted
from ebbflow.infra.spark.session import start_session, stop_session
from ebbflow.infra.spark.settings import executor_memory, settings
from tests.benchmarks.sql.cases import Suite
from tests.benchmarks.sql.faults import up
from tests.benchmarks.sql.metrics import quiet

_ARRIVAL = 120.0  # seconds for executors to register
_LOOK = 0.2
_WARM_BYTES = 64 << 20  # the largest table that every executor reads before a run
_WARM_TRIES = 5
# What all systems share because a SparkContext has it once. It favours plain Spark: with Spark's own values a
# query fails after four attempts of a stage, and a reader of a lost shuffle file gives up after 15 s, not 3.
_SHARED = {
    "spark.ui.retainedJobs": "3000",
    "spark.ui.retainedStages": "3000",
    "spark.ui.retainedTasks": "200000",
    "spark.sql.ui.retainedExecutions": "300",
    # with Spark's 100, compiled code of one query drives out that of another, and which it meets is chance
    "spark.sql.codegen.cache.maxEntries": "10000",
    # ranges read ahead by other threads are missing from Spark's input metrics; they gain only on S3
    "spark.hadoop.parquet.hadoop.vectored.io.enabled": "false",
}
# SQL settings of Ebbflow's that change what is written and not how fast, or that a session cannot change
_KEPT = frozenset({"spark.sql.session.timeZone", "spark.sql.parquet.outputTimestampType"})
# What a user sets who knows the size of the cluster and of the tables
TUNED_SETTINGS = {
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.autoBroadcastJoinThreshold": str(64 << 20),
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.files.maxPartitionBytes": "128m",
}
PLAIN_DATABASE = "plain_{}"
ANALYSED_DATABASE = "analysed_{}"


@dataclass(frozen=True, slots=True)
class RigOptions:
    """How large the cluster is."""

    workers: int = 3
    cpus: float = 0.5  # of this machine, for each worker; Spark is told one core
    memory: str = "2g"  # of each worker
    conf: Mapping[str, str] | None = None  # further Spark settings, for all systems
    java_options: str = ""  # of executors, unless ``conf`` has some


class TestCluster:
    """A running cluster with one application on it. Made by ``started_rig``."""

    __test__ = False  # no test, whatever its name begins with

    def __init__(self, cluster: LocalSparkCluster, session: Any, options: RigOptions, clock: Clock) -> None:
        self.cluster = cluster
        self.session = session
        self.options = options
        self.clock = clock
        self.context = session.sparkContext
        self.ui: str = self.context.uiWebUrl
        self.application: str = self.context.applicationId
        self.api = StatusApi(self.ui, self.application)
        self._client = new_client(5.0)
        self._warm: Any = None

    def plain_session(self, suite: Suite, *, analysed: bool = False, tuned: bool = False) -> Any:
        """Return a new SQL session with Spark's own settings, on the suite's tables.

        ``analysed``: on the tables with statistics, and with the cost-based optimiser and join reordering on.
        ``tuned``: with settings that suit the cluster.
        """
        session = self.session.newSession()
        kept = _KEPT | set(self.options.conf or {})
        for key in settings(self.cluster.master_url, app_name=""):
            if key.startswith("spark.sql.") and key not in kept and session.conf.isModifiable(key):
                session.conf.unset(key)
        if analysed:
            for key in ("cbo.enabled", "cbo.planStats.enabled", "cbo.joinReorder.enabled"):
                session.conf.set(f"spark.sql.{key}", "true")
        if tuned:
            for key, value in TUNED_SETTINGS.items():
                session.conf.set(key, value)
        name = ANALYSED_DATABASE if analysed else PLAIN_DATABASE
        session.catalog.setCurrentDatabase(name.format(suite))
        return session

    def register(self, suite: Suite, relations: Sequence[Relation], folder: Path, *, analyse: bool) -> None:
        """Make the tables known to plain Spark: without statistics, and if ``analyse`` also with them.

        Raises ``ClusterError`` when Spark does not keep the statistics.
        """
        for name in (PLAIN_DATABASE, ANALYSED_DATABASE):
            database = quoted(name.format(suite))
            place = (folder / name.format(suite)).as_uri()
            self.session.sql(f"CREATE DATABASE IF NOT EXISTS {database} LOCATION '{place}'")
        for relation in relations:
            self._create(PLAIN_DATABASE.format(suite), relation)
            if analyse:
                database = ANALYSED_DATABASE.format(suite)
                self._create(database, relation)
                table = f"{quoted(database)}.{quoted(relation.name)}"
                self.session.sql(f"ANALYZE TABLE {table} COMPUTE STATISTICS FOR ALL COLUMNS")
                column = quoted(relation.columns[0][0])
                rows = self.session.sql(f"DESCRIBE EXTENDED {table} {column}").collect()
                kept = {row.info_name: row.info_value for row in rows}
                if kept.get("distinct_count", "NULL") == "NULL":
                    raise ClusterError(
                        f"Spark keeps no statistics of {relation.name}.{relation.columns[0][0]}"
                    )

    def _create(self, database: str, relation: Relation) -> None:
        first = relation.files[0].path
        place = Path(first) if len(relation.files) == 1 else Path(first).parent
        self.session.sql(
            f"CREATE TABLE IF NOT EXISTS {quoted(database)}.{quoted(relation.name)} USING parquet "
            f"LOCATION '{place.as_uri()}'"
        )

    def warm_with(self, suite: Suite, relations: Sequence[Relation]) -> None:
        """Choose the table that ``restore`` lets every executor read: the largest up to 64 MiB."""
        small = [r for r in relations if r.bytes <= _WARM_BYTES] or list(relations)
        self._warm = (suite, max(small, key=lambda r: r.bytes))

    def restore(self) -> None:
        """Bring the cluster back to all its workers, each with an executor that has worked a little.

        Raises ``ClusterError`` when that takes too long.
        """
        for node in self.cluster.status().nodes:
            if node.state in ("noticed", "starting"):
                self.cluster.kill(node.id)
        missing = self.options.workers - len(up(self.cluster))
        if missing > 0:
            with ThreadPoolExecutor(missing) as pool:
                list(pool.map(lambda _: self.cluster.add(), range(missing)))
        self._await_executors()
        if not quiet(self.api, self.clock, _ARRIVAL):
            raise ClusterError(f"Spark still runs stages {_ARRIVAL:g} s after a query ended")
        for _ in range(_WARM_TRIES):
            if self._worked() >= self._hosts():
                return
        raise ClusterError("an executor takes no tasks although it is registered")

    def serving(self, nodes: Collection[str]) -> bool:
        """Tell whether the application has executors on all these workers."""
        return {self.cluster.state.node(node).host for node in nodes} <= set(self._registered())

    def _registered(self) -> list[str]:
        """Return the hosts of the registered executors, once for each, in order; none if Spark does not answer."""
        try:
            found = get_executors(self._client, self.ui, self.application)
        except (httpx.HTTPError, ValueError):
            return []
        return sorted(e.host for e in found if e.active and not e.driver and e.max_memory > 0)

    def _await_executors(self) -> None:
        end = self.clock.now() + _ARRIVAL
        while True:
            ready = self._registered()
            if ready == sorted(self._hosts()):
                return
            if self.clock.now() >= end:
                raise ClusterError(
                    f"executors on {', '.join(ready) or 'no host'} after {_ARRIVAL:g} s; "
                    f"workers are on {', '.join(sorted(self._hosts()))}"
                )
            self.clock.sleep(_LOOK)

    def _hosts(self) -> set[str]:
        state = self.cluster.state
        return {state.node(node).host for node in up(self.cluster)}

    def _worked(self) -> set[str]:
        """Let the executors scan, hash and shuffle a table, and return the hosts that did."""
        from pyspark.sql import functions as f

        suite, relation = self._warm
        group = f"warm-{uuid.uuid4().hex[:8]}"
        session = self.plain_session(suite)
        pieces = 4 * self.options.workers
        session.conf.set("spark.sql.files.maxPartitionBytes", str(max(1 << 20, relation.bytes // pieces)))
        session.conf.set("spark.sql.shuffle.partitions", str(pieces))
        session.conf.set("spark.sql.adaptive.coalescePartitions.enabled", "false")
        self.context.setJobGroup(group, "warm up")
        watchdog = Watchdog(_ARRIVAL, lambda: self.context.cancelJobGroup(group), self.clock)
        try:
            with watchdog:
                frame = session.table(quoted(relation.name))
                key = f.pmod(f.xxhash64(*frame.columns), f.lit(4096)).alias("k")
                frame.select(key).groupBy("k").count().agg({"count": "max"}).collect()
        except Exception as error:  # PySpark raises several kinds
            raise ClusterError(f"the warm-up failed: {first_line(error)}") from error
        finally:
            self.forget_group()
        jobs = self.context.statusTracker().getJobIdsForGroup(group)
        infos = [i for i in map(self.context.statusTracker().getJobInfo, jobs) if i is not None]
        stages = {s for info in infos for s in info.stageIds}
        answers = self.api.get(f"stages/{s}?details=true" for s in stages)
        attempts = [a for answer in answers for a in answer or ()]
        return {t["host"] for a in attempts for t in a.get("tasks", {}).values() if t["status"] == "SUCCESS"}

    def forget_group(self) -> None:
        """Let later jobs of this thread belong to no group."""
        for key in ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel"):
            self.context.setLocalProperty(key, None)

    def close(self) -> None:
        self._client.close()


@contextmanager
def started_rig(options: RigOptions, clock: Clock) -> Iterator[TestCluster]:
    """Start cluster and application; both end with the block. Raises ``EbbflowError``."""
    name = f"bench-{uuid.uuid4().hex[:6]}"
    cluster = LocalSparkCluster.start(
        name, workers=options.workers, cores=1, memory=options.memory, cpus=options.cpus, clock=clock
    )
    with cluster:
        conf = _SHARED | {"spark.executor.extraJavaOptions": options.java_options} | dict(options.conf or {})
        heap = executor_memory(parse_memory(options.memory) / 1024)
        chosen = settings(cluster.master_url, app_name="ebbflow-bench", memory=heap, conf=conf)
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)  # native stages need what is installed here
        session, process = start_session(chosen)
        rig = TestCluster(cluster, session, options, clock)
        try:
            yield rig
        finally:
            rig.close()
            stop_session(session, process)


class Watchdog:
    """Calls ``act`` again and again from ``seconds`` after its start on, until it is left."""

    def __init__(self, seconds: float, act: Any, clock: Clock) -> None:
        self.fired = False
        self._seconds = seconds
        self._act = act
        self._clock = clock
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ebbflow-bench-watchdog", daemon=True)

    def _run(self) -> None:
        wait = self._seconds
        while not self._clock.wait(self._stop, wait):
            self.fired = True
            self._act()
            wait = 1.0

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30.0)
