"""How much a daemon lends: the worked examples, and that the node's own work always finds its reserve."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.headroom import (
    Action,
    Allocate,
    Evict,
    HeadroomPolicy,
    Hold,
    MemorySample,
    Release,
    SlabCounts,
    drainable_bytes,
)

GB = 2**30
TOTAL = 64 * GB


def _first(free_gb: float, unmapped: int, mapped: int) -> tuple[HeadroomPolicy, Action]:
    policy = HeadroomPolicy(GB, 8 * GB)
    used = TOTAL - int(free_gb * GB) - (unmapped + mapped) * GB
    return policy, policy.step(MemorySample(TOTAL, used), SlabCounts(unmapped, mapped))


@pytest.mark.parametrize(
    ("free_gb", "unmapped", "mapped", "action"),
    [
        (30, 0, 0, Allocate(22)), (8, 3, 5, Hold()), (6, 3, 5, Release(2)), (4.5, 3, 5, Release(3)),
        (2, 0, 4, Evict(4)), (2, 0, 0, Hold()), (9.5, 0, 0, Hold()), (10, 0, 0, Allocate(2)),
    ],
)  # fmt: skip
def test_the_control_loop_of_the_source(free_gb: float, unmapped: int, mapped: int, action: Action) -> None:
    assert _first(free_gb, unmapped, mapped)[1] == action


def test_mapped_slabs_follow_where_unmapped_ones_do_not_suffice() -> None:
    policy, action = _first(4.5, 3, 5)
    assert action == Release(3)
    assert policy.free(SlabCounts(0, 5)) == 7.5 * GB
    assert policy.decide(SlabCounts(0, 5)) == Evict(1)
    assert policy.decide(SlabCounts(0, 5, evicting=1)) == Hold(), "its eviction is under way"
    assert policy.decide(SlabCounts(0, 4)) == Hold()


def test_a_slab_released_is_not_allocated_again_by_the_next_sample() -> None:
    policy = HeadroomPolicy(GB, 8 * GB)
    slabs = SlabCounts(10, 0)
    assert policy.step(MemorySample(TOTAL, TOTAL - 18 * GB + 1), slabs) == Release(1)
    assert policy.step(MemorySample(TOTAL, TOTAL - 18 * GB), SlabCounts(9, 0)) == Hold()


def test_memory_that_is_free_for_a_moment_only_is_not_lent() -> None:
    policy = HeadroomPolicy(GB, 8 * GB)
    none = SlabCounts(0, 0)
    assert policy.step(MemorySample(TOTAL, 56 * GB), none) == Hold()
    assert policy.step(MemorySample(TOTAL, 45 * GB), none) == Allocate(2), "smoothed: 53.8 GB are in use"
    assert policy.step(MemorySample(TOTAL, 60 * GB), SlabCounts(0, 2)) == Evict(2), "at once"


@pytest.mark.parametrize(
    ("rate", "notice", "safety", "slabs"),
    [(200e6 / 8, 120, 0.8, 2), (200e6 / 8, 42, 1, 0), (200e6 / 8, 43, 1, 1), (1.25e9, 120, 0.5, 69)],
)
def test_no_more_is_lent_than_leaves_within_a_notice(
    rate: float, notice: float, safety: float, slabs: int
) -> None:
    policy = HeadroomPolicy(GB, 8 * GB, max_lent_bytes=drainable_bytes(rate, notice, safety))
    action = policy.step(MemorySample(TOTAL * 2, 0), SlabCounts(0, 0))
    assert action == (Allocate(slabs) if slabs else Hold())


def test_a_slower_link_takes_slabs_back() -> None:
    policy = HeadroomPolicy(GB, 8 * GB, max_lent_bytes=10 * GB)
    policy.step(MemorySample(TOTAL, 0), SlabCounts(0, 0))
    policy.limit(4 * GB)
    assert policy.decide(SlabCounts(3, 7)) == Release(3)
    assert policy.decide(SlabCounts(0, 7)) == Evict(3)
    policy.limit(None)
    assert policy.decide(SlabCounts(0, 7)) == Allocate(49)


@dataclass
class Node:
    """A node in a closed loop: an allocation takes effect at once, an eviction after a second."""

    policy: HeadroomPolicy
    unmapped: int = 0
    mapped: int = 0
    evicting: int = 0

    @property
    def slabs(self) -> SlabCounts:
        return SlabCounts(self.unmapped, self.mapped, self.evicting)

    def second(self, used: int, wanted: int) -> list[Action]:
        """Let a second pass in which clients map slabs, and return what the daemon did."""
        self.mapped -= self.evicting
        self.evicting = 0
        taken = min(wanted, self.unmapped)
        self.unmapped, self.mapped = self.unmapped - taken, self.mapped + taken
        action = self.policy.step(MemorySample(TOTAL, used), self.slabs)
        done = []
        while not isinstance(action, Hold):
            done.append(action)
            if isinstance(action, Allocate):
                self.unmapped += action.n
                break
            if isinstance(action, Release):
                self.unmapped -= action.n
            else:
                assert isinstance(action, Evict)
                self.evicting += action.n
            action = self.policy.decide(self.slabs)
        return done

    def free(self, used: int) -> int:
        return TOTAL - used - (self.unmapped + self.mapped - self.evicting) * GB


def test_a_step_of_the_own_work_is_answered_at_once_and_slabs_return_slowly() -> None:
    node = Node(HeadroomPolicy(GB, 8 * GB))
    for _ in range(30):
        node.second(10 * GB, wanted=4)
    assert (node.free(10 * GB), node.mapped) == (8 * GB, 46)
    node.second(40 * GB, wanted=0)
    assert node.free(40 * GB) == 8 * GB, "30 slabs evicted in one interval"
    node.second(40 * GB, wanted=0)
    assert node.mapped == 16
    lent = []
    for _ in range(25):
        node.second(10 * GB, wanted=0)
        lent.append(node.unmapped + node.mapped)
    assert lent == sorted(lent)
    assert lent[0] == 37, "smoothed: 18.6 GB are in use"
    assert node.free(10 * GB) <= 10 * GB


def test_a_ramp_of_the_own_work_never_finds_less_than_the_reserve_lacks() -> None:
    node = Node(HeadroomPolicy(GB, 8 * GB))
    for _ in range(20):
        node.second(8 * GB, wanted=3)
    for step in range(80):
        used = 8 * GB + step * GB // 2
        node.second(used, wanted=3)
        assert node.free(used) >= 8 * GB
    quiet = [node.second(used, wanted=3) for _ in range(60)]
    assert quiet[-1] == [], "it settles"


@given(st.lists(st.tuples(st.integers(0, 56), st.integers(0, 6)), min_size=1, max_size=60))
def test_the_reserve_is_free_once_evictions_are_done(trace: list[tuple[int, int]]) -> None:
    """While others use no more than total minus reserve, and an interval suffices to evict."""
    node = Node(HeadroomPolicy(GB, 8 * GB))
    for used, wanted in trace:
        done = node.second(used * GB, wanted)
        assert node.free(used * GB) >= 8 * GB
        kinds = [type(one) for one in done]
        assert kinds in ([], [Allocate], [Release], [Evict], [Release, Evict])
    last = trace[-1][0] * GB
    for _ in range(60):
        node.second(last, 0)
    assert 8 * GB <= node.free(last) <= 10 * GB, "what is left is not idle either"


def test_numbers_outside_their_ranges_are_refused() -> None:
    for make in (
        lambda: HeadroomPolicy(0, 1), lambda: HeadroomPolicy(1, -1), lambda: HeadroomPolicy(1, 1, beta=0),
        lambda: HeadroomPolicy(1, 1, max_lent_bytes=-1), lambda: drainable_bytes(0, 1),
        lambda: drainable_bytes(1, -1), lambda: drainable_bytes(1, 1, 0),
    ):  # fmt: skip
        with pytest.raises(OptionError, match="must"):
            make()
