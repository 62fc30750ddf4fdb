import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.query.slices import SliceIndex, covers, together
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.storage.places import StorageLocation

FP = "ab" * 16
KEY = "t.k|10,20,30"
SOURCES = {"t": "1"}


@pytest.fixture
def store(tmp_path):
    return ParquetCheckpointStore(StorageLocation(tmp_path / "store"))


def index(store):
    return SliceIndex(store, store.cache("slices"))


def slice_of(store, fingerprint, values):
    attempt = store.begin(fingerprint)
    pq.write_table(pa.table({"k": values}), attempt.place.uri.removeprefix("file://") + "/part.parquet")
    return store.commit(attempt, rows=len(values), columns=[("k", "bigint")], seconds=1.5, sources=SOURCES)


def fill(store, *cells):
    noted = index(store)
    for first, last in cells:
        fingerprint = f"{first:02x}{last:02x}" * 8
        slice_of(store, fingerprint, list(range(first * 10, last * 10)))
        noted.add(FP, KEY, (first, last), fingerprint)


def test_slices_are_found_by_another_process_and_make_up_the_whole(store):
    fill(store, (0, 2), (2, 3))
    assert not covers(index(store).find(FP, KEY, SOURCES), 4)
    fill(store, (3, 4))
    found = index(store).find(FP, KEY, SOURCES)
    assert covers(found, 4)
    whole = together(FP, found)
    assert (whole.fingerprint, whole.rows, whole.relation.name) == (FP, 40, f"ckpt_{FP}")
    assert whole.seconds == 4.5
    values = [
        v
        for f in whole.relation.files
        for v in pq.read_table("/" + f.path.lstrip("/")).column("k").to_pylist()
    ]
    assert sorted(values) == list(range(40))


def test_overlapping_slices_are_not_used_together(store):
    fill(store, (0, 2), (1, 3), (2, 4))
    assert sorted(index(store).find(FP, KEY, SOURCES)) == [(0, 2), (2, 4)]


def test_a_slice_that_lost_a_file_is_forgotten(store, tmp_path):
    fill(store, (0, 2), (2, 4))
    next((tmp_path / "store" / "data" / ("0002" * 8)).rglob("*.parquet")).unlink()
    assert sorted(index(store).find(FP, KEY, SOURCES)) == [(2, 4)]


def test_slices_of_another_table_version_or_division_are_not_used(store):
    fill(store, (0, 4))
    assert index(store).find(FP, KEY, {"t": "2"}) == {}
    assert index(store).find(FP, "t.k|10,20,31", SOURCES) == {}
    assert index(store).find("cd" * 16, KEY, SOURCES) == {}


def test_divisions_are_named(store):
    fill(store, (0, 4))
    assert index(store).divisions(FP) == ("t.k",)
    assert index(store).divisions("cd" * 16) == ()


def test_of_the_stages_asked_for_those_with_slices_are_found(store):
    assert index(store).begun({FP}) == {}
    fill(store, (0, 4))
    index(store).add("cd" * 16, "t.j|5", (0, 1), "cd" * 16)
    assert index(store).begun({FP, "ef" * 16}) == {FP: "t.k"}


def test_slices_that_are_added_at_the_same_moment_are_all_kept(store, monkeypatch):
    """Two processes: each has looked before the other has written."""
    both = threading.Barrier(2)
    put = JsonStore.put

    def late(cache, key, value):
        both.wait(150)
        put(cache, key, value)

    monkeypatch.setattr(JsonStore, "put", late)
    for first in (0, 2):
        slice_of(store, f"{first:02x}{first + 2:02x}" * 8, [first])
    adding = [
        threading.Thread(target=index(store).add, args=(FP, KEY, (n, n + 2), f"{n:02x}{n + 2:02x}" * 8))
        for n in (0, 2)
    ]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join(150)
    assert sorted(index(store).find(FP, KEY, SOURCES)) == [(0, 2), (2, 4)]


def test_the_index_of_a_store_on_s3_is_found(s3):
    store = ParquetCheckpointStore(StorageLocation(f"{s3()}/store"))
    index(store).add(FP, KEY, (0, 2), "ab" * 16)
    index(store).add(FP, "t.k|5", (0, 1), "cd" * 16)
    index(store).add("cd" * 16, "t.j|5", (0, 1), "cd" * 16)
    assert index(store).divisions(FP) == ("t.k",)
    assert index(store).divisions("cd" * 16) == ("t.j",)
    assert index(store).divisions("ef" * 16) == ()
    assert index(store).begun({FP, "ef" * 16}) == {FP: "t.k"}


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        7,
        {KEY: [[0, 2, "ab"]]},
        [KEY, 0, 2],
        [KEY, 2, 0, "ab"],
        [KEY, "0", 2, "ab"],
        [KEY, 0, 2, 5],
        [KEY, 0, 2, "no hexadecimal"],
        [7, 0, 2, "ab"],
    ],
)
def test_a_damaged_index_reads_as_empty(store, damaged):
    store.cache("slices").under(FP).put(f"{KEY}|0-2", damaged)
    assert index(store).find(FP, KEY, SOURCES) == {}


def test_a_torn_entry_hides_no_other(store):
    fill(store, (0, 2), (2, 4))
    entries = store.cache("slices").under(FP)
    Path(entries.file(f"{KEY}|0-2")).write_bytes(b"{")
    assert sorted(index(store).find(FP, KEY, SOURCES)) == [(2, 4)]
