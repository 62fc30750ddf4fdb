"""Entries that any client may read: put once, replaced by who keeps state, gone with their slab."""

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


def test_who_keeps_state_replaces_and_drops_it_and_its_room_is_used_again() -> None:
    entries, memory = _entries(2)
    assert entries.set(_key(0), b"a" * 1000)
    assert entries.set(_key(1), b"b" * 2000)
    assert entries.set(_key(0), b"c" * 1000), "in place"
    assert (entries.get(_key(0)), entries.get(_key(1))) == (b"c" * 1000, b"b" * 2000)
    for number in range(100):  # of another size each time, and never more than its room is taken
        assert entries.set(_key(0), bytes([number]) * (900 + number))
        assert entries.get(_key(0)) == bytes([number]) * (900 + number)
    assert memory.counts.mapped == 1
    assert not entries.set(_key(1), bytes(SLAB + 1))
    assert entries.get(_key(1)) == b"b" * 2000, "what was to be replaced stays"
    entries.drop([_key(0), _key(1), _key(7)])
    assert (len(entries), memory.counts.mapped, memory.counts.unmapped) == (0, 0, 2)
    assert entries.put(_key(3), bytes([3]) * SLAB)
    memory.close()


@given(
    st.lists(
        st.tuples(st.just("put"), st.integers(0, 9), st.integers(1, SLAB))
        | st.tuples(st.just("set"), st.integers(0, 9), st.integers(1, SLAB))
        | st.tuples(st.just("drop"), st.integers(0, 9), st.just(0))
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
        elif what == "set":
            data = bytes([number + 1]) * size
            if entries.set(_key(which), data):
                kept[which] = data
        elif what == "drop":
            entries.drop([_key(which)])
            kept.pop(which, None)
        elif what == "evict":
            owned = sorted(memory.pool.owned(OWNER))
            entries.evict(owned[which : which + 1])
            kept = {key: value for key, value in kept.items() if entries.get(_key(key))}
        elif memory.allocated < 4 * SLAB:
            memory.allocate(which)
        assert {key: entries.get(_key(key)) for key in kept} == kept
        assert len(entries) == len(kept)
    memory.close()
