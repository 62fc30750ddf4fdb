"""What a capacity loop does with flow runs by Prefect's API: how one stands, that it crashed, that one begins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    FlowRunFilterTags,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelled, Crashed

from ebbflow.flows.runs.deployed import answering
from ebbflow.infra.errors import InfraError

_ENDED = (StateType.COMPLETED, StateType.FAILED, StateType.CRASHED, StateType.CANCELLED)
_DEPTH = 8  # of flows in flows


@dataclass(frozen=True, slots=True)
class RunView:
    """A flow run as the API knows it."""

    id: str
    name: str
    flow: str  # its name
    state: str  # COMPLETED, RUNNING, ...
    message: str = ""
    ended: float | None = None  # s since the Unix epoch
    since: float | None = None  # that it is in this state
    deployment: str = ""  # id
    parameters: Mapping[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    job_variables: Mapping[str, Any] = field(default_factory=dict)
    parent: str = ""  # the flow run in whose process it runs

    @property
    def over(self) -> bool:
        return self.state in {one.value for one in _ENDED}


class FlowRuns(Protocol):
    """Raises ``InfraError`` when the API does not answer."""

    def view(self, run: str) -> RunView | None:
        """Return a flow run; ``None``: there is none of this id."""
        ...

    def crashed(self, run: str, why: str) -> None:
        """Say that a run's process is gone. One that was being cancelled is cancelled then; an end stays as it is."""
        ...

    def waiting(self, tag: str) -> Sequence[str]:
        """Return the names of the runs with a tag that have not ended."""
        ...

    def begin(
        self,
        deployment: str,
        parameters: Mapping[str, Any],
        key: str,
        tags: Sequence[str],
        job_variables: Mapping[str, Any],
        name: str,
    ) -> RunView:
        """Create a run of a deployment, by its id or ``flow/name``, unless there is one with this key; return it.

        ``name``: the run's; empty: Prefect chooses one.
        """
        ...


class PrefectRuns:
    """The API of the present settings."""

    def view(self, run: str) -> RunView | None:
        try:
            id_ = UUID(run)
        except ValueError:
            return None
        with answering() as client:
            try:
                return _view(client, client.read_flow_run(id_))
            except ObjectNotFound:
                return None

    def crashed(self, run: str, why: str) -> None:
        with answering() as client:
            try:
                found = client.read_flow_run(UUID(run))
            except ObjectNotFound:
                return
            if found.state is None or found.state.is_final() or found.state.is_scheduled():
                return
            said = Cancelled if found.state.is_cancelling() else Crashed
            client.set_flow_run_state(found.id, said(message=why), force=True)

    def waiting(self, tag: str) -> Sequence[str]:
        wanted = FlowRunFilter(
            tags=FlowRunFilterTags(all_=[tag]),
            state=FlowRunFilterState(type=FlowRunFilterStateType(not_any_=list(_ENDED))),
        )
        with answering() as client:
            return [run.name for run in client.read_flow_runs(flow_run_filter=wanted, limit=20)]

    def begin(
        self,
        deployment: str,
        parameters: Mapping[str, Any],
        key: str,
        tags: Sequence[str],
        job_variables: Mapping[str, Any],
        name: str,
    ) -> RunView:
        with answering() as client:
            try:
                id_ = UUID(deployment)
            except ValueError:
                try:
                    id_ = client.read_deployment_by_name(deployment).id
                except ObjectNotFound as error:
                    raise InfraError(f"Prefect has no deployment {deployment!r}") from error
            made = client.create_flow_run_from_deployment(
                id_,
                name=name or None,
                parameters=dict(parameters),
                idempotency_key=key,
                tags=list(tags),
                job_variables=dict(job_variables) or None,
            )
            return _view(client, made)


def _view(client: SyncPrefectClient, run: FlowRun) -> RunView:
    state = run.state
    return RunView(
        str(run.id),
        run.name,
        client.read_flow(run.flow_id).name,
        state.type.value if state is not None else "",
        (state.message or "") if state is not None else "",
        run.end_time.timestamp() if run.end_time is not None else None,
        state.timestamp.timestamp() if state is not None else None,
        str(run.deployment_id or ""),
        dict(run.parameters),
        tuple(run.tags),
        dict(run.job_variables or {}),
        _parent(client, run),
    )


def _parent(client: SyncPrefectClient, run: FlowRun) -> str:
    if run.parent_task_run_id is None:
        return ""
    try:
        return str(client.read_task_run(run.parent_task_run_id).flow_run_id or "")
    except ObjectNotFound:
        return ""
