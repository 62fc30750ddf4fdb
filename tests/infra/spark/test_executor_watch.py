"""The executor watch on a real application of a real cluster, whose nodes come, get notice and go."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ebbflow.infra.machine import processes
from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
from ebbflow.infra.spark.watch import ExecutorWatch
from ebbflow.planners.model import Capacity

pytestmark = pytest.mark.spark

# A process of its own, because Spark allows one context a process and other tests have theirs.
DRIVER = """
import json, sys
from pyspark.sql import SparkSession
builder = SparkSession.builder.master(sys.argv[1]).appName("watched")
for key, value in {
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    "spark.executor.memory": "512m",
    "spark.decommission.enabled": "true",
}.items():
    builder = builder.config(key, value)
context = builder.getOrCreate().sparkContext
print("READY" + json.dumps([context.uiWebUrl, context.applicationId]), flush=True)
sys.stdin.read()
context.stop()
"""


class Watched(NamedTuple):
    cluster: LocalSparkCluster
    watch: ExecutorWatch
    address: list[str]


@contextlib.contextmanager
def application(master: str, properties: Path) -> Iterator[list[str]]:
    """Start an application of somebody else's; ``properties`` is the file with the cluster's secret."""
    environment = {
        **os.environ,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_SUBMIT_ARGS": f"--properties-file {shlex.quote(str(properties))} pyspark-shell",
    }
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, master],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        assert driver.stdout is not None
        ready = next(line for line in driver.stdout if line.startswith("READY"))
        yield json.loads(ready.removeprefix("READY"))
        driver.communicate(timeout=150)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait(timeout=10)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("EBBFLOW_HOME", str(home))
        with (
            LocalSparkCluster.start("watched", workers=2, memory="1g") as cluster,
            application(cluster.master_url, home / "clusters" / "watched" / "spark.conf") as address,
        ):
            watch = ExecutorWatch(
                *address, master_url=cluster.master_url, hazard=lambda losses, seconds: float(losses)
            )
            yield Watched(cluster, watch, address)
            watch.close()


def seen(watch: ExecutorWatch, reached: Callable[[Capacity], object], seconds: float = 150.0) -> Capacity:
    """Return the first capacity for which ``reached``, or fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not reached(capacity := watch.capacity()):
        assert time.monotonic() < end, capacity
        time.sleep(0.05)
    return capacity


def ids(capacity: Capacity) -> list[str]:
    return [node.id for node in capacity.nodes]


def test_nodes_count_once_their_executor_is_there(watched: Watched) -> None:
    capacity = seen(watched.watch, lambda c: len(c.nodes) == 2)
    assert ids(capacity) == ["worker-1", "worker-2"]
    assert capacity.cores == 2
    assert all(0.1 < node.memory < 0.5 for node in capacity.nodes)
    assert watched.watch.capacity().revision == capacity.revision


def test_an_added_node_joins_with_a_new_revision(watched: Watched) -> None:
    before = watched.watch.capacity()
    assert watched.cluster.add() == "worker-3"
    capacity = seen(watched.watch, lambda c: len(c.nodes) == 3)
    assert ids(capacity) == ["worker-1", "worker-2", "worker-3"]
    assert capacity.revision > before.revision
    status = watched.cluster.status().nodes[2]
    assert status.cores_used == 1


def test_a_notice_is_seen_with_its_deadline_before_the_node_leaves(watched: Watched) -> None:
    before = watched.watch.capacity()
    deadline = watched.cluster.notice("worker-1", 300)
    capacity = seen(watched.watch, lambda c: c.notices)
    assert [(n.node_id, n.deadline) for n in capacity.notices] == [("worker-1", deadline)]
    assert [n.id for n in capacity.usable] == ["worker-2", "worker-3"]
    assert (capacity.revision, watched.watch.losses) == (before.revision + 1, 1)


def test_a_killed_node_takes_its_executor_along_and_is_seen_at_once(watched: Watched) -> None:
    mark = watched.cluster.state.mark_of("worker-2")
    assert len(processes.members(mark)) >= 2  # the worker and its executor
    watched.cluster.kill("worker-2")
    assert processes.members(mark) == []
    capacity = seen(
        watched.watch, lambda c: "worker-2" not in ids(c), 50
    )  # sooner than the master misses its worker
    assert [n.id for n in capacity.usable] == ["worker-3"]
    assert watched.watch.losses == 2
    assert capacity.hazard == 2.0


def test_a_death_that_no_state_file_tells_of_is_seen_within_seconds(watched: Watched) -> None:
    """What another cluster manager's node looks like: only the master and the driver know."""
    stranger = ExecutorWatch(*watched.address, master_ui=watched.cluster.master_ui, hazard=lambda n, s: 0.0)
    host = watched.cluster.state.node("worker-3").host
    assert host in ids(seen(stranger, lambda c: host in ids(c)))
    os.killpg(watched.cluster.state.node("worker-3").pid, signal.SIGKILL)
    seen(stranger, lambda c: host not in ids(c), 50)
    stranger.close()
