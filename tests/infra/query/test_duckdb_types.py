"""DuckDB's types against Spark's."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.protocols import Relation, StageJob
from ebbflow.infra.query.duckdb_statements import copied, dataset, own_types, register_view, storable, written
from ebbflow.infra.query.duckdbtypes import to_duckdb, to_spark
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.filefooters import json_columns
from ebbflow.infra.tables.parquet import version

SIMPLE = st.sampled_from(
    ["boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "string", "binary", "date",
     "timestamp", "timestamp_ntz", "decimal(15,2)", "decimal(38,0)"]
)  # fmt: skip
NESTED = st.recursive(
    SIMPLE,
    lambda inner: st.one_of(
        inner.map("array<{}>".format),
        st.tuples(SIMPLE, inner).map(lambda kv: f"map<{kv[0]},{kv[1]}>"),
        st.lists(inner, min_size=1, max_size=3).map(
            lambda kinds: "struct<" + ",".join(f"f{i}:{kind}" for i, kind in enumerate(kinds)) + ">"
        ),
    ),
    max_leaves=5,
)


@given(NESTED)
def test_a_spark_type_comes_back_from_duckdb_unchanged_and_without_a_cast(kind: str) -> None:
    with duckdb.connect() as connection:
        dtype = connection.sql(f"SELECT CAST(NULL AS {to_duckdb(kind)}) AS c").types[0]
    assert to_spark(dtype) == (kind, None)


@pytest.mark.parametrize(
    ("value", "spark"),
    [
        ("1::UTINYINT", "smallint"),
        ("1::USMALLINT", "int"),
        ("1::UINTEGER", "bigint"),
        ("1::UBIGINT", "decimal(20,0)"),
        ("1::HUGEINT", "bigint"),
        ("[1::HUGEINT]", "array<bigint>"),
        ("{'a': 1::UTINYINT, 'b': 'x'}", "struct<a:smallint,b:string>"),
        ("MAP {'a': 1::HUGEINT}", "map<string,bigint>"),
        ("TIMESTAMP_S '2020-01-01 00:00:00'", "timestamp_ntz"),
        ("now()", "timestamp"),
        ("'x'::ENUM('x', 'y')", "string"),
        ("INTERVAL 1 DAY", "string"),
        ("TIME '10:00:00'", "string"),
        ("uuid()", "string"),
        ("[1, 2]::INTEGER[2]", "array<int>"),
        ("'{}'::JSON", "string"),
        ("{'a': ['{}'::JSON]}", "struct<a:array<string>>"),
    ],
)
def test_what_spark_has_no_type_for_is_cast_to_one_it_has(value: str, spark: str) -> None:
    with duckdb.connect() as connection:
        found, cast = to_spark(connection.sql(f"SELECT {value} AS c").types[0])
        assert found == spark
        stored = f"CAST({value} AS {cast})" if cast else value
        assert to_spark(connection.sql(f"SELECT {stored} AS c").types[0]) == (spark, None)


@pytest.mark.parametrize("kind", ["nonsense", "decimal(", "array<int"])
def test_an_unknown_type_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="Spark"):
        to_duckdb(kind)


def test_timestamps_of_96_bits_keep_their_year_where_arrow_reads_them(tmp_path: Path) -> None:
    last = datetime(9999, 12, 31, 23, 59, 59)
    path = tmp_path / "t.parquet"
    table = pa.table({"at": pa.array([last], pa.timestamp("us"))})
    pq.write_table(table, path, use_deprecated_int96_timestamps=True)
    relation = Relation("t", "file", (FileEntry(str(path), path.stat().st_size, 0),), (("at", "timestamp"),))
    assert dataset(relation).to_table().column("at").to_pylist() == [last]


@pytest.mark.parametrize("by_arrow", [False, True])
def test_a_stage_reads_columns_in_the_types_that_the_one_before_it_had(
    by_arrow: bool, tmp_path: Path
) -> None:
    sql = (
        "SELECT TIME '10:00:01.5' AS t, INTERVAL '1 month 2 days' AS i, 'b'::ENUM('b', 'a') AS e, 3::UTINYINT AS u, "
        "sum(2) AS h, [TIME '09:00'] AS l, {'f': 'a'::ENUM('b', 'a')} AS s, "
        "['{}'::JSON] AS j, 'x' AS plain, "
        "TIMESTAMP_NS '2020-01-01 00:00:00.000001' AS n"
    )
    file = tmp_path / "part-00000.parquet"
    with duckdb.connect() as connection:
        kinds = [str(kind) for kind in connection.sql(sql).types]
        job = StageJob("j", "stage", sql, (), StorageLocation(str(tmp_path)))
        statement, columns, own = storable(connection, job)
        if by_arrow:
            assert written(connection, statement, "file", str(file), lambda: None, own=own) == 1
            assert b"ebbflow_types" in (pq.read_schema(file).metadata or pq.read_metadata(file).metadata)
        else:
            connection.execute(copied(statement, str(file), None, own))
        entry = FileEntry(str(file), file.stat().st_size, 0)
        relation = Relation("ckpt_1", "file", (entry,), columns)
        assert own_types(relation).keys() == {"t", "i", "e", "u", "h", "l", "s", "j"}
        register_view(connection, relation, own=True)
        found = connection.sql("FROM ckpt_1")
        assert [str(kind) for kind in found.types[:-1]] == kinds[:-1]
        assert found.fetchall() == connection.sql(sql).fetchall()


def test_json_of_a_table_is_json_to_duckdbs_own_sql_and_text_in_what_that_stores(tmp_path: Path) -> None:
    file = tmp_path / "t.parquet"
    with duckdb.connect() as connection:
        connection.execute(f"""COPY (SELECT '{{"a": 1}}'::JSON AS j, '"b"' AS text) TO '{file}'""")
        columns = (("j", "string"), ("text", "string"))
        entry = FileEntry(str(file), file.stat().st_size, 0)
        plain = Relation("plain", "file", (entry,), columns)
        assert json_columns(plain) == ("j",)
        register_view(connection, plain, own=True)
        marked = replace(plain, name="t", json=("j",))
        assert version(marked) != version(plain)  # what is made of one is not reused for the other
        register_view(connection, marked)
        register_view(connection, replace(marked, name="none", files=()))
        assert [str(kind) for kind in connection.sql("FROM none").types] == ["JSON", "VARCHAR"]
        job = StageJob("j", "stage", "SELECT j, text FROM t", (), StorageLocation("unused"))
        assert [str(kind) for kind in connection.sql(job.sql).types] == ["JSON", "VARCHAR"]
        assert [str(kind) for kind in connection.sql("FROM plain").types] == ["VARCHAR", "VARCHAR"]
        statement, stored, own = storable(connection, job)
        assert (stored, own) == (columns, {"j": "JSON"})
        assert connection.sql(statement).fetchall() == [('{"a": 1}', '"b"')]
        assert [str(kind) for kind in connection.sql(statement).types] == ["VARCHAR", "VARCHAR"]


def test_columns_of_one_name_are_stored_under_distinct_names() -> None:
    sql = "SELECT 1 AS a, TIME '10:00' AS A, 2 AS b, 3 AS a, 'x' AS a_1"
    with duckdb.connect() as connection:
        statement, columns, own = storable(
            connection, StageJob("j", "stage", sql, (), StorageLocation("unused"))
        )
        assert [name for name, _ in columns] == ["a", "A_2", "b", "a_3", "a_1"]
        assert own == {"A_2": "TIME"}
        found = connection.sql(statement)
        assert found.columns == ["a", "A_2", "b", "a_3", "a_1"]
        assert found.fetchall() == [(1, "10:00:00", 2, 3, "x")]
