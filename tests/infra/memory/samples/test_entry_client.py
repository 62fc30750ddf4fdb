"""Entries on nodes that come, are full, and were away, without daemons."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import MemoryTierError
from ebbflow.infra.memory.lending.entries import SharedEntries
from ebbflow.infra.memory.lending.slabs import LentMemory
from ebbflow.infra.memory.links import PeerLinks
from ebbflow.infra.memory.peer import PeerAddress
from ebbflow.infra.memory.protocol import Frame
from ebbflow.infra.memory.registry import MemoryRegistry
from ebbflow.infra.memory.samples.entries import EntryClient
from ebbflow.infra.training.running.memory import MemoryFiles

KEYS = [bytes([number]) * 32 for number in range(20)]


class Node:
    """A daemon's entries behind a link that answers at once."""

    def __init__(self, name: str) -> None:
        self.name, self.full, self.ended = name, False, False
        self._memory = LentMemory(1 << 16)
        self._memory.allocate(1)
        self.entries = SharedEntries(self._memory)

    def post(self, frame: Frame, answered: Any) -> None:
        answered(self._answer(frame))

    def tell(self, frame: Frame) -> None:
        self._answer(frame)

    def _answer(self, frame: Frame) -> Frame | None:
        return self.entries.answer(frame, dict.fromkeys(("gets", "get_hits", "puts"), 0), draining=self.full)

    def close(self) -> None: ...


class Links:
    """Links to nodes that are there."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.all = list(nodes)
        self.problems: dict[str, str] = {}


def _client(nodes: Sequence[Node]) -> tuple[EntryClient, Links]:
    made, links = EntryClient(MemoryRegistry("/nothing")), Links(nodes)
    made._links, made._looked = links, float("inf")  # type: ignore[assignment]
    return made, links


def _having(nodes: Sequence[Node], key: bytes) -> list[Node]:
    return [node for node in nodes if node.entries.get(key)]


def test_an_entry_is_found_and_forgotten_wherever_it_is_when_others_have_begun_to_lend() -> None:
    nodes = [Node(f"node-{number}") for number in range(12)]
    client, links = _client(nodes[:2])
    assert client.keep([(key, key) for key in KEYS])
    links.all = nodes
    assert None in client.get(KEYS), "of some keys two others would be asked"
    assert client.get(KEYS, everywhere=True) == KEYS
    assert client.get([b"?" * 32], everywhere=True) == [None]
    client.drop(KEYS)
    assert client.get(KEYS, everywhere=True) == [None] * len(KEYS)
    assert not any(len(node.entries) for node in nodes)


def test_what_is_replaced_stays_nowhere_and_what_all_refuse_stays_as_it_is() -> None:
    nodes = [Node(f"node-{number}") for number in range(4)]
    client, links = _client(nodes)
    (key,) = KEYS[:1]
    assert client.keep([(key, b"old")])
    first, second = _having(nodes, key)
    first.full = True
    assert client.keep([(key, b"new")])
    assert client.copies(key) == [b"new"], "who refuses it forgets what it had"
    links.all = [node for node in nodes if node not in (first, second)]
    assert client.keep([(key, b"newer")])
    links.all = nodes
    assert sorted(client.copies(key)) == [b"new", b"newer", b"newer"], "which node had it was not there"
    first.full = second.full = True
    assert client.keep([(key, b"newest")], alone=True), "where those have no room others are asked"
    assert client.copies(key) == [b"newest"]
    for node in nodes:
        node.full = True
    assert not client.keep([(key, b"never")], alone=True)
    assert client.copies(key) == [b"newest"]
    assert client.refused == 1


def test_the_newest_copy_of_a_file_counts_though_a_node_that_was_away_has_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [Node(f"node-{number}") for number in range(3)]
    client, links = _client(nodes)
    MemoryFiles(client, "file:///a").write("manifest", b"first")
    away = next(node for node in nodes if len(node.entries))
    others = [node for node in nodes if node is not away]
    links.all = others
    monkeypatch.setattr("time.time_ns", lambda: 0)  # a clock that was set back
    later = MemoryFiles(client, "file:///a")
    assert later.read("manifest") == b"first"
    later.write("manifest", b"second")
    for order in ([away, *others], [*others, away]):
        links.all = order
        assert MemoryFiles(client, "file:///a").read("manifest") == b"second"
    later.remove("manifest")
    assert not any(len(node.entries) for node in nodes)


@pytest.mark.parametrize("known", ["lost before", "lost meanwhile", "never reached"])
def test_a_node_that_was_away_drops_what_was_dropped_meanwhile_before_it_is_used(known: str) -> None:
    nodes = [Node(f"node-{number}") for number in range(3)]
    client, links = _client(nodes)
    assert client.keep([(key, key) for key in KEYS[:10]])
    away = max(nodes, key=lambda node: len(node.entries))
    assert len(away.entries)
    if known == "never reached":  # by this process: another one has written there
        links.problems = {away.name: "no route"}
    elif known == "lost before":
        client._met.add(away.name)
    if known == "lost meanwhile":
        away.ended = True
        away.tell = lambda frame: None  # type: ignore[method-assign]
    else:
        links.all = [node for node in nodes if node is not away]
    client.drop(KEYS[:5])
    assert client.keep([(KEYS[9], b"new")], alone=True)
    links.all = [node for node in nodes if node is not away]
    back = Node(away.name)
    back.entries = away.entries
    client._settle(back)  # type: ignore[arg-type]
    links.all = [*links.all, back]
    links.problems = {}
    assert client.get(KEYS[:5], everywhere=True) == [None] * 5
    assert client.get(KEYS[5:9], everywhere=True) == KEYS[5:9], "what was not dropped is there"
    assert set(client.copies(KEYS[9])) == {b"new"}
    assert client.keep([(KEYS[0], b"again")], copies=3)
    client._settle(back)  # type: ignore[arg-type]
    assert client.copies(KEYS[0]) == [b"again"] * 3, "it is told once"


def test_what_is_dropped_while_a_node_is_being_connected_is_dropped_there_when_it_joins() -> None:
    nodes = [Node(f"node-{number}") for number in range(2)]
    client, links = _client(nodes)
    assert client.keep([(key, key) for key in KEYS], copies=2)
    client._met.add("node-1")
    links.all = nodes[:1]
    client._settle(nodes[1])  # type: ignore[arg-type]  # it is connected to, as others still are
    client.drop(KEYS[:5])
    links.all = nodes
    client._join(nodes[1])  # type: ignore[arg-type]
    assert client.get(KEYS[:5], everywhere=True) == [None] * 5
    assert client.copies(KEYS[5]) == [KEYS[5]] * 2
    links.all = nodes[:1]
    tell = nodes[0].tell

    def joins(frame: Frame) -> None:
        tell(frame)
        links.all = nodes
        client._join(nodes[1])  # type: ignore[arg-type]

    nodes[0].tell = joins  # type: ignore[method-assign]
    client.drop(KEYS[5:10])
    assert not any(map(nodes[1].entries.get, KEYS[:10])), "it has joined while the others were told"
    assert client.copies(KEYS[10]) == [KEYS[10]] * 2


def test_a_node_is_used_while_another_is_still_being_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    used = threading.Event()

    def opened(self: PeerLinks, address: PeerAddress) -> Node:
        if address.name == "far":
            assert used.wait(20), "the other one is used only when this one has answered"
            raise MemoryTierError("no route")
        return Node(address.name)

    monkeypatch.setattr(PeerLinks, "_open", opened)
    addresses = [SimpleNamespace(name=name) for name in ("far", "near")]
    registry: Any = SimpleNamespace(addresses=lambda: addresses)
    links = PeerLinks(registry, b"", "one", SystemClock(), joined=lambda link: used.set())
    links.connect()
    assert [link.name for link in links.all] == ["near"]
    assert links.problems == {"far": "no route"}


def test_a_link_that_two_threads_find_to_have_ended_ends_once() -> None:
    both = threading.Barrier(2)

    class Meeting(dict[str, Any]):
        def get(self, *of: Any) -> Any:
            found = super().get(*of)
            with suppress(threading.BrokenBarrierError):
                both.wait(0.3)
            return found

    links = PeerLinks(MemoryRegistry("/nothing"), b"", "one", SystemClock())
    link: Any = Node("near")
    links._links = Meeting(near=link)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(links._end, link) for _ in range(2)]
    assert [end.exception() for end in ends] == [None, None]
    assert links.all == []


def test_what_a_node_has_yet_to_drop_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbflow.infra.memory.samples.entries._MAX_OWED", 7)
    nodes = [Node("node-0"), Node("node-1")]
    client, links = _client(nodes)
    client._met.add("node-1")
    assert client.keep([(key, key) for key in KEYS])
    links.all = nodes[:1]
    client.drop(KEYS[:5])
    client.drop(KEYS[5:])
    client._settle(nodes[1])  # type: ignore[arg-type]
    assert [key for key in KEYS if nodes[1].entries.get(key)] == KEYS[7:]
