"""Seeded faults of trainings over the aggregation service: none hangs, sums wrongly, or loses a sample.

::

    python -m tests.benchmarks.aggregation_faults --seeds 20

Three nodes of one process each train over two aggregators that mirror each other, to the end of the script. At random
moments one to three things happen: a process is killed (SIGKILL) or stopped (SIGSTOP), a node is lost or gets a
notice, an aggregator is killed (once), a node is added. Prints, as JSON for each seed: what happened, the
generations, the steps, those of which a killed process had not written its part down, and the largest difference of a
parameter from training in one process, against the parameters' largest. Exit status 1 where one of them is not as it
must be, or a sample was not used exactly once in a pass.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from ebbflow.infra.clock import SystemClock
from ebbflow.planners.model.trainings import RunSettings
from tests.infra.training.elastic_runs import PER_PASS, SCRIPT, Run

EPOCHS = 6
BOUND = 2e-5  # of the largest parameter
ARGUMENTS = (str(EPOCHS), "momentum", "0.05", "float32")
PATIENCE = 180.0  # s


def reference(folder: Path) -> dict[str, np.ndarray]:
    """Return the parameters after training in one process."""
    subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *ARGUMENTS],
        env={**os.environ, "PYTHONPATH": ""},
        check=True,
        capture_output=True,
        timeout=PATIENCE,
    )
    return dict(np.load(folder / "parameters.npz"))


def faults(run: Run, rng: random.Random) -> list[str]:
    """Let things happen, and return what."""
    said: list[str] = []
    nodes = [f"node-{i}" for i in range(3)]

    def signal_worker(number: int) -> Callable[[], str]:
        def act() -> str:
            ranks = sorted({one["rank"] for one in run.steps[-6:]})
            rank = rng.choice(ranks)
            os.kill(run.pid(rank), number)
            return f"rank {rank} gets {signal.Signals(number).name}"

        return act

    def lose_node() -> str:
        node = nodes.pop(rng.randrange(len(nodes)))
        run.pool.kill(node)
        return f"{node} is lost"

    def notice() -> str:
        node = nodes.pop(rng.randrange(len(nodes)))
        run.pool.notice(node, 30.0)
        return f"{node} gets a notice"

    def lose_aggregator() -> str:
        loop = run.trainer._loop
        assert loop is not None
        name, pid = rng.choice(sorted(loop._aggregators.pids.items()))  # type: ignore[union-attr]
        os.kill(pid, signal.SIGKILL)
        return f"{name} is killed"

    def add_node() -> str:
        there = dict(run.trainer.status().placement)
        run.trainer.resize({**there, "node-9": 1})
        return "node-9 is added"

    kinds = [
        signal_worker(signal.SIGKILL),
        signal_worker(signal.SIGSTOP),
        lose_node,
        notice,
        lose_aggregator,
        add_node,
    ]
    for act in rng.sample(kinds, rng.randint(1, 3)):
        SystemClock().sleep(rng.random() * 0.5)
        try:
            said.append(act())
        except ProcessLookupError:
            said.append("its process had ended already")
    return said


def one(seed: int, expected: dict[str, np.ndarray], folder: Path) -> dict[str, Any]:
    """Return what a run with faults has come to."""
    rng = random.Random(seed)
    settings = RunSettings(sync="service", adaptive=False, checkpoint_interval=1e6, aggregators=2, mirrors=1)
    run = Run(folder, 3, settings, arguments=ARGUMENTS)
    begun = time.monotonic()
    try:
        run.until(lambda: run.step > 3, "steps")
        said = faults(run, rng)
        status = run.trainer.wait(PATIENCE)
        run.check_data(EPOCHS * PER_PASS - 1)
        found = np.load(folder / "parameters.npz")
        worst = max(
            float(np.abs(found[name] - value).max() / np.abs(value).max()) for name, value in expected.items()
        )
        problem = "" if status.state == "finished" else f"{status.state}: {status.reason}"
        if not problem and worst > BOUND:
            problem = "the parameters are not those of one process"
        return {
            "seed": seed, "happened": said, "generations": status.generation, "steps": run.step,
            "unwritten": len(run.unwritten), "difference": float(f"{worst:.2g}"),
            "seconds": round(time.monotonic() - begun, 1),
            "problem": problem,
        }  # fmt: skip
    except (AssertionError, OSError) as exc:
        return {"seed": seed, "problem": f"{type(exc).__name__}: {exc}"[:400]}
    finally:
        run.close()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as alone:
        expected = reference(Path(alone))
    wrong = 0
    for seed in range(given.first, given.first + given.seeds):
        with tempfile.TemporaryDirectory() as folder:
            found = one(seed, expected, Path(folder))
        wrong += bool(found["problem"])
        print(json.dumps({**found, "load": round(os.getloadavg()[0], 1)}), flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
