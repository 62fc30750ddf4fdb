"""Slices whose executors are lost: several tasks share what one was at."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.protocols import Relation, StageJob
from ebbflow.infra.spark.native import worker
from ebbflow.infra.spark.native.exchange.program import Program, Slice
from ebbflow.infra.spark.native.exchange.ranges import divided
from ebbflow.infra.spark.native.narrowing import Narrowing
from ebbflow.infra.spark.native.objects import Rows
from ebbflow.infra.spark.native.slices import Cut, cuts, finer
from ebbflow.infra.spark.native.stages import NativeStages
from ebbflow.infra.spark.native.worker import Done, KeyRange, Part, Settings, Work
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.confinement import AllowedAccess
from ebbflow.infra.tables.parquet import discover

MADE = Program(
    {0: "t", 1: "t"},
    0,
    "SELECT k FROM s0",
    "",
    "SELECT k FROM s0",
    (("k", "bigint"),),
    narrowings=(Narrowing("k", "long", ((1, "k"),)),),
)


def table(folder: Path | str, files: Sequence[Sequence[int]]) -> Relation:
    """Write files of these row groups, whose keys are 0, 1, and so on."""
    first = 0
    Path(folder, "t").mkdir(parents=True)
    for number, groups in enumerate(files):
        schema = pa.schema({"k": pa.int64()})
        with pq.ParquetWriter(f"{folder}/t/{number}.parquet", schema) as out:
            for rows in groups:
                out.write_table(pa.table({"k": range(first, first + rows)}, schema))
                first += rows
    (found,) = discover(StorageLocation(str(folder)))
    return found


def keys(relation: Relation, cut: Cut) -> list[int]:
    """Return the keys of a slice's rows, in the order in which it names them."""
    found = [k for file in cut.files for k in pq.read_table(file.path)["k"].to_pylist()]
    for some in cut.rows:
        found += pq.read_table(some.path)["k"].to_pylist()[some.first : some.last + 1]
    return found


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=4),
    st.integers(1, 5),
    st.integers(1, 5),
)
def test_the_parts_of_a_slice_have_its_rows(files: list[list[int]], count: int, parts: int) -> None:
    with TemporaryDirectory() as folder:
        relation = table(folder, files)
        for cut in (Cut(relation.files), *cuts(relation, count)):
            found = finer(relation, cut, parts)
            assert 1 <= len(found) <= parts
            assert [k for one in found for k in keys(relation, one)] == keys(relation, cut)


def test_a_part_of_a_slice_needs_less_of_others(tmp_path: Path) -> None:
    relation = table(tmp_path, [[10] * 12])
    (path,) = (file.path for file in relation.files)
    scans = {0: replace(relation, name="s0"), 1: replace(relation, name="s1")}
    one = Slice(Cut((), (Rows(path, 0, 59),)), (KeyRange("s1", "k", 0, 59),), 5.0, MADE)
    found = divided(one, scans, 3)
    assert [part.cut.rows for part in found] == [(Rows(path, n, n + 19),) for n in (0, 20, 40)]
    assert [part.ranges for part in found] == [(KeyRange("s1", "k", n, n + 19),) for n in (0, 20, 40)]
    (row_group,) = (Slice(Cut((), (Rows(path, 0, 9),)), (), 5.0, MADE),)
    assert [part.cut for part in divided(row_group, scans, 3)] == [row_group.cut]
    whole = one._replace(made=replace(MADE, sliced=None))
    assert divided(whole, scans, 3) == [whole]


@pytest.mark.parametrize(
    ("attempt", "ended", "divisible", "left"),
    [
        (0, "part-00001.parquet", True, False),
        (1, "part-00001.parquet", True, True),
        (1, ".native-s1-00001.parquet", True, False),
        (1, "part-00001.parquet", False, False),
    ],
    ids=[
        "first try",
        "repeated, another has ended",
        "repeated, one unlike it has ended",
        "not to be divided",
    ],
)
def test_a_task_that_is_repeated_is_left_once_another_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: int, ended: str, divisible: bool, left: bool
) -> None:
    monkeypatch.setattr(worker, "_attempt", lambda: attempt)
    (tmp_path / ended).touch()
    parts = [Part("SELECT 1 AS k", (), f"part-0000{n}.parquet", divisible=divisible) for n in range(2)]
    access = AllowedAccess.of([], [StorageLocation(tmp_path)])
    work = Work(Settings(access, 1, 256), str(tmp_path), tuple(parts))
    found: list[Done] = []
    # a worker's main thread takes signals
    thread = threading.Thread(target=lambda: found.extend(work.run(0, iter(()))))
    thread.start()
    thread.join(100)
    while worker._databases:
        worker._databases.popitem()[1].close()
    assert found == [Done(left=True)] if left else found[0].rows == 1
    assert (tmp_path / "part-00000.parquet").exists() is not left


def test_slices_that_are_left_are_divided_among_all_cores(tmp_path: Path) -> None:
    """Of four slices of four row groups two are left, and one that had ended; four cores are there."""
    relation = replace(table(tmp_path, [[10] * 16]), name="s0")
    scans = [relation, replace(relation, name="s1"), Relation("parts0", "file", (), ())]
    (path,) = (file.path for file in relation.files)
    slices = [Slice(Cut((), (Rows(path, n, n + 39),)), (), 5.0, MADE) for n in range(0, 160, 40)]
    names = [f"part-{n:05d}.parquet" for n in range(4)]
    pq.write_table(pa.table({"k": range(40)}), tmp_path / names[2])
    jobs: list[tuple[list[Part], int]] = []

    def job(_: StageJob, parts: Sequence[Part], cancelled: threading.Event, later: int) -> list[Done]:
        jobs.append((list(parts), later))
        if not parts[0].divisible:
            (tmp_path / names[1]).touch()  # by its executor, of which nothing was heard
            return [Done(20)] * len(parts)
        return [Done(40), *[Done(left=True)] * (len(parts) - 1)]

    running = SimpleNamespace(
        _speculates=False, _threads=1, _cores=9, _context=SimpleNamespace(defaultParallelism=4), _job=job
    )
    running._shared = partial(NativeStages._shared, running)
    stage = StageJob("job", "a stage", "", (), StorageLocation(tmp_path))
    files, done = NativeStages._slices(running, stage, threading.Event(), slices, names, scans, 7)  # type: ignore[arg-type]
    pieces = [
        ["part-00001-0.parquet", "part-00001-1.parquet"],
        ["part-00003-0.parquet", "part-00003-1.parquet"],
    ]
    assert files == [[names[0]], pieces[0], [names[2]], pieces[1]]
    assert [one.rows for one in done] == [40, 40, 20, 20, 20, 20]
    (first, _), (again, later) = jobs
    assert all(part.divisible for part in first)
    assert not any(part.divisible for part in again)
    assert later == 7
    assert [part.file for part in again] == pieces[0] + pieces[1]
    assert [part.rows for part in again] == [(Rows(path, n, n + 19),) for n in (40, 60, 120, 140)]
    assert not (tmp_path / names[1]).exists()
    for speculates, count in (
        (True, 4),
        (False, 1),
    ):  # then a task is repeated while it still runs; it is alone
        running._speculates = speculates
        jobs.clear()
        NativeStages._slices(running, stage, threading.Event(), slices[:count], names[:count], scans)  # type: ignore[arg-type]
        assert not any(part.divisible for part in jobs[0][0])
