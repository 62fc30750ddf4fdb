"""What a driver asks of its launcher when nodes come and go that train, or have not joined yet."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.protocols import TrainingStatus
from ebbflow.tasks.faults import Schedule
from ebbflow.tasks.training.capacity import Nodes
from ebbflow.tasks.training.driver import Driver
from ebbflow.tasks.training.listening import NullTrainingListener
from ebbflow.tasks.training.recorder import RunRecorder
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.supervisor import Supervisor
from tests.training_fakes import Act, FakeTrainer, ScriptedClock, run

JOINED = {"node-1": 1, "node-2": 1}


class Launcher(FakeTrainer):
    """A launcher whose generation trains on; at each look the next of ``acts`` is done."""

    def __init__(self, acts: list[Callable[["Launcher"], object]], clock: ScriptedClock) -> None:
        super().__init__([], lambda _: None, lambda _: None, clock)  # type: ignore[arg-type,return-value]
        self._doing = list(acts)
        self._status = TrainingStatus("running", 1, dict(JOINED), 5)
        self.tell("launched")
        self.tell("generation", placement=JOINED)

    def tell(self, kind: str, **content: Any) -> None:
        self._note(kind, **content)

    def leave(self, node: str) -> None:
        """Let the others train on without a node, as ``sync="service"`` does."""
        there = {name: slots for name, slots in self._status.placement.items() if name != node}
        self._status = replace(self._status, placement=there)

    def wait(self, timeout: float) -> TrainingStatus:
        if self._doing:
            self._doing.pop(0)(self)
        else:
            self._status = replace(self._status, state="finished")
        return self._status


def driven(
    script: str, nodes: Nodes, *acts: Callable[[Launcher], object], sync: Any = "service"
) -> list[dict[str, int]]:
    """Return the placements that the launcher is asked for while ``acts`` are done, one at each look."""
    runs, clock = str(Path(script).parent / "runs"), ScriptedClock()
    request = TrainingRequest(
        script, runs_dir=runs, run_id="r", nodes="local:2x1", preflight="never", sync=sync
    )
    recorder = RunRecorder(request, clock, NullTrainingListener())
    supervisor = Supervisor(request.plan(JOINED, resumes=False), nodes, recorder, clock)
    launcher = Launcher(list(acts), clock)
    Driver(launcher, nodes, supervisor, recorder).drive(Schedule(clock, iter(())))
    return launcher.resizes


@pytest.mark.parametrize("sync", ["service", "allreduce"])
@pytest.mark.parametrize("kind", ["node-lost", "node-notice"])
def test_the_loss_of_a_node_that_has_not_joined_leaves_its_replacement_to_be_asked_for(
    script: str, kind: str, sync: str
) -> None:
    nodes = Nodes(JOINED, 3)
    asked = driven(
        script,
        nodes,
        lambda _: nodes.add(1),
        lambda launcher: launcher.tell(kind, node="node-3", how="it could not be started", deadline=0.0),
        lambda _: nodes.remove(["node-3"]),
        lambda _: nodes.add(1),
        lambda _: None,
        sync=sync,
    )
    assert asked == [{**JOINED, "node-3": 1}, {**JOINED, "node-4": 1}]


def test_nodes_that_did_not_start_are_given_up_but_not_those_that_lose_their_processes(script: str) -> None:
    nodes = Nodes(JOINED, 3)
    found: list[list[str]] = []
    nodes.give_up = lambda names: found.append(list(names))  # type: ignore[method-assign]
    driven(
        script,
        nodes,
        lambda launcher: launcher.tell("resize-changed", without=["node-3", "node-4"], unstarted=["node-3"]),
    )
    assert found == [["node-3"]]


def test_nodes_without_which_a_generation_did_not_form_are_given_up(script: str) -> None:
    nodes = Nodes(JOINED, 2)
    found: list[list[str]] = []
    nodes.give_up = lambda names: found.append(list(names))  # type: ignore[method-assign]
    run(script, Act("unformed", steps=0, saves=0, gone=("node-2",)), Act(), there=nodes)
    assert found == [["node-2"]]


@pytest.mark.parametrize("kind", ["node-lost", "node-notice"])
def test_nothing_is_asked_while_the_loss_of_a_node_that_trains_is_served(script: str, kind: str) -> None:
    nodes = Nodes(JOINED, 3)
    asked: list[list[dict[str, int]]] = []

    def serve(launcher: Launcher) -> None:
        asked.append(list(launcher.resizes))
        launcher.leave("node-2")
        launcher.tell("worker-lost", node="node-2", how="it left")

    asked.append(
        driven(
            script,
            nodes,
            lambda launcher: (launcher.tell(kind, node="node-2", how="killed", deadline=0.0), nodes.add(1)),
            lambda _: None,
            serve,
            lambda _: None,
        )
    )
    assert asked == [[], [{"node-1": 1, "node-3": 1}]]
