"""What a store does to itself: it collects what is not worth keeping, and caches values."""

import threading
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.errors import StorageError
from ebbflow.infra.query.checkpoints import JsonStore, ParquetCheckpointStore
from ebbflow.infra.storage.checksums import sealed
from ebbflow.infra.storage.filesystems import split
from ebbflow.infra.storage.places import StorageLocation
from tests.infra.stored import COLUMNS, DAY, FP, OTHER, edit, save, table, write

# --- collecting -------------------------------------------------------------------------------------------


def test_collecting_deletes_the_least_recently_used_first_and_never_what_is_kept(
    tmp_path: Path, clock: Any
) -> None:
    store = ParquetCheckpointStore(StorageLocation(tmp_path), clock)
    names = [f"{i:032x}" for i in range(4)]
    made = {}
    for name in names:
        made[name] = save(store, fp=name)
        store.find(name)
        clock.sleep(10)
    store.find(names[0])  # now the most recently used
    size = made[names[0]].bytes

    freed = store.collect(2 * size, keep=frozenset({names[1]}))

    assert freed == 2 * size
    assert [c.fingerprint for c in store.checkpoints()] == [names[0], names[1]]
    assert not Path(split(made[names[2]].uri)[1]).exists()
    assert store.collect(2 * size) == 0
    assert store.problems() == []


def test_collecting_works_on_s3(s3: Any) -> None:
    store = ParquetCheckpointStore(StorageLocation(f"{s3()}/store"))
    kept, other = save(store, fp=FP), save(store, fp=OTHER)
    assert store.collect(0, keep=frozenset({FP})) == other.bytes
    assert store.checkpoints() == [kept]
    assert store.problems() == []


def test_attempts_abandoned_for_over_a_day_are_deleted_and_younger_ones_are_not(
    place: str, clock: Any
) -> None:
    store = ParquetCheckpointStore(StorageLocation(place), clock)
    done = save(store, fp=OTHER)
    attempt = store.begin(FP)
    write(attempt, table(100))

    assert store.collect(1 << 30) == 0
    clock.sleep(DAY + 60)
    assert store.collect(1 << 30) > 0
    assert store.collect(1 << 30) == 0
    with pytest.raises(StorageError):
        store.commit(attempt, rows=100, columns=COLUMNS, seconds=1, sources={})
    assert store.find(OTHER) == done


def test_damaged_checkpoints_go_after_a_day_but_those_of_another_version_stay(
    tmp_path: Path, clock: Any
) -> None:
    store = ParquetCheckpointStore(StorageLocation(tmp_path), clock)
    newer = save(store)
    edit(store, version=3)
    damaged = save(store, fp=OTHER)
    Path(damaged.relation.files[0].path).write_bytes(b"PAR1")

    assert store.collect(0) == 0
    clock.sleep(DAY + 60)
    store.collect(0)
    assert Path(newer.relation.files[0].path).exists()
    assert not Path(split(damaged.uri)[1]).exists()
    assert not (tmp_path / "manifests" / f"{OTHER}.json").exists()


def test_tidying_is_due_once_an_hour_after_much_was_written_and_for_another_budget(
    tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ParquetCheckpointStore(StorageLocation(tmp_path), clock)
    looked: list[int] = []
    monkeypatch.setattr(store, "collect", lambda budget, keep: looked.append(budget))

    def due(budget: int, written: int) -> bool:
        before = len(looked)
        store.tidy(budget, written)
        return len(looked) > before

    assert due(1_000, 0)
    assert not due(1_000, 49)
    assert due(1_000, 1)  # 50 bytes since then: the twentieth part
    assert not due(1_000, 49)
    clock.sleep(3_599)
    assert not due(1_000, 0)
    clock.sleep(1)
    assert due(1_000, 0)
    assert due(500, 0)
    clock.time -= 7_200  # it was set back
    assert due(1_000, 0)


# --- the JSON cache ---------------------------------------------------------------------------------------


def test_json_values_come_back_and_others_are_missing(place: str) -> None:
    cache = JsonStore(StorageLocation(place))
    assert cache.get("a") is None
    cache.put("a", {"x": [1, 2.5, None, "é"]})
    cache.put("../b/c", 7)
    assert JsonStore(StorageLocation(place)).get("a") == {"x": [1, 2.5, None, "é"]}
    assert cache.get("../b/c") == 7
    cache.put("a", 1)
    assert cache.get("a") == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"key": "a", "value": 1}',
        sealed({"key": "b", "value": 1}),
        sealed({"value": 1}),
    ],
)
def test_corrupt_json_entries_read_as_missing(tmp_path: Path, content: bytes) -> None:
    cache = JsonStore(StorageLocation(tmp_path))
    cache.put("a", 1)
    Path(cache.file("a")).write_bytes(content)
    assert cache.get("a") is None


def test_readers_of_a_json_value_never_see_a_part_of_it(tmp_path: Path) -> None:
    cache = JsonStore(StorageLocation(tmp_path))
    cache.put("a", ["x"] * 5_000)
    stop = threading.Event()
    seen: list[Any] = []

    def read() -> None:
        while not stop.is_set():
            seen.append(cache.get("a"))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for i in range(100):
        cache.put("a", ["xy"[i % 2]] * 5_000)
    stop.set()
    for reader in readers:
        reader.join(150)
    assert seen
    assert all(value in (["x"] * 5_000, ["y"] * 5_000) for value in seen)
    assert [p.name for p in tmp_path.iterdir()] == [Path(cache.file("a")).name]
