"""``ebbflow run``: checking, running, going on, and what it refuses; as a flow run of Prefect, too."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml
from typer.testing import CliRunner

from ebbflow.flows import cli
from ebbflow.infra.storage import checksums
from tests.flows.flowcases import COMMAND, TIMEOUT, eventually

SHOP = """
name: shop
cluster:
  local: {pools: {gpu: {kind: gpu, nodes: 0, max_nodes: 1}}}
parameters: {tables: "", least: 3000}
queries:
  spent:
    sql: SELECT customer, sum(price) AS total FROM orders GROUP BY customer HAVING sum(price) >= ${parameters.least}
    tables: ${parameters.tables}
  nations:
    sql: SELECT count(*) AS customers FROM customer JOIN spent ON spent.customer = customer.id
    tables: ["${parameters.tables}", "${queries.spent.path}"]
"""


@pytest.fixture
def shop(tables: str, tmp_path: Path) -> Path:
    file = tmp_path / "shop.yaml"
    file.write_text(SHOP.replace('tables: ""', f"tables: {tables}"))
    return file


def invoke(*arguments: str | Path) -> tuple[int, str]:
    done = CliRunner().invoke(cli.app, [*map(str, arguments)])
    return done.exit_code, done.output


def test_a_right_file_is_told_to_be_right_and_nothing_runs(shop: Path, home: Path) -> None:
    code, text = invoke("run", shop, "--check")
    assert code == 0
    assert "shop is valid: 2 steps" in text
    assert not home.exists()


def test_what_a_file_would_run_is_printed_as_json(shop: Path) -> None:
    code, text = invoke("run", shop, "--check", "--json")
    assert code == 0
    plan = json.loads(text)
    assert plan["name"] == "shop"
    assert [(one["name"], one["kind"], one["needs"]) for one in plan["steps"]] == [
        ("spent", "query", []), ("nations", "query", ["spent"])
    ]  # fmt: skip


@pytest.mark.processes
def test_the_outcome_is_json_on_standard_output_and_in_a_report_and_progress_on_standard_error(
    shop: Path, tmp_path: Path, home: Path
) -> None:
    page, data = tmp_path / "shop.html", tmp_path / "shop.json"
    command = [*COMMAND, "run", str(shop), "--json", "--report", str(page), "--report", str(data)]
    done = subprocess.run(
        [*command, "--runner", "plain"], capture_output=True, text=True, timeout=TIMEOUT, check=False
    )
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["format"], outcome["state"]) == (2, "finished")
    assert [one["display_name"] for one in outcome["steps"]] == ["spent", "nations"]
    assert json.loads(data.read_text()) == outcome
    assert outcome["report"] == str(page)
    assert page.read_text().startswith("<!doctype html>")
    assert "spent" in done.stderr


def test_the_schema_is_printed() -> None:
    code, text = invoke("run", "--schema")
    assert code == 0
    assert json.loads(text)["title"] == "Ebbflow pipeline"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "PIPELINE.yaml or --resume RUN_ID is missing"),
        (["gone.yaml"], "the pipeline gone.yaml cannot be read"),
        (["--resume", "nothing"], "there is no run 'nothing'"),
        (["x.yaml", "--resume", "nothing"], "not both"),
        (
            ["x.yaml", "--report", "page.txt"],
            "must name files that end in .html (the page) or .json (the data)",
        ),
        (["x.yaml", "--set", "a"], "a parameter is set by NAME=VALUE"),
    ],
)
def test_wrong_input(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ebbflow", "run", *arguments, "--runner", "plain"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == (1 if words.startswith("there is no ") else 2)
    assert words in " ".join(capsys.readouterr().err.split())


def test_all_that_is_wrong_with_a_file_is_told_at_once(
    shop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = yaml.safe_load(shop.read_text())
    plain["queries"]["spent"]["weight"] = -1
    plain["nme"] = "shop"
    shop.write_text(yaml.safe_dump(plain))
    monkeypatch.setattr(sys, "argv", ["ebbflow", "run", str(shop), "--check"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    text = capsys.readouterr().err
    assert "'nme' is not known here; did you mean name?" in text
    assert "queries.spent.weight: must be a number > 0" in text


@pytest.mark.processes
def test_ctrl_c_and_a_killed_process_lose_no_finished_step(shop: Path, tmp_path: Path, home: Path) -> None:
    hold = tmp_path / "hold.py"
    hold.write_text("import time; time.sleep(600)")
    plain = yaml.safe_load(shop.read_text())
    plain["cluster"]["local"]["pools"]["gpu"]["nodes"] = 1
    plain["trainings"] = {
        "fit": {"script": "hold.py", "after": "spent", "termination_grace": "2s", "preflight": "never"}
    }
    shop.write_text(yaml.safe_dump(plain))
    folder = tmp_path / "runs" / "one"

    def start(*arguments: str | Path) -> subprocess.Popen[str]:
        command = [
            *COMMAND,
            "run",
            *map(str, arguments),
            "--runs-dir",
            str(tmp_path / "runs"),
            "--runner",
            "plain",
        ]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def running() -> bool:
        record = json.loads((folder / "run.json").read_text()) if (folder / "run.json").exists() else None
        return bool(record) and record["steps"]["fit"]["state"] == "running"

    begun = [start(shop, "--run-id", "one")]
    try:
        (first,) = begun
        eventually(running)
        os.killpg(first.pid, signal.SIGKILL)
        first.wait(TIMEOUT)
        done = json.loads((folder / "run.json").read_text())["steps"]["spent"]
        assert done["state"] == "finished"

        killed = checksums.unsealed((folder / "run.json").read_bytes())
        killed["steps"]["fit"]["state"] = "stopped"  # to see it run again
        (folder / "run.json").write_bytes(checksums.sealed(killed))
        begun.append(second := start("--resume", "one"))
        eventually(running)
        os.killpg(second.pid, signal.SIGINT)
        text, _ = second.communicate(timeout=TIMEOUT)
        assert second.returncode == 130, text
        assert "resume with: ebbflow run --resume one" in text
        assert "Traceback" not in text
        record = json.loads((folder / "run.json").read_text())["steps"]
        assert record["spent"] == done  # not run a second time
        assert record["fit"]["state"] == "stopped"
        assert record["fit"]["attempts"] == 2
    finally:
        for process in begun:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_server")
def test_a_pipeline_is_a_flow_run_with_a_task_run_for_each_step(shop: Path, tmp_path: Path) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import (
        ArtifactFilter,
        ArtifactFilterKey,
        FlowRunFilter,
        FlowRunFilterName,
    )

    from ebbflow.flows.pipeline.flow import run_pipeline

    outcome = run_pipeline(str(shop), run_id="flow-one", runs_dir=str(tmp_path / "runs"))
    assert outcome.state == "finished", outcome
    # 60 customers with 10 orders each; those of customer n cost 2700 + 10 n together
    assert pq.read_table(outcome.step("nations").results["path"]).to_pylist() == [{"customers": 30}]
    with get_client(sync_client=True) as client:
        runs = client.read_flow_runs(
            flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=["pipeline flow-one"]))
        )
        assert [run.state_name for run in runs] == ["Completed"]
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(key=ArtifactFilterKey(like_="ebbflow-pipeline%"))
        )
        assert {one.key for one in found} == {
            "ebbflow-pipeline", "ebbflow-pipeline-decisions", "ebbflow-pipeline-timeline"
        }  # fmt: skip
    assert (tmp_path / "runs" / "flow-one" / "report.html").is_file()
