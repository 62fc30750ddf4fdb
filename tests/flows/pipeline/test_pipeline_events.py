"""What a pipeline's flow run tells Prefect of its queries' plans."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.tasks.pipeline.run import NullWatcher
from ebbflow.tasks.report.cluster.values import DecisionRow


def decision(number: int, kind: Any, outcome: dict[str, Any]) -> DecisionRow:
    inputs = {"current": "qep-a"}
    return DecisionRow(number, 1.0, kind, "p.orders", 7, "left: n2", inputs=inputs, outcome=outcome)


def test_each_change_of_plan_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbflow.flows.pipeline import flow as pipeline

    emitted: list[dict[str, Any]] = []
    monkeypatch.setattr(pipeline, "get_run_logger", lambda: logging.getLogger(__name__))
    monkeypatch.setattr(pipeline, "emit_event", lambda **given: emitted.append(given))
    listener = pipeline._PrefectListener(SystemClock(), NullWatcher())
    decisions = [
        decision(1, "auction", {"granted": 1}),
        decision(2, "replan", {"kind": "stay", "chosen": "qep-a"}),
        decision(3, "replan", {"kind": "switch", "chosen": "qep-b"}),
    ]
    report = SimpleNamespace(decisions=tuple(decisions))
    listener.watch(SimpleNamespace(look=lambda: report), tuple)  # type: ignore[arg-type]
    for _ in range(3):
        listener.tick()
    (event,) = emitted
    assert event["event"] == "ebbflow.plan.replaced"
    assert event["resource"] == {"prefect.resource.id": "ebbflow.app.p.orders"}
    assert event["payload"] == {"revision": 7, "from": "qep-a", "to": "qep-b", "reason": "left: n2"}
    report.decisions = (*decisions, decision(9, "replan", {"kind": "switch", "chosen": "qep-c"}))
    listener.tick()
    assert [one["payload"]["to"] for one in emitted] == ["qep-b", "qep-c"]
