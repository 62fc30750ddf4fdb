"""Whatever the order of grants, recalls and ends: no GPU is used that is released, or not the app's."""

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from lease_cases import RULES, Hands, book_of, lease

from ebbflow.infra.errors import LeaseError
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import Lease
from ebbflow.tasks.apps.lease_table import LeaseTable, Rules


def test_nothing_is_used_or_released_before_the_earlier_self_is_gone() -> None:
    book = LeaseTable("app", Hands(), RULES)
    book.learn([replace(lease(1), recalled=1010.0), lease(2, slot=1)], 1e9)
    assert book.allowed() == ()
    assert book.account() == ((1, 2), ())
    with pytest.raises(LeaseError):
        book.enter("u", "a", 1)
    book.settle()
    assert [one.number for one in book.allowed()] == [2]
    assert book.account() == ((2,), (1,))


def test_a_lease_called_back_is_released_when_its_last_process_is_gone() -> None:
    book, _ = book_of(lease(1), lease(2, slot=1))
    assert [one.number for one in book.enter("u", "a", 2)] == [1, 2]
    book.learn([replace(lease(1), recalled=1010.0), lease(2, slot=1)], 1e9)
    assert book.account() == ((1, 2), ())
    assert book.due() == {1: 1010.0}
    assert book.placement() == {"a": 1}
    book.leave("u")
    assert book.account() == ((2,), (1,))
    assert book.due() == {}
    with pytest.raises(LeaseError, match="needs 2 GPUs of a; app has leases on 1"):
        book.enter("v", "a", 2)
    assert [one.slot for one in book.enter("v", "a", 1)] == [1]


def test_a_process_keeps_its_gpu_so_a_node_shrinks_before_it_grows() -> None:
    book, _ = book_of(lease(1))
    book.enter("u", "a", 1)
    book.learn([replace(lease(1), recalled=1010.0), lease(2, slot=1)], 1e9)
    assert book.placement() == {}, "as many GPUs as before, but not the one in use"
    book.leave("u")
    assert book.placement() == {"a": 1}


def test_a_lease_ends_later_while_no_loop_is_there_to_extend_it() -> None:
    book, clock = book_of(lease(1), lead=1050.0)
    clock.time = 1049.0
    assert book.allowed()
    clock.time = 1096.0
    assert not book.led
    assert book.allowed(), "no loop lives: kept until its end and the grace"
    clock.time = 1116.0
    assert not book.allowed(), "what is left of the grace is for leaving"
    assert book.account()[1] == ()
    clock.time = 1120.0
    assert book.account() == ((), (1,))


def test_with_a_live_loop_an_end_that_is_not_extended_is_left_in_time() -> None:
    book, clock = book_of(lease(1))
    book.enter("u", "a", 1)
    clock.time = 1096.0
    assert book.due() == {1: 1100.0}
    book.learn([replace(lease(1), until=1200.0)], 1e9)
    assert book.due() == {}


def test_nothing_is_started_while_the_ledger_does_not_answer() -> None:
    book, clock = book_of(lease(1))
    clock.time += RULES.fence + 1.0
    assert book.allowed()
    with pytest.raises(LeaseError, match="has not responded for 6 s"):
        book.enter("u", "a", 1)


def test_an_ended_lease_is_to_be_left_at_once() -> None:
    book, _ = book_of(lease(1))
    book.enter("u", "a", 1)
    book.learn([], 1e9)
    assert book.due() == {1: 0.0}
    assert book.users([1]) == {"u": "a"}
    book.leave("u")
    assert book.account() == ((), ())


def test_of_several_trainings_each_has_its_own_leases() -> None:
    book, _ = book_of(lease(1), lease(2, slot=1), lease(3, "b"))
    assert [one.number for one in book.enter("u", "a", 1, {2, 3})] == [2]
    assert book.placement({2, 3}) == {"a": 1, "b": 1}
    with pytest.raises(LeaseError, match="leases on 0 that are free"):
        book.enter("v", "a", 1, {2, 3})
    book.learn([lease(1), replace(lease(2, slot=1), recalled=1010.0), lease(3, "b")], 1e9)
    assert book.due({1}) == {}
    assert book.due({2, 3}) == {2: 1010.0}
    assert book.placement({1}) == {"a": 1}, "what others leave there is not its business"


@pytest.mark.parametrize("field", ["grace", "leave", "fence"])
def test_rules_are_checked(field: str) -> None:
    with pytest.raises(OptionError, match=f"{field} must be >= 0 s"):
        Rules(**{field: -1.0})


class Books(RuleBasedStateMachine):
    """A ledger that changes as it likes, an app that enters and leaves as it likes, and time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Hands()
        self.book = LeaseTable("app", self.clock, RULES)
        self.book.settle()
        self.ledger: dict[int, Lease] = {}
        self.lead = 0.0
        self.last = 0
        self.users: dict[str, list[int]] = {}
        self.gone: set[int] = set()  # released once
        self.said: tuple[int, ...] = ()
        self.read()

    def read(self) -> None:
        self.book.learn(self.ledger.values(), self.lead)

    @rule(node=st.sampled_from("ab"), slot=st.integers(0, 1), seconds=st.floats(1, 60))
    def granted(self, node: str, slot: int, seconds: float) -> None:
        if any((one.node, one.slot) == (node, slot) for one in self.ledger.values()):
            return
        self.last += 1
        now = self.clock.time
        self.ledger[self.last] = lease(self.last, node, slot, now, now + seconds)

    @precondition(lambda self: self.ledger)
    @rule(data=st.data(), seconds=st.floats(0, 30))
    def recalled(self, data: st.DataObject, seconds: float) -> None:
        number = data.draw(st.sampled_from(sorted(self.ledger)))
        self.ledger[number] = replace(self.ledger[number], recalled=self.clock.time + seconds)

    @precondition(lambda self: self.ledger)
    @rule(data=st.data(), seconds=st.floats(0, 60))
    def extended(self, data: st.DataObject, seconds: float) -> None:
        number = data.draw(st.sampled_from(sorted(self.ledger)))
        self.ledger[number] = replace(self.ledger[number], until=self.clock.time + seconds)

    @rule()
    def ended_what_was_let_go(self) -> None:
        for number in self.said:
            self.ledger.pop(number, None)

    @precondition(lambda self: self.ledger)
    @rule(data=st.data())
    def ended_by_force(self, data: st.DataObject) -> None:
        del self.ledger[data.draw(st.sampled_from(sorted(self.ledger)))]

    @rule(seconds=st.floats(0, 20))
    def leads(self, seconds: float) -> None:
        self.lead = self.clock.time + seconds

    @rule()
    def looks(self) -> None:
        self.read()

    @rule(seconds=st.floats(0, 15))
    def passes(self, seconds: float) -> None:
        self.clock.time += seconds

    @rule(node=st.sampled_from("ab"), count=st.integers(1, 2))
    def enters(self, node: str, count: int) -> None:
        before, user = self.book.allowed(), f"u{len(self.users)}-{self.clock.time}-{self.last}"
        try:
            taken = self.book.enter(user, node, count)
        except LeaseError:
            return
        busy = {number for numbers in self.users.values() for number in numbers}
        assert len(taken) == count
        for one in taken:
            assert one in before
            assert one.node == node
            assert one.number not in busy | self.gone
            assert one.recalled is None
            assert self.clock.time < one.until + RULES.grace
        self.users[user] = [one.number for one in taken]

    @precondition(lambda self: self.users)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        user = data.draw(st.sampled_from(sorted(self.users)))
        del self.users[user]
        self.book.leave(user)

    @rule(data=st.data())
    def gives_back(self, data: st.DataObject) -> None:
        self.book.release(data.draw(st.sets(st.integers(1, max(self.last, 1)))))

    @rule()
    def reports(self) -> None:
        holds, self.said = self.book.account()
        self.gone |= set(self.said)
        assert not set(holds) & set(self.said)

    @invariant()
    def nothing_in_use_is_released(self) -> None:
        busy = {number for numbers in self.users.values() for number in numbers}
        holds, released = self.book.account()
        assert not busy & set(released)
        assert busy <= set(holds)
        assert not busy & self.gone
        assert self.book.used() == busy
        known = {one.number for one in self.book.allowed()}
        for number in busy - known:
            assert number in self.book.due()
        for node, count in self.book.placement().items():
            assert count <= sum(one.node == node for one in self.book.allowed())


TestBooks = Books.TestCase
TestBooks.settings = settings(stateful_step_count=25)
