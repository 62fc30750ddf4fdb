"""Runs of real processes whose communication is planned: the same training, whatever happens to processes."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ebbflow.infra.communication.control import PlanningSettings
from ebbflow.infra.training.process.communication import plan_communication
from ebbflow.infra.training.process.world import World
from ebbflow.planners.capacity.values import Settings
from ebbflow.planners.communication.measured import MeasuredLinks
from ebbflow.planners.communication.placement import CommunicationProfile
from ebbflow.planners.communication.recorded import RecordedTraining
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.scheduling.live import live_policy
from ebbflow.planners.scheduling.placement_cost import ClusterLinks
from tests.infra.training.launches import Launch
from tests.infra.training.rank_server import RankServer
from tests.planners.capacity.ledger_worlds import World as Cluster
from tests.planners.capacity.ledger_worlds import app, node

pytestmark = pytest.mark.processes

PLANNING = {"measure_seconds": 0.3, "search_seconds": 0.2, "min_gain": -1e9, "max_slowdown": 1e9}
CASE: dict[str, Any] = {
    "batch": 12,
    "epochs": 48,
    "pause_unplanned": 0.12,
    "planning": PLANNING,
}  # over 400 steps


def states(launch: Launch) -> list[str]:
    return [str(report.content["state"]) for report in launch.said("communication")]


def silent(profile: CommunicationProfile) -> CommunicationProfile:
    """Return the same training with next to nothing to send."""
    dag = profile.recorded.dag
    less = replace(dag, comm=tuple(replace(op, bytes=4) for op in dag.comm))
    return replace(profile, recorded=replace(profile.recorded, dag=less))


def shared_out(*profiles: CommunicationProfile) -> tuple[dict[str, int], ...]:
    """Return what an auction gives apps of two GPUs each, by node; the nodes' links carry 10 kB/s."""
    links = ClusterLinks(intra_node=10e9, intra_rack=1e4)
    settings = Settings(policy=live_policy("themis", {"knob": 0.0}), scaling=None, links=links)
    world = Cluster(settings, [node("n1", 2), node("n2", 1), node("n3", 1)])
    for number, profile in enumerate(profiles):
        world.enter(app(f"app-{number}", 2, 2, 2), fields={"job": {"communication": profile.to_dict()}})
    world.steps(2)
    return tuple(world.placement(f"app-{number}") for number, _ in enumerate(profiles))


def test_a_planned_run_is_the_plain_one_with_a_process_killed_under_a_plan(
    launch: Launch, server: RankServer, tmp_path: Path
) -> None:
    (tmp_path / "plain").mkdir()
    plain = Launch(server, tmp_path / "plain")
    assert plain.run(2, **CASE | {"planning": None}) == [0, 0]
    exits = launch.run(3, **CASE, at={"kill": [150, 2]})
    assert sorted(map(str, exits)) == ["-9", "75", "75"]
    assert states(launch)[:3] == ["profiled", "committed", "plan"], launch.said("communication")
    profiled, committed, running = launch.said("communication")[:3]
    said = CommunicationProfile.from_dict(profiled.content["profile"])
    assert (said.recorded.ranks, said.nodes, said.links is not None) == (3, 1, True)
    assert shared_out(said, silent(said)) == ({"n1": 2}, {"n2": 1, "n3": 1})
    assert shared_out(silent(said), said) == ({"n2": 1, "n3": 1}, {"n1": 2}), "who sends more gets the node"
    assert set(committed.content["choices"]) >= {"bucket/0", "bucket/1"}
    assert {lane for lane, *_ in committed.content["bars"]["plan"]} >= {"compute", "channel 0"}
    assert 20 < running.step <= 150
    kept = tmp_path / "run" / "communication"
    training = RecordedTraining.from_json((kept / "training.json").read_text())
    assert (training.ranks, MeasuredLinks.from_json((kept / "links.json").read_text()).ranks) == (3, 3)
    assert {op.name for op in training.dag.comm} == set(committed.content["choices"])
    assert [report.step for report in launch.said("stopped") if report.content["saved"]] == [150]
    assert launch.run(2, **CASE) == [0, 0]
    assert states(launch)[:2] == ["profiled", "committed"], "a generation gets a plan of its own"
    got, want = launch.log(), plain.log()
    assert sorted(got.losses) == sorted(want.losses) == list(range(len(want.losses)))
    for step, losses in want.losses.items():
        np.testing.assert_allclose(got.losses[step], losses[0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(got.end["weights"], want.end["weights"], rtol=1e-3, atol=1e-4)
    assert got.end["lr"] == pytest.approx(want.end["lr"])
    assert got.end["gained"] == pytest.approx(want.end["gained"])


def test_what_cannot_be_planned_says_why_and_trains(launch: Launch) -> None:
    settings = RunSettings(communication="planned")
    assert launch.run(1, settings) == [0]
    (said,) = launch.said("communication")
    assert said.content == {"state": "ddp", "reason": "a single process communicates with no other"}
    assert math.isfinite(launch.log().end["gained"])


@pytest.mark.parametrize(
    ("world", "sharded", "reason"),
    [
        (World(size=1), False, "a single process communicates with no other"),
        (
            World(size=2),
            True,
            "the model's parameters are sharded: their collectives are not DDP's gradient buckets",
        ),
        (
            World(size=2, device=torch.device("cuda")),
            False,
            "gradients are on cuda devices; plans carry CPU tensors",
        ),
    ],
)
def test_what_stands_in_the_way_is_said(world: World, sharded: bool, reason: str) -> None:
    model, said = torch.nn.Linear(2, 2), list[dict[str, Any]]()
    if sharded:
        model.weight.device_mesh = object()  # as parameters of fully_shard have it
    assert plan_communication(world, model, PlanningSettings(), 1.0, said.append) is None
    assert [one["state"] for one in said] == ["ddp"]
    assert said[0]["reason"].startswith(reason)
    assert plan_communication(world, model, None, 1.0, said.append) is None
    assert len(said) == 1, "nobody has asked"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"channels": 0}, "channels from 1 to 8, max_rounds >= 1 and seed >= 0; got 0"),
        ({"search_seconds": float("inf")}, "search_seconds must be > 0 and finite, s; got inf"),
        ({"vote_timeout": -1.0}, "vote_timeout must be > 0"),
        ({"min_gain": 1.0}, "min_gain must be < 1 and max_slowdown >= 0; got 1.0"),
        ({"max_slowdown": float("nan")}, "got 0.01 and nan"),
    ],
)
def test_planning_settings_that_are_none_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        PlanningSettings(**given)


def test_a_preflight_is_not_planned(launch: Launch) -> None:
    assert launch.run(2, RunSettings(communication="planned", preflight_steps=3)) == [0, 0]
    assert not launch.said("communication")


def test_an_unknown_way_to_communicate_is_refused(launch: Launch) -> None:
    ranks = launch.start(1, RunSettings(communication="telepathy"))  # type: ignore[arg-type]
    assert launch.wait(ranks) == [1]
    assert "communication must be ddp, planned or PlanningSettings(...); got 'telepathy'" in ranks[0].said
