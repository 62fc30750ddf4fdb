"""What tiers cost, where one is worth using, and the source's arithmetic of power."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.memory.tiers import (
    Tier,
    break_even_block,
    network_cost_per_month,
    peer_tier_enabled,
    tier_cost,
    written_through,
)

RAM = Tier("local memory", 1e-7, 10e9)
PEER = Tier("peer memory", 100e-6, 1e9)
DISK = Tier("local disk", 4e-3, 400e6)
STORE = Tier("object store", 20e-3, 50e6)
NVME = Tier("local disk", 80e-6, 2e9)
KIB, MIB = 2**10, 2**20


def test_tiers_are_ordered_by_their_cost() -> None:
    costs = [tier_cost(64 * MIB, one) for one in (RAM, PEER, DISK, STORE)]
    assert costs == sorted(costs)
    assert tier_cost(50e6, STORE) == pytest.approx(1.02)
    assert tier_cost(50e6, STORE, requests=10) == pytest.approx(1.2)
    assert tier_cost(0, STORE, requests=0) == 0


def test_peers_are_used_where_they_are_faster() -> None:
    used = peer_tier_enabled(PEER, STORE, MIB)
    assert used.enabled
    assert (
        used.reason
        == "a request of 1 MiB takes 1.15 ms in peer memory and 41 ms in object store: 35.7 times as fast"
    )


def test_the_tier_is_off_where_the_disk_is_faster() -> None:
    off = peer_tier_enabled(PEER, NVME, MIB)
    assert not off.enabled
    assert off.reason.endswith("it must be more than 1 times as fast, and no size of a request is")


def test_a_decision_names_the_sizes_that_would_be_faster() -> None:
    slow_start = Tier("peer memory", 1e-3, 1e9)
    assert not (small := peer_tier_enabled(slow_start, Tier("disk", 1e-4, 1e8), 4 * KIB)).enabled
    assert "requests above 97.7 KiB take less time" in small.reason
    fast_start = Tier("peer memory", 1e-4, 1e8)
    assert not (large := peer_tier_enabled(fast_start, Tier("disk", 1e-3, 1e9), MIB)).enabled
    assert "requests below 97.7 KiB take less time" in large.reason
    assert not peer_tier_enabled(PEER, DISK, MIB, min_gain=10).enabled


def test_a_decision_for_peers_names_the_sizes_that_would_be_slower() -> None:
    used = peer_tier_enabled(Tier("peer memory", 1e-3, 1e9), Tier("disk", 1e-4, 1e8), MIB)
    assert used.reason.endswith("5.2 times as fast; requests above 97.7 KiB take less time")


@pytest.mark.parametrize(
    ("peer", "behind", "above", "below"),
    [
        (PEER, STORE, 0, inf), (PEER, NVME, 0, 0), (Tier("p", 2, 1), Tier("d", 1, 1), inf, inf),
        (Tier("p", 1, 1), Tier("d", 2, 1), 0, inf), (Tier("p", 2, 2), Tier("d", 1, 1), 2, inf),
        (Tier("p", 1, 1), Tier("d", 2, 2), 0, 2),
    ],
)  # fmt: skip
def test_break_even(peer: Tier, behind: Tier, above: float, below: float) -> None:
    found = break_even_block(peer, behind)
    assert (found.above_bytes, found.below_bytes) == (above, below)
    assert found.never == (above >= below)


SPEEDS = st.builds(Tier, st.just("t"), st.floats(0, 1), st.floats(1e3, 1e10))


@given(SPEEDS, SPEEDS, st.integers(1, 10**9))
def test_the_break_even_agrees_with_the_costs(peer: Tier, behind: Tier, size: int) -> None:
    here, there = tier_cost(size, peer), tier_cost(size, behind)
    if abs(here - there) > 1e-9 * max(here, there):
        assert break_even_block(peer, behind).includes(size) == (here < there)
        assert peer_tier_enabled(peer, behind, size).enabled == (here < there)


@given(SPEEDS, SPEEDS, st.integers(1, 10**9))
def test_a_write_through_and_a_read_take_what_they_take_in_the_two(
    front: Tier, behind: Tier, size: int
) -> None:
    both = tier_cost(size, behind) + tier_cost(size, front)
    assert 2 * tier_cost(size, written_through(front, behind)) == pytest.approx(both)


def test_the_sources_cost_of_a_network() -> None:
    assert network_cost_per_month() == pytest.approx(1.454, abs=5e-4)
    assert network_cost_per_month(machines_per_switch=36) == pytest.approx(1.38, abs=5e-3)
    assert network_cost_per_month(hours=730) == pytest.approx(1.466, abs=5e-4)


def test_numbers_outside_their_ranges_are_refused() -> None:
    for make in (
        lambda: Tier("t", -1, 1), lambda: Tier("t", 0, 0), lambda: Tier("t", inf, 1), lambda: tier_cost(-1, RAM),
        lambda: peer_tier_enabled(PEER, DISK, 0), lambda: peer_tier_enabled(PEER, DISK, 1, 0.5),
        lambda: network_cost_per_month(machines_per_switch=0),
    ):  # fmt: skip
        with pytest.raises(OptionError, match="must"):
            make()
