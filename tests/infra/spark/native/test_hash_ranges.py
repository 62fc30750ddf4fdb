"""What is exchanged between the tasks of a native stage, and which task joins what of it."""

from pathlib import Path

import duckdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.protocols import Relation
from ebbflow.infra.spark.native.catalyst import NotDoneError
from ebbflow.infra.spark.native.slices import (
    BUCKET,
    BUCKETS,
    ByHash,
    Exchange,
    HashRange,
    bucket_sizes,
    by_hash,
    hash_ranges,
    joining,
)
from ebbflow.infra.storage.files import FileEntry

MANY = 12  # hashes, instead of BUCKETS
SIZES = st.lists(st.one_of(st.just(0.0), st.floats(0.001, 1e9)), min_size=MANY, max_size=MANY)


@given(st.lists(SIZES, min_size=1, max_size=5), SIZES, st.integers(1, 20))
def test_each_row_of_the_sliced_relation_is_in_one_part(
    probed: list[list[float]], built: list[float], count: int
) -> None:
    found = hash_ranges(probed, built, count)
    assert found
    for file, sizes in enumerate(probed):
        for bucket, size in enumerate(sizes):
            holders = [r for r in found if file in r.files and r.low <= bucket <= r.high]
            assert len(holders) == 1 if size else len(holders) <= 1
    assert len({(r.low, r.high) for r in found}) <= count


def test_a_frequent_key_is_divided_by_files_and_others_are_balanced() -> None:
    even = [[1.0] * MANY] * 3
    assert hash_ranges(even, [0.0] * MANY, 3) == [HashRange(n, n + 3, (0, 1, 2)) for n in (0, 4, 8)]
    skewed = [[1.0] * 5 + [50.0] + [1.0] * 6] * 3
    found = hash_ranges(skewed, [0.0] * MANY, 4)
    assert [r.files for r in found if r.low <= 5 <= r.high] == [(0,), (1,), (2,)]
    assert hash_ranges([[0.0] * MANY], [1.0] * MANY, 4) == [HashRange(0, MANY - 1, (0,))], (
        "one part tells of no row"
    )


def test_the_cheapest_exchange_that_fits_is_taken() -> None:
    sizes = {0: 1000, 1: 900, 2: 800, 3: 10}
    keys = [{0: "a", 1: "a"}, {0: "b", 2: "b", 3: "b"}, {0: "c", 1: "c", 2: "c"}]
    assert by_hash(keys, sizes, 0, 400, 4, {}) == ByHash({0: "c", 1: "c", 2: "c"}, 10)
    assert by_hash(keys, sizes, 0, 2000, 2, {}) == ByHash({0: "b", 2: "b"}, 910)
    assert by_hash(keys[:2], sizes, 0, 400, 4, {}) is None
    assert by_hash(keys, sizes, 0, 100_000, 4, {}) is None, "all of them are small"
    assert by_hash([{0: "a"}], sizes, 0, 400, 4, {}) is None


def test_of_equal_exchanges_the_key_of_most_values_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "l.parquet"
    with duckdb.connect() as connection:
        rows = "SELECT 7 AS tenant, 'a' || v AS name, v AS id FROM range(50) t(v)"
        connection.execute(f"COPY ({rows}) TO '{path}' (FORMAT parquet)")
    kinds = (("tenant", "int"), ("name", "string"), ("id", "bigint"))
    lines = Relation("l", "file", (FileEntry(str(path), path.stat().st_size, 0.0),), kinds)
    keys = [{0: name, 1: name} for name, _ in kinds]
    assert by_hash(keys, {0: 1000, 1: 900}, 0, 400, 4, {0: lines}) == ByHash({0: "id", 1: "id"}, 0)


def test_no_task_gets_more_rows_of_one_key_than_it_can_hold() -> None:
    scans = {n: Relation(n, "file", (FileEntry(f"/{n}", 10, 0.0),), (("v", "bigint"),)) for n in ("s0", "s1")}

    def parts(built: list[float]) -> int:
        sizes = {"s0": [[10.0] * MANY], "s1": [built]}
        return len(joining("SELECT 1", scans, sizes, "s0", "{}", lambda *_: 4, 50.0))

    assert parts([10.0] * MANY) == 4
    assert parts([30.0] * MANY) == MANY, "ranges of several keys are cut"
    with pytest.raises(NotDoneError, match="do not fit"):
        parts([60.0] + [1.0] * (MANY - 1))


def test_sizes_by_hash_are_those_of_row_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with duckdb.connect() as connection:
        key = f"CASE WHEN v < 20000 THEN 7 ELSE CAST(hash(v) % {BUCKETS} AS INTEGER) END"
        connection.execute(
            f"COPY (SELECT v, {key} AS {BUCKET} FROM range(40000) t(v) ORDER BY 2) TO '{path}' "
            f"(FORMAT parquet, ROW_GROUP_SIZE 2048)"
        )
    table = Relation("t", "file", (), (("v", "bigint"), ("x", "map<int,int>")))
    written = Exchange("", ("V",)).of(table, "file", [FileEntry(str(path), 4000, 0.0)])
    assert written.columns == (("v", "bigint"), (BUCKET, "int"))
    (sizes,), (rows,) = bucket_sizes(written)
    assert rows == 40_000
    assert sum(sizes) == pytest.approx(4000)
    assert sizes[7] == pytest.approx(2000, rel=0.25)
    assert all(sizes), "no hash between others is taken to be absent"
