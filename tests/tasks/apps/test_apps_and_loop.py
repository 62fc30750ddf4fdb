"""Apps and the capacity loop, for real on both sides: they meet in the ledger only."""

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from app_loops import begin, until
from toy_trainings import Machines, Script

from ebbflow.infra.ledger import Ledger
from ebbflow.planners.capacity.values import Settings
from ebbflow.planners.model.capacity import Capacity, Node, Notice
from ebbflow.planners.model.ledger import Ended, Granted
from ebbflow.planners.scheduling.leased.simple import equal_share
from ebbflow.tasks.apps.agent import AgentIntervals
from ebbflow.tasks.apps.lease_table import Rules
from ebbflow.tasks.capacity.intervals import LoopIntervals
from ebbflow.tasks.capacity.loop import CapacityLoop
from ebbflow.tasks.training.leased.app import run_training_app
from ebbflow.tasks.training.leased.spec import training_spec
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.tuning.app import run_tuning_app
from ebbflow.tasks.tuning.app_spec import tuning_spec
from ebbflow.tasks.tuning.request import Parameter, TuningRequest

PACE = AgentIntervals(look=0.02, report=0.1, parting=150.0)


class Source:
    """A ``CapacitySource`` that a test changes."""

    def __init__(self, **gpus: int) -> None:
        self.nodes = {name: Node(name, 4, 8.0, gpus=count, price=1.0) for name, count in gpus.items()}
        self.notices: tuple[Notice, ...] = ()
        self.revision = 1

    def capacity(self) -> Capacity:
        return Capacity(self.revision, tuple(node for _, node in sorted(self.nodes.items())), self.notices)


class World:
    def __init__(self, folder: Path) -> None:
        self.folder, self.machines = folder, Machines(linger=0.05)
        (folder / "train.py").write_text("")
        self.ledger = Ledger.open(str(folder / "ledger.db"))
        self.source = Source(a=2, b=2)
        self.stop, self.over = threading.Event(), threading.Event()
        settings = Settings(
            policy=equal_share(5.0),
            debounce_s=0.0,
            termination_grace_s=10.0,
            drain_lead_s=1.0,
            heartbeat_timeout_s=60.0,
            scaling=None,
        )
        pace = LoopIntervals(poll_interval=0.02, capacity_poll_interval=0.05, batch_delay=0.01)
        loop = CapacityLoop(self.ledger, None, self.source, settings, pace=pace)
        self.loop = begin(loop.run, self.over)

    def train(self, id: str, script: Script, **options: Any) -> Any:
        request = TrainingRequest(
            str(self.folder / "train.py"), run_id=id, runs_dir=str(self.folder / "runs"), preflight="never",
            termination_grace=5.0, nodes="local:4x1", **options,
        )  # fmt: skip
        return begin(
            run_training_app, request, training_spec(request), self.ledger, self.machines.pool,
            stop=self.stop, rules=Rules(grace=10.0, leave=1.0, fence=60.0), pace=PACE, make=script.trainer,
        )  # fmt: skip

    def search(self, id: str, script: Script) -> Any:
        request = TuningRequest(
            str(self.folder / "train.py"), (Parameter("lr", "log", 0.001, 1.0),), "accuracy", run_id=id,
            runs_dir=str(self.folder / "searches"), nodes="local:2x1", trials=2, epochs=6, pruner="none",
            termination_grace=5.0,
        )  # fmt: skip
        return begin(
            run_tuning_app, request, tuning_spec(request), self.ledger, self.machines.pool,
            stop=self.stop, rules=Rules(grace=10.0, leave=1.0, fence=60.0), pace=PACE, make=script.trainer,
        )  # fmt: skip

    def holds(self, app: str) -> int:
        return sum(lease.recalled is None for lease in self.ledger.state().held(app))

    def close(self) -> None:
        self.stop.set()
        until(lambda: not self.ledger.state().leases or self.loop.done(), "end of all leases")
        self.over.set()
        self.loop.result(150)
        self.ledger.close()

    def check(self) -> None:
        with Ledger.open(str(self.folder / "ledger.db")) as ledger:
            assert not ledger.verify()
            events = ledger.events(kinds=[Granted, Ended], limit=10**6)
        ends = {n: e.at for e in events if isinstance(e.change, Ended) for n in e.change.leases}
        granted = [lease for e in events if isinstance(e.change, Granted) for lease in e.change.leases]
        for node, slot, begun, ended in self.machines.used:
            mine = [one for one in granted if (one.node, one.slot) == (node, slot)]
            assert any(one.since <= begun and ended <= ends[one.number] for one in mine)
        for gpu in {use[:2] for use in self.machines.used}:
            uses = sorted(use[2:] for use in self.machines.used if use[:2] == gpu)
            assert all(a[1] <= b[0] for a, b in pairwise(uses))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()
    world.check()


def test_apps_share_what_there_is_as_it_comes_and_goes(world: World) -> None:
    script = Script()
    first = world.train("x", script)
    until(lambda: len(world.machines.busy) == 4, "all GPUs for the only app")
    search = world.search("s", Script(steps=60, metric="accuracy"))
    until(lambda: world.holds("s") == 2 and len(world.machines.busy) == 4, "an equal share for the search")
    assert world.holds("x") == 2
    report = search.result(150)
    assert [one.state for one in report.trials] == ["complete", "complete"]
    until(lambda: world.holds("x") == 4 and len(world.machines.busy) == 4, "all of it again")

    world.source.notices = (Notice("b", world.ledger.clock.now() + 40.0),)
    until(lambda: {node for node, _ in world.machines.busy} == {"a"}, "the node with the notice is left")
    del world.source.nodes["b"]
    world.source.nodes["c"] = Node("c", 4, 8.0, gpus=1)
    until(lambda: {node for node, _ in world.machines.busy} == {"a", "c"}, "another node")
    assert not first.done()
    world.stop.set()
    report = first.result(150)
    assert (report.state, report.lost_steps) == ("stopped", 0)
    assert {g.kind for g in report.generations} == {"stopped"}
    state = world.ledger.state()
    assert {app: record.phase for app, record in state.apps.items() if record.spec.gpus} == {
        "x": "stopped",
        "s": "finished",
    }
    assert state.apps["x"].service > 0
    until(lambda: world.ledger.state().apps["x"].dollars > 0, "what it has cost")
