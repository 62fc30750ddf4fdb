"""What only Spark does: settings, errors, broadcasts, metrics. The contract has a module of its own."""

import itertools
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.errors import (
    BroadcastTooLargeError,
    EngineUnavailableError,
    StageFailedError,
    StorageFullError,
)
from ebbflow.infra.protocols import Relation, StageJob, StageProgress
from ebbflow.infra.query.comparison import same_rows
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.spark.failures import headline, is_own, parse, translate
from ebbflow.infra.spark.metrics import group_metrics
from ebbflow.infra.spark.session import check_master
from ebbflow.infra.spark.settings import (
    addresses,
    broadcast_limit,
    executor_memory,
    settings,
    stays_on_this_machine,
)
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.parquet import discover

TOO_LARGE = BroadcastTooLargeError

# --- without a JVM ----------------------------------------------------------------------------------------


def test_nobody_listening_at_the_masters_address_is_told_within_seconds_and_before_a_jvm_starts() -> None:
    from ebbflow.infra.spark.engine import SparkEngine

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    began = time.monotonic()
    with pytest.raises(EngineUnavailableError, match=rf"spark://127\.0\.0\.1:{port} .*check the address"):
        SparkEngine.start(f"spark://127.0.0.1:{port}")
    assert time.monotonic() - began < 20


def test_one_reachable_master_of_several_is_enough() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        check_master(f"spark://127.0.0.1:1,127.0.0.1:{listener.getsockname()[1]}", timeout=2.0)


def test_a_master_url_that_spark_does_not_know_is_refused() -> None:
    from ebbflow.infra.spark.engine import SparkEngine

    with pytest.raises(EngineUnavailableError, match=r"'mesos://x:1'.*use local"):
        SparkEngine.start("mesos://x:1")


def test_masters_are_read_from_urls() -> None:
    assert addresses("spark://a:1,b:2") == [("a", 1), ("b", 2)]
    assert addresses("spark://[::1]:7077") == [("::1", 7077)]
    assert addresses("local[2]") == []


def test_only_loopback_masters_keep_the_driver_on_loopback() -> None:
    assert stays_on_this_machine("local[*]")
    assert stays_on_this_machine("spark://127.0.0.1:7077")
    assert not stays_on_this_machine("spark://127.0.0.1:7077,10.0.0.2:7077")
    assert "spark.driver.host" not in settings("spark://10.0.0.2:7077", app_name="a")
    assert settings("spark://localhost:7077", app_name="a")["spark.driver.host"] == "127.0.0.1"


def test_memory_is_an_executors_except_in_local_mode_where_the_driver_is_the_executor() -> None:
    assert settings("local[2]", app_name="a", memory="3g")["spark.driver.memory"] == "3g"
    cluster = settings("spark://h:1", app_name="a", memory="3g")
    assert cluster["spark.executor.memory"] == "3g"
    assert cluster["spark.driver.memory"] != "3g"


@pytest.mark.parametrize("gib", [1.0, 2.0, 4.0, 16.0, 64.0])
def test_an_executors_heap_leaves_room_in_its_worker(gib: float) -> None:
    heap = int(executor_memory(gib).removesuffix("m"))
    assert 450 < heap <= gib * 1024 - 384


def test_user_settings_win_except_those_the_engine_relies_on() -> None:
    conf = {"spark.locality.wait": "9s", "spark.ui.enabled": "false", "spark.scheduler.mode": "FIFO"}
    chosen = settings("local", app_name="a", conf=conf)
    assert chosen["spark.locality.wait"] == "9s"
    assert chosen["spark.ui.enabled"] == "true"
    assert chosen["spark.scheduler.mode"] == "FAIR"


def test_the_broadcast_limit_follows_an_executors_memory_unless_the_user_names_one() -> None:
    key = "spark.sql.autoBroadcastJoinThreshold"
    assert int(settings("local[2]", app_name="a", memory="8g")[key]) == 64 << 20
    assert int(settings("spark://h:1", app_name="a")[key]) == broadcast_limit("1g")  # Spark's own heap
    assert 10 << 20 < int(settings("spark://h:1", app_name="a", memory="1400m")[key]) < 64 << 20
    assert int(settings("spark://h:1", app_name="a", memory="500m")[key]) == 10 << 20
    assert settings("local[2]", app_name="a", conf={key: "-1"})[key] == "-1"
    assert key not in settings("spark://h:1", app_name="a", conf={"spark.executor.memory": "1e3"})


def test_s3_follows_the_aws_environment() -> None:
    chosen = settings(
        "local", app_name="a", environment={"AWS_ENDPOINT_URL": "http://h:9", "AWS_REGION": "eu-west-1"}
    )
    assert chosen["spark.hadoop.fs.s3a.endpoint"] == "http://h:9"
    assert chosen["spark.hadoop.fs.s3a.path.style.access"] == "true"
    assert chosen["spark.hadoop.fs.s3a.endpoint.region"] == "eu-west-1"


@pytest.mark.parametrize(
    ("text", "hinted", "kind"),
    [
        ("x.SparkException: Cannot broadcast the table over 1 rows: 2 rows.", False, TOO_LARGE),
        ("x.SparkException: Not enough memory to build and broadcast the table", False, TOO_LARGE),
        ("x.SparkException: Could not execute broadcast in 5 secs.", False, TOO_LARGE),
        ("x.SparkException: 2 GiB is bigger than spark.driver.maxResultSize 1g", False, TOO_LARGE),
        ("java.lang.OutOfMemoryError: Java heap space", True, TOO_LARGE),
        ("java.lang.OutOfMemoryError: Java heap space", False, StageFailedError),
        ("ExecutorLostFailure (executor 1 exited) Reason: Command exited with code 52", True, TOO_LARGE),
        ("java.io.IOException: No space left on device", True, StorageFullError),
        ("x.Y: Job 3 cancelled because SparkContext was shut down", False, EngineUnavailableError),
        ("x.SparkArithmeticException: [DIVIDE_BY_ZERO] Division by zero.", True, StageFailedError),
    ],
)
def test_failures_become_the_error_that_says_what_to_do(
    text: str, hinted: bool, kind: type[Exception]
) -> None:
    sql = "SELECT /*+ BROADCAST(a) */ 1" if hinted else "SELECT /*+ MERGE(a) */ 1"
    assert type(translate(parse(text), stage="s", sql=sql)) is kind


def test_the_headline_is_the_condition_nearest_to_the_cause() -> None:
    text = (
        "x.SparkException: Job aborted due to stage failure: Task 0 failed\n\tat a.B.c(B.java:1)\n"
        "Caused by: x.SparkArithmeticException: [DIVIDE_BY_ZERO] Division by zero.\n\tat d.E.f(E.java:2)"
    )
    assert headline(parse(text)) == "SparkArithmeticException: [DIVIDE_BY_ZERO] Division by zero."


@pytest.mark.parametrize(
    ("message", "own"),
    [
        ("ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: gone", False),
        ("FetchFailed(BlockManagerId(1, h, 1, None), shuffleId=0)", False),
        ("TaskKilled (Stage cancelled)", False),
        ("ExecutorLostFailure (executor 1 exited ...) Reason: Command exited with code 52", True),
        ("org.apache.spark.SparkArithmeticException: [DIVIDE_BY_ZERO]", True),
    ],
)
def test_a_lost_machine_is_not_a_tasks_own_failure(message: str, own: bool) -> None:
    assert is_own(message) is own


class _Api:
    """Answers as the status API does, active at first."""

    def __init__(self) -> None:
        self.asked = 0

    def attempts(self, stages: list[int]) -> list[dict[str, Any]]:
        self.asked += 1
        base = {
            "stageId": 1,
            "status": "COMPLETE",
            "numCompleteTasks": 4,
            "numFailedTasks": 0,
            "executorRunTime": 2000,
            "shuffleWriteBytes": 10,
            "diskBytesSpilled": 0,
            "inputBytes": 5,
        }
        return [
            base | {"attemptId": 0, "numFailedTasks": 2, "diskBytesSpilled": 7},
            base
            | {"attemptId": 1, "status": "ACTIVE" if self.asked < 3 else "COMPLETE", "numCompleteTasks": 1},
        ]

    def failures(self, attempts: list[tuple[int, int]]) -> list[Any]:
        from ebbflow.infra.spark.metrics import TaskFailure

        assert attempts == [(1, 0)]
        return [
            TaskFailure(1, 0, 0, "ExecutorLostFailure (executor 1 ...)", 3.0),
            TaskFailure(1, 1, 0, "java.io.IOException: reported its own run time", 9.0),
        ]


def test_metrics_sum_all_attempts_and_count_the_time_of_tasks_whose_executor_vanished() -> None:
    from ebbflow.infra.clock import SystemClock

    api = _Api()
    metrics = group_metrics(api, [1], SystemClock())  # type: ignore[arg-type]
    assert api.asked == 3
    assert metrics.task_seconds == 2.0 + 2.0 + 3.0
    assert (metrics.tasks, metrics.failed_tasks, metrics.retried_stages) == (7, 2, 1)
    assert (metrics.shuffle_bytes, metrics.spilled_bytes, metrics.input_bytes) == (20, 7, 10)


# --- with one -------------------------------------------------------------------------------------------

ROWS = 200_000


@pytest.fixture(scope="module", name="engine")
def _engine() -> Iterator[Any]:
    from ebbflow.infra.spark.engine import SparkEngine

    # local[2,64]: retries as a cluster does; the limit on broadcasts is far below the data's size
    engine = SparkEngine.start("local[2,64]", memory="1g", conf={"spark.sql.maxBroadcastTableSize": "512k"})
    yield engine
    engine.close()


@pytest.fixture(scope="module", name="numbers")
def _numbers(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    path = tmp_path_factory.mktemp("numbers") / "numbers.parquet"
    values = np.random.default_rng(1).permutation(ROWS)
    pq.write_table(pa.table({"v": values, "w": values % 1000}), path)
    return Relation(
        "numbers", "file", (FileEntry(str(path), path.stat().st_size, 0),), (("v", "bigint"), ("w", "bigint"))
    )


def make_job(sql: str, *relations: Relation, out: Path, partitions: int = 3) -> StageJob:
    folder = out / uuid.uuid4().hex
    folder.mkdir()
    return StageJob(
        uuid.uuid4().hex, "the stage", sql, relations, StorageLocation(folder.as_uri()), partitions
    )


@pytest.mark.spark
def test_a_broadcast_beyond_the_limit_is_told_apart(engine: Any, numbers: Relation, tmp_path: Path) -> None:
    sql = "SELECT /*+ BROADCAST(b) */ a.v FROM numbers a JOIN numbers b ON a.v = b.v"
    with pytest.raises(BroadcastTooLargeError, match="Cannot broadcast the table"):
        engine.run(make_job(sql, numbers, out=tmp_path))
    without = sql.replace("BROADCAST(b)", "MERGE(a, b)")
    assert engine.run(make_job(without, numbers, out=tmp_path)).rows == ROWS


@pytest.mark.spark
def test_metrics_describe_the_stage(engine: Any, numbers: Relation, tmp_path: Path) -> None:
    seen: list[StageProgress] = []
    result = engine.run(
        make_job("SELECT w, count(*) AS n FROM numbers GROUP BY w", numbers, out=tmp_path), seen.append
    )
    assert result.rows == 1000
    assert result.tasks >= 2
    assert 0 < result.task_seconds < 2 * result.seconds + 1
    assert result.shuffle_bytes > 1000
    assert 200_000 < result.input_bytes <= numbers.bytes
    assert result.failed_tasks == result.retried_stages == result.spilled_bytes == 0
    assert seen[-1].tasks_total >= 2
    assert engine._process is not None
    own = engine._process.log.parent  # of the driver: its log, its shuffles
    assert own.stat().st_mode & 0o777 == 0o700
    assert list(own.rglob("blockmgr-*"))


@pytest.mark.spark
def test_a_task_that_fails_by_itself_is_given_up_long_before_the_limit_for_lost_machines(
    engine: Any, numbers: Relation, tmp_path: Path
) -> None:
    seen: list[StageProgress] = []
    # each attempt of the failing task works for a while, so that the watcher sees it between attempts
    sql = (
        "SELECT /*+ MERGE(a, b) */ 1 / (sum(a.v) - sum(a.v)) AS x "
        "FROM numbers a JOIN numbers b ON a.w = b.w GROUP BY a.w"
    )
    with pytest.raises(StageFailedError, match="DIVIDE_BY_ZERO"):
        engine.run(make_job(sql, numbers, out=tmp_path, partitions=2), seen.append)
    assert 4 <= max(p.tasks_failed for p in seen) < 32


@pytest.mark.spark
def test_a_table_of_sparks_own_catalogue_is_listed_and_read(
    engine: Any, numbers: Relation, tmp_path: Path
) -> None:
    source = Path(numbers.files[0].path).parent
    engine._session.sql(f"CREATE TABLE kept (v BIGINT, w BIGINT) USING parquet LOCATION '{source.as_uri()}'")
    try:
        listed = [t for t in engine.tables() if t.name == "kept"]
        assert listed == [Relation("kept", "file", (), (("v", "bigint"), ("w", "bigint")), external=True)]
        job = make_job("SELECT count(*) AS n FROM kept", *listed, out=tmp_path)
        assert engine.run(job).rows == 1
    finally:
        engine._session.sql("DROP TABLE kept")


@pytest.mark.spark
@pytest.mark.parametrize(
    "sql",
    [
        """SELECT 'O''Brien' AS a, "x""y" AS b, 'a\\'b' AS c""",
        "SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY id DESC) AS a, percentile(id, 0.25, id) AS b, "
        "percentile_disc(0.3) WITHIN GROUP (ORDER BY id) AS c, max_by(id, -id, 2) AS d, "
        "listagg(CAST(id AS STRING)) AS e FROM range(10)",
        "SELECT log10(1000) AS a, to_char(12.5, '99.9') AS b, CAST(parse_json('{\"a\": 1}') AS STRING) AS c",
    ],
)
def test_what_the_planner_reads_and_writes_means_the_same_to_spark(engine: Any, sql: str) -> None:
    from ebbflow.planners.query.sql.dialect import spark_sql
    from ebbflow.planners.query.sql.parse import parse as read

    written = spark_sql(read(sql))
    assert engine._session.sql(written).collect() == engine._session.sql(sql).collect()


@pytest.mark.spark
def test_tables_whose_log_tells_their_files_are_what_duckdb_reads(engine: Any, tmp_path: Path) -> None:
    from deltalake import write_deltalake
    from pyiceberg.catalog.sql import SqlCatalog
    from pyiceberg.types import LongType, StringType

    rows = pa.table(
        {
            "id": pa.array([1, 2, 3], pa.int32()),
            "k": ["a b", "ü%/", None],
            "d": [date(2026, 11, 1), None, date(2026, 11, 2)],
            "n": pa.array([1, None, 2], pa.int32()),
            "x": pa.array([Decimal("1.50"), None, Decimal("-2.00")], pa.decimal128(9, 2)),
            "at": pa.array([datetime(2026, 11, 1, 12, 30, tzinfo=UTC)] * 3, pa.timestamp("us", "UTC")),
        }
    )
    write_deltalake(tmp_path / "t/keyed", rows, partition_by=["n", "k", "d", "x", "at"])
    more = rows.append_column("later", pa.array([1.5, None, 2.5]))
    write_deltalake(tmp_path / "t/keyed", more, mode="append", schema_mode="merge")
    write_deltalake(tmp_path / "t/grown", rows.select(["id", "k"]))
    fewer = rows.drop_columns(["at"])  # a type that native stages leave to Spark
    write_deltalake(tmp_path / "t/grown", fewer, mode="append", schema_mode="merge")
    write_deltalake(tmp_path / "t/mapped", rows, configuration={"delta.columnMapping.mode": "name"})
    catalog = SqlCatalog("tests", uri=f"sqlite:///{tmp_path}/c.db", warehouse=f"file://{tmp_path}")
    catalog.create_namespace("i")
    table = catalog.create_table("i.renamed", fewer.schema)
    table.append(fewer)
    with table.update_spec() as spec:
        spec.add_identity("d")
    with table.update_schema() as schema:
        schema.rename_column("k", "key")
        schema.update_column("id", LongType())
    with table.update_schema() as schema:
        schema.add_column("k", StringType())
    newer = fewer.rename_columns(["id", "key", "d", "n", "x"]).append_column("k", pa.array(["7", "8", None]))
    table.append(newer)
    catalog.close()
    found = [*discover(StorageLocation(tmp_path / "t")), *discover(StorageLocation(tmp_path / "i/renamed"))]
    rows_of = {"grown": [6, 2], "keyed": [6, 2], "mapped": [3, 1], "renamed": [6, 2]}
    assert [one.name for one in found] == list(rows_of)
    conditions = ("true", "k <> 'a b'")
    with DuckDbEngine.start(1, 1.0) as other:
        for one, condition in itertools.product(found, conditions):
            answers = []
            for reader, native in ((other, False), (engine, False), (engine, True)):
                job = make_job(f"SELECT * FROM {one.name} WHERE {condition}", one, out=tmp_path)
                done = reader.run(replace(job, native=native))
                answers.append(pq.read_table(job.output.root))
                assert done.native == (native and one.name in ("grown", "renamed")), done.remark
                assert answers[-1].column_names == [name for name, _ in one.columns]
                assert answers[-1].num_rows == rows_of[one.name][conditions.index(condition)]
                assert same_rows(answers[-1], answers[0]) is None


@pytest.mark.spark
@pytest.mark.parametrize("name", ["env:HOME", "system:user.dir", "spark:spark.app.name", "spark.app.name"])
def test_no_text_of_a_statement_is_replaced_by_settings_or_the_environment(
    engine: Any, tmp_path: Path, name: str
) -> None:
    job = make_job(
        f"SELECT '${{{name}}}' AS v, '${{{name}}}' = concat('$', '{{{name}}}') AS same", out=tmp_path
    )
    engine.run(job)
    table = pq.read_table(job.output.root)
    assert table.to_pylist() == [{"v": f"${{{name}}}", "same": True}]


@pytest.mark.spark
@pytest.mark.parametrize("operators", [100, 2000, 20_000])
def test_a_statement_that_is_too_deep_for_spark_fails_by_our_error(
    engine: Any, tmp_path: Path, operators: int
) -> None:
    sum_of_ones = make_job("SELECT id" + " + 1" * operators + " AS v FROM range(1)", out=tmp_path)
    if operators == 100:
        assert engine.run(sum_of_ones).rows == 1
    else:
        with pytest.raises(StageFailedError, match=r"nested too deeply for Spark|TOO_COMPLEX"):
            engine.run(sum_of_ones)
    assert engine.run(make_job("SELECT 1 AS v", out=tmp_path)).rows == 1  # Spark is as it was


@pytest.mark.spark
def test_a_process_has_one_spark_and_a_second_start_says_so(engine: Any) -> None:
    from ebbflow.infra.spark.engine import SparkEngine

    with pytest.raises(EngineUnavailableError, match="already has a SparkContext"):
        SparkEngine.start("local[1]")


@pytest.mark.spark
def test_queries_of_one_process_share_a_spark_and_its_cores_by_weight(
    engine: Any, numbers: Relation, tmp_path: Path
) -> None:
    from ebbflow.infra.spark.engine import SparkEngine

    conf = {"spark.sql.maxBroadcastTableSize": "512k"}
    with SparkEngine.start("local[2,64]", memory="1g", conf=conf, weight=3.0) as second:
        assert second.application_id == engine.application_id
        ran: list[int] = []
        jobs = [
            (e, make_job("SELECT sum(v) AS s FROM numbers", numbers, out=tmp_path)) for e in (engine, second)
        ]
        threads = [threading.Thread(target=lambda e=e, j=j: ran.append(e.run(j).rows)) for e, j in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert ran == [1, 1]
        root = second._context._jsc.sc().taskScheduler().rootPool()
        pool = root.getSchedulableByName(second._pools.name(0))  # as Spark finds a job's pool
        assert (pool.parent().weight(), pool.weight()) == (3, 1)
        assert pool.parent().parent().equals(root)
        second.hold(1.0)  # in this process there are no executors to hold
    assert engine.run(make_job("SELECT 1 AS one", out=tmp_path)).rows == 1


@pytest.mark.spark
def test_a_callers_thread_keeps_no_trace_of_a_stage(engine: Any, numbers: Relation, tmp_path: Path) -> None:
    engine.run(make_job("SELECT 1 AS one", out=tmp_path))
    context = engine._session.sparkContext
    assert context.getLocalProperty("spark.jobGroup.id") is None
    assert context.getLocalProperty("spark.scheduler.pool") is None


@pytest.mark.spark
def test_executors_compute_the_checksums_that_the_driver_does(
    engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from ebbflow.infra.spark import checksums as executors
    from ebbflow.infra.storage import checksums

    values = np.random.default_rng(2)
    entries = []
    for i, size in enumerate([*range(40), 1000, 100_000, 300_000]):
        folder = tmp_path / ("a b", "50%20", "x*[1]", "é")[i % 4]
        folder.mkdir(exist_ok=True)
        path = folder / f"part-{i // 4}.parquet"
        path.write_bytes(values.bytes(size))
        entries.append(FileEntry(str(path), size, 0.0))
    expected = checksums.of_files("file", entries)
    here: list[str] = []
    of_file = checksums.of_file
    monkeypatch.setattr(checksums, "of_file", lambda *a: here.append(a[1]) or of_file(*a))
    monkeypatch.setattr(executors, "LARGEST", 200_000)

    assert executors.of_files(engine._session, "file", entries) == expected
    # Spark reads no empty file, and the last one is too large for an executor
    assert here == [entries[0].path, entries[-1].path]
    assert engine._context.getLocalProperty("spark.jobGroup.id") is None
    assert engine.checksums("file", entries) == expected  # on this machine no job is started for it
    assert len(here) == 2 + len(entries)

    monkeypatch.setattr(executors, "_LEAST_WAIT", 0.0)
    monkeypatch.setattr(executors, "_DRIVER", 1e18)  # executors that take too long are not waited for
    assert executors.of_files(engine._session, "file", entries) == expected
    gone = [FileEntry(str(tmp_path / "none"), 3, 0.0)]
    with pytest.raises(FileNotFoundError):
        executors.of_files(engine._session, "file", gone)
    assert "executors cannot hash" in caplog.text


@pytest.mark.spark
def test_a_jvm_that_dies_under_a_stage_is_an_engine_that_went_away(
    engine: Any, numbers: Relation, tmp_path: Path
) -> None:
    """The last test of the module: it kills the module's JVM."""
    sql = (
        "SELECT /*+ MERGE(a, b, c) */ count(*) AS n FROM numbers a "
        "JOIN numbers b ON a.w = b.w JOIN numbers c ON b.w = c.w"
    )
    errors: list[BaseException] = []
    begun = threading.Event()

    def run() -> None:
        try:
            job = make_job(sql, numbers, out=tmp_path)
            engine.run(job, lambda p: begun.set() if p.tasks_running else None)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert begun.wait(60)
    os.kill(engine._process.gateway.proc.pid, signal.SIGKILL)
    thread.join(60)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [EngineUnavailableError]
    engine.close()
    engine.close()
    with pytest.raises(EngineUnavailableError, match="closed"):
        engine.run(make_job("SELECT 1 AS one", out=tmp_path))
    _assert_another_can_start()


def _assert_another_can_start() -> None:
    from pyspark import SparkContext

    assert SparkContext._active_spark_context is None
