"""A training whose disk is full at its end, and whose other checkpoints are then all damaged, with real processes."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbflow.infra.protocols import Decide, Trainer
from ebbflow.infra.training.launcher import loop
from ebbflow.infra.training.launcher.trainer import TorchTrainer
from ebbflow.infra.training.process.channel import Report
from ebbflow.tasks.training.report import TrainingReport
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.run import run_training
from ebbflow.tasks.training.sites import LocalSite, request_logs

pytestmark = pytest.mark.processes

STEPS = 20
SCRIPT = """
import sys
import time
import torch
from pathlib import Path
from torch import nn
from ebbflow.infra.training import ElasticRun

X = torch.randn(50, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(1, keepdim=True)
with ElasticRun.start() as run:
    torch.manual_seed(0)
    model, _ = run.prepare(nn.Linear(4, 1), lambda p: torch.optim.SGD(p, lr=0.05), batch_size=10)
    began = run.progress.step
    for _ in run.epochs(4):
        for x, y in run.batches((X, Y)):
            if began == 0 and run.progress.step == 19 and Path(sys.argv[2]).exists():  # no save of the last step fits
                Path(sys.argv[2]).unlink()
                saves = Path(sys.argv[1]).parent / "runs" / "one" / "checkpoints"
                end = time.monotonic() + 150
                while not list(saves.glob("step-*/manifest.json")):  # one is there to go back to
                    if time.monotonic() > end:
                        sys.exit(f"no checkpoint in {saves} within a minute")
                    time.sleep(0.05)
                end = time.monotonic() + 1
                with open(sys.argv[1], "wb", buffering=0) as file:
                    while time.monotonic() < end:  # also what a save in the background gives back
                        try:
                            file.write(bytes(4096))
                            end = time.monotonic() + 1
                        except OSError:
                            time.sleep(0.02)
            run.backward(nn.functional.mse_loss(model(x), y))
            run.step()
"""


class Quick(LocalSite):
    """This machine, with nodes that import no more than the script needs."""

    def trainer(
        self, request: TrainingRequest, decide: Decide, record_report: Callable[[Report], None]
    ) -> Trainer:
        preload = ("ebbflow.infra.training.run",)
        return TorchTrainer(
            self._pool, logs=request_logs(request), decide=decide, preload=preload, on_report=record_report
        )


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB, where this user may mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    options = ["-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def resumed(disk: Path, **changes: object) -> TrainingReport:
    request = TrainingRequest.load(str(disk / "runs"), "one", changes)
    return run_training(request, resume=True, site=Quick(request))


def test_a_disk_that_is_full_at_the_end_and_damage_to_all_checkpoints_on_it_cost_no_step(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # seconds: the disk stays full however long the record waits for it
    monkeypatch.setattr(loop, "_LAST", 1.0)
    script, filler, fills = tmp_path / "train.py", disk / "filler", tmp_path / "fills"
    scratch, checkpoints = tmp_path / "scratch", disk / "runs" / "one" / "checkpoints"
    script.write_text(SCRIPT)
    fills.touch()
    request = TrainingRequest(
        str(script), (str(filler), str(fills)), run_id="one", runs_dir=str(disk / "runs"), preflight="never",
        final_save_timeout=0.1, spill_dir=str(scratch), checkpoint_interval=0.0,
    )  # fmt: skip

    full = run_training(request, site=Quick(request))

    assert (full.state, full.steps) == ("failed", STEPS)
    assert full.failure is not None
    assert full.failure.reason == "no-space"
    assert full.spilled is not None
    assert (full.spilled.step, str(scratch) in full.reason) == (STEPS, True)
    assert full.saved_step is not None
    assert full.saved_step < STEPS
    assert any(event.kind == "spilled" and str(scratch) in event.text for event in full.events)
    filler.unlink()

    newest = [path.name for path in sorted(checkpoints.glob("step-*"))]
    for name in newest:
        model = checkpoints / name / "model.pt"
        data = bytearray(model.read_bytes())
        data[len(data) // 2] ^= 1
        model.write_bytes(data)

    found = resumed(disk)

    assert (found.state, found.resumed_from, found.lost_steps) == ("finished", STEPS, 0)
    assert (found.saved_step, found.spilled) == (STEPS, None)
    assert [name for name in newest if name in " ".join(found.unusable)] == newest
    assert any(event.kind == "damaged" for event in found.events)
    assert len(list(checkpoints.glob("corrupt-*/model.pt"))) == len(newest), "nothing is deleted"
    assert not list(scratch.iterdir())
