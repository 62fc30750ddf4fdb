"""Slices that a process computes which is no worker of Spark's; no Spark."""

import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.native import worker
from ebbflow.infra.spark.native.objects import CANCELLED
from ebbflow.infra.spark.native.worker import Part, Settings, Work
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.confinement import AllowedAccess

FOREVER = "SELECT sum(a.range) AS n FROM range(10000000) a, range(10000000) b"


def work_over(folder: Path, statement: str, *others: Relation) -> Work:
    """Return the work of one statement over two files of parts and ``others``."""
    for number in (0, 1):
        rows = pa.table({"v": [number, number + 10]})
        pq.write_table(rows, folder / f".native-{number:05d}.parquet")
    entries = tuple(FileEntry(f"{folder}/.native-{n:05d}.parquet", 1, 0.0) for n in (0, 1))
    part = Part(statement, (Relation("parts", "file", entries, ()), *others), "part-00000.parquet")
    reach = AllowedAccess.of((), [StorageLocation(folder.as_uri())])
    return Work(Settings(reach, 1, 256), str(folder), (part,), last=True)


def test_what_tasks_have_written_is_merged_in_this_process(tmp_path: Path) -> None:
    before = set(worker._databases)
    done = work_over(tmp_path, "SELECT sum(v) AS v FROM parts").here()
    assert (done.rows, done.error) == (1, "")
    assert pq.read_table(tmp_path / "part-00000.parquet").to_pylist() == [{"v": 22}]
    assert sorted(os.listdir(tmp_path)) == [
        ".native-00000.parquet",
        ".native-00001.parquet",
        "part-00000.parquet",
    ]
    assert set(worker._databases) == before, "a database is kept that no task will use"


def test_a_statement_that_is_refused_leaves_no_file(tmp_path: Path) -> None:
    outside = tmp_path / "outside.parquet"
    folder = tmp_path / "stage"
    folder.mkdir()
    pq.write_table(pa.table({"v": [1]}), outside)
    done = work_over(folder, f"SELECT * FROM read_parquet('{outside}')").here()
    assert "disabled" in done.error
    done = work_over(folder, "SELECT CAST('x' || v AS INTEGER) AS v FROM parts").here()
    assert "Conversion" in done.error
    assert all(name.startswith(".native-") for name in os.listdir(folder))


def test_a_cancelled_merge_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = work_over(tmp_path, FOREVER)
    monkeypatch.setattr(worker.LocalParts, "cancelled", lambda self: False)  # it is told once it has begun
    unwanted = worker.LocalParts.unwanted

    def told(self: worker.LocalParts) -> bool:
        (tmp_path / CANCELLED).touch()
        monkeypatch.undo()
        return unwanted(self)

    monkeypatch.setattr(worker.LocalParts, "unwanted", told)
    assert "Interrupted" in work.here().error or "INTERRUPT" in work.here().error
    assert "part-00000.parquet" not in os.listdir(tmp_path)


def test_a_table_that_a_statement_does_not_name_is_not_opened(tmp_path: Path) -> None:
    gone = Relation("s1", "file", (FileEntry(f"{tmp_path}/gone.parquet", 1, 0.0),), (("v", "bigint"),))
    assert not work_over(tmp_path, "SELECT max(v) AS s10 FROM parts", gone).here().error
    assert work_over(tmp_path, "SELECT max(v) AS v FROM (TABLE parts UNION ALL TABLE S1)", gone).here().error


@pytest.mark.parametrize(
    ("name", "statement", "named"),
    [
        ("s1", "SELECT c1 FROM s1", True),
        ("s1", "SELECT c1 FROM s11", False),
        ("Orders", 'SELECT * FROM "orders"', True),
        ('odd "one"', 'SELECT * FROM "odd ""one"""', True),
        ("sales.orders", 'SELECT * FROM "sales.orders"', True),
        ("größe", "SELECT * FROM Größe", True),
    ],
)
def test_names_are_found_as_sql_writes_them(name: str, statement: str, named: bool) -> None:
    assert Part(statement, (), "a").names(Relation(name, "file", (), ())) is named


def test_a_part_of_a_table_without_files_has_no_rows(tmp_path: Path) -> None:
    nothing = Relation("s1", "file", (), (("v", "bigint"),))
    statement = "SELECT v FROM s1 UNION ALL SELECT v FROM parts"
    work = work_over(tmp_path, statement, nothing)
    sliced = replace(work, parts=(replace(work.parts[0], sliced="s1"),))
    assert (sliced.here().rows, sliced.here().error) == (4, "")
