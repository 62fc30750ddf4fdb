"""The evaluation of SCAR: the page comes from the experiments, its verdicts from their figures."""

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner

from ebbflow.planners.errors import OptionError
from tests.evaluation.__main__ import app
from tests.evaluation.experiments import run_experiments
from tests.evaluation.scar.bounds import KINDS, quadratic, regression
from tests.evaluation.scar.metrics import Trials, Value, against, holds
from tests.evaluation.scar.pictures import Row, intervals_svg, scatter_svg
from tests.evaluation.scar.plan import experiments
from tests.evaluation.scar.run import chosen, evaluate


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rework")
    result = CliRunner().invoke(app, ["scar", "--quick", "--out", str(out), "--document", str(out / "docs")])
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.slow  # the quick run of a whole evaluation
def test_a_quick_run_makes_the_page_and_its_pictures(quick: Path) -> None:
    page = (quick / "docs" / "scar-evaluation.md").read_text()
    assert "python -m tests.evaluation scar --document docs --quick" in page
    assert "| claim | published | here | verdict |" in page
    assert "59 to 89 %" in page
    assert "nan" not in re.sub(r"[a-z]*nan[a-z]+|[a-z]+nan", "", page.lower())
    shown = re.findall(r"!\[[^]]*\]\(([^)]*)\)", page)
    assert len(shown) == 4
    for name in shown:
        ElementTree.fromstring((quick / "docs" / name).read_text())


@pytest.mark.slow  # the quick run of a whole evaluation
def test_a_second_run_takes_everything_from_the_first(quick: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in (quick / "scar").glob("*.json")}
    run_experiments("scar", experiments(True), quick)
    assert {path: path.stat().st_mtime_ns for path in (quick / "scar").glob("*.json")} == before
    assert len(before) == len(experiments(True))


@pytest.mark.slow  # the quick run of a whole evaluation
def test_the_table_tells_what_the_trials_say(quick: Path) -> None:
    found = json.loads((quick / "scar" / "mlr-8-partial.json").read_text())["result"]["rework"]
    mean = np.mean(found["full 1x 0.5"])
    page = (quick / "docs" / "scar-evaluation.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| MLR (C = 8) | 60 |")]
    assert f"| {mean:.2f} ± " in row


def test_some_experiments_alone_make_no_page(tmp_path: Path) -> None:
    some = chosen("qp-slowest", True)
    assert [e.name for e in some] == ["qp-slowest-once", "qp-slowest-often"]
    assert evaluate(some, tmp_path, tmp_path, quick=True) is None
    assert len(list((tmp_path / "scar").glob("*.json"))) == 2
    with pytest.raises(OptionError, match=r"experiments are qp-generic-once, .*; got 'qp,mlp'"):
        chosen("qp,mlp", True)


@pytest.mark.parametrize("start", ["generic", "slowest"])
@pytest.mark.parametrize("how", ["once", "often"])
def test_no_quadratic_leaves_its_bounds(start: str, how: str) -> None:
    found = quadratic(start, how, 200)
    rework, bound = np.array(found["rework"]), np.array(found["bound"])
    assert found["beyond"] == 0
    assert found["envelope"] <= 1 + 1e-9
    assert (rework < 0).any()
    if start == "slowest":
        assert (rework <= bound + 1e-3).all()
        if how == "once":
            assert rework.max() > 0.9 * bound.max()


@pytest.mark.parametrize("kind", KINDS)
def test_no_regression_leaves_its_bounds(kind: str) -> None:
    found = regression(kind, 4)
    assert found["beyond"] == 0
    assert found["envelope"] <= 1 + 1e-9
    assert found["seen"] <= found["contraction"]
    assert min(found["rework"]) >= 0
    assert min(found["by_objective"]) >= -1


def trials(whole: list[float], half: list[float]) -> Trials:
    rework = {"full 1x 1": whole, "full 1x 0.5": half}
    part = {"failed": [1] * len(whole), "criterion": [0.0], "base": [60.0], "rework": rework, "late": {}}
    return Trials("mlr", [part])


def test_reductions_are_of_paired_means() -> None:
    # Half of the rework in every trial: the ratio is sure although each mean is not.
    found = trials([2.0, 4.0, 9.0, 1.0], [1.0, 2.0, 4.5, 0.5])
    assert found.saved(("full", 1, 0.5)) == Value(50.0, 0.0)
    assert found.cost(("full", 1, 0.5)).half > 1
    assert found.less(("full", 1, 0.5), ("full", 1, 1.0)) is True


def test_the_interval_of_a_reduction_covers_the_truth() -> None:
    rng, hits = np.random.default_rng(0), 0
    for _ in range(300):
        whole = rng.gamma(2.0, 4.0, 100)
        found = trials(whole.tolist(), (0.4 * whole + rng.normal(0, 1.5, 100)).tolist())
        saved = found.saved(("full", 1, 0.5))
        hits += saved.low <= 60 <= saved.high
    assert 0.91 <= hits / 300 <= 0.98


def test_results_of_other_failures_are_not_compared() -> None:
    part = {"failed": [1], "criterion": [0.0], "base": [60.0], "rework": {}, "late": {}}
    with pytest.raises(ValueError, match="same failures"):
        Trials("mlr", [part, part | {"failed": [2]}])


def test_verdicts_name_every_model_once() -> None:
    values = {"a": Value(70, 2), "b": Value(50, 1), "c": Value(20, 5), "d": Value(100, 1), "e": Value(130, 1)}
    assert against(values, 59, 89) == "inside: a; near: b, d; more: e; **less**: c"
    assert against({"f": Value(30, 40)}, 59, 89) == "near: f"
    assert holds({"a": True, "b": True}) == "yes: all 2"
    assert holds({"a": True, "b": False, "c": None}) == "yes: a; **no**: b; not told by the trials: c"


def test_pictures_show_values_bands_and_points() -> None:
    sections = {"half": [Row("a & b", -5.0, -9.0, -1.0, (31, 62)), Row("c", 40.0, 30.0, 50.0)]}
    drawn = ElementTree.fromstring(intervals_svg("Saved", sections, label="saved"))
    kinds = [element.tag.split("}")[1] for element in drawn.iter()]
    assert kinds.count("circle") == 2
    assert "a & b: -5 % (-9 to -1), published 31 to 62" in "".join(drawn.itertext())
    drawn = ElementTree.fromstring(
        scatter_svg("Bound", {"x": [(1, 2), (3, -4)]}, across="bound", up="rework")
    )
    assert [element.tag.split("}")[1] for element in drawn.iter()].count("circle") == 3  # one in the legend
