"""Processes of a framework's trainer stop after one step, and continue from the newest whole checkpoint."""

import os
import signal
from pathlib import Path

import pytest

from ebbflow import newest_checkpoint
from ebbflow.infra.training.frameworks import hugging_face_callback, lightning_callback
from ebbflow.infra.training.frameworks.checkpoints import mark_complete
from ebbflow.infra.training.frameworks.stopping import TERMINATED, StopAgreement
from ebbflow.planners.errors import EbbflowError
from tests.infra.training.worlds import run_module

WORLD = "tests.infra.training.frameworks.stopping_world"


@pytest.mark.processes
@pytest.mark.parametrize(("told", "at"), [(0, 1), (2, 7)])
def test_all_stop_after_the_same_step_at_most_two_after_one_was_told(told: int, at: int) -> None:
    steps = {int(line) for line in run_module(WORLD, "3", str(told), str(at)).split()}
    assert len(steps) == 1
    assert at <= steps.pop() <= at + 2


@pytest.mark.processes
def test_who_is_not_told_goes_on_to_the_end() -> None:
    assert set(run_module(WORLD, "2", "5", "1").split()) == {"0"}


def test_one_process_stops_at_once_and_leaves_as_a_shell_has_it() -> None:
    agreement = StopAgreement(0, {})
    assert not agreement.after_step(1)
    os.kill(os.getpid(), signal.SIGTERM)
    assert agreement.after_step(1)
    with pytest.raises(SystemExit) as left:
        agreement.leave()
    assert left.value.code == TERMINATED


def test_a_checkpoint_counts_once_all_of_it_is_written(tmp_path: Path) -> None:
    assert newest_checkpoint(str(tmp_path / "gone")) is None
    for step in (20, 100, 120):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert newest_checkpoint(str(tmp_path)) is None
    for step in (20, 100):
        mark_complete(str(tmp_path / f"checkpoint-{step}"), step)
    (tmp_path / "checkpoint-best").mkdir()
    assert newest_checkpoint(str(tmp_path)) == str(tmp_path / "checkpoint-100")
    lightning = tmp_path / "lightning"
    lightning.mkdir()
    for name in ("step=9.ckpt", "step=30.ckpt", "last.ckpt"):
        (lightning / name).write_text("")
    assert newest_checkpoint(str(lightning)) == str(lightning / "step=30.ckpt")


def test_a_framework_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbflow.infra.packages.find_spec", lambda name: None)
    with pytest.raises(
        EbbflowError, match="Hugging Face's Trainer needs transformers: pip install transformers"
    ):
        hugging_face_callback()
    with pytest.raises(EbbflowError, match="Lightning's Trainer needs lightning: pip install lightning"):
        lightning_callback("checkpoints", 10)
