"""A daemon's slabs: each is used by one client at most, and what another client wrote is overwritten first."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.headroom import SlabCounts
from ebbflow.planners.memory.slab_pool import Grant, SlabPool


def test_a_slab_of_another_client_is_zeroed_before_it_is_granted() -> None:
    pool = SlabPool()
    pool.allocate(1)
    assert pool.grant("a", 1.0) == Grant(0, zero=False)
    assert pool.grant("b", 1.0) is None
    assert pool.unmap(0, keep=True)
    assert pool.grant("a", 2.0) == Grant(0, zero=False)
    pool.unmap(0, keep=True)
    pool.allocate(1)
    assert pool.grant("b", 3.0) == Grant(1, zero=False), "one that needs no zeroing goes first"
    assert pool.grant("b", 3.0) == Grant(0, zero=True)
    assert pool.owned("b") == (1, 0)
    assert pool.owned("a") == ()


def test_only_the_owner_may_use_a_slab() -> None:
    pool = SlabPool()
    pool.allocate(2)
    pool.grant("a", 0.0)
    pool.check(0, "a")
    for handle, client in ((0, "b"), (1, "a"), (2**63, "a")):
        with pytest.raises(OptionError, match=f"slab {handle} must be mapped by client"):
            pool.check(handle, client)


def test_a_slab_is_evicted_once() -> None:
    pool = SlabPool()
    pool.allocate(3)
    pool.grant("a", 0.0)
    pool.grant("b", 0.0)
    pool.start_eviction([0])
    assert [one.slab for one in pool.evictable] == [1]
    assert pool.counts == SlabCounts(1, 2, 1)
    assert pool.unmap(0, keep=False)
    assert not pool.unmap(0, keep=False), "its DONE came twice"
    assert pool.counts == SlabCounts(1, 1, 0)
    with pytest.raises(OptionError, match="slab 0 must be mapped to be evicted"):
        pool.start_eviction([0])


def test_no_more_is_released_than_there_is() -> None:
    pool = SlabPool()
    pool.allocate(2)
    assert pool.release(0) == ()
    assert pool.release(5) == (0, 1)
    assert pool.allocate(1) == (2,), "handles are never used twice"


class Daemon(RuleBasedStateMachine):
    """Any history of a daemon with three clients, beside a record of who was granted what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlabPool()
        self.owners: dict[int, str] = {}
        self.wrote: dict[int, str] = {}  # whose data each slab holds
        self.slabs = 0

    @rule(n=st.integers(0, 3))
    def allocate(self, n: int) -> None:
        self.slabs += len(self.pool.allocate(n))

    @rule(n=st.integers(0, 3))
    def release(self, n: int) -> None:
        gone = self.pool.release(n)
        assert not set(gone) & set(self.owners)
        self.slabs -= len(gone)

    @rule(client=st.sampled_from("abc"))
    def grant(self, client: str) -> None:
        found = self.pool.grant(client, 0.0)
        if found is None:
            assert self.slabs == len(self.owners)
            return
        assert found.handle not in self.owners
        assert found.zero == (self.wrote.get(found.handle, client) != client)
        self.owners[found.handle] = self.wrote[found.handle] = client

    @rule(data=st.data(), keep=st.booleans())
    def unmap(self, data: st.DataObject, keep: bool) -> None:
        handle = data.draw(st.integers(0, 20))
        assert self.pool.unmap(handle, keep=keep) == (handle in self.owners)
        if self.owners.pop(handle, None) is not None and not keep:
            self.slabs -= 1

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        self.pool.start_eviction(
            data.draw(st.lists(st.sampled_from(sorted(self.owners)))) if self.owners else []
        )

    @invariant()
    def slabs_add_up(self) -> None:
        counts = self.pool.counts
        assert counts.unmapped + counts.mapped == self.slabs
        assert counts.mapped == len(self.owners)
        assert counts.evicting == counts.mapped - len(self.pool.evictable)
        assert {handle: self.pool.owner(handle) for handle in self.owners} == self.owners


TestDaemon = Daemon.TestCase
TestDaemon.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
