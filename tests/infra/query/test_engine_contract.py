"""What every SQL engine must do, run against each of them."""

import datetime as dt
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from ebbflow.infra.errors import (
    EngineUnavailableError,
    StageCancelledError,
    StageFailedError,
    StorageFullError,
)
from ebbflow.infra.protocols import Relation, SqlEngine, StageProgress
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.parquet import discover
from tests.infra.query.contract import (
    NativeEngine,
    collect,
    connected,
    make_job,
    output,
    relation,
    rows,
    wait_until,
)
from tests.infra.tables.deleting import DELETING, delete_by_vector

ROWS = 40_000
# 10^12 joined rows; sorted inputs, because Spark's generated loops over a hash join are deaf to interrupts
SLOW = (
    "SELECT /*+ MERGE(a, b, c) */ count(*) AS n FROM numbers a "
    "JOIN numbers b ON a.word = b.word JOIN numbers c ON b.word = c.word"
)


@pytest.fixture(
    scope="module",
    params=[
        "duckdb",
        pytest.param("spark", marks=pytest.mark.spark(shared=True)),
        pytest.param("native", marks=pytest.mark.spark(shared=True)),
        *([pytest.param("connect", marks=pytest.mark.spark)] if find_spec("grpc_status") else []),
    ],
    name="engine",
)
def _engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SqlEngine]:
    engine: SqlEngine
    if request.param == "connect":  # make connect
        yield from connected(tmp_path_factory.mktemp("connect"))
        return
    if request.param == "duckdb":
        from ebbflow.infra.query.duckdb import DuckDbEngine

        engine = DuckDbEngine.start(threads=2, memory_gb=2)
    else:
        from ebbflow.infra.spark.engine import SparkEngine

        engine = SparkEngine.start("local[2]", memory="1g")
        if request.param == "native":
            engine = cast("SqlEngine", NativeEngine(engine))
    yield engine
    engine.close()


@pytest.fixture(scope="module", name="numbers")
def _numbers(tmp_path_factory: pytest.TempPathFactory) -> Relation:
    rows = np.arange(ROWS)
    table = pa.table(
        {"v": rows, "half": rows // 2, "word": pa.array([f"w{i % 7}" for i in rows], pa.string_view())}
    )
    return relation(
        tmp_path_factory.mktemp("numbers"),
        "numbers",
        [table.slice(0, ROWS // 2), table.slice(ROWS // 2)],
        (("v", "bigint"), ("half", "bigint"), ("word", "string")),
    )


def test_a_stage_reads_all_files_of_its_relations_and_counts_what_it_writes(
    engine: SqlEngine, numbers: Relation, tmp_path: Path
) -> None:
    job = make_job(
        "SELECT word, count(*) AS n, sum(v) AS s FROM numbers GROUP BY word", numbers, out=tmp_path
    )
    result = engine.run(job)
    assert result.rows == 7
    expected: dict[str, list[int]] = {}
    for v in range(ROWS):
        expected.setdefault(f"w{v % 7}", []).append(v)
    assert rows(job) == sorted((word, len(vs), sum(vs)) for word, vs in expected.items())
    assert result.columns == (("word", "string"), ("n", "bigint"), ("s", "bigint"))
    assert result.tasks >= 1
    assert result.seconds > 0
    assert result.task_seconds > 0 or hasattr(engine, "address")  # Spark Connect tells no times
    assert result.failed_tasks == result.retried_stages == 0
    files = [path for path in Path(job.output.root).rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_the_output_of_a_stage_is_an_input_of_the_next(
    engine: SqlEngine, numbers: Relation, tmp_path: Path
) -> None:
    first = make_job("SELECT v, half FROM numbers WHERE v < 100", numbers, out=tmp_path)
    result = engine.run(first)
    files = sorted(Path(first.output.root).glob("*.parquet"))
    checkpoint = Relation(
        "ckpt_1", "file", tuple(FileEntry(str(f), f.stat().st_size, 0) for f in files), result.columns
    )
    second = make_job(
        "SELECT c.v FROM ckpt_1 AS c JOIN numbers AS n ON c.half = n.v", checkpoint, numbers, out=tmp_path
    )
    assert engine.run(second).rows == 100


def test_types_survive_reading_and_writing(engine: SqlEngine, tmp_path: Path) -> None:
    moment = dt.datetime(2024, 2, 29, 12, 30, 15, 123456)
    columns = {
        "b": (pa.array([True, None]), "boolean"),
        "i": (pa.array([1, -2], pa.int32()), "int"),
        "l": (pa.array([1 << 40, None], pa.int64()), "bigint"),
        "d": (pa.array([1.5, -0.0]), "double"),
        "m": (pa.array([Decimal("12345678901.23"), Decimal("-0.01")], pa.decimal128(15, 2)), "decimal(15,2)"),
        "s": (pa.array(["ä 'quoted'", ""]), "string"),
        "x": (pa.array([b"\x00\xff", None], pa.binary()), "binary"),
        "day": (pa.array([dt.date(1999, 12, 31), dt.date(2024, 2, 29)]), "date"),
        "at": (pa.array([moment, None], pa.timestamp("us", tz="UTC")), "timestamp"),
        "local": (pa.array([moment, None], pa.timestamp("us")), "timestamp_ntz"),
        "many": (pa.array([[1, 2], []], pa.list_(pa.int64())), "array<bigint>"),
        "pair": (
            pa.array([{"a": 1, "b": "x"}, None], pa.struct({"a": pa.int32(), "b": pa.string()})),
            "struct<a:int,b:string>",
        ),
    }
    table = pa.table({name: values for name, (values, _) in columns.items()})
    kinds = tuple((name, kind) for name, (_, kind) in columns.items())
    source = relation(tmp_path, "kinds", [table], kinds)
    job = make_job("SELECT * FROM kinds", source, out=tmp_path)
    assert engine.run(job).columns == kinds
    assert output(job).to_pylist() == table.to_pylist()


def test_unsigned_and_wide_integers_become_types_that_the_other_engine_reads(
    engine: SqlEngine, tmp_path: Path
) -> None:
    table = pa.table({"u": pa.array([1, (1 << 32) - 1], pa.uint32())})
    source = relation(tmp_path, "wide", [table], (("u", "bigint"),))
    job = make_job("SELECT u, sum(u) AS s FROM wide GROUP BY u", source, out=tmp_path)
    assert engine.run(job).columns == (("u", "bigint"), ("s", "bigint"))
    assert rows(job) == [(1, 1), ((1 << 32) - 1, (1 << 32) - 1)]


def test_a_column_that_is_only_ever_null_is_stored_as_text(
    engine: SqlEngine, numbers: Relation, tmp_path: Path
) -> None:
    job = make_job("SELECT NULL AS nothing, v FROM numbers WHERE v < 2", numbers, out=tmp_path)
    assert engine.run(job).columns[0] == ("nothing", "string")
    assert rows(job) == [(None, 0), (None, 1)]


@pytest.mark.parametrize("files", [0, 1], ids=["no file", "a file without rows"])
def test_an_empty_relation_gives_an_empty_output_with_its_schema(
    engine: SqlEngine, tmp_path: Path, files: int
) -> None:
    kinds = (("a", "int"), ("b", "decimal(10,2)"), ("c", "array<string>"))
    empty = pa.table(
        {
            "a": pa.array([], pa.int32()),
            "b": pa.array([], pa.decimal128(10, 2)),
            "c": pa.array([], pa.list_(pa.string())),
        }
    )
    source = relation(tmp_path, "empty", [empty] * files, kinds)
    job = make_job("SELECT * FROM empty", source, out=tmp_path)
    result = engine.run(job)
    assert (result.rows, result.columns) == (0, kinds)
    assert output(job).num_rows == 0
    assert output(job).column_names == ["a", "b", "c"]


def test_order_by_is_the_order_of_the_part_files(
    engine: SqlEngine, numbers: Relation, tmp_path: Path
) -> None:
    job = make_job(
        "SELECT word, v, NULL AS nothing FROM numbers ORDER BY word DESC, v", numbers, out=tmp_path
    )
    engine.run(job)
    got = output(job)
    pairs = list(zip(got["word"].to_pylist(), got["v"].to_pylist(), strict=True))
    assert len(pairs) == ROWS
    by_v = sorted(pairs, key=lambda pair: pair[1])
    assert pairs == sorted(by_v, key=lambda pair: pair[0], reverse=True)


def test_names_and_paths_with_unusual_characters_are_read(engine: SqlEngine, tmp_path: Path) -> None:
    folder = tmp_path / "it's [a] day=1 {x,y} 100%"
    folder.mkdir()
    table = pa.table({'odd `name" here': [1, 2], "SELECT": ["a", "b"]})
    source = relation(folder, "select from", [table], (('odd `name" here', "bigint"), ("SELECT", "string")))
    quote = "`" if engine.name == "spark" else '"'
    job = make_job(f"SELECT * FROM {quote}select from{quote}", source, out=tmp_path)
    assert engine.run(job).rows == 2
    assert rows(job) == [(1, "a"), (2, "b")]


def test_partition_directories_are_columns(engine: SqlEngine, tmp_path: Path) -> None:
    entries = []
    for number, path in enumerate(
        (
            "dt=2026-11-01/kind=a%20b%2Fc/n=7",
            "dt=2026-11-1/kind=de/n=-0",
            "dt=__HIVE_DEFAULT_PARTITION__/kind=x/n=10",
        )
    ):
        folder = tmp_path / "env=test" / "t" / path
        folder.mkdir(parents=True)
        pq.write_table(pa.table({"v": [2 * number, 2 * number + 1]}), folder / "1.parquet")
        entries.append(FileEntry(str(folder / "1.parquet"), (folder / "1.parquet").stat().st_size, 1.0))
    columns = (("v", "bigint"), ("kind", "string"), ("dt", "date"), ("n", "bigint"))
    source = Relation("t", "file", tuple(entries), columns, partitions=("dt", "kind", "n"))
    job = make_job(
        "SELECT kind, n, dt, sum(v) AS s FROM t WHERE n < 10 GROUP BY kind, n, dt", source, out=tmp_path
    )
    result = engine.run(job)
    day = dt.date(2026, 11, 1)
    assert rows(job) == [("a b/c", 7, day, 1), ("de", 0, day, 5)]
    assert result.columns == (("kind", "string"), ("n", "bigint"), ("dt", "date"), ("s", "bigint"))
    assert result.native or not isinstance(engine, NativeEngine), result.remark
    job = make_job("SELECT v FROM t WHERE dt IS NULL", source, out=tmp_path)
    engine.run(job)
    assert rows(job) == [(4,), (5,)]


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("SELECT nonsense FROM numbers", "nonsense"),
        ("SELECT * FROM absent", "absent"),
        ("SELECT v FROM numbers WHERE (", "the stage: "),
        ("SELECT CAST(word AS INT) AS i FROM numbers", "'w"),
    ],
    ids=["column", "table", "syntax", "value"],
)
def test_a_statement_that_cannot_run_fails_with_one_line_that_says_why(
    engine: SqlEngine, numbers: Relation, tmp_path: Path, sql: str, told: str
) -> None:
    with pytest.raises(StageFailedError) as caught:
        engine.run(make_job(sql, numbers, out=tmp_path))
    message = str(caught.value)
    assert told in message
    assert message.startswith("the stage: ")
    assert "\n" not in message
    assert "\tat " not in message


def test_columns_of_one_name_are_stored_under_distinct_ones(
    engine: SqlEngine, numbers: Relation, tmp_path: Path
) -> None:
    job = make_job("SELECT v, half AS V, word AS v_1 FROM numbers WHERE v = 8", numbers, out=tmp_path)
    result = engine.run(job)
    assert [name.lower() for name, _ in result.columns] == ["v", "v_2", "v_1"]
    assert output(job).column_names == [name for name, _ in result.columns]
    assert rows(job) == [(8, 4, "w1")]


@pytest.mark.parametrize("content", [b"not parquet at all", b"PAR1" + b"x" * 100], ids=["foreign", "torn"])
def test_a_corrupt_file_fails_the_stage_and_is_named(
    engine: SqlEngine, tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "corrupt.parquet"
    path.write_bytes(content)
    source = Relation("c", "file", (FileEntry(str(path), len(content), 0),), (("a", "int"),))
    with pytest.raises(StageFailedError, match=r"corrupt\.parquet"):
        engine.run(make_job("SELECT a FROM c", source, out=tmp_path))


def test_a_missing_file_fails_the_stage_and_is_named(engine: SqlEngine, tmp_path: Path) -> None:
    source = Relation("m", "file", (FileEntry(str(tmp_path / "gone.parquet"), 9, 0),), (("a", "int"),))
    with pytest.raises(StageFailedError, match=r"gone\.parquet"):
        engine.run(make_job("SELECT a FROM m", source, out=tmp_path))


def test_progress_never_falls_and_ends_complete(engine: SqlEngine, numbers: Relation, tmp_path: Path) -> None:
    seen: list[StageProgress] = []
    some = "(SELECT word FROM numbers WHERE v % 64 = 0)"
    sql = f"SELECT a.word, count(*) AS n FROM {some} a JOIN numbers b ON a.word = b.word GROUP BY a.word"
    engine.run(make_job(sql, numbers, out=tmp_path, partitions=4), seen.append)
    done = [p.tasks_done for p in seen]
    assert done == sorted(done)
    assert all(0 <= p.tasks_done <= p.tasks_total for p in seen)
    assert seen[-1].tasks_done == seen[-1].tasks_total > 0


def test_a_listener_that_raises_does_not_fail_the_stage(
    engine: SqlEngine, numbers: Relation, tmp_path: Path
) -> None:
    def broken(_: StageProgress) -> None:
        raise RuntimeError("listener")

    assert engine.run(make_job("SELECT v FROM numbers", numbers, out=tmp_path), broken).rows == ROWS


def test_a_running_stage_is_cancelled_from_another_thread_within_seconds(
    engine: SqlEngine, numbers: Relation, tmp_path: Path
) -> None:
    job = make_job(SLOW, numbers, out=tmp_path)
    begun = threading.Event()
    errors: list[BaseException] = []
    thread = threading.Thread(target=collect, args=(engine, job, errors, lambda _: begun.set()))
    thread.start()
    assert begun.wait(150)
    asked = time.monotonic()
    engine.cancel(job.id)
    thread.join(150)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [StageCancelledError]
    assert time.monotonic() - asked < 150
    # nothing of it lingers
    assert engine.run(make_job("SELECT v FROM numbers WHERE v < 3", numbers, out=tmp_path)).rows == 3


def test_a_stage_cancelled_before_its_first_task_is_cancelled_all_the_same(
    engine: SqlEngine, numbers: Relation, tmp_path: Path
) -> None:
    job = make_job(SLOW, numbers, out=tmp_path)
    errors: list[BaseException] = []
    thread = threading.Thread(target=collect, args=(engine, job, errors, None))
    thread.start()
    known = engine._running  # type: ignore[attr-defined]
    wait_until(lambda: job.id in known)
    engine.cancel(job.id)
    thread.join(150)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [StageCancelledError]


def test_cancelling_one_stage_leaves_the_others_alone(
    engine: SqlEngine, numbers: Relation, tmp_path: Path
) -> None:
    doomed = make_job(SLOW, numbers, out=tmp_path)
    errors: list[BaseException] = []
    thread = threading.Thread(target=collect, args=(engine, doomed, errors, None))
    thread.start()
    try:
        assert engine.run(make_job("SELECT v FROM numbers", numbers, out=tmp_path)).rows == ROWS
        assert thread.is_alive()
        engine.cancel("never heard of")
        engine.cancel(doomed.id)
    finally:
        engine.cancel(doomed.id)
        thread.join(150)
    assert [type(error) for error in errors] == [StageCancelledError]


def test_concurrent_stages_see_only_their_own_relations(engine: SqlEngine, tmp_path: Path) -> None:
    jobs, threads, errors = [], [], []
    for number in range(4):
        table = pa.table({"a": list(range(number + 1))})
        folder = tmp_path / str(number)
        folder.mkdir()
        source = relation(folder, "same_name", [table], (("a", "bigint"),))
        job = make_job("SELECT max(a) AS top FROM same_name", source, out=tmp_path, partitions=number + 1)
        jobs.append(job)
        threads.append(threading.Thread(target=collect, args=(engine, job, errors, None)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    assert not errors
    assert [rows(job) for job in jobs] == [[(0,)], [(1,)], [(2,)], [(3,)]]


def test_a_full_disk_is_told_apart_from_a_failed_statement(
    engine: SqlEngine, numbers: Relation, tmp_path: Path
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = (
        os.geteuid() == 0
        and not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)], capture_output=True, check=False
        ).returncode
    )
    if not mounted:
        pytest.skip("needs the right to mount a small file system")
    try:
        job = make_job("SELECT v, v * 7919 % 100003 AS w, uuid() AS u FROM numbers", numbers, out=small)
        with pytest.raises(StorageFullError, match="no space left"):
            engine.run(job)
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


def test_resizing_changes_no_result(engine: SqlEngine, numbers: Relation, tmp_path: Path) -> None:
    sql = "SELECT half, count(*) AS n FROM numbers GROUP BY half"
    for cores, memory in ((1, 0.5), (2, 2.0)):
        engine.resize(cores, memory)
        assert engine.run(make_job(sql, numbers, out=tmp_path)).rows == ROWS // 2


@pytest.mark.parametrize("kind", ["duckdb"])
def test_a_closed_engine_refuses_work_and_may_be_closed_again(
    kind: str, numbers: Relation, tmp_path: Path
) -> None:
    from ebbflow.infra.query.duckdb import DuckDbEngine

    engine = DuckDbEngine.start(threads=1)
    job = make_job(SLOW, numbers, out=tmp_path)
    errors: list[BaseException] = []
    thread = threading.Thread(target=collect, args=(engine, job, errors, None))
    thread.start()
    wait_until(lambda: job.id in engine._running)
    engine.close()
    engine.close()
    thread.join(150)
    assert [type(error) for error in errors] == [StageCancelledError]
    with pytest.raises(EngineUnavailableError, match="closed"):
        engine.run(make_job("SELECT 1 AS one", out=tmp_path))


def test_rows_that_a_log_deletes_are_left_out(engine: SqlEngine, tmp_path: Path) -> None:
    place = tmp_path / "a b+c ü"
    data = pa.table({"v": range(200_000), "half": ["x", "y"] * 100_000})
    write_deltalake(place / "t", data, partition_by=["half"], configuration=DELETING)
    gone = [*range(70), 99_999]
    delete_by_vector(place / "t", 0, gone, "half=y")
    write_deltalake(place / "t", data.slice(0, 10), mode="append")
    (found,) = discover(StorageLocation(place))
    wanted = [v for v in range(200_000) if v % 2 == 0 or v // 2 not in set(gone)] + list(range(10))
    sums = "SELECT half, count(*) AS n, sum(v) AS v, min(v) AS low, max(v) AS high FROM t GROUP BY half"
    job = make_job(sums, found, out=tmp_path)
    engine.run(job)
    expected = [
        (name, len(some), sum(some), min(some), max(some))
        for name, some in (("x", [v for v in wanted if v % 2 == 0]), ("y", [v for v in wanted if v % 2]))
    ]
    assert rows(job) == expected
    few = make_job("SELECT v, half FROM t WHERE v BETWEEN 135 AND 145 AND half = 'y'", found, out=tmp_path)
    engine.run(few)
    assert rows(few) == [(141, "y"), (143, "y"), (145, "y")]
    largest = max((file for file in found.files if "half=y" in file.path), key=lambda file: file.size)
    alone = make_job(
        "SELECT count(*) AS n FROM t AS a JOIN t AS b ON a.v = b.v",
        replace(found, files=(largest,)),
        out=tmp_path,
    )
    engine.run(alone)
    assert rows(alone) == [(100_000 - len(gone),)]
