"""Samples of join keys: where they may be drawn from, and what is left out of them."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.protocols import Relation
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import keysamples
from ebbflow.infra.tables import parquet as tables
from ebbflow.infra.tables.keysamples import ROWS, samples_of_keys


def written(folder: Path, parts: Sequence[pa.Table], group: int = 10**6) -> Relation:
    (folder / "t").mkdir(parents=True)
    for number, part in enumerate(parts):
        pq.write_table(part, folder / "t" / f"part-{number}.parquet", row_group_size=group)
    (found,) = tables.discover(StorageLocation(folder))
    return found


def keys(values: object) -> pa.Table:
    return pa.table({"k": pa.array(values, pa.int64())})


def test_whole_numbers_and_dates_without_nulls(tmp_path: Path) -> None:
    columns = {
        "a": pa.array([1, None, 3], pa.int32()),
        "d": pa.array([date(1970, 1, 11), None, None]),
        "far": pa.array([-800_000, 3_000_000, 2**31 - 1], pa.int32()).cast(pa.date32()),
        "t": pa.array(["x", "y", "z"]),
        "f": pa.array([1.0, 2.0, 3.0]),
    }
    relation = written(tmp_path, [pa.table(columns)])
    found = samples_of_keys(relation, ["a", "d", "far", "t", "f", "no such column"])
    assert found == {"a": (1, 3), "d": (10,), "far": (-800_000, 3_000_000, 2**31 - 1)}


@pytest.mark.parametrize("sorted_by_it", [False, True])
@pytest.mark.parametrize("group", [200_000, 10**6], ids=["groups", "one group"])
def test_what_lies_in_the_order_of_a_key_is_no_sample_of_it(
    tmp_path: Path, sorted_by_it: bool, group: int
) -> None:
    count = 600_000
    order = np.arange(count) if sorted_by_it else np.random.default_rng(1).permutation(count)
    relation = written(tmp_path, [keys(order)], group)
    found = samples_of_keys(relation, ["k"])
    assert bool(found) == (not sorted_by_it and group < count), (
        "of one large group only the first rows are read"
    )
    if found:
        assert ROWS <= len(found["k"]) <= ROWS + 3
        assert len(set(found["k"])) == len(found["k"])


def test_parts_by_a_hash_of_the_key_have_a_share_each(tmp_path: Path) -> None:
    values = np.random.default_rng(1).permutation(400_000)
    relation = written(tmp_path, [keys(values[values % 16 == part]) for part in range(16)])
    found = np.array(samples_of_keys(relation, ["k"])["k"])
    assert np.bincount(found % 16).tolist() == [ROWS // 16] * 16


def test_of_more_files_than_are_read_there_is_no_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keysamples, "MOST_GROUPS", 2)
    relation = written(tmp_path, [keys(range(5))] * 5)
    assert len(samples_of_keys(relation, ["k"])["k"]) == 25
    monkeypatch.setattr(keysamples, "_MOST_FILES", 4)
    assert samples_of_keys(relation, ["k"]) == {}


def test_files_that_cannot_be_read_have_no_samples(tmp_path: Path) -> None:
    relation = written(tmp_path, [keys(range(3))])
    (tmp_path / "t" / "part-0.parquet").write_bytes(b"PAR1 no more")
    assert samples_of_keys(relation, ["k"]) == {}
