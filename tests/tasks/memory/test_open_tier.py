"""A tier before a store that fills, leaves and comes back: what data costs is that of where it is kept."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbflow.infra.errors import StorageError
from ebbflow.infra.memory.registry import DIRECTORY, MemoryRegistry
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.memory.tiers import written_through
from ebbflow.tasks.memory import measuring, tier
from ebbflow.tasks.memory.meanwhile import opened_meanwhile
from ebbflow.tasks.memory.tier import look, memory_tier
from tests.infra.memory.lenders import SLAB, Lender, until

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


@pytest.fixture(name="lenders")
def _lenders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Lender]]:
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "memory"))
    made = [Lender(MemoryRegistry(), "node-1", max_bytes=SLAB)]
    yield made
    for one in made:
        one.close()


def test_a_tier_that_fills_or_leaves_is_told_of(tmp_path: Path, lenders: list[Lender]) -> None:
    place, notes = StorageLocation(f"memory+{tmp_path}/store"), list[str]()
    with memory_tier(place, "always", notes.append) as opened:
        assert opened is not None
        peer, store = opened.measured.peer, opened.measured.behind
        assert peer is not None
        assert store is not None
        assert opened.tier("behind") == peer
        assert opened.tier("before-commit") == written_through(peer, store)
        told: list[str] = []

        def changed() -> None:
            found = opened.tier("behind")
            assert found is not None
            told.append(found.name)

        stop = opened.watch(changed)
        for name in ("one", "two"):
            place.write(name, b"x" * SLAB)
        until(lambda: told == ["the store"])  # there is no slab for the second
        lenders.append(Lender(MemoryRegistry(), "node-2"))
        until(lambda: told == ["the store", "peers' memory"])
        assert opened.session is not None
        for one in lenders:
            one.kill()
        until(lambda: told == ["the store", "peers' memory", "the store"])
        assert place.read("one") == place.read("two") == b"x" * SLAB
        assert opened.tier("before-commit") == opened.tier("behind") == store
        stop()
        assert "2 peers lost" in opened.summary()
    assert notes == ["memory tier on: asked for, with 1 peers"]


def test_whether_a_tier_would_be_used_is_measured_and_leaves_nothing(
    tmp_path: Path, lenders: list[Lender]
) -> None:
    place = StorageLocation(f"{tmp_path}/store")
    for named in (place, StorageLocation(f"memory+{tmp_path}/store")):
        found = look(named)
        assert found.peer is not None
        assert found.behind is not None
        assert found.decision.reason.startswith("a request of 1 MiB takes ")
        assert found.decision.enabled == (
            found.peer.latency_s + 2**20 / found.peer.bytes_per_second
            < found.behind.latency_s + 2**20 / found.behind.bytes_per_second
        )
    assert not [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    lenders[0].kill()
    found = look(place)
    assert (found.peer, found.behind, found.decision.enabled) == (None, None, False)
    assert "does not answer" in found.decision.reason


def test_a_tier_is_opened_while_others_work_and_whoever_waits_hears_what_went_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may = threading.Event(), threading.Event()

    def failing(*_: object) -> None:
        begun.set()
        assert may.wait(150)
        raise StorageError("the store is gone")

    monkeypatch.setattr(tier, "_opened", failing)
    with opened_meanwhile(StorageLocation(f"memory+{tmp_path}"), "auto") as opened:
        assert begun.wait(150)
        may.set()
        with pytest.raises(StorageError, match="the store is gone"):
            opened()
    with opened_meanwhile(StorageLocation(str(tmp_path)), "auto") as opened:
        assert opened() is None, "it has no memory before it"


def test_how_fast_a_store_is_is_remembered_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    place, measured = StorageLocation(f"{tmp_path}/store"), list[str]()
    read = StorageLocation.read_range

    def counted(self: StorageLocation, name: str, offset: int, size: int) -> bytes:
        measured.append(name)
        return read(self, name, offset, size)

    monkeypatch.setattr(StorageLocation, "read_range", counted)
    first = measuring.store_tier(place)
    once = len(measured)
    assert once
    assert measuring.store_tier(place) == first
    assert len(measured) == once
    assert measuring.store_tier(StorageLocation(f"{tmp_path}/other")).name == "the store"
    assert len(measured) == 2 * once
    measuring.measure_store(place)  # asked for
    assert len(measured) == 3 * once
    for damage in ("{", "[]", '{"measured": 0, "latency_s": 1, "bytes_per_second": 1}', '{"measured": 1e99}'):
        before = len(measured)
        for file in (tmp_path / "home" / "stores").iterdir():
            file.write_text(damage)
        measuring.store_tier(place)
        assert len(measured) == before + once
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    before = len(measured)
    measuring.store_tier(place)
    assert len(measured) == before + once
    monkeypatch.setattr("socket.gethostname", lambda: "another-machine")
    measuring.store_tier(place)
    assert len(measured) == before + 2 * once
