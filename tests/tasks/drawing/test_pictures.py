"""Pictures are well-formed, escape what they show, and do not draw one thing over another."""

import itertools
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.tasks.drawing.charts import bars_svg, cdf_svg
from ebbflow.tasks.drawing.layers import arrange, longest_path
from ebbflow.tasks.drawing.svg import fit, lanes, place_labels, text_width, ticks
from ebbflow.tasks.query.report import CapacityReport, PlanReport, PlanStageReport
from ebbflow.tasks.report.bars import Axes, place_bars
from ebbflow.tasks.report.dag import dag_svg
from ebbflow.tasks.report.timeline import timeline_svg
from tests.tasks.sample import (
    bare_report,
    hostile_report,
    ran,
    sample_plans,
    sample_report,
    single_stage_report,
)

SVG = "{http://www.w3.org/2000/svg}"
REPORTS = [sample_report, hostile_report, bare_report, single_stage_report]


def parse(svg: str) -> ET.Element:
    root = ET.fromstring(svg)
    assert root.tag == f"{SVG}svg"
    return root


def words(root: ET.Element) -> list[str]:
    return [e.text or "" for e in root.iter(f"{SVG}text")]


@pytest.mark.parametrize("width", [360, 960])
@pytest.mark.parametrize("make", REPORTS)
def test_a_timeline_is_well_formed_and_inside_its_frame(make, width):
    root = parse(timeline_svg(make(), width))
    left, top, wide, high = map(float, root.attrib["viewBox"].split())
    assert (left, top, wide) == (0, 0, width)
    for box in root.iter(f"{SVG}rect"):
        x, y = float(box.get("x", 0)), float(box.get("y", 0))
        assert 0 <= x <= x + float(box.attrib["width"]) <= wide + 0.01
        assert 0 <= y <= y + float(box.attrib["height"]) <= high + 0.01


def test_a_timeline_shows_switches_losses_and_the_expected_finish():
    shown = words(parse(timeline_svg(sample_report())))
    assert {"switch 1", "switch 2", "expected 28.6 s", "done 44.8 s"} <= set(shown)
    assert "▼ lost 2" in shown
    assert "! notice worker-3" in shown
    assert "▲ new 2" in shown


def test_every_status_is_told_by_a_mark_as_well_as_by_colour():
    bars = [t for t in words(parse(timeline_svg(sample_report()))) if t[:2] in ("✓ ", "↺ ", "✂ ", "✗ ")]
    legend, runs = 4, len(sample_report().stages)
    assert len(bars) == legend + runs


def test_hundreds_of_capacity_changes_stay_a_picture_of_ordinary_height():
    report = sample_report()
    changes = tuple(
        CapacityReport(i * 0.1, i, 4 - i % 2, 8, 4 - i % 2, "x", left=("worker-1",) if i % 2 else ())
        for i in range(400)
    )
    root = parse(timeline_svg(replace(report, capacity=changes)))
    assert float(root.attrib["viewBox"].split()[3]) < 450


def test_a_long_stage_name_is_shortened_and_whole_in_its_tooltip():
    report = sample_report()
    name = "a very long name " * 8
    root = parse(timeline_svg(replace(report, stages=(replace(report.stages[0], name=name),))))
    assert any("…" in t for t in words(root))
    assert any(name in (e.text or "") for e in root.iter(f"{SVG}title"))


def test_markup_in_names_stays_text():
    for svg in (timeline_svg(hostile_report()), dag_svg(hostile_report().plans[0])):
        assert "<b>x" not in svg
        assert "<img" not in svg
        parse(svg)


def test_control_characters_do_not_break_the_picture():
    report = single_stage_report()
    parse(timeline_svg(replace(report, stages=(replace(report.stages[0], name="a\x00\x1b\ud800b"),))))


def test_pictures_on_one_page_share_no_definitions():
    report = sample_report()
    ids = [
        set(re.findall(r' id="([^"]+)"', svg))
        for svg in (
            timeline_svg(report),
            timeline_svg(report, 400),
            bars_svg("t", ["a"], {"x": [1], "y": [2]}),
        )
    ]
    assert all(not a & b for a, b in itertools.combinations(ids, 2))
    assert all(ids)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 30)), max_size=40))
def test_lanes_never_overlap_and_are_as_few_as_intervals_overlap_at_most(raw):
    intervals = [(start, start + length) for start, length in raw]
    placed = lanes(intervals)
    for (a, first), (b, second) in itertools.combinations(zip(intervals, placed, strict=True), 2):
        assert first != second or a[1] <= b[0] or b[1] <= a[0]
    # Empty intervals are left out of the count: one may share its instant with another's end.
    solid = [(i, n) for i, n in zip(intervals, placed, strict=True) if i[1] > i[0]]
    if len(solid) == len(intervals) and solid:
        most = max(sum(a <= s < b for (a, b), _ in solid) for (s, _), _ in solid)
        assert max(placed) + 1 == most


@given(
    st.lists(
        st.tuples(
            st.text("ab ⋈", min_size=1, max_size=60),
            st.sampled_from(["completed", "reused", "cancelled", "failed"]),
            st.floats(0, 100),
            st.floats(0, 50),
        ),
        max_size=20,
    ),
    st.sampled_from([360.0, 960.0]),
)
def test_bars_and_their_labels_never_overlap_and_stay_in_the_frame(raw, width):
    stages = [ran(name, status, "p", at, at + length) for name, status, at, length in raw]
    frame = Axes(width, 50.0, 150.0)
    bars = place_bars(stages, frame)
    rows = lanes([b.extent for b in bars], gap=5)
    for bar in bars:
        assert frame.left - 0.01 <= bar.extent[0] <= bar.extent[1] <= frame.right + 0.01
    for (a, first), (b, second) in itertools.combinations(zip(bars, rows, strict=True), 2):
        assert first != second or a.extent[1] <= b.extent[0] or b.extent[1] <= a.extent[0]


@given(st.lists(st.tuples(st.floats(-50, 500), st.floats(1, 90)), max_size=20))
def test_labels_never_overlap_and_stay_between_the_margins(items):
    placed = place_labels(items, 0, 400)
    spans = [(row, left, left + width) for (row, left), (_, width) in zip(placed, items, strict=True)]
    assert all(left >= 0 and right <= 400.001 for _, left, right in spans)
    for a, b in itertools.combinations(spans, 2):
        assert a[0] != b[0] or a[2] <= b[1] or b[2] <= a[1]


@given(st.text(max_size=80), st.floats(0, 300))
def test_a_fitted_text_is_never_wider_than_asked(content, width):
    assert text_width(fit(content, width)) <= width + 1e-6


@given(st.floats(1e-6, 1e7), st.integers(1, 12))
def test_ticks_are_evenly_spaced_from_zero_and_not_too_many(limit, about):
    found = ticks(limit, about)
    assert found[0] == 0
    assert found[-1] <= limit * 1.000001
    assert len(found) <= about + 2


@pytest.mark.parametrize("direction", ["right", "down"])
@pytest.mark.parametrize("plan", sample_plans(), ids=lambda p: p.id)
def test_a_plan_shows_every_stage_and_table(plan, direction):
    root = parse(dag_svg(plan, direction))
    titles = [e.text or "" for e in root.iter(f"{SVG}title")]
    for stage in plan.stages:
        assert any(t.startswith(stage.name + "\n") for t in titles)
        for table in stage.tables:
            assert f"table {table}" in titles
    edges = sum(len(s.tables) + len(s.inputs) for s in plan.stages)
    inputs_outside = sum(
        fp not in {s.fingerprint for s in plan.stages} for s in plan.stages for fp in s.inputs
    )
    assert len(list(root.iter(f"{SVG}path"))) == edges - inputs_outside


@st.composite
def plans(draw: st.DrawFn) -> PlanReport:
    count = draw(st.integers(1, 12))
    stages = []
    for i in range(count):
        inputs = draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else set()
        tables = draw(st.sets(st.sampled_from(["orders", "lineitem", "a_rather_long_table_name"])))
        stages.append(
            PlanStageReport(
                f"stage {i}", f"f{i}", tuple(f"f{n}" for n in sorted(inputs)), tuple(sorted(tables)),
                sink=i == count - 1,
            )
        )  # fmt: skip
    return PlanReport("p", tuple(stages))


@given(plans(), st.sampled_from(["right", "down"]))
def test_boxes_of_any_plan_do_not_overlap_and_stay_in_the_frame(plan, direction):
    root = parse(dag_svg(plan, direction))
    _, _, wide, high = map(float, root.attrib["viewBox"].split())
    boxes = []
    for box in list(root.iter(f"{SVG}rect"))[1:]:  # the first is the ground
        x, y, w, h = (float(box.attrib[k]) for k in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= wide + 0.01
        assert 0 <= y <= y + h <= high + 0.01
        boxes.append((x, y, x + w, y + h))
    assert len(boxes) == len(plan.stages) + sum(len(s.tables) for s in plan.stages)
    for a, b in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def test_a_plan_without_stages_is_still_a_picture():
    assert "no stages" in words(parse(dag_svg(PlanReport("p", ()))))


def test_a_long_edge_bends_around_the_layers_between():
    nodes = ["a", "b", "c"]
    edges = [("a", "b"), ("b", "c"), ("a", "c")]
    layout = arrange(longest_path(nodes, edges), dict.fromkeys(nodes, 40.0), edges, gap=10)
    ((_, bend),) = [p for p in layout.routes["a", "c"] if p[0] == 1]
    assert abs(bend - layout.centre["b"]) >= 20 + 4 + 10 - 1e-6


def test_bars_show_every_value_and_name():
    root = parse(bars_svg("T <1>", ["q1", "q2"], {"a": [1.0, None], "b": [float("inf"), 20.5]}))
    shown = words(root)
    assert {"T <1>", "q1", "q2", "a", "b", "1 s", "20.5 s"} <= set(shown)
    assert shown.count("–") == 2


def test_bars_of_unequal_length_are_refused():
    with pytest.raises(ValueError, match="2 values; got 1"):
        bars_svg("t", ["a", "b"], {"x": [1.0]})


@pytest.mark.parametrize(
    "series", [{}, {"a": []}, {"a": [1.0]}, {"a": [0.0, 0.0]}, {"a": [float("inf"), 2.0]}]
)
def test_charts_of_little_data_are_well_formed(series):
    parse(cdf_svg("t", series))
    parse(bars_svg("t", [], dict.fromkeys(series, ())))


def test_a_distribution_ends_below_one_when_some_runs_never_ended():
    def top(values: list[float]) -> float:
        line = next(parse(cdf_svg("t", {"a": values})).iter(f"{SVG}polyline"))
        return min(float(p.split(",")[1]) for p in line.attrib["points"].split())

    assert top([1.0, 2.0]) < top([1.0, float("inf")])
