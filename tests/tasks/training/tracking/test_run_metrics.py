"""What a training tells Prometheus while it runs."""

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ebbflow.planners.errors import OptionError
from ebbflow.tasks.training.report import EventReport, PointReport
from ebbflow.tasks.training.request import TrainingRequest
from ebbflow.tasks.training.tracking.prometheus import RunMetrics, serving_run
from tests.training_fakes import ScriptedClock


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "fit.py").write_text("")
    return str(tmp_path / "fit.py")


def test_metrics_are_what_was_told_last_and_health_is_that_steps_end(script: str) -> None:
    clock = ScriptedClock()
    metrics = RunMetrics(TrainingRequest(script, run_id="fit", metrics="127.0.0.1:0"), clock)
    with serving_run(metrics, "127.0.0.1:0") as server:
        assert server is not None

        def scraped() -> dict[str, list[tuple[dict[str, str], float]]]:
            text = httpx.get(f"{server.url}metrics", timeout=30).text
            return {
                sample.name: [(one.labels, one.value) for one in family.samples if one.name == sample.name]
                for family in text_string_to_metric_families(text)
                for sample in family.samples
            }

        assert "ebbflow_run_steps_total" not in scraped()
        metrics.event(EventReport(0.0, "node-lost", "node-2 was lost", "node-2"))
        metrics.metrics(5, 0, {"accuracy": 0.5})
        metrics.point(PointReport(1.0, 7, gpus=2, throughput=10.0, goodput=8.0, tokens=512.0, dollars=0.25))
        clock.time += 30
        found = scraped()
        own = {"run": "fit"}
        assert found["ebbflow_run_steps_total"] == [(own, 7.0)]
        assert found["ebbflow_run_step"] == [(own, 7.0)]
        assert found["ebbflow_run_gpus"] == [(own, 2.0)]
        assert found["ebbflow_run_dollars_total"] == [(own, 0.25)]
        assert found["ebbflow_run_goodput_tokens_per_second"] == [(own, 4096.0)]
        assert found["ebbflow_run_events_total"] == [(own | {"kind": "node-lost"}, 1.0)]
        assert found["ebbflow_run_metric"] == [(own | {"name": "accuracy"}, 0.5)]
        assert found["ebbflow_run_step_age_seconds"] == [(own, 30.0)]
        assert httpx.get(f"{server.url}healthz", timeout=30).status_code == 200
        clock.time += 600
        metrics.point(PointReport(2.0, 7, gpus=2))  # told again, and no step has ended
        sick = httpx.get(f"{server.url}healthz", timeout=30)
        assert (sick.status_code, sick.text) == (503, "no step has ended for 630 s\n")


def test_the_counter_of_steps_never_falls_though_steps_are_lost(script: str) -> None:
    metrics = RunMetrics(TrainingRequest(script, run_id="fit"), ScriptedClock())

    def told() -> dict[str, float]:
        return {one.name: one.samples[0].value for one in metrics.look()[0] if one.samples}

    counts = []
    # what was lost may be known a point later than that the step fell
    for step, lost in ((5000, 0), (4950, 0), (4951, 50), (5010, 50)):
        metrics.point(PointReport(1.0, step, lost_steps=lost))
        assert told()["ebbflow_run_step"] == step
        counts.append(told()["ebbflow_run_steps"])
    assert counts == [5000, 5000, 5001, 5060]


def test_nothing_is_served_unless_asked_for_and_an_address_is_checked(script: str) -> None:
    with serving_run(RunMetrics(TrainingRequest(script, run_id="fit"), ScriptedClock()), "") as server:
        assert server is None
    with pytest.raises(OptionError, match="metrics must be HOST:PORT, such as"):
        TrainingRequest(script, metrics="nowhere")
