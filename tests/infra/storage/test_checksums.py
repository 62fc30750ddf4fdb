"""Checksums of files and JSON texts, and the caches beside checkpoints: no changed byte is taken for good."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.query.slices import SliceIndex
from ebbflow.infra.spark.checksums import LARGEST, by_executors
from ebbflow.infra.storage import checksums
from ebbflow.infra.storage.files import FileEntry
from ebbflow.infra.storage.filesystems import resolve
from ebbflow.infra.storage.jsonstore import JsonStore
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.tables import sampling
from ebbflow.infra.tables.parquet import discover
from ebbflow.infra.tables.sampling import Sample
from tests.infra.stored import FP, OTHER, edit, put, save

GIB = 2**30


def test_a_files_checksum_is_xxh64_with_sparks_seed_wherever_the_file_is(place: str) -> None:
    assert checksums.of_bytes(b"abc") == "13c1d910702770e6"  # select hex(xxhash64('abc'))
    fs, folder = resolve(place)
    fs.create_dir(folder)
    for size in (0, 1, (1 << 20) - 1, 1 << 20, (1 << 23) + 17):
        data = random.Random(size).randbytes(size)
        put(f"{place}/{size}", data)
        scheme = "s3" if place.startswith("s3") else "file"
        entries = [FileEntry(resolve(f"{place}/{size}")[1], size, 0.0)]
        assert checksums.of_files(scheme, entries) == [checksums.of_bytes(data)]
        assert checksums.of_place(StorageLocation(f"{place}/{size}")) == checksums.of_bytes(data)
    assert not checksums.is_same(StorageLocation(f"{place}/none"), checksums.of_bytes(b""))


@pytest.mark.parametrize("indent", [None, 1])
def test_a_sealed_text_is_json_and_no_byte_of_it_can_change(indent: int | None) -> None:
    content = {"a": [1, 2.5, None, "é\n"], "b": {"checksum": "x"}}
    data = checksums.sealed(content, indent)
    assert checksums.unsealed(data) == content
    for at in range(len(data)):
        for mask in (1, 0x20, 0x80):
            with pytest.raises(checksums.DamagedError):
                checksums.unsealed(data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])
    for at in range(len(data)):
        with pytest.raises(checksums.DamagedError):
            checksums.unsealed(data[:at])
    with pytest.raises(checksums.DamagedError):
        checksums.unsealed(data + b"\n")


def test_a_flipped_byte_of_a_cached_value_makes_it_missing(tmp_path: Path) -> None:
    cache = JsonStore(StorageLocation(tmp_path))
    cache.put("k", {"rows": 12})
    path = Path(cache.file("k"))
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert cache.get("k") is None
        assert cache.values() == []
    path.write_bytes(whole)
    assert (cache.get("k"), cache.values()) == ({"rows": 12}, [{"rows": 12}])


def test_a_flipped_byte_of_a_kept_sample_makes_it_drawn_again(tmp_path: Path) -> None:
    (tmp_path / "t").mkdir()
    pq.write_table(pa.table({"a": list(range(50))}), tmp_path / "t/t.parquet")
    (relation,) = discover(StorageLocation(tmp_path / "t"))
    cache = JsonStore(StorageLocation(tmp_path / "cache"))
    sampling.keep(relation, Sample(pa.table({"a": list(range(50))}), 50, ()), cache, 100)
    (path,) = (tmp_path / "cache").glob("*.sample")
    whole = path.read_bytes()
    for at in range(0, len(whole), 5):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        sampling._memory.clear()
        assert sampling.kept(relation, cache, 100, ["a"]).table["a"].to_pylist() == list(range(50))
        assert path.read_bytes() == whole  # it was kept anew


def test_a_damaged_slice_is_no_slice_and_the_others_stay(tmp_path: Path) -> None:
    store = ParquetCheckpointStore(StorageLocation(tmp_path / "store"))
    index = SliceIndex(store, store.cache("slices"))
    for cells, fp in (((0, 2), FP), ((2, 4), OTHER)):
        save(store, fp=fp)
        index.add("e" * 32, "by k", cells, fp)
    path = Path(store.checkpoints()[0].relation.files[0].path)
    data = path.read_bytes()
    path.write_bytes(data[:30] + bytes([data[30] ^ 1]) + data[31:])

    fresh = ParquetCheckpointStore(StorageLocation(tmp_path / "store"))
    found = SliceIndex(fresh, fresh.cache("slices")).find("e" * 32, "by k", {})
    assert list(found) == [(2, 4)]
    assert len(fresh.problems()) == 1


def test_listing_and_tidying_a_store_hash_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(ParquetCheckpointStore(StorageLocation(tmp_path)))
    hashed: list[str] = []
    of_file = checksums.of_file
    monkeypatch.setattr(checksums, "of_file", lambda *a: hashed.append(a[1]) or of_file(*a))
    store = ParquetCheckpointStore(StorageLocation(tmp_path))
    (found,) = store.checkpoints()
    assert store.find(FP, verified=False) == found
    store.collect(1 << 30)
    assert hashed == []
    for _ in range(3):
        assert store.find(FP) == found
        assert store.verify(found)
    assert hashed == [found.relation.files[0].path]
    assert store.verify(found, anew=True)
    assert len(hashed) == 2


def test_what_was_just_written_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    of_file = checksums.of_file
    monkeypatch.setattr(checksums, "of_file", lambda *a: hashed.append(a[1]) or of_file(*a))
    store = ParquetCheckpointStore(StorageLocation(tmp_path))
    done = save(store)
    assert store.find(FP) == done
    assert len(hashed) == 1


def test_a_damaged_manifest_is_not_set_aside_once_another_has_taken_its_place(tmp_path: Path) -> None:
    one, other = (
        ParquetCheckpointStore(StorageLocation(tmp_path)),
        ParquetCheckpointStore(StorageLocation(tmp_path)),
    )
    old = save(one)
    path = Path(old.relation.files[0].path)
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    (tmp_path / "manifests" / f"{FP}.json").unlink()
    new = save(other)  # by another process, in the meantime
    assert not one.verify(old, anew=True)
    assert other.find(FP) == new
    assert not (tmp_path / "damaged").exists()
    assert "set aside" not in one.problems()[0]


def test_what_was_set_aside_is_kept_for_a_day(tmp_path: Path, clock: Any) -> None:
    store = ParquetCheckpointStore(StorageLocation(tmp_path), clock)
    save(store)
    edit(store, seconds="long")
    assert store.find(FP) is None
    store.collect(1 << 30)
    assert len(list((tmp_path / "damaged").iterdir())) == 1
    assert store.checkpoints() == []
    assert len(store.problems()) == 1
    clock.sleep(90_000.0)
    store.collect(1 << 30)
    assert list((tmp_path / "damaged").iterdir()) == []
    assert list((tmp_path / "data").iterdir()) == []


def test_a_file_on_a_part_of_a_disk_that_cannot_be_read_is_damaged_and_a_lost_network_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    from ebbflow.infra.errors import StorageError

    save(ParquetCheckpointStore(StorageLocation(tmp_path)))

    def fail(error: OSError) -> ParquetCheckpointStore:
        def of_file(scheme: str, path: str) -> str:
            raise error

        monkeypatch.setattr(checksums, "of_file", of_file)
        return ParquetCheckpointStore(StorageLocation(tmp_path))

    with pytest.raises(StorageError, match="timed out"):
        fail(OSError(errno.ETIMEDOUT, "timed out")).find(FP)
    store = fail(OSError(errno.EIO, "Input/output error"))
    assert store.find(FP) is None
    assert "cannot be read" in store.problems()[0]


def test_executors_hash_what_they_read_sooner_than_the_driver_could() -> None:
    def files(gib: float) -> list[FileEntry]:
        return [FileEntry("f", int(gib * GIB), 0.0)]

    assert not by_executors(files(100), 64, near=True)  # this machine's own disk
    assert not by_executors(files(0.1), 64, near=False)  # starting a job takes longer
    assert by_executors(files(1), 64, near=False)
    assert not by_executors(files(100), 4, near=False)  # few cores
    assert not by_executors([], 64, near=False)
    assert LARGEST < GIB
