"""Native stages whose worker is killed or that are cancelled, and executors that cannot run them."""

import os
import signal
import tempfile
import threading
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import StageCancelledError, StageFailedError
from ebbflow.infra.protocols import Arm, FileLayout, Relation, StageJob, StageResult
from ebbflow.infra.spark import engine as engines
from ebbflow.infra.spark.engine import SparkEngine
from ebbflow.infra.spark.native import objects, stages
from ebbflow.infra.spark.native.exchange import division, hashes
from ebbflow.infra.spark.native.objects import CANCELLED
from ebbflow.infra.spark.native.probe import DAEMON
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation

pytestmark = [pytest.mark.spark(shared=True), pytest.mark.timeout(280)]

ROWS = 16_000
ROOM = 80_000  # bytes: less than the table has, and more than the rows of one of its two keys
# a second and more of two cores
LONG = "SELECT count(*) AS n FROM numbers a JOIN numbers b ON a.g = b.g WHERE a.v + b.v > 5"
SPILLING = "SELECT a.v, b.v AS w FROM numbers a JOIN numbers b ON a.g = b.g ORDER BY a.v + b.v, a.v"
FOREVER = "SELECT count(*) AS n FROM numbers a JOIN numbers b ON a.g = b.g JOIN numbers c ON b.g = c.g"


@pytest.fixture(name="numbers", scope="module")
def _numbers(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    path = tmp_path_factory.mktemp("numbers") / "numbers.parquet"
    rows = np.arange(ROWS)
    pq.write_table(pa.table({"v": rows, "g": rows % 2}), path, row_group_size=ROWS // 4)
    entry = FileEntry(str(path), path.stat().st_size, path.stat().st_mtime)
    return Relation("numbers", "file", (entry,), (("v", "bigint"), ("g", "bigint")))


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "_SMALLEST", 1)


class Running:
    """A job in a thread."""

    def __init__(self, engine: SparkEngine, sql: str, numbers: Relation, out: Path) -> None:
        folder = out / uuid.uuid4().hex
        folder.mkdir()
        self.job = StageJob(
            uuid.uuid4().hex, "the stage", sql, (numbers,), StorageLocation(folder.as_uri()), native=True
        )
        self.engine = engine
        self.result: StageResult | None = None
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.result = self.engine.run(self.job)
        except Exception as error:
            self.error = error

    def files(self) -> list[str]:
        return sorted(os.listdir(self.job.output.root))


def until(condition: Callable[[], Any]) -> Any:
    deadline = SystemClock().now() + 120
    while not (found := condition()):
        assert SystemClock().now() < deadline, "it did not come to that in time"
        SystemClock().sleep(0.02)
    return found


def busy() -> list[psutil.Process]:
    """Return the Python workers of our executors that compute something."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            parent = process.parent()
            worker = parent is not None and DAEMON in parent.cmdline()
            if worker and DAEMON in process.cmdline() and process.cpu_percent(0.2) > 0:
                found.append(process)
        except psutil.Error:
            continue
    return found


def spills() -> list[Path]:
    """Return what native tasks of this test run have spilled."""
    mine = {p.pid for p in psutil.Process().children(recursive=True)}
    # in local mode Spark's block manager lends the workers its folder; folders of others go while they are listed
    folders = Path(tempfile.gettempdir()).glob("ebbflow-spark-*/blockmgr-*/ebbflow-native-*")
    found = [f for f in folders if int(f.name.removeprefix("ebbflow-native-")) in mine]
    return [file for folder in found for file in folder.glob("*storage*")]


def test_few_bytes_that_take_long_are_divided_among_the_cores(
    spark: SparkEngine, numbers: Relation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(division, "_SMALLEST", 1 << 30)
    parts = []
    for expected in (0.0, 10.0):
        folder = tmp_path / str(expected)
        folder.mkdir()
        sql, output = "SELECT v FROM numbers WHERE g = 1", StorageLocation(folder.as_uri())
        job = StageJob(uuid.uuid4().hex, "it", sql, (numbers,), output, expected=expected, native=True)
        result = spark.run(job)
        assert (result.native, result.rows) == (True, ROWS // 2)
        parts.append(sum(name.endswith(".parquet") for name in os.listdir(folder)))
    assert parts == [1, 2]


def test_what_little_tasks_have_written_is_merged_without_another_job(
    spark: SparkEngine, numbers: Relation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waves, whole = list[int](), stages.NativeStages._collected

    def collected(self: stages.NativeStages, work: Any) -> list[stages.Done]:
        waves.append(len(work.parts))
        return whole(self, work)

    monkeypatch.setattr(stages.NativeStages, "_collected", collected)
    sql = "SELECT g, sum(v) AS v, avg(v) AS mean FROM numbers GROUP BY g ORDER BY g"
    found = []
    for few in (2 * 2, 2 * 2 - 1):  # two rows of each of two slices
        monkeypatch.setattr(stages, "_FEW", few)
        folder, told = tmp_path / str(few), list[tuple[int, int]]()
        folder.mkdir()
        job = StageJob(
            uuid.uuid4().hex, "the stage", sql, (numbers,), StorageLocation(folder.as_uri()), native=True
        )
        result = spark.run(job, lambda seen, told=told: told.append((seen.tasks_total, seen.tasks_done)))
        assert (result.native, result.rows, result.remark) == (True, 2, "")
        assert (2, 0) in told, "its tasks are told of as soon as they are Spark's"
        assert (0, 0) not in told[told.index((2, 0)) :], "a look at Spark takes that back"
        assert os.listdir(folder) == ["part-00000.parquet"]
        found.append(pq.read_table(folder))
    assert waves == [2, 2, 1]
    assert found[0].equals(found[1])
    assert found[0]["v"].to_pylist() == [sum(range(0, ROWS, 2)), sum(range(1, ROWS, 2))]


@pytest.mark.parametrize(
    ("tail", "waves", "files"),
    [("", [2, 2], 2), ("ORDER BY n LIMIT 3", [2, 2, 1], 1), ("HAVING sum(v) > (SELECT 1)", [2, 2], 2)],
)
def test_several_tasks_merge_many_groups(
    spark: SparkEngine, numbers: Relation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tail: str,
    waves: list[int], files: int,
) -> None:  # fmt: skip
    seen, whole = list[int](), stages.NativeStages._collected

    def collected(self: stages.NativeStages, work: Any) -> list[stages.Done]:
        seen.append(len(work.parts))
        return whole(self, work)

    monkeypatch.setattr(stages.NativeStages, "_collected", collected)
    monkeypatch.setattr(stages, "MANY", 100)
    monkeypatch.setattr(stages, "_FEW", 2)
    sql = f"SELECT v % 101 AS n, sum(v) AS s, count(DISTINCT g) AS d FROM numbers GROUP BY v % 101 {tail}"
    location = StorageLocation(tmp_path.as_uri())
    result = spark.run(StageJob(uuid.uuid4().hex, "the stage", sql, (numbers,), location, native=True))
    assert (result.native, seen) == (True, waves)
    assert len(os.listdir(tmp_path)) == files
    found = pq.read_table(tmp_path).sort_by("n").to_pylist()
    assert [one["n"] for one in found] == list(range(3 if "LIMIT" in tail else 101))
    assert found[0] == {"n": 0, "s": sum(range(0, ROWS, 101)), "d": 2}


def test_what_no_task_could_merge_is_left_to_spark(
    spark: SparkEngine, numbers: Relation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "MANY", 100)
    monkeypatch.setattr(stages, "MERGED", 1000)
    sql = "SELECT v FROM (SELECT v, rank() OVER (PARTITION BY v ORDER BY g) AS r FROM numbers) WHERE r = 1"
    location = StorageLocation(tmp_path.as_uri())
    result = spark.run(StageJob(uuid.uuid4().hex, "the stage", sql, (numbers,), location, native=True))
    assert (result.native, result.rows) == (False, ROWS)
    assert "too many rows for one task" in result.remark


@pytest.mark.parametrize("room", [1 << 30, ROOM], ids=["shared", "exchanged"])
def test_a_killed_python_worker_costs_a_slice(
    spark: SparkEngine, numbers: Relation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr(spark._native, "_room", room)
    running = Running(spark, LONG, numbers, tmp_path)

    def unfinished_slices() -> list[str]:
        names = running.files()
        exchanged = [name for name in names if name.startswith(".native-s")]
        assert running.error is None
        return [
            n
            for n in names
            if n.endswith(".tmp") and n not in exchanged and bool(exchanged) == (room == ROOM)
        ]

    # a slice's unfinished file is named for the process that writes it
    unfinished = until(unfinished_slices)
    os.kill(int(unfinished[0].removesuffix(".tmp").rpartition("-")[2]), signal.SIGKILL)
    running.thread.join(150)
    assert running.error is None
    assert running.result is not None
    assert (running.result.native, running.result.rows) == (True, 1)
    assert running.result.failed_tasks >= 1
    assert pq.read_table(running.job.output.path("part-00000.parquet")).to_pylist() == [
        {"n": ROWS * ROWS // 2 - 9}
    ]
    assert running.files() == ["part-00000.parquet"]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT f.s, count(*) AS n, sum(d.w) AS w FROM facts f LEFT JOIN dims d ON f.k = d.k GROUP BY f.s",
        "SELECT f.k, count(*) AS n, sum(f.v) AS v, max(f.s) AS s, sum(d.w) AS w FROM facts f LEFT JOIN dims d ON "
        "f.k = d.k GROUP BY f.k",
        "SELECT f.v, d.w FROM facts f JOIN dims d ON f.k = d.k WHERE d.w % 3 = 0 AND f.v > 10",
        "SELECT f.v, f.s FROM facts f LEFT ANTI JOIN dims d ON d.k = f.k AND d.w > 9000",
        "SELECT f.v, d.w FROM dims d FULL JOIN facts f ON d.k = f.k AND f.v > 100",
    ],
)
def test_what_no_task_can_hold_is_exchanged_and_joined_as_spark_does(
    spark: SparkEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    rows = np.arange(3 * ROWS)
    # half of the keys are one, some are null; the other table's are of another type
    keys = [None if v % 11 == 0 else 7 if v % 2 else (v * 7919) % 5000 for v in rows.tolist()]
    tables = {
        "facts": pa.table(
            {"k": pa.array(keys, pa.int32()), "v": rows, "s": [f"t{v % 9}" for v in rows.tolist()]}
        ),
        "dims": pa.table({"k": (np.arange(5000) * 4999) % 5000, "w": np.arange(5000) * 2}),
    }
    kinds = {
        "facts": (("k", "int"), ("v", "bigint"), ("s", "string")),
        "dims": (("k", "bigint"), ("w", "bigint")),
    }
    relations = []
    for name, table in tables.items():
        path = tmp_path / f"{name}.parquet"
        pq.write_table(table, path, row_group_size=ROWS // 4)
        entry = FileEntry(str(path), path.stat().st_size, path.stat().st_mtime)
        relations.append(Relation(name, "file", (entry,), kinds[name]))
    monkeypatch.setattr(spark._native, "_room", 4_000)
    monkeypatch.setattr(division, "_ALONE", 1_000)
    monkeypatch.setattr(hashes, "GROUP", 2048)
    waves: list[list[stages.Part]] = []
    whole = stages.NativeStages._collected

    def collected(self: stages.NativeStages, work: Any) -> list[stages.Done]:
        waves.append(list(work.parts))
        return whole(self, work)

    monkeypatch.setattr(stages.NativeStages, "_collected", collected)
    found = []
    for native in (True, False):
        folder = tmp_path / str(native)
        folder.mkdir()
        output = StorageLocation(folder.as_uri())
        job = StageJob(uuid.uuid4().hex, "the stage", sql, tuple(relations), output, native=native)
        result = spark.run(job)
        assert (result.native, result.remark) == (native, "")
        found.append(pq.read_table(folder))
    assert found[0].schema.types == found[1].schema.types
    assert sorted(map(repr, found[0].to_pylist())) == sorted(map(repr, found[1].to_pylist()))
    assert {part.file.split("-")[1] for part in waves[0]} == {"s0", "s1"}
    ranges = [(part.ranges[0].low, part.ranges[0].high) for part in waves[1]]
    assert len(set(ranges)) > 1
    if "GROUP BY" in sql:  # of what else is written the frequent key has fewer bytes than twice a part's mean
        assert len(ranges) > len(set(ranges)), "the frequent key's rows are in one part"
    assert sorted(os.listdir(tmp_path / "True"))[0].startswith("part-")


def test_a_cancelled_stage_leaves_no_task_and_no_file(
    spark: SparkEngine, numbers: Relation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, begun, mark = threading.Event(), list[str](), objects.mark

    def late(job: StageJob) -> bool:
        begun.append(threading.current_thread().name)
        assert answers.wait(150)
        return mark(job)

    monkeypatch.setattr(objects, "mark", late)
    monkeypatch.setattr(engines, "_MARKED", 0.1)
    monkeypatch.setattr(stages, "_TIDIED", 0.1)
    running = Running(spark, FOREVER, numbers, tmp_path)
    until(busy)
    for _ in range(5):  # as a query does again and again
        spark.cancel(running.job.id)
    running.thread.join(150)
    assert isinstance(running.error, StageCancelledError), "it waits for a store that does not answer"
    assert 1 <= len(begun) <= 2, "each cancellation writes a mark of its own"
    assert "MainThread" not in begun
    answers.set()
    until(lambda: not busy())
    until(lambda: running.files() == [CANCELLED])
    assert not spills()


def test_a_cancelled_stage_that_spills_stops_and_leaves_nothing(
    spark: SparkEngine, numbers: Relation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spark._native, "_memory", 64)
    running = Running(spark, SPILLING, numbers, tmp_path)
    until(spills)
    spark.cancel(running.job.id)
    until(lambda: not spills() and not any(name.endswith(".tmp") for name in running.files()))
    running.thread.join(150)
    assert isinstance(running.error, StageCancelledError)
    assert running.files() == [CANCELLED]


def test_of_an_interrupted_stage_sparks_jobs_end_first(
    spark: SparkEngine, numbers: Relation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stages.NativeStages, "_collected", interrupted)
    monkeypatch.setattr(spark._context, "cancelJobGroup", order.append)
    monkeypatch.setattr(objects, "mark", lambda job: order.append("mark"))
    place = StorageLocation(tmp_path.as_uri())
    job = StageJob("a-job", "the stage", "SELECT max(v) AS top FROM numbers", (numbers,), place, native=True)
    with pytest.raises(KeyboardInterrupt):
        spark.run(job)
    assert order[:2] == ["a-job", "mark"]


def test_tasks_that_write_into_a_table_are_told_of_a_cancellation(
    spark: SparkEngine, numbers: Relation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, told = threading.Event(), threading.Event()

    def collected(self: stages.NativeStages, work: Any) -> list[stages.Done]:
        """Be tasks that Spark does not end."""
        began.set()
        until(lambda: os.path.exists(job.output.path(CANCELLED)))
        told.set()
        raise RuntimeError("cancelled")

    monkeypatch.setattr(stages.NativeStages, "_collected", collected)
    monkeypatch.setattr(SparkEngine, "_lack", lambda *_: "Spark has no client for it")
    sql = "SELECT v FROM numbers"
    job = StageJob(
        uuid.uuid4().hex,
        "rows of a table",
        sql,
        (numbers,),
        StorageLocation(tmp_path.as_uri()),
        layout=FileLayout((), ()),
        arms=(Arm(sql, "numbers"),),
    )
    errors: list[Exception] = []

    def write() -> None:
        try:
            spark.run(job)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert began.wait(150)
    spark.cancel(job.id)
    thread.join(150)
    assert told.is_set()
    assert [type(error) for error in errors] == [StageCancelledError]


def test_executors_with_other_versions_run_spark_sql_and_it_is_told(
    spark: SparkEngine, numbers: Relation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    application = spark.application_id
    monkeypatch.setitem(
        stages._probed, application, "executors have other versions: duckdb 1.0.0, here 2.0.0"
    )
    running = Running(spark, "SELECT max(v) AS top FROM numbers", numbers, tmp_path)
    running.thread.join(150)
    assert running.result is not None
    assert not running.result.native
    assert "duckdb 1.0.0" in running.result.remark
    assert "duckdb 1.0.0" in spark.native_trouble


@pytest.mark.parametrize("ends", ["refused", "failed"])
def test_what_a_native_stage_has_written_is_gone_when_spark_sql_runs_it(
    spark: SparkEngine, numbers: Relation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    whole = stages.NativeStages._collected

    def collected(self: stages.NativeStages, work: Any) -> list[stages.Done]:
        done = whole(self, work)
        if ends == "failed":  # and each time what one of its tasks has written
            Path(work.folder, work.parts[-1].file).unlink()
            raise RuntimeError("an executor is lost")
        assert len(done) > 1
        return [*done[:-1], replace(done[-1], error="Spark decides")]

    monkeypatch.setattr(stages.NativeStages, "_collected", collected)
    monkeypatch.setattr(objects, "_LEAVE", 1.0)
    running = Running(spark, "SELECT v, g FROM numbers WHERE v >= 0", numbers, tmp_path)
    running.thread.join(250)
    assert running.error is None
    assert running.result is not None
    assert (running.result.native, running.result.rows) == (False, ROWS)
    assert pq.read_table(running.job.output.root).num_rows == ROWS


def test_rows_that_tasks_wrote_and_files_do_not_have_are_missed(
    spark: SparkEngine, numbers: Relation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = stages.NativeStages._collected

    def collected(self: stages.NativeStages, work: Any) -> list[stages.Done]:
        done = whole(self, work)
        os.unlink(f"{work.folder}/{work.parts[0].file}")
        return done

    monkeypatch.setattr(stages.NativeStages, "_collected", collected)
    running = Running(spark, "SELECT v, g FROM numbers WHERE v >= 0", numbers, tmp_path)
    running.thread.join(250)
    assert isinstance(running.error, StageFailedError)
    assert "its files have" in str(running.error)
