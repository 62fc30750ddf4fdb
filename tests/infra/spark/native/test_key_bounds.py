"""What footers say of the keys of a slice, and of the rows of another table that these can meet."""

import datetime as dt
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.protocols import Relation, TableLog
from ebbflow.infra.spark.native.objects import Rows
from ebbflow.infra.spark.native.slices import Cut, KeyBounds, cuts
from ebbflow.infra.spark.native.worker import KeyRange
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables.parquet import discover


@pytest.fixture
def relation(tmp_path: Path) -> Relation:
    days = [dt.date(2026, 1, 1) + dt.timedelta(n) for n in range(100)]
    holes = [None if n == 95 else n for n in range(100)]
    texts = [str(n) for n in range(100)]
    table = pa.table({"k": range(100), "d": days, "h": holes, "s": texts, "w": [n % 7 for n in range(100)]})
    (tmp_path / "t").mkdir()
    pq.write_table(table, tmp_path / "t" / "a.parquet", row_group_size=10)
    (found,) = discover(StorageLocation(str(tmp_path)))
    return found


def test_a_slices_range_is_that_of_its_row_groups(relation: Relation) -> None:
    found = cuts(relation, 2)
    bounds = KeyBounds(relation, "k")
    assert [bounds.of(cut) for cut in found] == [(0, 49), (50, 99)]
    assert KeyBounds(relation, "d").of(found[1]) == (dt.date(2026, 2, 20), dt.date(2026, 4, 10))
    assert bounds.of(Cut(relation.files)) == (0, 99)
    assert bounds.share(0, 49) == 0.5
    assert bounds.share(45, 55) == 0.2
    assert bounds.share(200, 300) == 0.0
    assert KeyBounds(relation, "w").share(0, 0) == 1.0


@given(st.data())
def test_a_share_counts_the_row_groups_that_may_have_values_of_a_range(data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(-9, 9) | st.none(), min_size=1, max_size=30))
    low, high = sorted(data.draw(st.tuples(st.integers(-10, 10), st.integers(-10, 10))))
    with TemporaryDirectory() as folder:
        Path(folder, "t").mkdir()
        table = pa.table({"k": pa.array(values, pa.int64())})
        pq.write_table(table, f"{folder}/t/a.parquet", row_group_size=3)
        (relation,) = discover(StorageLocation(folder))
        bounds = KeyBounds(relation, "k")
        groups = [values[n : n + 3] for n in range(0, len(values), 3)]
        slices = cuts(relation, len(groups))
    found = [(len(group), [value for value in group if value is not None]) for group in groups]
    read = sum(rows for rows, some in found if not some or (min(some) <= high and max(some) >= low))
    assert bounds.share(low, high) == read / len(values)
    if len(slices) == len(groups):
        wanted = [None if None in some else (min(some), max(some)) for some in groups]  # type: ignore[type-var]
        assert [bounds.of(cut) for cut in slices] == wanted


def test_what_is_not_known_narrows_nothing(relation: Relation) -> None:
    first, second = cuts(relation, 2)
    holes = KeyBounds(relation, "h")
    assert holes.of(first) == (0, 49)
    assert holes.of(second) is None, "one of its keys is null"
    assert KeyBounds(relation, "s").of(first) is None, "texts may be cut in footers"
    assert KeyBounds(relation, "gone").of(first) is None
    assert KeyBounds(relation, "k").of(Cut((), (Rows("/elsewhere.parquet", 0, 9),))) is None
    assert KeyBounds(relation, "gone").share(1, 2) == 1.0


def test_columns_by_number_are_not_looked_up_by_the_name_of_another(relation: Relation) -> None:
    path = relation.files[0].path
    renamed = TableLog("Delta Lake", path, "1", stored=(("key", "k"), ("k", "w")))
    mapped = replace(relation, columns=(("key", "bigint"), ("k", "bigint")), log=renamed)
    assert KeyBounds(mapped, "key").of(Cut(relation.files)) == (0, 99)
    assert KeyBounds(mapped, "k").of(Cut(relation.files)) == (0, 6)
    numbered = replace(mapped, log=TableLog("Iceberg", path, "1", ids=(("key", 1), ("k", 2))))
    assert KeyBounds(numbered, "k").of(Cut(relation.files)) is None
    assert KeyBounds(numbered, "k").share(0, 1) == 1.0


def test_a_range_is_a_condition() -> None:
    assert KeyRange("t", 'a"b', -3, 4).test == '"a""b" BETWEEN -3 AND 4'
    assert KeyRange("t", "d", dt.date(2026, 1, 2), dt.date(2026, 1, 3)).test == (
        "\"d\" BETWEEN DATE '2026-01-02' AND DATE '2026-01-03'"
    )
