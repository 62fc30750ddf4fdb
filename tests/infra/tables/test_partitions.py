"""Partition directories as columns: what DuckDB itself makes of the same directories."""

import datetime
from pathlib import Path
from urllib.parse import quote

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ebbflow.infra.errors import TableError
from ebbflow.infra.protocols import Relation
from ebbflow.infra.query.duckdb_statements import register_view
from ebbflow.infra.query.slices import FilePruning
from ebbflow.infra.storage.filesystems import resolve
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import partitions
from ebbflow.infra.tables.parquet import discover, version
from ebbflow.infra.tables.statistics import collect, selectivity

NULL = "__HIVE_DEFAULT_PARTITION__"


def write(place: str, folder: str, rows: int = 2, **columns: list[object]) -> None:
    fs, path = resolve(f"{place}/{folder}/part-0.parquet")
    fs.create_dir(path.rsplit("/", 1)[0], recursive=True)
    with fs.open_output_stream(path) as out:
        pq.write_table(pa.table(columns or {"v": list(range(rows))}), out)


def table(place: object) -> Relation:
    return discover(StorageLocation(str(place)))[0]


WORDS = st.one_of(
    st.sampled_from([NULL, "0", "-0", "007", "+7", "1e3", "2026-1-5", "2026-02-30", "true", "a/b c", "é=%"]),
    st.integers(-(2**64), 2**64).map(str),
    st.dates(datetime.date(1900, 1, 1)).map(str),
    st.text(st.characters(codec="ascii", categories=("L", "N", "P")), min_size=1, max_size=6),
)


@given(words=st.lists(WORDS, min_size=1, max_size=4, unique=True))
@example(words=["9223372036854775807", "-9223372036854775808"])
@example(words=["2026-11-01", NULL])
@example(words=["2026-11-01", "5"])
def test_columns_have_the_types_and_values_that_duckdb_gives_them(
    words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("words")
    for word in words:
        write(f"{folder}/t", f"k={quote(word, safe=' ') if word not in ('.', '..') else 'dot'}", v=[word])
    found = table(folder)
    with duckdb.connect() as plain:
        told = plain.sql(f"SELECT v, k FROM read_parquet('{folder}/t/*/*.parquet', hive_partitioning = true)")
        if str(told.types[1]) not in ("BIGINT", "DATE", "VARCHAR"):
            return
        assert (
            dict(found.columns)["k"]
            == {"BIGINT": "bigint", "DATE": "date", "VARCHAR": "string"}[str(told.types[1])]
        )
        register_view(plain, found)
        rows = sorted(map(repr, told.fetchall()))
        assert sorted(map(repr, plain.sql("SELECT v, k FROM t").fetchall())) == rows
    ours = [
        (pq.read_table(f.path)["v"][0].as_py(), partitions.values(found, f.path)["k"]) for f in found.files
    ]
    assert sorted(map(repr, ours)) == rows


def test_partition_columns_come_last_by_name_and_may_be_nested(place: str) -> None:
    for day, country in (("2026-11-01", "de"), ("2026-11-02", "a%20b"), (NULL, NULL)):
        write(f"{place}/t", f"dt={day}/country={country}")
    fs, path = resolve(f"{place}/t/_temporary/dt=x/part.parquet")
    fs.create_dir(path.rsplit("/", 1)[0], recursive=True)
    with fs.open_output_stream(path) as out:
        out.write(b"unfinished")

    found = table(place)

    assert found.columns == (("v", "bigint"), ("country", "string"), ("dt", "date"))
    assert found.partitions == ("dt", "country")
    with duckdb.connect() as connection:
        register_view(connection, found)
        assert connection.sql("SELECT dt, country, count(*) FROM t GROUP BY ALL ORDER BY ALL").fetchall() == [
            (datetime.date(2026, 11, 1), "de", 2),
            (datetime.date(2026, 11, 2), "a b", 2),
            (None, None, 2),
        ]


def test_one_partitioned_table_may_be_named(tmp_path: Path) -> None:
    write(f"{tmp_path}/sales", "y=2025")
    assert table(f"{tmp_path}/sales").name == "sales"
    assert table(f"{tmp_path}/sales").columns == (("v", "bigint"), ("y", "bigint"))


@pytest.mark.parametrize(
    ("folders", "told"),
    [
        (["a=1", "b=1"], "disagree: b=1 and a=1"),
        (["a=1", "a=1/b=2"], "disagree"),
        (["a=1/b=1", "b=1/a=1"], "disagree"),
        (["a=1/x"], "disagree"),
        (["a=1/A=2"], "name a column twice"),
        (["a="], "gives 'a' no value"),
        (["v=1"], "'v' of table 't' is in its files and in its partition directories"),
        (["a=1", ""], "beside partition directories"),
    ],
)
def test_directories_that_make_no_table_are_refused(tmp_path: Path, folders: list[str], told: str) -> None:
    for folder in folders:
        write(f"{tmp_path}/t", folder)
    with pytest.raises(TableError, match=told):
        discover(StorageLocation(tmp_path))


def test_a_table_below_a_directory_that_would_give_it_values_is_refused(tmp_path: Path) -> None:
    write(f"{tmp_path}/v=1/t", "a=1")
    with pytest.raises(TableError, match="lies in the directory v=1"):
        discover(StorageLocation(f"{tmp_path}/v=1"))
    write(f"{tmp_path}/env=prod/t", "a=1")
    assert table(f"{tmp_path}/env=prod").columns == (("v", "bigint"), ("a", "bigint"))


def test_statistics_know_the_partitions(tmp_path: Path) -> None:
    for day, rows in (("2026-11-01", 10), ("2026-11-03", 30), (NULL, 60)):
        write(f"{tmp_path}/t", f"dt={day}", rows)
    found = table(tmp_path)
    told = collect(found)
    assert told.rows == 100
    day = told.columns["dt"]
    first = float((datetime.date(2026, 11, 1) - datetime.date(1970, 1, 1)).days)
    assert (day.distinct, day.nulls, day.low, day.high) == (2.0, 0.6, first, first + 2)
    assert selectivity(found, ["dt = DATE '2026-11-03'", "dt IS NULL"]) == [0.3, 0.6]


def test_slices_leave_out_files_of_other_partitions(tmp_path: Path) -> None:
    for year in (*range(2000, 2010), NULL):
        write(f"{tmp_path}/t", f"y={year}")
    found = table(tmp_path)

    def years(low: float | None, high: float | None) -> set[object]:
        kept = FilePruning().narrowed(found, "Y", low, high)
        return {partitions.values(kept, f.path)["y"] for f in kept.files}

    assert years(2003, 2005) == {2003, 2004}
    assert years(2008, None) == {2008, 2009}
    assert years(None, 2001) == {2000, None}


def test_the_version_depends_on_the_partitions_types(tmp_path: Path) -> None:
    write(f"{tmp_path}/t", "k=1")
    first = version(table(tmp_path))
    write(f"{tmp_path}/t", "k=x")
    both = table(tmp_path)
    assert dict(both.columns)["k"] == "string"
    (tmp_path / "t/k=x/part-0.parquet").unlink()
    assert version(table(tmp_path)) == first != version(both)
