"""Tables of Iceberg by path: what is read is what the library that wrote them reads."""

import json
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.expressions import EqualTo, IsNull
from pyiceberg.schema import Schema
from pyiceberg.table import StaticTable, Table
from pyiceberg.types import (
    DoubleType,
    ListType,
    LongType,
    NestedField,
    StringType,
    UUIDType,
)

from ebbflow.infra.errors import TableError
from ebbflow.infra.query.comparison import same_rows
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import filefooters, statistics
from ebbflow.infra.tables.logs import snapshots
from ebbflow.infra.tables.logs.versions import s3_settings
from ebbflow.infra.tables.parquet import discover, sources, table_of
from tests.infra.tables.iceberg import SALES, Make, check, library
from tests.infra.tables.reading import read, sampled


def test_every_snapshot_is_read_as_it_was(make: Make, iceberg_place: StorageLocation) -> None:
    table = make()
    table.append(SALES.slice(0, 2))
    with table.update_schema() as update:
        update.add_column("note", StringType())
        update.move_first("country")
    table.append(SALES.slice(3).append_column("note", pa.array(["x"])))
    table.delete("id = 1")
    table.overwrite(SALES.slice(2, 1).append_column("note", pa.array(["y"])))
    check(table, iceberg_place)
    for one in table.metadata.snapshots:
        found = table_of(iceberg_place, sources(iceberg_place)[0], at=str(one.snapshot_id))
        wanted = library(table, one.snapshot_id)
        assert same_rows(read(found).select(wanted.column_names), wanted) is None


def test_partitions_are_told_by_the_manifests_and_read_from_the_files(
    make: Make, iceberg_place: StorageLocation
) -> None:
    table = make()
    with table.update_spec() as update:
        update.add_identity("day")
        update.add_identity("country")
        update.add_identity("at")
    table.append(SALES)
    (relation,) = discover(iceberg_place)
    assert snapshots.keys(relation) == {}, "the first file is of no partition"
    check(table, iceberg_place)
    table.overwrite(SALES)
    (relation,) = discover(iceberg_place)
    known = snapshots.keys(relation)
    assert sorted(known, key=str) == ["at", "country", "day"]
    assert set(zip(known["day"], known["country"], strict=True)) == {
        (date(2026, 11, 1), "de"), (date(2026, 11, 2), "f r/%"), (None, ""), (date(2026, 11, 1), None),
    }  # fmt: skip
    assert set(known["at"]) == {datetime(2026, 11, 1, 12, 30, 15, 125, tzinfo=UTC)}
    check(table, iceberg_place)


def test_the_manifests_tell_rows_and_bounds_and_no_footer_is_opened(
    make: Make, iceberg_place: StorageLocation, monkeypatch: pytest.MonkeyPatch
) -> None:
    make().append(SALES.slice(0, 1))
    monkeypatch.setattr(filefooters, "_opened", lambda scheme, file: pytest.fail(f"{file.path} was opened"))
    (relation,) = discover(iceberg_place)
    told = snapshots.read_footers(relation, ["id", "country", "day", "amount", "at", "place"])
    whole = next(file for file in told if file.rows == (4,))
    assert whole.bounds == {
        "id": ((0, 1, 4),),
        "country": ((1, "", "f r/%"),),
        "day": ((1, date(2026, 11, 1), date(2026, 11, 2)),),
        "amount": ((1, Decimal("-3.00"), Decimal("2.25")),),
        "at": ((0, SALES["at"][0].as_py(), SALES["at"][0].as_py()),),
        "place": ((None, None, None),),
    }


def test_tables_in_object_storage_are_read(s3: Callable[[], str], tmp_path: Path) -> None:
    iceberg_place, said = f"{s3()}/warehouse", s3_settings()
    catalog = SqlCatalog(
        "tests",
        uri=f"sqlite:///{tmp_path}/catalog.db",
        warehouse=iceberg_place,
        **{
            "s3.endpoint": said["AWS_ENDPOINT_URL"],
            "s3.region": said["AWS_REGION"],
            "s3.access-key-id": said["AWS_ACCESS_KEY_ID"],
            "s3.secret-access-key": said["AWS_SECRET_ACCESS_KEY"],
        },
    )
    catalog.create_namespace("n")
    flat = SALES.drop_columns(["place"])
    table = catalog.create_table("n.t", flat.schema)
    table.append(flat)
    with table.update_schema() as update:
        update.rename_column("id", "number")
        update.add_column("later", LongType())
    (relation,) = discover(StorageLocation(f"{iceberg_place}/n"))
    wanted = table.scan().to_arrow()
    assert same_rows(read(relation), wanted) is None
    assert statistics.collect(relation).rows == 4.0
    place = StorageLocation(f"{iceberg_place}/n/t")
    deleting = _delete_by_position(table, place, [2, 1])
    (relation,) = discover(StorageLocation(f"{iceberg_place}/n"))
    assert same_rows(read(relation), wanted.take([0, 3])) is None
    assert statistics.collect(relation).rows == 2
    place.remove(deleting)
    table.append(wanted.slice(0, 1))
    with pytest.raises(TableError, match="several names in its files in object storage"):
        discover(StorageLocation(f"{iceberg_place}/n"))
    catalog.close()


# --- columns --------------------------------------------------------------------------------------------


def test_a_renamed_column_is_found_in_old_and_new_files(make: Make, iceberg_place: StorageLocation) -> None:
    table = make()
    with table.update_schema() as update:
        update.rename_column("id", "number")
    assert discover(iceberg_place)[0].log.stored == (("number", "id"),)  # type: ignore[union-attr]
    check(table, iceberg_place)
    table.append(SALES.rename_columns(["number", *SALES.column_names[1:]]))
    assert dict(discover(iceberg_place)[0].log.ids)["number"] == 1  # type: ignore[union-attr]
    assert check(table, iceberg_place).column("number").null_count == 0


def test_columns_that_exchange_their_names_are_not_mixed_up(
    make: Make, iceberg_place: StorageLocation
) -> None:
    data = pa.table({"a": [1, 2], "b": [3, 4]})
    table = make(data)
    for before, after in (("a", "c"), ("b", "a"), ("c", "b")):
        with table.update_schema() as update:
            update.rename_column(before, after)
    assert check(table, iceberg_place).to_pydict() == {"b": [1, 2], "a": [3, 4]}
    table.append(pa.table({"b": [5], "a": [6]}))
    assert sorted(check(table, iceberg_place).column("a").to_pylist()) == [3, 4, 6]


def test_a_column_that_was_dropped_does_not_come_back_under_its_name(
    make: Make, iceberg_place: StorageLocation
) -> None:
    table = make()
    with table.update_schema(allow_incompatible_changes=True) as update:
        update.delete_column("country")
    with table.update_schema() as update:
        update.add_column("country", StringType())
    assert check(table, iceberg_place).column("country").null_count == 4
    table.append(SALES.select([*[n for n in SALES.column_names if n != "country"], "country"]))
    assert check(table, iceberg_place).column("country").null_count == 5


def test_names_that_files_cannot_have_are_found(make: Make, iceberg_place: StorageLocation) -> None:
    data = pa.table({"a b": [1, 2], "1st": ["x", None], "ü": [1.5, 2.5]})
    table = make(data)
    table.append(data)
    assert check(table, iceberg_place).column("a b").null_count == 0


def test_types_that_have_grown_are_read(make: Make, iceberg_place: StorageLocation) -> None:
    data = pa.table({"i": pa.array([1, None], pa.int32()), "f": pa.array([0.5, 1.5], pa.float32())})
    table = make(data)
    with table.update_schema() as update:
        update.update_column("i", LongType())
        update.update_column("f", DoubleType())
    check(table, iceberg_place)
    table.append(pa.table({"i": [1 << 40], "f": [1e300]}))
    check(table, iceberg_place)
    (relation,) = discover(iceberg_place)
    known = statistics.collect(relation).columns["i"]
    assert (known.low, known.high) == (1.0, float(1 << 40))


def test_fields_inside_columns_may_be_added_and_not_renamed(
    make: Make, iceberg_place: StorageLocation
) -> None:
    table = make()
    with table.update_schema() as update:
        update.add_column(("place", "street"), StringType())
    found = check(table, iceberg_place)
    assert found.column("place").to_pylist()[0] == {"city": "Ulm", "zip": 89073, "street": None}
    with table.update_schema() as update:
        update.rename_column(("place", "city"), "town")
    with pytest.raises(TableError, match=r"'t' has a column 'place' that has other fields in .*rewrite"):
        discover(iceberg_place)


def test_files_without_ids_are_read_by_the_mapping_of_names(
    make: Make, iceberg_place: StorageLocation, tmp_path: Path
) -> None:
    flat = SALES.drop_columns(["place"])
    table = make(flat)
    table.add_files([str(_plain_file(iceberg_place, flat.slice(0, 2)))])
    check(table, iceberg_place)
    with table.update_schema() as update:
        update.rename_column("id", "number")
    check(table, iceberg_place)
    table.append(flat.rename_columns(["number", *flat.column_names[1:]]))
    with pytest.raises(
        TableError, match=r"'t' has columns of several names in its files and no ids in .*plain"
    ):
        discover(iceberg_place)


def _plain_file(iceberg_place: StorageLocation, rows: pa.Table) -> Path:
    path = Path(iceberg_place.path("data/plain.parquet"))
    pq.write_table(rows, path)
    return path


@pytest.mark.parametrize(
    ("kind", "told"),
    [(UUIDType(), "is a uuid"), (ListType(9, UUIDType(), element_required=False), "is a uuid")],
)
def test_types_that_spark_lacks_are_refused(kind: Any, told: str, tmp_path: Path) -> None:
    catalog = SqlCatalog(
        "tests", uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=f"file://{tmp_path}/warehouse"
    )
    catalog.create_namespace("n")
    catalog.create_table("n.t", Schema(NestedField(1, "k", kind, required=False)))
    catalog.close()
    with pytest.raises(TableError, match=told):
        discover(StorageLocation(tmp_path / "warehouse/n/t"))


# --- what changes rows beyond the list of files ----------------------------------------------------------


def test_rows_that_delete_files_delete_are_never_read(make: Make, iceberg_place: StorageLocation) -> None:
    table = make()
    _delete_by_position(table, iceberg_place, [2, 1, 1])
    (found,) = discover(iceberg_place)
    wanted = SALES.take([0, 3])
    assert same_rows(read(found), wanted) is None
    flat = [name for name, kind in found.columns if not kind.startswith("struct")]
    assert same_rows(sampled(found).select(flat), wanted.select(flat)) is None
    assert statistics.collect(found).rows == 2
    (newest,) = Path(iceberg_place.path("metadata")).glob("00009-*.json")
    oracle = StaticTable.from_metadata(f"file://{newest}").scan().to_arrow()
    assert same_rows(read(found), oracle.select(SALES.column_names)) is None
    first = table.metadata.snapshots[0].snapshot_id
    assert same_rows(read(table_of(iceberg_place, sources(iceberg_place)[0], at=str(first))), SALES) is None


def test_columns_that_are_found_by_ids_may_have_deleted_rows(
    make: Make, iceberg_place: StorageLocation
) -> None:
    table = make(SALES.select(["id", "day"]))
    with table.update_schema() as update:
        update.rename_column("id", "was")
        update.rename_column("day", "id")
    table.append(pa.table({"was": pa.array([9], pa.int32()), "id": [date(2026, 12, 1)]}))
    _delete_by_position(table, iceberg_place, [0], file=0)
    (found,) = discover(iceberg_place)
    assert found.log is not None
    assert found.log.ids, "no name is the same in all files"
    oracle = StaticTable.from_metadata(
        f"file://{next(Path(iceberg_place.path('metadata')).glob('00009-*.json'))}"
    )
    assert same_rows(read(found), oracle.scan().to_arrow()) is None
    assert read(found).num_rows == 4


def test_rows_that_are_deleted_by_values_are_refused(make: Make, iceberg_place: StorageLocation) -> None:
    table = make()
    _delete_by_position(table, iceberg_place, [1], kind="EQUALITY_DELETES")
    with pytest.raises(TableError, match=r"'t' has rows deleted by their values \(equality deletes\)"):
        discover(iceberg_place)


def test_a_deleted_row_that_its_file_has_not_is_refused(make: Make, iceberg_place: StorageLocation) -> None:
    _delete_by_position(make(), iceberg_place, [1, 4])
    with pytest.raises(TableError, match=r"row 4 of .* is deleted, which has 4"):
        discover(iceberg_place)


def _delete_by_position(
    table: Table,
    iceberg_place: StorageLocation,
    rows: list[int],
    *,
    file: int = 0,
    kind: str = "POSITION_DELETES",
) -> str:
    """Commit a snapshot that deletes rows of the first file by their positions, as an engine that merges on read;
    return its metadata file."""
    from pyiceberg.manifest import (
        DataFile,
        DataFileContent,
        FileFormat,
        ManifestContent,
        ManifestEntry,
        ManifestEntryStatus,
        ManifestWriterV2,
        write_manifest_list,
    )
    from pyiceberg.typedef import Record

    class DeleteWriter(ManifestWriterV2):
        def content(self) -> ManifestContent:
            return ManifestContent.DELETES

    task = sorted(table.scan().plan_files(), key=lambda task: -task.file.record_count)[file]
    path, io = iceberg_place.path("data/deletes.parquet"), table.io
    pq.write_table(
        pa.table(
            {"file_path": [task.file.file_path] * len(rows), "pos": rows},
            pa.schema(
                [
                    pa.field("file_path", pa.string(), False, {b"PARQUET:field_id": b"2147483546"}),
                    pa.field("pos", pa.int64(), False, {b"PARQUET:field_id": b"2147483545"}),
                ]
            ),
        ),
        path,
        filesystem=iceberg_place.fs(),
    )
    snapshot, number = table.metadata.snapshots[-1], 4711
    deletes = DataFile.from_args(
        content=DataFileContent[kind], file_path=iceberg_place.uri_of("data/deletes.parquet"), partition=Record(),
        file_format=FileFormat.PARQUET, record_count=len(rows),
        file_size_in_bytes=iceberg_place.fs().get_file_info(path).size,
    )  # fmt: skip
    deletes._spec_id = 0
    output = io.new_output(iceberg_place.uri_of("metadata/deletes-m0.avro"))
    with DeleteWriter(table.spec(), table.schema(), output, number, "deflate") as writer:
        writer.add_entry(
            ManifestEntry.from_args(
                status=ManifestEntryStatus.ADDED,
                snapshot_id=number,
                sequence_number=None,
                file_sequence_number=None,
                data_file=deletes,
            )
        )
    manifest = writer.to_manifest_file()
    listed = iceberg_place.uri_of("metadata/snap-deletes.avro")
    with write_manifest_list(
        2, io.new_output(listed), number, snapshot.snapshot_id, snapshot.sequence_number + 1, "deflate"
    ) as manifests:
        manifests.add_manifests([*snapshot.manifests(io), manifest])
    with io.new_input(table.metadata_location).open() as file_there:
        known = json.loads(file_there.read())
    known["snapshots"].append(
        {**known["snapshots"][-1], "snapshot-id": number, "manifest-list": listed,
         "sequence-number": snapshot.sequence_number + 1,
         "parent-snapshot-id": snapshot.snapshot_id, "summary": {"operation": "delete"}}
    )  # fmt: skip
    known |= {"current-snapshot-id": number, "last-sequence-number": snapshot.sequence_number + 1}
    known["refs"]["main"]["snapshot-id"] = number
    name = f"metadata/00009-{uuid.uuid4()}.metadata.json"
    iceberg_place.write(name, json.dumps(known).encode())
    return name


STEPS = st.lists(
    st.sampled_from(["append", "rename", "drop", "add", "delete", "overwrite", "partition"]),
    min_size=1,
    max_size=5,
)


@given(steps=STEPS)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_was_done_to_a_table_its_rows_are_the_librarys(
    steps: list[str], make: Make, iceberg_place: StorageLocation
) -> None:
    table = make()
    for number, step in enumerate(steps):
        names = [field.name for field in table.schema().fields if field.field_id <= 5]
        match step:
            case "append":
                now = {field.field_id: field.name for field in table.schema().fields}
                kept = [n for n in range(1, 7) if n in now]
                data = SALES.select([n - 1 for n in kept]).rename_columns([now[n] for n in kept])
                table.append(data)
            case "rename" if names:
                with table.update_schema() as update:
                    update.rename_column(names[0], f"{names[0]}{number}")
            case "drop" if len(names) > 2:
                with table.update_schema(allow_incompatible_changes=True) as update:
                    update.delete_column(names[-1])
            case "add":
                dropped = [n for n in SALES.column_names[:5] if n not in table.schema().column_names]
                with table.update_schema() as update:
                    update.add_column(dropped[0] if dropped else f"c{number}", LongType())
            case "delete":
                table.delete(EqualTo(names[0], 2) if names[0].startswith("id") else IsNull(names[0]))
            case "overwrite" if table.schema().as_arrow().names == SALES.column_names:
                table.overwrite(SALES.slice(1))
            case "partition" if number == 0:
                with table.update_spec() as update:
                    update.add_identity(names[-1])
    check(table, iceberg_place)
