"""Real trainings whose processes and nodes are killed, come and go, and what they wrote of their steps."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.protocols import TrainingJob, TrainingStatus
from ebbflow.infra.training.channel.wire import Entry
from ebbflow.infra.training.launcher.hang import HangRule
from ebbflow.infra.training.launcher.trainer import TorchTrainer
from ebbflow.infra.training.local_nodes import LocalNodes
from ebbflow.infra.training.process.world import BACKEND
from ebbflow.planners.model.trainings import RunSettings
from tests.infra.training.service.service_script import BATCH, SAMPLES

SCRIPT = Path(__file__).parent / "service" / "service_script.py"
PATIENCE = 150.0  # s
PER_PASS = SAMPLES // BATCH


class SeededNodes(LocalNodes):
    """Nodes of this machine; ``seeded`` names one that has an order of sets of its own.

    Others are forks of one interpreter in tests (``forked_python``), which iterate over a set of names alike.
    """

    seeded = ""

    def _share(self, name: str, slots: int, entry: Entry) -> tuple[tuple[str, ...], dict[str, str]]:
        gpus, variables = super()._share(name, slots, entry)
        return gpus, {**variables, **({"PYTHONHASHSEED": "1"} if name == self.seeded else {})}


class StepLog:
    """What workers of ``service_script.py`` have written in a directory of the steps that they took."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, int] = {}  # characters of what workers write
        self._steps: list[dict[str, Any]] = []
        self.unwritten: list[int] = []  # steps of which a killed worker has not written its part down

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return what was written so far."""
        for path in sorted(self.folder.glob("trained-*")):
            with path.open() as file:
                file.seek(self._read.get(path, 0))
                text = file.read()
            whole = text[: text.rfind("\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            rank = int(path.name.partition("-")[2])
            self._steps += [{**json.loads(line), "rank": rank} for line in whole.splitlines()]
        return self._steps

    @property
    def step(self) -> int:
        return max((one["step"] for one in self.steps), default=0)

    def check_samples(self, steps: int, begun: Mapping[int, int]) -> None:
        """See that each sample was used exactly once a pass, in so many steps.

        Args:
            steps: that the training has made.
            begun: the step at which each generation began.
        """
        by_step: dict[int, list[tuple[int, int]]] = {}
        last = {one: min([steps, *(s for g, s in begun.items() if g > one)]) for one in begun}
        for one in self.steps:
            if one["weight"] > 0 and one["step"] <= last[one["generation"]]:
                by_step.setdefault(one["step"], []).append((one["start"], one["stop"]))
        assert sorted(by_step) == list(range(1, steps + 1))
        for step, found in by_step.items():
            begin = (step - 1) % PER_PASS * BATCH
            used = [place for start, stop in sorted(found) for place in range(start, stop)]
            # a worker may be killed when its part of a step counts and before it has written that down
            assert set(used) <= set(range(begin, begin + BATCH)), step
            assert len(set(used)) == len(used), step
            if len(used) < BATCH:
                self.unwritten.append(step)


class Run(StepLog):
    """A training of some nodes, which writes down who trained on what."""

    NODES: type[LocalNodes] = SeededNodes

    def __init__(
        self,
        folder: Path,
        nodes: int,
        settings: RunSettings,
        *,
        script: Path = SCRIPT,
        arguments: Sequence[str] = ("100000", "adam", "0.02", "float32"),
        slots: int = 1,
        hang: HangRule | None = None,
        **options: Any,
    ) -> None:
        super().__init__(folder)
        # a GPU, where there is one, is none of a node's own: all train on it, which NCCL refuses
        self.pool = self.NODES(folder / "nodes", gpus=(), environment={BACKEND: "gloo"})
        self.trainer = TorchTrainer(self.pool, logs=folder / "logs", hang=hang, **options)
        job = TrainingJob(
            id="one",
            script=str(script),
            folder=str(folder / "run"),
            arguments=(str(folder), *arguments),
            settings=settings,
        )
        self.trainer.launch(job, {f"node-{i}": slots for i in range(nodes)})

    def close(self) -> None:
        self.trainer.close()

    def until(self, reached: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not reached():
            status = self.trainer.status()
            assert status.state not in ("failed", "finished"), (
                f"{status.state} before {what}: {status.reason}"
            )
            assert time.monotonic() < end, (
                f"no {what}; {[(e.kind, e.content) for e in self.trainer.events()]}"
            )
            SystemClock().sleep(0.02)

    def advance(self, steps: int) -> None:
        begun = self.step
        self.until(lambda: self.step >= begun + steps, f"{steps} steps after {begun}")

    def pid(self, rank: int) -> int:
        return int(next(one["pid"] for one in self.steps if one["rank"] == rank))

    def kinds(self, kind: str) -> list[dict[str, object]]:
        return [dict(event.content) for event in self.trainer.events() if event.kind == kind]

    def stop(self) -> TrainingStatus:
        """Let all leave at the end of a step, and return where the training is then."""
        self.trainer.stop(time.time() + PATIENCE)
        status = self.trainer.wait(PATIENCE)
        assert status.state == "stopped", (status.reason, self.trainer.events())
        return status

    def check_data(self, steps: int) -> None:
        """See that each sample was used exactly once a pass, by processes that are there and by those lost since.

        Steps count that led to where the run is: not those after which a later generation began.
        """
        begun: dict[int, int] = {}  # step, by generation
        for event in self.trainer.events():
            if event.kind == "started":
                begun.setdefault(event.generation, int(str(event.content["step"])))
        self.check_samples(steps, begun)
