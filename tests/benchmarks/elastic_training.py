"""Elastic training on real tasks, with nodes that are really killed, resized and given back.

Run from the repository root: ``python -m tests.benchmarks.elastic_training --out DIR [--part faults|adaptation]
[--seeds N] [--tasks NAME ...]``. Writes ``elastic_training.json`` and ``elastic_training.svg``.

*Faults*: each task and seed is trained by one process without disturbance, and again under 10 resizes and 5 kills
(SIGKILL to all processes of a node, or to one process) at equal distances; its final metric, the steps done twice and
the seconds from each kill to the next complete step are kept. The batch is fixed, so the two should end alike.

*Adaptation*: seconds until a target metric on 1, then 4, then 2 workers of half a processor each, with the
batch fixed and with it following predicted goodput.
"""

import argparse
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbflow.infra.errors import ClusterError
from ebbflow.infra.protocols import TrainingJob
from ebbflow.infra.training.launcher.trainer import TorchTrainer
from ebbflow.infra.training.local_nodes import LocalNodes
from ebbflow.infra.training.process.channel import Report
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.tasks.drawing.charts import bars_svg

SCRIPT = str(Path(__file__).with_name("elastic_tasks.py"))
LONGEST = 600.0  # seconds of one run
NEVER = {"digits": "2", "covertype": "2", "text": "0"}  # metrics that no model reaches
EPOCHS = {"digits": 12, "covertype": 1, "text": 3}
TARGETS = {"digits": 0.96, "covertype": 0.66, "text": 3.3}  # accuracy; bits per character
PLACEMENTS: tuple[dict[str, int], ...] = (
    {"a": 1, "b": 1}, {"a": 2}, {"a": 1, "b": 1, "c": 1}, {"c": 1}, {"b": 2, "c": 1},
)  # fmt: skip
SPARE = {"d": 1}
EVENTS = 15  # two resizes, then a kill, and so on
SCHEDULE: tuple[tuple[float, int], ...] = ((0.0, 1), (15.0, 4), (40.0, 2))  # seconds, workers


@dataclass
class Observed:
    """What the processes of one run say."""

    reports: list[Report] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, report: Report) -> None:
        with self.lock:
            self.reports.append(report)

    def of(self, *kinds: str) -> list[Report]:
        with self.lock:
            return [report for report in self.reports if report.kind in kinds]

    @property
    def step(self) -> int:
        return max((report.step for report in self.of("step", "started", "checkpoint")), default=0)


@dataclass(frozen=True)
class Kill:
    """One kill and what followed."""

    what: str  # node or process
    step: int  # last that was reported before
    restored: int  # that training went on from
    seconds: float  # until the next step was complete


class Live:
    """A run on nodes of this machine."""

    def __init__(
        self,
        arguments: tuple[str, ...],
        settings: RunSettings,
        cpus: float | None = None,
        *,
        paced: bool = False,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ebbflow-elastic-")
        self._pace = Path(self._folder.name) / "pace"
        if paced:
            self._pace.write_text("0")
            arguments = (*arguments, str(self._pace))
        self.nodes = LocalNodes(cpus=cpus, environment={"OMP_NUM_THREADS": "1"})
        self.observed = Observed()
        self.trainer = TorchTrainer(self.nodes, stragglers=False, on_report=self.observed)
        self.job = TrainingJob("bench", SCRIPT, arguments, f"{self._folder.name}/run", settings)
        self.begun = time.monotonic()

    def launch(self, placement: Mapping[str, int]) -> None:
        self.trainer.launch(self.job, placement)
        self.begun = time.monotonic()

    def go(self, step: int, *, wait: bool = True) -> None:
        """Let the run train at its own speed up to ``step``."""
        beside = self._pace.with_suffix(".new")
        beside.write_text(str(step))
        beside.replace(self._pace)
        if wait:
            self.until(lambda: self.observed.step >= step)

    def resize(self, placement: Mapping[str, int]) -> None:
        """Move to ``placement`` and wait until training goes on there."""
        before = len(self.observed.of("started"))
        self.trainer.resize(placement)
        self.until(lambda: len(self.observed.of("started")) > before)

    def kill(self, whole: bool) -> Kill:
        """Kill a node or one process of it and wait until training goes on."""
        status = self.trainer.status()
        name = sorted(status.placement)[-1]
        began, step, now = len(self.observed.of("started")), self.observed.step, time.time()
        if whole:
            self.nodes.kill(name)
            if len(status.placement) == 1:
                self.trainer.resize(
                    SPARE
                )  # nobody is left to save; another node goes on from the last checkpoint
        else:
            os.kill(self._process(name), signal.SIGKILL)
        self.until(lambda: len(self.observed.of("started")) > began)
        restored = self.observed.of("started")[began]
        self.until(lambda: self._steps_after(restored))
        stepped = min((report.time for report in self._steps_after(restored)), default=restored.time)
        return Kill("node" if whole else "process", step, restored.step, stepped - now)

    def _steps_after(self, restored: Report) -> list[Report]:
        return [r for r in self.observed.of("step") if r.time >= restored.time and r.step > restored.step]

    def _process(self, name: str) -> int:
        """Return a training process of a node: its youngest."""
        return max(self.nodes.pids(name))

    def until(self, done: Any, timeout: float = 120.0) -> None:
        """Wait for something; the end of the script ends the wait. Raises ``RuntimeError`` for a failed run."""
        end = time.monotonic() + timeout
        while not done() and (status := self.trainer.status()).state != "finished":
            if time.monotonic() > end or status.state in ("failed", "stopped"):
                events = "\n".join(f"{e.kind} {dict(e.content)}" for e in self.trainer.events()[-12:])
                raise RuntimeError(f"{status}\n{events}")
            time.sleep(0.02)

    def finish(self) -> Report:
        """Wait for the script's end and return what it said last."""
        status = self.trainer.wait(LONGEST)
        if status.state != "finished":
            raise RuntimeError(f"the run is {status.state}: {status.reason}")
        return self.observed.of("finished")[-1]

    def __enter__(self) -> "Live":
        return self

    def __exit__(self, *_: object) -> None:
        self.trainer.close()
        self.nodes.close()
        self._folder.cleanup()


def undisturbed(task: str, seed: int) -> tuple[float, int]:
    """Return the final metric and the number of steps of a run that nothing happens to."""
    arguments = (task, str(seed), str(EPOCHS[task]), NEVER[task], "fixed")
    with Live(arguments, RunSettings(adaptive=False)) as live:
        live.launch({"a": 1})
        end = live.finish()
    return end.content["metrics"]["metric"], end.step


def disturbed(task: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the final metric under 10 resizes and 5 kills, and what those cost."""
    arguments = (task, str(seed), str(EPOCHS[task]), NEVER[task], "fixed")
    kills, resizes = [], 0
    settings = RunSettings(adaptive=False, checkpoint_interval=1.0, recovery="restart")
    with Live(arguments, settings, paced=True) as live:
        live.launch(PLACEMENTS[0])
        for event in range(EVENTS):
            live.go((event + 1) * steps // (2 * EVENTS))
            if event % 3 == 2:
                kills.append(live.kill(whole=event % 2 == 0))
            else:
                resizes += 1
                live.resize(PLACEMENTS[resizes % len(PLACEMENTS)])
        live.go(2 * steps, wait=False)
        end = live.finish()
    return {
        "metric": end.content["metrics"]["metric"],
        "steps": end.step,
        "resizes": resizes,
        "kills": [vars(kill) for kill in kills],
    }


def to_target(task: str, seed: int, batch: str, cpus: float | None) -> dict[str, Any]:
    """Return how long a run takes to its target metric on workers that come and go."""
    arguments = (task, str(seed), "1000", str(TARGETS[task]), batch)
    settings = RunSettings(adaptive=batch == "adaptive", retune_every=3.0, recovery="restart")
    with Live(arguments, settings, cpus) as live:
        live.launch({"node-1": 1})
        for at, workers in SCHEDULE[1:]:
            live.until(lambda at=at: time.monotonic() - live.begun >= at)
            if live.trainer.status().state in ("finished", "failed"):
                break
            live.trainer.resize({f"node-{number + 1}": 1 for number in range(workers)})
        end = live.finish()
        started = live.observed.of("started")[0].time
        batches = [
            [r.time - started, r.content["batch"], r.content["gpus"]] for r in live.observed.of("step")
        ]
    return {
        "task": task,
        "seed": seed,
        "batch": batch,
        "seconds": end.time - started,
        "steps": end.step,
        "metric": end.content["metrics"]["metric"],
        "epochs": len(live.observed.of("metrics")),
        "batches": batches[:: max(1, len(batches) // 50)],
    }


def faults(tasks: list[str], seeds: int) -> list[dict[str, Any]]:
    rows = []
    for task in tasks:
        for seed in range(seeds):
            metric, steps = undisturbed(task, seed)
            found = {"task": task, "seed": seed, "undisturbed": metric, "undisturbed_steps": steps}
            found |= disturbed(task, seed, steps)
            rows.append(found)
            worst = max(kill["seconds"] for kill in found["kills"])
            again = [max(0, kill["step"] - kill["restored"]) for kill in found["kills"]]
            print(
                f"{task:10} seed {seed}: undisturbed {metric:.4f}, disturbed {found['metric']:.4f}, steps {steps} "
                f"and {found['steps']}, longest recovery {worst:.1f} s, steps done again {again}",
                flush=True,
            )
    return rows


def adaptation(tasks: list[str], seeds: int) -> dict[str, Any]:
    cpus: float | None = 0.5
    try:
        LocalNodes(cpus=cpus).close()
    except ClusterError:
        cpus = None
    rows = []
    for task in tasks:
        for seed in range(seeds):
            for batch in ("fixed", "adaptive"):
                rows.append(to_target(task, seed, batch, cpus))
                print({k: v for k, v in rows[-1].items() if k != "batches"}, flush=True)
    return {"cpus": cpus, "schedule": SCHEDULE, "targets": TARGETS, "runs": rows}


def ratios(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Return the median of adaptive over fixed seconds, by task."""
    found: dict[str, list[float]] = {}
    fixed = {(run["task"], run["seed"]): run["seconds"] for run in runs if run["batch"] == "fixed"}
    for run in runs:
        if run["batch"] == "adaptive":
            found.setdefault(run["task"], []).append(run["seconds"] / fixed[run["task"], run["seed"]])
    return {task: statistics.median(values) for task, values in found.items()}


def _median(runs: list[dict[str, Any]], task: str, batch: str) -> float:
    return statistics.median(run["seconds"] for run in runs if (run["task"], run["batch"]) == (task, batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--part", choices=["faults", "adaptation"], help="one part only; the other's results stay"
    )
    parser.add_argument("--seeds", type=int, default=5, help="of the part with faults")
    parser.add_argument("--tasks", nargs="+", choices=sorted(EPOCHS), default=list(EPOCHS))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    file = given.out / "elastic_training.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if given.part in (None, "faults"):
        found["faults"] = faults(given.tasks, given.seeds)
        file.write_text(json.dumps(found, indent=1) + "\n")
    if given.part in (None, "adaptation"):
        found["adaptation"] = adaptation(given.tasks, 1)
        file.write_text(json.dumps(found, indent=1) + "\n")
        runs = found["adaptation"]["runs"]
        print("adaptive over fixed:", ratios(runs))
        tasks = list(dict.fromkeys(run["task"] for run in runs))
        series = {
            batch: [
                statistics.median(r["seconds"] for r in runs if (r["task"], r["batch"]) == (task, batch))
                for task in tasks
            ]
            for batch in ("fixed", "adaptive")
        }
        drawn = bars_svg("Time to the target metric on 1, 4, 2 workers", tasks, series)
        (given.out / "elastic_training.svg").write_text(drawn)


if __name__ == "__main__":
    main()
