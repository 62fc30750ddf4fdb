"""Runs of real processes over gloo that stop, shrink, grow, and are killed."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbflow.infra.memory import control
from ebbflow.infra.memory.registry import DIRECTORY, MemoryRegistry
from ebbflow.infra.training.process.channel import StopRequest
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.training.speed.job_report import JobReport
from tests.infra.memory.lenders import Lender
from tests.infra.training.launches import SCRIPT, Launch, Log, same
from tests.infra.training.rank_server import RankServer

pytestmark = pytest.mark.processes


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
    assert 0 < saved[0].content["seconds"] < 150
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


@pytest.fixture(name="lent")
def _lent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryRegistry]:
    registry = MemoryRegistry(tmp_path / "memory")
    registry.token(create=True)
    monkeypatch.setenv(DIRECTORY, str(registry.folder))
    lender = Lender(registry, "node-1")
    yield registry
    lender.close()


@pytest.mark.parametrize("memory", [False, True])
def test_a_running_checkpoint_is_taken_where_it_is_newer(
    launch: Launch, lent: MemoryRegistry, memory: bool
) -> None:
    settings = RunSettings(
        checkpoint_interval=600.0,
        partial_checkpoint_interval=4,
        partial_checkpoint_fraction=0.25,
        partial_checkpoint_memory=memory,
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
    told = control.status(lent.addresses()[0], lent.token())
    assert (told["puts"] > 0, told["get_hits"] > 0, told["entries"]) == (memory, memory, 0), (
        "nothing is left there"
    )


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


def test_a_rate_that_a_script_sets_in_one_process_ends_all_before_the_step(launch: Launch) -> None:
    ranks = launch.start(2, at={"rate": [4, 1]})
    assert launch.wait(ranks) == [1, 1]
    for rank in ranks:
        assert "step 5 is not taken: lr of group 0 is 0.0" in rank.said
        assert "in process 0 and 0.01 in process 1" in rank.said


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
