"""DuckDB's own lock, which holds what gets past the check where SQL is parsed: these statements go to it directly."""

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.errors import StageFailedError
from ebbflow.infra.protocols import Relation, StageJob, StageProgress
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.confinement import NOTHING, Ahead, AllowedAccess, configuration, lock
from ebbflow.infra.tables.statistics import collect, selectivity

TIMEOUT = 150.0  # seconds


@pytest.fixture(name="engine")
def _engine() -> Iterator[DuckDbEngine]:
    with DuckDbEngine.start(threads=1, memory_gb=1) as engine:
        yield engine


def relation(folder: Path, name: str = "numbers", rows: int = 3) -> Relation:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.parquet"
    pq.write_table(pa.table({"v": list(range(rows))}), path)
    return Relation(name, "file", (FileEntry(str(path), path.stat().st_size, 0.0),), (("v", "bigint"),))


def job(sql: str, folder: Path, *relations: Relation) -> StageJob:
    out = folder / uuid.uuid4().hex
    out.mkdir(parents=True)
    return StageJob(uuid.uuid4().hex, "the stage", sql, relations, StorageLocation(f"file://{out}"))


def rows(done: StageJob) -> list[object]:
    path = Path(done.output.root) / "part-00000.parquet"
    return [row["v"] for row in pq.read_table(path).to_pylist()]


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT content AS v FROM read_text('/etc/passwd')",
        "SELECT content AS v FROM read_blob('/etc/passwd')",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '{other}'",
        "SELECT * FROM read_parquet('{other}')",
        "SELECT * FROM read_parquet('{beside}/*.parquet')",
        "SELECT * FROM read_parquet('{store}/../other/other.parquet')",
        "SELECT * FROM read_parquet('file://{other}')",
        "SELECT * FROM read_parquet('{store}2/x.parquet')",
        "SELECT content AS v FROM read_text('{link}/passwd')",
        "SELECT * FROM parquet_metadata('{other}')",
        "SELECT * FROM read_csv('{secret}')",
        "SELECT * FROM read_json('{secret}')",
        "SELECT * FROM sniff_csv('{secret}')",
        "SELECT * FROM read_csv('http://127.0.0.1:9/x.csv')",
        "SELECT * FROM read_parquet('s3://bucket/x.parquet')",
        "SELECT * FROM query('SELECT * FROM read_text(''/etc/passwd'')')",
        "SELECT * FROM query_table('{other}')",
        "SELECT * FROM histogram('{other}', 'v')",
        "SELECT * FROM json_execute_serialized_sql(json_serialize_sql('SELECT * FROM read_text(''/etc/passwd'')'))",
        "SELECT * FROM some_frame",  # a variable of Python
        "SELECT st_point(1, 2) AS v",  # of an extension
        "COPY (SELECT 1) TO '{beside}/made.csv'",
        "COPY (SELECT 1) TO '/tmp/ebbflow-made.csv'",
        "ATTACH '{beside}/x.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET enable_external_access = true",
        "SET GLOBAL lock_configuration = false",
        "RESET lock_configuration",
        "SET allowed_directories = ['/']",
        "SET allowed_paths = ['/etc/passwd']",
        "SET allowed_configs = ['enable_external_access']",
        "SET autoload_known_extensions = true",
        "SET profiling_output = '{beside}/profile.json'",
        "CALL enable_logging(storage = 'file', storage_path = '{beside}/log')",
        "EXPORT DATABASE '{beside}/exported'",
        "CREATE PERSISTENT SECRET s (TYPE s3)",
    ],
)
def test_what_the_lock_holds(sql: str, engine: DuckDbEngine, tmp_path: Path) -> None:
    known, store = relation(tmp_path / "tables"), tmp_path / "store"
    relation(tmp_path / "other", "other")
    relation(tmp_path / "store2", "x")
    (tmp_path / "tables" / "secret.csv").write_text("a,b\n1,2\n")
    store.mkdir()
    (store / "link").symlink_to("/etc")
    some_frame = pa.table({"v": [1]})
    assert some_frame.num_rows == 1
    engine.confine([known], [StorageLocation(store.as_uri())])
    text = sql.format(
        other=tmp_path / "other" / "other.parquet",
        beside=tmp_path / "other",
        store=store,
        link=store / "link",
        secret=tmp_path / "tables" / "secret.csv",
    )
    before = sorted(p for p in tmp_path.rglob("*") if p.is_file())
    with pytest.raises(StageFailedError):
        engine.run(job(text, store, known))
    connection = engine._database().cursor()  # and not within a COPY, which the engine puts around a query
    with pytest.raises(
        Exception, match=r"disabled|locked|does not exist|Catalog Error|Cannot access|not allowed"
    ):
        connection.execute(text).fetchall()
    assert sorted(p for p in tmp_path.rglob("*") if p.is_file()) == before
    after = job("SELECT v FROM numbers ORDER BY v", store, known)
    engine.run(after)
    assert rows(after) == [0, 1, 2]


def test_the_tables_the_store_and_the_spill_folder_are_open(engine: DuckDbEngine, tmp_path: Path) -> None:
    known, store = relation(tmp_path / "tables", rows=1_000_000), tmp_path / "store"
    engine.confine([known], [StorageLocation(store.as_uri())])
    connection = engine._database()
    engine.resize(1, 0.125)
    done = job("SELECT v, repeat(md5(v::VARCHAR), 6) AS u FROM numbers ORDER BY u", store, known)
    assert engine.run(done).spilled_bytes > 0
    checkpoint = Relation(
        "ckpt", "file", (FileEntry(f"{done.output.root}/part-00000.parquet", 1, 0.0),), (("v", "bigint"),)
    )
    assert engine.run(job("SELECT v FROM ckpt", store, checkpoint)).rows == 1_000_000
    assert engine._database() is connection  # all of it by one database


def test_a_job_opens_what_it_names_itself(engine: DuckDbEngine, tmp_path: Path) -> None:
    one, two = relation(tmp_path / "one", "one"), relation(tmp_path / "two", "two")
    engine.run(job("SELECT v FROM one", tmp_path / "out", one))
    engine.run(job("SELECT v FROM two", tmp_path / "out", two))
    with pytest.raises(StageFailedError, match="disabled by configuration"):
        engine.run(job(f"SELECT * FROM '{tmp_path}/three.parquet'", tmp_path / "out", two))
    engine.confine([two], [])
    with pytest.raises(StageFailedError, match="disabled by configuration"):
        engine.run(job(f"SELECT * FROM '{tmp_path}/one/one.parquet'", tmp_path / "out", two))


def test_a_job_that_runs_when_the_engine_moves_ends_well(engine: DuckDbEngine, tmp_path: Path) -> None:
    one, two = relation(tmp_path / "one", "one", 600), relation(tmp_path / "two", "two")
    engine.resize(2, 0.5)
    slow = job(
        "SELECT count(*) AS v FROM one a, one b, one c WHERE a.v + b.v + c.v = 1", tmp_path / "out", one
    )
    begun = threading.Event()
    ended: list[int] = []

    def told(_: StageProgress) -> None:
        begun.set()

    thread = threading.Thread(target=lambda: ended.append(engine.run(slow, told).rows))
    thread.start()
    assert begun.wait(TIMEOUT)
    done = job("SELECT current_setting('memory_limit') AS v FROM two LIMIT 1", tmp_path / "out", two)
    assert engine.run(done).tasks == 2  # the share holds in the new database, too
    assert rows(done) == ["512.0 MiB"]
    thread.join(TIMEOUT)
    assert ended == [1]
    assert rows(slow) == [3]
    assert engine._left == []


def test_databases_spill_into_directories_of_their_own_and_share_one(
    engine: DuckDbEngine, tmp_path: Path
) -> None:
    """Their files have the same names: one would read or delete the other's."""
    shared, out = engine.scratch.under("x"), engine.scratch.under("y")
    for place in (shared, out):
        Path(place.root).mkdir()
    places = []
    for name in ("one", "two"):
        engine.confine([relation(tmp_path / name, name)], [])
        connection = engine._database()
        places += connection.execute("SELECT current_setting('temp_directory')").fetchone()
        engine.run(StageJob(name, name, "SELECT 1 AS v", (), shared))
        engine.run(StageJob(name, name, f"SELECT v FROM '{shared.root}/*.parquet'", (), out))
        assert engine._database() is connection
    assert len({*places}) == 2
    assert all(Path(place).parent == Path(shared.root).parent.parent for place in places)


def test_a_query_that_may_read_files_reads_them_and_changes_no_setting(
    engine: DuckDbEngine, tmp_path: Path
) -> None:
    (tmp_path / "x.csv").write_text("v\n7\n")
    sql = f"SELECT v FROM read_csv('{tmp_path}/x.csv')"
    engine.confine([], [StorageLocation(tmp_path.as_uri())], True)
    done = job(sql, tmp_path / "out")
    engine.run(done)
    assert rows(done) == [7]
    with pytest.raises(Exception, match="locked"):
        engine._database().execute("SET lock_configuration = false")
    engine.confine([], [StorageLocation((tmp_path / "out").as_uri())])
    with pytest.raises(StageFailedError, match="disabled by configuration"):
        engine.run(job(sql, tmp_path / "out"))


def test_links_are_followed_to_what_they_point_at(engine: DuckDbEngine, tmp_path: Path) -> None:
    relation(tmp_path / "real")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "tables").symlink_to(tmp_path / "real")
    (tmp_path / "store" / "stages").symlink_to(tmp_path / "elsewhere")
    linked = Relation(
        "numbers", "file", (FileEntry(f"{tmp_path}/tables/numbers.parquet", 1, 0.0),), (("v", "bigint"),)
    )
    engine.confine([linked], [StorageLocation((tmp_path / "store").as_uri())])
    done = job("SELECT v FROM numbers", tmp_path / "store" / "stages", linked)
    engine.run(done)
    assert rows(done) == [0, 1, 2]


def test_relative_paths_and_odd_names_are_open(
    engine: DuckDbEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    relation(tmp_path / 'it\'s, "odd"')
    path = os.path.join('it\'s, "odd"', "numbers.parquet")
    known = Relation("numbers", "file", (FileEntry(path, 1, 0.0),), (("v", "bigint"),))
    done = job("SELECT v FROM numbers", tmp_path / "out's", known)
    engine.run(done)
    assert rows(done) == [0, 1, 2]


def test_a_reach_covers_what_is_within_it(tmp_path: Path) -> None:
    known = relation(tmp_path / "tables")
    reach = AllowedAccess.of([known], [StorageLocation(f"{tmp_path.as_uri()}/store")])
    assert reach.covers(AllowedAccess.of([known], [StorageLocation(f"{tmp_path.as_uri()}/store/stages/x")]))
    assert reach.covers(NOTHING)
    assert not reach.covers(AllowedAccess.of([], [StorageLocation(f"{tmp_path.as_uri()}/store2")]))
    assert not reach.covers(AllowedAccess.of([], [StorageLocation(tmp_path.as_uri())]))
    assert not reach.covers(AllowedAccess(everything=True))
    assert AllowedAccess(everything=True).covers(reach)
    assert AllowedAccess.of([], [StorageLocation("s3://bucket/store")]) == NOTHING


def test_predicates_on_a_sample_reach_no_file(tmp_path: Path) -> None:
    known = relation(tmp_path / "tables")
    collect(known)
    asked = [
        "v < 2",
        "v IN (SELECT size FROM read_text('/etc/passwd'))",
        "(SELECT count(*) FROM glob('/*')) > 0",
    ]
    assert selectivity(known, asked)[0] == pytest.approx(2 / 3)
    assert selectivity(known, asked)[1:] == [None, None]


def test_the_order_of_the_lock_matters() -> None:
    import duckdb

    with duckdb.connect(config=configuration()) as connection:
        connection.execute("SET enable_external_access = false")
        with pytest.raises(duckdb.Error):  # places cannot be named any more
            lock(connection, AllowedAccess(frozenset({"/x.parquet"})))


def test_a_database_that_is_opened_ahead_is_taken_once_and_can_be_locked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead = Ahead()
    ahead.begin()
    ahead.begin()
    first, second = ahead.take(threads="2", memory_limit="300MiB"), ahead.take()
    first.execute("CREATE TABLE t AS SELECT 1 AS x")
    with pytest.raises(duckdb.CatalogException):
        second.execute("SELECT * FROM t")
    told = "SELECT current_setting('threads'), current_setting('memory_limit'), current_setting('TimeZone')"
    assert first.execute(told).fetchone() == (2, "300.0 MiB", "UTC")
    lock(first, NOTHING)
    with pytest.raises(duckdb.Error):
        first.execute("SELECT * FROM read_csv('/etc/passwd')")
    ahead.begin()
    own = ahead._opening
    monkeypatch.setattr("os.getpid", lambda: -1)  # as in a child that was forked meanwhile
    assert own is not None
    assert ahead.take() is not own[1].result(TIMEOUT)


def test_why_a_database_cannot_be_opened_ahead_is_told_to_who_takes_it() -> None:
    ahead = Ahead()
    with pytest.raises(duckdb.Error, match="no_such_setting"):
        ahead.take(no_such_setting="1")
    assert ahead.take().execute("SELECT 1").fetchone() == (1,)


def test_a_database_that_cannot_be_opened_ahead_is_opened_when_it_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*args: object, **named: object) -> None:
        raise RuntimeError("can't start new thread")

    ahead = Ahead()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        ahead.begin()
        assert ahead._opening is None  # else whoever takes it waits for ever
    assert ahead.take().execute("SELECT 1").fetchone() == (1,)
    ahead = Ahead()
    with monkeypatch.context() as patch:
        patch.setattr(duckdb, "connect", refused)
        ahead.begin()
        opening = ahead._opening
        assert opening is not None
        assert isinstance(opening[1].exception(TIMEOUT), RuntimeError)
    assert ahead.take().execute("SELECT 1").fetchone() == (1,)


def test_what_nobody_has_taken_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    may, opened = threading.Event(), [Ahead._opened(), Ahead._opened()]
    ahead = Ahead()
    ahead.close()  # nothing was begun
    with monkeypatch.context() as patch:
        patch.setattr(Ahead, "_opened", staticmethod(lambda: opened[0]))
        ahead.begin()
        _join_openers()
        ahead.close()
        patch.setattr(Ahead, "_opened", staticmethod(lambda: may.wait(TIMEOUT) and opened[1]))
        ahead.begin()
        ahead.close()  # does not wait for it
        assert opened[1].execute("SELECT 1").fetchone() == (1,)
        may.set()
        _join_openers()
    for connection in opened:
        with pytest.raises(duckdb.ConnectionException, match="closed"):
            connection.execute("SELECT 1")
    assert ahead.take().execute("SELECT 1").fetchone() == (1,)


def _join_openers() -> None:
    for thread in threading.enumerate():
        if thread.name == "ebbflow-database":
            thread.join(TIMEOUT)
            assert not thread.is_alive()


def test_a_process_that_ends_while_its_next_database_is_opened_ends_well() -> None:
    program = (
        "import threading, time, duckdb\n"
        "from ebbflow.infra.tables.confinement import Ahead\n"
        "begun = threading.Event()\n"
        "Ahead._opened = staticmethod(lambda: [begun.set() or duckdb.connect() for _ in range(30)])\n"
        "Ahead().begin()\n"
        "begun.wait()\n"
        "time.sleep(0.02)\n"  # into the middle of it
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=150)
    assert ended.returncode == 0, ended.stderr
