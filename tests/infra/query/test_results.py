"""Reading and writing results, and telling results apart."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ebbflow.infra.errors import StorageError
from ebbflow.infra.protocols import Checkpoint
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.query.results import preview, read_checkpoint, same_rows, write_result
from ebbflow.infra.storage.filesystems import resolve
from ebbflow.infra.storage.places import StorageLocation


def checkpoint(uri: str, *parts: pa.Table) -> Checkpoint:
    store = ParquetCheckpointStore(StorageLocation(uri))
    attempt = store.begin("ab" * 16)
    fs, folder = resolve(attempt.place.uri)
    for i, part in enumerate(parts):
        with fs.open_output_stream(f"{folder}/part-{i:05d}.parquet") as out:
            pq.write_table(part, out)
    return store.commit(
        attempt,
        rows=sum(part.num_rows for part in parts),
        columns=(("k", "bigint"), ("s", "string")),
        seconds=1,
        sources={},
    )


def part(start: int, rows: int) -> pa.Table:
    return pa.table({"k": pa.array(range(start, start + rows), pa.int64()), "s": ["x"] * rows})


def test_rows_come_in_the_order_of_the_parts(place: str) -> None:
    done = checkpoint(place, part(0, 3), part(3, 0), part(3, 4))
    assert read_checkpoint(done)["k"].to_pylist() == list(range(7))
    assert preview(done, 4)["k"].to_pylist() == [0, 1, 2, 3]
    assert preview(done, 100).num_rows == 7
    assert preview(done, 0).column_names == ["k", "s"]


def test_parts_may_differ_in_how_strings_are_held_and_in_nullability(tmp_path: Path) -> None:
    view = part(2, 2).set_column(1, "s", pa.array(["y", "z"], pa.string_view()))
    strict = part(4, 1).cast(pa.schema([pa.field("k", pa.int64(), nullable=False), ("s", pa.large_string())]))
    done = checkpoint(str(tmp_path), part(0, 2), view, strict)
    assert read_checkpoint(done)["s"].to_pylist() == ["x", "x", "y", "z", "x"]


def test_a_result_is_one_file_that_replaces_an_older_one(place: str) -> None:
    done = checkpoint(place, part(0, 70_000), part(70_000, 5))
    path = f"{place}/out/result.parquet"
    fs, inside = resolve(path)
    fs.create_dir(inside.rsplit("/", 1)[0], recursive=True)
    for _ in range(2):
        write_result(done, StorageLocation(path))
    assert pq.read_table(inside, filesystem=fs).equals(read_checkpoint(done))
    from pyarrow.fs import FileSelector

    names = [i.base_name for i in fs.get_file_info(FileSelector(inside.rsplit("/", 1)[0])) if i.is_file]
    assert names == ["result.parquet"]


def test_a_result_whose_parts_are_gone_leaves_no_file(tmp_path: Path) -> None:
    done = checkpoint(str(tmp_path / "store"), part(0, 5), part(5, 5))
    Path(done.relation.files[1].path).unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/result.parquet").write_text("older")
    with pytest.raises(StorageError, match="write the result"):
        write_result(done, StorageLocation(tmp_path / "out/result.parquet"))
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["result.parquet"]
    assert (tmp_path / "out/result.parquet").read_text() == "older"


# --- same rows --------------------------------------------------------------------------------------------

ROW = st.tuples(
    st.one_of(st.none(), st.integers(-5, 5)),
    st.one_of(st.none(), st.text("ab", max_size=2)),
    st.one_of(st.none(), st.floats(-1e6, 1e6), st.just(float("nan")), st.sampled_from([0.0, 1.0, 1e-9])),
    st.one_of(st.none(), st.decimals(-99, 99, places=2)),
    st.one_of(st.none(), st.floats(0, 1)),
)
SCHEMA = pa.schema(
    [
        ("k", pa.int64()),
        ("s", pa.string()),
        ("x", pa.float64()),
        ("d", pa.decimal128(15, 2)),
        ("y", pa.float64()),
    ]
)


def as_table(rows: list[tuple[Any, ...]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(SCHEMA)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA)


@settings(deadline=None, max_examples=150)
@given(st.lists(ROW, max_size=25), st.randoms(use_true_random=False))
def test_a_shuffled_copy_with_noise_below_the_tolerance_is_the_same(rows: list[Any], random: Any) -> None:
    noisy = [
        tuple(v * (1 + random.uniform(-4e-10, 4e-10)) if isinstance(v, float) else v for v in row)
        for row in rows
    ]
    random.shuffle(noisy)
    assert same_rows(as_table(rows), as_table(noisy)) is None
    assert same_rows(as_table(noisy), as_table(rows)) is None


@settings(deadline=None, max_examples=150)
@given(st.lists(ROW, min_size=1, max_size=25), st.data())
def test_one_changed_value_is_found(rows: list[Any], data: Any) -> None:
    i = data.draw(st.integers(0, len(rows) - 1))
    j = data.draw(st.integers(0, len(SCHEMA) - 1))
    old, new = rows[i][j], data.draw(ROW)[j]
    same_nan = isinstance(old, float) and isinstance(new, float) and np.isnan(old) and np.isnan(new)
    assume(old != new and not same_nan)
    if isinstance(old, float) and isinstance(new, float):
        assume(not abs(old - new) <= max(1e-11, 1e-8 * max(abs(old), abs(new))))
    changed = [list(row) for row in rows]
    changed[i][j] = new
    shuffled = data.draw(st.permutations(changed))

    found = same_rows(as_table(rows), as_table([tuple(row) for row in shuffled]))

    assert found is not None
    assert found.kind == "values"
    assert found.left is not None
    assert found.right is not None


def test_the_differing_rows_are_shown() -> None:
    a = pa.table({"k": [1, 2, 3], "s": ["a", "b", "c"]})
    found = same_rows(a, pa.table({"K": [3, 1, 2], "S": ["c", "a", "x"]}))
    assert found is not None
    assert (found.left, found.right) == ((2, "b"), (2, "x"))
    assert str(found) == "only the first has (2, 'b'); only the second has (2, 'x')"


def test_counts_of_equal_rows_matter() -> None:
    found = same_rows(pa.table({"a": [1, 1, 2]}), pa.table({"a": [1, 2, 2]}))
    assert found is not None
    assert (found.left, found.right) == ((1,), (2,))


def test_shape_and_types_are_compared_before_values() -> None:
    a = pa.table({"a": [1], "b": ["x"]})
    for other, kind in [
        (pa.table({"a": [1]}), "columns"),
        (pa.table({"b": ["x"], "a": [1]}), "columns"),
        (pa.table({"a": [1, 2], "b": ["x", "y"]}), "row count"),
        (pa.table({"a": ["1"], "b": ["x"]}), "types"),
        (pa.table({"a": [True], "b": ["x"]}), "types"),
    ]:
        found = same_rows(a, other)
        assert found is not None
        assert found.kind == kind


def column(values: list[Any], dtype: Any) -> pa.Table:
    return pa.table({"a": pa.array(values, dtype)})


D = Decimal
SAME = [
    (column([D("1.234568"), None], pa.decimal128(19, 6)), column([None, 1.23456751], pa.float64())),
    (column([D("1.23")], pa.decimal128(15, 2)), column([D("1.2300")], pa.decimal128(38, 4))),
    (column([D("1.23")], pa.decimal128(15, 2)), column([D("1.2349")], pa.decimal128(38, 4))),
    (column([7], pa.int32()), column([D(7)], pa.decimal128(38, 0))),
    (column([7], pa.int32()), column([7.0], pa.float64())),
    (column(["x"], pa.string()), column(["x"], pa.string_view())),
    (column(["x"], pa.string()), pa.table({"A": pa.array(["x"]).dictionary_encode()})),
    (column([0], pa.date32()), column([0], pa.timestamp("us"))),
    (column([5], pa.timestamp("ms", "Europe/Berlin")), column([5_000], pa.timestamp("us"))),
    (column([None], pa.null()), column([None], pa.string())),
    (column([0.0], pa.float64()), column([-1e-17], pa.float64())),
    (column([float("inf")], pa.float64()), column([float("inf")], pa.float32())),
    (column([[1.0], None], pa.list_(pa.float64())), column([None, [1.0 + 1e-12]], pa.list_(pa.float64()))),
    (column([D("99999999999999999999999.01")], pa.decimal128(38, 2)),) * 2,
]
UNLIKE = [
    (column([D("1.234568")], pa.decimal128(19, 6)), column([1.234569], pa.float64())),
    (column([D("1.23")], pa.decimal128(15, 2)), column([D("1.24")], pa.decimal128(15, 2))),
    (column([D("1.23")], pa.decimal128(15, 2)), column([D("1.2361")], pa.decimal128(38, 4))),
    (column([2**53], pa.int64()), column([2**53 + 1], pa.int64())),
    (column([0], pa.date32()), column([1], pa.timestamp("us"))),
    (column(["x"], pa.string()), column(["x "], pa.string())),
    (column([""], pa.string()), column([None], pa.string())),
    (column([0.0], pa.float64()), column([None], pa.float64())),
    (column([float("nan")], pa.float64()), column([None], pa.float64())),
    (column([float("inf")], pa.float64()), column([float("-inf")], pa.float64())),
    (column([float("inf")], pa.float64()), column([1e308], pa.float64())),
    (column([1.0], pa.float64()), column([1.0 + 1e-8], pa.float64())),
    (column([[1, 2]], pa.list_(pa.int64())), column([[2, 1]], pa.list_(pa.int64()))),
    (
        column([D("99999999999999999999999.01")], pa.decimal128(38, 2)),
        column([D("99999999999999999999999.02")], pa.decimal128(38, 2)),
    ),
]


@pytest.mark.parametrize("pair", range(len(SAME)))
def test_engines_types_and_rounding_do_not_matter(pair: int) -> None:
    assert same_rows(*SAME[pair]) is None
    assert same_rows(*reversed(SAME[pair])) is None


@pytest.mark.parametrize("pair", range(len(UNLIKE)))
def test_values_that_differ_are_told_apart(pair: int) -> None:
    assert same_rows(*UNLIKE[pair]) is not None
    assert same_rows(*reversed(UNLIKE[pair])) is not None


def test_near_ties_that_sort_differently_are_matched() -> None:
    a = pa.table({"x": [1.0, 1.0 + 1e-12], "y": [5.0, 3.0]})
    b = pa.table({"x": [1.0, 1.0 + 1e-12], "y": [3.0, 5.0]})
    assert same_rows(a, b) is None


def test_a_chain_of_near_values_longer_than_the_tolerance_is_matched_one_to_one() -> None:
    steps = [1.0 + i * 0.7e-9 for i in range(6)]
    shifted = [x + 0.3e-9 for x in steps]
    assert same_rows(pa.table({"x": steps}), pa.table({"x": shifted[::-1]})) is None
    found = same_rows(pa.table({"x": [steps[0], *steps]}), pa.table({"x": [*shifted, shifted[-1]]}))
    assert found is not None or abs(shifted[-1] - steps[0]) < 1e-8
    # the first and the last value lie in one chain but not within tolerance of each other
    ends = same_rows(pa.table({"x": [steps[0], *steps]}), pa.table({"x": [*steps, steps[-1] + 4e-9]}))
    assert ends is not None


def test_a_hundred_thousand_dense_rounded_values_are_compared_without_pairing_all_of_them() -> None:
    rng = np.random.default_rng(0)
    exact = rng.uniform(0, 1, 100_000)
    rounded = pa.array(np.round(exact, 6)).cast(pa.decimal128(19, 6), safe=False)
    order = rng.permutation(100_000)
    a = pa.table({"x": rounded, "s": [f"n{i % 977}" for i in range(100_000)]})
    b = pa.table({"x": exact, "s": [f"n{i % 977}" for i in range(100_000)]}).take(order)
    assert same_rows(a, b) is None
    wrong = b["x"].to_numpy().copy()
    wrong[5] += 1e-3
    found = same_rows(a, b.set_column(0, "x", pa.array(wrong)))
    assert found is not None
