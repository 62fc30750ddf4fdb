import random
from datetime import date, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.infra.query.slices import FilePruning
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import parquet as tables
from ebbflow.infra.tables.clustering import CELLS, grid, outside
from ebbflow.infra.tables.filefooters import footer, read_footers
from ebbflow.infra.tables.footers import column_footers


def relation(folder, values, row_group=100, files=1):
    target = folder / "t"
    target.mkdir(parents=True)
    step = -(-len(values) // files)
    for i in range(files):
        part = pa.table({"k": values[i * step : (i + 1) * step]})
        pq.write_table(part, target / f"{i:02d}.parquet", row_group_size=row_group)
    return tables.discover(StorageLocation(folder))[0]


def measured(found):
    name, dtype = found.columns[0]
    return grid(column_footers(found, read_footers(found, [name]), [name])[name], dtype)


def test_a_column_in_order_is_read_once_whatever_the_slices(tmp_path):
    edges, reads = measured(relation(tmp_path, list(range(16_000))))
    assert len(edges) == CELLS - 1
    assert edges == tuple(float(v) for v in range(1000, 16_000, 1000))
    assert reads == (1.0, 1.0, 1.0, 1.0)


def test_row_groups_across_a_border_are_read_twice(tmp_path):
    _, reads = measured(relation(tmp_path, list(range(16_000)), row_group=1600))
    assert reads[0] == 1.0
    assert reads[3] == pytest.approx(2.4)  # ten groups meet 24 cells


def test_a_column_in_no_order_has_no_grid(tmp_path):
    values = list(range(16_000))
    random.Random(1).shuffle(values)
    assert measured(relation(tmp_path, values)) == ((), ())


def test_dates_have_a_grid_in_days(tmp_path):
    edges, reads = measured(
        relation(tmp_path, [date(2000, 1, 1) + timedelta(days=i // 10) for i in range(16_000)])
    )
    assert edges[0] == date(2000, 4, 10).toordinal() - date(1970, 1, 1).toordinal()
    assert reads == (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "values",
    [["a", "b"] * 800, [1.5] * 1600, [3] * 1600, pa.nulls(1600, pa.int32()), [1, 2]],
    ids=["text", "real", "constant", "empty", "short"],
)
def test_columns_that_cannot_be_divided_have_no_grid(tmp_path, values):
    assert measured(relation(tmp_path, values)) == ((), ())


def test_skewed_values_still_give_cells_of_about_equal_rows(tmp_path):
    values = sorted(int(1000 * random.Random(i).paretovariate(1.1)) for i in range(16_000))
    edges, _ = measured(relation(tmp_path, values))
    counts = [0] * CELLS
    for v in values:
        counts[sum(v >= e for e in edges)] += 1
    assert max(counts) < 2 * 16_000 / CELLS


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.integers(0, 40)), min_size=4, max_size=40),
    st.one_of(st.none(), st.integers(-2, 42)),
    st.one_of(st.none(), st.integers(-2, 42)),
)
def test_a_file_left_out_holds_nothing_of_the_range(tmp_path_factory, values, low, high):
    found = relation(tmp_path_factory.mktemp("t"), pa.array(values, pa.int32()), row_group=3, files=4)
    kept = FilePruning().narrowed(found, "K", low, high)
    assert 1 <= len(kept.files) <= len(found.files)
    for file in set(found.files) - set(kept.files):
        for value in pq.read_table("/" + file.path.lstrip("/")).column("k").to_pylist():
            inside = (
                (low is None)
                if value is None
                else (low is None or value >= low) and (high is None or value < high)
            )
            assert not inside


def test_narrowing_leaves_out_most_of_a_table_in_order(tmp_path):
    found = relation(tmp_path, list(range(16_000)), files=8)
    assert len(FilePruning().narrowed(found, "k", 2000, 4000).files) == 1
    assert len(FilePruning().narrowed(found, "k", None, 1).files) == 1
    assert (
        len(FilePruning().narrowed(found, "k", 99_000, None).files) == 1
    )  # an empty range still needs a schema


def test_an_unknown_column_leaves_nothing_out(tmp_path):
    found = relation(tmp_path, list(range(100)), files=2)
    assert not outside(footer(found.scheme, found.files[0]), "other", "int", 1e9, None)
