"""Slices of tables in object storage, and their part files there, without Spark."""

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import duckdb
import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.protocols import FileLayout, Relation, StageJob, TableLog
from ebbflow.infra.spark.native import objects, worker
from ebbflow.infra.spark.native.catalyst import NotNativeError
from ebbflow.infra.spark.native.exchange.hashes import (
    BUCKET,
    BUCKETS,
    Exchange,
    bucket_sizes,
    joining,
    writing,
)
from ebbflow.infra.spark.native.objects import (
    _FOLDER,
    CANCELLED,
    EVERY,
    Mark,
    ObjectParts,
    Rows,
    check_places,
    register_objects,
    scanned,
)
from ebbflow.infra.spark.native.worker import Done, KeyRange, Part, Settings, Work
from ebbflow.infra.storage import files, filesystems
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.confinement import NOTHING
from ebbflow.infra.tables.logs import deletions
from tests.chaos.proxy import Proxy

ROWS, GROUP = 1000, 250
COLUMNS = (("v", "bigint"), ("name", "string"))
FOREVER = "SELECT count(*) AS n FROM s0 a, s0 b, s0 c, s0 d WHERE a.v + b.v + c.v + d.v > 5"


@pytest.fixture(name="place")
def _place(s3: Callable[[], str]) -> StorageLocation:
    return StorageLocation(s3())


@pytest.fixture(autouse=True)
def _no_database() -> Iterator[None]:
    yield
    while worker._databases:
        worker._databases.popitem()[1].close()


def stored(place: StorageLocation, name: str = "t/a.parquet") -> FileEntry:
    """Write a file of four row groups."""
    rows = pa.table({"v": np.arange(ROWS), "name": [f"n{i}" for i in range(ROWS)]})
    with place.fs().open_output_stream(place.path(name)) as out:
        pq.write_table(rows, out, row_group_size=GROUP)
    return FileEntry(place.path(name), 1, 0.0)


def run(work: Work) -> Done:
    """Run the first slice of ``work`` as a worker does, but in a thread: a main thread would take its signals."""
    work = replace(work, s3=tuple(filesystems.public_settings().items()))
    found: list[Done | BaseException] = []

    def task() -> None:
        try:
            found.extend(work.run(0, iter(())))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=task)
    thread.start()
    thread.join(150)
    (one,) = found
    if isinstance(one, BaseException):
        raise one
    return one


def work_of(place: StorageLocation, part: Part, *, last: bool = False) -> Work:
    out = place.under("out")
    out.fs().create_dir(out.root, recursive=True)
    return Work(Settings(NOTHING, 1, 256), out.root, (part,), "s3", last=last)


def names(place: StorageLocation) -> list[str]:
    return [info.base_name for info in place.entries("out")]


def test_a_scan_reads_whole_files_and_row_groups_of_others(place: StorageLocation) -> None:
    one, other = stored(place), stored(place, "t/b.parquet")
    relation = Relation("t", "s3", (one,), COLUMNS)
    rows = (Rows(other.path, GROUP, 3 * GROUP - 1),)
    with duckdb.connect() as connection:
        register_objects(connection, relation, rows, "v > 10")
        told = connection.execute("SELECT count(*), min(v), max(v), count(DISTINCT name) FROM t").fetchall()
        assert told == [(ROWS - 11 + 2 * GROUP, 11, ROWS - 1, ROWS - 11)]
        # twice in one statement: a scan begins anew each time
        assert connection.execute(
            "SELECT count(*) FROM t a JOIN t b USING (name) WHERE a.v = 300"
        ).fetchall() == [(4,)]
    with pytest.raises(ValueError, match="other row groups"):
        scanned(relation, (Rows(other.path, 1, GROUP),))


def test_deleted_rows_are_left_out_of_whole_files_and_of_row_groups(place: StorageLocation) -> None:
    one, other, whole = stored(place), stored(place, "t/b.parquet"), stored(place, "t/c.parquet")
    gone = {one.path: [0, GROUP - 1, GROUP, 999], other.path: [*range(GROUP, 2 * GROUP), 2 * GROUP + 1]}
    deleted = deletions.packed("t", "Delta Lake", "s3", ["v", "name"], gone)
    log = TableLog("Delta Lake", place.path("t"), "1", deleted=deleted)
    relation = Relation("t", "s3", (one, whole), COLUMNS, log=log)
    left = [v for v in range(ROWS) if v not in gone[one.path]]
    rest = [v for v in range(GROUP, 3 * GROUP) if v not in gone[other.path]]
    with duckdb.connect() as connection:
        register_objects(connection, relation, (Rows(other.path, GROUP, 3 * GROUP - 1),), "v > 10")
        told = connection.execute("SELECT v FROM t ORDER BY v").fetchall()
        assert [v for (v,) in told] == sorted(v for v in (*left, *range(ROWS), *rest) if v > 10)
        # a filter on a column that is not selected, of one row group by its statistics; twice in one statement
        asked = "SELECT count(*), max(a.v) FROM t a JOIN t b USING (v) WHERE a.name = 'n501'"
        assert connection.execute(asked).fetchall() == [(4, 501)]
        assert connection.execute("SELECT count(*) FROM t WHERE v = 250").fetchall() == [(1,)]


def test_partition_columns_are_read_off_the_directories(place: StorageLocation) -> None:
    files = tuple(stored(place, f"t/day={day}/a.parquet") for day in ("2026-11-01", "2026-11-02"))
    relation = Relation("t", "s3", files, (*COLUMNS, ("day", "date")), partitions=("day",))
    with duckdb.connect() as connection:
        register_objects(connection, relation, (), "true")
        told = connection.execute("SELECT day::text, sum(v) FROM t GROUP BY 1 ORDER BY 1").fetchall()
    assert told == [(day, ROWS * (ROWS - 1) // 2) for day in ("2026-11-01", "2026-11-02")]


def test_a_task_writes_its_part_file_as_a_whole(place: StorageLocation) -> None:
    entry = stored(place)
    ranges = (KeyRange("s1", "v", 100, 299),)
    relations = (Relation("s0", "s3", (), COLUMNS), Relation("s1", "s3", (entry,), COLUMNS))
    statement = "SELECT s0.v AS v, s1.name AS name FROM s0 JOIN s1 ON s0.v = s1.v"
    part = Part(statement, relations, "part-00000.parquet", "s0", (Rows(entry.path, 0, GROUP - 1),), ranges)
    done = run(work_of(place, part))
    assert (done.rows, done.error) == (GROUP - 100, "")
    assert names(place) == ["part-00000.parquet"]
    written = pq.read_table(place.path("out/part-00000.parquet"), filesystem=place.fs())
    assert sorted(written["v"].to_pylist()) == list(range(100, GROUP))


def test_what_tasks_exchange_is_joined_range_by_range(place: StorageLocation) -> None:
    scans = {
        name: Relation(name, "s3", (stored(place, f"t/{name}.parquet"),), COLUMNS) for name in ("s0", "s1")
    }
    exchanges = {}
    for name in scans:
        hashed = f"CAST(hash(v) % {BUCKETS} AS INTEGER) AS {BUCKET}"
        exchanges[name] = Exchange(f"SELECT *, {hashed} FROM {name}", ("v", "name"))
    sizes = {}
    for name, parts in writing(exchanges, scans, lambda *_: 4).items():
        assert len(parts) == 4
        assert [run(work_of(place, part)).rows for part in parts] == [ROWS // 4] * 4
        infos = place.fs().get_file_info([place.path(f"out/{part.file}") for part in parts])
        entries = [FileEntry(info.path, info.size, 0.0) for info in infos]
        scans[name] = exchanges[name].of(scans[name], "s3", entries)
        sizes[name], rows = bucket_sizes(scans[name])
        assert rows == [ROWS // 4] * 4
    statement = "SELECT s0.v AS v, s1.name AS name FROM s0 JOIN s1 ON s0.v = s1.v"
    joined = joining(statement, scans, sizes, "s0", "part-{:05d}.parquet", lambda probed, built: 3, 1e9)
    assert len(joined) == 3
    assert sum(run(work_of(place, part)).rows for part in joined) == ROWS
    found = [pq.read_table(place.path(f"out/{p.file}"), filesystem=place.fs()).to_pylist() for p in joined]
    assert {(row["v"], row["name"]) for rows in found for row in rows} == {(v, f"n{v}") for v in range(ROWS)}


def test_a_task_that_fails_leaves_no_file(place: StorageLocation) -> None:
    relations = (Relation("s0", "s3", (stored(place),), COLUMNS),)
    statement = "SELECT CASE WHEN v = 990 THEN error('too much') ELSE v END AS v FROM s0"
    done = run(work_of(place, Part(statement, relations, "part-00000.parquet")))
    assert "too much" in done.error
    assert names(place) == []


@pytest.mark.parametrize("marked", [True, False])
def test_whether_a_stage_is_cancelled_is_one_request(marked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Store(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            asked.append(self.path)
            self.send_response(200 if marked else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_HEAD

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Store) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            monkeypatch.setenv(f"AWS_{name}", "test")
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        task = ObjectParts("s3", "bucket/stage")
        looks = [task.unwanted() for _ in range(EVERY)]
        first = list(asked)
        looks += [task.unwanted() for _ in range(EVERY)]
        server.shutdown()
    assert looks == ([False] * (EVERY - 1) + [marked]) * 2
    marks = [f"/bucket/stage/{CANCELLED}"]
    assert first[:1] == marks, "it asks for the directory, too, the first time"
    assert asked[len(first) :] == marks


def test_a_task_whose_directory_is_gone_is_not_wanted(place: StorageLocation, s3_endpoint: str) -> None:
    httpx.put(f"{s3_endpoint}/{place.path('gone/')}", timeout=20).raise_for_status()
    task = ObjectParts("s3", place.path("gone"))
    looks = EVERY * _FOLDER
    assert not any(task.unwanted() for _ in range(EVERY))
    place.fs().delete_dir(place.path("gone"))
    rest = looks - EVERY
    assert [task.unwanted() for _ in range(rest)] == [False] * (rest - 1) + [True]


@pytest.mark.parametrize("before", [True, False])
def test_a_cancelled_task_ends_and_leaves_no_file(place: StorageLocation, before: bool) -> None:
    part = Part(FOREVER, (Relation("s0", "s3", (stored(place),), COLUMNS),), "part-00000.parquet")
    work = work_of(place, part)

    def cancel() -> None:
        place.write(f"out/{CANCELLED}", b"")

    later = threading.Timer(0.5, cancel)
    cancel() if before else later.start()
    done = run(work)
    assert done.error
    assert ("before it began" in done.error) == before
    assert names(place) == [CANCELLED]


def test_a_cancelled_stage_is_tidied_after_its_tasks_have_seen_it(
    place: StorageLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part(FOREVER, (Relation("s0", "s3", (stored(place),), COLUMNS),), "part-00000.parquet")
    work, mark = work_of(place, part), objects.mark
    job = StageJob("a-job", "the stage", FOREVER, part.relations, place.under("out"), native=True)
    done: list[Done] = []
    thread = threading.Thread(target=lambda: done.append(run(work)))
    thread.start()

    def late(job: StageJob) -> bool:
        time.sleep(0.5)  # after which it would not be waited for if that counted
        return mark(job)

    monkeypatch.setattr(objects, "mark", late)
    objects.tidy(job)
    assert CANCELLED in names(place)
    place.fs().delete_dir(job.output.root)
    thread.join(150)
    assert [one.rows for one in done] == [0]
    assert done[0].error
    assert not [name for name in names(place) if name.startswith("part-")]


def test_a_mark_is_written_once_and_again_only_after_an_error(
    place: StorageLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, calls = threading.Event(), list[bool]()

    def mark(job: StageJob) -> bool:
        assert answers.wait(150)
        calls.append(len(calls) > 0)
        return calls[-1]

    monkeypatch.setattr(objects, "mark", mark)
    job = StageJob("a-job", "the stage", "SELECT 1", (), place, native=True)
    one = Mark(job)
    for _ in range(3):
        one.begin()
    one.wait(0.0)
    assert not calls, "it waits for a store that does not answer"
    answers.set()
    one.wait(150)
    assert calls == [False]
    for _ in range(3):
        one.begin()
        one.wait(150)
    assert calls == [False, True]
    spark_only = Mark(replace(job, native=False))
    spark_only.begin()
    spark_only.wait(150)
    assert len(calls) == 2


@pytest.mark.parametrize("ends", ["done", "cancelled", "refused"])
def test_a_task_that_writes_into_a_table_leaves_all_files_or_none(
    place: StorageLocation, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    last = "CASE WHEN v = 990 THEN error('too much') ELSE v END" if ends == "refused" else "v"
    relations = (Relation("s0", "s3", (stored(place),), COLUMNS),)
    layout = FileLayout(("k",), ())
    sql = f"SELECT {last} AS v, CASE WHEN v < 500 THEN 'v1' ELSE 'v2' END AS k FROM s0"
    whole = worker.streamed

    def streamed(*given: Any) -> Any:
        found = whole(*given)
        if ends == "cancelled":  # after its last look
            place.write(f"out/{CANCELLED}", b"")
        return found

    monkeypatch.setattr(worker, "streamed", streamed)
    monkeypatch.setattr(worker, "BATCH", 128)
    done = run(work_of(place, Part(sql, relations, "part-00000.parquet", layout=layout)))
    found = files.listing(place.fs(), place.path("out"), recursive=True)
    made = [info.path for info in found if info.base_name.startswith("part-")]
    assert bool(done.error) == (ends != "done")
    assert sorted(made) == sorted(done.files)
    assert len(made) == (2 if ends == "done" else 0)


def test_what_tasks_do_not_read_is_refused_for_its_true_reason(place: StorageLocation) -> None:
    log = TableLog("Iceberg", place.path("t"), "1", ids=(("v", 1), ("name", 2)))
    entry = FileEntry(place.path("t/a.parquet"), 1, 0.0)
    deleted = deletions.packed("t", "Iceberg", "file", ["v"], {entry.path: [0]})
    for scheme, these, why in (
        ("s3", log, "t are in object storage, and have columns under several names"),
        ("file", replace(log, deleted=deleted), "t have deleted rows, and have columns under several names"),
    ):
        relation = Relation("t", scheme, (entry,), COLUMNS, log=these)
        with pytest.raises(NotNativeError, match=why):
            check_places(StageJob("a-job", "the stage", "SELECT 1", (relation,), place, native=True))


def test_what_a_network_fails_in_is_tried_again_within_bounds(
    place: StorageLocation, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = Part(
        "SELECT max(v) AS top FROM s0",
        (Relation("s0", "s3", (stored(place),), COLUMNS),),
        "part-00000.parquet",
    )
    work, last = work_of(place, part), work_of(place, part, last=True)
    monkeypatch.setattr(filesystems, "MAX_ATTEMPTS", 2)
    monkeypatch.setattr(filesystems, "REQUEST_TIMEOUT", 2.0)
    with Proxy(httpx.URL(s3_endpoint).port or 80) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        proxy.set("cut")
        with pytest.raises(OSError, match="NETWORK_CONNECTION"):  # for Spark to repeat the task
            run(work)
        assert "NETWORK_CONNECTION" in run(last).error
        proxy.set("slow")
        assert run(work).rows == 1
        proxy.set("cut")
        opening = threading.Thread(target=lambda: _opened_once_cut(proxy))
        before = proxy.cuts
        assert before > 0
        opening.start()
        monkeypatch.setattr(filesystems, "MAX_ATTEMPTS", 4)
        filesystems._s3.cache_clear()
        assert run(work).rows == 1
        opening.join(150)
        assert proxy.cuts > before


def _opened_once_cut(proxy: Proxy) -> None:
    seen, deadline = proxy.cuts, time.monotonic() + 100
    while proxy.cuts == seen and time.monotonic() < deadline:
        time.sleep(0.005)
    proxy.set("open")
