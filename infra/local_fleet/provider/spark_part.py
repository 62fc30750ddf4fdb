"""The Spark cluster whose workers are a fleet's Spark nodes."""

import os
from dataclasses import replace

from ebbflow.infra.clock import Clock
from ebbflow.infra.local_fleet.state.fleet_state import FleetBook, SparkPart
from ebbflow.infra.local_fleet.state.pools import LocalPool
from ebbflow.infra.local_fleet.state.store import BookFile
from ebbflow.infra.machine import cgroups
from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
from ebbflow.infra.spark.cluster.state import StateFile

_kept: list[LocalSparkCluster] = []  # of this process, the keeper: a cluster ends with who started it


def ensure_cluster(file: BookFile, book: FleetBook, pool: LocalPool, clock: Clock) -> FleetBook:
    """Return the book with a cluster for a Spark node of ``pool``; it is started where there is none.

    It ends with this process. Raises ``ClusterError`` and ``EngineUnavailableError``.
    """
    if pool.kind != "spark":
        return book
    current = file.read() or book
    if current.spark is not None:
        state = StateFile.of(current.spark.name).read()
        if state is not None and state.uid == current.spark.uid and state.alive:
            return current
    workers = max(1, sum(other.start for other in book.pools if other.kind == "spark"))
    machine = len(os.sched_getaffinity(0))
    per_core = cgroups.per_core_quota(machine, workers * pool.cores) if pool.cpus is None else pool.cpus
    cluster = LocalSparkCluster.start(
        book.name,
        workers=0,
        cores=pool.cores,
        memory=f"{max(1, round(pool.memory * 1024))}m",
        cpus=min(float(pool.cores), pool.cores * per_core),
        directory=file.folder / "spark",
        clock=clock,
    )
    _kept[:] = [cluster]
    part = SparkPart(cluster.name, cluster.state.uid, cluster.master_url)
    return file.change(book.uid, lambda b: replace(b, spark=part))
