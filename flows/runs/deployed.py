"""What the present flow run is to Prefect, as an app of a cluster says it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.context import FlowRunContext
from prefect.exceptions import PrefectException
from prefect.runtime import deployment, flow_run

from ebbflow.infra.errors import InfraError


@contextmanager
def answering() -> Iterator[SyncPrefectClient]:
    """Open a client of the present settings. Raises ``InfraError`` when the API does not answer as it should."""
    try:
        with get_client(sync_client=True) as client:
            yield client
    except (httpx.HTTPError, PrefectException, RuntimeError, OSError) as error:
        raise InfraError(f"Prefect's API did not answer as it should: {error}") from error


def run_id() -> str:
    """Return the id of the present flow run; empty outside of one."""
    return str(flow_run.id or "")


def deployment_name() -> str:
    """Return the deployment of the present flow run as ``flow/name``; empty where it has none of its own.

    A flow that another calls runs in the other's deployment, which begins the other, and not it.
    """
    return f"{flow_run.flow_name}/{deployment.name}" if deployment_id() else ""


def deployment_id() -> str:
    """Return the id of the deployment of the present flow run; empty where it has none of its own."""
    present = FlowRunContext.get()
    run = present.flow_run if present is not None else None
    return "" if run is None or run.deployment_id is None else str(run.deployment_id)


def allowed(parameter: str, given: Sequence[str] | None) -> tuple[str, ...]:
    """Return what a flow's run may import: of what it was ``given``, what its deployment has as ``parameter``, too.

    Whoever may begin runs of a deployment chooses their parameters; what code its worker imports is for those to say
    who may change the deployment. A flow that was called from Python imports what it is given.

    Raises ``InfraError`` when Prefect's API does not answer.
    """
    if not given or not (id := deployment_id()):
        return tuple(given or ())
    with answering() as client:
        own = client.read_deployment(UUID(id)).parameters.get(parameter)
    return tuple(one for one in given if isinstance(own, list) and one in own)


def app_fields(**given: Any) -> dict[str, Any]:
    """Return what says which flow run an app belongs to, and ``given`` where it says something."""
    said = {name: value for name, value in given.items() if value not in (None, "")}
    return {"flow_run": run_id(), "deployment": deployment_name(), **said}
