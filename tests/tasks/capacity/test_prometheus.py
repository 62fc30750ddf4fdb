"""What a cluster tells Prometheus, and the dashboard that asks for it."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache, reduce
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import InfraError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.machine.metrics_server import serving
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Node, Notice
from ebbflow.planners.model.ledger import AppEntered, AppReport, AppSpec, CapacityChanged, Granted, Lease
from ebbflow.planners.model.options import address_of
from ebbflow.planners.query.plan.state import Estimate, ReplanDecision
from ebbflow.tasks.apps.loop_report import LOOP, LoopStatusRecord
from ebbflow.tasks.capacity.metrics import LoopMetrics, serving_metrics
from ebbflow.tasks.capacity.request import CapacityRequest
from ebbflow.tasks.pipeline.metrics import serving_pipeline
from ebbflow.tasks.pipeline.outcome import StepOutcome
from ebbflow.tasks.query.report import StageReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.report.query_metrics import QueryMetrics
from ebbflow.tasks.training.report import EventReport, PointReport
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.tracking.prometheus import RunMetrics, serving_run
from tests.free_ports import free_port
from tests.planners.query.replanning_cases import stage

GPUS = 'sum(ebbflow_gpus_leased{cluster="local"}) / sum(ebbflow_gpus{cluster="local"})'
NAMES = {"run": "fit", "query": "keys", "pipeline": "one"}  # variable of a dashboard -> its value
DASHBOARD = Path(__file__).parents[3] / "docs" / "dashboards" / "ebbflow.json"


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger.open(str(tmp_path / "ledger.db")) as made:
        yield made


def fill(ledger: Ledger) -> None:
    """Write a cluster of two nodes, one of them about to leave, and an app that holds a GPU."""
    now = ledger.clock.now()
    lead = ledger.lead("loop", 60.0)
    nodes = (
        Node("gpu-1", 8, 32.0, gpus=2, price=1.5, market="spot", zone="a"),
        Node("gpu-2", 8, 32.0, gpus=2, price=3.0, market="on-demand", zone="a"),
    )
    notice = Notice("gpu-1", now + 100)
    lead.write(
        [
            CapacityChanged(1, nodes, (), (notice,), 0.0, "two"),
            AppEntered(AppSpec("digits", "training", team='v"ision\n', gpus=2)),
            Granted((Lease(1, "digits", "gpu-1", 0, now, now + 300, 1, 0.75),)),
        ]
    )
    metrics = LoopMetrics(cycles=7)
    metrics.saw([now - 0.5], now)
    metrics.deciding.append(0.01)
    row = LoopStatusRecord(1, "loop", "rho-bounded", now, capacity_age=0.2, metrics=metrics.to_dict())
    ledger.report(LOOP, row.report(now))
    ledger.report("digits", AppReport(now, progress=0.25, job={"rho": 1.25}))


def scraped(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    return {
        sample.name: [*((one.labels, one.value) for one in family.samples if one.name == sample.name)]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_say_what_the_ledger_says_and_the_dashboard_asks_for_nothing_else(ledger: Ledger) -> None:
    fill(ledger)
    with serving_metrics("127.0.0.1:0", lambda: Ledger.open(str(ledger.address.path))) as server:
        assert server is not None
        answer = httpx.get(f"{server.url}metrics", timeout=30)
        healthy = httpx.get(f"{server.url}healthz", timeout=30)
        assert httpx.get(f"{server.url}other", timeout=30).status_code == 404
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert (healthy.status_code, healthy.text) == (200, "ok\n")
    found = scraped(answer.text)
    spot = {"cluster": "local", "market": "spot", "zone": "a"}
    app = {"cluster": "local", "app": "digits", "kind": "training", "team": 'v"ision\n'}
    assert (spot, 1.0) in found["ebbflow_gpus_leased"]
    assert (spot, 1.5) in found["ebbflow_dollars_per_hour"]
    assert found["ebbflow_nodes_with_notice"] == [({"cluster": "local", "kind": "interruption"}, 1.0)]
    assert found["ebbflow_app_rho"] == [(app, 1.25)]
    assert found["ebbflow_app_progress_ratio"] == [(app, 0.25)]
    assert found["ebbflow_loop_cycles_total"] == [({"cluster": "local"}, 7.0)]
    assert ({"cluster": "local", "quantile": "0.5"}, 0.5) in found["ebbflow_loop_latency_seconds"]
    asked = set(re.findall(r"ebbflow_[a-z_]+", DASHBOARD.read_text()))
    assert asked <= set(found)
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_a_cluster_without_a_loop_is_not_healthy(ledger: Ledger) -> None:
    with serving_metrics("127.0.0.1:0", lambda: Ledger.open(str(ledger.address.path))) as server:
        assert server is not None
        answer = httpx.get(f"{server.url}healthz", timeout=30)
        assert (answer.status_code, answer.text) == (503, "no capacity loop is the leader\n")
        assert scraped(httpx.get(f"{server.url}metrics", timeout=30).text)["ebbflow_loop_leads"][0][1] == 0.0
        with (
            pytest.raises(InfraError, match=f"port {server.port} cannot be used"),
            serving_metrics(f":{server.port}", lambda: ledger),
        ):
            pass


def test_a_ledger_that_does_not_respond_is_a_503(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.db")
    with serving_metrics("127.0.0.1:0", lambda: Ledger.open(missing, create=False)) as server:
        assert server is not None
        answer = httpx.get(f"{server.url}metrics", timeout=30)
        assert answer.status_code == 503
        assert "the ledger does not respond" in answer.text


def test_addresses() -> None:
    assert address_of("0.0.0.0:9464") == ("0.0.0.0", 9464)
    assert address_of(":9464") == address_of("9464") == ("127.0.0.1", 9464)
    for wrong in ("host", "host:", "host:70000", "host:x"):
        with pytest.raises(OptionError, match="metrics must be HOST:PORT"):
            CapacityRequest(metrics=wrong)


# --- a real Prometheus --------------------------------------------------------------------------------------------


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Return a function that runs a Prometheus which scrapes addresses, and returns its own address."""
    with ExitStack() as stack:

        def run(*targets: str) -> str:
            settings = tmp_path / "prometheus.yml"
            jobs = [{"job_name": "ebbflow", "static_configs": [{"targets": list(targets)}]}]
            settings.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
            port = free_port()
            with (tmp_path / "prometheus.log").open("wb") as log:
                process = subprocess.Popen(
                    [
                        "prometheus",
                        f"--config.file={settings}",
                        f"--storage.tsdb.path={tmp_path / 'tsdb'}",
                        f"--web.listen-address=127.0.0.1:{port}",
                    ],
                    stdout=log,
                    stderr=log,
                )
            stack.callback(process.wait, 60)
            stack.callback(process.kill)
            return f"http://127.0.0.1:{port}"

        yield run


@cache
def client() -> httpx.Client:
    return httpx.Client(timeout=30, trust_env=False)  # to make one takes longer than to ask


def answer(prometheus: str, query: str) -> list[Any]:
    """Return what Prometheus answers to a query; nothing while it does not answer."""
    try:
        said = client().get(f"{prometheus}/api/v1/query", params={"query": query})
    except httpx.TransportError:
        return []
    if said.status_code == 503:  # it starts
        return []
    assert said.status_code == 200, said.text
    found: list[Any] = said.json()["data"]["result"]
    return found


def await_answers(prometheus: str, queries: list[str]) -> None:
    """Wait until Prometheus has answered each query."""
    end = time.monotonic() + 150
    while queries := [one for one in queries if not answer(prometheus, one)]:
        assert time.monotonic() < end, queries
        time.sleep(0.5)


def expressions_of(dashboard: Path) -> list[str]:
    """Return what the panels of a dashboard ask for."""
    panels = json.loads(dashboard.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


@pytest.mark.processes
def test_a_real_prometheus_answers_every_expression_of_the_dashboards_of_runs(
    tmp_path: Path, ledger: Ledger, prometheus: Callable[..., str]
) -> None:
    (tmp_path / "fit.py").write_text("")
    metrics = RunMetrics(TrainingRequest(str(tmp_path / "fit.py"), run_id="fit"), SystemClock())
    metrics.point(PointReport(1.0, 7, gpus=2, nodes=1, loss=0.5, throughput=10.0, goodput=8.0, tokens=512.0))
    metrics.metrics(7, 0, {"accuracy": 0.5})
    metrics.event(EventReport(0.0, "generation", "generation 1"))
    query = QueryMetrics(QueryRequest("SELECT 1", tables="t", name="keys"), SystemClock())
    query.begins(Capacity(0, (Node("a", 4, 8.0),)))
    query.decided(ReplanDecision("start", 0, 0.0, "", "p", "", "", (Estimate("p", 9.0, 0, 0, 1),)))
    query.stage_ended(stage("scan"), StageReport("scan", "f", "completed", "p", rows=3, bytes=80, tasks=2))
    steps = [StepOutcome("fit", "training", "fit", "", "running", attempts=1, began=1.0, deadline=2.0**40)]
    asked = [
        reduce(lambda text, name: text.replace(f"${name}", NAMES[name]), NAMES, expression)
        for dashboard in ("training", "query", "pipeline")
        for expression in expressions_of(DASHBOARD.with_name(f"{dashboard}.json"))
    ]
    assert len(asked) > 40
    fill(ledger)
    with (
        serving_run(metrics, "127.0.0.1:0") as server,
        serving("127.0.0.1:0", query.look) as second,
        serving_pipeline("127.0.0.1:0", "one", lambda: tuple(steps), ledger, SystemClock()) as third,
    ):
        assert server is not None
        assert second is not None
        assert third is not None
        address = prometheus(*(f"127.0.0.1:{one.port}" for one in (server, second, third)))
        await_answers(address, asked)
        ((_, tokens),) = [one["value"] for one in answer(address, "ebbflow_run_tokens_per_second")]
        assert float(tokens) == 5120.0


@pytest.mark.processes
def test_a_real_prometheus_answers_every_expression_of_the_dashboard(
    ledger: Ledger, prometheus: Callable[..., str]
) -> None:
    fill(ledger)
    asked = [one.replace("$cluster", "local") for one in expressions_of(DASHBOARD)]
    assert len(asked) > 15
    with serving_metrics("127.0.0.1:0", lambda: Ledger.open(str(ledger.address.path))) as server:
        assert server is not None
        address = prometheus(f"127.0.0.1:{server.port}")
        await_answers(address, asked)
        ((_, gpus),) = [one["value"] for one in answer(address, asked[asked.index(GPUS)])]
        assert float(gpus) == 0.25, "one of four GPUs is leased"
        assert answer(address, "ebbflow_no_such_metric") == []
