"""Pauses between the runs of a capacity loop that fails again and again."""

from uuid import UUID

import pytest

from ebbflow.flows.capacity.restarts import BRIEF, MOST, RunEnd, ends_of, pause

FAILED, WELL = RunEnd(True, 5.0), RunEnd(False, 5.0)


def test_each_failure_after_the_first_is_followed_by_a_longer_pause() -> None:
    assert [pause([FAILED] * n) for n in range(9)] == [0, 0, 10, 20, 40, 80, 160, MOST, MOST]


def test_a_run_that_led_or_ended_well_ends_the_row() -> None:
    assert pause([FAILED, FAILED, FAILED, WELL, FAILED]) == 20
    assert pause([WELL, FAILED, FAILED]) == 0
    assert pause([FAILED, FAILED, RunEnd(True, BRIEF + 1), FAILED, FAILED]) == 10
    # one that had the longest pause before it failed is still in the row
    assert pause([RunEnd(True, MOST + 5)] * 9) == MOST


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
def test_prefect_knows_how_the_deployments_last_runs_ended() -> None:
    from prefect import flow
    from prefect.client.orchestration import get_client
    from prefect.states import Completed, Crashed, Failed, Running, State

    @flow
    def leads() -> None: ...

    with get_client(sync_client=True) as client:
        flow_id = client.create_flow(leads)
        ours, other = (client.create_deployment(flow_id, name=name) for name in ("ours", "other"))

        def ended(deployment: UUID, end: State) -> None:
            run = client.create_flow_run_from_deployment(deployment)
            client.set_flow_run_state(run.id, Running(), force=True)
            client.set_flow_run_state(run.id, end, force=True)

        ended(ours, Completed())
        ended(ours, Failed())
        ended(other, Completed())
        ended(ours, Crashed())
        ended(ours, Failed())
        client.create_flow_run_from_deployment(ours)
    found = ends_of(str(ours))
    assert [end.failed for end in found] == [True, True, False]
    assert all(0 < end.lasted < BRIEF for end in found)
    assert pause(found) == 10
