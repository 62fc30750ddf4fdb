"""Results as rows of tables of Delta Lake and Iceberg and of directories, with DuckDB and with Spark."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import DayTransform
from pyiceberg.types import LongType, NestedField, StringType, TimestampType
from pyiceberg.utils.config import Config

from ebbflow.infra.errors import TableError
from ebbflow.infra.protocols import Checkpoint, Relation, SqlEngine
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.query.table_results import Into, write_into
from ebbflow.infra.query.table_rows import _widens
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import parquet
from ebbflow.infra.tables.datatypes import spark_type
from ebbflow.infra.tables.logs import iceberg
from ebbflow.infra.tables.logs.catalogues import IcebergCatalogue
from ebbflow.infra.tables.targets import exchange
from ebbflow.infra.tables.targets import iceberg as iceberg_target
from ebbflow.infra.tables.targets.delta import DeltaTarget
from ebbflow.infra.tables.targets.folder import FolderTarget
from ebbflow.infra.tables.targets.iceberg import IcebergTarget
from ebbflow.infra.tables.targets.model import folder_name
from ebbflow.planners.errors import OptionError
from tests.infra.tables.deleting import DELETING, delete_by_vector, edited
from tests.infra.tables.reading import read

FORMATS = ("delta", "iceberg", "parquet")
TARGETS = {"delta": DeltaTarget, "iceberg": IcebergTarget, "parquet": FolderTarget}
STRANGE = "a/b=%ü 'x'"
AT = datetime(2026, 11, 1, 12, 30, 0, 123457, tzinfo=UTC)
ROWS = pa.table(
    {
        "k": pa.array([1, 2, 3, 4], pa.int32()),
        "day": ["mo", STRANGE, None, "mo"],
        "d": pa.array([date(2026, 11, 1), None, date(2026, 11, 2), date(2026, 11, 1)], pa.date32()),
        "x": pa.array([Decimal("1.50"), None, Decimal("-2.00"), Decimal("9.99")], pa.decimal128(9, 2)),
        "at": pa.array([AT, AT, None, AT], pa.timestamp("us", "UTC")),
        "f": [1.5, float("nan"), None, -0.5],
        "b": [True, None, False, True],
    }
)


@pytest.fixture(
    scope="module",
    params=["duckdb", pytest.param("spark", marks=pytest.mark.spark(shared=True))],
    name="engine",
)
def _engine(request: pytest.FixtureRequest) -> Iterator[SqlEngine]:
    if request.param == "duckdb":
        with DuckDbEngine.start(threads=2, memory_gb=1) as engine:
            yield engine
        return
    from ebbflow.infra.spark.engine import SparkEngine

    with SparkEngine.start("local[2]", memory="1g") as spark:
        yield spark


@pytest.fixture(name="embedded")
def _embedded() -> Iterator[DuckDbEngine]:
    with DuckDbEngine.start(threads=2, memory_gb=1) as engine:
        yield engine


@pytest.fixture(name="lake")
def _lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Iterator[Lake]":
    place = {"uri": f"sqlite:///{tmp_path}/catalog.db", "warehouse": f"file://{tmp_path}/warehouse"}
    for name, value in place.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__TESTS__{name.upper()}", value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    catalog = load_catalog("tests")
    catalog.create_namespace("n")
    yield Lake(tmp_path, catalog)
    catalog.close()


class Lake:
    """Tables of the three formats, all named ``t``."""

    def __init__(self, folder: Path, catalog: Catalog) -> None:
        self.folder, self.catalog = folder, catalog
        self.path = folder / "t"

    def into(self, format: str, **options: Any) -> Into:
        chosen = {"mode": "append", "keys": (), "partitions": (), **options}
        address = "iceberg://tests/n/t" if format == "iceberg" else str(self.path)
        return Into.of(address, "parquet" if format == "parquet" else "delta", **chosen)

    def relation(self, format: str) -> Relation:
        if format == "iceberg":
            found = self.catalog.load_table("n.t").metadata_location
            return iceberg.opened(StorageLocation(found), "t").relation
        source = parquet.source_at(StorageLocation(self.path))
        assert source is not None
        place = self.path if source.log else self.path.parent
        return parquet.table_of(StorageLocation(place), source)

    def rows(self, format: str) -> list[dict[str, Any]]:
        """Return the rows as Ebbflow reads them, sorted by ``k``; the format's own library must read the same."""
        relation = self.relation(format)
        table = read(relation)
        rows = table.sort_by(
            [(name, "ascending") for name in ("k", "v") if name in table.column_names]
        ).to_pylist()
        if format == "delta":
            other = DeltaTable(self.path).to_pyarrow_table()
        elif format == "iceberg":
            other = self.catalog.load_table("n.t").scan().to_arrow()
        else:
            return rows
        others = other.select(table.column_names).to_pylist()
        assert sorted(map(repr, others)) == sorted(map(repr, rows))
        return rows

    def files(self) -> list[str]:
        return sorted(
            str(path.relative_to(self.folder))
            for path in self.folder.rglob("*.parquet")
            if "source" not in path.parts
        )


Make = Callable[..., Checkpoint]


@pytest.fixture(name="result")
def _result(tmp_path: Path) -> Make:
    def result(*tables: pa.Table) -> Checkpoint:
        folder = tmp_path / "source"
        folder.mkdir(exist_ok=True)
        entries = []
        for table in tables:
            path = folder / f"{len(list(folder.iterdir()))}.parquet"
            pq.write_table(table, path)
            entries.append(FileEntry(str(path), path.stat().st_size, path.stat().st_mtime))
        columns = tuple((field.name, str(spark_type(field.type))) for field in tables[0].schema)
        relation = Relation("ckpt_0", "file", tuple(entries), columns)
        return Checkpoint("0", str(folder), relation, sum(map(len, tables)), relation.bytes, 0.0, 0.0)

    return result


def same(found: list[dict[str, Any]], *expected: pa.Table) -> None:
    """Compare rows by their columns' names; NaN is NaN."""
    wanted = sorted((row for table in expected for row in table.to_pylist()), key=lambda row: row["k"])
    names = expected[0].column_names
    assert [repr([row[name] for name in names]) for row in found] == [
        repr(list(row.values())) for row in wanted
    ]


@pytest.mark.parametrize("format", FORMATS)
def test_a_table_is_made_appended_to_overwritten_and_merged_into(
    engine: SqlEngine, format: str, lake: Lake, result: Make
) -> None:
    halves = result(ROWS.slice(0, 2), ROWS.slice(2))
    made = lake.into(format, mode="create", partitions=("day",))
    assert write_into(halves, made, "run1", engine)
    same(lake.rows(format), ROWS)
    assert {Path(file).name[:13] for file in lake.files()} == {"ebbflow-run1-"}
    before = lake.files()
    assert not write_into(halves, made, "run1", engine), "by an earlier try"
    with pytest.raises(TableError, match="is there already"):
        write_into(halves, made, "run2", engine)
    assert lake.files() == before

    more = ROWS.set_column(0, "k", pa.array([5, 6, 7, 8], pa.int32()))
    assert write_into(result(more), lake.into(format), "run3", engine)
    same(lake.rows(format), ROWS, more)

    mondays = ROWS.slice(0, 1).set_column(0, "k", pa.array([9], pa.int32()))
    assert write_into(result(mondays), lake.into(format, mode="overwrite-partitions"), "run4", engine)
    rest = pa.concat_tables([ROWS.slice(1, 2), more.slice(1, 2)])
    same(lake.rows(format), rest, mondays)

    moved = pa.concat_tables([ROWS.slice(2, 1), mondays.set_column(0, "k", pa.array([4], pa.int32()))])
    moved = moved.set_column(1, "day", pa.array(["tu", "tu"]))
    untouched = {file.path for file in lake.relation(format).files if "=mo" in file.path}
    assert write_into(result(moved), lake.into(format, mode="merge", keys=("K",)), "run5", engine)
    same(lake.rows(format), rest.filter(pa.compute.not_equal(rest["k"], 3)), mondays, moved)
    if format != "iceberg":
        assert untouched <= {file.path for file in lake.relation(format).files}, "no key of theirs"

    assert write_into(result(ROWS), lake.into(format, mode="overwrite"), "run6", engine)
    same(lake.rows(format), ROWS)
    assert write_into(result(ROWS.slice(0, 0)), lake.into(format), "run7", engine)
    same(lake.rows(format), ROWS)
    assert not [path for path in lake.folder.rglob(".ebbflow-*") if path.is_dir()]
    files = [Path(file.path) for file in lake.relation(format).files]
    os.umask(umask := os.umask(0))
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~umask}, "others may read them"


@pytest.mark.parametrize("format", FORMATS)
def test_keys_that_a_merge_cannot_take_are_refused(
    embedded: DuckDbEngine, format: str, lake: Lake, result: Make
) -> None:
    into = lake.into(format, mode="merge", keys=("k", "v"))
    rows = pa.table({"k": [1, 1], "v": ["a", "b"], "n": [1, 2]})
    assert write_into(result(rows), into, "run1", embedded)
    for wrong, told in (
        (pa.concat_tables([rows, rows.slice(1)]), "by k = 1, v = 'b', which is in 2 rows"),
        (rows.set_column(1, "v", pa.array(["a", None])), "by k = 1, v = None, which is NULL"),
    ):
        with pytest.raises(TableError, match=told):
            write_into(result(wrong), into, "run2", embedded)
    with pytest.raises(TableError, match="by 'w': it has no such column"):
        write_into(result(rows), replace(into, keys=("w",)), "run2", embedded)
    newer = pa.table({"k": [1, 2], "v": ["b", "c"], "n": [5, 6]})
    assert write_into(result(newer), into, "run2", embedded)
    assert [row["n"] for row in lake.rows(format)] == [1, 5, 6]


_KILLED = """
import json, os, signal, sys
from ebbflow.infra.query import table_results
from ebbflow.infra.query.duckdb import DuckDbEngine
from tests.infra.query.test_result_tables import TARGETS, ROWS
from tests.infra.query import test_result_tables as tests
from pathlib import Path
folder, format = sys.argv[1:]
make = tests._result.__wrapped__(Path(folder))
into = tests.Lake(Path(folder), None).into(format, partitions=("day",))
TARGETS[format].commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
table_results.write_into(make(ROWS), into, "run2", DuckDbEngine.start(threads=1))
"""


@pytest.mark.parametrize("format", FORMATS)
def test_a_process_that_is_killed_before_its_commit_leaves_the_table_as_it_was(
    embedded: DuckDbEngine, format: str, lake: Lake, result: Make
) -> None:
    into = lake.into(format, partitions=("day",))
    write_into(result(ROWS), into, "run1", embedded)
    before = lake.files()
    command = [sys.executable, "-c", _KILLED, str(lake.folder), format]
    child = subprocess.run(command, check=False, capture_output=True, text=True, timeout=150)
    assert child.returncode == -signal.SIGKILL, child.stderr[-3000:]
    assert len(lake.files()) > len(before), "its data files are there"
    same(lake.rows(format), ROWS)
    assert write_into(result(ROWS), into, "run2", embedded)
    assert [row["k"] for row in lake.rows(format)] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert len(lake.files()) == 2 * len(before), "and are not any more"
    assert not write_into(result(ROWS), into, "run2", embedded)
    assert len(lake.rows(format)) == 8


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("mode", ["append", "overwrite", "merge"])
def test_a_commit_between_a_look_and_a_commit_is_seen(
    embedded: DuckDbEngine, format: str, mode: str, lake: Lake, result: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = pa.table({"k": [1, 2], "v": ["a", "b"]})
    other = pa.table({"k": [2, 3], "v": ["c", "d"]})
    commit = TARGETS[format].commit
    seen: list[str] = []

    def after_others(*given: Any) -> None:
        if len(seen) < 3:  # the table is made by another, then changed, then written by another try
            seen.append(mode)
            monkeypatch.setattr(TARGETS[format], "commit", commit)
            if len(seen) < 3:
                write_into(result(other), lake.into(format), f"other{len(seen)}", embedded)
            else:
                write_into(result(rows), into, "run1", embedded)
            monkeypatch.setattr(TARGETS[format], "commit", after_others)
        commit(*given)

    into = lake.into(format, mode=mode, keys=("k",) if mode == "merge" else ())
    monkeypatch.setattr(TARGETS[format], "commit", after_others)
    assert not write_into(result(rows), into, "run1", embedded)
    assert len(seen) == 3
    expected = {
        "append": [(1, "a"), (2, "b"), (2, "c"), (2, "c"), (3, "d"), (3, "d")],
        "overwrite": [(1, "a"), (2, "b")],
        "merge": [(1, "a"), (2, "b"), (3, "d"), (3, "d")],
    }
    assert [(row["k"], row["v"]) for row in lake.rows(format)] == expected[mode]
    assert len(lake.files()) >= len(lake.relation(format).files)
    left = [file for file in lake.files() if "ebbflow-run1" in file]
    if mode != "merge" or format != "parquet":
        assert len(left) == 1, "files of tries that were not committed are deleted"


def test_what_other_programs_do_to_a_directory_while_it_is_committed_is_kept(
    embedded: DuckDbEngine, lake: Lake, result: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    into = lake.into("parquet", mode="overwrite")
    other = pa.table({"k": [7], "v": ["z"]})
    write_into(result(pa.table({"k": [1], "v": ["a"]})), lake.into("parquet"), "run0", embedded)
    link = exchange.link

    def then(change: Callable[[], object]) -> Callable[..., Any]:
        def linked(*given: Any) -> Any:
            monkeypatch.setattr(exchange, "link", link)
            found = link(*given)
            change()
            return found

        return linked

    def added() -> None:
        pq.write_table(other, lake.path / "other.parquet")
        (lake.path / "notes").mkdir()
        (lake.path / "notes/_said.txt").write_text("x")

    monkeypatch.setattr(exchange, "link", then(added))
    assert write_into(result(pa.table({"k": [2], "v": ["b"]})), into, "run1", embedded)
    assert [row["k"] for row in lake.rows("parquet")] == [2, 7], "a file that was put there stays"
    assert (lake.path / "notes/_said.txt").read_text() == "x"
    (lake.path / "notes/_said.txt").unlink()
    (lake.path / "notes").rmdir()

    monkeypatch.setattr(exchange, "link", then((lake.path / "other.parquet").unlink))
    assert write_into(result(pa.table({"k": [3], "v": ["c"]})), lake.into("parquet"), "run2", embedded)
    assert [row["k"] for row in lake.rows("parquet")] == [2, 3], "one that was deleted does not come back"

    changed: list[str] = []

    def rewritten() -> None:
        (file,) = lake.path.glob("*run1*.parquet")
        pq.write_table(other, file.with_suffix(".tmp"))
        file.with_suffix(".tmp").rename(file)
        changed.append(file.name)

    monkeypatch.setattr(exchange, "link", then(rewritten))
    merging = lake.into("parquet", mode="merge", keys=("k",))
    assert write_into(result(pa.table({"k": [2, 7], "v": ["d", "e"]})), merging, "run3", embedded)
    assert changed
    found = [(row["k"], row["v"]) for row in lake.rows("parquet")]
    assert found == [(2, "d"), (3, "c"), (7, "e")], (
        "the rows are merged once more, into what the file has now"
    )

    def replaced() -> None:
        (file,) = lake.path.glob("*run3*.parquet")
        pq.write_table(other, file)

    monkeypatch.setattr(exchange, "link", then(replaced))
    assert write_into(result(pa.table({"k": [4], "v": ["f"]})), into, "run4", embedded)
    assert [row["k"] for row in lake.rows("parquet")] == [4], "overwritten once more, by the same files"
    assert [path.name for path in lake.folder.iterdir() if path.name.startswith(".t.")] == [".t.ebbflow-lock"]


def test_files_of_an_iceberg_table_are_opened_before_its_catalogue_is_asked(
    embedded: DuckDbEngine, lake: Lake, result: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ask, read_footers = [False], IcebergCatalogue.ask, iceberg_target._data_file

    def asking(*given: Any) -> Any:
        asked[0] = True
        try:
            return ask(*given)
        finally:
            asked[0] = False

    def data_file(*given: Any) -> Any:
        assert not asked[0], "its answer has a time limit"
        return read_footers(*given)

    monkeypatch.setattr(IcebergCatalogue, "ask", asking)
    monkeypatch.setattr(iceberg_target, "_data_file", data_file)
    into = lake.into("iceberg", partitions=("day",))
    write_into(result(ROWS), into, "run1", embedded)
    write_into(result(ROWS), into, "run2", embedded)
    assert len(lake.rows("iceberg")) == 8


def test_what_an_iceberg_library_cannot_read_before_a_commit_is_told_or_a_conflict(
    embedded: DuckDbEngine, lake: Lake, result: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = result(pa.table({"k": [1], "v": ["a"]}))
    into, paths = lake.into("iceberg", mode="overwrite"), iceberg_target._of_paths
    write_into(rows, into, "run1", embedded)
    tried: list[str] = []

    def failing(*given: Any) -> Any:
        tried.append("")
        if others:  # another program changes the table, and removes the manifests that it had
            write_into(rows, lake.into("iceberg"), others.pop(), embedded)
            raise RuntimeError("manifest is gone")
        if len(tried) > 1:
            return paths(*given)
        raise RuntimeError("no answer\nfrom 10.0.0.1")

    monkeypatch.setattr(iceberg_target, "_of_paths", failing)
    others: list[str] = []
    with pytest.raises(TableError, match=r"read the metadata of the Iceberg table .t. .*: no answer$"):
        write_into(rows, into, "run2", embedded)
    others.append("run3")
    assert write_into(rows, into, "run4", embedded)
    assert len(tried) == 3
    assert lake.rows("iceberg") == [{"k": 1, "v": "a"}], "overwritten, the other's row as well"


def test_files_with_deletion_vectors_are_replaced_by_their_library_only(
    embedded: DuckDbEngine, lake: Lake, result: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deltalake(lake.path, pa.table({"k": [1, 2, 3], "v": ["a", "b", "c"]}), configuration=DELETING)
    delete_by_vector(lake.path, 0, [1])

    def as_by_others(action: dict[str, Any]) -> None:
        if "protocol" in action:
            action["protocol"]["readerFeatures"] = ["deletionVectors"]
            action["protocol"]["writerFeatures"] = ["deletionVectors", "invariants", "appendOnly"]

    edited(lake.path, 0, as_by_others)
    rows = result(pa.table({"k": [3], "v": ["d"]}))
    merging = lake.into("delta", mode="merge", keys=("k",))
    for mode in ("merge", "overwrite-partitions"):
        with pytest.raises(TableError, match="has rows deleted by deletion vectors, which only its library"):
            write_into(rows, replace(merging, mode=mode), "run1", embedded)  # type: ignore[arg-type]
    with monkeypatch.context() as patched:  # as of a table that has them since
        patched.setattr(DeltaTarget, "kept_by_library", lambda *_: "")
        with pytest.raises(TableError, match=r"deleted by a deletion vector in .*, which is to be replaced"):
            write_into(rows, merging, "run1", embedded)
    for number, (mode, expected) in enumerate((("append", ["a", "c", "d"]), ("overwrite", ["d"]))):
        assert write_into(rows, lake.into("delta", mode=mode), f"run{number + 2}", embedded)
        found = read(lake.relation("delta")).column("v").to_pylist()
        assert sorted(found) == expected


def test_tries_at_once_write_once(embedded: DuckDbEngine, lake: Lake, result: Make) -> None:
    found = result(pa.table({"k": [1]}))
    for format in FORMATS:
        with ThreadPoolExecutor(3) as pool:
            tries = [pool.submit(write_into, found, lake.into(format), "run1", embedded) for _ in range(3)]
            assert sorted(one.result() for one in tries) == [False, False, True], format
            others = [
                pool.submit(write_into, found, lake.into(format), f"run{n}", embedded) for n in (2, 3, 4)
            ]
            assert [one.result() for one in others] == [True] * 3
        assert len(lake.rows(format)) == 4
        if format == "delta":
            subprocess.run(["rm", "-r", str(lake.path)], check=True, timeout=60)


def test_what_another_try_has_not_moved_yet_does_not_keep_a_table_from_being_made(
    embedded: DuckDbEngine, lake: Lake, result: Make
) -> None:
    begun = lake.path / folder_name("run1")
    begun.mkdir(parents=True)
    (begun / "part-00000.parquet").write_bytes(b"PAR1")
    assert write_into(result(pa.table({"k": [1]})), lake.into("delta"), "run1", embedded)


@pytest.mark.parametrize("folder", ["_k=1", ".k=1", "ebbflow-k=1"])
def test_files_of_others_in_directories_keep_a_table_from_being_made(
    embedded: DuckDbEngine, lake: Lake, result: Make, folder: str
) -> None:
    theirs = lake.path / folder / "x.parquet"
    theirs.parent.mkdir(parents=True)
    pq.write_table(pa.table({"v": [1]}), theirs)
    with pytest.raises(TableError, match=r"no table of Delta Lake and not empty: it holds x\.parquet"):
        write_into(result(pa.table({"k": [1]})), lake.into("delta"), "run1", embedded)
    assert list(lake.path.rglob("*.parquet")) == [theirs]


def test_rows_that_do_not_fit_are_refused(embedded: DuckDbEngine, lake: Lake, result: Make) -> None:
    for format in FORMATS:
        write_into(result(pa.table({"k": [1], "v": ["a"]})), lake.into(format), "run1", embedded)
        before = lake.rows(format)
        for wrong, told in (
            (pa.table({"k": [1.5], "v": ["a"]}), "'k' is bigint, that of the rows double; cast it"),
            (pa.table({"k": [1]}), "the rows lack the column 'v'"),
            (pa.table({"k": [1], "v": ["a"], "w": [1]}), "the table lacks the column 'w'"),
        ):
            with pytest.raises(TableError, match=told):
                write_into(result(wrong), lake.into(format), "run2", embedded)
        with pytest.raises(TableError, match="partitioned by nothing, not by v"):
            write_into(
                result(pa.table({"k": [1], "v": ["a"]})),
                lake.into(format, partitions=("v",)),
                "run2",
                embedded,
            )
        with pytest.raises(TableError, match="has no partitions"):
            write_into(
                result(pa.table({"k": [1], "v": ["a"]})),
                lake.into(format, mode="overwrite-partitions"),
                "run2",
                embedded,
            )
        small = pa.table({"V": ["b"], "K": pa.array([2], pa.int16())})
        assert write_into(result(small), lake.into(format), "run3", embedded), "names in any case, widened"
        assert lake.rows(format) == [*before, {"k": 2, "v": "b"}]
        if format == "delta":
            with pytest.raises(TableError, match="is a table of Delta Lake"):
                write_into(result(small), lake.into("parquet"), "run4", embedded)
            subprocess.run(["rm", "-r", str(lake.path)], check=True, timeout=60)
    with pytest.raises(TableError, match="no table of Delta Lake and not empty"):
        write_into(result(small), lake.into("delta"), "run4", embedded)
    empty = pa.table({"k": [1], "v": [""]})
    for format in ("delta", "parquet"):
        into = replace(lake.into(format, partitions=("v",)), place=StorageLocation(lake.folder / "e"))
        with pytest.raises(TableError, match="'v', which is an empty text"):
            write_into(result(empty), into, "run5", embedded)
        with pytest.raises(TableError, match="cannot be partitioned by 'w'"):
            write_into(result(empty), replace(into, partitions=("w",)), "run5", embedded)


def test_what_only_a_library_keeps_is_left_to_it(embedded: DuckDbEngine, lake: Lake, result: Make) -> None:
    write_deltalake(lake.path, pa.table({"k": [1], "v": ["a"]}))
    DeltaTable(lake.path).alter.add_constraint({"small": "k < 9"})
    notes: list[str] = []
    assert write_into(
        result(pa.table({"k": [2], "v": ["b"]})), lake.into("delta"), "run1", embedded, notes.append
    )
    assert "has constraints: rows stream through its library" in notes[0]
    with pytest.raises(TableError, match="cannot write into the Delta Lake table 't'"):
        write_into(result(pa.table({"k": [9], "v": ["b"]})), lake.into("delta"), "run2", embedded)
    with pytest.raises(TableError, match="which only its library keeps"):
        write_into(
            result(pa.table({"k": [3], "v": ["b"]})),
            lake.into("delta", mode="merge", keys=("k",)),
            "r",
            embedded,
        )
    required = Schema(NestedField(1, "k", LongType(), required=True), NestedField(2, "v", StringType()))
    lake.catalog.create_table("n.t", required)
    assert write_into(result(pa.table({"k": [2], "v": ["b"]})), lake.into("iceberg"), "run1", embedded)
    with pytest.raises(TableError, match="a column 'k' without NULL"):
        write_into(
            result(pa.table({"k": [1, None], "v": ["b", "c"]})), lake.into("iceberg"), "run2", embedded
        )
    assert lake.rows("iceberg") == [{"k": 2, "v": "b"}]
    with pytest.raises(TableError, match="nested column 'w'"):
        IcebergTarget(IcebergCatalogue.of("iceberg://tests/n"), "t").kinds([("w", "array<int>")])
    lake.catalog.drop_table("n.t")
    times = Schema(NestedField(1, "k", LongType()), NestedField(2, "v", TimestampType()))
    lake.catalog.create_table(
        "n.t", times, partition_spec=PartitionSpec(PartitionField(2, 1000, DayTransform(), "d"))
    )
    with pytest.raises(TableError, match=r"is partitioned by day\(v\)"):
        write_into(
            result(pa.table({"k": [2], "v": [datetime(2026, 1, 1)]})), lake.into("iceberg"), "run3", embedded
        )


def test_the_log_tells_bounds_that_hold(embedded: DuckDbEngine, lake: Lake, result: Make) -> None:
    long = "z" * 40
    rows = ROWS.append_column("s", pa.array(["a", long, None, "b"]))
    write_into(result(rows), lake.into("delta"), "run1", embedded)
    (path,) = (lake.path / "_delta_log").glob("*.json")
    (said,) = (
        json.loads(one["add"]["stats"])
        for line in path.read_text().splitlines()
        if "add" in (one := json.loads(line))
    )
    assert said["numRecords"] == 4
    assert said["nullCount"] == {"k": 0, "day": 1, "d": 1, "x": 1, "at": 1, "f": 1, "b": 1, "s": 1}
    assert said["minValues"] == {
        "k": 1, "day": STRANGE, "d": "2026-11-01", "x": -2.0, "at": "2026-11-01T12:30:00.123Z", "b": False,
    }  # fmt: skip
    assert said["maxValues"]["at"] == "2026-11-01T12:30:00.124Z"
    assert not {"s", "f"} & set(said["maxValues"])


@pytest.mark.parametrize(
    ("given", "kind", "fits"),
    [
        ("int", "int", True), ("int", "bigint", True), ("bigint", "int", False), ("int", "double", True),
        ("bigint", "double", False), ("float", "double", True), ("double", "float", False),
        ("decimal(9,2)", "decimal(10,2)", True), ("decimal(9,2)", "decimal(10,4)", False),
        ("decimal(9,2)", "decimal(11,4)", True), ("bigint", "decimal(19,0)", True), ("int", "decimal(10,1)", False),
        ("int", "string", False), ("void", "string", True), ("date", "timestamp", False),
    ],
)  # fmt: skip
def test_a_type_fits_where_no_value_changes(given: str, kind: str, fits: bool) -> None:
    assert _widens(given, kind) is fits


def test_options_that_contradict_each_other_are_refused() -> None:
    for options, told in (
        ({"mode": "merge"}, "needs into_key"),
        ({"keys": ("k",)}, "needs into_mode merge"),
        ({"partitions": ("k", "K")}, "names a column twice"),
        ({"address": "iceberg://tests/t"}, "iceberg://CATALOG/NAMESPACE/TABLE; got"),
    ):
        chosen = {
            "address": "t",
            "format": "delta",
            "mode": "append",
            "keys": (),
            "partitions": (),
            **options,
        }
        with pytest.raises(OptionError, match=told):
            Into.of(**chosen)
    with pytest.raises(TableError, match="object storage shows them one by one"):
        FolderTarget(StorageLocation("s3://bucket/t"))
