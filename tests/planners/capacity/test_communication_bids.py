"""What a live training's communication does to its bids, and to who gets which GPUs."""

import json
from dataclasses import replace

import numpy as np
import pytest
from ledger_worlds import START, World, app, node

from ebbflow.planners.capacity.estimates import AppEstimate, LiveBidder, belief
from ebbflow.planners.capacity.values import Settings
from ebbflow.planners.communication.costs import LinkModel
from ebbflow.planners.communication.dag import CommOp, ComputeOp, Dependency, TrainingDag
from ebbflow.planners.communication.placement import CommunicationProfile
from ebbflow.planners.communication.recorded import RecordedTraining
from ebbflow.planners.model.ledger import AppReport, Decided
from ebbflow.planners.scheduling.live import live_policy
from ebbflow.planners.scheduling.locality import Level, Slowdown
from ebbflow.planners.scheduling.placement_cost import ClusterLinks
from ebbflow.planners.training.speed.batch_size import BatchLimits, BatchSplit
from ebbflow.planners.training.speed.goodput import GradientStatistics
from ebbflow.planners.training.speed.job_report import JobReport
from ebbflow.planners.training.speed.throughput import ThroughputParameters

LINKS = ClusterLinks(intra_node=10e9, intra_rack=1e9, cross_rack=0.5e9)
SPEED = ThroughputParameters(0.02, 0.001, 0.011, 1e-8, 0.01, 1e-8, 1.5)
JOB = JobReport(
    BatchLimits(128, 128, 32, 128), GradientStatistics(1.0, 4.0), SPEED, 1, 2, BatchSplit(64, 0), 4, 1
)


def profile(size: float, nodes: int = 1, links: LinkModel | None = None) -> CommunicationProfile:
    """Return what a training says that computes 0.1 s and then exchanges so many bytes of gradients."""
    dag = TrainingDag(
        (ComputeOp("backward", 0.09), ComputeOp("update", 0.01)),
        (CommOp("bucket/0", "all-reduce", size, 2),),
        (Dependency("backward", "bucket/0"), Dependency("bucket/0", "update")),
    )
    return CommunicationProfile(RecordedTraining(dag, 2, 0.1, 10), nodes, links)


def said(size: float, job: JobReport | None = None, **more: object) -> dict[str, object]:
    """Return ``AppReport.job`` of such a training, as JSON carries it."""
    found = {**(job.to_dict() if job else {}), "communication": profile(size, **more).to_dict()}  # type: ignore[arg-type]
    carried: dict[str, object] = json.loads(json.dumps(found))
    return carried


def estimate(job: dict[str, object], links: ClusterLinks = LINKS) -> AppEstimate:
    return belief(AppReport(START, work_left=1000.0, work_total=2000.0, job=job), 2, 4, 0.0, False, links)


def seconds(believed: AppEstimate, gpus: int, level: Level) -> float:
    return float(LiveBidder(believed=believed).remaining(np.array([gpus]), level)[0])


def ratios(believed: AppEstimate, gpus: int) -> list[float]:
    """Return by what the rest of the work takes longer on several nodes, and across racks."""
    near = seconds(believed, gpus, Level.MACHINE)
    return [seconds(believed, gpus, level) / near for level in (Level.RACK, Level.CLUSTER)]


def test_bids_of_an_app_that_reports_its_communication_follow_the_links() -> None:
    # a ring of two sends its gradients once: 0.1 s at 1 GB/s, 0.2 s at half of it, 0.01 s on a node
    found = estimate(said(0.1e9))
    assert found.spread_by == "communication profile"
    assert ratios(found, 2) == pytest.approx([0.2 / 0.11, 0.3 / 0.11], rel=1e-3)
    assert ratios(found, 4) == pytest.approx([0.25 / 0.115, 0.4 / 0.115], rel=1e-3)
    assert ratios(estimate(said(1e3)), 2) == pytest.approx([1, 1], rel=1e-3)
    assert seconds(found, 1, Level.SLOT) == pytest.approx(1000.0)


@pytest.mark.parametrize(
    ("job", "links"),
    [
        ({}, LINKS),
        ({"communication": {"training": "none", "nodes": 1, "links": None}}, LINKS),
        ({"communication": 7}, LINKS),
        (said(0.1e9), ClusterLinks()),
    ],
)
def test_without_a_profile_or_links_the_fixed_factor_holds(
    job: dict[str, object], links: ClusterLinks
) -> None:
    found = estimate(job, links)
    assert (found.cost, found.spread_by) == (None, "fixed factor")
    assert ratios(found, 2) == pytest.approx(Slowdown().levels[2:])


def test_what_the_app_measured_holds_where_it_was_measured() -> None:
    own = LinkModel(alpha=1e-3, per_byte=1 / 0.2e9, launch=0.0)
    on_a_node = estimate(said(0.1e9, links=own))
    # nothing is faster than what its own processes can send on one node
    assert ratios(on_a_node, 2) == pytest.approx([1, 1])
    spread = estimate(said(0.1e9, nodes=2, links=own), ClusterLinks())
    assert ratios(spread, 2) == pytest.approx([6.02, 6.02], rel=1e-3), (
        "the cluster knows no links, the app does"
    )


def test_a_model_of_goodput_takes_the_prediction_until_it_was_measured_on_several_nodes() -> None:
    predicted = estimate(said(0.05e9, JOB))
    assert predicted.spread_by == "communication profile"
    assert ratios(predicted, 2) == pytest.approx([0.15 / 0.105, 0.2 / 0.105], rel=0.01)
    assert predicted.goodput is not None
    one, several = predicted.goodput.best(np.array([1, 2]), np.array([2, 2]))
    assert one / several == pytest.approx(0.15 / 0.105, rel=0.01), "policies by goodput see it as well"
    # four GPUs have half the examples each, and so less to hide the exchange behind
    assert ratios(predicted, 4)[0] > 1.5
    plain = estimate(JOB.to_dict())
    assert plain.spread_by == "goodput model"
    for nodes in (0, 2):
        measured = estimate(said(0.05e9, replace(JOB, measured_nodes=nodes)))
        assert (measured.cost, measured.spread_by) == (None, "goodput model")
        assert ratios(measured, 2) == pytest.approx(ratios(plain, 2))


def granted(policy: str, jobs: dict[str, dict[str, object]]) -> tuple[dict[str, dict[str, int]], World]:
    """Return what each of two apps gets that want two GPUs, where one node has two and two have one each."""
    settings = Settings(
        policy=live_policy(policy, {"knob": 0.0} if policy == "themis" else {}), scaling=None, links=LINKS
    )
    world = World(settings, [node("n1", 2), node("n2", 1), node("n3", 1)])
    for id_, job in jobs.items():
        world.enter(app(id_, 2, 1 if policy == "rho-bounded" else 2, 2), fields={"job": job})
    world.steps(2)
    return {id_: world.placement(id_) for id_ in jobs}, world


TOGETHER, APART = {"n1": 2}, {"n2": 1, "n3": 1}


@pytest.mark.parametrize("policy", ["themis", "rho-bounded", "pollux"])
def test_who_communicates_much_gets_the_node_and_who_does_not_is_spread(policy: str) -> None:
    job = None if policy == "themis" else JOB
    heavy, light = said(0.05e9, job), said(1e3, job)
    first, world = granted(policy, {"a": heavy, "b": light})
    second, _ = granted(policy, {"a": light, "b": heavy})
    assert first == {"a": TOGETHER, "b": APART}
    assert second == {"a": APART, "b": TOGETHER}
    silent = job.to_dict() if job else {}
    unknown, _ = granted(policy, {"a": dict(silent), "b": dict(silent)})
    assert sorted(unknown.values(), key=len) == [TOGETHER, APART], "without, one of them as well as the other"
    auction = next(
        e.change for e in world.events if isinstance(e.change, Decided) and e.change.kind == "auction"
    )
    assert auction.inputs["apps"]["a"]["spread_by"] == "communication profile"
    assert auction.inputs["apps"]["a"]["slowdown"] == pytest.approx(
        {"rack": 1.429, "cluster": 1.905}, rel=1e-3
    )
    assert "iterations 1.43 times as long on nodes of a rack, 1.90 across racks" in auction.reason


def test_the_links_of_the_nodes_stand_in_for_what_is_not_configured() -> None:
    links = ClusterLinks()
    assert links.with_rack(25e6) == ClusterLinks(intra_rack=25e6)
    assert LINKS.with_rack(25e6) is LINKS
    assert links.with_rack(0.0) is links
