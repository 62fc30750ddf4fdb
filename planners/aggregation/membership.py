"""Who trains together, round by round, when workers are lost, come and leave: views and agreements, without I/O.

A view is a numbered list of members. What they exchange are agreements, numbered from the first view on: one is made
once every member of the view has contributed to it. A worker that is lost ends the view, and what was not agreed in
it is tried again by those that are left, under the same number. Workers come, and leave on request, only at a
boundary: the agreement that ends a step. So all members take up a new view at the same place of their program: the
first agreement that was not made in the view before.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

_KEPT = 2  # agreements whose result is kept: a member is one behind the others at most


@dataclass(frozen=True, slots=True)
class View:
    """Who trains together.

    Args:
        number: of the view; 0: not all founders have come.
        members: workers, in their order.
        entered: those of them that have not ended a step yet.
        index: number of the first agreement that is made in it.
        lost: aggregators that are gone.
    """

    number: int = 0
    members: tuple[int, ...] = ()
    entered: tuple[int, ...] = ()
    index: int = 0
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Agreement:
    """What a member learns of an agreement.

    Args:
        view: that holds after it.
        values: of all members, in their order; ``None``: the view changed before it was made.
    """

    view: View
    values: tuple[str, ...] | None = None


class Membership:
    """Membership of one training.

    Args:
        founders: workers that begin together.
    """

    def __init__(self, founders: Iterable[int]) -> None:
        self.view = View()
        self._missing = set(founders)  # before the first view
        self._here: set[int] = set()
        self._waiting: set[int] = set()
        self._retiring: set[int] = set()
        self._index = 0  # of the agreement that comes next
        self._values: dict[int, str] = {}  # of it, by member
        self._made: dict[int, tuple[View, Agreement]] = {}  # with the view that each was made in

    @property
    def formed(self) -> bool:
        """Tell whether there has been a view."""
        return self.view.number > 0

    @property
    def due(self) -> bool:
        """Tell whether workers enter or leave at the next boundary."""
        leaving = self._retiring & set(self.view.members)
        return bool(self._waiting) or 0 < len(leaving) < len(self.view.members)

    def enter(self, worker: int) -> None:
        """Take note that a worker is ready: a founder, or one that is to be taken in at the next boundary."""
        if self.formed:
            if worker not in self.view.members:
                self._waiting.add(worker)
            return
        if worker in self._missing:
            self._missing.discard(worker)
            self._here.add(worker)
            self._form()

    def leave(self, worker: int) -> None:
        """Take note that a worker is gone."""
        self._waiting.discard(worker)
        self._retiring.discard(worker)
        if not self.formed:
            self._missing.discard(worker)
            self._here.discard(worker)
            self._form()
        elif worker in self.view.members:
            self._change(
                members=tuple(one for one in self.view.members if one != worker),
                entered=tuple(one for one in self.view.entered if one != worker),
            )

    def retire(self, worker: int) -> None:
        """Let a worker leave at the next boundary; one that is not a member does not enter."""
        self._waiting.discard(worker)
        if worker in self.view.members:
            self._retiring.add(worker)

    def stay(self, worker: int) -> None:
        """Take note that a worker which was asked to leave is wanted after all; one that has left is not back."""
        self._retiring.discard(worker)

    def lose_aggregator(self, name: str) -> None:
        """Take note that an aggregator is gone; its round is repeated with those that hold copies."""
        if name not in self.view.lost:
            self._change(lost=(*self.view.lost, name))

    def contribute(self, worker: int, view: int, index: int, value: str, *, boundary: bool = False) -> None:
        """Take a member's part of an agreement; what belongs to another view or agreement changes nothing.

        Args:
            worker: of the view.
            view: number of the view that it is in.
            index: number of the agreement.
            value: its part.
            boundary: whether a step ends with it; the same for all.
        """
        current = (
            view == self.view.number and index == self._index and worker in self.view.members and view > 0
        )
        if not current:
            return
        self._values.setdefault(worker, value)
        if len(self._values) == len(self.view.members):
            made_in = self.view
            values = tuple(self._values[one] for one in made_in.members)
            self._index += 1
            self._values = {}
            if boundary:
                self._pass_boundary()
            self._made[index] = made_in, Agreement(self.view, values)
            self._made.pop(index - _KEPT, None)

    def answer(self, worker: int, view: int, index: int) -> Agreement | None:
        """Return what a member learns of an agreement; ``None`` while it has to wait.

        A worker that is no member of the view it is told of has left.
        """
        made = self._made.get(index)
        if made is not None and made[0].number == view and worker in made[0].members:
            return made[1]
        if view != self.view.number or worker not in self.view.members:
            return Agreement(self.view)
        return None

    def _form(self) -> None:
        if not self._missing and self._here:
            self.view = replace(self.view, number=1, members=tuple(sorted(self._here)))

    def _change(self, **changes: object) -> None:
        self.view = replace(self.view, number=self.view.number + 1, index=self._index, **changes)  # type: ignore[arg-type]
        self._values = {}

    def _pass_boundary(self) -> None:
        """End a step: those that came with it belong, others enter, or leave where nobody enters.

        Both at once could leave nobody who knows the training's state. For the same reason those that are asked to
        leave stay where they are all that is left, until another one has come.
        """
        members = set(self.view.members)
        if self._waiting:
            entered, self._waiting = tuple(sorted(self._waiting)), set()
            self._change(members=tuple(sorted(members | set(entered))), entered=entered)
            return
        leaving = self._retiring & members
        if leaving and leaving != members:
            self._retiring = set()
            self._change(members=tuple(sorted(members - leaving)), entered=())
        elif self.view.entered:
            self.view = replace(self.view, entered=())
