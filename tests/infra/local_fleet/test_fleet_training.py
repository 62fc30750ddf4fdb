"""A real launcher on the nodes of a local fleet."""

import os
import time
from pathlib import Path

import pytest

from ebbflow.infra.local_fleet import LocalFleet, LocalPool
from ebbflow.infra.protocols import TrainingJob
from ebbflow.infra.training.launcher.trainer import TorchTrainer
from ebbflow.planners.model.trainings import RunSettings

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[1] / "training" / "launched_script.py"
PRELOAD = ("torch.distributed", "ebbflow.infra.training.process.world")


def test_a_training_hears_of_notices_and_goes_on_when_a_node_is_killed(monkeypatch, tmp_path):
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    pool = LocalPool("gpu", "gpu", slots=2, initial=2, max_nodes=2)
    with LocalFleet.start([pool], gpus=()) as fleet:
        nodes = fleet.nodes_for("digits", grace=20.0)
        with TorchTrainer(nodes, preload=PRELOAD, replace=False, stragglers=False) as trainer:
            arguments = (str(tmp_path), "1000000", "0.01")
            folder, settings = str(tmp_path / "run"), RunSettings(termination_grace=20.0, recovery="restart")
            trainer.launch(
                TrainingJob("digits", str(SCRIPT), arguments, folder, settings), {"gpu-1": 1, "gpu-2": 2}
            )

            def until(reached):
                end = time.monotonic() + 150
                while not reached(trainer.status()):
                    assert time.monotonic() < end, f"{trainer.status()} {trainer.events()[-5:]}"
                    time.sleep(0.02)

            def events(kind):
                return [event.content for event in trainer.events() if event.kind == kind]

            until(lambda status: status.state == "running" and status.step > 3)
            used = {(o.node, o.app, o.slots) for o in fleet.occupants()}
            assert used == {("gpu-1", "digits", (0,)), ("gpu-2", "digits", (0, 1))}
            assert nodes.in_use() == {"gpu-1": (0,), "gpu-2": (0, 1)}

            fleet.kill("gpu-2")
            until(lambda status: events("node-lost"))
            assert events("node-lost")[0] == {"node": "gpu-2", "how": "killed without notice"}
            until(lambda status: status.state == "running" and status.placement == {"gpu-1": 1})
            step = trainer.status().step
            until(lambda status: status.step > step + 3)

            deadline = fleet.notice("gpu-1", 600.0)
            until(lambda status: events("node-notice"))
            assert events("node-notice")[0] == {"node": "gpu-1", "deadline": deadline}
            assert {o.node for o in fleet.left_over("digits")} == {"gpu-1"}
        assert fleet.left_over("digits") == ()
        assert not list((fleet.folder / "runs").iterdir())
    assert not [name for name in os.listdir(fleet.folder) if name in ("work", "runs")]
