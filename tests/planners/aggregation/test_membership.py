"""Membership: views and agreements, by examples and by random histories of losses, arrivals and lost answers."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.planners.aggregation.membership import Agreement, Membership, View


def begun(*workers: int) -> Membership:
    made = Membership(workers)
    for one in workers:
        made.enter(one)
    return made


def agree(made: Membership, index: int, *, boundary: bool = False) -> Agreement:
    view = made.view
    for one in view.members:
        made.contribute(one, view.number, index, f"{one}", boundary=boundary)
    found = {made.answer(one, view.number, index) for one in view.members}
    assert len(found) == 1
    agreed = found.pop()
    assert agreed is not None
    return agreed


def test_a_view_begins_with_all_founders_that_are_left() -> None:
    made = Membership([0, 1, 2])
    made.enter(0)
    made.enter(1)
    assert not made.formed
    made.leave(2)
    assert made.view == View(1, (0, 1))


def test_an_agreement_has_the_values_of_all_and_waits_for_them() -> None:
    made = begun(0, 1)
    made.contribute(1, 1, 0, "b")
    assert made.answer(1, 1, 0) is None
    made.contribute(0, 1, 0, "a")
    assert made.answer(1, 1, 0) == made.answer(0, 1, 0) == Agreement(made.view, ("a", "b"))


def test_a_loss_ends_what_is_not_agreed_and_keeps_what_is() -> None:
    made = begun(0, 1, 2)
    agreed = agree(made, 0)
    made.contribute(0, 1, 1, "x")
    made.leave(2)
    assert made.view == View(2, (0, 1), index=1)
    assert made.answer(1, 1, 0) == agreed, "a member that has not heard of it yet does so"
    assert made.answer(0, 1, 1) == Agreement(made.view), "the others try again"
    assert made.answer(2, 1, 1) == Agreement(made.view), "it is not among the members"
    assert agree(made, 1).values == ("0", "1")


def test_who_comes_enters_at_the_end_of_a_step() -> None:
    made = begun(0, 1)
    made.enter(7)
    assert agree(made, 0).view.members == (0, 1)
    assert agree(made, 1, boundary=True).view == View(2, (0, 1, 7), (7,), index=2)
    assert made.view.members == (0, 1, 7)
    assert agree(made, 2, boundary=True).view == View(2, (0, 1, 7), (), index=2)


def test_who_is_asked_to_leave_does_at_the_end_of_a_step_but_never_with_those_that_know_the_state() -> None:
    made = begun(0)
    made.retire(0)
    made.enter(1)
    assert agree(made, 0, boundary=True).view.members == (0, 1), "somebody has to tell the one that comes"
    made.retire(0)
    assert agree(made, 1, boundary=True).view.members == (1,)
    made.retire(1)
    assert agree(made, 2, boundary=True).view.members == (1,), "somebody stays"
    assert not made.due
    made.enter(2)
    assert made.due
    assert agree(made, 3, boundary=True).view.members == (1, 2)
    assert made.due, "until another has come, and ended a step"
    assert agree(made, 4, boundary=True).view.members == (2,)


def test_who_is_wanted_after_all_stays_and_who_has_left_is_not_back() -> None:
    made = begun(0, 1, 2)
    made.retire(1)
    made.retire(2)
    made.stay(1)
    assert made.due
    assert agree(made, 0, boundary=True).view.members == (0, 1)
    made.stay(2)
    made.enter(3)
    assert agree(made, 1, boundary=True).view.members == (0, 1, 3)
    assert agree(made, 2, boundary=True).view.members == (0, 1, 3)
    made.retire(0)
    made.stay(0)
    assert not made.due
    assert agree(made, 3, boundary=True).view.members == (0, 1, 3)


def test_a_lost_aggregator_begins_a_view_of_the_same_members() -> None:
    made = begun(0, 1)
    made.lose_aggregator("a")
    made.lose_aggregator("a")
    assert made.view == View(2, (0, 1), lost=("a",))


class Program:
    """A worker that agrees again and again: a step, or what comes before its first one in a view."""

    def __init__(self, name: int, made: Membership) -> None:
        self.name, self.made = name, made
        self.view: View | None = None
        self.index = 0
        self.done: list[tuple[int, tuple[str, ...]]] = []
        self.sent = False

    def act(self, *, hear: bool) -> None:
        if self.view is None:
            if self.made.formed and self.name in self.made.view.members:
                self.view, self.index = self.made.view, self.made.view.index
            return
        if not self.sent:
            value = f"{self.name}@{self.view.number}"
            self.made.contribute(self.name, self.view.number, self.index, value, boundary=self.index % 2 == 1)
            self.sent = True
        if not hear:
            return
        found = self.made.answer(self.name, self.view.number, self.index)
        if found is not None:
            self.sent = False
            if found.values is not None:
                self.done.append((self.index, found.values))
                self.index += 1
            self.view = found.view


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 5), st.sampled_from(["act", "act", "act", "deaf", "leave", "enter", "retire"])
        ),
        max_size=120,
    )
)
def test_all_that_survive_know_the_same_of_every_agreement(events: list[tuple[int, str]]) -> None:
    made = begun(0, 1, 2)
    programs = {name: Program(name, made) for name in range(6)}
    lost: set[int] = set()
    for name, what in events:
        if name in lost:
            continue
        if what in ("act", "deaf"):
            programs[name].act(hear=what == "act")
        elif what == "enter":
            made.enter(name)
        elif what == "retire":
            made.retire(name)
        elif len(set(made.view.members) - {name}) > 0:
            made.leave(name)
            lost.add(name)
    for _ in range(6):  # everybody hears in the end
        for name in set(programs) - lost:
            programs[name].act(hear=True)
    agreed: dict[int, tuple[str, ...]] = {}
    for one in programs.values():
        for index, values in one.done:
            assert agreed.setdefault(index, values) == values
            assert len({value.partition("@")[2] for value in values}) == 1, "all of one view"
    ahead = [programs[name].index for name in made.view.members if programs[name].view is not None]
    assert max(ahead) - min(ahead) <= 1, "no member is left behind"
    assert max(agreed) >= 1, "and they get on"


def test_a_boundary_is_due_while_somebody_waits_for_it() -> None:
    made = begun(0, 1)
    assert not made.due
    made.enter(2)
    assert made.due
    agree(made, 0, boundary=True)
    assert made.view.members == (0, 1, 2)
    assert not made.due
    made.retire(0)
    assert made.due
    made.leave(0)
    assert not made.due
