"""How long a run under the launcher does not train after a fault, why, and what it loses.

Run from the repository root: ``python -m tests.benchmarks.training_recovery --out DIR [--repetitions 10]``. Two nodes
of this machine train; one of them is killed (SIGKILL to all its processes), paused (SIGSTOP) or given notice, and the
run continues on the other. Writes ``training_recovery.json`` and ``training_recovery.svg``.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ebbflow.infra.protocols import TrainingEvent, TrainingJob
from ebbflow.infra.training.launcher.hang import HangRule
from ebbflow.infra.training.launcher.job import fresh_name
from ebbflow.infra.training.launcher.trainer import TorchTrainer
from ebbflow.infra.training.local_nodes import LocalNodes
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.tasks.drawing.charts import bars_svg

SCRIPT = Path(__file__).with_name("recovery_script.py")
NOTICE = 30.0  # seconds that a notice gives
LONG = 120.0  # seconds after which a step that does not come is an error
WARM = 1.5  # seconds of training before a fault
STOPPED = HangRule().stopped  # seconds after which a stopped node counts as hung
FAULTS = ("SIGKILL", "notice", "SIGSTOP")
PARTS = {
    "detection": "from the fault to the launcher's noticing it",
    "saving": "until the survivors have saved and all processes are gone",
    "launching": "until the new order is out",
    "rendezvous": "until the nodes' agents have met and the script begins",
    "joining": "until the processes have found each other",
    "loading": "until the checkpoint is loaded",
    "first step": "until the first new step is done",
}
OWN = ("detection", "saving", "launching", "loading")  # our own share


class Bench:
    """One run that suffers all the faults, one after another."""

    def __init__(self, folder: Path) -> None:
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.nodes = LocalNodes(folder / "nodes")
        self.trainer = TorchTrainer(
            self.nodes, hang=HangRule(stopped=STOPPED), replace=False, stragglers=False
        )
        self.names = {"node-1", "node-2"}
        settings = RunSettings(checkpoint_interval=30.0, adaptive=False, recovery="restart")
        job = TrainingJob("recovery", str(SCRIPT), (str(self.notes),), str(folder / "run"), settings)
        self.trainer.launch(job, {"node-1": 1, "node-2": 1})
        self.await_training(1)

    def suffer(self, fault: str) -> dict[str, float]:
        """Let one node suffer ``fault`` and return what that took, seconds, and the steps it lost."""
        time.sleep(WARM)
        before = self.trainer.status()
        victim = list(before.placement)[-1]
        begun = time.time()
        if fault == "SIGKILL":
            self.nodes.kill(victim)
        elif fault == "SIGSTOP":
            self.nodes.pause(victim)
        else:
            self.nodes.notice(victim, NOTICE)
        after = before.generation + 1
        self.await_training(after)
        found = self.parts(begun, before.generation, after)
        self.whole_again(after)
        return found

    def parts(self, begun: float, old: int, new: int) -> dict[str, float]:
        notes = self.first_notes(new)
        marks = [
            begun,
            min(
                e.time
                for e in self.events(old)
                if e.kind in ("node-lost", "stop-requested") and e.time >= begun
            ),
            self.event("generation-ended", old).time,
            self.event("generation", new).time,
            notes["script"][1],
            notes["joined"][1],
            notes["loaded"][1],
            notes["step"][1],
        ]
        parts = {name: later - sooner for name, sooner, later in zip(PARTS, marks, marks[1:], strict=False)}
        parts["total"] = marks[-1] - begun
        parts["own"] = sum(parts[name] for name in OWN)
        done = max(int(line.split()[1]) for path in self.notes.glob(f"{old}-*") for line in _lines(path))
        # a process that leaves on request does so within the step it has just done, and notes it no more
        return parts | {"lost_steps": max(0, done - notes["loaded"][0])}

    def whole_again(self, generation: int) -> None:
        """Bring a second node, for the next fault."""
        name = fresh_name(self.names)
        self.names.add(name)
        self.trainer.resize({**self.trainer.status().placement, name: 1})
        self.await_training(generation + 1)

    def await_training(self, generation: int) -> None:
        def trains() -> bool:
            return self.trainer.status().generation == generation and "step" in self.first_notes(generation)

        self.until(trains)

    def until(self, reached: Callable[[], bool]) -> None:
        end = time.monotonic() + LONG
        while not reached():
            status = self.trainer.status()
            if time.monotonic() > end or status.state == "failed":
                raise SystemExit(f"the run does not train any more: {status}")
            time.sleep(0.02)

    def first_notes(self, generation: int) -> dict[str, tuple[int, float]]:
        """Return the first line of each word that rank 0 has noted, as (number, time)."""
        found: dict[str, tuple[int, float]] = {}
        for line in _lines(self.notes / f"{generation}-0"):
            word, number, at = line.split()
            found.setdefault(word, (int(number), float(at)))
        return found

    def events(self, generation: int) -> list[TrainingEvent]:
        return [event for event in self.trainer.events() if event.generation == generation]

    def event(self, kind: str, generation: int) -> TrainingEvent:
        return next(event for event in self.events(generation) if event.kind == kind)


def _lines(path: Path) -> list[str]:
    """Return the complete lines of a file that is being written."""
    return path.read_text().split("\n")[:-1] if path.exists() else []


def measure(repetitions: int) -> dict[str, list[dict[str, float]]]:
    """Return what each fault took, once per repetition; the faults take turns."""
    found: dict[str, list[dict[str, float]]] = {fault: [] for fault in FAULTS}
    with tempfile.TemporaryDirectory(prefix="ebbflow-recovery-") as folder:
        bench = Bench(Path(folder))
        try:
            for number in range(repetitions):
                for fault in FAULTS:
                    figures = bench.suffer(fault)
                    found[fault].append(figures)
                    shown = ", ".join(f"{name} {value:.2f}" for name, value in figures.items())
                    print(f"{number + 1:2} {fault:8} {shown}", flush=True)
        finally:
            bench.trainer.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repetitions", type=int, default=10)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    found = measure(given.repetitions)
    medians = {
        fault: {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for fault, rows in found.items()
    }
    setup: dict[str, Any] = {
        "machine": f"{len(os.sched_getaffinity(0))} processors, {platform.machine()}, {platform.system()}",
        "torch": torch.__version__,
        "repetitions": given.repetitions,
        "notice_s": NOTICE,
        "stopped_s": STOPPED,
        "parts": PARTS,
        "own": list(OWN),
    }
    content = {"setup": setup, "medians": medians, "runs": found}
    (given.out / "training_recovery.json").write_text(json.dumps(content, indent=1) + "\n")
    drawn = bars_svg(
        "Seconds from the fault to the next step",
        list(FAULTS),
        {name: [medians[fault][name] for fault in FAULTS] for name in (*PARTS, "total")},
        unit="s",
    )
    (given.out / "training_recovery.svg").write_text(drawn)


if __name__ == "__main__":
    main()
