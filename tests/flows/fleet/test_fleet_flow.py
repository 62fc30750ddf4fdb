"""Fleet tasks under a Prefect server: task runs, artifacts, events."""

import json
from typing import Any

import pytest

from ebbflow.infra.protocols import ApplyResult, Gang, ProviderCall
from ebbflow.planners.fleet.limits import Limits
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.fleet import Fleet, Offer, PoolState, Target
from ebbflow.planners.model.gangs import GangRequest, GangTarget
from ebbflow.tasks.fleet.request import FleetRules
from ebbflow.tasks.fleet.steps import wish
from tests.flows.flowcases import eventually

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]


class Control:
    """A ``FleetControl`` of one pool that does what it is told."""

    def __init__(self) -> None:
        self.planned = 1

    def observe(self) -> Fleet:
        node = Node("i-1", 2, 7.0, instance_type="m5.large", zone="a")
        return Fleet(4, 1000.0, (PoolState("etl", self.planned, self.planned, (node,), max_nodes=9),))

    def apply(self, target: Target, *, dry_run: bool = False) -> ApplyResult:
        if not dry_run:
            self.planned = target.nodes
        return ApplyResult(4, (ProviderCall("size", target.pool, target.nodes, "test:SetSize"),), (), dry_run)


class Gangs:
    """A ``GangControl`` that starts what it is told."""

    def __init__(self) -> None:
        self.nodes: tuple[str, ...] = ()

    def held(self, request: GangRequest) -> bool:
        return bool(self.nodes)

    def start(self, target: GangTarget, *, dry_run: bool = False) -> Gang:
        request = target.request
        if not dry_run:
            self.nodes = tuple(f"i-{at}" for at in range(2, 2 + request.size))
        ask = ProviderCall("gang", request.name, request.size, "test:Start")
        return Gang(request.name, request.pool, self.nodes, ask)

    def end(self, name: str, *, dry_run: bool = False) -> tuple[ProviderCall, ...]:
        ended, self.nodes = self.nodes, ()
        return (ProviderCall("end", ", ".join(ended)),)


class Market:
    """A ``PriceSource`` of one offer."""

    def offers(self, pool: str) -> tuple[Offer, ...]:
        return (Offer("m5.large", "a", "spot", 0.03, 2, 8.0),)

    def problems(self) -> list[str]:
        return ["the price list is old"]


def artifacts(flow_run_id: Any) -> dict[str, Any]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
    with get_client(sync_client=True) as client:
        found = sorted(client.read_artifacts(artifact_filter=wanted), key=lambda a: a.created)
    return {a.key: json.loads(a.data) for a in found}  # the newest of each key


def test_a_loop_of_one_step_is_recorded() -> None:
    from prefect import flow
    from prefect.runtime import flow_run

    from ebbflow.flows.fleet.tasks import apply_target, observe_fleet

    control = Control()

    @flow
    def step() -> Any:
        seen = observe_fleet("lab", "us-east-1", control, Market())
        rules = FleetRules(Limits(nodes=3))
        dry = apply_target("lab", control, seen, wish(seen, "etl", 2, "looked at"), rules, dry_run=True)
        assert control.planned == 1
        done = apply_target("lab", control, seen, wish(seen, "etl", 5, "a deadline"), rules)
        return dry.changed, done, flow_run.id

    dry_changed, done, run_id = step()
    assert not dry_changed
    assert done.changed
    assert (done.wanted.nodes, done.verdict.target.nodes, control.planned) == (5, 3, 3)
    found = eventually(lambda: len(a := artifacts(run_id)) == 2 and a)
    (pools,) = found["ebbflow-fleet-lab"]
    assert (pools["pool"], pools["observed"], pools["$/h"]) == ("etl", 1, 0.03)
    (decision,) = found["ebbflow-fleet-decisions-lab"]
    assert decision["pool"] == "etl"
    assert decision["target"] == "3 nodes"
    assert "3 nodes instead of 5" in decision["guard"]
    assert decision["asked"] == "etl: 3 nodes (test:SetSize)".replace(" (", "  (")


def test_a_gang_is_started_within_the_limits_and_recorded() -> None:
    from prefect import flow
    from prefect.runtime import flow_run

    from ebbflow.flows.fleet.tasks import end_gang, observe_fleet, start_gang

    gangs = Gangs()

    @flow
    def step() -> Any:
        seen = observe_fleet("lab", "us-east-1", Control(), Market())
        rules = FleetRules(Limits(nodes=3))
        large = start_gang("lab", gangs, seen, GangRequest("run-1", "etl", 3), rules)
        assert (large.nodes, gangs.nodes) == ((), ())
        assert "all pools may have 3" in large.applied.refused[0].why
        small = start_gang("lab", gangs, seen, GangRequest("run-1", "etl", 2), rules, why="a run")
        return small.nodes, flow_run.id, end_gang("lab", gangs, seen, "run-1")

    nodes, run_id, ended = step()
    assert nodes == ("i-2", "i-3")
    assert [str(ask) for ask in ended.asked] == ["end i-2, i-3"]
    found = eventually(lambda: len(a := artifacts(run_id)) == 2 and a)
    (decision,) = found["ebbflow-fleet-decisions-lab"]
    assert (decision["pool"], decision["asked"]) == ("run-1", "end i-2, i-3")
