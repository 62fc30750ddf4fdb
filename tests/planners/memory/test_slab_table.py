"""Where requests of slabs go, and that no order of mapping, eviction and loss makes a read return an old write."""

from collections import deque
from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.slab_table import (
    BlockRange,
    ReadRoute,
    SlabState,
    SlabTable,
    WriteRoute,
    split_request,
)


def _mapped(slabs: int = 1, blocks: int = 4) -> SlabTable:
    table = SlabTable(slabs, blocks)
    for slab in range(slabs):
        assert table.finish_mapping(slab, table.start_mapping(slab), f"h{slab}", slab)
    return table


def _write(table: SlabTable, slab: int, first: int, count: int = 1) -> WriteRoute:
    route = table.route_write(BlockRange(slab, first, count))
    if route.remote is not None:
        table.complete_write(route)
    return route


def test_routes_follow_the_state_of_slab_and_block() -> None:
    table = SlabTable(1, 4)
    assert table.route_write(BlockRange(0, 0, 1)).remote is None
    assert [one.remote for one in table.route_read(BlockRange(0, 0, 1))] == [None]
    table.finish_mapping(0, table.start_mapping(0), "a")
    assert [one.remote for one in table.route_read(BlockRange(0, 0, 1))] == [None]
    write = table.route_write(BlockRange(0, 0, 1))
    assert write.remote is not None
    assert [one.remote for one in table.route_read(BlockRange(0, 0, 1))] == [None], "not written yet"
    table.complete_write(write)
    (read,) = table.route_read(BlockRange(0, 0, 1))
    assert read.remote is not None
    assert table.complete_read(read)


def test_a_batch_over_the_boundary_of_slabs_is_split() -> None:
    """Ten pages in a mapped slab, 22 in one that is not: 10 remote writes, and all 32 to the store."""
    table = SlabTable(2, 64)
    table.finish_mapping(0, table.start_mapping(0), "a")
    parts = split_request(54, 32, 64)
    assert parts == (BlockRange(0, 54, 10), BlockRange(1, 0, 22))
    routes = [table.route_write(part) for part in parts]
    assert [(one.blocks.count, one.remote is not None) for one in routes] == [(10, True), (22, False)]


def test_a_read_of_blocks_that_peers_hold_in_part_is_split() -> None:
    table = _mapped(blocks=6)
    _write(table, 0, 2, 3)
    routes = table.route_read(BlockRange(0, 1, 5))
    assert [(one.blocks.first, one.blocks.count, one.remote is not None) for one in routes] == [
        (1, 1, False), (2, 3, True), (5, 1, False),
    ]  # fmt: skip


def test_a_completion_of_an_earlier_mapping_sets_no_bit() -> None:
    table = _mapped()
    late = table.route_write(BlockRange(0, 1, 1))
    table.lose_host("h0")
    table.finish_mapping(0, table.start_mapping(0), "other")
    table.complete_write(late)
    assert table.held(0) == 0
    assert [one.remote for one in table.route_read(BlockRange(0, 1, 1))] == [None]


def test_a_failed_write_forgets_the_version_before_it() -> None:
    table = _mapped()
    _write(table, 0, 1)
    table.complete_write(table.route_write(BlockRange(0, 1, 1)), ok=False)
    assert [one.remote for one in table.route_read(BlockRange(0, 1, 1))] == [None]


def test_a_read_of_a_lost_mapping_is_not_valid() -> None:
    table = _mapped()
    _write(table, 0, 1)
    (read,) = table.route_read(BlockRange(0, 1, 1))
    table.lose_host("h0")
    assert not table.complete_read(read)


def test_eviction_waits_for_what_is_outstanding() -> None:
    table = _mapped()
    write = table.route_write(BlockRange(0, 0, 1))
    assert table.start_eviction(0)
    assert table.route_write(BlockRange(0, 1, 1)).remote is None
    assert not table.is_drained(0)
    with pytest.raises(OptionError, match="must be evicting without operations outstanding"):
        table.finish_eviction(0)
    table.complete_write(write)
    assert table.held(0) == 0
    assert table.finish_eviction(0).host == "h0"
    assert table.state(0) is SlabState.UNMAPPED
    assert not table.start_eviction(0)


def test_losing_a_host_affects_only_its_slabs() -> None:
    table = _mapped(slabs=3)
    for slab in range(3):
        _write(table, slab, 0, 4)
    assert table.lose_host("h1") == (1,)
    assert [table.held(slab) for slab in range(3)] == [4, 0, 4]
    assert [table.route_read(BlockRange(slab, 0, 1))[0].remote is None for slab in range(3)] == [0, 1, 0]
    assert table.hosts == {"h0": 1, "h2": 1}


def test_a_slab_is_placed_when_it_is_hot_and_tried_again_later() -> None:
    table = SlabTable(3, 64)
    for second in range(4):
        table.route_write(BlockRange(0, 0, 21))
        for _ in range(2):
            table.route_read(BlockRange(2, 0, 50))
        hot = table.tick(float(second))
        assert hot == ((2,) if second else ()), "at 100 a second the average exceeds 20 after two"
    first = table.start_mapping(2)
    table.fail_mapping(2, first, now=4.0)
    assert (table.tick(4.5), table.tick(5.0)) == ((), (2,))
    table.fail_mapping(2, table.start_mapping(2), now=5.0)
    table.route_read(BlockRange(2, 0, 64))
    assert (table.tick(6.5), table.is_hot(2)) == ((), True)
    assert not table.finish_mapping(2, first, "late")


def test_a_mapping_that_was_ended_meanwhile_is_not_used() -> None:
    table = SlabTable(1, 4)
    generation = table.start_mapping(0)
    table.fail_mapping(0, generation, now=0.0)
    assert not table.finish_mapping(0, generation, "a")
    table.start_mapping(0)
    with pytest.raises(OptionError, match="must be unmapped to be mapped; it is mapping"):
        table.start_mapping(0)


def test_numbers_outside_their_ranges_are_refused() -> None:
    for make in (
        lambda: SlabTable(0, 1), lambda: split_request(-1, 1, 1), lambda: split_request(0, 0, 1),
        lambda: _mapped().route_read(BlockRange(0, 3, 2)), lambda: _mapped().route_write(BlockRange(0, 1, 0)),
        lambda: _mapped().state(1), lambda: _mapped().tick(0.0, 0.0),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=r"must (be|start)"):
            make()


@given(st.integers(0, 500), st.integers(1, 200), st.integers(1, 70))
def test_a_request_is_split_into_parts_of_one_slab_each(first: int, count: int, blocks: int) -> None:
    parts = split_request(first, count, blocks)
    every = [part.slab * blocks + part.first + n for part in parts for n in range(part.count)]
    assert every == list(range(first, first + count))
    assert len({part.slab for part in parts}) == len(parts)


@dataclass
class Outstanding:
    """A write that a host was sent; its answer may be on the way."""

    route: WriteRoute
    version: int
    answer: bool | None = None


class World:
    """A client with its table, the memory of hosts, and a store that applies a slab's writes in their order.

    Operations on hosts complete in any order, and their answers arrive any time later; a host that dies loses its
    memory, what it had not answered fails.
    """

    def __init__(self, slabs: int = 2, blocks: int = 2, hosts: int = 2) -> None:
        self.table = SlabTable(slabs, blocks)
        self.slabs, self.blocks, self.hosts = slabs, blocks, [f"h{n}" for n in range(hosts)]
        self.memory: dict[tuple[str, int], dict[int, int]] = {}  # by host and handle
        self.disk: dict[tuple[int, int], int] = {}
        self.queues: list[deque[tuple[int, int]]] = [deque() for _ in range(slabs)]
        self.writes: list[Outstanding] = []
        self.reads: list[tuple[ReadRoute, int]] = []  # with the oldest version that they may return
        self.done: set[tuple[str, int]] = set()
        self.current: dict[tuple[int, int], int] = {}  # the last version written
        self.completed: dict[tuple[int, int], int] = {}
        self.version = self.handles = 0

    def write(self, slab: int, block: int) -> None:
        if self.completed.get((slab, block), 0) != self.current.get((slab, block), 0):
            return  # one writer of a block at a time
        self.version += 1
        self.current[slab, block] = self.version
        route = self.table.route_write(BlockRange(slab, block, 1))
        self.queues[slab].append((block, self.version))
        if route.remote is not None:
            self._issued(route)
            self.writes.append(Outstanding(route, self.version))

    def _issued(self, route: WriteRoute | ReadRoute) -> None:
        assert route.remote is not None
        assert (route.remote.host, route.remote.handle) not in self.done, "no operation follows DONE"

    def flush(self, slab: int) -> None:
        """The store applies the oldest write of a slab's queue."""
        if self.queues[slab]:
            block, version = self.queues[slab].popleft()
            self.disk[slab, block] = version
            if not any(one.version == version for one in self.writes):
                self._complete(slab, block, version)

    def _complete(self, slab: int, block: int, version: int) -> None:
        self.completed[slab, block] = max(self.completed.get((slab, block), 0), version)

    def apply(self, n: int, *, ok: bool = True) -> None:
        """A host carries out a write and answers, or fails to."""
        one = self.writes[n]
        assert one.route.remote is not None
        held = self.memory.get((one.route.remote.host, one.route.remote.handle))
        if one.answer is None:
            one.answer = ok and held is not None
            if one.answer and held is not None:
                held[one.route.blocks.first] = one.version

    def end_write(self, n: int) -> None:
        """The client takes the answer."""
        self.apply(n)
        one = self.writes.pop(n)
        ok = one.answer is True
        self.table.complete_write(one.route, ok=ok)
        slab, block = one.route.blocks.slab, one.route.blocks.first
        if ok or (block, one.version) not in self.queues[slab]:
            self._complete(slab, block, one.version)

    def read(self, slab: int, block: int) -> None:
        oldest = self.completed.get((slab, block), 0)
        (route,) = self.table.route_read(BlockRange(slab, block, 1))
        if route.remote is None:
            self._read_disk(slab, block, oldest)
        else:
            self._issued(route)
            self.reads.append((route, oldest))

    def _read_disk(self, slab: int, block: int, oldest: int) -> None:
        while self.queues[slab]:  # the read waits behind the slab's writes
            self.flush(slab)
        self._check(slab, block, self.disk.get((slab, block), 0), oldest)

    def _check(self, slab: int, block: int, found: int, oldest: int) -> None:
        assert oldest <= found <= self.current.get((slab, block), 0)

    def end_read(self, n: int) -> None:
        route, oldest = self.reads.pop(n)
        assert route.remote is not None
        held = self.memory.get((route.remote.host, route.remote.handle))
        slab, block = route.blocks.slab, route.blocks.first
        if self.table.complete_read(route, ok=held is not None):
            assert held is not None
            self._check(slab, block, held[block], oldest)
        else:
            self._read_disk(slab, block, oldest)

    def map(self, slab: int, host: int) -> None:
        if self.table.state(slab) is SlabState.UNMAPPED:
            self.handles += 1
            name = self.hosts[host]
            generation = self.table.start_mapping(slab)
            self.memory[name, self.handles] = {}
            assert self.table.finish_mapping(slab, generation, name, self.handles)

    def evict(self, slab: int) -> None:
        self.table.start_eviction(slab)

    def finish(self, slab: int) -> None:
        if self.table.is_drained(slab):
            gone = self.table.finish_eviction(slab)
            issued = [one.route.remote for one in self.writes] + [route.remote for route, _ in self.reads]
            assert gone not in issued, "operations are outstanding at DONE"
            self.done.add((gone.host, gone.handle))
            del self.memory[gone.host, gone.handle]

    def kill(self, host: int) -> None:
        name = self.hosts[host]
        for key in [key for key in self.memory if key[0] == name]:
            del self.memory[key]
        before = {slab: self.table.held(slab) for slab in range(self.slabs)}
        lost = self.table.lose_host(name)
        for slab, held in before.items():
            assert self.table.held(slab) == (0 if slab in lost else held)

    def settle(self) -> None:
        """Let all end, and read all blocks."""
        while self.writes:
            self.end_write(0)
        while self.reads:
            self.end_read(0)
        for slab in range(self.slabs):
            while self.queues[slab]:
                self.flush(slab)
        for slab, block in product(range(self.slabs), range(self.blocks)):
            self.read(slab, block)
            if self.reads:
                self.end_read(0)
            assert self.completed.get((slab, block), 0) == self.current.get((slab, block), 0)


STEPS = (
    "write",
    "read",
    "apply",
    "fail",
    "end",
    "end read",
    "flush",
    "map 0",
    "map 1",
    "evict",
    "finish",
    "kill 0",
)


def _play(world: World, step: str) -> None:
    if step == "write":
        world.write(0, 0)
    elif step == "read":
        world.read(0, 0)
    elif step == "apply" and world.writes:
        world.apply(len(world.writes) - 1)
    elif step == "fail" and world.writes:
        world.apply(len(world.writes) - 1, ok=False)
    elif step == "end" and world.writes:
        world.end_write(len(world.writes) - 1)
    elif step == "end read" and world.reads:
        world.end_read(len(world.reads) - 1)
    elif step == "flush":
        world.flush(0)
    elif step.startswith("map"):
        world.map(0, int(step[-1]))
    elif step == "evict":
        world.evict(0)
    elif step == "finish":
        world.finish(0)
    elif step.startswith("kill"):
        world.kill(0)


def test_every_short_history_of_one_block_reads_the_last_write() -> None:
    """All orders of four events after a mapping with one write: completions are late, hosts die between."""
    for steps in product(STEPS, repeat=4):
        world = World(slabs=1, blocks=1)
        world.map(0, 0)
        world.write(0, 0)
        for step in steps:
            _play(world, step)
        world.settle()


class Histories(RuleBasedStateMachine):
    """Any history of two slabs on two hosts."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(slab=st.integers(0, 1), block=st.integers(0, 1))
    def write(self, slab: int, block: int) -> None:
        self.world.write(slab, block)

    @rule(slab=st.integers(0, 1), block=st.integers(0, 1))
    def read(self, slab: int, block: int) -> None:
        self.world.read(slab, block)

    @precondition(lambda self: self.world.writes)
    @rule(data=st.data(), ok=st.booleans())
    def apply(self, data: st.DataObject, ok: bool) -> None:
        self.world.apply(data.draw(st.integers(0, len(self.world.writes) - 1)), ok=ok)

    @precondition(lambda self: self.world.writes)
    @rule(data=st.data())
    def end_write(self, data: st.DataObject) -> None:
        self.world.end_write(data.draw(st.integers(0, len(self.world.writes) - 1)))

    @precondition(lambda self: self.world.reads)
    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        self.world.end_read(data.draw(st.integers(0, len(self.world.reads) - 1)))

    @rule(slab=st.integers(0, 1))
    def flush(self, slab: int) -> None:
        self.world.flush(slab)

    @rule(slab=st.integers(0, 1), host=st.integers(0, 1))
    def map(self, slab: int, host: int) -> None:
        self.world.map(slab, host)

    @rule(slab=st.integers(0, 1))
    def evict(self, slab: int) -> None:
        self.world.evict(slab)

    @rule(slab=st.integers(0, 1))
    def finish(self, slab: int) -> None:
        self.world.finish(slab)

    @rule(host=st.integers(0, 1))
    def kill(self, host: int) -> None:
        self.world.kill(host)

    @invariant()
    def states_add_up(self) -> None:
        table = self.world.table
        assert table.states.total() == len(table)
        mapped = table.states[SlabState.MAPPED] + table.states[SlabState.EVICTING]
        assert table.hosts.total() == mapped

    def teardown(self) -> None:
        self.world.settle()


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
