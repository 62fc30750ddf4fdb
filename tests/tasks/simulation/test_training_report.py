"""The report of a comparison: tables, pictures, files."""

import csv
import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ebbflow.infra.simulation.usage import Steps
from ebbflow.tasks.drawing.charts import cdf_svg, lines_svg
from ebbflow.tasks.simulation.inputs import Inputs
from ebbflow.tasks.simulation.pictures import allocation_svg, cumulative, summed, tracks, utilisation
from ebbflow.tasks.simulation.report import compared, csv_text, json_text, notes_of, report_page
from ebbflow.tasks.simulation.request import SimulationRequest
from ebbflow.tasks.simulation.runs import planned, run_all


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("report")
    path = folder / "jobs.csv"
    rows = [f"<b>{i}</b>,{i * 60},{1 + i % 4},{600 + 97 * i}" for i in range(60)]
    path.write_text(
        "id,arrival_s,gpus,duration_s\n" + "\n".join([*rows, "huge,0,99,60"]) + "\n", encoding="utf-8"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EBBFLOW_HOME", str(folder))
        inputs = Inputs(SimulationRequest(cluster="2x4", workload=str(path), policy="srtf,yarn-cs", seeds=2))
        return run_all(inputs, planned(inputs))


def test_the_page_is_whole_escaped_and_self_contained(records) -> None:
    page = report_page(records, {"workload": "<jobs>", "seeds": 2})
    assert "<b>59</b>" not in page
    assert "&lt;b&gt;59&lt;/b&gt;" in page
    assert "workload: &lt;jobs&gt;" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    assert "<script" not in page
    assert "1 job of 61 rejected; huge: needs 99 GPUs" in page
    for words in (
        "Completion time",
        "Finish-time fairness",
        "GPUs in use",
        "GPU time held",
        "srtf: GPUs of each app",
    ):
        assert words in page
    svgs = [part.split("</svg>")[0] + "</svg>" for part in page.split("<svg")[1:]]
    assert len(svgs) == 2 * (4 + 1 + 2)  # wide and narrow
    for svg in svgs:
        ET.fromstring("<svg" + svg)


def test_the_best_of_each_column_is_marked_not_by_colour_alone(records) -> None:
    rows = {
        policy: dict(zip(range(99), zip(shown, best, strict=True), strict=False))
        for policy, shown, best in compared(records)
    }
    assert rows["srtf"][0][1]
    assert not rows["yarn-cs"][0][1]
    assert "◂" in report_page(records, {})
    assert len(rows["srtf"]) == 12  # no dollars where no node has a price


def test_json_holds_a_result_a_run_and_csv_a_row_a_job(records) -> None:
    data = json.loads(json_text(records, {"seeds": 2}))
    assert [(one["policy"], one["seed"]) for one in data["results"]] == [
        ("srtf", 0), ("srtf", 1), ("yarn-cs", 0), ("yarn-cs", 1),
    ]  # fmt: skip
    assert all(len(one["jobs"]) + len(one["rejected"]) == 61 for one in data["results"])
    assert [one["submitted"] for one in data["details"]] == [61] * 4
    rows = list(csv.DictReader(io.StringIO(csv_text(records))))
    assert len(rows) == 4 * 61
    assert sum(bool(row["rejected"]) for row in rows) == 4
    one = next(row for row in rows if row["name"] == "<b>3</b>")
    assert float(one["jct_s"]) == float(one["finish"]) - float(one["arrival"])
    assert float(one["queueing_s"]) == float(one["start"]) - float(one["arrival"])


def test_notes_come_once(records) -> None:
    assert len(notes_of(records)) == 2


def test_small_apps_share_a_row_and_nothing_is_lost(records) -> None:
    rows = tracks(records[0])
    assert len(rows) == 40
    assert rows[-1].name == "21 others"
    end = records[0]["last_finish"]
    held = sum(row.steps.integral(0, end) for row in rows)
    assert held == pytest.approx(sum(job["gpu_seconds"] for job in records[0]["jobs"]))
    ET.fromstring(allocation_svg("x", records[0], width=380))


def test_utilisation_over_time_averages_to_that_of_the_run(records) -> None:
    points = utilisation(records[0])
    assert sum(share for _, share in points) / len(points) == pytest.approx(100 * records[0]["utilisation"])


def test_step_functions_add_up_and_integrate() -> None:
    one, other = Steps([0.0, 4.0], [2, 0]), Steps([2.0, 6.0], [1, 0])
    both = summed([one, other])
    assert (both.times, both.values) == ([0.0, 2.0, 4.0, 6.0], [2, 3, 1, 0])
    assert cumulative(both, [0.0, 1.0, 5.0, 9.0]) == [0.0, 2.0, 11.0, 12.0]
    assert cumulative(Steps(), [0.0, 1.0]) == [0.0, 0.0]


def test_logarithmic_and_empty_pictures_are_drawn() -> None:
    for svg in (
        cdf_svg("t", {"a": [0.0, 0.2, 30.0, 4000.0], "b": []}, log=True),
        cdf_svg("t", {"a": [5.0, 5.0]}, log=True, mark=1.0),
        cdf_svg("t", {"a": []}, log=True),
        lines_svg("t", {"a": [(0.0, 1.0), (5.0, 3.0)], "b": []}, unit="$"),
        lines_svg("t", {}),
    ):
        ET.fromstring(svg)
    assert ">100<" in cdf_svg("t", {"a": [1.0, 1000.0]}, log=True)


def test_a_run_without_any_job_still_has_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path))
    path = tmp_path / "big.csv"
    path.write_text("id,arrival_s,gpus,duration_s\nhuge,0,99,60\n", encoding="utf-8")
    inputs = Inputs(SimulationRequest(cluster="1x4", workload=str(path), policy="srtf"))
    found = run_all(inputs, planned(inputs))
    assert found[0]["figures"]["avg_jct_s"] is None
    assert "Rejected" in report_page(found, {})
    json_text(found, {})
