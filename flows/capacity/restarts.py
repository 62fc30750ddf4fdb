"""How long a capacity loop that Prefect begins again and again waits before it leads.

The trigger of the deployment begins the loop again ten seconds after its end, whatever that was; where runs fail one
after the other, for a file of limits that cannot be read, say, each waits longer than the one before.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from uuid import UUID

from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterDeploymentId,
    FlowRunFilterEndTime,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import StateType
from prefect.client.schemas.sorting import FlowRunSort

from ebbflow.flows.runs.deployed import answering

FIRST = 10.0  # s after two failures, doubled for each that follows
MOST = 300.0  # s
BRIEF = MOST + 120.0  # s: a run that led for longer than that has not failed at its start
_WITHIN = 3600.0  # s
_LIMIT = 50  # runs


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How an earlier run ended."""

    failed: bool  # by an error of its own; one that was killed says nothing of the next
    lasted: float  # s


def pause(ends: Sequence[RunEnd]) -> float:
    """Return the seconds to wait after runs that ended so, the last first: none before the second failure."""
    failures = 0
    for end in ends:
        if not end.failed or end.lasted > BRIEF:
            break
        failures += 1
    return min(FIRST * 2.0 ** (failures - 2), MOST) if failures > 1 else 0.0


def ends_of(deployment: str) -> list[RunEnd]:
    """Return how the deployment's runs of the last hour ended, the last first; not those that were killed.

    Raises ``InfraError`` when Prefect's API does not answer.
    """
    told = [StateType.FAILED, StateType.COMPLETED]
    wanted = FlowRunFilter(
        deployment_id=FlowRunFilterDeploymentId(any_=[UUID(deployment)]),
        state=FlowRunFilterState(type=FlowRunFilterStateType(any_=told)),
        end_time=FlowRunFilterEndTime(
            after_=datetime.fromtimestamp(time.time(), UTC) - timedelta(seconds=_WITHIN)
        ),
    )
    with answering() as client:
        runs = client.read_flow_runs(flow_run_filter=wanted, sort=FlowRunSort.END_TIME_DESC, limit=_LIMIT)
    return [RunEnd(run.state_type == StateType.FAILED, run.total_run_time.total_seconds()) for run in runs]
