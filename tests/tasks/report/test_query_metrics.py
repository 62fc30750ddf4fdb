"""What a query and a pipeline tell Prometheus, by real runs, and that the dashboards ask for nothing else."""

import json
import re
import threading
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from ebbflow.infra.errors import InfraError
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Node
from ebbflow.tasks.pipeline.outcome import StepOutcome
from ebbflow.tasks.pipeline.run import NullWatcher, PipelineRequest, run_steps
from ebbflow.tasks.query.listening import NullQueryListener
from ebbflow.tasks.query.report import StageReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator
from ebbflow.tasks.report.delivery import execute
from ebbflow.tasks.report.query_metrics import QueryMetrics
from tests.free_ports import free_port
from tests.training_fakes import ScriptedClock

DASHBOARDS = Path(__file__).parents[3] / "docs" / "dashboards"
SQL = "SELECT a.k, count(*) AS n FROM t AS a JOIN t AS b ON a.k = b.k GROUP BY a.k"


@pytest.fixture
def tables(tmp_path: Path) -> Path:
    folder = tmp_path / "tables"
    folder.mkdir()
    pq.write_table(pa.table({"k": [n % 3 for n in range(30)]}), folder / "t.parquet")
    return folder


def scraped(url: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    text = httpx.get(f"{url}/metrics", timeout=30).text
    return {
        sample.name: [(one.labels, one.value) for one in family.samples if one.name == sample.name]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def asked(dashboard: str) -> set[str]:
    return set(re.findall(r"ebbflow_[a-z_]+", (DASHBOARDS / dashboard).read_text()))


class Scraping(NullQueryListener):
    """Scrapes a query when its last stage has ended."""

    def __init__(self) -> None:
        self.port = 0
        self.found: dict[str, list[tuple[dict[str, str], float]]] = {}
        self.health = ""

    def stage_ended(self, stage: object, report: StageReport) -> None:
        self.found = scraped(f"http://127.0.0.1:{self.port}")
        self.health = httpx.get(f"http://127.0.0.1:{self.port}/healthz", timeout=30).text


def test_a_query_tells_its_stages_capacity_and_decisions_while_it_runs(tables: Path, tmp_path: Path) -> None:
    listener = Scraping()
    listener.port = free_port()
    request = QueryRequest.of(
        SQL, tables=str(tables), engine="duckdb", store=str(tmp_path / "store"), name="keys",
        metrics=f"127.0.0.1:{listener.port}", materialize="every-join",
    )  # fmt: skip
    orchestrator = PlainOrchestrator(listener)
    outcome = execute(request, orchestrator)
    assert orchestrator.listener is listener, "nothing is left behind"
    own = {"query": "keys"}
    found = listener.found
    ended = sum(value for _, value in found["ebbflow_query_stages_total"])
    assert ended == len(outcome.report.stages) - 1, "all but the one that was just told of"
    assert found["ebbflow_query_cores"] == [(own, outcome.report.capacity[0].cores)]
    assert (own | {"kind": "start"}, 1.0) in found["ebbflow_query_decisions_total"]
    assert found["ebbflow_query_planning_seconds_total"][0][1] > 0
    assert asked("query.json") <= set(found) | {"ebbflow_query_seconds"}
    assert listener.health == "ok\n"
    with pytest.raises(httpx.ConnectError):
        scraped(f"http://127.0.0.1:{listener.port}")


def test_a_query_without_cores_is_not_healthy() -> None:
    clock = ScriptedClock()
    metrics = QueryMetrics(QueryRequest("SELECT 1", tables="t", engine="duckdb"), clock)
    metrics.begins(Capacity(0, (Node("a", 4, 8.0),), at=0.0))
    clock.time += 1000
    assert metrics.look()[1] == ""
    metrics.capacity_changed(Capacity(1, (), at=clock.time), "left: a")
    clock.time += 200
    assert metrics.look()[1] == ""
    clock.time += 200
    assert metrics.look()[1] == "the query has had no cores for 400 s"


def test_an_address_that_is_none_or_taken_is_refused_before_anything_runs(tables: Path) -> None:
    with pytest.raises(OptionError, match="metrics must be HOST:PORT"):
        QueryRequest(SQL, tables=str(tables), metrics="here")
    with pytest.raises(OptionError, match="metrics must be HOST:PORT"):
        PipelineRequest("shop.yaml", metrics="here")
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        request = QueryRequest(SQL, tables=str(tables), engine="duckdb", metrics=f":{port}")
        with pytest.raises(InfraError, match=f"port {port} cannot be used"):
            execute(request)


class Watching(NullWatcher):
    """Scrapes a pipeline when its first step has ended."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"
        self.found: dict[str, list[tuple[dict[str, str], float]]] = {}
        self.told = threading.Event()

    def ended(self, outcome: StepOutcome) -> None:
        if not self.told.is_set():
            self.found = scraped(self._url)
            self.told.set()


def test_a_pipeline_tells_its_steps_and_its_cluster(tables: Path, tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    step = {"sql": SQL, "tables": "tables", "deadline": "1h"}
    second = {"sql": "SELECT sum(n) AS n FROM first", "tables": ["${queries.first.path}"]}
    pools = {"gpu": {"kind": "gpu", "nodes": 1}}
    file.write_text(
        yaml.safe_dump({
            "name": "shop", "cluster": {"local": {"pools": pools}}, "queries": {"first": step, "second": second},
        })
    )  # fmt: skip
    port = free_port()
    watching = Watching(port)
    request = PipelineRequest(
        str(file), run_id="one", runs_dir=str(tmp_path / "runs"), metrics=f"127.0.0.1:{port}"
    )
    assert run_steps(request, watching).state == "finished"
    own = {"pipeline": "one", "kind": "query"}
    found = watching.found
    assert (own | {"state": "finished"}, 1.0) in found["ebbflow_pipeline_steps"]
    assert (own | {"step": "first", "team": ""}, 1.0) in found["ebbflow_pipeline_step_attempts_total"]
    assert found["ebbflow_gpus"], "those of its cluster"
    told = set(found) | {"ebbflow_pipeline_step_deadline_seconds"}  # of a step that has not ended
    assert {name for name in asked("pipeline.json") if name.startswith("ebbflow_pipeline")} <= told
    for dashboard in ("query.json", "pipeline.json"):
        panels = json.loads((DASHBOARDS / dashboard).read_text())["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
