"""Nodes are told to finish, waited for within a bound, and counted as idle only when they say so."""

from collections.abc import Mapping, Sequence

import pytest

from ebbflow.infra.aws.remote import Outcome
from ebbflow.infra.errors import AwsUnavailableError
from ebbflow.planners.model.capacity import Node
from ebbflow.tasks.fleet.draining import drain

NODES = tuple(Node(name, 2, 4.0) for name in ("a", "b"))


class Clock:
    time = 1000.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.time += seconds


class Nodes:
    """Nodes that become idle at set times; ``inf`` for never."""

    def __init__(self, clock: Clock, idle: Mapping[str, float], **fixed: Outcome) -> None:
        self.clock, self.idle, self.fixed = clock, idle, fixed
        self.calls: list[tuple[tuple[str, ...], float]] = []

    def drain(self, nodes: Sequence[str], seconds: float, *, token: str = "") -> Mapping[str, Outcome]:
        self.calls.append((tuple(nodes), seconds))
        self.clock.time += 1.0
        return {name: self.fixed.get(name) or self._said(name) for name in nodes}

    def _said(self, name: str) -> Outcome:
        word = "idle" if self.clock.time - 1000.0 >= self.idle[name] else "busy"
        return Outcome(name, "done", output=f"INFO told\n{word}\n")


def test_it_waits_until_all_are_idle_and_asks_only_those_that_are_not() -> None:
    clock, said = Clock(), list[str]()
    nodes = Nodes(clock, {"a": 0, "b": 20})
    found = drain(nodes, NODES, 300, clock, said.append)
    assert (found.idle, found.busy, found.untold) == (("a", "b"), (), {})
    assert nodes.calls[0] == (("a", "b"), 300)
    assert {names for names, _ in nodes.calls[1:]} == {("b",)}
    assert clock.time - 1000 < 30
    assert said[0] == "2 nodes draining, 300 s to finish"
    assert said[-1] == "2 of 2 idle"


def test_the_wait_is_bounded() -> None:
    clock = Clock()
    found = drain(Nodes(clock, {"a": 0, "b": 1e9}), NODES, 60, clock, lambda _: None)
    assert (found.idle, found.busy) == (("a",), ("b",))
    assert 60 <= clock.time - 1000 < 70


@pytest.mark.parametrize("output", ["", "busy\n", "INFO idle soon\n"])
def test_a_node_that_does_not_say_idle_is_busy(output: str) -> None:
    clock = Clock()
    nodes = Nodes(clock, {"b": 0}, a=Outcome("a", "done", output=output))
    assert drain(nodes, NODES, 10, clock, lambda _: None).busy == ("a",)


def test_a_node_that_is_gone_is_not_waited_for_nor_one_that_cannot_be_told() -> None:
    clock, said = Clock(), list[str]()
    nodes = Nodes(
        clock, {}, a=Outcome("a", "gone", "it is terminated"), b=Outcome("b", "absent", "not known")
    )
    found = drain(nodes, NODES, 300, clock, said.append)
    assert (found.idle, found.busy, set(found.untold)) == (("a",), ("b",), {"b"})
    assert len(nodes.calls) == 1
    assert said[-1] == "b was not drained (b: absent, not known)"


def test_an_outage_ends_the_wait_at_once() -> None:
    class Away:
        def drain(self, nodes: Sequence[str], seconds: float, *, token: str = "") -> Mapping[str, Outcome]:
            raise AwsUnavailableError("no answer")

    clock = Clock()
    found = drain(Away(), NODES, 300, clock, lambda _: None)
    assert found.untold == {"a": "no answer", "b": "no answer"}
    assert clock.time == 1000.0


def test_without_time_nodes_are_told_all_the_same() -> None:
    clock = Clock()
    nodes = Nodes(clock, {"a": 1e9, "b": 1e9})
    assert drain(nodes, NODES, 0, clock, lambda _: None).busy == ("a", "b")
    assert nodes.calls == [(("a", "b"), 0)]
