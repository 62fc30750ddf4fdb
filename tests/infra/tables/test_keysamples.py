"""Samples of join keys: where they may be drawn from, and what is left out of them."""

from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.protocols import Relation
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import parquet as tables
from ebbflow.infra.tables.keysamples import ROWS, samples_of_keys


def written(folder: Path, columns: dict[str, pa.Array], group: int = 10**6) -> Relation:
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "t.parquet", row_group_size=group)
    (found,) = tables.discover(StorageLocation(folder))
    return found


def test_whole_numbers_and_dates_without_nulls(tmp_path: Path) -> None:
    columns = {
        "a": pa.array([1, None, 3], pa.int32()),
        "d": pa.array([date(2026, 1, 1), None, None]),
        "t": pa.array(["x", "y", "z"]),
        "f": pa.array([1.0, 2.0, 3.0]),
    }
    relation = written(tmp_path / "small", columns)
    found = samples_of_keys(relation, ["a", "d", "t", "f", "no such column"])
    assert found == {"a": (1, 3), "d": (date(2026, 1, 1),)}


@pytest.mark.parametrize("sorted_by_it", [False, True])
def test_what_lies_in_the_order_of_a_key_is_no_sample_of_it(tmp_path: Path, sorted_by_it: bool) -> None:
    count = 400_000
    key = range(count) if sorted_by_it else ((n * 7919) % count for n in range(count))
    relation = written(tmp_path / "large", {"k": pa.array(key, pa.int64())}, group=20_000)
    found = samples_of_keys(relation, ["k"])
    assert bool(found) is not sorted_by_it
    if found:
        assert len(found["k"]) >= ROWS
        assert len(set(found["k"])) == len(found["k"])


def test_files_that_are_gone_have_no_samples(tmp_path: Path) -> None:
    relation = written(tmp_path / "gone", {"k": pa.array([1, 2, 3])})
    (tmp_path / "gone" / "t.parquet").unlink()
    assert samples_of_keys(relation, ["k"]) == {}
