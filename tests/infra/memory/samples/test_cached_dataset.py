"""Samples in the memory of real daemons: decoded once, the same bits, whoever reads them and whatever is killed."""

import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.infra.errors import DatasetError, MemoryTierError
from ebbflow.infra.memory import control
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.memory.samples.dataset import RemoteCachedDataset
from ebbflow.infra.memory.samples.entries import EntryClient
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from tests.infra.memory.lenders import SLAB, Lender, until
from tests.infra.memory.samples import epochs
from tests.infra.memory.samples.epochs import COUNT, Decoded, epoch, equal
from tests.infra.training.worlds import run_module

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


@pytest.fixture(name="data")
def _data(tmp_path: Path) -> Decoded:
    return Decoded(tmp_path / "decoded")


def entries(registry: MemoryRegistry, lenders: list[Lender]) -> int:
    return sum(
        int(control.status(one.address, registry.token())["entries"]) for one in lenders if not one.ended
    )


def kept(registry: MemoryRegistry, lenders: list[Lender]) -> None:
    """Wait until the daemons have all samples: nobody waits for that where they are written."""
    until(lambda: entries(registry, lenders) == COUNT)


def forked(cached: RemoteCachedDataset, expected: list[Any], *, connected: bool = False) -> None:
    """Have workers forked, by a process of its own: this one has threads of other tests, which a fork would lose."""
    given = cached.dataset.log.with_name("given")
    given.write_bytes(pickle.dumps((cached, expected, connected)))
    run_module(epochs.__name__, str(given), timeout=150)


def test_a_second_epoch_in_new_workers_decodes_nothing(
    registry: MemoryRegistry, lend: Callable[..., Lender], data: Decoded
) -> None:
    lenders = [lend(f"node-{n}") for n in range(2)]
    cached = RemoteCachedDataset(data, "pixels-1", registry=registry.folder, use="always")
    expected = [data[n] for n in range(COUNT)]
    assert len(cached) == COUNT
    assert equal(cached[0], expected[0])
    assert cached.metrics.loaded == 1, "workers are to make connections of their own"

    forked(cached, expected, connected=True)
    kept(registry, lenders)
    seen = data.decoded()
    assert seen <= COUNT + 2 + COUNT
    forked(cached, expected)
    assert data.decoded() == seen, "all came from memory, whichever worker had written them"
    lenders[0].kill()
    left = entries(registry, lenders)
    assert 0 < left < COUNT
    forked(cached, expected)
    assert data.decoded() == seen + COUNT - left, "only what the killed daemon had"
    assert equal(cached[-1], expected[-1])
    cached.close()


def test_a_spawned_worker_reads_what_this_process_has_kept(
    registry: MemoryRegistry, lend: Callable[..., Lender], data: Decoded
) -> None:
    lenders = [lend("node-1")]
    cached = RemoteCachedDataset(data, "pixels-1", registry=registry.folder, use="always")
    expected = cached.__getitems__(list(range(COUNT)))
    kept(registry, lenders)
    epoch(cached, "spawn", 1, expected)
    assert data.decoded() == COUNT
    cached.close()


def test_what_memory_has_lost_comes_from_the_store_and_then_from_the_data(
    registry: MemoryRegistry, lend: Callable[..., Lender], data: Decoded, tmp_path: Path
) -> None:
    lenders = [lend(f"node-{n}") for n in range(2)]
    options: dict[str, Any] = {"registry": registry.folder, "use": "always", "store": tmp_path / "store"}
    numbers = list(range(COUNT))
    first = RemoteCachedDataset(data, "pixels-1", **options)
    expected = first.__getitems__(numbers)
    kept(registry, lenders)
    first.close()  # the store has all now
    assert data.decoded() == COUNT

    second = RemoteCachedDataset(data, "pixels-1", **options)
    assert all(map(equal, second.__getitems__(numbers), expected))
    assert second.metrics.peer_hits == COUNT
    for one in lenders:
        one.kill()
    assert all(map(equal, second.__getitems__(numbers), expected))
    assert second.metrics.store_hits == COUNT
    assert data.decoded() == COUNT

    (damaged,) = (tmp_path / "store" / "samples").glob("*/0/7")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    assert equal(second[7], expected[7])
    assert (second.metrics.damaged, data.decoded()) == (1, COUNT + 1)
    second.close()

    other = RemoteCachedDataset(data, "pixels-2", **options)
    assert equal(other[0], expected[0])
    assert other.metrics.loaded == 1, "samples of another name are others"
    other.close()


def test_what_is_slower_than_the_data_is_used_no_longer(
    registry: MemoryRegistry, lend: Callable[..., Lender], data: Decoded
) -> None:
    lender = lend("node-1")
    small = [bytes([n]) * 10 for n in range(100)]
    cached = RemoteCachedDataset(small, "small", registry=registry.folder)
    numbers = list(range(100))
    assert cached.__getitems__(numbers) == small
    until(lambda: entries(registry, [lender]) == 100)
    assert cached.__getitems__(numbers) == small
    assert cached.metrics.timed_hits == 100
    assert cached.metrics.slower, "a list is faster than any network"
    assert cached.__getitems__(numbers) == small
    assert cached.metrics.loaded == 200
    cached.close()


def test_a_full_node_passes_entries_on_and_a_draining_one_forgets_them(
    registry: MemoryRegistry, lend: Callable[..., Lender]
) -> None:
    one, two = lend("one", max_bytes=SLAB), lend("two", max_bytes=4 * SLAB)
    client = EntryClient(registry)
    data, keys = os.urandom(SLAB // 4), [bytes([n]) * 32 for n in range(40)]
    until(lambda: client.peers == ("one", "two"))
    for key in keys:
        client.put(key, data)
    until(lambda: entries(registry, [one, two]) >= 4 + 8)
    assert client.get([b"?" * 32]) == [None]
    found = [one for one in client.get(keys) if one is not None]
    assert len(found) == entries(registry, [one, two])
    assert all(one == data for one in found)
    assert client.refused > 0
    assert not client.put(b"x" * 32, bytes(17 << 20)), "larger than a frame"

    assert one.terminate() == 0, "nobody has to be asked to leave"
    until(lambda: client.peers == ("two",))
    assert all(each in (data, None) for each in client.get(keys))
    client.close()


def test_without_nodes_or_their_token_samples_come_from_the_data(
    registry: MemoryRegistry, lend: Callable[..., Lender], data: Decoded, tmp_path: Path
) -> None:
    nobody = RemoteCachedDataset(data, "pixels-1", registry=tmp_path / "nothing")
    assert equal(nobody[3], data[3])
    assert nobody.metrics.loaded == 1

    lend("node-1")
    foreign = MemoryRegistry(tmp_path / "foreign")
    foreign.token(create=True)
    for address in registry.addresses():
        foreign.announce(address)
    client = EntryClient(foreign)
    assert client.peers == ()
    assert not client.put(b"x" * 32, b"data")
    assert client.get([b"x" * 32]) == [None]


def test_a_store_that_is_away_is_not_waited_for_with_each_sample_that_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, queued = list[str](), threading.Event()

    def away(self: StorageLocation, name: str, data: bytes) -> None:
        tried.append(name)
        assert queued.wait(150)
        raise OSError("no answer")

    monkeypatch.setattr(StorageLocation, "write", away)
    cached = RemoteCachedDataset(
        list(range(40)), "numbers", store=tmp_path / "store", registry=tmp_path / "nothing"
    )
    assert cached.__getitems__(list(range(40))) == list(range(40))
    queued.set()
    cached.close()
    assert 1 <= len(tried) <= 2, "as many as write at a time"


def test_a_store_that_cannot_be_read_is_not_asked_again_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = [0.0], list[str]()

    def away(self: StorageLocation, name: str) -> bytes:
        asked.append(name)
        now[0] += 20.0
        raise OSError("no answer")

    monkeypatch.setattr(StorageLocation, "read", away)
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr("ebbflow.infra.memory.samples.dataset.time", clock)
    cached = RemoteCachedDataset(
        list(range(9)), "numbers", store=tmp_path / "store", registry=tmp_path / "nothing"
    )
    assert cached.__getitems__([0, 1, 2]) == [0, 1, 2]
    assert cached.__getitems__([3, 4, 5]) == [3, 4, 5]
    assert asked == ["0/0"]
    now[0] += 200.0  # ten times as long as it took
    assert cached.__getitems__([6, 7, 8]) == [6, 7, 8]
    assert asked == ["0/0", "0/6"]
    cached.close()


def test_what_breaks_a_rule_is_refused(data: Decoded, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="must have __len__ and __getitem__; list_iterator has not"):
        RemoteCachedDataset(iter([]), "name")
    with pytest.raises(OptionError, match="must have a name"):
        RemoteCachedDataset(data, " ")
    with pytest.raises(OptionError, match="use must be 'auto' or 'always'; got 'never'"):
        RemoteCachedDataset(data, "name", use="never")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="has the scheme 'gs'"):
        RemoteCachedDataset(data, "name", store="gs://bucket")
    cached = RemoteCachedDataset([object()], "name", registry=tmp_path)
    with pytest.raises(DatasetError, match=r"must consist of tensors .* got builtins\.object"):
        cached[0]
    with pytest.raises(DatasetError, match="must be read by whole numbers; got 'a'"):
        cached["a"]  # type: ignore[index]
    with pytest.raises(IndexError, match="from -1 to 0; got 1"):
        cached[1]


def test_a_key_that_is_none_is_refused(registry: MemoryRegistry, lend: Callable[..., Lender]) -> None:
    from ebbflow.infra.memory.hosting import ask
    from ebbflow.infra.memory.peer import PeerLink
    from ebbflow.infra.memory.protocol import Frame, Kind

    lender = lend("node-1")
    link = PeerLink(lender.address, registry.token(), "test", lambda peer, frame: None, lambda peer: None)
    for kind in (Kind.GET, Kind.PUT):
        answer = ask(link, Frame(kind, payload=b"short"), 30.0)
        assert answer is not None
        assert answer.kind == Kind.ERROR
        assert bytes(answer.payload) == b"a key must have 32 bytes, not 5"
    link.close()
    with pytest.raises(MemoryTierError, match="does not hold this cluster's token"):
        PeerLink(lender.address, b"x" * 32, "test", lambda peer, frame: None, lambda peer: None)
