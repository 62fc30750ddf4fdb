"""What checkpoints cost a training: full ones in the background, running (partial) ones, recovery.

Run from the repository root: ``python -m tests.benchmarks.training_checkpoints --out DIR``. Writes
``training_checkpoints.json`` and ``training_checkpoints.svg``. A multilayer perceptron of 10 million parameters with
Adam on one core, and four gloo processes of which one is killed. About five minutes.

The cost of a checkpoint is the time that the call takes, and what the steps that overlap its writing take longer than
the median step before it.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder
from ebbflow.infra.training.running.checkpoint import RunningCheckpoint
from ebbflow.infra.training.running.folder import read_running
from ebbflow.tasks.drawing.charts import bars_svg

WIDTH = 1600
LAYERS = 4  # of WIDTH x WIDTH
BATCH = 128
EPOCH = 60_000  # samples
BAR = 0.02  # of the time, for checkpoints at one a minute
PERIOD = 8  # C, in saves of everything


class Trainee:
    """A model that really trains."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
        self.model = torch.nn.Sequential(*layers[:-1])
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-4)
        self.inputs, self.targets = torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        for _ in range(3):
            self.step()

    def step(self) -> float:
        """Train one step; return its seconds."""
        begun = time.perf_counter()
        self.optimizer.zero_grad()
        torch.nn.functional.mse_loss(self.model(self.inputs), self.targets).backward()
        self.optimizer.step()
        return time.perf_counter() - begun

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def full(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure checkpoints in the background."""
    trainee, checkpoints = Trainee(), CheckpointFolder(StorageLocation(folder))
    figures = []
    for number in range(rounds + 1):
        before = [trainee.step() for _ in range(12)]
        usual = statistics.median(before)
        begun = time.perf_counter()
        assert checkpoints.save_async(trainee.state(), number)
        stall = time.perf_counter() - begun
        during = []
        while checkpoints.busy:
            during.append(trainee.step())
        saved = checkpoints.wait()
        assert saved is not None
        slower = sum(during) - usual * len(during)
        figures.append(
            {
                "stall_s": stall,
                "slower_s": slower,
                "step_s": usual,
                "write_s": saved.seconds,
                "bytes": saved.bytes,
            }
        )
    figures = figures[1:]  # the first one makes the buffers
    shares = [(f["stall_s"] + max(0.0, f["slower_s"])) / 60 for f in figures]
    return {
        "figures": figures,
        "stall_share": statistics.median(f["stall_s"] for f in figures) / 60,
        "share": statistics.median(shares),
        "worst_share": max(shares),
        "cpu_s": _cpu_of_a_save(trainee, checkpoints),
        "parameters": trainee.parameters,
    }


def _cpu_of_a_save(trainee: Trainee, checkpoints: CheckpointFolder) -> float:
    begun = time.process_time()
    checkpoints.save(trainee.state(), 10**6)
    return time.process_time() - begun


def partial(folder: Path, rounds: int, fraction: float) -> dict[str, Any]:
    """Measure the critical path of running checkpoints, and what their writing slows down."""
    trainee = Trainee()
    running = RunningCheckpoint(
        StorageLocation(folder), trainee.model, trainee.optimizer, period=PERIOD, fraction=fraction
    )
    running.initialize()
    every = max(1, round(PERIOD * fraction))
    stalls, slower, steps = [], [], []
    for number in range(1, rounds + 1):
        before = [trainee.step() for _ in range(6)]
        usual = statistics.median(before)
        steps.append(usual)
        begun = time.perf_counter()
        assert running.step(number * every, {"number": number})
        stalls.append(time.perf_counter() - begun)
        during = []
        while running.busy:
            during.append(trainee.step())
        running.wait()
        slower.append(max(0.0, sum(during) - usual * len(during)))
    epoch = EPOCH / BATCH * statistics.median(steps)
    return {
        "fraction": fraction,
        "blocks": len(running.blocks),
        "stall_s": statistics.median(stalls),
        "slower_s": statistics.median(slower),
        "epoch_s": epoch,
        "epoch_share": statistics.median(stalls) / epoch,
        "epoch_share_with_writing": (statistics.median(stalls) + statistics.median(slower)) / epoch,
    }


def recovery(folder: Path) -> dict[str, float]:
    """Measure how long it takes to have everything, or a quarter of the blocks, in memory again."""
    trainee = Trainee()
    checkpoints = CheckpointFolder(StorageLocation(folder / "full"))
    checkpoints.save(trainee.state(), 1)
    running = RunningCheckpoint(
        StorageLocation(folder / "running"), trainee.model, trainee.optimizer, period=PERIOD, fraction=1 / 8
    )
    running.initialize()
    for number in range(1, 2 * PERIOD + 1):
        trainee.step()
        running.step(number)
        running.wait()
    found: dict[str, float] = {}
    begun = time.perf_counter()
    latest = CheckpointFolder(StorageLocation(folder / "full")).latest()
    assert latest is not None
    found["full, found and verified"] = time.perf_counter() - begun
    state = checkpoints.load(latest)
    trainee.model.load_state_dict(state["model"])
    trainee.optimizer.load_state_dict(state["optimizer"])
    found["full, in the model"] = time.perf_counter() - begun
    found["running, a quarter of the blocks"] = running.recover(range(0, len(running.blocks), 4)).seconds
    other = Trainee()
    again = RunningCheckpoint(
        StorageLocation(folder / "running"), other.model, other.optimizer, period=PERIOD, fraction=1 / 8
    )
    found["running, everything"] = again.recover_all().seconds
    begun = time.perf_counter()
    read_running(folder / "running")
    found["running, as an ordinary checkpoint"] = time.perf_counter() - begun
    return found


def killed(seeds: int) -> list[dict[str, Any]]:
    """Kill one of four processes after epoch 7, as in SCAR's section 5.5.5, in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.killed_process", str(seeds)],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="ebbflow-bench-"))
    try:
        found: dict[str, Any] = {
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
            "load": os.getloadavg()[0],
            "bar": BAR,
            "full": full(folder / "full", given.rounds),
            "partial": [partial(folder / f"p{i}", given.rounds, r) for i, r in enumerate((1 / 8, 1.0))],
            "recovery_s": recovery(folder / "recovery"),
            "killed": killed(given.seeds),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    (given.out / "training_checkpoints.json").write_text(json.dumps(found, indent=1) + "\n")
    runs = found["killed"]
    seeds = [f"seed {run['seed']}" for run in runs]
    drawn = bars_svg(
        "Epochs repeated after one of four processes is killed",
        seeds,
        {
            "SCAR, 1/8 each epoch": [r["scar"] for r in runs],
            "all each 8 epochs": [r["traditional"] for r in runs],
        },
        unit="",
    )
    (given.out / "training_checkpoints.svg").write_text(drawn)
    print(json.dumps({k: v for k, v in found.items() if k != "full"}, indent=1))
    print({k: v for k, v in found["full"].items() if k != "figures"})


if __name__ == "__main__":
    main()
