"""Entries that any client may read: kept once, never replaced, gone with their slab."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.memory.lending.entries import OWNER, SharedEntries
from ebbflow.infra.memory.lending.slabs import LentMemory

SLAB = 4096


def _key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def _entries(slabs: int) -> tuple[SharedEntries, LentMemory]:
    memory = LentMemory(SLAB)
    memory.allocate(slabs)
    return SharedEntries(memory), memory


def test_entries_are_kept_until_there_is_no_room_and_then_not_replaced() -> None:
    entries, memory = _entries(2)
    data = [bytes([n]) * (SLAB // 2) for n in range(5)]
    assert [entries.put(_key(n), data[n]) for n in range(5)] == [True] * 4 + [False]
    assert [entries.get(_key(n)) for n in range(5)] == [*data[:4], b""]
    assert entries.put(_key(1), b"other"), "there is one of this key"
    assert entries.get(_key(1)) == data[1]
    assert not entries.put(_key(9), b"")
    assert not entries.put(_key(9), bytes(SLAB + 1))
    assert (len(entries), memory.counts.mapped, memory.counts.unmapped) == (4, 2, 0)
    memory.close()


def test_the_slab_that_is_read_less_is_the_less_active_and_goes_with_its_entries() -> None:
    entries, memory = _entries(2)
    for number in range(4):
        entries.put(_key(number), bytes([number]) * (SLAB // 2))
    for _ in range(10):
        entries.get(_key(2))
    entries.get(_key(0))
    entries.tick(2.0)
    first, second = sorted(memory.pool.owned(OWNER))
    assert entries.activity((first, second)) == {first: pytest.approx(0.1), second: pytest.approx(1.0)}
    entries.evict([first])
    assert [len(entries.get(_key(n))) for n in range(4)] == [0, 0, SLAB // 2, SLAB // 2]
    assert (memory.counts.mapped, memory.allocated) == (1, SLAB)
    assert not entries.put(_key(0), b"again"), "the system has its memory now"
    memory.allocate(1)
    assert entries.put(_key(0), b"again")
    assert entries.get(_key(0)) == b"again"
    memory.close()


@given(
    st.lists(
        st.tuples(st.just("put"), st.integers(0, 9), st.integers(1, SLAB))
        | st.tuples(st.just("evict"), st.integers(0, 3), st.just(0))
        | st.tuples(st.just("allocate"), st.just(1), st.just(0)),
        max_size=40,
    )
)
def test_an_entry_is_there_as_it_was_put_or_not_at_all(steps: list[tuple[str, int, int]]) -> None:
    entries, memory = _entries(2)
    kept: dict[int, bytes] = {}
    for number, (what, which, size) in enumerate(steps):
        if what == "put":
            data = bytes([number + 1]) * size
            if entries.put(_key(which), data) and not (
                which in kept and entries.get(_key(which)) == kept[which]
            ):
                kept[which] = data
        elif what == "evict":
            owned = sorted(memory.pool.owned(OWNER))
            entries.evict(owned[which : which + 1])
            kept = {key: value for key, value in kept.items() if entries.get(_key(key))}
        elif memory.allocated < 4 * SLAB:
            memory.allocate(which)
        assert {key: entries.get(_key(key)) for key in kept} == kept
        assert len(entries) == len(kept)
    memory.close()
