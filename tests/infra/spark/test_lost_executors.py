"""A driver that is told of lost executors, on a real cluster: one of its machines stands still and closes nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ebbflow.infra.machine import processes
from ebbflow.infra.spark.cluster import cluster as cluster_module
from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
from ebbflow.infra.spark.master_api import parse_executors
from ebbflow.infra.spark.watch import HostRecord, killed
from tests.infra.spark_payloads import driver, executor

# Two tasks, a machine each, which last until a file is there. Told of a host, it tells Spark that this is lost.
DRIVER = """
import json, os, sys, threading, time
from ebbflow.infra.spark.engine import SparkEngine
from ebbflow.infra.spark.master_api import get_executors, new_client

notes, halted = sys.argv[2:]

def work(part, rows):
    open(os.path.join(notes, f"{part}-{os.getpid()}"), "w").close()
    while not os.path.exists(halted):
        time.sleep(0.05)
    return [part]

engine = SparkEngine.start(sys.argv[1], memory="512m", cores=1)
api = new_client(30)

def there():
    return [e for e in get_executors(api, engine.ui_url, engine.application_id) if e.active and not e.driver]

while len(there()) < 2:
    time.sleep(0.1)

def tell():
    host = sys.stdin.readline().strip()
    engine.lost_executors.tell([e for e in there() if e.host == host] * 2)
threading.Thread(target=tell, daemon=True).start()
found = engine._context.parallelize(range(2), 2).mapPartitionsWithIndex(work).collect()
print(json.dumps([sorted(found), [e.host for e in there()]]), flush=True)
engine.close()
"""


def test_only_executors_of_killed_machines_are_lost() -> None:
    found = parse_executors(
        [driver(), executor("0", "10.0.0.1"), executor("1", "10.0.0.2"), executor("2", "10.0.0.3")]
    )
    records = {"10.0.0.1": HostRecord("a", killed=True), "10.0.0.2": HostRecord("b", deadline=9.0)}
    assert [e.id for e in killed(found, records)] == ["0"]


@pytest.mark.spark
def test_tasks_of_a_lost_executor_run_elsewhere_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    # else the master, whose patience is 60 s, would tell the driver
    monkeypatch.setitem(cluster_module._DECOMMISSION, "spark.worker.timeout", "600")
    (notes := tmp_path / "notes").mkdir()
    with LocalSparkCluster.start("lost", workers=2, memory="1g") as cluster:
        program = [sys.executable, "-c", DRIVER, cluster.master_url, str(notes), str(tmp_path / "halted")]
        with subprocess.Popen(
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        ) as running:
            try:
                end = time.monotonic() + 150
                while len(list(notes.iterdir())) < 2:
                    assert running.poll() is None
                    assert time.monotonic() < end
                    time.sleep(0.05)
                node = cluster.state.node("worker-2")
                for pid in processes.members(cluster.state.mark_of("worker-2")):
                    os.kill(pid, signal.SIGSTOP)
                (tmp_path / "halted").touch()
                began = time.monotonic()
                answer, _ = running.communicate(node.host + "\n", timeout=150)
            finally:
                running.kill()
        assert json.loads(answer) == [[0, 1], [cluster.state.node("worker-1").host]]
        assert time.monotonic() - began < 100  # Spark's own patience is 120 s
