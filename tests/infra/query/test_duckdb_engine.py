"""What only DuckDB does: S3 through Arrow, and shares of this process."""

import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.errors import StageCancelledError, StageFailedError
from ebbflow.infra.protocols import Relation, StageJob
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.query.results import count_rows
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.filesystems import resolve
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.confinement import Ahead


@pytest.fixture(name="engine")
def _engine() -> Iterator[DuckDbEngine]:
    with DuckDbEngine.start(threads=1, memory_gb=1) as engine:
        yield engine


def _job(sql: str, uri: str, *relations: Relation) -> StageJob:
    return StageJob(uuid.uuid4().hex, "the stage", sql, relations, StorageLocation(uri))


def _numbers(uri: str, rows: int = 1000) -> Relation:
    filesystem, path = resolve(f"{uri}/in put/numbers.parquet")
    pq.write_table(pa.table({"v": list(range(rows))}), path, filesystem=filesystem)
    size = filesystem.get_file_info(path).size
    return Relation("numbers", "s3", (FileEntry(path, size, 0.0),), (("v", "bigint"),))


def test_relations_and_outputs_on_s3(engine: DuckDbEngine, s3: Callable[[], str]) -> None:
    uri = s3()
    result = engine.run(
        _job("SELECT v, sum(v) OVER () AS s FROM numbers ORDER BY v DESC", f"{uri}/out", _numbers(uri))
    )
    assert result.rows == count_rows(StorageLocation(f"{uri}/out")) == 1000
    assert result.columns == (("v", "bigint"), ("s", "bigint"))
    filesystem, path = resolve(f"{uri}/out/part-00000.parquet")
    table = pq.read_table(path, filesystem=filesystem)
    assert table["v"].to_pylist() == list(range(999, -1, -1))
    assert table["s"].to_pylist()[:1] == [499500]


def test_databases_are_opened_ahead_and_closed_once_the_next_one_is_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []
    openers: list[str] = []
    opened = Ahead._opened

    def told() -> Any:
        openers.append(threading.current_thread().name)
        found.append(opened())
        return found[-1]

    monkeypatch.setattr(Ahead, "_opened", staticmethod(told))
    with DuckDbEngine.start(threads=1, memory_gb=1) as engine:
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            engine.confine([], [StorageLocation(folder.as_uri())])
            assert engine.run(_job("SELECT current_setting('threads') AS n", folder.as_uri())).tasks == 1
            assert pq.read_table(folder / "part-00000.parquet")["n"].to_pylist() == [1]
        assert openers == ["ebbflow-database"] * 3
        *left, used = found
        assert used.execute("SELECT 1").fetchone() == (1,)
        for one in left:
            with pytest.raises(duckdb.ConnectionException, match="closed"):
                one.execute("SELECT 1")


def test_a_stage_whose_input_is_gone_fails_as_stages_do(engine: DuckDbEngine, tmp_path: Path) -> None:
    """So that the input is computed again."""
    (tmp_path / "out").mkdir()
    gone = Relation(
        "ckpt_1", "file", (FileEntry(str(tmp_path / "part-0.parquet"), 10, 0.0),), (("v", "bigint"),)
    )
    with pytest.raises(StageFailedError, match=r"part-0\.parquet"):
        engine.run(_job("SELECT v FROM ckpt_1", (tmp_path / "out").as_uri(), gone))


def test_a_stage_on_s3_hands_its_own_types_to_the_next(engine: DuckDbEngine, s3: Callable[[], str]) -> None:
    uri = s3()
    made = engine.run(_job("SELECT TIME '10:00:01.5' AS t", f"{uri}/first"))
    filesystem, path = resolve(f"{uri}/first/part-00000.parquet")
    size = filesystem.get_file_info(path).size
    first = Relation("ckpt_1", "s3", (FileEntry(path, size, 0.0),), made.columns)
    engine.run(_job("SELECT typeof(t) AS kind FROM ckpt_1", f"{uri}/second", first))
    filesystem, path = resolve(f"{uri}/second/part-00000.parquet")
    assert pq.read_table(path, filesystem=filesystem).to_pydict() == {"kind": ["TIME"]}


def test_an_empty_result_on_s3_has_a_schema(engine: DuckDbEngine, s3: Callable[[], str]) -> None:
    uri = s3()
    assert engine.run(_job("SELECT v FROM numbers WHERE v < 0", f"{uri}/out", _numbers(uri))).rows == 0
    assert count_rows(StorageLocation(f"{uri}/out")) == 0


def test_a_missing_object_fails_the_stage(engine: DuckDbEngine, s3: Callable[[], str]) -> None:
    uri = s3()
    gone = Relation("gone", "s3", (FileEntry(f"{resolve(uri)[1]}/gone.parquet", 9, 0.0),), (("v", "bigint"),))
    with pytest.raises(StageFailedError, match=r"gone\.parquet"):
        engine.run(_job("SELECT v FROM gone", f"{uri}/out", gone))


def test_a_stage_that_streams_to_s3_can_be_cancelled(engine: DuckDbEngine, s3: Callable[[], str]) -> None:
    uri = s3()
    job = _job("SELECT a.v FROM numbers a, numbers b, numbers c", f"{uri}/out", _numbers(uri))
    timer = threading.Timer(0.5, engine.cancel, [job.id])
    timer.start()
    with pytest.raises(StageCancelledError):
        engine.run(job)
    timer.join()


def test_a_smaller_share_is_fewer_threads_and_less_memory(engine: DuckDbEngine, tmp_path: Path) -> None:
    engine.resize(3.0, 0.5)
    (tmp_path / "a").mkdir()
    assert engine.run(_job("SELECT 1 AS one", (tmp_path / "a").as_uri())).tasks == 3
    engine.resize(0.2, 0.25)
    (tmp_path / "b").mkdir()
    job = _job("SELECT current_setting('memory_limit') AS m", (tmp_path / "b").as_uri())
    assert engine.run(job).tasks == 1
    assert pq.read_table(tmp_path / "b" / "part-00000.parquet")["m"].to_pylist() == ["256.0 MiB"]


def test_a_share_that_stays_is_not_told_again(engine: DuckDbEngine, tmp_path: Path) -> None:
    """DuckDB would give back its free memory: to fault that in anew costs as much as a small statement."""
    told: list[str] = []

    class Told:
        def __init__(self, connection: Any) -> None:
            self._connection = connection

        def __enter__(self) -> "Told":
            return self

        def __exit__(self, *_: object) -> None:
            self._connection.close()

        def cursor(self) -> "Told":
            return Told(self._connection.cursor())

        def execute(self, statement: str) -> None:
            told.append(statement)
            self._connection.execute(statement)

        def close(self) -> None:
            self._connection.close()

    engine.resize(2.0, 0.5)
    engine.run(_job("SELECT 1 AS one", tmp_path.as_uri()))
    engine._connection = Told(engine._connection)
    engine.resize(2.0, 0.5)
    assert told == []
    engine.resize(1.0, 0.5)
    assert told == ["SET GLOBAL threads = '1'"]


def test_what_does_not_fit_in_memory_is_spilled_beside_nothing_of_the_users(
    engine: DuckDbEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine.resize(1, 0.0625)
    (tmp_path / "out").mkdir()
    sql = "SELECT uuid()::VARCHAR AS u, range AS r FROM range(1500000) ORDER BY u"
    result = engine.run(_job(sql, (tmp_path / "out").as_uri()))
    assert result.rows == 1_500_000
    assert result.spilled_bytes > 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_ctrl_c_is_one_though_duckdb_makes_another_error_of_it(engine: DuckDbEngine, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    begun = threading.Event()
    sender = threading.Thread(target=lambda: (begun.wait(150), signal.pthread_kill(main, signal.SIGINT)))
    main = threading.main_thread().ident
    assert main is not None
    sender.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            engine.run(
                _job(
                    "SELECT count(*) FROM range(10000000) a(i), range(1000000) b(j) WHERE i * j % 7 = 3",
                    str(tmp_path),
                ),
                lambda _: begun.set(),
            )
    finally:
        begun.set()
        sender.join()
        signal.signal(signal.SIGINT, before)


def test_a_folder_without_output_is_no_success(tmp_path: Path) -> None:
    with pytest.raises(StageFailedError, match="wrote no Parquet file"):
        count_rows(StorageLocation(tmp_path.as_uri()))
