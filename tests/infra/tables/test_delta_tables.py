"""Tables of Delta Lake: what is read is what the library that wrote them reads."""

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ebbflow.infra.errors import EngineUnavailableError, TableError
from ebbflow.infra.query.comparison import same_rows
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.query.duckdb_statements import register_view
from ebbflow.infra.query.results import result_at
from ebbflow.infra.query.table_results import Into, write_into
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import filefooters, statistics
from ebbflow.infra.tables.logs import deletions, snapshots
from ebbflow.infra.tables.logs.versions import s3_settings
from ebbflow.infra.tables.parquet import discover, sources, table_of, version
from tests.infra.tables.deleting import DELETING, delete_by_vector, edited
from tests.infra.tables.reading import read, sampled

SALES = pa.table(
    {
        "id": [1, 2, 3, 4],
        "country": ["de", "f r/%", "de", None],
        "day": [date(2026, 11, 1), date(2026, 11, 2), None, date(2026, 11, 1)],
        "shop": pa.array([1, 2, 1, None], pa.int32()),
        "open": [True, False, True, None],
        "amount": pa.array([Decimal("1.50"), Decimal("2.25"), None, Decimal("-3.00")], pa.decimal128(10, 2)),
        "at": pa.array(
            [datetime(2026, 11, 1, 12, 30, 15, 125000, tzinfo=UTC)] * 4, pa.timestamp("us", "UTC")
        ),
        "tags": [["a"], [], None, ["b", "c"]],
    }
)
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


def live(path: Path, version: int | None = None) -> pa.Table:
    """Return the rows that the library's own engine reads; its Arrow data set knows no deletion vectors."""
    from deltalake import QueryBuilder

    table = DeltaTable(path, version=version)
    return pa.table(QueryBuilder().register("t", table).execute("SELECT * FROM t").read_all())


def test_rows_that_deletion_vectors_delete_are_never_read(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_deltalake(path, SALES, configuration=DELETING)
    (before,) = discover(StorageLocation(path))
    assert same_rows(read(before), SALES) is None, "without one it is read"
    write_deltalake(path, SALES, mode="append")
    delete_by_vector(path, 1, [1, 2])
    (found,) = discover(StorageLocation(path))
    wanted = SALES.take([0, 1, 2, 3, 0, 3])
    assert same_rows(live(path), wanted) is None, "the library agrees"
    assert same_rows(read(found), wanted) is None
    flat = [name for name, kind in found.columns if not kind.startswith("array")]
    assert same_rows(sampled(found).select(flat), wanted.select(flat)) is None
    assert statistics.collect(found).rows == 6
    assert (
        same_rows(read(table_of(StorageLocation(path), sources(StorageLocation(path))[0], at="0")), SALES)
        is None
    )
    other = tmp_path / "other/t"
    shutil.copytree(path, other)
    delete_by_vector(other, 1, [1, 3])
    delete_by_vector(path, 1, [1, 3])
    snapshots._known.clear()
    (changed,) = discover(StorageLocation(path))
    assert version(changed) != version(found), "stages of other rows are not reused"
    assert same_rows(read(changed), live(other)) is None
    (touched,) = [file for file, _ in changed.log.deleted] if changed.log else []
    rest = replace(changed, files=tuple(file for file in changed.files if file.path != touched))
    assert version(rest) == version(replace(found, files=rest.files)), (
        "files without deleted rows are the same"
    )


def test_deleted_rows_stay_deleted_where_a_table_is_reached_by_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, link = tmp_path / "a b/t", tmp_path / "link"
    write_deltalake(path, SALES, partition_by=["country"], configuration=DELETING)
    delete_by_vector(path, 0, [0], "country=de")
    link.symlink_to(path.parent)
    for place in (path, link / "t"):
        (found,) = discover(StorageLocation(place))
        assert sorted(read(found).column("id").to_pylist()) == [2, 3, 4]
        assert statistics.collect(found).rows == 3
    snapshots._known.clear()
    monkeypatch.setattr("ebbflow.infra.tables.logs.delta._named", lambda *_: "/elsewhere")
    with pytest.raises(TableError, match="rows of /elsewhere are deleted, which is no file of it"):
        discover(StorageLocation(path))


def test_deleted_rows_are_left_out_in_object_storage(s3: Callable[[], str], tmp_path: Path) -> None:
    path, place = tmp_path / "t", StorageLocation(f"{s3()}/a b/t")
    write_deltalake(path, SALES, partition_by=["country"], configuration=DELETING)
    delete_by_vector(path, 0, [0], "country=de")
    delete_by_vector(path, 0, [0], "country=f")
    write_deltalake(path, SALES.slice(0, 1), mode="append")
    for file in (file for file in path.rglob("*") if file.is_file()):
        with place.fs().open_output_stream(place.path(str(file.relative_to(path)))) as out:
            out.write(file.read_bytes())
    (found,) = discover(StorageLocation(place.uri.rpartition("/")[0]))
    wanted = SALES.take([2, 3, 0])
    assert same_rows(read(found).select(SALES.column_names), wanted) is None
    assert same_rows(sampled(found).select(["id", "day"]), wanted.select(["id", "day"])) is None
    assert statistics.collect(found).rows == 3
    with duckdb.connect() as connection:
        register_view(connection, found)
        day = SALES["day"][0].as_py()
        asked = (
            f"SELECT country, count(*) FROM t WHERE day = DATE '{day}' OR id > 3 GROUP BY ALL ORDER BY ALL"
        )
        kept = [row for row in wanted.to_pylist() if row["day"] == day or row["id"] > 3]
        counts = Counter(row["country"] for row in kept)
        assert dict(connection.execute(asked).fetchall()) == counts
        assert connection.execute("SELECT count(*) FROM t").fetchall() == [(3,)]


def test_deleted_rows_far_apart_are_few_words() -> None:
    gone = [0, 63, 64, 130, 5_000_000, 2**40 + 63]
    ((_, content),) = deletions.packed("t", "Delta Lake", "file", ["x"], {"/t/a": gone})
    numbers, bits = deletions.words(content)
    told = {
        int(number) * 64 + bit
        for number, word in zip(numbers, bits, strict=True)
        for bit in range(64)
        if int(word) >> bit & 1
    }
    assert told == set(gone)
    assert len(numbers) == 5


def test_a_file_of_which_few_rows_are_left_is_sampled_in_large_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    write_deltalake(path, pa.table({"x": range(2000)}), configuration=DELETING)
    delete_by_vector(path, 0, [*range(1500), *range(1501, 2000)])
    (found,) = discover(StorageLocation(path))
    unpacked, numbers = [0], deletions.numbers

    def counted(content: bytes) -> Any:
        unpacked[0] += 1
        return numbers(content)

    monkeypatch.setattr(deletions, "numbers", counted)
    assert sampled(found).column("x").to_pylist() == [1500]
    assert unpacked[0] <= 2, "not once for each row"


def test_partitions_renamed_columns_and_files_without_a_live_row_may_have_deleted_rows(
    tmp_path: Path,
) -> None:
    path = tmp_path / "t"
    write_deltalake(path, SALES, partition_by=["country"], configuration=DELETING)
    delete_by_vector(path, 0, [0], "country=de")
    delete_by_vector(path, 0, [0], "country=f")
    (found,) = discover(StorageLocation(path))
    assert same_rows(read(found).select(SALES.column_names), SALES.take([2, 3])) is None
    assert statistics.collect(found).rows == 2
    nulls = tmp_path / "nulls"
    write_deltalake(
        nulls,
        pa.table(
            {"x": [None, None, 5, 6], "y": [None] * 4}, pa.schema([("x", pa.int64()), ("y", pa.int64())])
        ),
        configuration=DELETING,
    )
    delete_by_vector(nulls, 0, [0, 1])
    (footer,) = snapshots.read_footers(discover(StorageLocation(nulls))[0], ["x", "y"])
    assert footer.rows == (2,)
    assert footer.bounds["x"][0].nulls is None, "both may be among the deleted: not all values are NULL"
    assert footer.bounds["y"][0].nulls == 2


def test_deleted_rows_that_cannot_be_left_out_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t"
    write_deltalake(
        path, SALES.rename_columns(["file_row_number", *SALES.column_names[1:]]), configuration=DELETING
    )
    delete_by_vector(path, 0, [1])
    with pytest.raises(TableError, match=r"'t' has deleted rows and a column 'file_row_number'"):
        discover(StorageLocation(path))
    many = tmp_path / "many"
    write_deltalake(many, SALES, configuration=DELETING)
    delete_by_vector(many, 0, [1, 2])
    monkeypatch.setattr(deletions, "MOST", 1)
    with pytest.raises(TableError, match=r"'many' has more than 1 deleted rows"):
        discover(StorageLocation(many))


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
