"""Parquet folders as tables."""

import datetime
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.errors import TableError
from ebbflow.infra.storage.filesystems import resolve
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import filefooters, parquet
from ebbflow.infra.tables.datatypes import arrow_type, spark_type
from ebbflow.infra.tables.parquet import discover, keep_columns, sources, table_of, version

SMALL = pa.table({"a": pa.array([1, 2], pa.int64()), "b": ["x", "y"]})


def write(uri: str, table: pa.Table = SMALL, **options: Any) -> None:
    fs, path = resolve(uri)
    fs.create_dir(path.rsplit("/", 1)[0], recursive=True)
    with fs.open_output_stream(path) as out:
        pq.write_table(table, out, **options)


def test_files_and_folders_are_tables_sorted_by_name(place: str) -> None:
    write(f"{place}/orders.parquet")
    write(f"{place}/Lineitem/part-1.parquet")
    write(f"{place}/Lineitem/part-0.parquet")
    write(f"{place}/nation.parquet/part-0.snappy.parquet")
    write(f"{place}/_temporary/x.parquet")
    write(f"{place}/notes.txt")

    tables = discover(StorageLocation(place))

    assert [t.name for t in tables] == ["Lineitem", "nation", "orders"]
    assert [f.path.rsplit("/", 1)[1] for f in tables[0].files] == ["part-0.parquet", "part-1.parquet"]
    assert tables[0].columns == (("a", "bigint"), ("b", "string"))
    assert tables[0].bytes == sum(f.size for f in tables[0].files) > 0
    assert all(f.modified > 0 for t in tables for f in t.files)
    fs = resolve(place)[0]
    assert pq.read_table(tables[2].files[0].path, filesystem=fs).equals(SMALL)


def test_one_file_may_be_named_and_odd_names_are_kept(tmp_path: Path) -> None:
    write(f"{tmp_path}/2024 sales (new).parquet")
    assert [t.name for t in discover(StorageLocation(f"{tmp_path}/2024 sales (new).parquet"))] == [
        "2024 sales (new)"
    ]
    assert [t.name for t in discover(StorageLocation(tmp_path))] == ["2024 sales (new)"]


def test_a_table_without_rows_is_a_table(tmp_path: Path) -> None:
    write(f"{tmp_path}/t.parquet", SMALL.slice(0, 0))
    assert discover(StorageLocation(tmp_path))[0].columns == (("a", "bigint"), ("b", "string"))


TYPES = [
    (pa.int32(), "int"),
    (pa.int64(), "bigint"),
    (pa.int16(), "smallint"),
    (pa.int8(), "tinyint"),
    (pa.uint32(), "bigint"),
    (pa.float32(), "float"),
    (pa.float64(), "double"),
    (pa.bool_(), "boolean"),
    (pa.string(), "string"),
    (pa.large_string(), "string"),
    (pa.string_view(), "string"),
    (pa.dictionary(pa.int32(), pa.string()), "string"),
    (pa.binary(), "binary"),
    (pa.date32(), "date"),
    (pa.decimal128(15, 2), "decimal(15,2)"),
    (pa.timestamp("us"), "timestamp_ntz"),
    (pa.timestamp("ms", "Europe/Berlin"), "timestamp"),
    (pa.list_(pa.int32()), "array<int>"),
    (pa.map_(pa.string(), pa.int64()), "map<string,bigint>"),
    (pa.struct([("x", pa.int32()), ("y z", pa.list_(pa.string()))]), "struct<x:int,`y z`:array<string>>"),
]


@pytest.mark.parametrize(("arrow", "spark"), TYPES, ids=[spark for _, spark in TYPES])
def test_types_get_their_spark_names_from_the_footer(tmp_path: Path, arrow: Any, spark: str) -> None:
    write(f"{tmp_path}/t.parquet", pa.table({"c": pa.nulls(2, arrow)}))
    assert discover(StorageLocation(tmp_path))[0].columns == (("c", spark),)
    assert spark_type(arrow_type(spark)) == spark


@pytest.mark.parametrize("name", ["", "money", "array<int", "struct<a int>", "int)", "struct<:int>"])
def test_a_name_that_is_no_spark_type_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"Spark|expected|field"):
        arrow_type(name)


def test_int96_is_a_timestamp_but_nanoseconds_and_times_are_refused(tmp_path: Path) -> None:
    moment = pa.array([datetime.datetime(2024, 1, 1)], pa.timestamp("us"))
    write(f"{tmp_path}/a/t.parquet", pa.table({"c": moment}), use_deprecated_int96_timestamps=True)
    assert discover(StorageLocation(f"{tmp_path}/a"))[0].columns == (("c", "timestamp"),)
    for i, bad in enumerate([moment.cast(pa.timestamp("ns")), pa.array([1], pa.time64("us"))]):
        write(f"{tmp_path}/b{i}/t.parquet", pa.table({"c": bad}))
        with pytest.raises(TableError, match=r"column 'c' of table 't'.*Spark SQL lacks"):
            discover(StorageLocation(f"{tmp_path}/b{i}"))


def test_files_that_disagree_are_named_with_the_column(tmp_path: Path) -> None:
    write(f"{tmp_path}/t/1.parquet")
    other = f"{tmp_path}/t/2.parquet"
    cases = [
        (SMALL.set_column(0, "a", pa.array([1, 2], pa.int32())), "2.parquet has 'a' as int"),
        (SMALL.append_column("c", pa.array([1, 2])), "column 'c'"),
        (SMALL.drop_columns(["b"]), "no column 'b'"),
        (SMALL.select(["b", "a"]), "another order"),
    ]
    for table, told in cases:
        write(other, table)
        with pytest.raises(TableError, match=told):
            discover(StorageLocation(tmp_path))
    # how strings are held in memory is no disagreement
    write(other, SMALL.set_column(1, "b", SMALL["b"].cast(pa.string_view())))
    assert len(discover(StorageLocation(tmp_path))[0].files) == 2


def test_broken_places_are_named_with_the_rule(place: str, tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"does not exist|no Parquet"):
        discover(StorageLocation(f"{place}/missing"))
    write(f"{place}/a/notes.txt")
    with pytest.raises(TableError, match="holds no Parquet files"):
        discover(StorageLocation(f"{place}/a"))
    for name, content, told in [("empty", b"", "is empty"), ("corrupt", b"PAR1" * 9, "cannot read")]:
        fs, path = resolve(f"{place}/{name}/t.parquet")
        fs.create_dir(path.rsplit("/", 1)[0], recursive=True)
        with fs.open_output_stream(path) as out:
            out.write(content)
        with pytest.raises(TableError, match=f"{told}|t.parquet"):
            discover(StorageLocation(f"{place}/{name}"))


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write(f"{tmp_path}/t.parquet")
    whole = (tmp_path / "t.parquet").read_bytes()
    (tmp_path / "t.parquet").write_bytes(whole[:-10])
    with pytest.raises(TableError, match=r"t\.parquet"):
        discover(StorageLocation(tmp_path))


def test_folders_whose_files_alone_are_not_the_table_are_refused(tmp_path: Path) -> None:
    write(f"{tmp_path}/a/t/year=2024/x.parquet")
    (tmp_path / "a/t/.hoodie").mkdir()
    with pytest.raises(TableError, match="Hudi"):
        discover(StorageLocation(f"{tmp_path}/a"))
    write(f"{tmp_path}/b/t/x.parquet")
    (tmp_path / "b/t/_delta_log").mkdir()
    with pytest.raises(TableError, match="log of the Delta Lake table 't'"):
        discover(StorageLocation(f"{tmp_path}/b"))
    write(f"{tmp_path}/c/t/deep/x.parquet")
    with pytest.raises(TableError, match="nested directory 'deep'"):
        discover(StorageLocation(f"{tmp_path}/c"))


def test_names_must_differ_in_more_than_case(tmp_path: Path) -> None:
    write(f"{tmp_path}/a/T.parquet")
    write(f"{tmp_path}/a/t/x.parquet")
    with pytest.raises(TableError, match="'T' and 't'"):
        discover(StorageLocation(f"{tmp_path}/a"))
    write(f"{tmp_path}/b/t.parquet", pa.table({"x": [1], "X": [2]}))
    with pytest.raises(TableError, match="two columns 'X'"):
        discover(StorageLocation(f"{tmp_path}/b"))


def test_the_version_changes_with_the_content_and_only_then(tmp_path: Path) -> None:
    write(f"{tmp_path}/t/1.parquet")
    first = version(discover(StorageLocation(tmp_path))[0])
    assert version(discover(StorageLocation(tmp_path))[0]) == first

    write(f"{tmp_path}/t/2.parquet")
    second = version(discover(StorageLocation(tmp_path))[0])
    os.utime(tmp_path / "t/2.parquet", (1, 1))
    third = version(discover(StorageLocation(tmp_path))[0])
    write(f"{tmp_path}/t/2.parquet", pa.table({"a": [Decimal(1)], "b": ["z"]}).cast(SMALL.schema))
    os.utime(tmp_path / "t/2.parquet", (1, 1))
    fourth = version(discover(StorageLocation(tmp_path))[0])
    assert len({first, second, third, fourth}) == 4


def test_columns_that_are_known_need_no_file_to_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(f"{tmp_path}/t/1.parquet")
    write(f"{tmp_path}/t/2.parquet")
    place, cache = StorageLocation(tmp_path), JsonStore(StorageLocation(tmp_path / "cache"))
    opened: list[str] = []
    real = filefooters._opened
    monkeypatch.setattr(filefooters, "_opened", lambda s, f: opened.append(f.path) or real(s, f))
    first = table_of(place, sources(place)[0], ["a"], cache)
    assert len(opened) == 2
    assert [told.bounds["a"][0][1:] for told in filefooters.read_footers(first, ["a"])] == [(1, 2), (1, 2)]
    assert len(opened) == 2
    keep_columns(first, cache)
    monkeypatch.setattr(parquet, "_seen", {})  # another process
    assert table_of(place, sources(place)[0], ["a"], cache) == first
    assert len(opened) == 2
    write(f"{tmp_path}/t/3.parquet", SMALL.append_column("c", pa.array([1, 2])))
    with pytest.raises(TableError, match="column 'c'"):
        table_of(place, sources(place)[0], ["a"], cache)
