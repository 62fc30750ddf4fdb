"""A native stage on a standalone cluster whose executor is killed in the middle."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
from ebbflow.infra.spark.engine import SparkEngine
from ebbflow.infra.spark.native import stages
from ebbflow.infra.storage.files import FileEntry
from tests.infra.spark.native.test_native_faults import LONG, ROWS, Running, until

pytestmark = [pytest.mark.spark, pytest.mark.timeout(280)]


@pytest.fixture(name="engine")
def _engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SparkEngine]:
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    with (
        LocalSparkCluster.start("lost", workers=2, memory="1g") as cluster,
        SparkEngine.start(cluster.master_url, memory="500m", cores=1) as engine,
    ):
        yield engine


def executor_of(worker: int) -> psutil.Process:
    """Return the executor whose Python worker has this process id."""
    return next(p for p in psutil.Process(worker).parents() if "java" in p.name())


def test_only_slices_of_a_killed_executor_are_done_again(
    engine: SparkEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "numbers.parquet"
    v = pa.array(range(ROWS), pa.int64())
    g = pa.array([i % 2 for i in range(ROWS)], pa.int64())
    pq.write_table(pa.table({"v": v, "g": g}), path, row_group_size=ROWS // 8)
    entry = FileEntry(str(path), path.stat().st_size, path.stat().st_mtime)
    numbers = Relation("numbers", "file", (entry,), (("v", "bigint"), ("g", "bigint")))
    monkeypatch.setattr(stages, "_SMALLEST", 1)
    monkeypatch.setattr(stages, "_LARGEST", 1)  # as many slices as may be
    monkeypatch.setattr(stages, "_remove_hidden", lambda folder: None)
    until(lambda: engine._context.defaultParallelism >= 2)
    running = Running(engine, LONG, numbers, tmp_path)

    def state() -> tuple[dict[str, int], list[str]]:
        names = running.files()
        done = [name for name in names if name.startswith(".native-") and name.endswith(".parquet")]
        root = running.job.output.root
        return {n: os.stat(f"{root}/{n}").st_mtime_ns for n in done}, [n for n in names if n.endswith(".tmp")]

    until(lambda: running.error or (state()[0] and state()[1]))
    done, unfinished = state()
    os.kill(executor_of(int(unfinished[0].removesuffix(".tmp").rpartition("-")[2])).pid, signal.SIGKILL)
    began = SystemClock().now()
    running.thread.join(150)
    assert running.error is None
    assert running.result is not None
    assert running.result.native, running.result.remark
    after, _ = state()
    assert len(after) > len(done) >= 1
    assert {name: after[name] for name in done} == done  # finished slices are as they were
    assert pq.read_table(running.job.output.path("part-00000.parquet")).to_pylist() == [
        {"n": ROWS * ROWS // 2 - 9}
    ]
    print(
        f"{len(done)} of {len(after)} slices were done; over {SystemClock().now() - began:.1f} s after the kill"
    )
