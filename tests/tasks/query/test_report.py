"""Reports as values and as JSON."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.errors import ReportError
from ebbflow.infra.storage.files import write_text
from ebbflow.planners.model import Capacity, Node, Notice, Resources, Work
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage, Text
from ebbflow.planners.query.plan.state import Estimate, ReplanDecision
from ebbflow.tasks.query.report import CapacityReport, DecisionReport, PlanReport, QueryReport, StageReport
from tests.tasks.sample import STARTED, bare_report, hostile_report, sample_report, single_stage_report

EVERY = [sample_report, hostile_report, bare_report, single_stage_report]


@pytest.mark.parametrize("make", EVERY)
def test_a_report_survives_the_way_through_json(make):
    report = make()
    assert QueryReport.from_json(report.to_json()) == report


def test_the_json_has_the_documented_keys():
    data = json.loads(sample_report().to_json())
    wanted = {
        "rows",
        "seconds",
        "planner",
        "name",
        "engine",
        "stages",
        "switches",
        "decisions",
        "capacity",
        "result_path",
    }
    assert wanted <= data.keys()
    assert [(s["from"], s["to"]) for s in data["switches"]] == [("p1", "p2"), ("p2", "p1")]
    assert {"at", "revision", "reason", "estimates"} <= data["switches"][0].keys()
    assert {"kind", "trigger", "current", "chosen", "planner_seconds"} <= data["decisions"][0].keys()
    assert {"name", "fingerprint", "rows", "bytes", "seconds", "status"} <= data["stages"][0].keys()
    assert {"at", "revision", "cores", "memory", "nodes", "change"} <= data["capacity"][0].keys()


def test_infinite_estimates_are_null_in_json_and_infinite_again_after_reading():
    report = sample_report()
    text = report.to_json()
    assert "Infinity" not in text
    assert "NaN" not in text
    estimate = QueryReport.from_json(text).decisions[1].estimates[2]
    assert estimate == Estimate("p3", math.inf, 1, 0, 1)


@given(
    st.lists(
        st.builds(
            StageReport,
            name=st.text(),
            fingerprint=st.text(),
            status=st.sampled_from(["completed", "reused", "cancelled", "failed"]),
            plan=st.text(),
            started=st.floats(0, 1e6),
            rows=st.integers(0, 2**70),
            estimated_rows=st.none() | st.floats(0, 1e12),
            note=st.text(),
        ),
        max_size=4,
    )
)
def test_any_stage_survives_the_way_through_json(stages):
    report = replace(bare_report(), stages=tuple(stages))
    assert QueryReport.from_json(report.to_json()) == report


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 99}',
        '{"format": 1}',
        '{"format": 2}',
        '{"format": 3}',
        '{"format": 1.0}',
        '{"format": []}',
        "null",
    ],
)
def test_text_that_is_no_report_is_refused(text):
    with pytest.raises(ReportError):
        QueryReport.from_json(text)


@pytest.mark.parametrize(
    ("key", "value"),
    [("rows", "5"), ("stages", {}), ("stages", [{"name": "x"}]), ("rows", True), ("planner", None)],
)
def test_a_value_of_the_wrong_type_is_refused(key, value):
    data = json.loads(sample_report().to_json())
    data[key] = value
    with pytest.raises(ReportError, match="damaged"):
        QueryReport.from_json(json.dumps(data))


@pytest.mark.parametrize("make", EVERY)
def test_a_report_of_format_1_is_read(make):
    data = json.loads(make().to_json())
    older = {{"planner": "policy", "name": "title"}.get(key, key): value for key, value in data.items()}
    text = json.dumps({**older, "format": 1}).replace('"revision":', '"epoch":')
    assert QueryReport.from_json(text) == make()


@pytest.mark.parametrize("make", EVERY)
def test_a_report_of_format_2_is_read(make):
    data = json.loads(make().to_json())
    text = json.dumps({**data, "format": 2}).replace('"revision":', '"epoch":')
    assert QueryReport.from_json(text) == make()


def test_an_unknown_status_is_refused_and_an_unknown_key_ignored():
    data = json.loads(single_stage_report().to_json())
    data["later"] = 1
    assert QueryReport.from_json(json.dumps(data)) == single_stage_report()
    data["stages"][0]["status"] = "lost"
    with pytest.raises(ReportError, match="lost"):
        QueryReport.from_json(json.dumps(data))


def test_writing_replaces_the_whole_file_and_leaves_nothing_else(tmp_path: Path):
    path = tmp_path / "deep" / "report.json"
    sample_report().write_json(path)
    bare_report().write_json(path)
    assert QueryReport.from_json(path.read_text(encoding="utf-8")) == bare_report()
    assert [p.name for p in path.parent.iterdir()] == ["report.json"]


def test_a_failed_write_keeps_the_old_file_and_no_temporary_one(tmp_path: Path):
    path = tmp_path / "page.html"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_switches_are_the_decisions_that_switched():
    report = sample_report()
    assert [s.at for s in report.switches] == [14.4, 27.5]
    assert report.first_plan is not None
    assert report.first_plan.id == "p1"
    assert bare_report().switches == ()
    assert bare_report().last_plan is None


def test_a_decision_is_reported_relative_to_the_start():
    decision = ReplanDecision("stay", 3, STARTED + 4.5, "a", "a", "too little", "left: n", (), 0.01)
    shown = DecisionReport.of(decision, STARTED)
    assert (shown.at, shown.revision, shown.kind, shown.planner_seconds) == (4.5, 3, "stay", 0.01)


def test_capacity_is_reported_with_what_changed():
    nodes = (Node("a", 2, 4.0), Node("b", 2, 4.0))
    first = Capacity(1, nodes, at=STARTED)
    second = Capacity(2, nodes, (Notice("b", STARTED + 120),), at=STARTED + 5)
    assert CapacityReport.of(first, None, STARTED).change == "at start"
    shown = CapacityReport.of(second, first, STARTED)
    assert (shown.at, shown.cores, shown.nodes, shown.noticed) == (5.0, 2.0, 1, ("b",))
    assert "b" in shown.change


def stage(fp: str, *inputs: str, sink: bool = False) -> Stage:
    return Stage(
        fp, fp, fp, inputs, ("t",), Text("select 1", "select 1", "select 2"), 4, Resources(1, 2), 3.0, 0.5, 10, 80,
        Work(), sink=sink,
    )  # fmt: skip


def test_a_plan_is_reported_with_estimates_cuts_and_checkpoints():
    plan = QueryExecutionPlan("p", (stage("a"), stage("b", "a", sink=True)), "a then b", ("note",))
    shown = PlanReport.of(
        plan, estimated_seconds=math.inf, cores=2, chosen=True, cuts={"a": "small"},
        checkpoints=frozenset({"a"}),
    )  # fmt: skip
    a, b = shown.stages
    assert a.estimated_seconds == pytest.approx(0.5 + 4 * 3.0 / 2)
    assert (a.cut, a.checkpoint, a.sql) == ("small", True, "select 1")
    assert (b.inputs, b.sink, b.sql) == (("a",), True, "select 1")
    assert PlanReport.of(plan, engine="duckdb").stages[0].sql == "select 2"
    assert shown.estimated_seconds is None
    assert (shown.total_work, shown.critical_path, shown.peak_memory) == (24.0, 7.0, 2)


def test_a_stage_on_unbounded_capacity_takes_its_latency_and_one_task():
    plan = QueryExecutionPlan("p", (stage("a", sink=True),))
    assert PlanReport.of(plan).stages[0].estimated_seconds == 3.5
