"""``MemberWorld``: the processes of one generation, where they come and go while the others train on.

They agree over the launcher's channel instead of collectives, so that the loss of one ends no other. A member is the
rank of a process as the launcher numbers them; ``rank`` is its place among those that are there.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.process import agreeing, nccl
from ebbflow.infra.training.process.channel import Channel
from ebbflow.infra.training.process.leaving import PEER_LOST, RunStopped
from ebbflow.infra.training.process.world import World, take_device
from ebbflow.planners.aggregation.membership import View

COMES_LATER = "EBBFLOW_COMES_LATER"  # set for a process that joins others that train already


@dataclass(slots=True)
class _Seat:
    """What changes of a process's place."""

    signals: Channel
    channel: Channel
    member: int
    slots: int
    later: bool
    view: View = field(default_factory=View)
    index: int = 0  # of the agreement that comes next
    retired: bool = False  # whether the others train on without it, as it was asked
    on_view: Callable[[View], None] = lambda view: None


class MemberWorld(World):
    """One process's place among those that are there.

    Args:
        signals: channel whose listening thread learns of new views.
        channel: channel for agreements.
        member: rank of this process, as the launcher numbers it.
        slots: processes of a node.
        device: that it trains on.
        later: whether it joins others that train already.
    """

    __slots__ = ("_seat",)

    _seat: _Seat

    def __init__(
        self,
        signals: Channel,
        channel: Channel,
        member: int,
        slots: int,
        device: torch.device,
        *,
        later: bool = False,
    ) -> None:
        put = object.__setattr__  # a ``World`` is frozen, and has rank and size of its own
        put(self, "local_rank", member % slots)
        put(self, "device", device)
        put(self, "_losses", nccl.LossWatch())
        put(self, "_seat", _Seat(signals, channel, member, slots, later))

    @classmethod
    def join_members(cls, signals: Channel, environment: Mapping[str, str] = os.environ) -> Self:
        """Join the others; one that comes later does so when it calls ``enter``.

        Raises ``LauncherLostError``, and ``TrainingError`` without a launcher.
        """
        channel = Channel.connect(environment)
        if channel is None:
            raise TrainingError("processes that come and go need a launcher: ebbflow train")
        device = take_device(int(environment.get("LOCAL_RANK", "0")))
        slots = max(1, int(environment.get("LOCAL_WORLD_SIZE", "1")))
        later = bool(environment.get(COMES_LATER))
        made = cls(signals, channel, int(environment.get("RANK", "0")), slots, device, later=later)
        if not later:
            made.enter()
        return made

    # --- who is there ---------------------------------------------------------------------------------------

    @property
    def view(self) -> View:
        """Return the view that this process is in."""
        return self._seat.view

    @property
    def later(self) -> bool:
        """Tell whether this process joins others that train already."""
        return self._seat.later

    def on_loss(self, act: Callable[[View], None]) -> None:
        """Call ``act`` with each view that has lost aggregators, once it is taken up."""
        self._seat.on_view = act

    @property
    def rank(self) -> int:
        """Return its place among the members."""
        members = self.view.members
        return members.index(self._seat.member) if self._seat.member in members else len(members)

    @property
    def size(self) -> int:
        """Return the number of members."""
        return max(len(self.view.members), 1)

    @property
    def nodes(self) -> int:
        """Return the number of nodes that they need."""
        return max(1, -(-len(self.view.members) // self._seat.slots))

    @property
    def elastic(self) -> bool:
        """Tell that processes come and go while the others train on."""
        return True

    @property
    def changed(self) -> bool:
        """Tell whether there is a newer view than this process has taken up, as far as it was told."""
        return self._seat.signals.newest_view > self.view.number

    def enter(self) -> None:
        """Become a member. Raises ``LauncherLostError``."""
        self._adopt(self._seat.channel.enter())
        self._seat.index = self.view.index

    def stay(self) -> None:
        """Raise ``RunStopped`` where this process was asked to leave."""
        if self._seat.retired:
            raise RunStopped("this process was asked to leave the training")

    def newest(self) -> View:
        """Return the view that holds, without taking it up. Raises ``LauncherLostError``."""
        return self._seat.channel.view()

    # --- what they agree on ---------------------------------------------------------------------------------

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all members."""
        return summed(self.from_all(list(values)))

    def from_first(self, value: object) -> object:
        """Return what the first member gives."""
        return self.from_first_of(lambda: value)

    def from_first_of(self, make: Callable[[], object]) -> object:
        """Return what the first member makes; another one is asked where that is lost meanwhile."""
        while True:
            text = agreeing.to_text(make() if self.rank == 0 else None)
            if (found := self._once(text)) is not None:
                return found[0]

    def from_all(self, value: object) -> list[Any]:
        """Return what each member gives, by rank."""
        text = agreeing.to_text(value)
        while True:
            if (found := self._once(text)) is not None:
                return found

    def retry_in_new_view(self) -> None:
        """Take up the newest view."""
        self._adopt(self._seat.channel.view())

    def leave(self) -> None:
        """End communication; may be called twice."""
        self._seat.channel.close()

    def _once(self, text: str, *, boundary: bool = False) -> list[Any] | None:
        """Try to agree; ``None`` where the view has changed before, which is taken up then."""
        made = self._seat.channel.agree(self.view.number, self._seat.index, text, boundary=boundary)
        if made.values is not None:
            self._seat.index += 1
        self._adopt(made.view, ended=made.values is not None)
        return None if made.values is None else [agreeing.from_text(one) for one in made.values]

    def _adopt(self, view: View, *, ended: bool = False) -> None:
        if view.number != self.view.number and self._seat.member not in view.members:
            if ended:  # it ends this step with the others
                self._seat.retired = True
                return
            raise RunStopped("the others train without this process, which they took to be lost", PEER_LOST)
        lost = set(view.lost) - set(self.view.lost)
        self._seat.view = view
        if lost:
            self._seat.on_view(view)


def summed(rows: list[Any]) -> list[float]:
    """Return the sums of columns."""
    return [float(sum(column)) for column in zip(*rows, strict=True)]
