"""Results in tables of Delta Lake and Iceberg: what each format and its library require."""

import json
from dataclasses import replace
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import DayTransform
from pyiceberg.types import LongType, NestedField, StringType, TimestampType

from ebbflow.infra.errors import TableError
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.query.table_results import write_into
from ebbflow.infra.tables.logs.catalogues import IcebergCatalogue
from ebbflow.infra.tables.targets import iceberg as iceberg_target
from ebbflow.infra.tables.targets.delta import DeltaTarget
from ebbflow.infra.tables.targets.iceberg import IcebergTarget
from tests.infra.query.table_results.lake import ROWS, STRANGE, Lake, Make
from tests.infra.tables.deleting import DELETING, delete_by_vector, edited
from tests.infra.tables.reading import read


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
