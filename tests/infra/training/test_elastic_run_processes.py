"""Runs of real processes over gloo that stop, shrink, grow, and are killed."""

import json
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchanges import Speakers
from rank_server import Rank, RankServer, rank_server

from ebbflow.infra.protocols.trainings import SETTINGS
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.infra.training.checkpoints.folder import CheckpointFolder
from ebbflow.infra.training.process import channel as names
from ebbflow.infra.training.process.channel import Report, StopRequest
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.training.speed.job_report import JobReport

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).with_name("elastic_script.py")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankServer]:
    with rank_server(tmp_path_factory.mktemp("ranks")) as found:
        yield found


class Launch:
    """A launcher's channel without the launcher."""

    def __init__(self, server: RankServer, folder: Path) -> None:
        self.server, self.folder = server, folder
        self.speakers = Speakers()
        self.generation = 0
        self.reports: list[Report] = []

    def start(self, world: int, settings: RunSettings | None = None, **case: Any) -> list[Rank]:
        self.generation += 1
        self.reports = []
        self.channel = self.speakers.open(self.generation, world)
        environment = {
            **self.speakers.environment(self.generation),
            names.RUN_FOLDER: str(self.folder / "run"),
            SETTINGS: (settings or RunSettings()).to_json(),
            "CASE": json.dumps({"log": str(self.folder / f"log-{self.generation}")} | case),
        }
        return self.server.start(SCRIPT, world, environment)

    def run(self, world: int, settings: RunSettings | None = None, **case: Any) -> list[int | None]:
        return self.wait(self.start(world, settings, **case))

    def wait(self, ranks: list[Rank]) -> list[int | None]:
        exits = self.server.wait(ranks)
        self.reports += self.channel.reports()
        return exits

    def until_reports(self, count: int) -> None:
        """Return once so many reports have come."""
        while len(self.reports) < count:
            self.reports += self.channel.reports()
            self.server.look()

    def said(self, kind: str) -> list[Report]:
        return [report for report in self.reports if report.kind == kind]

    @property
    def checkpoints(self) -> CheckpointFolder:
        return CheckpointFolder(StorageLocation(self.folder / "run" / "checkpoints"))

    def log(self) -> "Log":
        return Log(self.folder)


class Log:
    """What all processes of all generations wrote."""

    def __init__(self, folder: Path) -> None:
        self.losses: dict[int, list[float]] = defaultdict(list)  # by step, of each process that took it
        self.seen: dict[int, list[int]] = defaultdict(list)  # by pass
        self.of_step: dict[int, list[int]] = defaultdict(list)
        self.end: dict[str, Any] = {}
        for path in sorted(folder.glob("log-*")):
            entries = [json.loads(line) for line in path.read_text().splitlines()]
            done = {entry["step"] for entry in entries if "loss" in entry}
            for entry in entries:
                if "loss" in entry:
                    self.losses[entry["step"]].append(entry["loss"])
                elif "end" in entry:
                    self.end = entry["end"]
                elif entry["step"] in done:  # else the step ended with its process
                    self.seen[entry["turn"]] += entry["seen"]
                    self.of_step[entry["step"]] += entry["seen"]


@pytest.fixture
def launch(server: RankServer, tmp_path: Path) -> Launch:
    return Launch(server, tmp_path)


@pytest.fixture(scope="module")
def static(server: RankServer, tmp_path_factory: pytest.TempPathFactory) -> Log:
    """The undisturbed run of one process."""
    one = Launch(server, tmp_path_factory.mktemp("static"))
    assert one.run(1) == [0]
    return one.log()


def same(log: Log, static: Log) -> None:
    """The same steps over the same samples, with the same losses, to the same weights."""
    assert sorted(log.losses) == sorted(static.losses)
    for step, losses in static.losses.items():
        np.testing.assert_allclose(log.losses[step], losses[0], rtol=2e-5)
        assert sorted(log.of_step[step]) == sorted(static.of_step[step])
    assert [sorted(log.seen[turn]) for turn in sorted(log.seen)] == [list(range(100))] * 3
    np.testing.assert_allclose(log.end["weights"], static.end["weights"], rtol=1e-4, atol=1e-6)
    assert log.end["lr"] == pytest.approx(static.end["lr"])
    assert log.end["gained"] == pytest.approx(300 / 24)


def test_a_run_that_shrinks_and_grows_is_the_run_that_does_not(launch: Launch, static: Log) -> None:
    for world, case in ((2, {"stop": [2, 1]}), (1, {"stop": [6, 0]}), (3, {"stop": [9, 2]}), (2, {})):
        assert launch.run(world, at=case, max_local=7) == [0] * world
        if case:
            (stopped,) = launch.said("stopped")
            assert (stopped.step, stopped.content["saved"]) == (case["stop"][0] + 1, True)
            assert not launch.said("finished")
    assert launch.said("finished")
    assert launch.said("started")[0].content["restored"] == 10
    same(launch.log(), static)


def test_the_launcher_hears_of_the_goodput(launch: Launch) -> None:
    assert launch.run(2, epochs=10, pause=0.04) == [0, 0]
    said = [report.content["job"] for report in launch.said("step") if "job" in report.content]
    assert len(said) == 1, "every 30 s"
    job = JobReport.from_dict(said[0])
    assert (job.gpus, job.limits.initial, job.limits.largest) == (2, 24, 24)
    assert job.model is not None
    assert job.model.at(1, 2, job.split) > 0


def test_a_killed_peer_costs_the_step_in_flight_only(launch: Launch, static: Log) -> None:
    exits = launch.run(3, at={"kill": [5, 2]})
    assert sorted(map(str, exits)) == ["-9", "75", "75"]
    saved = [report for report in launch.said("stopped") if report.content["saved"]]
    assert [report.step for report in saved] == [5], "one survivor saves for all"
    assert saved[0].content["seconds"] < 5
    assert launch.run(2) == [0, 0]
    same(launch.log(), static)


def test_losing_all_processes_falls_back_to_the_last_periodic_checkpoint(launch: Launch) -> None:
    settings = RunSettings(checkpoint_interval=0.0)
    assert launch.run(1, settings, at={"kill": [9, 0]}, pause=0.05) == [-9]
    found = launch.checkpoints.latest()
    assert found is not None
    assert 5 <= found.step <= 9
    assert launch.run(1) == [0]
    assert launch.said("started")[0].step == found.step


def test_a_running_checkpoint_is_taken_where_it_is_newer(launch: Launch) -> None:
    settings = RunSettings(
        checkpoint_interval=600.0, partial_checkpoint_interval=4, partial_checkpoint_fraction=0.25
    )
    assert launch.run(1, settings, at={"kill": [9, 0]}, pause=0.05, adam=True) == [-9]
    assert launch.checkpoints.latest() is None
    assert launch.run(2, settings, adam=True) == [0, 0]
    (started,) = launch.said("started")
    assert started.content["restored"] == started.step >= 7
    assert started.content["oldest"] <= started.step
    assert started.content["perturbation"] > 0
    assert launch.log().end["extra"] == started.step, "what the script keeps besides is of the same step"
    assert launch.log().end["steps"] == 15
    assert launch.log().end["gained"] == pytest.approx(300 / 24)


def test_a_request_to_stop_comes_through_the_channel(launch: Launch) -> None:
    ranks = launch.start(2, epochs=1000, pause=0.01)
    launch.until_reports(2)
    launch.channel.request_stop(StopRequest("resize"))
    assert launch.wait(ranks) == [0, 0]
    (stopped,) = launch.said("stopped")
    assert stopped.content["reason"] == "resize"
    found = launch.checkpoints.latest()
    assert found is not None
    assert found.step == stopped.step > 0
    steps = [r.time for r in launch.said("step")]
    assert all(later - sooner > 0.45 for sooner, later in pairwise(steps))


def test_a_step_that_outlasts_the_deadline_is_given_up(launch: Launch) -> None:
    ranks = launch.start(1, RunSettings(termination_grace=2.5), at={"hang": [4, 0]})
    assert launch.wait(ranks) == [0]
    (stopped,) = launch.said("stopped")
    assert stopped.content["last_moment"]
    assert (stopped.content["reason"], stopped.content["saved_step"]) == ("terminated", 4)
    found = launch.checkpoints.latest()
    assert found is not None
    assert found.step == 4


def test_a_lost_launcher_makes_a_run_save_and_leave(launch: Launch) -> None:
    ranks = launch.start(2, epochs=1000, pause=0.02)
    launch.until_reports(2)
    launch.speakers.close()
    assert launch.server.wait(ranks) == [0, 0]
    found = launch.checkpoints.latest()
    assert found is not None
    assert found.note["reason"] in ("launcher lost", "another process was requested to stop")
    assert "the launcher cannot be reached" in ranks[0].said + ranks[1].said


def test_a_step_without_a_finite_gradient_is_left_out_by_all(launch: Launch) -> None:
    assert launch.run(2, nan_at=17) == [0, 0]
    log = launch.log()
    assert np.isfinite(log.end["weights"]).all()
    assert log.end["skipped"] == 3, "once in each pass"
    assert log.end["steps"] == 15
    assert [sorted(log.seen[turn]) for turn in range(3)] == [list(range(100))] * 3
    assert len(launch.said("skipped")) == 3


def test_a_preflight_rehearses_saving_and_leaves_no_trace(launch: Launch) -> None:
    assert launch.run(1, RunSettings(preflight_steps=3)) == [0]
    (preflight,) = launch.said("preflight")
    assert preflight.content["steps"] == 3
    assert preflight.content["checkpoint_bytes"] > 1000
    assert not launch.said("finished")
    assert not (launch.folder / "run" / "preflight").exists()
    assert launch.checkpoints.latest() is None


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"batch_of_rank": 12}, "batch_size is 24 in process 0 and 36 in process 1"),
        ({"seed_of_rank": 1}, "seed is 3 in process 0 and 4 in process 1"),
        ({"samples_of_rank": -1}, "the number of samples is 100 in process 0 and 99 in process 1"),
    ],
)
def test_processes_that_ask_for_different_things_are_told_so(
    launch: Launch, case: dict[str, int], words: str
) -> None:
    ranks = launch.start(2, **case)
    assert launch.wait(ranks) == [1, 1]
    for rank in ranks:
        assert f"all processes must ask for the same: {words}" in rank.said


def test_a_users_error_ends_the_process_as_it_would_without_us(launch: Launch, static: Log) -> None:
    ranks = launch.start(2, at={"error": [4, 1]})
    exits = launch.wait(ranks)
    assert exits == [75, 1]
    assert "ValueError: the user's own mistake" in ranks[1].said
    assert "ebbflow/infra" not in ranks[1].said.split("Traceback")[-1]
    assert launch.run(1) == [0]
    same(launch.log(), static)


def test_without_a_launcher_a_run_resumes_to_the_bit(server: RankServer, tmp_path: Path) -> None:
    def run(folder: Path, **case: Any) -> None:
        given = {"log": str(folder / "log-1"), "folder": str(folder), "dropout": 0.5, "adam": True} | case
        environment = {"CASE": json.dumps(given)}
        assert server.wait(server.start(SCRIPT, 1, environment)) == [0]

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    run(whole)
    for at in ({"stop": [3, 0]}, {"stop": [8, 0]}, {}):
        run(parts, at=at)
    log, undisturbed = Log(parts), Log(whole)
    assert log.losses == undisturbed.losses
    assert (log.end.pop("extra"), undisturbed.end.pop("extra")) == (9, 0), "what the script keeps besides"
    assert log.end == undisturbed.end
