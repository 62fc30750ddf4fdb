"""What members of an all-reduce agree on when one is lost between their ends of a step."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ebbflow.infra.training.prepared import Options
from ebbflow.infra.training.process.leaving import RunStopped
from ebbflow.infra.training.process.link import Link
from ebbflow.infra.training.process.world import ViewChangedError, World, peer_lost
from ebbflow.infra.training.replicas import obstacles
from ebbflow.infra.training.replicas.joining import take_part
from ebbflow.infra.training.replicas.store import FAILED, WatchedStore
from ebbflow.infra.training.replicas.world import ReplicaWorld
from ebbflow.planners.aggregation.membership import Membership
from ebbflow.planners.model.trainings import RunSettings
from tests.infra.training.service.team import Board, Seat

LOST = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
PATIENCE = 150.0


class Signals(Seat):
    """A member's channel, which knows of every change at once."""

    def __init__(self, board: Board, member: int) -> None:
        super().__init__(board, member)
        self.due = False


class Team:
    """Members in threads, whose all-reduces succeed or not as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, founders: int) -> None:
        self.board = Board(Membership(range(founders)))
        self.worlds = {member: self.make(member) for member in range(founders)}
        self.outcomes: dict[int, list[list[float] | RuntimeError]] = {}
        self.formed: list[int] = []  # numbers of the groups that are made
        monkeypatch.setattr(World, "sum", self._sum)
        monkeypatch.setattr(ReplicaWorld, "form", lambda world: self.formed.append(world.epoch))
        self.each({member: world.enter for member, world in self.worlds.items()})

    def make(self, member: int, *, later: bool = False) -> ReplicaWorld:
        seat = Signals(self.board, member)
        return ReplicaWorld(seat, seat, member, 1, torch.device("cpu"), later=later)  # type: ignore[arg-type]

    def each(self, acts: dict[int, Callable[[], Any]]) -> dict[int, Any]:
        """Return what members give, or the errors that they meet."""
        found: dict[int, Any] = {}

        def run(member: int, act: Callable[[], Any]) -> None:
            try:
                found[member] = act()
            except (ViewChangedError, RunStopped, RuntimeError) as exc:
                found[member] = exc

        threads = [threading.Thread(target=run, args=item, daemon=True) for item in acts.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        return found

    def _sum(self, world: World, values: Sequence[float]) -> list[float]:
        assert isinstance(world, ReplicaWorld)
        found = self.outcomes[world._seat.member].pop(0)
        if isinstance(found, RuntimeError):
            raise found
        return [*found, 0.0, 0.0]


def test_who_has_not_ended_a_step_that_another_has_takes_its_sums_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    team = Team(monkeypatch, 3)
    ahead, behind, _ = team.worlds.values()
    team.outcomes = {0: [[6.0, 1.0], LOST], 1: [LOST]}
    assert ahead.sum_step([2.0, 1.0]) == [6.0, 1.0]
    team.board.do(lambda membership: membership.leave(2))
    found = team.each({0: lambda: ahead.sum_step([5.0, 5.0]), 1: lambda: behind.sum_step([4.0, 0.0])})
    assert isinstance(found[0], ViewChangedError)  # its step is repeated by those that are left
    assert found[1] == [6.0, 1.0]
    assert (ahead.size, ahead.rank, behind.size, behind.rank) == (2, 0, 2, 1)
    assert ahead.epoch == behind.epoch > 0
    assert not ahead.joining


def test_nobody_takes_a_step_that_none_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(monkeypatch, 3)
    team.outcomes = {0: [LOST], 1: [LOST]}
    team.board.do(lambda membership: membership.leave(2))
    found = team.each({member: lambda w=team.worlds[member]: w.sum_step([1.0]) for member in (0, 1)})
    assert all(isinstance(one, ViewChangedError) for one in found.values())
    assert team.formed == [team.worlds[0].epoch] * 2, "a script may use the group before the next step"


def test_one_that_comes_is_taken_in_after_a_step_and_does_not_know_the_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    team = Team(monkeypatch, 2)
    joiner = team.make(5, later=True)
    assert joiner.rank > 0  # it must not speak for all before it knows anything
    assert joiner.size > 1
    team.outcomes = {0: [[2.0]], 1: [[2.0]]}
    team.each({member: lambda w=world: w.sum_step([1.0]) for member, world in team.worlds.items()})

    def join() -> None:
        joiner.enter()
        joiner.settle()

    entering = threading.Thread(target=join, daemon=True)
    entering.start()
    team.board.wait(lambda: team.board.membership.due)
    team.each({member: lambda w=world: w.settle(boundary=True) for member, world in team.worlds.items()})
    entering.join(PATIENCE)
    everybody = [*team.worlds.values(), joiner]
    assert [world.rank for world in everybody] == [0, 1, 2]
    assert {world.size for world in everybody} == {3}
    assert {world.epoch for world in everybody} == {joiner.epoch}
    assert all(world.joining == (2,) for world in everybody)
    assert [world.knows for world in everybody] == [True, True, False]
    joiner.took_over()
    assert joiner._group.ended == 1


def test_a_boundary_without_news_leaves_the_group_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(monkeypatch, 2)
    before = {world.epoch for world in team.worlds.values()}
    team.each({member: lambda w=world: w.settle(boundary=True) for member, world in team.worlds.items()})
    assert {world.epoch for world in team.worlds.values()} == before


def test_one_that_was_asked_to_leave_does_so_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(monkeypatch, 2)
    team.board.do(lambda membership: membership.retire(0))
    team.outcomes = {0: [[2.0]], 1: [[2.0]]}
    team.each({member: lambda w=world: w.sum_step([1.0]) for member, world in team.worlds.items()})
    for world in team.worlds.values():
        world._group.due = True
    found = team.each({member: world.stay for member, world in team.worlds.items()})
    assert isinstance(found[0], RunStopped)
    assert found[0].code == 0
    assert (team.worlds[1].rank, team.worlds[1].size) == (0, 1)


def test_what_is_agreed_on_waits_for_those_whose_group_broke(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(monkeypatch, 2)
    one, other = team.worlds.values()
    one.broke(LOST)

    def repeat() -> object:
        with pytest.raises(ViewChangedError):
            one.repeat_broken()
        return one.from_all(1)

    assert team.each({0: repeat, 1: lambda: other.from_all(2)}) == {0: [1, 2], 1: [1, 2]}
    assert one.epoch == other.epoch > 0


def test_who_asks_the_first_makes_the_group_again_with_those_whose_group_broke(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    team = Team(monkeypatch, 2)
    one, other = team.worlds.values()
    asked = {0: lambda: one.from_first("of the first"), 1: lambda: other.from_first(None)}
    assert team.each(asked) == dict.fromkeys((0, 1), "of the first")
    one.broke(LOST)
    found = team.each({0: one.stay, 1: asked[1]})
    assert isinstance(found[1], ViewChangedError)
    assert team.formed == [one.epoch, other.epoch]
    assert one.epoch == other.epoch > 0
    assert team.each(asked) == dict.fromkeys((0, 1), "of the first")


def test_a_group_that_breaks_again_and_again_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(monkeypatch, 1)
    world = team.worlds[0]

    def break_and_settle() -> None:
        for _ in range(20):
            world.broke(LOST)
            world.settle()

    with pytest.raises(RuntimeError, match="closed by peer"):
        break_and_settle()


def test_a_training_whose_members_are_fixed_raises_what_broke_it(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(monkeypatch, 2)
    world = team.worlds[0]
    world.fix("communication is planned")
    team.outcomes = {0: [LOST]}
    assert not world.lost(LOST)
    with pytest.raises(RuntimeError, match="closed by peer"):
        world.sum_step([1.0])
    assert not world.elastic


def test_a_group_that_cannot_be_made_once_members_are_fixed_is_a_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    team = Team(monkeypatch, 1)
    world = team.worlds[0]
    monkeypatch.undo()

    def changed(*_: object, **__: object) -> None:
        raise ViewChangedError("the members of the process group have changed")

    monkeypatch.setattr(dist, "init_process_group", changed)
    world._group.epoch = 1
    world.form()
    assert peer_lost(world._group.broken), (
        "the script sees no error that would have it repeat a step for ever"
    )
    world.found("the script has process groups of its own")
    with pytest.raises(dist.DistNetworkError):
        world.settle()
    assert world.fixed


def test_what_stands_against_one_founder_keeps_the_members_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(monkeypatch, 2)
    one, other = team.worlds.values()
    monkeypatch.setattr(
        obstacles, "obstacle", lambda world, *_, **__: "it has a group" if world is other else ""
    )
    options, link = Options(batch_size=8), Link(None, 0, 30.0)

    def start(world: ReplicaWorld) -> Callable[[], Any]:
        return lambda: take_part(
            world, None, torch.nn.Linear(2, 1), options, {"seed": 3}, RunSettings(), link
        )

    assert team.each({0: start(one), 1: start(other)}) == {0: None, 1: None}
    assert one.fixed == other.fixed == "it has a group"


def test_what_one_has_found_fixes_the_members_of_all_after_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    team = Team(monkeypatch, 2)
    one, other = team.worlds.values()
    one.found("the script has process groups of its own")
    one._group.asks = other._group.asks = True  # as the sums of the step say
    team.each({0: one.stay, 1: other.stay})
    assert one.fixed == other.fixed == "the script has process groups of its own"
    assert not team.formed, "the group stays"
    assert not one._group.asks


def test_what_one_has_found_holds_for_those_that_have_lost_another_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    team = Team(monkeypatch, 3)
    one, other, _ = team.worlds.values()
    one.found("the script has process groups of its own")
    team.outcomes = {0: [LOST], 1: [LOST]}
    team.board.do(lambda membership: membership.leave(2))
    found = team.each({0: lambda: one.sum_step([1.0]), 1: lambda: other.sum_step([1.0])})
    assert all(isinstance(error, ViewChangedError) for error in found.values())
    assert one.fixed == other.fixed == "the script has process groups of its own"


def test_nobody_waits_in_a_store_for_those_that_are_gone() -> None:
    changed = threading.Event()
    store = WatchedStore(dist.HashStore(), changed.is_set, PATIENCE)
    store.set("there", b"1")
    assert store.get("there") == b"1"
    threading.Timer(0.05, changed.set).start()
    with pytest.raises(ViewChangedError):
        store.wait(["missing"])


def test_nobody_waits_in_a_store_where_another_could_not_make_the_group() -> None:
    store = WatchedStore(dist.HashStore(), lambda: False, PATIENCE)
    store.set(FAILED, b"1")
    with pytest.raises(ViewChangedError):
        store.get("missing")
