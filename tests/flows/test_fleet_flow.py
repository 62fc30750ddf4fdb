"""Fleet tasks under a Prefect server: task runs, artifacts, events."""

import json
from typing import Any

import pytest
from flowcases import eventually

from ebbflow.infra.protocols import Applied, Ask
from ebbflow.planners.limits import Limits
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.fleet import Fleet, Offer, PoolState, Target
from ebbflow.tasks.fleet import wish
from ebbflow.tasks.fleet_request import FleetRules

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]


class Control:
    """A ``FleetControl`` of one pool that does what it is told."""

    def __init__(self) -> None:
        self.planned = 1

    def observe(self) -> Fleet:
        node = Node("i-1", 2, 7.0, instance_type="m5.large", zone="a")
        return Fleet(4, 1000.0, (PoolState("etl", self.planned, self.planned, (node,), most=9),))

    def apply(self, target: Target, *, dry_run: bool = False) -> Applied:
        if not dry_run:
            self.planned = target.nodes
        return Applied(4, (Ask("size", target.pool, target.nodes, "test:SetSize"),), (), dry_run)


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

    from ebbflow.tasks.fleet_tasks import apply_target, observe_fleet

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
