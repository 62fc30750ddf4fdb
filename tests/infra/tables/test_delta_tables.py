"""Tables of Delta Lake: what is read is what the library that wrote them reads."""

import shutil
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbflow.infra.errors import EngineUnavailableError, TableError
from ebbflow.infra.query.comparison import same_rows
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.query.results import result_at
from ebbflow.infra.query.table_results import Into, write_into
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import filefooters, statistics
from ebbflow.infra.tables.logs import snapshots
from ebbflow.infra.tables.logs.versions import s3_settings
from ebbflow.infra.tables.parquet import discover, sources, table_of, version
from tests.infra.tables.deleting import edited
from tests.infra.tables.delta import SALES
from tests.infra.tables.reading import read, sampled

KEYS = ["country", "day", "shop", "open", "amount", "at"]


def library(path: Path | str, version: int | None = None) -> pa.Table:
    return DeltaTable(str(path), version=version).to_pyarrow_table()


def test_every_version_is_read_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "sales"
    write_deltalake(path, SALES)
    write_deltalake(path, SALES.slice(0, 2), mode="append")
    DeltaTable(path).delete("id = 1")
    later = SALES.slice(2).append_column("note", pa.array(["x", None]))
    write_deltalake(path, later.select(later.column_names[::-1]), mode="append", schema_mode="merge")
    write_deltalake(path, SALES.slice(3), mode="overwrite", schema_mode="overwrite")
    for number in range(5):
        table = table_of(StorageLocation(path), sources(StorageLocation(path))[0], at=str(number))
        assert table.log is not None
        assert table.log.version == str(number)
        assert same_rows(read(table), library(path, number)) is None
        assert same_rows(sampled(table), library(path, number)) is None


def test_partitions_have_the_tables_types_and_the_logs_values(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "sales", SALES, partition_by=KEYS)
    write_deltalake(tmp_path / "sales", SALES.slice(1, 2), mode="append")
    (table,) = discover(StorageLocation(tmp_path))
    assert table.partitions == tuple(KEYS)
    assert dict(table.columns) == {
        "id": "bigint", "country": "string", "day": "date", "shop": "int", "open": "boolean",
        "amount": "decimal(10,2)", "at": "timestamp", "tags": "array<string>",
    }  # fmt: skip
    wanted = library(tmp_path / "sales")
    assert same_rows(read(table), wanted) is None
    assert same_rows(sampled(table), wanted) is None
    assert snapshots.keys(table)["shop"] == tuple(
        snapshots.snapshot(table).keys["shop"][n] for n in range(len(table.files))
    )
    known = statistics.collect(table)
    assert (known.rows, known.columns["country"].distinct, known.columns["country"].nulls) == (
        6.0,
        2.0,
        1 / 6,
    )


def test_the_log_tells_rows_and_bounds_and_no_footer_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deltalake(tmp_path / "t", SALES)
    write_deltalake(tmp_path / "t", SALES.slice(0, 1), mode="append")
    monkeypatch.setattr(filefooters, "_opened", lambda scheme, file: pytest.fail(f"{file.path} was opened"))
    (table,) = discover(StorageLocation(tmp_path))
    told = snapshots.read_footers(table, ["id", "country", "amount", "tags"])
    assert sorted(sum(file.rows) for file in told) == [1, 4]
    whole = next(file for file in told if file.rows == (4,))
    assert whole.bounds["id"] == ((0, 1, 4),)
    assert whole.bounds["country"] == ((1, "de", "f r/%"),)
    assert whole.bounds["tags"] == ((None, None, None),)
    assert whole.bounds["amount"][0].nulls == 1


def test_files_that_the_log_does_not_count_are_counted_by_their_footers(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", SALES)

    def strip(action: dict[str, Any]) -> None:
        if "add" in action:
            del action["add"]["stats"]

    edited(tmp_path / "t", 0, strip)
    (table,) = discover(StorageLocation(tmp_path))
    known = statistics.collect(table)
    assert (known.rows, known.columns["id"].low, known.columns["id"].high) == (4.0, 1.0, 4.0)
    assert known.columns["country"].nulls == 0.25


def test_a_time_is_the_last_version_committed_by_then(tmp_path: Path) -> None:
    path = tmp_path / "t"
    for number in range(3):
        write_deltalake(path, SALES.slice(number, 1), mode="append")

        def dated(action: dict[str, Any], number: int = number) -> None:
            if "commitInfo" in action:
                action["commitInfo"]["timestamp"] = 1_790_000_000_000 + number * 60_000

        edited(path, number, dated)
    source = sources(StorageLocation(path))[0]

    def at(moment: datetime) -> str:
        found = table_of(StorageLocation(path), source, at=moment.isoformat()).log
        assert found is not None
        return found.version

    first = datetime.fromtimestamp(1_790_000_000, UTC)
    assert at(first) == "0"
    assert at(first + timedelta(seconds=119)) == "1"
    assert at((first + timedelta(seconds=120)).replace(tzinfo=None)) == "2", "UTC unless it says otherwise"
    with pytest.raises(
        TableError, match=r"no version as old as .*; its log goes back to version 0 of 2026-09-"
    ):
        at(first - timedelta(seconds=1))
    with pytest.raises(TableError, match="'t' has no version 7; its newest is 2"):
        table_of(StorageLocation(path), source, at="7")


def test_what_was_vacuumed_away_cannot_be_read_any_more(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_deltalake(path, SALES)
    write_deltalake(path, SALES.slice(1), mode="overwrite")
    DeltaTable(path).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    source = sources(StorageLocation(path))[0]
    with pytest.raises(
        TableError, match=r"t: Delta Lake, version 0 cannot be read any more: 1 of its 1 files"
    ):
        table_of(StorageLocation(path), source, at="0")
    pinned = table_of(StorageLocation(path), source, pinned="0").log
    assert pinned is not None
    assert int(pinned.version) > 0, "it is the newest instead"


def test_the_version_of_a_relation_is_what_is_read_not_the_number_of_the_commit(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_deltalake(path, SALES)
    before = version(discover(StorageLocation(path))[0])
    DeltaTable(path).alter.set_table_properties({"delta.appendOnly": "false"})
    assert version(discover(StorageLocation(path))[0]) == before
    write_deltalake(path, SALES.slice(0, 1), mode="append")
    assert version(discover(StorageLocation(path))[0]) != before


def test_tables_in_object_storage_are_read_and_written(s3: Callable[[], str], tmp_path: Path) -> None:
    place = f"{s3()}/lake/sales"
    options = {**s3_settings(), "conditional_put": "etag"}
    write_deltalake(place, SALES, partition_by=["country", "day"], storage_options=options)
    write_deltalake(place, SALES.slice(1), mode="append", storage_options=options)
    (table,) = discover(StorageLocation(place.rpartition("/")[0]))
    assert same_rows(read(table), pa.concat_tables([SALES, SALES.slice(1)])) is None
    assert statistics.collect(table).rows == 7.0
    old = table_of(StorageLocation(place), sources(StorageLocation(place))[0], at="0")
    assert same_rows(read(old), SALES) is None
    pq.write_table(SALES, tmp_path / "result.parquet")
    result = result_at(StorageLocation(tmp_path / "result.parquet"), table.columns, 4)
    into = Into.of(place, "delta", "append", (), ())
    with DuckDbEngine.start(1, 1.0) as engine:
        written = [write_into(result, into, run, engine) for run in ("a", "b", "a")]
    assert written == [True, True, False]
    (table,) = discover(StorageLocation(place))
    assert same_rows(read(table), pa.concat_tables([SALES, SALES.slice(1), SALES, SALES])) is None
    assert statistics.collect(discover(StorageLocation(place))[0]).rows == 15.0


# --- what changes rows beyond the list of files ----------------------------------------------------------


def test_columns_that_files_have_under_other_names_are_found(tmp_path: Path) -> None:
    path = tmp_path / "t"
    plain = SALES.drop_columns(["tags"])
    write_deltalake(path, plain, configuration={"delta.columnMapping.mode": "name"})
    write_deltalake(path, plain.slice(0, 1), mode="append")
    (table,) = discover(StorageLocation(path))
    assert table.log is not None
    assert len(table.log.stored) == len(plain.column_names)
    assert same_rows(read(table), pa.concat_tables([plain, plain.slice(0, 1)])) is None
    assert same_rows(sampled(table), pa.concat_tables([plain, plain.slice(0, 1)])) is None
    assert statistics.collect(table).columns["id"].high == 4.0

    def renamed(action: dict[str, Any]) -> None:
        if "metaData" in action:
            action["metaData"]["schemaString"] = action["metaData"]["schemaString"].replace(
                '"id"', '"number"'
            )

    edited(path, 0, renamed)
    assert read(discover(StorageLocation(path))[0]).column("number").to_pylist().count(1) == 2


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (
            lambda a: a["metaData"]["configuration"].update({"delta.columnMapping.mode": "id"}),
            "maps columns by id",
        ),
        (
            lambda a: a["metaData"].update(
                schemaString=a["metaData"]["schemaString"].replace('"long"', '"variant"')
            ),
            "VARIANT",
        ),
    ],
)
def test_other_mappings_and_types_are_refused(
    edit: Callable[[dict[str, Any]], None], told: str, tmp_path: Path
) -> None:
    path = tmp_path / "t"
    write_deltalake(path, SALES.select(["id"]), configuration={"delta.columnMapping.mode": "name"})
    edited(path, 0, lambda action: edit(action) if "metaData" in action else None)
    with pytest.raises(TableError, match=f"'t'.*{told}|{told}.*'t'"):
        discover(StorageLocation(path))


def test_a_reader_feature_that_is_not_known_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_deltalake(path, SALES)
    for feature, told in (("typeWidening", "has the feature typeWidening"), ("madeUp", "madeUp")):

        def asks(action: dict[str, Any], feature: str = feature) -> None:
            if "protocol" in action:
                action["protocol"] = {
                    "minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": [feature],
                    "writerFeatures": [feature],
                }  # fmt: skip

        edited(path, 0, asks)
        with pytest.raises(TableError, match=told):
            discover(StorageLocation(path))


def test_files_outside_of_the_table_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_deltalake(path, SALES)
    file = next(path.glob("*.parquet"))
    for place in (f"../{file.name}", f"file://{tmp_path}/{file.name}"):
        shutil.rmtree(path)
        write_deltalake(path, SALES)
        edited(path, 0, lambda a, place=place: a["add"].update(path=place) if "add" in a else None)
        with pytest.raises(TableError, match="has a file outside of its directory"):
            discover(StorageLocation(path))


def test_partitions_that_directories_do_not_tell_are_refused(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", pa.table({"k": ["", "a"], "v": [1, 2]}), partition_by=["k"])
    with pytest.raises(TableError, match=r"'t' has the partition k = NULL in the directory 'k='"):
        discover(StorageLocation(tmp_path))
    shutil.rmtree(tmp_path / "t")
    write_deltalake(tmp_path / "t", pa.table({"k": ["a"], "v": [1]}), partition_by=["k"])
    edited(tmp_path / "t", 0, lambda a: a["add"].update(partitionValues={"k": "b"}) if "add" in a else None)
    with pytest.raises(TableError, match=r"the partition k = 'b' in the directory 'k=a'"):
        discover(StorageLocation(tmp_path))


def test_a_damaged_log_and_a_missing_library_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_deltalake(tmp_path / "t", SALES)
    for log in (tmp_path / "t/_delta_log").glob("*.json"):
        log.write_text("{")
    with pytest.raises(TableError, match="cannot read the log of the Delta Lake table 't'"):
        discover(StorageLocation(tmp_path))
    monkeypatch.setattr("ebbflow.infra.packages.find_spec", lambda module: None)
    with pytest.raises(
        EngineUnavailableError, match=r"'t' .* needs deltalake: pip install 'prefect-ebbflow\[lake\]'"
    ):
        discover(StorageLocation(tmp_path))


def test_an_empty_table_has_its_columns(tmp_path: Path) -> None:
    write_deltalake(tmp_path / "t", SALES.slice(0, 0))
    (table,) = discover(StorageLocation(tmp_path))
    assert read(table).num_rows == 0
    assert statistics.collect(table).rows == 0.0


STEPS = st.lists(
    st.sampled_from(["append", "part", "wide", "delete", "overwrite", "partition", "compact"]),
    min_size=1,
    max_size=5,
)


@given(steps=STEPS, partitioned=st.booleans())
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_was_done_to_a_table_its_rows_are_the_librarys(
    steps: list[str], partitioned: bool, tmp_path: Path
) -> None:
    path = tmp_path / "t"
    shutil.rmtree(path, ignore_errors=True)
    write_deltalake(path, SALES, partition_by=["country", "day"] if partitioned else None)
    for number, step in enumerate(steps):
        match step:
            case "append":
                write_deltalake(path, SALES.slice(number % 3), mode="append", schema_mode="merge")
            case "part":
                write_deltalake(
                    path, SALES.select(["day", "id", "country"]), mode="append", schema_mode="merge"
                )
            case "wide":
                more = SALES.append_column(f"c{number}", pa.array([1.5, None, float("nan"), 2.0]))
                write_deltalake(path, more, mode="append", schema_mode="merge")
            case "delete":
                DeltaTable(path).delete("id = 2 or shop is null")
            case "overwrite":
                write_deltalake(path, SALES.slice(1), mode="overwrite", schema_mode="merge")
            case "partition":
                some = SALES.slice(0, 1)
                write_deltalake(path, some, mode="overwrite", schema_mode="merge", predicate="country = 'de'")
            case "compact":
                DeltaTable(path).optimize.compact()
    (table,) = discover(StorageLocation(path))
    wanted = library(path).select([name for name, _ in table.columns])
    assert same_rows(read(table), wanted) is None
    assert same_rows(sampled(table), wanted) is None
    assert statistics.collect(table).rows == wanted.num_rows
