"""Metadata of Iceberg tables: which of them are a table's, and what is told where they are not there or damaged."""

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyiceberg.types import (
    IntegerType,
    NestedField,
    StructType,
)

from ebbflow.infra.errors import EngineUnavailableError, TableError
from ebbflow.infra.query.comparison import same_rows
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import statistics
from ebbflow.infra.tables.parquet import discover, sources, table_of
from tests.infra.tables.iceberg import SALES, Make, check
from tests.infra.tables.reading import read


def test_the_metadata_of_a_directory_are_the_newest_or_what_the_hint_names(
    make: Make, iceberg_place: StorageLocation
) -> None:
    table = make()
    first = Path(table.metadata_location.removeprefix("file://"))
    table.append(SALES)
    second = Path(table.metadata_location.removeprefix("file://"))
    assert read(discover(iceberg_place)[0]).num_rows == 8
    hint = first.parent / "version-hint.text"
    hint.write_text(first.name)
    assert read(discover(iceberg_place)[0]).num_rows == 4
    hint.write_text("7")
    shutil.copy(second, first.parent / "v7.metadata.json")
    assert read(discover(iceberg_place)[0]).num_rows == 8
    hint.unlink()
    (first.parent / "v7.metadata.json").unlink()
    shutil.copy(first, first.parent / second.name.replace("-", "-0", 1))
    with pytest.raises(TableError, match=r"has 2 newest metadata files \(.*name that file as the table"):
        discover(iceberg_place)
    (relation,) = discover(StorageLocation(second))
    assert (relation.name, read(relation).num_rows) == ("t", 8)
    assert statistics.collect(relation).rows == 8.0


def test_a_table_that_was_moved_is_refused_and_one_behind_a_link_is_read(
    make: Make, iceberg_place: StorageLocation, tmp_path: Path
) -> None:
    make()
    (tmp_path / "link").symlink_to(iceberg_place.root)
    assert same_rows(read(discover(StorageLocation(tmp_path / "link"))[0]), SALES) is None
    shutil.copytree(iceberg_place.root, tmp_path / "moved/t")
    with pytest.raises(TableError, match=r"'t' was written for .* and lies in .*moved/t"):
        discover(StorageLocation(tmp_path / "moved"))


def test_a_file_outside_of_the_table_is_refused(
    make: Make, iceberg_place: StorageLocation, tmp_path: Path
) -> None:
    table = make(SALES.drop_columns(["place"]))
    pq.write_table(SALES.drop_columns(["place"]), tmp_path / "other.parquet")
    table.add_files([str(tmp_path / "other.parquet")])
    with pytest.raises(TableError, match="has a file outside of its directory"):
        discover(iceberg_place)


def test_times_and_snapshots_that_are_not_there_are_told(make: Make, iceberg_place: StorageLocation) -> None:
    table = make()
    table.append(SALES)
    first, second = (datetime.fromtimestamp(e.timestamp_ms / 1000, UTC) for e in table.metadata.snapshot_log)
    source = sources(iceberg_place)[0]

    def rows(at: datetime) -> int:
        return int(read(table_of(iceberg_place, source, at=at.isoformat())).num_rows)

    assert (rows(first), rows(second), rows(second + timedelta(days=1))) == (4, 8, 8)
    with pytest.raises(TableError, match="has no snapshot as old as"):
        rows(first - timedelta(seconds=1))
    with pytest.raises(
        TableError, match=f"has no snapshot 5; its last are .*{table.metadata.current_snapshot_id}"
    ):
        table_of(iceberg_place, source, at="5")


def test_a_schema_without_a_snapshot_of_its_own_is_the_newest_all_the_same(
    make: Make, iceberg_place: StorageLocation
) -> None:
    table = make()
    pinned = discover(iceberg_place)[0].log
    assert pinned is not None
    with table.update_schema() as update:
        update.add_column("later", IntegerType())
        update.add_column("more", StructType(NestedField(50, "x", IntegerType(), required=False)))
    assert check(table, iceberg_place).column("later").null_count == 4
    again = table_of(iceberg_place, sources(iceberg_place)[0], pinned=pinned.version)
    assert "later" not in dict(again.columns)


def test_damaged_metadata_and_a_missing_library_are_told(
    make: Make, iceberg_place: StorageLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = make()
    Path(table.metadata_location.removeprefix("file://")).write_text('{"format-version": 2}')
    with pytest.raises(TableError, match="cannot read the metadata of the Iceberg table 't'"):
        discover(iceberg_place)
    monkeypatch.setattr("ebbflow.infra.packages.find_spec", lambda module: None)
    with pytest.raises(
        EngineUnavailableError, match=r"'t' .* needs pyiceberg: pip install 'prefect-ebbflow\[lake\]'"
    ):
        discover(iceberg_place)


def test_an_empty_table_has_its_columns(make: Make, iceberg_place: StorageLocation) -> None:
    table = make()
    table.delete()
    assert check(table, iceberg_place).num_rows == 0
