"""Files that are written to peers' memory first: read from there, from the store after a loss, gone when deleted."""

import io
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.errors import StorageError
from ebbflow.infra.memory.arrow import AttachedTier
from ebbflow.infra.memory.blocks import BlockSettings
from ebbflow.infra.memory.files import MemoryTier
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.memory.session import MemorySession
from ebbflow.infra.query.checkpoints import Durability, ParquetCheckpointStore
from ebbflow.infra.query.results import read_checkpoint
from ebbflow.infra.storage import filesystems
from ebbflow.infra.storage.places import StorageLocation
from tests.infra.memory.lenders import SLAB, Lender

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

ROWS = pa.table({"k": list(range(200_000)), "s": [f"text {i % 977}" for i in range(200_000)]})
COLUMNS = [("k", "bigint"), ("s", "string")]


class Opened:
    """A tier over the local file system, or another store, with two daemons."""

    def __init__(self, registry: MemoryRegistry, base: Any = None) -> None:
        self.lenders = [Lender(registry, f"node-{n}") for n in range(2)]
        settings = BlockSettings(64, SLAB, 64 << 10)
        self.tier = MemoryTier("memory+file", settings)
        if base is not None:
            self.tier.base, self.tier.behind = base, "objects"
        self.session = MemorySession(registry, self.tier.blocks_behind, settings, period=0.1)
        self.tier.store = self.session.blocks
        filesystems.attach("memory+file", AttachedTier(self.tier, settings))

    def kill(self) -> None:
        for lender in self.lenders:
            lender.close()

    def close(self) -> None:
        filesystems.attach("memory+file", None)
        self.session.close()
        self.kill()


@pytest.fixture(name="opened")
def _opened(tmp_path: Path) -> Iterator[Opened]:
    registry = MemoryRegistry(tmp_path / "memory")
    registry.token(create=True)
    opened = Opened(registry)
    yield opened
    opened.close()


def _store(tmp_path: Path, durable: Durability = "before-commit") -> ParquetCheckpointStore:
    return ParquetCheckpointStore(StorageLocation(f"memory+{tmp_path}/store"), durable=durable)


def _commit(store: ParquetCheckpointStore, fingerprint: str) -> None:
    attempt = store.begin(fingerprint)
    with attempt.place.fs().open_output_stream(attempt.place.path("part-00000.parquet")) as out:
        pq.write_table(ROWS, out)
    store.commit(attempt, rows=ROWS.num_rows, columns=COLUMNS, seconds=1.0, sources={})


def test_a_checkpoint_is_read_from_peers_and_after_their_death_from_the_store(
    opened: Opened, tmp_path: Path
) -> None:
    store, metrics = _store(tmp_path), opened.session.blocks.metrics
    _commit(store, "ab")
    plain = ParquetCheckpointStore(StorageLocation(str(tmp_path / "store")))
    assert plain.find("ab") is not None, "committed: the store behind has all of it"
    found = store.find("ab")
    assert found is not None
    assert metrics.remote_writes > 0
    assert not os.stat(found.relation.files[0].path).st_mode & 0o077
    metrics.store_hits = 0
    assert read_checkpoint(found).equals(ROWS)
    assert (metrics.store_hits, metrics.remote_hits > 0) == (0, True)
    opened.kill()
    assert read_checkpoint(found).equals(ROWS)
    assert metrics.store_hits > 0
    assert store.verify(found, anew=True)


def test_a_deleted_file_gives_its_memory_back_and_its_space_is_used_again(
    opened: Opened, tmp_path: Path
) -> None:
    store, table = _store(tmp_path), opened.session.blocks.slabs.table
    for number in range(3):
        _commit(store, f"{number:02d}")
        assert store.collect(0) > 0
        assert store.find(f"{number:02d}") is None
    opened.tier.flush()
    assert not table.hosts
    place = StorageLocation(f"memory+{tmp_path}/files")
    place.fs().create_dir(place.root)
    for name, data in (("a", b"x" * 300_000), ("b", b"y" * 10), ("empty", b"")):
        with place.fs().open_output_stream(place.path(name)) as out:
            out.write(data)
        assert place.read(name) == data
    place.flush()
    assert [(one.base_name, one.size) for one in place.behind.entries()] == [
        ("a", 300_000), ("b", 10), ("empty", 0),
    ]  # fmt: skip
    place.fs().move(place.path("a"), place.path("c"))
    assert place.read_range("c", 299_998, 10) == b"xx"
    place.remove("c")
    with pytest.raises(FileNotFoundError):
        place.read("c")


def test_what_is_read_from_the_store_in_pieces_is_opened_once_and_closed_when_it_goes(
    opened: Opened, tmp_path: Path
) -> None:
    place, base, opens = StorageLocation(f"memory+{tmp_path}/files"), opened.tier.base, list[str]()

    class Counted:
        def open_input_file(self, path: str) -> Any:
            opens.append(path)
            return base.open_input_file(path)

        def __getattr__(self, name: str) -> Any:
            return getattr(base, name)

    def held() -> set[str]:
        found = set()
        for one in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(one))
        return {name for name in found if name.startswith(place.root)}

    place.fs().create_dir(place.root)
    names = [f"{number:02d}" for number in range(18)]
    for name in names:
        with place.fs().open_output_stream(place.path(name)) as out:
            out.write(name.encode() * 300_000)
    place.flush()
    opened.kill()
    opened.tier.base = Counted()
    for name in names:
        with place.fs().open_input_file(place.path(name)) as file:
            for offset in (400_000, 0, 200_000):
                assert file.read_at(100_000, offset) == name.encode() * 50_000
    assert opens == [place.path(name) for name in names]
    assert held() == {place.path(name) for name in names[2:]}, "16 at a time"
    place.fs().move(place.path("17"), place.path("moved"))
    place.remove("16")
    assert held() == {place.path(name) for name in names[2:16]}
    assert place.read("moved") == b"17" * 300_000
    opened.tier.close()
    assert held() == set()


def test_what_was_committed_before_the_store_had_it_is_missing_when_it_is_lost(
    opened: Opened, tmp_path: Path
) -> None:
    store = _store(tmp_path, "behind")
    _commit(store, "ab")
    assert store.find("ab") is not None
    opened.tier.flush()
    found = store.find("ab")
    assert found is not None
    os.truncate(found.relation.files[0].path, 100)  # as a driver leaves it that is killed in the middle
    resumed = ParquetCheckpointStore(StorageLocation(str(tmp_path / "store")))
    assert resumed.find("ab") is None
    assert "not used" in resumed.problems()[0]


def test_a_store_that_refuses_keeps_a_checkpoint_from_being_committed(opened: Opened, tmp_path: Path) -> None:
    store = _store(tmp_path)
    attempt = store.begin("ab")
    os.rmdir(attempt.place.root)
    with (
        pytest.raises((StorageError, OSError)),
        attempt.place.fs().open_output_stream(attempt.place.path("part-00000.parquet")) as out,
    ):
        pq.write_table(ROWS, out)
    with pytest.raises(StorageError):
        store.commit(attempt, rows=ROWS.num_rows, columns=COLUMNS, seconds=1.0, sources={})
    assert store.find("ab") is None


def test_without_an_attached_tier_the_store_behind_is_used(tmp_path: Path) -> None:
    place = StorageLocation(f"memory+file://{tmp_path}")
    assert (place.scheme, place.tiered, place.behind.uri) == ("memory+file", True, f"file://{tmp_path}")
    assert StorageLocation(place.uri) == place
    assert StorageLocation("memory+s3://bucket/key").behind.uri == "s3://bucket/key"
    place.behind.write("a", b"data")
    assert place.read("a") == b"data"


class Objects:
    """A store whose files appear when they are closed, as on S3, once it ``may``."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.may = threading.Event()

    def normalize_path(self, path: str) -> str:
        return path

    def open_output_stream(self, path: str) -> io.BytesIO:
        store = self

        class Upload(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    assert store.may.wait(150)
                    store.kept[path] = self.getvalue()
                super().close()

        return Upload()

    def open_input_file(self, path: str) -> Any:
        return pa.BufferReader(self.kept[path])

    def copy_file(self, source: str, target: str) -> None:
        self.kept[target] = self.kept[source]

    def delete_file(self, path: str) -> None:
        if path not in self.kept:
            raise FileNotFoundError(path)
        del self.kept[path]


def test_what_is_on_its_way_to_the_store_never_follows_what_deletes_or_replaces_it(
    registry: MemoryRegistry,
) -> None:
    store = Objects()
    opened = Opened(registry, store)
    place = StorageLocation("memory+file:///bucket")

    def write(name: str, data: bytes) -> None:
        with place.fs().open_output_stream(place.path(name)) as out:
            out.write(data)

    def write_late(name: str) -> None:
        store.may.clear()
        write(name, b"old" * 1000)
        threading.Timer(0.3, store.may.set).start()

    try:
        write("source", b"source")
        for name in ("replaced", "copied", "deleted"):
            write_late(name)
            assert place.path(name) not in store.kept, "peers alone have it"
            if name == "replaced":
                write(name, b"new")
            elif name == "copied":
                place.fs().copy_file(place.path("source"), place.path(name))
                assert place.read(name) == b"source"
            else:
                place.fs().delete_file(place.path(name))
        opened.session.close()  # once all is done that is queued
        found = {path.rpartition("/")[2]: data for path, data in store.kept.items()}
        assert found == {"source": b"source", "replaced": b"new", "copied": b"source"}
    finally:
        store.may.set()
        opened.close()
