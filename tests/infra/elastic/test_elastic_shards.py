"""Shards move while increments and reads are on their way: every increment counts once, no read is lost."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.elastic.application import Application, Driver, Executor, Key, Value
from ebbflow.infra.elastic.registry import register
from ebbflow.infra.elastic.wire.actor import RoutingActor
from ebbflow.infra.elastic.wire.messages import (
    MASTER,
    AwaitFarewells,
    Depart,
    DrainAck,
    Exit,
    Install,
    MoveAck,
    MoveShard,
    Place,
    Read,
    Ready,
    ShardRecord,
    Update,
    UpdateAck,
    Values,
    Welcome,
)
from ebbflow.infra.elastic.wire.transport import InProcessNetwork
from ebbflow.infra.elastic.worker.server import Server, Shard, shard_of

SHARDS = 3
KEYS = [f"k{n}" for n in range(6)]


@register
class Sums(Application):
    executors = 1
    shards = SHARDS

    def __init__(self, isolated: bool = False) -> None:
        self.isolated = isolated

    def driver(self) -> Driver:
        raise NotImplementedError

    def executor(self, index: int) -> Executor:
        raise NotImplementedError

    def parameters(self) -> Mapping[Key, Value]:
        return dict.fromkeys(KEYS, 0)


class Client(RoutingActor):
    """Sends increments one flush at a time and remembers what it was answered."""

    def __init__(self, address: str, network: InProcessNetwork) -> None:
        super().__init__(address, network.sender(address), network.now)
        self.flushes = 0
        self.unanswered: set[int] = set()
        self.seen: list[tuple[Key, int]] = []
        self.asked = 0
        self._handlers = {UpdateAck: self._applied, Values: self._values, Depart: self._departing}

    def flush(self, increments: dict[str, int]) -> bool:
        if self.unanswered:
            return False
        self.flushes += 1
        parts: dict[int, dict[Any, int]] = {}
        for key, increment in increments.items():
            parts.setdefault(shard_of(key, SHARDS), {})[key, 0] = increment
        for shard, part in parts.items():
            self.send(self.directory[shard].server, Update(shard, self.flushes, part, self.address))
        self.unanswered = set(parts)
        return True

    def read(self, key: str) -> None:
        shard = shard_of(key, SHARDS)
        self.asked += 1
        self.send(self.directory[shard].server, Read(shard, [key], 0, self.address))

    def _applied(self, _: str, message: UpdateAck) -> None:
        assert message.number == self.flushes
        self.unanswered.remove(message.shard)
        self.learn(message.shard, message.place)

    def _values(self, _: str, message: Values) -> None:
        self.learn(message.shard, message.place)
        self.seen.extend(message.values.items())

    def _departing(self, _: str, message: Depart) -> None:
        from ebbflow.infra.elastic.wire.messages import Farewell

        self.learn_all(message.directory)
        self.send(message.server, Farewell())


class Commander(RoutingActor):
    """Moves shards as it is told, without waiting for one move before the next."""

    def __init__(self, network: InProcessNetwork) -> None:
        super().__init__(MASTER, network.sender(MASTER), network.now)
        self.arrived = 0
        self.drained: list[str] = []
        self._handlers = {
            Ready: lambda *_: None,
            MoveAck: self._arrived,
            DrainAck: lambda sender, _: self.drained.append(sender),
        }

    def _arrived(self, _: str, message: MoveAck) -> None:
        self.arrived += 1

    def move(self, shard: int, target: str) -> bool:
        place = self.directory[shard]
        if place.server == target:
            return False
        self.directory[shard] = Place(target, place.moves + 1)
        self.send(place.server, MoveShard(shard, self.directory[shard]))
        return True


SERVERS = ["a/server", "b/server", "c/server"]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("move"), st.integers(0, SHARDS - 1), st.integers(0, 2)),
        st.tuples(st.just("flush"), st.integers(0, 1), st.integers(1, 9)),
        st.tuples(st.just("read"), st.integers(0, 1), st.integers(0, 5)),
        st.tuples(st.just("deliver"), st.integers(1, 12), st.just(0)),
    ),
    max_size=60,
)


@given(steps=STEPS, seed=st.integers(0, 2**32), depart=st.booleans())
def test_increments_count_once_under_any_moves(steps: list[Any], seed: int, depart: bool) -> None:
    network = InProcessNetwork(np.random.default_rng(seed))
    commander = Commander(network)
    network.add(commander)
    clients = [Client(f"x{n}/worker", network) for n in range(2)]
    start = {shard: Place(SERVERS[shard], 0) for shard in range(SHARDS)}
    for name in SERVERS:
        server = Server(name, network.sender(name), network.now)
        network.add(server)
        commander.send(name, Welcome(Sums(), start, {}))
        mine = [q for q, place in start.items() if place.server == name]
        values = {q: dict.fromkeys([k for k in KEYS if shard_of(k, SHARDS) == q], 0) for q in mine}
        commander.send(name, Install(mine, [], False, start, values))
    while network.step():
        pass
    for actor in (commander, *clients):
        actor.learn_all(start)
    for client in clients:
        network.add(client)

    moves, total = 0, dict.fromkeys(KEYS, 0)
    for kind, first, second in steps:
        if kind == "move":
            moves += commander.move(first, SERVERS[second])
        elif kind == "flush":
            increments = {key: second + place for place, key in enumerate(KEYS) if (place + second) % 2}
            if clients[first].flush(increments):
                total = {key: total[key] + increments.get(key, 0) for key in KEYS}
        elif kind == "read":
            clients[first].read(KEYS[second])
        else:
            for _ in range(first):
                network.step()
    if depart:
        # server c hands over all and leaves, while messages may still be on their way to it
        for shard, place in list(commander.directory.items()):
            if place.server == "c/server":
                moves += commander.move(shard, "a/server")
        while commander.arrived < moves:
            assert network.step()
        others = frozenset({"a/server", "b/server", *(c.address for c in clients)})
        commander.send("c/server", AwaitFarewells(others))
        for address in sorted(others):
            commander.send(address, Depart("c/server", dict(commander.directory)))
        while not commander.drained:
            assert network.step()
        commander.send("c/server", Exit())
    while network.step():
        pass

    assert commander.arrived == moves
    found: dict[Key, int] = {}
    for actor in network.actors.values():
        if isinstance(actor, Server):
            assert not actor._held
            for number, shard in actor.shards.items():
                assert commander.directory[number].server == actor.address
                found.update(shard.final())
    assert found == total
    for client in clients:
        assert not client.unanswered
        assert len(client.seen) == client.asked
        for key in KEYS:  # one client's reads of a key never go back in time
            mine = [value for seen, value in client.seen if seen == key]
            assert all(0 <= value <= total[str(key)] for value in mine)


def test_a_repeated_flush_counts_once() -> None:
    network = InProcessNetwork(np.random.default_rng(0))
    sent: list[Any] = []
    server = Server("a/server", lambda to, envelope: sent.append((to, envelope.message)), network.now)
    place = {q: Place("a/server", 0) for q in range(SHARDS)}
    shard = shard_of("k0", SHARDS)
    server._handlers[Welcome](MASTER, Welcome(Sums(), place, {}))
    server._handlers[Install](MASTER, Install([shard], [], False, place, {shard: {"k0": 0}}))
    for _ in range(3):
        server._handlers[Update]("w", Update(shard, 1, {("k0", 0): 5}, "w"))
    assert server.shards[shard].final() == {"k0": 5}
    assert [message for to, message in sent if to == "w"] == [UpdateAck(shard, 1, place[shard])] * 3


def test_isolated_reads_hide_what_they_cannot_depend_on() -> None:
    shard = Shard(Sums(isolated=True), ShardRecord({"k": 0}, {}, {}))
    shard.apply("k", 3, 1)
    shard.apply("k", 3, 10)
    assert shard.read("k", 3) == 0  # a task of the same version runs at the same time
    assert shard.read("k", 4) == 11
    shard.apply("k", 4, 100)
    shard.apply("k", 3, 1000)  # late, of an earlier version
    assert shard.read("k", 4) == 1011
    shard.apply("k", 7, 5)
    assert shard.read("k", 7) == 1111
    assert shard.final() == {"k": 1116}
    with pytest.raises(KeyError):
        shard.apply("unknown", 1, 1)
