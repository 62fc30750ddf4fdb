"""Results as rows of tables of Delta Lake and Iceberg and of directories, with DuckDB and with Spark."""

import os
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from ebbflow.infra.errors import TableError
from ebbflow.infra.protocols import SqlEngine
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.query.table_results import Into, write_into
from ebbflow.infra.query.table_rows import _widens
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.targets.folder import FolderTarget
from ebbflow.planners.errors import OptionError
from tests.infra.query.table_results.lake import FORMATS, ROWS, Lake, Make, same


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
