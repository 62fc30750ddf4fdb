"""How whole runs end: at the script's end, at its errors, and when the launcher itself is killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ebbflow.infra.errors import RunLockedError
from ebbflow.infra.machine import processes
from ebbflow.infra.protocols import TrainingJob, TrainingStatus
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.launcher.hang import HangRule
from ebbflow.infra.training.launcher.journal import Journal
from ebbflow.infra.training.launcher.trainer import TorchTrainer
from ebbflow.infra.training.local_nodes import LocalNodes
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.trainings import RunSettings

SCRIPT = Path(__file__).parents[1] / "launched_script.py"
PRELOAD = ("torch.distributed", "ebbflow.infra.training.process.world")
LONG = 150.0  # seconds: a bound for a busy machine, not an expectation

LAUNCH = """
import sys, time
from ebbflow.infra.protocols import TrainingJob
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.infra.training.launcher.trainer import TorchTrainer
from ebbflow.infra.training.local_nodes import LocalNodes

script, folder, preload = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
trainer = TorchTrainer(LocalNodes(folder + "/nodes", grace=20.0), preload=preload)
settings = RunSettings(termination_grace=20.0, recovery="restart")
job = TrainingJob("killed", script, (folder, "1000000", "0.01"), folder + "/run", settings)
trainer.launch(job, {"node-1": 1, "node-2": 1})
while trainer.status().step < 10:
    time.sleep(0.01)
print("training", flush=True)
time.sleep(600)
"""


def run_to_its_end(script: Path, folder: Path, *arguments: str) -> tuple[TorchTrainer, TrainingStatus]:
    with TorchTrainer(LocalNodes(folder / "nodes"), preload=PRELOAD) as trainer:
        trainer.launch(TrainingJob("r", str(script), arguments, str(folder / "run")), {"node-1": 2})
        status = trainer.wait(LONG)
    assert trainer._pool.gone(trainer._pool.uid)
    return trainer, status


def test_a_script_with_an_error_ends_the_run_with_that_error_and_is_not_tried_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nx = {}\nx[f'label of rank {os.environ[\"RANK\"]}']\n")
    _, status = run_to_its_end(script, tmp_path)
    assert (status.state, status.generation) == ("failed", 1)
    assert "on node-1 ended with status 1: KeyError: 'label of rank" in status.reason
    assert status.end is not None
    assert "script.py" in status.end.failures[0].error
    assert list((tmp_path / "run" / "logs" / "generation-1" / "node-1").glob("rank-?.err"))


def test_a_run_ends_with_its_script_and_cannot_be_resumed_then(tmp_path: Path) -> None:
    trainer, status = run_to_its_end(SCRIPT, tmp_path, str(tmp_path), "20", "0.0")
    assert (status.state, status.step) == ("finished", 20)
    kinds = [event.kind for event in trainer.events()]
    assert [k for k in kinds if k in ("launched", "generation", "started", "finished", "ended")] == [
        "launched", "generation", "started", "finished", "ended",
    ]  # fmt: skip
    journal = Journal(StorageLocation(tmp_path / "run"))
    assert journal.events() == list(trainer.events())
    assert journal.read_run()[2] == "finished"
    with LocalNodes() as nodes, pytest.raises(Exception, match="is finished"):
        TorchTrainer(nodes).resume(str(tmp_path / "run"))


def test_a_script_without_elastic_run_is_told_what_it_lacks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('trained')\n")
    _, status = run_to_its_end(script, tmp_path)
    assert status.state == "failed"
    assert "ElasticRun.start()" in status.reason


def test_bad_jobs_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with LocalNodes() as nodes, TorchTrainer(nodes) as trainer:
        for job in (
            TrainingJob("a/b", str(SCRIPT), (), str(tmp_path)),
            TrainingJob("a", str(tmp_path / "none.py"), (), str(tmp_path)),
            TrainingJob("a", str(SCRIPT), (), ""),
        ):
            with pytest.raises(OptionError):
                trainer.launch(job, {"node-1": 1})
        assert processes.members(f"{nodes.uid}/") == []


def test_when_the_launcher_is_killed_the_run_saves_ends_and_can_be_resumed(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-c", LAUNCH, str(SCRIPT), str(tmp_path), ",".join(PRELOAD)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "training\n"
        journal = Journal(StorageLocation(tmp_path / "run"))
        pool = journal.read_run()[4]
        end = time.monotonic() + LONG
        while (
            len(processes.members(f"{pool}/")) < 6
        ):  # one that is being replaced by its program has no label
            assert time.monotonic() < end
            time.sleep(0.05)
        begun = time.monotonic()
        with (
            TorchTrainer(LocalNodes(tmp_path / "others")) as other,
            pytest.raises(RunLockedError, match=f"run 'killed' is being run by process {launcher.pid} of"),
        ):
            other.resume(str(tmp_path / "run"))
        assert time.monotonic() - begun < LONG, "who holds it is known at once"
        os.kill(launcher.pid, signal.SIGKILL)
    end = time.monotonic() + LONG
    while processes.members(f"{pool}/"):
        assert time.monotonic() < end
        time.sleep(0.05)
    saved = int((tmp_path / "step").read_text())
    assert saved >= 10
    with TorchTrainer(LocalNodes(tmp_path / "nodes"), preload=PRELOAD) as trainer:
        settings = RunSettings(keep_checkpoints=5, recovery="restart")
        trainer.resume(str(tmp_path / "run"), {"node-1": 2}, settings)
        while trainer.status().step <= saved and trainer.status().state != "failed":
            assert time.monotonic() < end + LONG
            time.sleep(0.01)
        [started] = [e for e in trainer.events() if e.kind == "started" and e.generation == 2]
        assert started.content["step"] == saved
        assert journal.read_run()[0].settings == settings
        assert [e.number for e in trainer.events()] == list(range(1, len(trainer.events()) + 1))


def test_a_run_that_makes_no_progress_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbflow.infra.training.launcher.decide._LONGEST", 0.0)
    script = tmp_path / "script.py"
    script.write_text("import os\nos.kill(os.getpid(), 9)\n")
    with TorchTrainer(LocalNodes(tmp_path / "nodes"), preload=PRELOAD) as trainer:
        trainer.launch(TrainingJob("r", str(script), (), str(tmp_path / "run")), {"node-1": 1})
        status = trainer.wait(LONG)
    assert (status.state, status.generation) == ("failed", 3)
    assert "SIGKILL" in status.reason


HANGS_ONCE = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from ebbflow.infra.training.process.channel import Channel, Report

dist.init_process_group("gloo")
again = Path(sys.argv[1]).exists()
channel = Channel.connect()
for step in range(1, 6):
    if dist.get_rank() == 0:
        channel.post(Report("step", 0, time.time(), step))
    if dist.get_rank() == 1 and step == 3 and not again:
        Path(sys.argv[1]).touch()
        time.sleep(600)
    dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    channel.post(Report("finished", 0, time.time(), step, {"saved": True}))
"""


def test_a_collective_that_hangs_is_ended_and_tried_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(HANGS_ONCE)
    rule = HangRule(floor=1.0, factor=1.0)
    with TorchTrainer(LocalNodes(tmp_path / "nodes"), preload=PRELOAD, hang=rule, rescue=0.5) as trainer:
        settings = RunSettings(recovery="restart")
        job = TrainingJob("r", str(script), (str(tmp_path / "hung"),), str(tmp_path / "run"), settings)
        trainer.launch(job, {"node-1": 2})
        status = trainer.wait(LONG)
    assert (status.state, status.generation) == ("finished", 2)
    [hang] = [e for e in trainer.events() if e.kind == "hang"]
    assert "no process uses CPU time" in str(hang.content["reason"])
    ends = [e.content["how"] for e in trainer.events() if e.kind == "generation-ended"]
    assert ends == ["hung", "finished"]
