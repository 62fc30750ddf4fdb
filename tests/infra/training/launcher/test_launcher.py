"""The launcher on real processes that are really killed, stopped and given notice.

All tests here act on one run that is under way, and put it on the nodes they need first.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ebbflow.infra.errors import ClusterError, RunLockedError, TrainingError
from ebbflow.infra.protocols import TrainingEvent, TrainingJob, TrainingStatus
from ebbflow.infra.training.launcher.hang import HangRule
from ebbflow.infra.training.launcher.members import Members
from ebbflow.infra.training.launcher.trainer import TorchTrainer
from ebbflow.infra.training.local_nodes import LocalNodes
from ebbflow.planners.model.trainings import RunSettings

SCRIPT = Path(__file__).parents[1] / "launched_script.py"
PRELOAD = ("torch.distributed", "ebbflow.infra.training.process.world")
LONG = 150.0  # seconds: a bound for a busy machine, not an expectation


class Run:
    """A run that is under way, and what its tests ask of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes = LocalNodes(folder / "nodes")
        self.trainer = TorchTrainer(self.nodes, preload=PRELOAD, hang=HangRule(stopped=0.6), replace=False)
        job = TrainingJob(
            "shared",
            str(SCRIPT),
            (str(folder), "1000000", "0.01"),
            str(folder / "run"),
            RunSettings(termination_grace=20.0, recovery="restart"),
        )
        self.trainer.launch(job, {"node-1": 1, "node-2": 1})

    @property
    def members(self) -> Members:
        assert self.trainer._loop is not None
        return self.trainer._loop._members

    @property
    def status(self) -> TrainingStatus:
        return self.trainer.status()

    def until(self, reached: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + LONG
        while not reached():
            assert self.status.state not in ("failed", "finished"), self.status.reason
            assert time.monotonic() < end, f"no {what} in {LONG:g} s: {self.status}"
            time.sleep(0.01)

    def training_on(self, placement: dict[str, int]) -> None:
        def reached() -> bool:
            status = self.status
            return (
                status.state == "running"
                and status.placement == placement
                and self.steps(status.generation) > 3
                and not self.has("generation-ended", status.generation)  # before the next has begun
            )

        self.until(reached, f"training on {placement}")

    def on(self, placement: dict[str, int]) -> None:
        """Have the run on ``placement``."""
        if self.status.placement != placement:
            self.trainer.resize(placement)
        self.training_on(placement)

    def steps(self, generation: int) -> int:
        status = self.status
        return (
            status.step - self.event("started", generation).content["step"]
            if self.has("started", generation)
            else 0
        )

    def has(self, kind: str, generation: int) -> bool:
        return any(e.kind == kind and e.generation == generation for e in self.trainer.events())

    def event(self, kind: str, generation: int) -> TrainingEvent:
        return next(e for e in self.trainer.events() if e.kind == kind and e.generation == generation)

    def end_of(self, generation: int) -> dict[str, object]:
        self.until(lambda: self.has("generation-ended", generation), f"end of generation {generation}")
        return dict(self.event("generation-ended", generation).content)

    def worker(self, node: str) -> int:
        """Return the process id of a rank on ``node``."""
        generation = self.status.generation

        def known() -> bool:
            beat = self.members[node].beat
            return beat is not None and beat.generation == generation and bool(beat.ranks)

        self.until(known, f"process of {node}")
        return self.members[node].beat.ranks[0].pid


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    run = Run(tmp_path_factory.mktemp("launcher"))
    try:
        run.training_on({"node-1": 1, "node-2": 1})
        yield run
    finally:
        run.trainer.close()
        assert run.nodes.gone(run.nodes.uid)
        assert not run.nodes.folder.exists()


def test_a_run_grows_and_shrinks_without_losing_a_step(run: Run) -> None:
    run.on({"node-1": 1, "node-2": 1})
    before = run.status.generation
    run.on({"node-1": 1, "node-2": 1, "node-3": 2})
    assert run.event("started", before + 1).content["world"] == 4
    run.on({"node-2": 1, "node-3": 2})
    for generation in (before, before + 1):
        end = run.end_of(generation)
        assert (end["how"], end["reason"]) == ("stopped", "resize")
        assert run.event("started", generation + 1).content["step"] == end["saved_step"] >= end["last_step"]
    with pytest.raises(ClusterError, match="node-1"):
        run.nodes.pids("node-1")


def test_a_generation_can_be_ended_alone_and_the_next_is_decided_on(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.on({"node-2": 1, "node-3": 2})
    number = run.status.generation
    loop, asked = run.trainer._loop, []
    assert loop is not None
    decide = loop._decide
    monkeypatch.setattr(loop, "_decide", lambda end: asked.append(end) or decide(end))
    run.trainer.end_generation(number, "enough")
    end = run.end_of(number)
    assert (end["how"], end["reason"]) == ("stopped", "enough")
    run.until(lambda: run.has("started", number + 1), "next generation")
    run.training_on({"node-2": 1, "node-3": 2})
    assert run.status.generation == number + 1, "only the one that was named"
    assert [one.generation for one in asked] == [number]
    told = asked[0].events
    assert [event.number for event in told] == list(range(told[0].number, told[-1].number + 1))
    assert {"generation", "started", "stop-requested"} <= {e.kind for e in told if e.generation == number}
    assert (told[-1].kind, told[-1].generation) == ("generation-ended", number)
    assert run.event("started", number + 1).content["step"] == end["saved_step"] >= end["last_step"]


def test_after_sigkill_of_a_node_the_run_goes_on_at_the_step_it_had_reached(run: Run) -> None:
    run.on({"node-2": 1, "node-3": 2})
    status = run.status
    pids = run.nodes.pids("node-2")
    assert len(pids) >= 3  # the node, its agent, its process
    run.nodes.kill("node-2")
    assert not any(_alive(pid) for pid in pids)
    run.training_on({"node-3": 2})
    end = run.end_of(status.generation)
    assert end["how"] == "lost"
    assert "node-2" in str(end["reason"])
    assert run.event("started", status.generation + 1).content["step"] >= status.step


def test_a_killed_process_is_a_failure_of_its_own_and_its_node_stays(run: Run) -> None:
    run.on({"node-3": 2})
    generation = run.status.generation
    os.kill(run.worker("node-3"), signal.SIGKILL)
    end = run.end_of(generation)
    assert end["how"] == "failed"
    assert end["failures"][0]["signal"] == "SIGKILL"
    run.until(lambda: run.status.generation > generation, "another generation")
    run.training_on({"node-3": 2})


def test_a_node_that_does_not_come_up_spoils_no_resize(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    run.on({"node-3": 2})
    generation = run.status.generation
    monkeypatch.setattr("ebbflow.infra.training.local_nodes._NODE", "no.such.module")
    run.trainer.resize({"node-3": 2, "node-9": 1})
    run.until(lambda: run.has("resize-changed", generation), "note of the failed node")
    assert run.event("resize-changed", generation).content["without"] == ["node-9"]
    assert run.status.placement == {"node-3": 2}
    assert "no.such.module" in run.nodes.log("node-9")


def test_a_notice_costs_no_step(run: Run) -> None:
    run.on({"node-3": 2, "node-4": 1})
    status = run.status
    deadline = run.nodes.notice("node-4", 150.0)
    run.training_on({"node-3": 2})
    end = run.end_of(status.generation)
    assert (end["how"], end["reason"]) == ("stopped", "notice")
    assert run.event("generation-ended", status.generation).time < deadline
    assert run.event("started", status.generation + 1).content["step"] == end["saved_step"]


def test_a_frozen_node_is_found_and_left_out(run: Run) -> None:
    run.on({"node-3": 2, "node-5": 1})
    status = run.status
    run.nodes.pause("node-5")
    run.training_on({"node-3": 2})
    end = run.end_of(status.generation)
    assert (end["how"], end["suspects"]) == ("hung", ["node-5"])
    assert run.event("started", status.generation + 1).content["step"] >= status.step


def test_a_frozen_process_is_found_on_its_node_and_without_nodes_the_run_waits(run: Run) -> None:
    run.on({"node-3": 2})
    status = run.status
    os.kill(run.worker("node-3"), signal.SIGSTOP)
    run.until(lambda: run.status.state == "waiting", "wait for nodes")
    end = run.end_of(status.generation)
    assert (end["how"], end["suspects"]) == ("hung", ["node-3"])
    run.trainer.resize({"node-1": 1, "node-2": 1})
    run.training_on({"node-1": 1, "node-2": 1})
    assert run.event("started", status.generation + 1).content["step"] >= status.step


def test_a_frozen_process_holds_up_no_generation_that_ends(run: Run) -> None:
    run.on({"node-1": 1, "node-2": 1})
    generation = run.status.generation
    frozen, killed = run.worker("node-1"), run.worker("node-2")
    os.kill(frozen, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    run.end_of(generation)
    assert run.has("hang", generation)
    assert not run.has("cut-off", generation), "survivors get 20 s, and it cannot use them"
    run.training_on({"node-1": 1, "node-2": 1})


def test_one_run_has_one_launcher(run: Run) -> None:
    job = TrainingJob("shared", str(SCRIPT), (), str(run.folder / "run"))
    with LocalNodes() as nodes:
        other = TorchTrainer(nodes)
        with pytest.raises(RunLockedError, match="shared"):
            other.launch(job, {"node-1": 1})
        other.close()


def test_a_port_that_is_taken_is_named(run: Run) -> None:
    port = run.trainer._exchange.address.rpartition(":")[2]
    with LocalNodes() as nodes, pytest.raises(TrainingError, match=f"127.0.0.1:{port}"):
        TorchTrainer(nodes, port=port)


def test_a_stop_saves_and_leaves_nothing_running(run: Run) -> None:
    run.on({"node-1": 1, "node-2": 1})
    generation = run.status.generation
    run.trainer.stop(time.time() + 20)
    status = run.trainer.wait(LONG)
    assert status.state == "stopped"
    assert status.end is not None
    assert (status.end.kind, status.end.saved_step) == ("stopped", status.step)
    assert run.has("stopped", generation)
    assert run.nodes.gone(run.nodes.uid)
    with pytest.raises(TrainingError, match="ended"):
        run.trainer.resize({"node-1": 1})


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
