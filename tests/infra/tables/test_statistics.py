"""Statistics against what the data is."""

import datetime
import math
import shutil
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.errors import TableError
from ebbflow.infra.protocols import Relation
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import filefooters, sampling
from ebbflow.infra.tables.parquet import discover
from ebbflow.infra.tables.statistics import collect, selectivity
from tests.infra.conftest import ManualClock

ROWS = 120_000
SAMPLE = 5_000  # 120,000 rows are more than ten times this: the table is sampled


def relation(folder: Path, table: pa.Table, **options: Any) -> Relation:
    folder.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, folder / "t.parquet", **options)
    return discover(StorageLocation(folder))[0]


@pytest.fixture(scope="module")
def data() -> pa.Table:
    rng = np.random.default_rng(7)
    skewed = rng.zipf(1.6, ROWS).clip(max=10**6)
    return pa.table(
        {
            "key": np.arange(ROWS) * 3,
            "shuffled_key": rng.permutation(ROWS),
            "clustered": np.repeat(np.arange(ROWS // 4), 4),
            "clustered_text": [f"Order#{i // 6:09d}" for i in range(ROWS)],
            "foreign": rng.integers(0, 8_000, ROWS),
            "small": rng.integers(0, 7, ROWS).astype(np.int32),
            "skewed": skewed,
            "real": rng.normal(size=ROWS),
            "price": pa.array(np.round(rng.uniform(0, 50, ROWS), 2)).cast(pa.decimal128(15, 2), safe=False),
            "day": pa.array(rng.integers(8_000, 10_500, ROWS).astype(np.int32)).cast(pa.date32()),
            "gaps": pa.array(rng.integers(0, 100, ROWS), mask=rng.random(ROWS) < 0.25),
        }
    )


@pytest.fixture(scope="module")
def sampled(data: pa.Table, tmp_path_factory: pytest.TempPathFactory) -> Relation:
    return relation(tmp_path_factory.mktemp("data"), data, row_group_size=6_000)


def test_counts_nulls_and_ranges_are_exact_for_a_sampled_table(data: pa.Table, sampled: Relation) -> None:
    found = collect(sampled, sample_rows=SAMPLE)
    assert found.rows == ROWS
    assert found.bytes == sampled.bytes
    assert found.columns["gaps"].nulls == pytest.approx(data["gaps"].null_count / ROWS)
    assert (found.columns["key"].low, found.columns["key"].high) == (0.0, 3.0 * (ROWS - 1))
    assert (found.columns["day"].low, found.columns["day"].high) == (8_000.0, 10_499.0)
    assert found.columns["clustered_text"].low == "Order#000000000"
    assert found.columns["price"].high == 50.0


# the largest error factor that each column may have
FACTORS = {
    "key": 1.0,
    "shuffled_key": 1.0,
    "clustered": 1.5,
    "clustered_text": 1.5,
    "foreign": 1.1,
    "small": 1.0,
    "skewed": 1.6,
    "real": 1.0,
    "price": 1.1,
    "day": 1.05,
    "gaps": 1.0,
}


def test_distinct_counts_are_close_for_keys_uniform_and_clustered_columns(
    data: pa.Table, sampled: Relation
) -> None:
    found = collect(sampled, sample_rows=SAMPLE)
    errors = {}
    for name in data.column_names:
        true = len(data[name].drop_null().unique())
        estimate = found.columns[name].distinct
        assert estimate is not None
        errors[name] = max(estimate / true, true / estimate)
    assert {n: e for n, e in errors.items() if e > FACTORS[n] + 1e-9} == {}


def test_a_sorted_table_in_one_huge_row_group_is_not_mistaken_for_its_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "DECODE_ROWS", 20_000)
    table = pa.table({"clustered": np.repeat(np.arange(ROWS // 4), 4)})
    one = relation(tmp_path, table, row_group_size=ROWS)
    estimate = collect(one, sample_rows=SAMPLE).columns["clustered"].distinct
    assert estimate == pytest.approx(ROWS / 4, rel=0.3)


def test_a_small_table_is_counted_exactly(tmp_path: Path) -> None:
    table = pa.table(
        {
            "s": ["a", "b", "b", None],
            "d": pa.array([Decimal("1.10"), Decimal("-2.50"), None, None], pa.decimal128(15, 2)),
            "f": [1.0, float("nan"), 2.0, 2.0],
            "t": pa.array([datetime.datetime(1970, 1, 2)] * 4, pa.timestamp("us")),
            "l": [[1], [2], None, [1]],
            "b": [True, True, True, True],
            "n": pa.nulls(4, pa.int64()),
        }
    )
    found = collect(relation(tmp_path, table)).columns
    assert (found["s"].distinct, found["s"].nulls, found["s"].low, found["s"].high) == (2.0, 0.25, "a", "b")
    assert found["s"].width == 1.0
    assert (found["d"].distinct, found["d"].low, found["d"].high, found["d"].nulls) == (2.0, -2.5, 1.1, 0.5)
    assert (found["t"].low, found["t"].high, found["t"].distinct) == (86_400.0, 86_400.0, 1.0)
    assert (found["l"].distinct, found["l"].low, found["l"].nulls) == (None, None, 0.25)
    assert (found["b"].distinct, found["b"].low, found["b"].width) == (1.0, 1.0, 1.0)
    assert (found["n"].distinct, found["n"].nulls, found["n"].low) == (0.0, 1.0, None)
    assert all(not isinstance(c.low, float) or math.isfinite(c.low) for c in found.values())


def test_an_empty_table_and_one_without_footer_statistics_have_statistics_too(tmp_path: Path) -> None:
    table = pa.table({"a": pa.array([1, 2, 2], pa.int64()), "s": ["x", None, "y"]})
    empty = collect(relation(tmp_path / "empty", table.slice(0, 0)))
    assert (empty.rows, empty.columns["a"].distinct, empty.columns["a"].low) == (0.0, 0.0, None)
    bare = collect(relation(tmp_path / "bare", table, write_statistics=False))
    assert (bare.rows, bare.columns["a"].distinct, bare.columns["a"].low) == (3.0, 2.0, None)
    assert bare.columns["s"].nulls == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "dtype",
    [pa.date32(), pa.timestamp("us"), pa.decimal128(10, 2), pa.bool_(), pa.list_(pa.int64())],
    ids=str,
)
def test_an_empty_column_of_any_type_has_no_values(dtype: pa.DataType, tmp_path: Path) -> None:
    table = pa.table({"k": pa.array([], pa.int64()), "v": pa.array([], dtype)})
    found = collect(relation(tmp_path, table))
    assert found.rows == 0
    assert found.columns["v"].distinct in (0.0, None)


def test_cached_statistics_are_used_until_the_table_changes(tmp_path: Path) -> None:
    cache = JsonStore(StorageLocation(f"{tmp_path}/cache"))
    table = relation(tmp_path / "t", pa.table({"a": [1, 2, 3]}))
    first = collect(table, cache)
    file = tmp_path / "t/t.parquet"
    shutil.move(file, tmp_path / "away")
    assert collect(table, cache) == first
    shutil.move(tmp_path / "away", file)
    changed = collect(relation(tmp_path / "t", pa.table({"a": [1, 2, 3, 4]})), cache)
    assert changed.rows == 4
    for corrupt in (b"", b"{", b"[1]"):
        for entry in (tmp_path / "cache").glob("*.json"):
            entry.write_bytes(corrupt)
        assert collect(discover(StorageLocation(f"{tmp_path}/t"))[0], cache) == changed


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = JsonStore(StorageLocation(f"{tmp_path}/file/cache"))
    table = relation(tmp_path / "t", pa.table({"a": [1, 2, 3]}))
    assert collect(table, cache).rows == 3
    assert selectivity(table, ["a > 1"], cache) == [pytest.approx(2 / 3)]


def test_a_table_that_only_the_engine_knows_is_refused() -> None:
    with pytest.raises(TableError, match="catalogue"):
        collect(Relation("t", "file", (), (("a", "int"),), external=True))


# --- selectivity ------------------------------------------------------------------------------------------


def test_selectivities_are_close_and_never_zero_for_a_sampled_table(
    data: pa.Table, sampled: Relation
) -> None:
    found = selectivity(
        sampled,
        ["small = 3", "day < DATE '1995-01-01' AND small < 3", "price > 1000", "true", "gaps IS NULL"],
        sample_rows=SAMPLE,
    )
    days = np.asarray(data["day"].cast(pa.int32()))
    small = np.asarray(data["small"])
    assert found[0] == pytest.approx((small == 3).mean(), abs=0.02)
    assert found[1] == pytest.approx(((days < 9131) & (small < 3)).mean(), abs=0.02)
    assert found[2] is not None
    assert 0 < found[2] < 1e-3
    assert found[3] is not None
    assert found[3] < 1
    assert found[4] == pytest.approx(data["gaps"].null_count / ROWS, abs=0.02)


def test_selectivities_of_a_small_table_are_exact(tmp_path: Path) -> None:
    table = relation(tmp_path, pa.table({"a": [1, 2, 3, None], "odd name": ["x", "x", "y", "z"]}))
    predicates = ["a > 1", "a = 9", "\"odd name\" = 'x'", "t.a IS NULL", "A = 1 -- a comment"]
    assert selectivity(table, predicates) == [0.5, 0.0, 0.5, 0.25, 0.25]
    assert selectivity(table, []) == []


def test_predicates_that_cannot_be_evaluated_are_none_and_do_not_hurt_the_others(tmp_path: Path) -> None:
    table = relation(tmp_path, pa.table({"a": [1, 2]}))
    (tmp_path / "secret.csv").write_text("1\n")
    predicates = [
        "a = 1",
        "missing = 1",
        "a +",
        "",
        f"(SELECT count(*) FROM read_csv('{tmp_path}/secret.csv')) > 0",
        "true) FROM t; DROP TABLE t; --",
        "a = 2",
    ]
    assert selectivity(table, predicates) == [0.5, None, None, None, None, None, 0.5]
    assert selectivity(table, ["a = 1"]) == [0.5]


def test_the_sample_is_kept_beside_the_cache_and_survives_the_process(
    tmp_path: Path, sampled: Relation, place: str
) -> None:
    cache = JsonStore(StorageLocation(place))
    collect(sampled, cache, SAMPLE)
    before = selectivity(sampled, ["small = 3"], cache, SAMPLE)
    sampling._memory.clear()
    gone = Relation(sampled.name, sampled.scheme, sampled.files, sampled.columns)
    kept = sampling.kept(gone, cache, SAMPLE, [name for name, _ in gone.columns])
    assert kept.table.num_rows <= SAMPLE
    assert (kept.rows, kept.entire) == (ROWS, False)
    assert selectivity(sampled, ["small = 3"], cache, SAMPLE) == before


def test_only_the_columns_that_are_named_are_read_and_others_are_added_later(
    sampled: Relation, data: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = JsonStore(StorageLocation(tmp_path))
    read: list[tuple[str, ...]] = []
    real = sampling.decode

    def decode(relation: Relation, group: Any, limit: int, names: Any) -> Any:
        read.append(tuple(names))
        return real(relation, group, limit, names)

    monkeypatch.setattr(sampling, "decode", decode)
    monkeypatch.setattr(sampling, "_memory", type(sampling._memory)())
    first = collect(sampled, cache, SAMPLE, names=["small", "day"])
    assert set(first.columns) == {"small", "day"}
    assert first.rows == ROWS
    assert set(read) == {("small", "day")}
    assert collect(sampled, cache, SAMPLE, names=["day"]).columns.keys() == first.columns.keys()
    assert collect(sampled, cache, SAMPLE, names=[]).rows == ROWS
    assert set(read) == {("small", "day")}
    monkeypatch.setattr(sampling, "_memory", type(sampling._memory)())  # another process
    both = collect(sampled, cache, SAMPLE, names=["gaps", "day"])
    assert set(read) == {("small", "day"), ("gaps",)}
    assert set(both.columns) == {"small", "day", "gaps"}
    whole = collect(sampled, None, SAMPLE)
    assert {name: whole.columns[name] for name in both.columns} == both.columns
    monkeypatch.setattr(sampling, "_memory", type(sampling._memory)())
    # rows of columns that were read apart are the same rows
    read.clear()
    (together,) = selectivity(sampled, ["small < 3 AND gaps < 50"], cache, SAMPLE, names=["small", "gaps"])
    assert read == []
    expected = np.mean((data["small"].to_numpy() < 3) & (data["gaps"].fill_null(99).to_numpy() < 50))
    assert together == pytest.approx(expected, rel=0.15)
    (later,) = selectivity(sampled, ['"foreign" < 4000'], cache, SAMPLE, names=["foreign"])
    assert set(read) == {("foreign",)}
    assert later == pytest.approx(0.5, rel=0.15)


def test_of_very_many_files_few_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").mkdir()
    for number in range(80):
        part = pa.table({"k": range(number * 10, number * 10 + 10)})
        pq.write_table(part, tmp_path / "t" / f"{number:03d}.parquet")
    (many,) = discover(StorageLocation(tmp_path))
    groups: list[int] = []
    real = sampling.decode
    monkeypatch.setattr(sampling, "decode", lambda *a: groups.append(1) or real(*a))
    told = collect(many)
    assert len(groups) <= sampling.MOST_GROUPS
    assert (told.rows, told.columns["k"].low, told.columns["k"].high) == (800, 0.0, 799.0)
    assert told.columns["k"].distinct == pytest.approx(800, rel=0.05)


def test_dates_that_python_has_not_leave_a_column_without_a_range(tmp_path: Path) -> None:
    moments = pa.array([-(2**62), 0, 2**62], pa.int64()).cast(pa.timestamp("us"))
    found = collect(relation(tmp_path, pa.table({"moment": moments, "n": [1, 2, 3]})))
    assert (found.rows, found.columns["n"].high) == (3, 3)


def test_what_several_threads_keep_of_footers_is_changed_by_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = relation(tmp_path, pa.table({"a": [1]})).files[0]
    (metadata,) = filefooters.opened("file", [file])
    inside, most, together = list[Any](), list[int](), threading.Barrier(4, timeout=150)

    class Known(OrderedDict[Any, Any]):
        def move_to_end(self, key: Any, last: bool = True) -> None:
            inside.append(key)
            most.append(len(inside))
            time.sleep(0.01)
            super().move_to_end(key, last)
            inside.pop()

    def extract(_: int) -> None:
        together.wait()
        filefooters.extract("file", file, metadata, ["a"])

    monkeypatch.setattr(filefooters, "_known", Known())
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(extract, range(4)))
    assert most == [1, 1, 1, 1]


@pytest.mark.parametrize("at_once", [1, 8])
def test_tables_that_are_sampled_at_once_have_the_time_of_all(
    sampled: Relation, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    clock, real, read = ManualClock(0.0), sampling.decode, list[int]()

    def decode(*args: Any) -> Any:
        clock.sleep(0.4 * sampling.TIME_LIMIT)  # a link that others use as well
        read.append(1)
        return real(*args)

    monkeypatch.setattr(sampling, "decode", decode)
    collect(sampled, None, SAMPLE, clock, ["small"], at_once)
    assert len(read) == (3 if at_once == 1 else len(sampling._spread(sampling.row_groups(sampled, []))))
