"""Damage in a store between two runs: the answer is right, and what is damaged is computed again."""

import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from ebbflow.infra.errors import StageFailedError
from ebbflow.infra.protocols import StageJob
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.storage.checksums import sealed, unsealed
from ebbflow.infra.storage.places import StorageLocation
from tests.damaged_store import Store, computed
from tests.flips import KINDS, apply, choose
from tests.tasks.driving import Scripted, fp_of

FLIPS = 48


@pytest.fixture(name="engine", scope="module")
def _engine() -> Iterator[Scripted]:
    engine = Scripted()
    yield engine
    engine.close()


@pytest.fixture(name="store")
def _store(tmp_path: Path, engine: Scripted) -> Store:
    engine.before = lambda *_: None
    return Store(tmp_path, engine)


def test_no_flipped_byte_gives_a_wrong_answer_and_what_is_damaged_is_computed_again(store: Store) -> None:
    rng, made = random.Random(19), Counter[tuple[str, bool]]()
    for number in range(FLIPS):
        kind, read = KINDS[number % len(KINDS)], number // len(KINDS) % 2 == 0
        target = rng.choice((store.sink, store.inner)) if read else store.inner
        flip = choose(rng, kind, store.folder, target)
        store.ride.listener.notes.clear()
        if read and target == store.inner:
            store.manifest(store.sink).unlink()  # the answer is computed from what is below it
        whole = {path: path.read_bytes() for path in (flip.path, store.manifest(target))}
        apply(flip)
        driver, rows = store.run()
        assert rows == store.rows, flip
        assert computed(driver) >= {target} if read else computed(driver) == set(), flip
        if not read:  # it is found as soon as anybody asks for it
            assert ParquetCheckpointStore(StorageLocation(store.folder)).find(target) is None, flip
            for path, data in whole.items():
                path.write_bytes(data)
            made[kind, read] += 1
            continue
        said = [note for note in store.ride.listener.notes if "it is not used" in note]
        assert len(said) == 1, flip
        assert target[:16] in said[0], flip
        made[kind, read] += 1
    assert min(made.values()) >= FLIPS // 8 - 1
    assert len(made) == 8


def _truncated(store: Store) -> str:
    part = store.part(store.inner)
    part.write_bytes(part.read_bytes()[:-20])
    return "bytes, not"


def _torn(store: Store) -> str:
    """As after a power cut: the file's length is there, its last blocks are not."""
    part = store.part(store.inner)
    data = part.read_bytes()
    part.write_bytes(data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
    return "with the checksum"


def _gone(store: Store) -> str:
    store.part(store.inner).unlink()
    return "lacks its file"


def _swapped(store: Store) -> str:
    """Another checkpoint's file, which is a good one of the same size, in the place of ours."""
    part = store.part(store.inner)
    table = pq.read_table(part)
    other = part.with_name("other")
    pq.write_table(table.slice(0, table.num_rows).take(list(reversed(range(table.num_rows)))), other)
    other.write_bytes(other.read_bytes()[: part.stat().st_size].ljust(part.stat().st_size, b"\0"))
    other.replace(part)
    return "with the checksum"


def _of_another(store: Store) -> str:
    shutil.copy(store.manifest(store.sink), store.manifest(store.inner))
    return "another fingerprint"


def _points_at_another(store: Store) -> str:
    """A manifest with a right checksum whose files are another checkpoint's."""
    said, other = (unsealed(store.manifest(fp).read_bytes()) for fp in (store.inner, store.sink))
    store.manifest(store.inner).write_bytes(sealed(said | {"data": other["data"]}))
    return "points outside its own data directory"


def _half_a_manifest(store: Store) -> str:
    path = store.manifest(store.inner)
    path.write_bytes(path.read_bytes()[:-40])
    return "damaged manifest"


DAMAGES = (_truncated, _torn, _gone, _swapped, _of_another, _points_at_another, _half_a_manifest)


@pytest.mark.parametrize("damage", DAMAGES, ids=[one.__name__.strip("_") for one in DAMAGES])
def test_damage_of_other_kinds_is_set_aside_named_and_computed_again(
    store: Store, damage: Callable[[Store], str]
) -> None:
    why = damage(store)
    store.manifest(store.sink).unlink()
    driver, rows = store.run()
    assert rows == store.rows
    assert store.inner in computed(driver)
    assert any(store.inner[:16] in note and why in note for note in store.ride.listener.notes)
    assert any("was set aside as damaged/" in note for note in driver.recorder.notes)
    assert store.set_aside(store.inner) == 1
    driver, rows = store.run()
    assert (rows, computed(driver), driver.recorder.notes) == (store.rows, set(), [])


def test_files_exchanged_between_two_checkpoints_of_the_same_size_are_both_computed_again(
    store: Store,
) -> None:
    one, other = store.part(store.inner), store.part(store.sink)
    first, second = one.read_bytes(), other.read_bytes()
    for path, fingerprint, data in ((one, store.inner, second), (other, store.sink, first)):
        path.write_bytes(data)
        said = unsealed(store.manifest(fingerprint).read_bytes())
        said["files"][0]["size"] = said["bytes"] = len(data)  # as if both had had the same size
        store.manifest(fingerprint).write_bytes(sealed(said))
    driver, rows = store.run()
    assert rows == store.rows
    assert computed(driver) >= {store.inner, store.sink}


def test_what_breaks_after_it_was_verified_is_found_when_a_stage_fails_on_it(
    store: Store, engine: Scripted
) -> None:
    store.manifest(store.sink).unlink()

    def break_it(job: StageJob, before: int, _: Any) -> None:
        if fp_of(job) == store.sink[:12] and store.set_aside(store.inner) == 0:
            part = store.part(store.inner)
            data = part.read_bytes()
            part.write_bytes(data[:4] + bytes(len(data) - 8) + data[-4:])
            raise StageFailedError("it cannot be read")

    engine.before = break_it
    driver, rows = store.run()
    assert rows == store.rows
    assert computed(driver) == {store.inner, store.sink}
    assert any("has lost what it reads" in note for note in driver.recorder.notes)


def test_a_stage_whose_inputs_are_whole_fails_with_its_own_error(store: Store, engine: Scripted) -> None:
    store.manifest(store.sink).unlink()

    def fail(job: StageJob, *_: Any) -> None:
        raise StageFailedError("division by zero")

    engine.before = fail
    with pytest.raises(StageFailedError, match="division by zero"):
        store.run()
    assert store.set_aside(store.inner) == 0
