"""What a cluster tells Prometheus, and the dashboard that asks for it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ebbflow.infra.errors import InfraError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node, Notice
from ebbflow.planners.model.ledger import AppEntered, AppReport, AppSpec, CapacityChanged, Granted, Lease
from ebbflow.tasks.apps.loop_report import LOOP, LoopStatusRecord
from ebbflow.tasks.capacity.metrics import LoopMetrics, serving_metrics
from ebbflow.tasks.capacity.request import CapacityRequest, address_of

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
