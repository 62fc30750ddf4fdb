"""The checkpoint store's contract, on a folder and on S3, and what the world does to a store."""

import errno
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.errors import StorageError, StorageFullError
from ebbflow.infra.protocols import Attempt, Checkpoint
from ebbflow.infra.query.checkpoints import JsonStore, ParquetCheckpointStore
from ebbflow.infra.query.results import read_checkpoint
from ebbflow.infra.storage.filesystems import resolve, split
from ebbflow.infra.storage.places import StorageLocation
from tests.infra.stored import COLUMNS, DAY, FP, OTHER, edit, put, save, table, write

# --- the contract -----------------------------------------------------------------------------------------


def test_a_committed_checkpoint_is_found_with_all_it_was_committed_with(place: str) -> None:
    store = ParquetCheckpointStore(StorageLocation(place))
    attempt = store.begin(FP)
    write(attempt, table(3), table(4, start=3))
    done = store.commit(attempt, rows=7, columns=COLUMNS, seconds=2.5, sources={"t": "v1"})

    found = ParquetCheckpointStore(StorageLocation(place)).find(FP, {"t": "v1"})

    assert found == done
    assert found.relation.name == f"ckpt_{FP}"
    assert found.relation.columns == COLUMNS
    assert (found.rows, found.seconds, found.sources) == (7, 2.5, {"t": "v1"})
    assert found.bytes == sum(file.size for file in found.relation.files) > 0
    assert split(found.uri) == split(attempt.place.uri)
    assert read_checkpoint(found)["k"].to_pylist() == list(range(7))
    assert store.checkpoints() == [done]


def test_an_attempt_is_invisible_until_it_is_committed(place: str) -> None:
    store = ParquetCheckpointStore(StorageLocation(place))
    write(store.begin(FP), table(3))

    assert store.find(FP) is None
    assert store.checkpoints() == []
    assert store.problems() == []


def test_a_discarded_attempt_leaves_no_files_and_may_be_discarded_again(place: str) -> None:
    store = ParquetCheckpointStore(StorageLocation(place))
    attempt = store.begin(FP)
    write(attempt, table(3))
    store.discard(attempt)
    store.discard(attempt)

    fs, folder = resolve(attempt.place.uri)
    from pyarrow.fs import FileSelector

    assert fs.get_file_info(FileSelector(folder, allow_not_found=True)) == []


def test_an_attempt_that_is_still_written_to_is_left_for_the_collector(
    tmp_path: Path, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ParquetCheckpointStore(StorageLocation(tmp_path), clock)
    attempt = store.begin(FP)
    write(attempt, table(3))
    with monkeypatch.context() as patched:
        busy = OSError(errno.ENOTEMPTY, "Directory not empty")
        patched.setattr(shutil, "rmtree", Mock(side_effect=busy))
        store.discard(attempt)  # would hide the error for which it is discarded
    clock.sleep(DAY + 60)
    assert store.collect(1 << 30) > 0


def test_the_first_commit_of_a_fingerprint_wins_and_the_second_gets_it(place: str) -> None:
    store, rival = (
        ParquetCheckpointStore(StorageLocation(place)),
        ParquetCheckpointStore(StorageLocation(place)),
    )
    ours, theirs = store.begin(FP), rival.begin(FP)
    write(ours, table(3))
    write(theirs, table(3))
    first = store.commit(ours, rows=3, columns=COLUMNS, seconds=1, sources={})
    second = rival.commit(theirs, rows=3, columns=COLUMNS, seconds=9, sources={})

    assert second == first
    assert read_checkpoint(second).num_rows == 3


def test_rows_that_are_not_in_the_files_are_not_committed(place: str) -> None:
    store = ParquetCheckpointStore(StorageLocation(place))
    attempt = store.begin(FP)
    write(attempt, table(3))
    with pytest.raises(StorageError, match="should have 4 rows, its 1 files have 3"):
        store.commit(attempt, rows=4, columns=COLUMNS, seconds=1, sources={})
    with pytest.raises(StorageError, match=r"\['k', 'name'\]"):
        store.commit(attempt, rows=3, columns=(("k", "bigint"),), seconds=1, sources={})
    assert store.find(FP) is None


def test_a_file_that_is_not_parquet_is_not_committed(place: str) -> None:
    store = ParquetCheckpointStore(StorageLocation(place))
    attempt = store.begin(FP)
    put(f"{attempt.place.uri}/part-00000.parquet", b"PAR1 but not really")
    with pytest.raises(StorageError, match="part-00000"):
        store.commit(attempt, rows=0, columns=COLUMNS, seconds=1, sources={})


@pytest.mark.parametrize("written", [(), (table(0),), (table(0), table(0))])
def test_a_stage_without_rows_is_a_checkpoint_too(place: str, written: tuple[pa.Table, ...]) -> None:
    store = ParquetCheckpointStore(StorageLocation(place))
    attempt = store.begin(FP)
    write(attempt, *written)
    columns = (*COLUMNS, ("d", "decimal(15,2)")) if not written else COLUMNS
    done = store.commit(attempt, rows=0, columns=columns, seconds=1, sources={})

    assert done.rows == 0
    assert len(done.relation.files) == max(1, len(written))
    result = read_checkpoint(store.find(FP) or done)
    assert (result.num_rows, result.column_names) == (0, [name for name, _ in columns])


def test_what_engines_leave_beside_the_data_is_not_part_of_it(place: str) -> None:
    store = ParquetCheckpointStore(StorageLocation(place))
    attempt = store.begin(FP)
    write(attempt, table(3))
    for name in ("_SUCCESS", ".part-00000.parquet.crc", "_temporary/0/part-7.parquet"):
        fs, path = resolve(f"{attempt.place.uri}/{name}")
        fs.create_dir(path.rsplit("/", 1)[0], recursive=True)
        put(f"{attempt.place.uri}/{name}", b"")

    done = store.commit(attempt, rows=3, columns=COLUMNS, seconds=1, sources={})

    assert [file.path.rsplit("/", 1)[1] for file in done.relation.files] == ["part-00000.parquet"]


def test_parts_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    store = ParquetCheckpointStore(StorageLocation(tmp_path))
    attempt = store.begin(FP)
    for number in (10, 2, 1):
        pq.write_table(table(1, start=number), f"{attempt.place.root}/data_{number}.parquet")
    done = store.commit(attempt, rows=3, columns=COLUMNS, seconds=1, sources={})
    assert read_checkpoint(done)["k"].to_pylist() == [1, 2, 10]


def test_other_source_versions_make_a_checkpoint_stale_and_a_new_commit_replaces_it(place: str) -> None:
    store = ParquetCheckpointStore(StorageLocation(place))
    save(store, rows=5, lineitem="v1", orders="v1")

    assert store.find(FP, {"lineitem": "v2", "orders": "v1"}) is None
    assert "other versions of lineitem" in store.problems()[0]
    fresh = save(store, rows=6, lineitem="v2", orders="v1")

    assert store.find(FP, {"lineitem": "v2", "orders": "v1"}) == fresh
    assert fresh.rows == 6


def test_a_fingerprint_is_hexadecimal_so_that_it_cannot_leave_the_store(place: str) -> None:
    store = ParquetCheckpointStore(StorageLocation(place))
    for bad in ("", "../../etc", "AB12", "abc/def", "xyz", "a" * 129):
        with pytest.raises(StorageError, match="hex"):
            store.begin(bad)
        with pytest.raises(StorageError, match="hex"):
            store.find(bad)


def test_an_attempt_of_another_place_is_refused(place: str, tmp_path: Path) -> None:
    store = ParquetCheckpointStore(StorageLocation(place))
    real = store.begin(FP)
    for forged in (
        Attempt(FP, real.id, StorageLocation(f"file://{tmp_path}/elsewhere")),
        Attempt(FP, "..", real.place),
        Attempt(OTHER, real.id, real.place),
    ):
        with pytest.raises(StorageError, match="was not begun"):
            store.commit(forged, rows=0, columns=COLUMNS, seconds=1, sources={})
        with pytest.raises(StorageError, match="was not begun"):
            store.discard(forged)


# --- damage -----------------------------------------------------------------------------------------------


OUTSIDE = "data/../../elsewhere"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": 3}, "version 3"),
        ({"version": None}, "version None"),
        ({"fingerprint": OTHER}, "another fingerprint"),
        ({"data": OUTSIDE}, "outside"),
        ({"data": "/etc"}, "outside"),
        ({"data": f"data/{OTHER}/1700000000000-1-0123456789ab"}, "outside"),
        ({"data": 7}, "outside"),
        ({"files": [{"name": "../../x.parquet", "size": 1, "rows": 1}]}, "outside"),
        ({"files": [{"name": "x.parquet", "size": -1, "rows": 1}]}, "whole numbers"),
        ({"files": [{"name": "x.parquet", "size": 1, "rows": 1}]}, "checksum None"),
        ({"files": "x"}, "list of files"),
        ({"files": [], "rows": 0, "bytes": 1}, "files sum to"),
        ({"columns": [["a"]]}, "column"),
        ({"columns": None}, "list of columns"),
        ({"rows": 6}, "files sum to 5"),
        ({"seconds": "long"}, "seconds"),
        ({"created": float("nan")}, "created"),
        ({"sources": ["t"]}, "sources"),
    ],
)
def test_a_manifest_that_breaks_a_rule_is_ignored_and_told_once(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    store = ParquetCheckpointStore(StorageLocation(tmp_path))
    save(store)
    edit(store, **changes)

    assert store.find(FP) is None
    assert store.find(FP) is None
    problems = store.problems()
    assert len(problems) == 1
    assert told in problems[0]
    assert store.problems() == []
    assert store.checkpoints() == []


def test_a_torn_manifest_is_ignored_at_every_length_and_replaced_by_the_next_commit(tmp_path: Path) -> None:
    store = ParquetCheckpointStore(StorageLocation(tmp_path))
    save(store)
    manifest = tmp_path / "manifests" / f"{FP}.json"
    whole = manifest.read_bytes()
    for length in range(0, len(whole) - 2, 7):
        manifest.write_bytes(whole[:length])
        assert store.find(FP) is None, length
    manifest.write_bytes(b"\xff\xfe garbage")
    assert store.find(FP) is None
    assert save(store, rows=2) == store.find(FP)


def test_a_truncated_missing_or_overwritten_data_file_makes_the_checkpoint_invalid(place: str) -> None:
    store = ParquetCheckpointStore(StorageLocation(place))
    done = save(store)
    file = done.relation.files[0]
    fs = resolve(done.uri)[0]
    with fs.open_input_file(file.path) as source:
        whole = source.read()
    path = resolve(f"{place}/manifests/{FP}.json")[1]
    with fs.open_input_file(path) as source:
        manifest = source.read()

    def damaged(data: bytes | None) -> str:
        fs.delete_file(file.path)
        if data is not None:
            with fs.open_output_stream(file.path) as out:
                out.write(data)
        put(f"{place}/manifests/{FP}.json", manifest)  # what is damaged is set aside
        # as another process sees it
        fresh = ParquetCheckpointStore(StorageLocation(place))
        assert fresh.find(FP) is None
        return fresh.problems()[0]

    assert f"with {len(whole) - 1} bytes" in damaged(whole[:-1])
    assert "with the checksum" in damaged(b"\0" * len(whole))
    assert "with the checksum" in damaged(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
    assert "lacks its file" in damaged(None)


def test_unknown_files_are_ignored_and_told_once(place: str) -> None:
    store = ParquetCheckpointStore(StorageLocation(place))
    done = save(store)
    put(f"{place}/notes.txt", b"hello")
    put(f"{place}/manifests/README", b"hello")
    fs, path = resolve(f"{place}/apps")
    fs.create_dir(path)
    put(f"{place}/apps/shop.json", b"{}")  # requests of queries lie beside their checkpoints
    store.cache("statistics").put("k", 1)

    assert store.checkpoints() == [done]
    assert store.checkpoints() == [done]
    problems = store.problems()
    assert len(problems) == 2
    assert any("notes.txt" in p for p in problems)
    assert any("README" in p for p in problems)


# --- several processes, and death -------------------------------------------------------------------------


def _commit_at_once(uri: str, fingerprints: list[str], barrier: Any, results: Any) -> None:
    store = ParquetCheckpointStore(StorageLocation(uri))
    for fingerprint in fingerprints:
        attempt = store.begin(fingerprint)
        write(attempt, table(20))
        barrier.wait(150)
        done = store.commit(attempt, rows=20, columns=COLUMNS, seconds=1, sources={"t": "v"})
        results.put((fingerprint, done.uri, read_checkpoint(done).num_rows))


def test_processes_that_commit_one_fingerprint_at_once_all_get_the_same_checkpoint(tmp_path: Path) -> None:
    """Where nothing is there, and where a torn manifest is."""
    fingerprints = [f"{i:032x}" for i in range(8)]
    (tmp_path / "manifests").mkdir()
    for fingerprint in fingerprints[::2]:
        (tmp_path / "manifests" / f"{fingerprint}.json").write_text("{")
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    workers = [
        context.Process(target=_commit_at_once, args=(str(tmp_path), fingerprints, barrier, results))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    got = [results.get(timeout=150) for _ in range(3 * len(fingerprints))]
    for worker in workers:
        worker.join(150)
        assert worker.exitcode == 0

    store = ParquetCheckpointStore(StorageLocation(tmp_path))
    for fingerprint in fingerprints:
        found = store.find(fingerprint, {"t": "v"})
        assert found is not None
        assert {(uri, rows) for name, uri, rows in got if name == fingerprint} == {(found.uri, 20)}
        assert len(list((tmp_path / "data" / fingerprint).iterdir())) == 1


def test_threads_that_commit_one_fingerprint_at_once_on_s3_all_get_a_valid_one(s3: Any) -> None:
    uri = f"{s3()}/store"
    barrier = threading.Barrier(4)

    def work(_: int) -> Checkpoint:
        store = ParquetCheckpointStore(StorageLocation(uri))
        attempt = store.begin(FP)
        write(attempt, table(20))
        barrier.wait(150)
        return store.commit(attempt, rows=20, columns=COLUMNS, seconds=1, sources={})

    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(work, range(4)))

    found = ParquetCheckpointStore(StorageLocation(uri)).find(FP)
    assert found is not None
    assert found.uri in {checkpoint.uri for checkpoint in done}
    for checkpoint in done:
        assert read_checkpoint(checkpoint).equals(table(20))


_HALF = """
import sys, time
sys.path.insert(0, {here!r})
from test_storage import *
store = ParquetCheckpointStore(StorageLocation({uri!r}))
attempt = store.begin(FP)
path = attempt.place.root + "/part-00000.parquet"
writer = pq.ParquetWriter(path, table(1).schema)
writer.write_table(table(1000))
open(path + ".flushed", "w").close()
print("half", flush=True)
time.sleep(60)
"""

_FOREVER = """
import sys, itertools
sys.path.insert(0, {here!r})
from test_storage import *
store = ParquetCheckpointStore(StorageLocation({uri!r}))
print("half", flush=True)
for i in itertools.count():
    save(store, fp=f"{{i:032x}}", rows=50)
"""


def _started(script: str, uri: str) -> subprocess.Popen[str]:
    here = str(Path(__file__).parent)
    child = subprocess.Popen(
        [sys.executable, "-c", script.format(here=here, uri=uri)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "half"
    return child


def test_a_writer_that_is_killed_in_mid_write_leaves_nothing_visible(tmp_path: Path) -> None:
    child = _started(_HALF, str(tmp_path))
    child.send_signal(signal.SIGKILL)
    child.wait(150)

    store = ParquetCheckpointStore(StorageLocation(tmp_path))
    assert store.find(FP) is None
    assert store.checkpoints() == []
    assert store.problems() == []
    assert save(store) == store.find(FP)


def test_a_committer_that_is_killed_at_any_moment_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    seen = 0
    for round_number in range(3):
        child = _started(_FOREVER, str(tmp_path / str(round_number)))
        manifests = tmp_path / str(round_number) / "manifests"
        deadline = time.monotonic() + 150
        while time.monotonic() < deadline and len(list(manifests.glob("*.json"))) < 5 + 7 * round_number:
            time.sleep(0.001)
        child.kill()
        child.wait(150)
        store = ParquetCheckpointStore(StorageLocation(tmp_path / str(round_number)))
        whole = store.checkpoints()
        assert len(whole) == len(list(manifests.glob("*.json")))
        assert store.problems() == []
        assert all(read_checkpoint(checkpoint).num_rows == 50 for checkpoint in whole)
        assert save(store, fp=FP)  # its lock is free
        seen += len(whole)
    assert seen >= 5 + 12 + 19


# --- places that cannot be written ------------------------------------------------------------------------


def test_a_store_below_a_file_is_refused_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write to the checkpoint store file://.*/file/store"):
        ParquetCheckpointStore(StorageLocation(f"{tmp_path}/file/store")).begin(FP)


def test_a_bucket_that_does_not_exist_is_named(s3: Any) -> None:
    with pytest.raises(StorageError, match="no such bucket"):
        ParquetCheckpointStore(StorageLocation("s3://never-made-this/store")).begin(FP)


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    """Mount a 3 MiB file system."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tiny disk needs root")
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a tiny disk here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(path: Path) -> None:
    """Write to a file until the disk is full."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(b"\0" * 4096):
            pass


def test_a_full_disk_is_told_as_such_and_keeps_what_was_finished(small_disk: Path) -> None:
    from ebbflow.infra.query.results import write_result

    store = ParquetCheckpointStore(StorageLocation(small_disk / "store"))
    done = save(store, rows=1000)
    attempt = store.begin(OTHER)
    write(attempt, table(10))
    fill(small_disk / "filler")

    with pytest.raises(StorageFullError, match="free some space"):
        store.begin(OTHER)
    with pytest.raises(StorageFullError, match="free some space"):
        store.commit(attempt, rows=10, columns=COLUMNS, seconds=1, sources={})
    with pytest.raises(StorageFullError):
        JsonStore(StorageLocation(small_disk / "cache")).put("k", "v" * 10_000)
    with pytest.raises(StorageFullError):
        write_result(done, StorageLocation(small_disk / "result.parquet"))

    assert not list(small_disk.glob("*result*")) + list(small_disk.glob(".*result*"))
    assert store.find(OTHER) is None
    assert store.find(FP) == done
    (small_disk / "filler").unlink()
    assert store.commit(attempt, rows=10, columns=COLUMNS, seconds=1, sources={}) == store.find(OTHER)


def test_a_read_only_store_can_still_be_read(small_disk: Path) -> None:
    done = save(ParquetCheckpointStore(StorageLocation(small_disk)))
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    store = ParquetCheckpointStore(StorageLocation(small_disk))
    assert store.find(FP) == done
    with pytest.raises(StorageError, match="cannot write to the checkpoint store"):
        store.begin(OTHER)
