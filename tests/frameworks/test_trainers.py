"""The examples of other frameworks' trainers, whose nodes are killed and given notice while they train."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from ebbflow.infra.training.frameworks.accelerate import AccelerateSaves
from ebbflow.planners.errors import OptionError

EXAMPLES = Path(__file__).parents[2] / "examples"
FAULTS = ("3s:kill:node-2", "4s:add:1", "14s:notice:node-1:20s", "15s:add:1", "26s:kill:node-3", "27s:add:1")


def train(folder: Path, script: str, nodes: str, steps: int, *faults: str) -> dict[str, Any]:
    """Train an example, with options after its name, and return the run's report."""
    script, *options = script.split()
    command = [
        sys.executable, "-P", "-m", "ebbflow.flows.cli", "train", str(EXAMPLES / script), "--own-checkpoints",
        "--nodes", nodes, "--max-gpus", "2", "--runs-dir", str(folder), "--run-id", "one",
    ]  # fmt: skip
    for fault in faults:
        command += ["--fault", fault]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, "--", "--steps", str(steps), "--save-steps", "20", *options],
        env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads((folder / "one" / "report.json").read_text())
    return found


def losses(folder: Path) -> dict[int, float]:
    """Return the last loss that was written of each step."""
    if (history := folder / "one" / "hf" / "history.json").exists():
        said = json.loads(history.read_text())["log_history"]
        return {one["step"]: one["loss"] for one in said if "loss" in one}
    (written,) = (folder / "one").glob("*/losses.jsonl")
    return {one["step"]: one["loss"] for one in map(json.loads, written.read_text().splitlines())}


@pytest.mark.parametrize(
    "script",
    ["train_accelerate.py", "train_accelerate.py --stateful", "train_hf.py", "train_lightning.py"],
)
def test_kills_and_a_notice_leave_the_losses_of_a_run_without(script: str, tmp_path: Path) -> None:
    steps = 1500
    struck = train(tmp_path / "struck", script, "local:2x1", steps, *FAULTS)
    train(tmp_path / "calm", script, "local:1x1", steps)
    assert len(struck["generations"]) >= 3, struck["generations"]
    found, expected = losses(tmp_path / "struck"), losses(tmp_path / "calm")
    assert sorted(found) == sorted(expected) == list(range(1, steps + 1))
    last = [mean(list(one.values())[-100:]) for one in (found, expected)]
    assert last[0] == pytest.approx(last[1], rel=0.2 if script == "train_lightning.py" else 0.02)
    if script == "train_lightning.py":
        return  # within an epoch its loader starts from scratch
    # sums of one and of two processes are rounded otherwise, and that grows
    apart = [abs(found[step] / expected[step] - 1) for step in expected]
    assert max(apart[:100]) < 0.001
    assert max(apart) < 0.25


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, "split_batches must be True"),
        ({"split_batches": True}, "use_seedable_sampler must be True"),
    ],
)
def test_loaders_whose_batches_would_differ_after_a_restart_are_refused(
    options: dict[str, bool], rule: str, tmp_path: Path
) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    with pytest.raises(OptionError, match=rule):
        AccelerateSaves(accelerator, str(tmp_path), 10)


class Numbers(torch.utils.data.Dataset[Any]):
    """Numbers, which counts how many of them were read."""

    def __init__(self) -> None:
        self.read = 0

    def __len__(self) -> int:
        return 44

    def __getitem__(self, number: int) -> int:
        self.read += 1
        return number


def loop(output: Path, steps: int, *, stateful: bool, workers: int = 0) -> tuple[list[list[int]], Numbers]:
    """Return the batches of a loop that begins where the last one was saved, and what they were read from."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration, set_seed

    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    set_seed(1)
    config = DataLoaderConfiguration(
        split_batches=True, use_seedable_sampler=True, use_stateful_dataloader=stateful
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    numbers = Numbers()
    loader = accelerator.prepare(
        torch.utils.data.DataLoader(numbers, batch_size=4, shuffle=True, num_workers=workers)
    )
    saves = AccelerateSaves(accelerator, str(output), 1)
    return [batch.tolist() for batch in saves.batches(loader, steps)], numbers


@pytest.mark.parametrize("workers", [0, 2])
def test_stateful_loaders_resume_at_the_batch_after_the_last(workers: int, tmp_path: Path) -> None:
    expected, _ = loop(tmp_path / "calm", 27, stateful=False)
    found = []
    for steps in (3, 4, 11, 17, 22, 27):  # 11 batches a pass: within one, and at an end
        some, numbers = loop(tmp_path / "stopped", steps, stateful=True, workers=workers)
        found += some
        if not workers:
            assert numbers.read <= 4 * (len(some) + 1), "what is done is not read again"
    assert found == expected
    for at in (0, 11):
        assert sorted(itertools.chain(*found[at : at + 11])) == list(range(44)), "each once a pass"


def test_a_loop_may_leave_a_pass_and_continue_it(tmp_path: Path) -> None:
    expected, _ = loop(tmp_path / "calm", 15, stateful=False)
    accelerate_batches = AccelerateSaves.batches

    def in_parts(saves: AccelerateSaves, loader: Any, steps: int) -> Any:
        for until in (4, 9, steps):
            yield from accelerate_batches(saves, loader, until)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AccelerateSaves, "batches", in_parts)
        found, _ = loop(tmp_path / "parts", 15, stateful=True)
    assert found == expected


def test_a_loader_that_reads_in_one_process_for_all_has_no_state_to_resume_by(tmp_path: Path) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DataLoaderConfiguration

    AcceleratorState._reset_state(True)
    config = DataLoaderConfiguration(
        split_batches=True, use_seedable_sampler=True, use_stateful_dataloader=True, dispatch_batches=True
    )
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    loader = accelerator.prepare(torch.utils.data.DataLoader(Numbers(), batch_size=4))
    saves = AccelerateSaves(accelerator, str(tmp_path), 10)
    with pytest.raises(OptionError, match="dispatch_batches=False"):
        next(saves.batches(loader, 3))
