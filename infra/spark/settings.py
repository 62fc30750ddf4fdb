"""Spark's settings for capacity that comes and goes."""

import ipaddress
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ebbflow.infra.machine.network import registry
from ebbflow.infra.query.local import machine_memory
from ebbflow.infra.spark.native.probe import DAEMON
from ebbflow.infra.storage.private import hadoop_umask
from ebbflow.planners.errors import OptionError

_OWN_FAILURES = 64  # bound on task failures and stage attempts; see ``settings``
LEAST_MEMORY = 256  # MiB of DuckDB's in a task
_PART_OF_HEAP = 0.5  # memory of DuckDB's on an executor whose ``spark.executor.pyspark.memory`` is not set
_PART_OF_MACHINE = 0.4  # likewise of this machine, in local mode
_MOST_EXECUTORS = 8  # a worker: the unit in which queries share it is its cores over this at the finest
_BROADCAST = 0.05  # of an executor's usable memory; see ``broadcast_limit``
_LEAST_MEMORY = 2.0  # GiB of a worker for each executor: what the JVM itself takes of less hurts


def executor_memory(worker_memory: float) -> str:
    """Return the executor heap (Spark's notation) that suits a standalone worker of ``worker_memory`` GiB.

    A standalone master compares the heap alone with the worker's memory, but the process also needs room
    for metaspace, thread stacks, code and network buffers: about 400 MiB, or 30 % on large workers.

    >>> executor_memory(2.0)
    '1400m'
    """
    mib = worker_memory * 1024
    heap = int(min(mib - 384, 0.7 * mib))
    return f"{max(heap - heap % 100, 500)}m"


@dataclass(frozen=True, slots=True)
class ExecutorShape:
    """The size of every executor of an application."""

    cores: int
    heap: str  # Spark's notation

    def fit(self, cores: int, memory: int) -> int:
        """Return how many of these a worker with ``cores`` and ``memory`` MiB carries."""
        return min(cores // self.cores, memory // mebibytes(self.heap))

    @property
    def usable_memory(self) -> float:
        """Return what the tasks and the cache of one executor share, GiB, at Spark's default fractions.

        300 MiB are reserved, 60 % of the rest are Spark's to manage; the collectors keep some 4 % for themselves.
        """
        return max(0.96 * mebibytes(self.heap) - 300, 64) * 0.6 / 1024


def held_shape(context: Any) -> ExecutorShape | None:
    """Return the executors of a SparkContext that can be held to a share; ``None`` where it cannot be."""
    conf = context.getConf()
    cores = conf.get("spark.executor.cores")
    dynamic = conf.get("spark.dynamicAllocation.enabled", "false") == "true"
    if not context.master.startswith("spark://") or not cores or dynamic:
        return None
    heap = conf.get("spark.executor.memory", "1g")
    try:
        mebibytes(heap)
    except OptionError:  # the application runs; only its part of a worker is unknown
        return None
    return ExecutorShape(int(cores), heap)


def executor_shape(cores: int, memory: float) -> ExecutorShape:
    """Return the executors for standalone workers of ``cores`` and ``memory`` GiB that several queries share.

    An application's part of a cluster changes by whole executors, so small ones divide finer; but each has
    overheads and its own copy of every broadcast. So a worker carries at most eight, and one for each 2 GiB,
    and all its cores are used.

    >>> executor_shape(4, 4.0)
    ExecutorShape(cores=2, heap='1400m')
    """
    most = max(1, min(cores, _MOST_EXECUTORS, int(memory / _LEAST_MEMORY)))
    count = next(n for n in range(most, 0, -1) if cores % n == 0)
    return ExecutorShape(cores // count, executor_memory(memory / count))


def mebibytes(text: str) -> int:
    """Return MiB of a size in Spark's notation (``1400m``, ``2g``; a bare number means MiB).

    Raises ``OptionError``.
    """
    found = re.fullmatch(r"([0-9]{1,15})([kmgt]?)b?", text.strip().lower())
    if found is None:
        raise OptionError(f"a size must look like 1400m or 2g; got {text!r}")
    return int(int(found[1]) * {"k": 1 / 1024, "": 1, "m": 1, "g": 1024, "t": 1024**2}[found[2]])


def is_local(master: str) -> bool:
    """Tell whether ``master`` means this process' own JVM (``local``, ``local[4]``, ``local[*, 2]``)."""
    return master == "local" or master.startswith("local[")


def spill_folders(master: str, conf: Any) -> list[Path]:
    """Return where killed tasks may leave what they have spilled, if it is this process' to remove: elsewhere the
    next task does it, or Spark with the executor."""
    if not is_local(master):
        return []
    said = os.environ.get("SPARK_LOCAL_DIRS") or conf.get("spark.local.dir", "")
    bases = (said or tempfile.gettempdir()).split(",")
    return [folder for base in bases for folder in Path(base).glob("blockmgr-*")]


def addresses(master: str) -> list[tuple[str, int]]:
    """Return host and port of every master in a ``spark://`` URL, which may list several; else nothing.

    >>> addresses("spark://10.0.0.1:7077,10.0.0.2:7077")
    [('10.0.0.1', 7077), ('10.0.0.2', 7077)]
    """
    if not master.startswith("spark://"):
        return []
    found = []
    for part in master.removeprefix("spark://").split(","):
        host, _, port = part.strip().rpartition(":")
        if not host or not port.isdigit():
            host, port = part.strip(), "7077"
        found.append((host.strip("[]"), int(port)))
    return found


def is_loopback(host: str) -> bool:
    """Tell whether ``host`` names this machine through its loopback interface."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def stays_on_this_machine(master: str) -> bool:
    """Tell whether driver and executors can talk through the loopback interface."""
    hosts = addresses(master)
    return is_local(master) or (bool(hosts) and all(is_loopback(host) for host, _ in hosts))


def has_nodes_here(master: str) -> bool:
    """Tell whether all executors are on this machine: on its loopback interface, or nodes of a network of its own."""
    hosts = addresses(master)
    return stays_on_this_machine(master) or (
        bool(hosts) and all(registry.contains(host) for host, _ in hosts)
    )


def settings(
    master: str,
    *,
    app_name: str,
    memory: str | None = None,
    cores: int | None = None,
    conf: Mapping[str, str] | None = None,
    catalog: bool = False,
    environment: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return the whole configuration of a SparkContext.

    ``memory`` is the heap of an executor, which in local mode is the driver's; ``cores`` are an executor's,
    by default all of its worker's. ``conf`` overrides all but what the engine itself relies on (status API,
    job scheduling).
    """
    chosen = _defaults() | _storage(environment)
    if is_local(master):
        chosen["spark.driver.memory"] = memory or _local_heap()
    else:
        chosen["spark.driver.memory"] = "2g"  # builds broadcasts, whose tables may weigh several 100 MiB
        if memory:
            chosen["spark.executor.memory"] = memory
        if cores:
            chosen["spark.executor.cores"] = str(cores)
    if stays_on_this_machine(master):
        # the machine's own name may resolve slowly, or to an address that a VPN takes away
        chosen["spark.driver.host"] = "127.0.0.1"
        chosen["spark.driver.bindAddress"] = "127.0.0.1"
    if has_nodes_here(master) and environment.get("PYSPARK_PYTHON", sys.executable) == sys.executable:
        chosen["spark.python.daemon.module"] = DAEMON
    chosen |= dict(conf or {})
    heap = chosen.get("spark.driver.memory" if is_local(master) else "spark.executor.memory", "1g")
    if limit := broadcast_limit(heap):
        chosen.setdefault("spark.sql.autoBroadcastJoinThreshold", str(limit))
    chosen |= {
        "spark.master": master,
        "spark.app.name": app_name,
        "spark.submit.deployMode": "client",
        # progress, metrics and live executors are read from the status API, which the UI serves
        "spark.ui.enabled": "true",
        # stages of one plan, and several queries, run side by side; see the engine's pools
        "spark.scheduler.mode": "FAIR",
    }
    if catalog:
        chosen["spark.sql.catalogImplementation"] = "hive"
    return chosen


def broadcast_limit(heap: str) -> int:
    """Return the bytes up to which Spark may broadcast a table where no hint says so; 0 for a heap of unknown size.

    Spark compares them with a table's files or, adaptively, with what a stage has written; held as a hash table it is
    several times that, beside those of other tasks. So it is a twentieth of what an executor's tasks share, and
    from Spark's own 10 MiB to 64 MiB, beyond which a slow link takes longer for it than for a shuffle.

    >>> [broadcast_limit(heap) >> 20 for heap in ("500m", "1400m", "8g")]
    [10, 31, 64]
    """
    try:
        usable = ExecutorShape(1, heap).usable_memory
    except OptionError:  # Spark knows notations that we do not
        return 0
    return int(min(max(_BROADCAST * usable * 2**30, 10 << 20), 64 << 20))


def _local_heap() -> str:
    import psutil

    gib = psutil.virtual_memory().total / 2**30
    return f"{int(1024 * min(8.0, max(1.0, gib / 4)))}m"


def _defaults() -> dict[str, str]:
    return {
        "spark.ui.port": "0",  # any free port: several drivers share a machine
        # the pages know no users: they are to be read only
        "spark.ui.killEnabled": "false",
        "spark.ui.heapHistogramEnabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.eventLog.enabled": "false",
        # --- workers come and go -------------------------------------------------------------------------
        # On a standalone cluster a vanished machine counts as a failure of each task it ran, and lost
        # shuffle files as a failed attempt of the stage. Four of them, the default, are quickly reached.
        # Failures that are a task's own are still limited to four, by the engine's watcher.
        "spark.task.maxFailures": str(_OWN_FAILURES),
        "spark.stage.maxConsecutiveAttempts": str(_OWN_FAILURES),
        # a worker that was warned hands its shuffle files over before it leaves
        "spark.decommission.enabled": "true",
        "spark.storage.decommission.enabled": "true",
        "spark.storage.decommission.shuffleBlocks.enabled": "true",
        "spark.storage.decommission.rddBlocks.enabled": "true",
        # an executor may leave once its files are handed over after its last task; by default Spark looks for
        # new files every 30 s only, and cores that another query waits for would lie idle that long
        "spark.storage.decommission.replicationReattemptInterval": "1s",
        # a reader of a dead executor's shuffle file gives up after 3 s, not 15
        "spark.shuffle.io.retryWait": "1s",
        "spark.shuffle.io.maxRetries": "3",
        # Executors fetch what is broadcast, cached and shuffled from each other. A machine that vanished neither
        # answers nor closes anything, so that a task would wait for 120 s for a connection to it, and as long for
        # what it has asked for over one that it had. What is only slow is asked again.
        "spark.shuffle.io.connectionCreationTimeout": "5s",
        "spark.shuffle.io.connectionTimeout": "20s",
        # of executors that were silent for ``spark.network.timeout`` the driver learns 10 s later, not up to a minute
        "spark.network.timeoutInterval": "10s",
        # a cancelled task that does not listen (generated loops may not for minutes) costs its executor
        "spark.task.reaper.enabled": "true",
        "spark.task.reaper.killTimeout": "30s",
        # inputs lie in shared storage: waiting for a "near" core only leaves cores idle
        "spark.locality.wait": "0s",
        "spark.scheduler.minRegisteredResourcesRatio": "0",  # start with whatever is there
        "spark.speculation": "false",  # duplicates of slow tasks would take cores that are scarce
        # with no worker left for a while a broadcast waits, as any stage does, and is not "too large"
        "spark.sql.broadcastTimeout": "1800",
        # --- planning ------------------------------------------------------------------------------------
        # Every planned join carries a hint, which adaptive execution obeys; it merges small partitions
        # and splits skewed ones.
        "spark.sql.adaptive.enabled": "true",
        "spark.sql.cbo.joinReorder.enabled": "false",
        # several tasks a core: a lost task loses little, and progress is visible
        "spark.sql.files.maxPartitionBytes": "32m",
        # listing exact paths needs no Spark job below this many files
        "spark.sql.sources.parallelPartitionDiscovery.threshold": "256",
        # --- reading and writing -------------------------------------------------------------------------
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # INT96 has no statistics
        "spark.sql.sources.partitionOverwriteMode": "static",
        # Tasks move their file straight into the directory. What a half-done job leaves is harmless, since a
        # checkpoint exists only once its manifest does.
        "spark.hadoop.mapreduce.fileoutputcommitter.algorithm.version": "2",
        "spark.hadoop.mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
        # files of stages are as private as all that Ebbflow keeps
        "spark.hadoop.fs.permissions.umask-mode": hadoop_umask(),
    }


def _storage(environment: Mapping[str, str]) -> dict[str, str]:
    """Let Hadoop's S3 client follow the variables that the AWS tools and pyarrow follow."""
    chosen: dict[str, str] = {}
    endpoint = environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    if endpoint:
        chosen["spark.hadoop.fs.s3a.endpoint"] = endpoint
        chosen["spark.hadoop.fs.s3a.path.style.access"] = "true"
        chosen["spark.hadoop.fs.s3a.connection.ssl.enabled"] = str(endpoint.startswith("https")).lower()
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    if region:
        chosen["spark.hadoop.fs.s3a.endpoint.region"] = region
    return chosen


def native_memory(conf: Any, master: str, cores: int, threads: int) -> int:
    """Return the MiB that DuckDB may take in one task of ``threads``, where there are ``cores``."""
    if is_local(master):
        total, slots = int(_PART_OF_MACHINE * machine_memory() * 1024), max(1, cores // threads)
    else:
        slots = max(1, int(conf.get("spark.executor.cores", "1")) // threads)
        own = conf.get("spark.executor.pyspark.memory", "")
        heap = mebibytes(conf.get("spark.executor.memory", "1g"))
        total = mebibytes(own) if own else int(_PART_OF_HEAP * heap)
    return max(LEAST_MEMORY, total // slots)
