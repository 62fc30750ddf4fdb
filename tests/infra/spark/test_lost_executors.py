"""Executors that are lost on a real cluster: one is killed, and later its machine stands still and closes nothing."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.machine import processes
from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.cluster import cluster as cluster_module
from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
from ebbflow.infra.spark.engine import SparkEngine
from ebbflow.infra.spark.master_api import Executor, get_executors, new_client, parse_executors
from ebbflow.infra.spark.native import stages
from ebbflow.infra.spark.native.exchange import division
from ebbflow.infra.spark.watch import HostRecord, killed
from ebbflow.infra.storage.files import FileEntry
from tests.infra.spark.native.test_native_faults import LONG, ROWS, Running, until
from tests.infra.spark_payloads import driver, executor

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(name="cluster", scope="module")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSparkCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EBBFLOW_HOME", str(tmp_path_factory.mktemp("home")))
        # else the master, whose patience is 60 s, would tell the driver
        patch.setitem(cluster_module._DECOMMISSION, "spark.worker.timeout", "600")
        with LocalSparkCluster.start("lost", workers=2, memory="1g") as cluster:
            yield cluster


@pytest.fixture(name="engine", scope="module")
def _engine(cluster: LocalSparkCluster) -> Iterator[SparkEngine]:
    with SparkEngine.start(cluster.master_url, memory="500m", cores=1) as engine:
        yield engine


def there(engine: SparkEngine) -> list[Executor]:
    found = get_executors(new_client(30), engine.ui_url, engine.application_id)
    return [one for one in found if one.active and not one.driver]


def executor_of(worker: int) -> psutil.Process:
    """Return the executor whose Python worker has this process id."""
    return next(p for p in psutil.Process(worker).parents() if "java" in p.name())


def stored(folder: Path, g: list[int]) -> Relation:
    """Write numbers with these values of ``g``, in eight row groups."""
    path = folder / "numbers.parquet"
    columns = {"v": pa.array(range(len(g)), pa.int64()), "g": pa.array(g, pa.int64())}
    pq.write_table(pa.table(columns), path, row_group_size=len(g) // 8)
    entry = FileEntry(str(path), path.stat().st_size, path.stat().st_mtime)
    return Relation("numbers", "file", (entry,), (("v", "bigint"), ("g", "bigint")))


def ends_without_executor_of(running: Running, unfinished: str) -> None:
    """Kill the executor that writes a file: the stage ends natively even so."""
    os.kill(executor_of(int(unfinished.removesuffix(".tmp").rpartition("-")[2])).pid, signal.SIGKILL)
    running.thread.join(150)
    assert running.error is None
    assert running.result is not None
    assert running.result.native, running.result.remark


def test_only_executors_of_killed_machines_are_lost() -> None:
    found = parse_executors(
        [driver(), executor("0", "10.0.0.1"), executor("1", "10.0.0.2"), executor("2", "10.0.0.3")]
    )
    records = {"10.0.0.1": HostRecord("a", killed=True), "10.0.0.2": HostRecord("b", deadline=9.0)}
    assert [e.id for e in killed(found, records)] == ["0"]


@pytest.mark.spark
def test_only_slices_of_a_killed_executor_are_done_again(
    engine: SparkEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = stored(tmp_path, [i % 2 for i in range(ROWS)])
    monkeypatch.setattr(division, "_SMALLEST", 1)
    monkeypatch.setattr(division, "_LARGEST", 1)  # as many slices as may be
    monkeypatch.setattr(stages, "remove_hidden", lambda folder: None)
    until(lambda: engine._context.defaultParallelism >= 2)
    running = Running(engine, LONG, numbers, tmp_path)

    def state() -> tuple[dict[str, int], list[str]]:
        names = running.files()
        done = [name for name in names if name.startswith(".native-") and name.endswith(".parquet")]
        root = running.job.output.root
        return {n: os.stat(f"{root}/{n}").st_mtime_ns for n in done}, [n for n in names if n.endswith(".tmp")]

    until(lambda: running.error or (state()[0] and state()[1]))
    done, unfinished = state()
    ends_without_executor_of(running, unfinished[0])
    after, _ = state()
    assert len(after) > len(done) >= 1
    assert {name: after[name] for name in done} == done  # finished slices are as they were
    assert pq.read_table(running.job.output.path("part-00000.parquet")).to_pylist() == [
        {"n": ROWS * ROWS // 2 - 9}
    ]


@pytest.mark.spark
def test_what_a_lost_executor_was_at_is_divided_among_all_once_another_slice_has_ended(
    engine: SparkEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the first half join with themselves, those of the second with all of it."""
    half = ROWS
    numbers = stored(tmp_path, [i if i < half else 2 * half for i in range(2 * half)])
    monkeypatch.setattr(division, "_SMALLEST", 1)
    monkeypatch.setattr(stages, "remove_hidden", lambda folder: None)
    until(lambda: engine._context.defaultParallelism >= 2 and len(there(engine)) == 2)
    # both have a Python worker: Spark begins all tasks of a barrier at once
    both = engine._context.parallelize(range(2), 2).barrier()
    assert both.mapPartitions(lambda rows: rows).collect() == [0, 1]
    running = Running(engine, LONG, numbers, tmp_path)

    def state() -> tuple[list[str], list[str]]:
        names = [name for name in running.files() if name.startswith(".native-")]
        return [n for n in names if n.endswith(".parquet")], [n for n in names if n.endswith(".tmp")]

    until(lambda: running.error or running.result or (state()[0] and state()[1]))
    assert (running.error, running.result) == (None, None)
    done, unfinished = state()
    ends_without_executor_of(running, unfinished[0])
    assert len(done) == 1
    stem = ".native-00001"
    assert [name for name in state()[0] if name not in done] == [f"{stem}-0.parquet", f"{stem}-1.parquet"]
    (found,) = pq.read_table(running.job.output.path("part-00000.parquet")).to_pylist()
    assert found == {"n": sum(2 * i > 5 for i in range(half)) + half * half}


@pytest.mark.spark
def test_tasks_of_a_lost_executor_run_elsewhere_at_once(
    cluster: LocalSparkCluster, engine: SparkEngine, tmp_path: Path
) -> None:
    """The driver is told of a machine that stands still and closes nothing."""
    notes, halted = tmp_path / "notes", tmp_path / "halted"
    notes.mkdir()

    def work(part: int, rows: Iterable[int]) -> list[int]:
        (notes / f"{part}-{os.getpid()}").touch()
        while not halted.exists():
            time.sleep(0.05)
        return [part]

    def collect() -> list[int]:
        found: list[int] = engine._context.parallelize(range(2), 2).mapPartitionsWithIndex(work).collect()
        return found

    until(lambda: len(there(engine)) == 2)
    with ThreadPoolExecutor(1) as threads:
        try:
            running = threads.submit(collect)  # two tasks, a machine each
            until(lambda: running.done() or len(list(notes.iterdir())) == 2)
            node = cluster.state.node("worker-2")
            for pid in processes.members(cluster.state.mark_of("worker-2")):
                os.kill(pid, signal.SIGSTOP)
        finally:
            halted.touch()
        engine.lost_executors.tell([one for one in there(engine) if one.host == node.host] * 2)
        assert sorted(running.result(100)) == [0, 1]  # Spark's own patience is 120 s
    assert [one.host for one in there(engine)] == [cluster.state.node("worker-1").host]
