"""Trainings of which only processes are left that do not know how far they are, in one generation or the next."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.training.channel.wire import AgentEnd, Order
from ebbflow.infra.training.launcher.generation import Generation
from ebbflow.infra.training.launcher.hang import HangRule
from ebbflow.infra.training.launcher.members import Loss
from ebbflow.infra.training.launcher.service import Workforce
from ebbflow.infra.training.process.leaving import PEER_LOST, RunStopped
from ebbflow.infra.training.service.joining import ServiceMembers
from ebbflow.infra.training.service.world import ServiceWorld
from ebbflow.planners.aggregation.membership import Membership
from ebbflow.planners.model.trainings import RunSettings
from tests.infra.training.service.team import Board, Seat
from tests.infra.training.workforces import make_workforce

UNKNOWN = "no process is left that knows the state of the training"


def starts_again(*, service: bool) -> Workforce:
    """Return nodes ``a`` and ``b`` that trained together, of which ``a`` has lost its process and starts another."""
    made = make_workforce("a", "b", service=service)
    for name in ("a", "b"):
        made.follow(name, None)
    made.leave("a", "it was killed")
    made.take_in("a", "key", 1)
    return made


def end_step(made: Workforce) -> None:
    """Let the members agree on the end of a step."""
    membership = made.meeting.membership
    view, index = membership.view, membership._index
    for one in view.members:
        membership.contribute(one, view.number, index, "0", boundary=True)


@pytest.mark.parametrize("service", [True, False])
def test_the_last_process_that_trained_is_not_done_without(service: bool) -> None:
    made = starts_again(service=service)
    found = made.recovery("b", 1, 1, stopping=False, script_failed=False)
    assert (found.in_place, found.reason) == (False, UNKNOWN)
    made.meeting.membership.enter(made.ranks["a"].start)
    end_step(made)
    assert made.recovery("b", 1, 1, stopping=False, script_failed=False).in_place


class Nodes(dict[str, Any]):
    """Nodes of a launcher that are sent orders."""

    def __init__(self, *names: str) -> None:
        self.ends: dict[str, AgentEnd] = {}
        self.sent: list[tuple[str, str]] = []
        for name in names:
            self[name] = SimpleNamespace(
                beat=None, slots=1, wire=SimpleNamespace(agent_end=lambda _, name=name: self.ends.get(name))
            )

    def send(self, name: str, order: Order) -> None:
        self.sent.append((name, order.do))

    def usable(self, placement: Any, gone: Any) -> dict[str, int]:
        return dict(placement)

    def log(self, name: str) -> str:
        return ""


def make_generation(workforce: Workforce, nodes: Nodes, minimum: int = 1) -> Generation:
    members: Any = nodes
    exchange: Any = None
    return Generation(
        1, dict.fromkeys(nodes, 1), members, exchange, SystemClock(), lambda kind, **said: None, HangRule(), 60.0,
        1.0, workforce=workforce, minimum=minimum,
    )  # fmt: skip


@pytest.mark.parametrize("service", [True, False])
def test_where_too_few_are_left_they_end_their_step_without_the_lost_one_and_save(service: bool) -> None:
    made = make_workforce("a", "b", service=service)
    generation = make_generation(made, Nodes("a", "b"), minimum=2)
    assert not generation.look({"b": Loss("it is gone")})
    assert generation.stop is not None
    assert made.meeting.membership.view.members == (0,)


@pytest.mark.parametrize("service", [True, False])
def test_where_all_that_trained_are_lost_at_once_those_that_wait_are_ended_and_begin_again(
    service: bool,
) -> None:
    """A node leaves at the end of the step that the other one had agreed on before it was lost."""
    made = starts_again(service=service)
    nodes = Nodes("a")
    generation = make_generation(made, nodes)
    assert not generation.look({})
    assert generation.stop is None
    made.leave("b", "it was killed")
    assert made.meeting.membership.view.members == ()
    assert not generation.look({})
    assert generation.stop is not None
    assert not generation.look({})
    assert nodes.sent == [("a", "end")], "once, for it waits for others that never come"
    nodes.ends["a"] = AgentEnd("ended")
    assert generation.look({})
    end = generation.end()
    assert (end.kind, end.reason, end.left) == ("lost", UNKNOWN, {"a": 1})


def test_a_process_whose_peers_are_lost_before_they_have_told_it_begins_again_without_an_error() -> None:
    membership = Membership([0])
    membership.enter(0)
    membership.enter(1)
    membership.contribute(0, 1, 0, "0", boundary=True)
    membership.leave(0)
    seat: Any = Seat(Board(membership), 1)
    world = ServiceWorld(seat, seat, 1, 1, torch.device("cpu"), later=True)
    with pytest.raises(RunStopped, match="those that knew the state of the training are lost") as raised:
        ServiceMembers(world, {}, RunSettings(sync="service"))
    assert raised.value.code == PEER_LOST
