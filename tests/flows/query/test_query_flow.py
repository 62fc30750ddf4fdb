"""``run_query`` under a Prefect server: runs, task runs, artifacts, events."""

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.protocols import StageJob, StageProgress, StageResult
from ebbflow.infra.query.duckdb import DuckDbEngine
from ebbflow.infra.query.local import LocalCapacity
from ebbflow.planners.errors import ForbiddenSqlError, OptionError, UnknownColumnError
from ebbflow.planners.model import Capacity, Node
from ebbflow.planners.query.plan.state import ReplanDecision
from tests.flows.flowcases import JOINED, TIMEOUT, eventually

pytestmark = [pytest.mark.prefect, pytest.mark.usefixtures("prefect_server")]


def options(tables: str, tmp_path: Path, **more: Any) -> dict[str, Any]:
    store = str(tmp_path / "store")
    return {"tables": tables, "engine": "duckdb", "materialize": "every-join", "store": store, **more}


def newest_run() -> Any:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        return client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)[0]


def task_runs(flow_run_id: Any) -> dict[str, str]:
    """Return state by name of a flow run's task runs, once they are recorded."""
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

    wanted = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))

    def look() -> dict[str, str] | None:
        with get_client(sync_client=True) as client:
            runs = client.read_task_runs(flow_run_filter=wanted)
        states = {run.name: run.state.name for run in runs if run.state}
        return states if states and not {"Pending", "Running"} & set(states.values()) else None

    return eventually(look)


def artifacts(flow_run_id: Any) -> dict[str, Any]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId

    wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run_id]))
    with get_client(sync_client=True) as client:
        return {a.key: a for a in client.read_artifacts(artifact_filter=wanted)}


def events(flow_run_id: Any, prefix: str) -> list[Any]:
    """Return a flow run's events with a prefix, as the server has recorded them."""
    from prefect.client.orchestration import get_client

    resource = {"id": [f"prefect.flow-run.{flow_run_id}"]}
    body = {"filter": {"event": {"prefix": [prefix]}, "related": resource, "order": "ASC"}, "limit": 50}

    def look() -> list[Any]:
        with get_client(sync_client=True) as client:
            answer = client._client.post("/events/filter", json=body)
        answer.raise_for_status()
        return answer.json()["events"]

    return eventually(look)


def test_a_query_runs_as_a_flow_whose_stages_decisions_and_picture_are_on_record(
    tables: str, tmp_path: Path
) -> None:
    from ebbflow.flows.query.flow import run_query
    from ebbflow.tasks.query.report import QueryReport

    json_path, out = tmp_path / "report.json", tmp_path / "rows.parquet"
    report = run_query(
        JOINED,
        **options(tables, tmp_path, name="orders by nation", verify=True),
        report=[str(json_path)],
        output=str(out),
    )
    assert isinstance(report, QueryReport)
    assert (report.rows, report.verified, report.result_path) == (6, True, str(out))
    assert QueryReport.from_json(json_path.read_text()) == report

    run = newest_run()
    assert (run.name, run.state.name) == ("query orders by nation", "Completed")
    stages = {s.name for s in report.stages}
    assert len(stages) > 1
    assert task_runs(run.id) == {**dict.fromkeys(stages, "Completed"), "resource-feedback": "Completed"}

    found = artifacts(run.id)
    assert found.keys() == {"ebbflow-decisions", "ebbflow-stages", "ebbflow-timeline"}
    decisions = json.loads(found["ebbflow-decisions"].data)
    assert [d["decision"] for d in decisions] == [d.kind for d in report.decisions]
    assert decisions[0]["to"] in decisions[0]["reason"]
    listed = json.loads(found["ebbflow-stages"].data)
    assert {(row["stage"], row["rows"]) for row in listed} == {(s.name, s.rows) for s in report.stages}
    assert "data:image/svg+xml;base64," in found["ebbflow-timeline"].data


def test_a_second_run_takes_the_first_ones_result(tables: str, tmp_path: Path) -> None:
    from ebbflow.flows.query.flow import run_query

    first = run_query(JOINED, **options(tables, tmp_path))
    second = run_query(JOINED, **options(tables, tmp_path))
    assert {s.status for s in first.stages} == {"completed"}
    assert {s.status for s in second.stages} == {"reused"}
    assert second.result_path == first.result_path


def test_it_runs_inside_a_users_flow(tables: str, tmp_path: Path) -> None:
    from prefect import flow

    from ebbflow.flows.query.flow import run_query

    @flow(name="nightly")
    def nightly() -> int:
        report = run_query(JOINED, **options(tables, tmp_path, name="inner"))
        return int(report.rows)

    assert nightly() == 6
    runs = {run.name: run for run in _recent(2)}
    inner = runs["query inner"]
    assert inner.parent_task_run_id is not None
    assert "resource-feedback" in task_runs(inner.id)


def _recent(count: int) -> list[Any]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    with get_client(sync_client=True) as client:
        return client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=count)


def test_a_query_that_cannot_be_planned_fails_its_run_with_our_message(tables: str, tmp_path: Path) -> None:
    from ebbflow.flows.query.flow import run_query

    with pytest.raises(UnknownColumnError, match="did you mean 'name'"):
        run_query("SELECT nam FROM nation", **options(tables, tmp_path))
    run = newest_run()
    assert run.state.is_failed()
    assert "unknown column 'nam'; did you mean 'name'?" in run.state.message


def test_a_run_calls_functions_that_its_deployment_allows_and_no_others(
    tables: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prefect.client.orchestration import get_client

    from ebbflow.flows.query.flow import run_query
    from ebbflow.flows.runs import deployed

    file = tmp_path / "x.csv"
    file.write_text("a\n7\n")
    sql = f"SELECT x.a FROM read_csv('{file}') AS x"
    given = options(tables, tmp_path, dialect="duckdb")
    with pytest.raises(ForbiddenSqlError, match="--allow-functions read_csv"):
        run_query(sql, **given)
    assert (
        run_query(sql, **given, allow_functions=["read_csv"]).rows == 1
    )  # called from Python, by its author
    with get_client(sync_client=True) as client:
        flow = client.create_flow(run_query)
        closed = client.create_deployment(flow_id=flow, name="closed", parameters={})
        opened = client.create_deployment(
            flow_id=flow, name="open", parameters={"allow_functions": ["read_csv", "glob"]}
        )
    monkeypatch.setattr(deployed, "deployment_id", lambda: str(closed))
    with pytest.raises(ForbiddenSqlError, match="--allow-functions read_csv"):
        run_query(sql, **given, allow_functions=["read_csv"])
    monkeypatch.setattr(deployed, "deployment_id", lambda: str(opened))
    assert run_query(sql, **given, allow_functions=["read_csv"]).rows == 1
    with pytest.raises(ForbiddenSqlError, match="--allow-functions read_text"):
        run_query(f"SELECT * FROM read_text('{file}')", **given, allow_functions=["read_text"])


def test_a_run_without_a_title_is_named_all_the_same(tables: str, tmp_path: Path) -> None:
    from ebbflow.flows.query.flow import run_query

    run_query("SELECT count(*) AS n FROM nation", **options(tables, tmp_path))
    assert newest_run().name == "query SELECT count(*) AS n FROM nation"


def test_a_bad_option_fails_before_anything_starts(tables: str, tmp_path: Path) -> None:
    from ebbflow.flows.query.flow import run_query

    with pytest.raises(OptionError, match="planner must be one of"):
        run_query(JOINED, **options(tables, tmp_path, planner="best"))
    assert newest_run().state.is_failed()


class Shrinking(LocalCapacity):
    """Three nodes, until ``lost`` is set: then two."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = threading.Event()

    def capacity(self) -> Capacity:
        nodes = tuple(Node(f"n{i}", 1, 4.0) for i in range(3))
        return Capacity(2, nodes[:2]) if self.lost.is_set() else Capacity(1, nodes)


class LosingEngine:
    """DuckDB whose first stage loses a node and waits until the driver has heard of it."""

    name = "duckdb"

    def __init__(self, source: Shrinking) -> None:
        self._inner = DuckDbEngine.start(2, 2.0)
        self._source = source
        self._told = threading.Event()

    def run(self, job: StageJob, on_progress: Callable[[StageProgress], None] | None = None) -> StageResult:
        self._source.lost.set()
        assert self._told.wait(TIMEOUT), "the driver never heard of the loss"
        return self._inner.run(job, on_progress)

    def resize(self, cores: float, memory: float) -> None:
        if cores == 2.0:
            self._told.set()

    def cancel(self, job_id: str) -> None:
        self._inner.cancel(job_id)

    def confine(self, *places: Any) -> None:
        self._inner.confine(*places)

    def tables(self) -> tuple[()]:
        return ()

    def close(self) -> None:
        self._inner.close()


def test_a_lost_node_is_an_event_and_a_decision(
    tables: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ebbflow.flows.query.flow import run_query
    from ebbflow.tasks.query import run as query

    @contextmanager
    def opened(*_: Any) -> Iterator[Any]:
        source = Shrinking()
        engine = LosingEngine(source)
        try:
            yield query.OpenedEngine(engine, source)  # type: ignore[arg-type]
        finally:
            engine.close()

    monkeypatch.setattr(query, "opened_engine", opened)
    report = run_query(JOINED, **options(tables, tmp_path))
    assert report.rows == 6
    assert [(c.cores, c.left) for c in report.capacity] == [(3.0, ()), (2.0, ("n2",))]
    assert report.decisions[-1].revision == 2 or any(d.revision == 2 for d in report.decisions)

    run = newest_run()
    (event,) = events(run.id, "ebbflow.capacity.")
    assert event["event"] == "ebbflow.capacity.changed"
    assert event["payload"]["nodes"] == ["n0", "n1"]
    assert (event["payload"]["cores"], event["payload"]["revision"]) == (2, 2)
    assert event["payload"]["change"] == "left: n2"


def test_a_switch_of_plans_is_an_event() -> None:
    from prefect import flow

    from ebbflow.flows.query.orchestration import PrefectListener

    @flow
    def switching() -> None:
        listener = PrefectListener()
        for kind, chosen in (("stay", "qep-a"), ("switch", "qep-b")):
            reason = f"{kind}: {chosen} is sooner"
            listener.decided(ReplanDecision(kind, 7, 0.0, "qep-a", chosen, reason, "left: n2"))  # type: ignore[arg-type]

    switching()
    (event,) = events(newest_run().id, "ebbflow.plan.")
    assert event["event"] == "ebbflow.plan.replaced"
    assert event["payload"] == {"revision": 7, "from": "qep-a", "to": "qep-b", "reason": "qep-b is sooner"}


def test_the_client_reads_flow_runs_without_any_argument() -> None:
    """Later versions of fastapi answer 422: they no longer take a JSON null for an absent value."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        assert isinstance(client.read_flow_runs(), list)


def test_a_deployment_has_a_form_that_a_user_interface_can_show() -> None:
    from ebbflow.flows.query.flow import run_query

    deployment = run_query.to_deployment(name=f"form-{uuid.uuid4().hex[:6]}", parameters={"engine": "duckdb"})
    schema = deployment._parameter_openapi_schema.model_dump_for_openapi()
    assert schema["required"] == ["sql"]
    form = schema["properties"]
    assert form["planner"]["default"] == "qoop"
    assert form["hysteresis"]["type"] == "number"
    undescribed = {name for name, field in form.items() if not field.get("description")}
    assert not undescribed


def test_importing_the_flow_gives_no_warning(tmp_path: Path) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", "import ebbflow.flows.query.flow"],
        capture_output=True, text=True, timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
