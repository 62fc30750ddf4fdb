"""Deleted rows of tables of Delta Lake are never read, however they are reached."""

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from ebbflow.infra.errors import TableError
from ebbflow.infra.query.comparison import same_rows
from ebbflow.infra.query.duckdb_statements import register_view
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import statistics
from ebbflow.infra.tables.logs import deletions, snapshots
from ebbflow.infra.tables.parquet import discover, sources, table_of, version
from tests.infra.tables.deleting import DELETING, delete_by_vector
from tests.infra.tables.delta import SALES
from tests.infra.tables.reading import read, sampled


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
