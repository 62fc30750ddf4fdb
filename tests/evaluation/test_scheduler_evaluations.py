"""The evaluations made again: all pages appear, their figures come from runs, the orders that they name hold."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ebbflow.planners.errors import OptionError
from tests.evaluation.__main__ import app
from tests.evaluation.experiments import Experiment, key_of, run_experiments
from tests.evaluation.optimus.jobs import MODELS, blocks, largest_share, made, packed
from tests.evaluation.optimus.optimus_tasks import Tasks
from tests.evaluation.optimus.runs import VARIANTS, balancing, scale, world
from tests.evaluation.page import Figure, figures, grouped, orders
from tests.evaluation.pollux.runs import alone, scaled, shared, workload
from tests.evaluation.runs import column, jct
from tests.evaluation.systems import evaluations
from tests.evaluation.tiresias.runs import on_testbed, on_trace, placed

SYSTEMS = ("tiresias", "optimus", "pollux")


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("evaluation")
    for system in SYSTEMS:
        result = CliRunner().invoke(
            app, [system, "--quick", "--out", str(out), "--document", str(out / "docs")]
        )
        assert result.exit_code == 0, result.output
    return out


def found(out: Path, system: str) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text())["result"] for path in (out / system).glob("*.json")}


@pytest.mark.slow  # the quick run of a whole evaluation
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_quick_run_makes_the_page_with_its_command_and_pictures(quick: Path, system: str) -> None:
    page = (quick / "docs" / f"{system}-evaluation.md").read_text()
    assert f"python -m tests.evaluation {system} --document docs" in page
    assert "| figure | published | ours | ratio | why different |" in page
    shown = re.findall(r"!\[[^]]*\]\(([^)]*)\)", page)
    assert len(shown) >= 3
    for name in shown:
        assert (quick / "docs" / name).read_text().startswith("<svg")
    assert "nan" not in page.lower().split("## pictures")[0].replace("finance", "")


@pytest.mark.slow  # the quick run of a whole evaluation
@pytest.mark.parametrize("system", SYSTEMS)
def test_a_second_run_takes_everything_from_the_first(quick: Path, system: str) -> None:
    (one,) = evaluations(system)
    before = {path: path.stat().st_mtime_ns for path in (quick / system).glob("*.json")}
    run_experiments(system, one.experiments(True), quick)
    assert {path: path.stat().st_mtime_ns for path in (quick / system).glob("*.json")} == before


def _jobs_twice_as_long(value: Any) -> Any:
    """Return a result in which all completion times have doubled."""
    if not isinstance(value, dict):
        return value
    if "finish" in value:
        doubled = [2 * end - start for start, end in zip(value["arrival"], value["finish"], strict=True)]
        return value | {"finish": doubled}
    return {name: _jobs_twice_as_long(part) for name, part in value.items()}


@pytest.mark.parametrize(
    ("system", "experiment", "row"),
    [
        ("tiresias", "testbed-yarn-cs-0", "average, YARN-CS over Tiresias-L |"),
        ("tiresias", "trace-srtf-0", "SRTF: average |"),
        ("optimus", "drf-0", "average completion time, DRF over Optimus |"),
        ("pollux", "tiresias-1-seed-0", "Tiresias: average completion time, s |"),
        ("pollux", "interval-240-1", "every 240 s: average, s |"),
        ("pollux", "load-2.0-pollux-1", "load 2.0, Pollux: average, s |"),
    ],
)
@pytest.mark.slow  # the quick run of a whole evaluation
def test_figures_follow_the_runs(quick: Path, system: str, experiment: str, row: str) -> None:
    (one,) = evaluations(system)
    results = found(quick, system)
    before, _ = one.page(results, "")
    after, _ = one.page(results | {experiment: _jobs_twice_as_long(results[experiment])}, "")

    def ours(page: str) -> float:
        line = next(line for line in page.splitlines() if line.startswith(f"| {row}"))
        return float(line.split("|")[3].strip().split(" ")[0].replace(",", ""))

    assert ours(after) == pytest.approx(2 * ours(before), rel=0.02, abs=0.011)


@pytest.mark.slow  # the quick run of a whole evaluation
def test_an_order_that_breaks_is_said_to_break(quick: Path) -> None:
    (one,) = evaluations("pollux")
    results = found(quick, "pollux")
    line = "| average: Pollux < Tiresias |"
    assert f"{line} yes |" in one.page(results, "")[0]
    slow = {name: run for name, run in results.items() if name.startswith("pollux-")}
    for name in slow:
        for _ in range(6):
            results[name] = _jobs_twice_as_long(results[name])
    assert f"{line} in none |" in one.page(results, "")[0]


def test_unknown_systems_are_refused() -> None:
    with pytest.raises(OptionError, match="tiresias"):
        evaluations("gavel")
    with pytest.raises(OptionError, match="systems are"):
        evaluations(" ,")


# Tables


def test_a_figure_without_a_published_number_has_no_ratio() -> None:
    text = figures([Figure("a", 2.0, 3.0, 2.5, 3.5, "x"), Figure("b", None, 1.0, stated="flat")])
    assert "| a | 2.00 | 3.00 (2.50 to 3.50) | 1.50 | x |" in text
    assert "| b | flat | 1.00 | – |  |" in text


def test_orders_say_in_how_many_runs_they_hold() -> None:
    text = orders(
        [("a", [True, True]), ("b", [True, True, False]), ("c", [True, False]), ("d", [False]), ("e", [])]
    )
    assert "| a | yes | 2 of 2 |" in text
    assert "| b | mostly | 2 of 3 |" in text
    assert "| c | in some | 1 of 2 |" in text  # a half is not most of them
    assert "| d | in none | 0 of 1 |" in text
    assert "| e | not run | 0 of 0 |" in text
    with pytest.raises(KeyError, match="x"):
        grouped({}, "x")


# Resuming


def _counted(start: int) -> int:
    _calls.append(start)
    return start + 1


_calls: list[int] = []


def test_what_has_other_parameters_or_is_torn_runs_again(tmp_path: Path) -> None:
    _calls.clear()
    for start in (1, 1, 2):
        assert run_experiments("s", [Experiment("e", _counted, {"start": start})], tmp_path) == {
            "e": start + 1
        }
    assert _calls == [1, 2]
    (tmp_path / "s" / "e.json").write_text("{")
    assert run_experiments("s", [Experiment("e", _counted, {"start": 2})], tmp_path) == {"e": 3}
    assert _calls == [1, 2, 2]
    assert key_of(Experiment("e", on_testbed, {})) != key_of(Experiment("e", shared, {}))


# What the pages claim


def test_tiresias_keeps_the_orders_of_its_testbed() -> None:
    runs = {name: on_testbed(name, 0) for name in ("srsf", "srtf", "smallest-first", "tiresias-l", "yarn-cs")}
    mean = {name: jct(run).mean() for name, run in runs.items()}
    assert mean["srsf"] <= mean["srtf"] <= mean["tiresias-l"] < mean["yarn-cs"]
    assert mean["srtf"] <= mean["smallest-first"]
    assert mean["yarn-cs"] / mean["tiresias-l"] >= 3
    assert np.median(jct(runs["yarn-cs"])) / np.median(jct(runs["tiresias-l"])) >= 10
    assert all(len(run["jobs"]["name"]) == 480 for run in runs.values())


def test_preemption_costs_time_and_placement_by_skew_saves_some() -> None:
    free, costly = on_testbed("tiresias-l", 0, jobs=200), on_testbed("tiresias-l", 0, 60.0, jobs=200)
    assert jct(costly).mean() > jct(free).mean()
    skew, random = placed("skew", 0, jobs=200), placed("random", 0, jobs=200)
    assert column(skew, "run").sum() < column(random, "run").sum()
    same, other = (on_trace("tiresias-l", 0, thresholds=(hours,), jobs=100) for hours in (1.0, 0.001))
    assert on_trace("tiresias-l", 0, jobs=100)["jobs"] == same["jobs"]
    assert len(other["jobs"]["name"]) == 100


def test_each_part_of_optimus_helps() -> None:
    mean = {}
    for name in ("drf", "allocation-placement", "optimus", "oracle"):
        one = world(0, 30, **VARIANTS[name])
        mean[name] = float(np.mean(np.array(one["finish"]) - np.array(one["arrival"])))
    assert mean["oracle"] < mean["optimus"] < mean["allocation-placement"] < mean["drf"]


def test_stragglers_hurt_and_replacing_them_helps() -> None:
    mean = {}
    for name in ("optimus", "stragglers-kept", "stragglers-replaced"):
        one = world(1, 30, **VARIANTS[name])
        mean[name] = float(np.mean(np.array(one["finish"]) - np.array(one["arrival"])))
    assert mean["optimus"] < mean["stragglers-replaced"] < mean["stragglers-kept"]


def test_true_speed_of_parameter_servers() -> None:
    for job in made(0, 20):
        near, far = packed(Tasks(2, 2)), packed(Tasks(2, 2), per_machine=1)
        assert job.speed(near, True) > job.speed(far, True)
    assert all(abs(sum(blocks(name)) / 1e6 / size - 1) < 0.03 for name, size in MODELS.items())
    assert largest_share("resnet-50", 1, True) == pytest.approx(1.0)
    assert 0.1 <= largest_share("resnet-50", 10, True) < largest_share("resnet-50", 10, False)


def test_balancing_of_resnet_50_against_what_is_published() -> None:
    found_ = balancing(0)
    assert found_["optimus"]["size_gap"] < 0.15e6
    assert found_["optimus"]["request_gap"] == 1
    assert found_["mxnet"]["size_gap"] > 10 * found_["optimus"]["size_gap"]
    assert found_["mxnet"]["requests"] > found_["optimus"]["requests"]


def test_a_thousand_jobs_are_placed_in_a_moment() -> None:
    one = scale(1000, 4000, 0)
    assert one["tasks"] == 24_000
    assert one["allocate_s"] + one["place_s"] < 5


def test_every_job_counts_alike_at_every_load() -> None:
    whole = [job.id for number in range(1, 5) for job in workload((number,)).jobs]
    half = [job.id for number in range(1, 5) for job in workload((-number,)).jobs]
    assert len(half) * 2 == len(whole)
    double = [job.id for pair in ((1, 2), (3, 4)) for job in workload(pair).jobs]
    assert sorted(double) == sorted(whole)
    arrivals = [job.arrival for job in workload((1, -2)).jobs]
    assert arrivals == sorted(arrivals)


def test_time_alone_falls_with_gpus_and_is_the_same_for_a_job_that_can_use_one() -> None:
    assert alone("cifar10", 2048, 8, True) < alone("cifar10", 2048, 1, True)
    assert alone("cifar10", 2048, 8, False) <= alone("cifar10", 2048, 1, False)
    assert alone("ncf", 32_768, 8, False) == alone("ncf", 32_768, 1, False)


def test_renting_by_goodput_is_cheaper_and_slower_than_by_throughput() -> None:
    by_goodput, by_throughput = scaled(True, 2.0), scaled(False, 2.0)
    assert 0.7 < by_goodput["gpu_hours"] / by_throughput["gpu_hours"] < 0.9
    assert 1.0 < jct(by_goodput)[0] / jct(by_throughput)[0] < 1.3
    nodes = [count for _, count in by_goodput["nodes"][:-1]]
    assert nodes == sorted(nodes)
    assert nodes[0] == 1
