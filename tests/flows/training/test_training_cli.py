"""``ebbflow simulate training`` as users call it."""

import json
import re
import textwrap
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ebbflow.flows.simulation.cli import app
from ebbflow.planners.errors import EbbflowError
from ebbflow.planners.scheduling.catalogue import ENTRIES
from tests.flows.flowcases import run_cli

commands = typer.Typer()  # as the command line has it: a group of one command alone would be that command
commands.add_typer(app, name="simulate")

JOBS = "id,arrival_s,gpus,duration_s\na,0,4,3600\nb,10,2,1800\nc,20,1,600\n"


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    path = tmp_path / "jobs.csv"
    path.write_text(JOBS, encoding="utf-8")
    return path


def invoke(*arguments: object):
    return CliRunner().invoke(
        commands, ["simulate", "training", *map(str, arguments)], env={"COLUMNS": "200"}
    )


def test_help_lists_every_policy_and_names_options_that_exist() -> None:
    text = CliRunner().invoke(commands, ["simulate", "training", "--help"], env={"COLUMNS": "160"}).output
    for entry in ENTRIES:
        first = textwrap.wrap(entry.line, 55)[0]
        assert re.search(rf"\b{re.escape(entry.name)}\b +{re.escape(first)}", text), entry.name
    examples = re.findall(r"^ *ebbflow simulate training (.*)", text, re.M)
    assert len(examples) >= 2
    known = set(re.findall(r"--[a-z-]+", text.split("Workload and policies")[-1]))
    assert {word for example in examples for word in example.split() if word.startswith("--")} <= known


def test_without_options_it_compares_two_policies_on_the_shipped_workload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    done = run_cli("simulate", "training")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^ *tiresias +0\.687 ", done.stdout, re.M)  # 2,473.65 s, as AdaptDL's simulator has it
    assert re.search(r"^ *optimus +1\.14 ", done.stdout, re.M)


def test_it_writes_all_that_it_is_asked_for_and_remembers(jobs: Path, tmp_path: Path) -> None:
    out, table, page = tmp_path / "o.json", tmp_path / "o.csv", tmp_path / "o.html"
    arguments = (
        "--workload", jobs, "--cluster", "1x4", "--policy", "srtf,yarn-cs", "--seeds", 2,
        "--output", out, "--csv", table, "--report", page,
    )  # fmt: skip
    done = invoke(*arguments)
    assert done.exit_code == 0, done.output
    data = json.loads(out.read_text())
    assert [(one["policy"], one["seed"]) for one in data["results"]] == [
        ("srtf", 0), ("srtf", 1), ("yarn-cs", 0), ("yarn-cs", 1),
    ]  # fmt: skip
    assert data["results"][2]["jobs"][0]["finish"] == 3600
    assert not any(one["cached"] for one in data["details"])
    assert len(table.read_text().splitlines()) == 1 + 4 * 3
    assert "<svg" in page.read_text()
    invoke(*arguments)
    assert all(one["cached"] for one in json.loads(out.read_text())["details"])
    invoke(*arguments, "--fresh")
    assert not any(one["cached"] for one in json.loads(out.read_text())["details"])


def test_results_are_json_on_standard_output(jobs: Path) -> None:
    done = invoke("--workload", jobs, "--cluster", "1x4", "--policy", "srtf", "--json")
    assert [one["policy"] for one in json.loads(done.stdout)["results"]] == ["srtf"]
    assert done.stderr == ""


@pytest.mark.parametrize("option", ["--interval", "--restart-delay", "--notice", "--checkpoint-interval"])
def test_durations_have_units_and_are_not_negative(jobs: Path, option: str, tmp_path: Path) -> None:
    trace = tmp_path / "spot.csv"
    trace.write_text("1000,add,n1\n")
    base = ("--workload", jobs, "--cluster", "1x4", "--policy", "srtf", "--spot-trace", trace)
    assert invoke(*base, option, "1m30s").exit_code == 0
    refused = invoke(*base, option, "-5")
    assert refused.exit_code == 2
    assert "-5" in refused.stderr


def test_rejected_jobs_are_told(jobs: Path) -> None:
    done = invoke("--workload", jobs, "--cluster", "1x2", "--policy", "srtf")
    assert "note: jobs, srtf: 1 job of 3 rejected; a: needs 4 GPUs at once" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "temis"), "no policy is called 'temis'; the nearest is 'themis'"),
        (("--workload", "polux-1"), "did you mean pollux-1"),
        (("--cluster", "16"), "is written NODESxGPUS"),
        (("--failures", "often"), "--failures is written"),
        (("--interval", "0"), "interval must be a finite number > 0"),
        (("--interference", "1"), "interference must be >= 0 and < 1"),
        (("--profiles", "/nowhere"), "is not a directory of profiles"),
        (("--spot-trace", "/nowhere.csv"), "cannot be read"),
        (("--prices", "/nowhere.csv"), "cannot be read"),
    ],
)
def test_bad_options_are_errors_of_ours(arguments: tuple[str, ...], message: str) -> None:
    done = invoke(*arguments)
    assert isinstance(done.exception, EbbflowError), done.exception
    assert message in str(done.exception)


def test_an_error_is_one_line_and_status_2(jobs: Path) -> None:
    jobs.write_text(JOBS + "d,0,1,-5\n", encoding="utf-8")
    done = run_cli("simulate", "training", "--workload", jobs)
    assert done.returncode == 2
    assert done.stderr.strip().endswith("jobs.csv, line 5: duration_s must be > 0; got -5")
    assert done.stderr.startswith("error: ")
