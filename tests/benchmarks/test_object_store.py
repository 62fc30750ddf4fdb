"""Object storage for benchmarks, as Ebbflow's own clients use it."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.storage.lease_files import Conditional
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.tasks.query.planning import prepare
from ebbflow.tasks.query.request import QueryRequest
from tests.aws.emulator import ENVIRONMENT
from tests.benchmarks.object_store import ObjectStore


@pytest.fixture(name="served", scope="module")
def _served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("tables")
    (folder / "deep").mkdir()
    (folder / "a b.txt").write_bytes(bytes(range(256)) * 40)
    (folder / "deep" / "c").write_bytes(b"c")
    (folder / "shop").mkdir()
    pq.write_table(pa.table({"v": list(range(1000))}), folder / "shop" / "t.parquet")
    with pytest.MonkeyPatch.context() as patch, ObjectStore.start("127.0.0.1", {"tables": folder}) as store:
        for name in ENVIRONMENT:
            patch.delenv(name, raising=False)
        for name, value in store.environment.items():
            patch.setenv(name, value)
        yield folder


def test_a_folders_files_are_objects(served: Path) -> None:
    tables = StorageLocation("s3://tables")
    assert [(e.base_name, e.is_file) for e in tables.entries()] == [
        ("a b.txt", True),
        ("deep", False),
        ("shop", False),
    ]
    assert tables.read("a b.txt") == (served / "a b.txt").read_bytes()
    assert tables.read_range("a b.txt", 250, 10) == bytes([*range(250, 256), *range(4)])
    assert tables.have(["deep/c", "a b.txt"])
    assert not tables.is_file("deep")
    with pytest.raises(FileNotFoundError):
        tables.read("none")


def test_what_is_written_is_read_listed_moved_and_removed(served: Path) -> None:
    place = StorageLocation("s3://store/run")
    large = bytes(range(256)) * (100 << 10)  # in several parts
    with place.writing("data/large") as sink:
        sink.write(large)
    place.write("data/small", b"small")
    place.fs().create_dir(place.path("empty"))
    assert [e.base_name for e in place.entries()] == ["data", "empty"]
    assert place.read("data/large") == large
    place.move_folder("data", "moved", first="small")
    assert [e.base_name for e in place.entries("moved")] == ["large", "small"]
    assert place.entries("data") == []
    assert place.read("moved/large") == large
    place.remove_folder("moved")
    place.remove("none")
    assert place.entries("moved") == []


def test_conditions_of_writes_hold(served: Path) -> None:
    lease, other = (Conditional(StorageLocation("s3://store/run"), "lease.json") for _ in range(2))
    first = lease.write({"token": "a", "beat": 1, "ttl": 9}, None)
    assert first is not None
    assert other.write({"token": "b", "beat": 1, "ttl": 9}, None) is None
    second = other.write({"token": "b", "beat": 2, "ttl": 9}, first)
    assert second not in (None, first)
    assert lease.write({"token": "a", "beat": 3, "ttl": 9}, first) is None
    there = lease.read()
    assert there is not None
    assert (there[0]["token"], there[1]) == ("b", second)


def test_costs_know_what_nodes_have_over_their_links_only(served: Path, tmp_path: Path) -> None:
    """Tables in object storage, and a store there, are read over links; those in a file system are taken as here."""
    remote, local = ("s3://tables/shop", "s3://store/costs"), (str(served / "shop"), str(tmp_path / "store"))
    for tables, store, wires in (
        (remote[0], local[1], (1.0, 0.0)),
        (local[0], remote[1], (0.0, 1.0)),
        (*local, (0.0, 0.0)),
    ):
        request = QueryRequest("SELECT sum(v) FROM t", tables=tables, store=store, engine="spark")
        clock = SystemClock()
        store_ = ParquetCheckpointStore(request.store_place, clock)
        _, planner = prepare(request, store_, clock, run_id="run")
        for model in (planner.model, *planner.rivals):
            assert (model.table_wire, model.store_wire) == wires
