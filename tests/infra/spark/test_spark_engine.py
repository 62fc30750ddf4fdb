"""What only Spark does: broadcasts, metrics, tables of its own. The contract has a module of its own."""

import itertools
import os
import re
import signal
import threading
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
)
from ebbflow.infra.protocols import Relation, StageJob, StageProgress
from ebbflow.infra.query.comparison import same_rows
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.parquet import discover

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
        listed = engine.tables(["kept", "nowhere", "no.where"])
        assert "kept" in engine.table_list()
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
def test_without_a_client_in_sparks_jvm_spark_sql_runs_nothing_on_object_storage(engine: Any) -> None:
    told = r"hadoop-aws:3\.[0-9.]+, with the bundle of software\.amazon\.awssdk.*spark\.jars\.packages=.*spark\.jars="
    there = Relation("t", "s3", (FileEntry("bucket/t.parquet", 1, 0),), (("v", "bigint"),))
    for read, store in (((), "s3://bucket/store"), ((there,), "/store")):
        engine.confine(read, [StorageLocation(store)])
        assert re.search(told, engine.spark_sql_obstacle())
    job = StageJob(
        "away", "the stage", "SELECT max(v) AS top FROM t", (there,), StorageLocation("s3://bucket/out")
    )
    with pytest.raises(EngineUnavailableError, match=told):
        engine.run(job)
    ranked = replace(job, id="ranked", sql="SELECT v, lag(v) OVER (ORDER BY v) AS r FROM t", native=True)
    with pytest.raises(
        EngineUnavailableError,
        match=told + ".*the stage runs on Spark SQL, for Lag over a window is not proven",
    ):
        engine.run(ranked)
    engine.confine([], [StorageLocation("/store")])
    assert engine.spark_sql_obstacle() == ""


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
    assert begun.wait(150)
    os.kill(engine._process.gateway.proc.pid, signal.SIGKILL)
    thread.join(150)
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
