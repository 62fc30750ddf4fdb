"""The flow run of an app, cancelled through Prefect's API: it then ends as *Cancelled*, not as *Crashed*."""

from uuid import UUID

from prefect.settings import (
    PREFECT_API_REQUEST_TIMEOUT,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)
from prefect.states import Cancelling

from ebbflow.flows.capacity.flow_runs import PrefectRuns, RunView
from ebbflow.flows.runs.deployed import answering
from ebbflow.infra.errors import InfraError

RUNNER = 40.0  # s in which a runner notices (10), and a run saves and ends (25)
_REQUEST = 5.0  # s for an answer of the API
_DEPTH = 8  # of flows in flows


def cancelled_by_prefect(run: str, now: float) -> str:
    """Set a flow run to *Cancelling*, which its runner then ends in order.

    Args:
        run: ID of the flow run. Where other flows called it, the outermost is set, whose process it is in.
        now: seconds since the Unix epoch.

    Returns:
        The ID of the flow run that is set. Empty where nobody would act on the state: no API is configured, it has no
        such run, the run has no deployment and so no runner, or was set 40 s ago and its runner has not acted.

    Raises:
        InfraError: the API does not answer within 5 s a request.
    """
    if not PREFECT_API_URL.value():  # the client would start a server
        return ""
    with temporary_settings({PREFECT_API_REQUEST_TIMEOUT: _REQUEST, PREFECT_CLIENT_MAX_RETRIES: 0}):
        found = _outermost(run)
        if found is None or not found.deployment:
            return ""
        if found.state == "CANCELLING":
            return found.id if found.since is not None and now - found.since < RUNNER else ""
        if found.state != "RUNNING":
            return ""
        with answering() as client:
            answer = client.set_flow_run_state(
                UUID(found.id), Cancelling(message="cancelled by the operator")
            )
        if answer.state is None or not answer.state.is_cancelling():
            raise InfraError(f"Prefect's API did not set flow run {found.id} to Cancelling: {answer.status}")
        return found.id


def _outermost(run: str) -> RunView | None:
    runs = PrefectRuns()
    found = runs.view(run)
    for _ in range(_DEPTH):
        above = runs.view(found.parent) if found is not None and found.parent else None
        if above is None:
            break
        found = above
    return found
