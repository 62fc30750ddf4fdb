"""Real trainings over real aggregators: processes, nodes and aggregators are killed, and the others train on."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.training.launcher.hang import HangRule
from ebbflow.planners.model.trainings import RunSettings
from tests.infra.training.elastic_runs import Run, SeededNodes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


class ServiceRun(Run):
    """A training of some nodes with one worker each, by default over two aggregators that mirror each other."""

    def __init__(
        self,
        folder: Path,
        nodes: int,
        *,
        pause: float = 0.02,
        mirrors: int = 1,
        mirror_every: int = 1,
        hang: HangRule | None = None,
    ) -> None:
        settings = RunSettings(
            sync="service",
            adaptive=False,
            checkpoint_interval=1e6 if mirrors else 1.0,
            aggregators=mirrors + 1,
            mirrors=mirrors,
            mirror_every=mirror_every,
        )
        super().__init__(
            folder, nodes, settings, arguments=("100000", "adam", str(pause), "float32"), hang=hang
        )

    @property
    def aggregator(self) -> int:
        """Return the process ID of the first aggregator."""
        loop = self.trainer._loop
        assert loop is not None
        assert loop._aggregators is not None
        return next(iter(loop._aggregators.pids.values()))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServiceRun]]:
    begun: list[ServiceRun] = []

    def make(**options: Any) -> ServiceRun:
        begun.append(ServiceRun(tmp_path, **options))
        return begun[-1]

    yield make
    for one in begun:
        one.close()


def test_workers_nodes_and_an_aggregator_are_lost_and_nodes_come_within_one_generation(
    start: Callable[..., ServiceRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SeededNodes, "seeded", "node-1")
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
    assert status.end is not None
    [left] = status.end.aggregators.values()  # the other one was killed
    assert left["held"].keys() == {"generation-1"}
    run.check_data(status.step)
    assert len(run.unwritten) <= 3, run.unwritten


def test_a_killed_aggregator_leaves_moments_of_the_last_mirrored_round(
    start: Callable[..., ServiceRun],
) -> None:
    run = start(nodes=2, mirror_every=1000)
    run.until(lambda: run.step > 12, "steps")
    os.kill(run.aggregator, signal.SIGKILL)
    run.until(lambda: bool(run.kinds("aggregator-lost")), "loss of an aggregator")
    run.advance(5)
    status = run.stop()
    assert status.generation == 1
    run.check_data(status.step)
    [said] = run.kinds("moments")
    assert 12 <= int(str(said["rounds"])) <= status.step, "mirrors have those of the first round"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_worker_is_killed_at_a_random_point(start: Callable[..., ServiceRun], seed: int) -> None:
    rng = random.Random(seed)
    run = start(nodes=3)
    run.until(lambda: run.step > 3, "steps")
    SystemClock().sleep(rng.random() * 0.3)
    os.kill(run.pid(rng.randrange(3)), rng.choice([signal.SIGKILL, signal.SIGSTOP]))
    run.until(lambda: any(one["rank"] == 3 for one in run.steps), "process that takes its place")
    status = run.stop()
    assert status.generation == 1
    run.check_data(status.step)
    assert len(run.unwritten) <= 1


@pytest.mark.slow
def test_a_worker_that_is_heard_of_no_more_is_left_out(start: Callable[..., ServiceRun]) -> None:
    """As when its link is cut and no connection ends: it is stopped, and nobody looks at its process."""
    run = start(nodes=3, hang=HangRule(stopped=1e6, worker_silence=6.0))
    run.until(lambda: run.step > 5, "steps")
    os.kill(run.pid(1), signal.SIGSTOP)
    run.until(lambda: bool(run.kinds("worker-lost")), "loss")
    (lost,) = run.kinds("worker-lost")
    assert lost["node"] == "node-1"
    assert "showed no sign of life for 6 s" in str(lost["how"])
    run.advance(5)
    status = run.stop()
    assert status.generation == 1
    run.check_data(status.step)


@pytest.mark.slow
def test_a_node_with_a_notice_ends_its_step_and_leaves(start: Callable[..., ServiceRun]) -> None:
    run = start(nodes=2)
    run.until(lambda: run.step > 5, "steps")
    run.pool.notice("node-1", 30.0)
    run.until(lambda: "node-1" not in run.trainer.status().placement, "node that leaves")
    run.advance(5)
    status = run.stop()
    assert status.generation == 1
    assert run.kinds("worker-lost")[0]["how"] == "it was asked to leave"
    run.check_data(status.step)
    assert run.unwritten == []


@pytest.mark.slow
def test_a_node_is_lost_while_the_only_other_one_starts_its_process_again(
    start: Callable[..., ServiceRun],
) -> None:
    """None is left that knows how far the training is: it resumes from its last save, here its beginning."""
    run = start(nodes=2, hang=HangRule(floor=1e6))
    run.until(lambda: run.step > 5, "steps")
    os.kill(run.pid(1), signal.SIGKILL)
    run.until(lambda: bool(run.kinds("worker-joins")), "process that starts again")
    run.pool.kill("node-0")
    run.until(
        lambda: any(one["generation"] > 1 or one["rank"] > 1 for one in run.steps), "steps of the other"
    )
    status = run.stop()
    run.check_data(status.step)
    if status.generation > 1:
        assert "no process is left that knows" in str(run.kinds("restarts"))


@pytest.mark.slow
def test_without_a_mirror_a_lost_aggregator_ends_the_generation_and_the_next_one_resumes(
    start: Callable[..., ServiceRun],
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
