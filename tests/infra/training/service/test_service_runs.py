"""Real trainings over real aggregators: processes, nodes and aggregators are killed, and the others train on."""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.protocols import TrainingJob, TrainingStatus
from ebbflow.infra.training.launcher.hang import HangRule
from ebbflow.infra.training.launcher.trainer import TorchTrainer
from ebbflow.infra.training.local_nodes import LocalNodes
from ebbflow.planners.model.trainings import RunSettings
from tests.infra.training.service.service_script import BATCH, SAMPLES

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

SCRIPT = Path(__file__).with_name("service_script.py")
PATIENCE = 150.0  # s
PER_PASS = SAMPLES // BATCH


class Run:
    """A training of some nodes with one worker each, by default over two aggregators that mirror each other."""

    def __init__(
        self, folder: Path, nodes: int, *, pause: float = 0.02, mirrors: int = 1, hang: HangRule | None = None
    ) -> None:
        self.folder = folder
        self.unwritten: list[int] = []  # steps of which a killed worker has not written its part down
        self.pool = LocalNodes(folder / "nodes")
        self.trainer = TorchTrainer(self.pool, logs=folder / "logs", hang=hang)
        settings = RunSettings(
            sync="service",
            adaptive=False,
            checkpoint_interval=1e6 if mirrors else 1.0,
            aggregators=mirrors + 1,
            mirrors=mirrors,
        )
        arguments = (str(folder), "100000", "adam", str(pause), "float32")
        job = TrainingJob(
            id="one", script=str(SCRIPT), folder=str(folder / "run"), arguments=arguments, settings=settings
        )
        self.trainer.launch(job, {f"node-{i}": 1 for i in range(nodes)})

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

    @property
    def steps(self) -> list[dict[str, Any]]:
        """Return what workers have written of the steps that they took."""
        found = []
        for path in self.folder.glob("trained-*"):
            for line in path.read_text().splitlines(keepends=True):
                if line.endswith("\n"):
                    found.append({**json.loads(line), "rank": int(path.name.partition("-")[2])})
        return found

    @property
    def step(self) -> int:
        return max((one["step"] for one in self.steps), default=0)

    def advance(self, steps: int) -> None:
        begun = self.step
        self.until(lambda: self.step >= begun + steps, f"{steps} steps after {begun}")

    def pid(self, rank: int) -> int:
        return int(next(one["pid"] for one in self.steps if one["rank"] == rank))

    @property
    def aggregator(self) -> int:
        """Return the process ID of the first aggregator."""
        loop = self.trainer._loop
        assert loop is not None
        assert loop._aggregators is not None
        return next(iter(loop._aggregators.pids.values()))

    def kinds(self, kind: str) -> list[dict[str, object]]:
        return [dict(event.content) for event in self.trainer.events() if event.kind == kind]

    def stop(self) -> TrainingStatus:
        """Let all leave at the end of a step, and return where the training is then."""
        self.trainer.stop(time.time() + PATIENCE)
        status = self.trainer.wait(PATIENCE)
        assert status.state == "stopped", (status.reason, self.trainer.events())
        return status

    def check_data(self, steps: int) -> None:
        """See that each sample was used exactly once a pass, by processes that are there and by those lost since."""
        by_step: dict[int, list[tuple[int, int]]] = {}
        for one in self.steps:
            if one["weight"] > 0:
                by_step.setdefault(one["step"], []).append((one["start"], one["stop"]))
        assert sorted(by_step)[:steps] == list(range(1, steps + 1))
        for step, found in by_step.items():
            begin = (step - 1) % PER_PASS * BATCH
            used = [place for start, stop in sorted(found) for place in range(start, stop)]
            # a worker may be killed when its part of a step counts and before it has written that down
            assert set(used) <= set(range(begin, begin + BATCH)), step
            assert len(set(used)) == len(used), step
            if len(used) < BATCH:
                self.unwritten.append(step)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    begun: list[Run] = []

    def make(**options: Any) -> Run:
        begun.append(Run(tmp_path, **options))
        return begun[-1]

    yield make
    for one in begun:
        one.close()


def test_workers_nodes_and_an_aggregator_are_lost_and_nodes_come_within_one_generation(
    start: Callable[..., Run],
) -> None:
    run = start(nodes=3)
    run.until(lambda: run.step > 5, "steps")
    os.kill(run.pid(1), signal.SIGKILL)
    run.until(lambda: any(one["rank"] == 3 for one in run.steps), "process that takes its place")
    os.kill(run.pid(0), signal.SIGKILL)  # it reported and saved for all
    run.until(lambda: any(one["rank"] == 4 for one in run.steps), "process that takes the first one's place")
    run.pool.kill("node-2")
    run.until(lambda: len(run.kinds("worker-lost")) == 3, "loss of a node")
    run.advance(3)
    os.kill(run.aggregator, signal.SIGKILL)
    run.until(lambda: bool(run.kinds("aggregator-lost")), "loss of an aggregator")
    run.advance(3)
    run.trainer.resize({"node-0": 1, "node-7": 1})
    run.until(lambda: any(one["rank"] == 5 for one in run.steps), "node that was added")
    run.until(lambda: "node-1" not in run.trainer.status().placement, "node that was to leave")
    run.advance(3)
    status = run.stop()
    assert status.generation == 1
    run.check_data(status.step - 1)  # nobody writes the last one down: it ends the script
    assert len(run.unwritten) <= 3, run.unwritten


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_worker_is_killed_at_a_random_point(start: Callable[..., Run], seed: int) -> None:
    rng = random.Random(seed)
    run = start(nodes=3)
    run.until(lambda: run.step > 3, "steps")
    SystemClock().sleep(rng.random() * 0.3)
    os.kill(run.pid(rng.randrange(3)), rng.choice([signal.SIGKILL, signal.SIGSTOP]))
    run.until(lambda: any(one["rank"] == 3 for one in run.steps), "process that takes its place")
    status = run.stop()
    assert status.generation == 1
    run.check_data(status.step - 1)  # nobody writes the last one down: it ends the script
    assert len(run.unwritten) <= 1


@pytest.mark.slow
def test_a_worker_that_is_heard_of_no_more_is_left_out(start: Callable[..., Run]) -> None:
    """As when its link is cut and no connection ends: it is stopped, and nobody looks at its process."""
    run = start(nodes=3, hang=HangRule(stopped=1e6, worker_silence=2.0))
    run.until(lambda: run.step > 5, "steps")
    os.kill(run.pid(1), signal.SIGSTOP)
    run.until(lambda: bool(run.kinds("worker-lost")), "loss")
    assert "showed no sign of life for 2 s" in str(run.kinds("worker-lost")[0]["how"])
    run.advance(5)
    status = run.stop()
    assert status.generation == 1
    run.check_data(status.step - 1)


@pytest.mark.slow
def test_a_node_with_a_notice_ends_its_step_and_leaves(start: Callable[..., Run]) -> None:
    run = start(nodes=2)
    run.until(lambda: run.step > 5, "steps")
    run.pool.notice("node-1", 30.0)
    run.until(lambda: "node-1" not in run.trainer.status().placement, "node that leaves")
    run.advance(5)
    status = run.stop()
    assert status.generation == 1
    assert run.kinds("worker-lost")[0]["how"] == "it was asked to leave"
    run.check_data(status.step - 1)
    assert run.unwritten == []


@pytest.mark.slow
def test_without_a_mirror_a_lost_aggregator_ends_the_generation_and_the_next_one_resumes(
    start: Callable[..., Run],
) -> None:
    run = start(nodes=2, mirrors=0)
    run.until(lambda: bool(run.kinds("checkpoint")), "checkpoint")
    run.advance(5)
    os.kill(run.aggregator, signal.SIGKILL)
    run.until(lambda: run.trainer.status().generation == 2, "new generation")
    end = run.trainer.status().end
    assert end is not None
    assert (end.kind, end.reason) == ("lost", "aggregator-1 was lost, which had no mirror")
    assert end.left == {"node-0": 1, "node-1": 1}
    run.until(lambda: len(run.kinds("started")) == 2, "start")
    restored = run.kinds("started")[1]["restored"]
    assert isinstance(restored, int)
    run.until(lambda: run.step > restored + 5, "steps")
    assert run.stop().generation == 2
