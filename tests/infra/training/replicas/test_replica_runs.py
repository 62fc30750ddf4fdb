"""Real trainings by all-reduce: processes and nodes are killed, stopped, come and go, and the others keep theirs."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

from ebbflow.infra.training.launcher.hang import HangRule
from tests.infra.training.chaos_runs import ChaosRun, Cluster, Mode, schedule
from tests.infra.training.elastic_runs import SeededNodes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


class Nodes(SeededNodes):
    """Nodes that may vanish: nobody reaches them any more, and their connections do not end."""

    vanished: str = ""

    def vanish(self, name: str) -> None:
        self.pause(name)
        self.vanished = name

    def paused(self, name: str) -> bool:
        return name != self.vanished and super().paused(name)

    def end(self, name: str) -> None:
        if name != self.vanished:
            super().end(name)


class ReplicaRun(ChaosRun):
    """A training of some nodes by all-reduce."""

    NODES = Nodes

    def __init__(self, folder: Path, nodes: int, *, slots: int = 1, **options: Any) -> None:
        options = {"checkpoint_interval": 1e6, **options}
        super().__init__(folder, cluster=Cluster(nodes, nodes, slots), **options)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ReplicaRun]]:
    begun: list[ReplicaRun] = []

    def make(**options: Any) -> ReplicaRun:
        begun.append(ReplicaRun(tmp_path, **options))
        return begun[-1]

    yield make
    for one in begun:
        one.close()


def finish(run: ReplicaRun) -> None:
    """Stop a run, and see that it lost nothing."""
    run.finish()
    assert run.trainer.status().generation == 1, run.trainer.events()


def test_survivors_keep_their_processes_through_losses_and_changes_of_nodes(
    start: Callable[..., ReplicaRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Nodes, "seeded", "node-1")
    run = start(nodes=3)
    run.until(lambda: run.step > 5, "steps")
    begun = run.workers()
    os.kill(begun[0], signal.SIGKILL)  # it reported and saved for all
    run.until(lambda: 3 in run.workers(), "process that takes its place")
    run.pool.notice("node-2", 30.0)
    run.until(lambda: "node-2" not in run.trainer.status().placement, "node that leaves")
    run.trainer.resize({"node-0": 1, "node-1": 1, "node-7": 1})
    run.until(lambda: 4 in run.workers(), "node that was added")
    os.kill(run.pid(3), signal.SIGSTOP)
    run.pool.kill("node-7")
    run.until(lambda: 5 in run.workers(), "process in the place of one that was stopped")
    run.until(lambda: "node-7" not in run.trainer.status().placement, "node that was lost beside")
    run.advance(3)
    now = run.workers()
    assert now[1] == begun[1]
    assert sorted(now) == [1, 5]
    finish(run)
    assert not run.kinds("restarts")


def test_the_others_train_on_when_a_machine_vanishes_and_no_connection_ends(
    start: Callable[..., ReplicaRun],
) -> None:
    run = start(nodes=2, hang=HangRule(worker_silence=6.0), collective_timeout=3600.0)
    run.until(lambda: run.step > 5, "steps")
    assert isinstance(run.pool, Nodes)
    run.pool.vanish("node-1")
    run.until(lambda: bool(run.kinds("worker-lost")), "loss")
    (lost,) = run.kinds("worker-lost")
    assert lost["node"] == "node-1"
    assert "showed no sign of life for 6 s" in str(lost["how"])
    run.advance(5)
    finish(run)


@pytest.mark.slow
def test_processes_of_a_node_leave_together(start: Callable[..., ReplicaRun]) -> None:
    run = start(nodes=2, slots=2)
    run.until(lambda: run.step > 5, "steps")
    os.kill(run.pid(3), signal.SIGKILL)
    run.until(lambda: {4, 5} <= set(run.workers()), "processes in their place")
    assert sorted(run.workers()) == [0, 1, 4, 5]
    finish(run)


@pytest.mark.slow
@pytest.mark.parametrize("mode", get_args(Mode))
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_lost_whatever_happens(tmp_path: Path, mode: Mode, seed: int) -> None:
    run = ChaosRun(tmp_path, mode)
    try:
        run.through(schedule(seed, 5))
    finally:
        run.close()
