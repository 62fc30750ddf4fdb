"""What is exchanged between the tasks of a native stage, and which task joins what of it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.protocols import Relation, StageJob
from ebbflow.infra.spark.native.catalyst import NotDoneError
from ebbflow.infra.spark.native.exchange import costs
from ebbflow.infra.spark.native.exchange.costs import Exchanged, Size, Statements, Ways, by_hash, scan_sizes
from ebbflow.infra.spark.native.exchange.hashes import (
    BUCKET,
    BUCKETS,
    Exchange,
    HashRange,
    bucket_sizes,
    exchanged,
    finer_joining,
    finer_writing,
    grain,
    hash_ranges,
    joining,
    writing,
)
from ebbflow.infra.spark.native.exchange.program import Program
from ebbflow.infra.spark.native.objects import LocalParts, remove_hidden, rows_of
from ebbflow.infra.spark.native.slices import Cut
from ebbflow.infra.spark.native.stages import NativeStages
from ebbflow.infra.spark.native.worker import Done, Part, Settings, Work
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.confinement import AllowedAccess

MANY = 12  # hashes, instead of BUCKETS
SIZES = st.lists(st.one_of(st.just(0.0), st.floats(0.001, 1e9)), min_size=MANY, max_size=MANY)


@given(st.lists(SIZES, min_size=1, max_size=5), SIZES, st.integers(1, 20), st.sampled_from([1, 3, 5]))
def test_each_row_of_the_sliced_relation_is_in_one_part(
    probed: list[list[float]], built: list[float], count: int, few: int
) -> None:
    found = hash_ranges(probed, built, count, grain=few)
    assert found
    assert all(r.low % few == 0 and (r.high + 1) % few in (0, MANY % few) for r in found)
    for file, sizes in enumerate(probed):
        for bucket, size in enumerate(sizes):
            holders = [r for r in found if file in r.files and r.low <= bucket <= r.high]
            assert len(holders) == 1 if size else len(holders) <= 1
    assert len({(r.low, r.high) for r in found}) <= count


def test_a_frequent_key_is_divided_by_files_and_others_are_balanced() -> None:
    even = [[1.0] * MANY] * 3
    assert hash_ranges(even, [0.0] * MANY, 3) == [HashRange(n, n + 3, (0, 1, 2)) for n in (0, 4, 8)]
    skewed = [[1.0] * 5 + [50.0] + [1.0] * 6] * 3
    found = hash_ranges(skewed, [0.0] * MANY, 4)
    assert [r.files for r in found if r.low <= 5 <= r.high] == [(0,), (1,), (2,)]
    assert hash_ranges([[0.0] * MANY], [1.0] * MANY, 4) == [HashRange(0, MANY - 1, (0,))], (
        "one part tells of no row"
    )


def ways(keys: Sequence[Mapping[int, str]], part: float = 1.0, *, all: bool = False) -> Ways:
    """Return ways to exchange, each of which writes of a scan's rows such a ``part``."""

    def made(columns: Mapping[int, str]) -> Exchanged:
        exchanges = {n: Exchange("", (c,), (c,), part=part) for n, c in columns.items()}
        return Exchanged(exchanges, Statements("", ""), Statements("", ""), "", frozenset(range(4)))

    return Ways(keys, made, all)


def taken(keys: Sequence[Mapping[int, str]], memory: int) -> Mapping[int, str] | None:
    """Return which scans are exchanged."""
    sizes = {n: Size(size, size) for n, size in enumerate((1000.0, 900.0, 800.0, 10.0))}
    scans = {n: Relation(str(n), "file", (), ()) for n in sizes}
    found = by_hash(ways(keys), sizes, 0, memory, 4, scans)
    return found.keys if found is not None else None


def test_the_cheapest_exchange_that_fits_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        costs, "column_bytes", lambda relation, _: ((1000.0, 900.0, 800.0, 10.0)[int(relation.name)], 9)
    )
    monkeypatch.setattr(costs, "_ALIKE", 1.0)
    keys = [{0: "a", 1: "a"}, {0: "b", 2: "b", 3: "b"}, {0: "c", 1: "c", 2: "c"}]
    assert taken(keys, 400) == {0: "c", 1: "c", 2: "c"}
    assert taken(keys, 2000) == {0: "b", 2: "b"}, "writing 900 costs more than reading them again"
    assert taken(keys[:2], 400) is None
    assert taken(keys, 100_000) is None, "all of them are small"
    assert taken([{0: "a"}], 400) is None


def test_what_tests_leave_decides_whether_an_exchange_pays(tmp_path: Path) -> None:
    path = tmp_path / "l.parquet"
    with duckdb.connect() as connection:
        rows = "SELECT v, v + 1 AS w, 'some text ' || v AS s FROM range(60000) t(v)"
        connection.execute(f"COPY ({rows}) TO '{path}' (FORMAT parquet)")
    entry = FileEntry(str(path), path.stat().st_size, 0.0)
    lines = Relation("l", "file", (entry,), (("v", "bigint"), ("w", "bigint"), ("s", "string")))
    sizes = scan_sizes({0: lines, 1: lines}, {0: ("v",), 1: ("v", "w")}, 1000)
    assert 0 < sizes[0].read < sizes[1].read
    assert sizes[0].held <= sizes[1].held <= entry.size
    assert scan_sizes({0: lines}, {0: ("v",)}, 1 << 40)[0] == Size(entry.size, entry.size), (
        "footers are not read"
    )
    costly, cheap = (
        by_hash(ways([{0: "v", 1: "v"}], part), sizes, 0, 1000, 2, {0: lines, 1: lines})
        for part in (1.0, 0.1)
    )
    assert costly is not None
    assert cheap is not None
    assert cheap.cost < costly.cost


def test_of_equal_exchanges_the_key_of_most_values_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "l.parquet"
    with duckdb.connect() as connection:
        rows = "SELECT 7 AS tenant, 'a' || v AS name, v AS id FROM range(50) t(v)"
        connection.execute(f"COPY ({rows}) TO '{path}' (FORMAT parquet)")
    kinds = (("tenant", "int"), ("name", "string"), ("id", "bigint"))
    lines = Relation("l", "file", (FileEntry(str(path), path.stat().st_size, 0.0),), kinds)
    keys = [{0: name, 1: name} for name, _ in kinds]
    sizes = {0: Size(1000, 1000), 1: Size(900, 900)}
    found = by_hash(ways(keys), sizes, 0, 400, 4, {0: lines, 1: lines})
    assert found is not None
    assert found.keys == {0: "id", 1: "id"}


def test_each_scan_of_a_full_join_is_exchanged_and_no_hash_is_left_out() -> None:
    sizes = {0: Size(1000, 1000), 1: Size(1, 1)}
    scans = {n: Relation(str(n), "file", (), ()) for n in sizes}
    found = by_hash(ways([{0: "a", 1: "b"}], all=True), sizes, 0, 400, 4, scans)
    assert found is not None
    assert found.keys == {0: "a", 1: "b"}
    probed = [[0.0] * 5 + [90.0] + [0.0] * 6, [0.0] * MANY]
    ranges = hash_ranges(probed, [1.0] * MANY, 4, whole=True)
    assert ranges[0].low == 0
    assert ranges[-1].high == MANY - 1
    assert all(a.high + 1 == b.low for a, b in pairwise(ranges))
    assert {r.files for r in ranges} == {(0, 1)}


def test_no_task_gets_more_rows_of_one_key_than_it_can_hold() -> None:
    scans = {n: Relation(n, "file", (FileEntry(f"/{n}", 10, 0.0),), (("v", "bigint"),)) for n in ("s0", "s1")}

    def begins(built: list[float], few: int = 1, tasks: int = 4) -> list[Any]:
        sizes = {"s0": [[10.0] * MANY], "s1": [built]}
        found = joining("SELECT 1", scans, sizes, "s0", "{}", lambda *_: tasks, 50.0, grain=few)
        return [part.ranges[0].low for part in found]

    for few in (1, 3):
        assert begins([10.0] * MANY, few) == [0, 3, 6, 9]
    assert begins([30.0] * MANY) == [*range(MANY)], "ranges of several keys are cut"
    assert begins([10.0] * MANY, 3, 2) == [0, 3, 6, 9], "files of three hashes are read by one task each"
    for few in (1, 3):
        with pytest.raises(NotDoneError, match="do not fit"):
            begins([60.0] + [1.0] * (MANY - 1), few)
    with pytest.raises(NotDoneError, match="do not fit"):
        begins([20.0] * 3 + [1.0] * (MANY - 3), 3)  # a footer spreads a frequent key over all of its file


def test_sizes_by_hash_are_those_of_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with duckdb.connect() as connection:
        key = f"CASE WHEN v < 20000 THEN 7 ELSE CAST(hash(v) % {BUCKETS} AS INTEGER) END"
        connection.execute(
            f"COPY (SELECT v, {key} AS {BUCKET} FROM range(40000) t(v) ORDER BY 2) TO '{path}' "
            f"(FORMAT parquet, ROW_GROUP_SIZE 2048)"
        )
    table = Relation("t", "file", (), (("v", "bigint"), ("x", "map<int,int>")))
    written = Exchange("", ("V",)).of(table, "file", [FileEntry(str(path), 4000, 0.0)])
    assert written.columns == (("v", "bigint"), (BUCKET, "int"))
    (sizes,), (rows,) = bucket_sizes(written)
    assert rows == 40_000
    assert sum(sizes) == pytest.approx(4000)
    assert sizes[7] == pytest.approx(2000, rel=0.25)
    assert all(sizes), "no hash between others is taken to be absent"


@pytest.mark.parametrize("lost", [False, True], ids=["", "all lost"])
@pytest.mark.parametrize("few", [1, BUCKETS // 8])
def test_what_tasks_exchange_is_joined_range_by_range(tmp_path: Path, few: int, lost: bool) -> None:
    """Two relations of which one has a key that most rows have, one without rows, and a task that is run twice. Tasks
    that are ``lost`` are divided among three each."""
    output = StorageLocation(tmp_path / "stage")
    texts = {
        "s0": "SELECT CASE WHEN v % 3 = 0 THEN v ELSE 7 END AS v, 'n' || v AS name FROM range(6000) t(v)",
        "s1": "SELECT v, 'm' || v AS name FROM range(3000) t(v)",
        "s2": "SELECT v, 'm' || v AS name FROM range(10) t(v) WHERE v > 10",
    }
    scans, exchanges = {}, {}
    hashed = f"CAST(hash(v) % {BUCKETS} AS INTEGER) AS {BUCKET}"
    (tmp_path / "stage").mkdir()
    with duckdb.connect() as connection:
        for name, text in texts.items():
            path = tmp_path / f"{name}.parquet"
            connection.execute(f"COPY ({text}) TO '{path}' (FORMAT parquet, ROW_GROUP_SIZE 2048)")
            entry = FileEntry(str(path), path.stat().st_size, 0.0)
            scans[name] = Relation(name, "file", (entry,), (("v", "bigint"), ("name", "string")))
            exchanges[name] = Exchange(f"SELECT *, {hashed} FROM {name}", ("v", "name"))
    reach = AllowedAccess.of(tuple(scans.values()), [output])

    def run(part: Part) -> int:
        done = Work(Settings(reach, 2, 256), output.root, (part,), last=True).here()
        assert not done.error
        return done.rows

    def divided(part: Part, found: list[Part]) -> list[Part]:
        stem = part.file.removesuffix(".parquet")
        return [replace(one, file=f"{stem}-{n}.parquet") for n, one in enumerate(found)]

    parts = writing(exchanges, scans, lambda *_: 2, few)
    if lost:
        parts = {
            name: [one for part in listed for one in divided(part, finer_writing(part, scans, 3))]
            for name, listed in parts.items()
        }
        assert [len(listed) for listed in parts.values()] == [3, 2, 1]  # row groups
    rows = sum(run(part) for listed in parts.values() for part in listed)
    run(parts["s0"][0])
    assert rows == 9000
    with pytest.raises(NotDoneError, match="not what they wrote"):
        exchanged(exchanges, scans, parts, output, rows + 1)
    scans, sizes = exchanged(exchanges, scans, parts, output, rows)
    if few > 1:
        assert all(
            size == 0 or n // few == min(m for m, s in enumerate(f) if s) // few
            for fs in sizes.values()
            for f in fs
            for n, size in enumerate(f)
        ), "a file has one range of hashes"
    joins = "s0 JOIN s1 ON s0.v = s1.v LEFT JOIN s2 ON s0.v = s2.v"
    statement = f"SELECT s0.v, s0.name, s1.name AS other, s2.name AS none FROM {joins}"
    joined = joining(statement, scans, sizes, "s0", "part-{:05d}.parquet", lambda *_: 3, 1e9, grain=few)
    assert len(joined) >= 3
    if lost:
        finer = [finer_joining(part, scans, sizes, few, 3) for part in joined]
        for part, found in zip(joined, finer, strict=True):
            hashes = [(one.ranges[0].low, one.ranges[0].high) for one in found]
            assert (hashes[0][0], hashes[-1][1]) == (part.ranges[0].low, part.ranges[0].high)
            assert all(high + 1 == low for (_, high), (low, _) in pairwise(hashes))
        assert len({one.ranges for found in finer for one in found}) > len({one.ranges for one in joined})
        joined = [one for part, found in zip(joined, finer, strict=True) for one in divided(part, found)]
    assert all(len(one.relations[1].files) < len(scans["s1"].files) for one in joined) or few == 1
    assert sum(map(run, joined)) == 5000
    with duckdb.connect() as connection:
        found = connection.execute(f"SELECT * FROM '{output.root}/part-*.parquet' ORDER BY name").fetchall()
        tables = ", ".join(f"{name} AS ({text})" for name, text in texts.items())
        assert found == connection.execute(f"WITH {tables} {statement} ORDER BY s0.name").fetchall()
    remove_hidden(output)
    assert sorted({name[:5] for name in os.listdir(output.root)}) == ["part-"]


def test_files_of_hashes_are_made_where_few_tasks_read_them_from_local_files() -> None:
    assert [grain(tasks, 0.5, local=True) for tasks in (1, 3, 16, 17)] == [
        BUCKETS // 8,
        BUCKETS // 16,
        BUCKETS // 64,
        1,
    ]
    assert [grain(1, rooms, local=True) for rooms in (2.0, 2.1, 16.1)] == [BUCKETS // 8, BUCKETS // 16, 1]
    assert grain(3, 0.5, local=False) == 1


def test_a_task_that_fails_leaves_no_files(tmp_path: Path) -> None:
    output = StorageLocation(tmp_path)
    statement = "SELECT CASE WHEN v = 900000 THEN error('too much') ELSE v END AS v FROM range(1000000) t(v)"
    part = Part(statement, (), ".native-s0-00000.parquet", by="v // 200000")
    done = Work(Settings(AllowedAccess.of((), [output]), 1, 256), str(tmp_path), (part,), last=True).here()
    assert "too much" in done.error
    assert os.listdir(tmp_path) == []


def test_a_directory_that_a_killed_task_has_left_hinders_no_process_of_the_same_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of two containers may have one number."""
    statement, name = "SELECT v FROM range(10) t(v)", ".native-s0-00000.parquet"
    output = StorageLocation(tmp_path)
    with duckdb.connect() as connection:
        with monkeypatch.context() as killed:
            killed.setattr(LocalParts, "_keep", lambda *_: None)
            LocalParts(str(tmp_path)).write(connection, statement, name, lambda: None, by="v // 5")
        assert rows_of(output, name) is None
        assert LocalParts(str(tmp_path)).write(connection, statement, name, lambda: None, by="v // 5") == 10
    assert rows_of(output, name) == 10


@pytest.mark.parametrize("ended", [(0, 1), (1, 2), (0, 1, 2)])
def test_what_tasks_have_written_before_one_was_killed_is_not_written_again(
    tmp_path: Path, ended: tuple[int, ...]
) -> None:
    asked: list[list[str]] = []

    def collected(work: Work) -> list[Done]:
        asked.append([part.file for part in work.parts])
        these = [work.parts[n] for n in ended] if len(asked) == 1 else work.parts
        done = [replace(work, parts=(part,)).here() for part in these]
        if len(asked) == 1:
            raise RuntimeError("a worker was killed")
        return done

    running = SimpleNamespace(
        _begun={"job": lambda tasks, later: None},
        _access=SimpleNamespace(covers=lambda access: False),
        _context=SimpleNamespace(master="local[2]"),
        _threads=1,
        _memory=256,
        _collected=collected,
    )
    parts = [
        Part(f"SELECT v FROM range({10 + n}) t(v)", (), f".native-s0-{n:05d}.parquet", by=by)
        for n, by in enumerate(("v // 5", "", "v // 5"))
    ]
    job = StageJob("job", "AB", "", (), StorageLocation(tmp_path))
    done = NativeStages._job(running, job, parts, Event())  # type: ignore[arg-type]
    assert [one.rows for one in done] == [10, 11, 12]
    left = [part.file for n, part in enumerate(parts) if n not in ended]
    assert asked[1:] == ([left] if left else [])


def test_whoever_watches_is_told_of_the_tasks_that_are_to_join_with_those_that_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of three relations two are exchanged: 30 bytes, by tasks for ten each."""
    told: list[tuple[int, int]] = []
    running = SimpleNamespace(
        _begun={"job": lambda tasks, later: told.append((tasks, later))},
        _access=SimpleNamespace(covers=lambda access: True),
        _threads=1,
        _memory=100,
        _room=100,
        _division=SimpleNamespace(
            count=lambda size: size // 10, writers=lambda one, of, sorts: of.bytes // 10
        ),
        _collected=lambda work: [Done(error="no Spark")],
        _speculates=False,
    )
    running._job, running._shared = (
        partial(NativeStages._job, running),
        partial(NativeStages._shared, running),
    )
    job = StageJob("job", "AB", "", (), StorageLocation(tmp_path))
    scans = [
        Relation(f"s{number}", "file", (FileEntry(f"{number}.parquet", size, 0.0),), ())
        for number, size in enumerate((20, 10, 50))
    ]
    exchange = Exchange("", ())
    made = Exchanged({0: exchange, 1: exchange}, Statements("", ""), Statements("", ""), "", frozenset())
    monkeypatch.setattr(
        "ebbflow.infra.spark.native.exchange.hashes.cuts", lambda relation, count, needed: [Cut(())] * count
    )
    way = costs.ByHash({0: "k", 1: "k"}, made, 0.0, 1.0, 30.0)
    with pytest.raises(NotDoneError, match="no Spark"):
        NativeStages._exchanged(running, cast(Program, None), job, way, scans, Event())  # type: ignore[arg-type]
    assert told == [(3, 3)]


@pytest.mark.parametrize(("groups", "rows", "tasks"), [(True, 100, 4), (True, 20, 3), (False, 100, 1)])
def test_few_bytes_of_groups_are_joined_by_as_many_tasks_as_their_rows_up_to_one_a_core(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: bool, rows: int, tasks: int
) -> None:
    """Tasks are for ten bytes each, and four run at once; 10 bytes and those of rows are written as 6 and 2."""
    joined: list[int] = []

    def joining(*rest: Any, **_: Any) -> list[Part]:
        joined.append(rest[5](6, 2))
        return []

    running = SimpleNamespace(
        _room=1000,
        _cores=4,
        _division=SimpleNamespace(count=lambda size: max(1, size // 10), writers=lambda *_, sorts: 1),
        _shared=lambda *rest: ([], []),
    )
    job = StageJob("job", "AB", "", (), StorageLocation(tmp_path))
    scans = [
        Relation(f"s{number}", "file", (FileEntry(f"{number}.parquet", size, 0.0),), ())
        for number, size in enumerate((10, rows))
    ]
    exchanges = {0: Exchange("", ()), 1: Exchange("", (), groups=groups)}
    made = Exchanged(exchanges, Statements("", ""), Statements("", ""), "", frozenset())
    hashes = "ebbflow.infra.spark.native.exchange.hashes"
    monkeypatch.setattr(f"{hashes}.writing", lambda *rest: {})
    monkeypatch.setattr(f"{hashes}.exchanged", lambda *rest: ({}, {}))
    monkeypatch.setattr(f"{hashes}.joining", joining)
    program = cast(Program, SimpleNamespace(sliced=0, full=()))
    way = costs.ByHash({0: "k", 1: "k"}, made, 0.0, 1.0, 30.0)
    NativeStages._exchanged(running, program, job, way, scans, Event())  # type: ignore[arg-type]
    assert joined == [tasks]
