"""What the loss of a worker costs over the aggregation service and in an all-reduce: the same training, both ways.

::

    python -m tests.benchmarks.aggregation_losses --seeds 3 --width 3000

Three nodes of one process each train; one process is killed (SIGKILL) at a random moment. Prints, as JSON: the median
step before, and the longest time that passed between two steps of the survivors from the kill on.
"""

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from pathlib import Path

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.protocols import TrainingJob
from ebbflow.infra.training.launcher.trainer import TorchTrainer
from ebbflow.infra.training.local_nodes import LocalNodes
from ebbflow.planners.model.trainings import RunSettings, SyncChoice

SCRIPT = Path(__file__).parents[1] / "infra/training/service/service_script.py"
PATIENCE = 180.0  # s
BEFORE, AFTER = 40, 20  # steps


def steps_of(folder: Path) -> list[dict[str, float]]:
    found = []
    for path in folder.glob("trained-*"):
        lines = path.read_text().splitlines(keepends=True)
        found += [json.loads(line) for line in lines if line.endswith("\n")]
    return found


def measure(sync: SyncChoice, seed: int, width: int, folder: Path) -> dict[str, float]:
    """Return the median step before a loss, the longest after it, and the generations used."""
    rng = random.Random(seed)
    settings = RunSettings(sync=sync, adaptive=False, checkpoint_interval=1e6, recovery="restart")
    arguments = (str(folder), "100000", "momentum", "0", "float32", str(width))

    def wait_for(step: int) -> list[dict[str, float]]:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            found = steps_of(folder)
            if found and max(one["step"] for one in found) >= step:
                return found
            SystemClock().sleep(0.05)
        raise TimeoutError(f"step {step} was not reached in {PATIENCE:g} s")

    with TorchTrainer(LocalNodes(folder / "nodes"), logs=folder / "logs") as trainer:
        job = TrainingJob(
            id="one", script=str(SCRIPT), folder=str(folder / "run"), arguments=arguments, settings=settings
        )
        trainer.launch(job, {f"node-{i}": 1 for i in range(3)})
        found = wait_for(BEFORE)
        SystemClock().sleep(rng.random())
        pids = {int(one["pid"]) for one in found}
        victim = rng.choice(sorted(pids))
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        last = max(one["step"] for one in steps_of(folder))
        found = wait_for(int(last) + AFTER)
        generations = trainer.status().generation
    ends = sorted({one["step"]: one["at"] for one in found if int(one["pid"]) != victim}.values())
    gaps = [(later, later - earlier) for earlier, later in itertools.pairwise(ends)]
    return {
        "median_step_s": round(statistics.median(gap for at, gap in gaps[5:] if at < killed), 4),
        "longest_after_kill_s": round(max(gap for at, gap in gaps if at >= killed), 3),
        "generations": generations,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=300)
    given = parser.parse_args()
    ways: tuple[SyncChoice, ...] = ("service", "allreduce")
    for sync in ways:
        for seed in range(given.seeds):
            with tempfile.TemporaryDirectory() as folder:
                found = measure(sync, seed, given.width, Path(folder))
            print(json.dumps({"sync": sync, "seed": seed, "load": os.getloadavg()[0], **found}), flush=True)


if __name__ == "__main__":
    main()
