"""The command line: what it prints, writes and answers."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest
from flowcases import COMMAND, JOINED, TIMEOUT, eventually, run_cli
from typer.testing import CliRunner

from ebbflow.flows import cli
from ebbflow.flows.nodes import cli as local_cli
from ebbflow.flows.query import cli as query_cli
from ebbflow.flows.setup import doctor
from tests.prefect_database import with_database

COMMANDS = [
    *(["ebbflow", one.name] for one in cli.Commands.listed),
    *(
        ["ebbflow", "local", c.name or c.callback.__name__]
        for c in local_cli.app.registered_commands
        if c.callback
    ),
]


def duckdb(tables: str) -> list[str]:
    return ["--tables", tables, "--engine", "duckdb", "--runner", "plain"]


Complain = Callable[..., str]


@pytest.fixture
def complaint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Complain:
    """Run the command line in this process, see it end with a status, and return its only message."""

    def run(*arguments: str, status: int = 2) -> str:
        monkeypatch.setattr(sys, "argv", ["ebbflow", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
        said = capsys.readouterr().err
        assert end.value.code == status, said
        before, _, message = said.rpartition("error: ")
        assert "error" not in before
        return message.rstrip("\n")

    return run


def test_the_version_is_the_package_s() -> None:
    shown = CliRunner().invoke(cli.app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"ebbflow {version('prefect-ebbflow')}\n")


# --- help -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_help_text_teaches_by_example(command: list[str]) -> None:
    shown = CliRunner().invoke(cli.app, [*command[1:], "--help"])
    assert shown.exit_code == 0
    examples = re.findall(rf"^ +({' '.join(command)}\b.*)", shown.output.split("Usage:")[1], re.M)
    assert examples, shown.output


def test_examples_name_commands_and_options_that_exist() -> None:
    known = {" ".join(command[1:]) for command in COMMANDS}
    for command in COMMANDS:
        shown = CliRunner().invoke(cli.app, [*command[1:], "--help"], env={"COLUMNS": "160"}).output
        for example in re.findall(r"^ +ebbflow (.*)", shown.split("Usage:")[1].partition("\n")[2], re.M):
            words = example.split("  ")[0].split(" -- ")[0].split()  # what follows is for a script
            name = " ".join(words[:2]) if words[0] == "local" else words[0]
            assert name in known
            page = CliRunner().invoke(cli.app, [*name.split(), "--help"], env={"COLUMNS": "160"}).output
            assert {w for w in words if w.startswith("--")} <= set(re.findall(r"--[a-z-]+", page))


# --- query ------------------------------------------------------------------------------------------------


def test_a_query_from_a_file_writes_all_that_it_is_asked_for(tables: str, tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    sql, data, page, out = (tmp_path / n for n in ("by-nation.sql", "r.json", "r.html", "r.parquet"))
    sql.write_text(JOINED + "ORDER BY name")
    done = run_cli(
        "query", sql, *duckdb(tables), "--materialize", "every-join", "--verify",
        "--report", data, "--report", page, "-o", out,
    )  # fmt: skip
    assert done.returncode == 0
    report = json.loads(data.read_text())
    wanted = {"rows", "seconds", "planner", "engine", "stages", "switches", "decisions", "capacity"}
    assert wanted | {"result_path"} <= report.keys()
    assert (report["rows"], report["engine"], report["planner"]) == (6, "duckdb", "qoop")
    assert (report["name"], report["verified"], report["result_path"]) == ("by-nation", True, str(out))
    assert pq.read_table(out).column("name").to_pylist() == [f"nation {i}" for i in range(6)]
    assert "<svg" in page.read_text()
    for stage in report["stages"]:  # progress, a line a stage
        assert re.search(rf"^▸ {re.escape(stage['name'])} started$", done.stderr, re.M)
        assert re.search(rf"^✓ {re.escape(stage['name'])} completed: [\d,]+ rows", done.stderr, re.M)
    assert re.search(r"^nation 5 +100 +30200\.0 *$", done.stdout, re.M)  # the result, as a table
    assert len(done.stdout.splitlines()) == 2 + 6
    summary = done.stderr.splitlines()[-1]
    assert re.fullmatch(r"6 rows in [\d.]+ s, \d+ switch(es)?, ✓ verified, result in (.*)", summary)
    assert summary.endswith(str(out))


def test_a_query_as_text_prints_its_result_and_says_each_decision_once(tables: str) -> None:
    done = run_cli("query", "SELECT count(*) AS n FROM orders", *duckdb(tables))
    assert done.returncode == 0
    assert [line.strip() for line in done.stdout.splitlines()] == ["n", "───", "600"]
    assert "start: " in done.stderr
    assert not re.search(r"(start|stay|switch): \1", done.stderr)
    assert "the query begins: start:" not in done.stderr
    for part in ("Capacity", "Stages", "Decisions"):  # of the full report
        assert part not in done.stderr


def test_a_query_says_more_or_nothing_as_it_is_asked_to(tables: str) -> None:
    asked = ["query", "SELECT count(*) AS n FROM orders", *duckdb(tables), "--format", "csv"]
    full, silent = run_cli(*asked, "--verbose"), run_cli(*asked, "-q")
    assert full.stdout == silent.stdout == "n\n600\n"
    assert all(part in full.stderr for part in ("Capacity", "Stages", "Decisions", "Result  "))
    assert silent.stderr == ""


@pytest.mark.parametrize("format", ["csv", "json", "parquet"])
def test_a_pipe_gets_all_rows_and_only_rows(format: str, tables: str) -> None:
    import pyarrow.parquet as pq

    asked = ["query", "SELECT id FROM orders ORDER BY id", *duckdb(tables), "--format", format]
    if format == "csv":
        assert run_cli(*asked).stdout.splitlines() == ["id", *map(str, range(600))]
    elif format == "json":
        assert json.loads(run_cli(*asked).stdout) == [{"id": i} for i in range(600)]
    else:  # bytes, by a real pipe
        done = subprocess.run([*COMMAND, *asked], capture_output=True, timeout=TIMEOUT, check=True)
        assert pq.read_table(io.BytesIO(done.stdout))["id"].to_pylist() == list(range(600))


def test_a_list_of_no_rows_is_an_empty_list(tables: str) -> None:
    done = run_cli("query", "SELECT id FROM orders WHERE id < 0", *duckdb(tables), "--format", "json")
    assert (done.returncode, done.stdout) == (0, "[]\n")


@pytest.mark.parametrize(
    ("wrong", "kind", "message"),
    [
        (["--tables", "/nowhere"], "TableError", "/nowhere does not exist; name a directory"),
        (["--limit", "x"], "OptionError", "--limit must be a whole number"),
        (["--limit", "-1"], "UsageError", "Invalid value for '--limit'"),
        (["--nothing"], "UsageError", "No such option: --nothing"),
        (["-q", "-v"], "OptionError", "--verbose and --quiet exclude each other"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_with_json_errors_are_json_too(
    wrong: list[str],
    kind: str,
    message: str,
    tables: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["ebbflow", "query", JOINED, *duckdb(tables), "--format", "json", *wrong]
    )
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    problem = json.loads(said.err)
    assert (end.value.code, said.out, problem["kind"]) == (2, "", kind)
    assert message in problem["error"]


def test_the_same_command_again_reuses_the_finished_stages(tables: str) -> None:
    first, second = (run_cli("query", JOINED, *duckdb(tables)) for _ in range(2))
    assert "✓ Result completed" in first.stderr
    assert "↺ Result reused" in second.stderr
    assert first.stdout == second.stdout


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT * FROM nations", r"unknown table 'nations'; did you mean 'nation'\?"),
        ("SELECT nam FROM nation", r"unknown column 'nam'; did you mean 'name'\?"),
        ("SELECT name FRM nation WHERE", r"SQL does not parse at line 1, column \d+, near 'nation'"),
        ("DROP TABLE nation", "only queries .* can be run; got DROP"),
        ("missing.sql", "the query: missing.sql cannot be read: No such file"),
    ],
)
def test_a_query_that_cannot_run_is_explained(
    sql: str, message: str, tables: str, complaint: Complain
) -> None:
    assert re.match(message, complaint("query", sql, *duckdb(tables)))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--tables", "/nowhere"], "/nowhere does not exist; name a directory that holds Parquet files"),
        (["--catalog"], r"name the tables by .*--tables DIR.*; got both"),
        (["--conf", "abc"], "a Spark setting must look like spark.some.key=value; got 'abc'"),
        (["--hysteresis", "5"], r"hysteresis must be in \[0, 1\)"),
        (["--dialect", "klingon"], "dialect must be one that sqlglot knows"),
        (["--store", "/proc/none"], "--store cannot write to '/proc/none': /proc is"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_bad_option_is_explained(option: list[str], message: str, tables: str, complaint: Complain) -> None:
    assert re.match(message, complaint("query", JOINED, *duckdb(tables), *option))


@pytest.mark.parametrize(
    ("master", "message"),
    [
        ("spark://127.0.0.1:9", "no Spark master at spark://127.0.0.1:9"),
        ("local-fleet", ".*start it: ebbflow local up --spark 2 --gpu 2$"),
    ],
)
def test_a_master_that_is_not_there_is_explained(
    master: str, message: str, tables: str, complaint: Complain
) -> None:
    given = [*duckdb(tables), "--engine", "spark", "--master", master]
    assert re.match(message, complaint("query", JOINED, *given, status=1))


def test_spark_connect_which_tells_no_times_is_not_calibrated(complaint: Complain) -> None:
    assert re.match(
        r"calibrate .* measures speed by the times of tasks", complaint("calibrate", "--master", "sc://h")
    )


def test_a_query_without_tables_is_told_how_to_name_them(complaint: Complain) -> None:
    assert "--tables DIR" in complaint("query", JOINED, "--engine", "duckdb")


def test_an_unknown_planner_is_answered_with_the_known_ones(tables: str) -> None:
    done = CliRunner().invoke(cli.app, ["query", JOINED, *duckdb(tables), "--planner", "best"])
    assert done.exit_code == 2
    assert all(planner.value in done.output for planner in query_cli.Planner)


# --- explain ----------------------------------------------------------------------------------------------


def test_explain_shows_candidates_side_by_side_and_runs_nothing(
    tables: str, tmp_path: Path, home: Path
) -> None:
    page = tmp_path / "plans.html"
    given = ["--tables", tables, "--engine", "duckdb", "--materialize", "every-join"]
    data = tmp_path / "plans.json"
    done = run_cli(
        "explain",
        JOINED,
        *given,
        "--report",
        page,
        "--report",
        data,
        "--sql",
        "--capacity",
        "cores=2,memory=1GiB",
    )
    assert done.returncode == 0
    assert done.stderr.splitlines()[-2:] == [f"report: {page}", f"report: {data}"]
    assert all(line.startswith(("note: ", "report: ")) for line in done.stderr.splitlines())
    plans = re.findall(r"^(qep-\w+) +\d+ +[\d.]+ s", done.stdout, re.M)
    assert len(plans) == len(set(plans)) > 1
    assert done.stdout.count("✓ chosen") == 1
    assert re.search(r"^-- .* → ckpt_\w+$", done.stdout, re.M)
    assert all(plan in page.read_text() for plan in plans)
    assert [plan["id"] for plan in json.loads(data.read_text())["plans"]] == plans
    assert not list(home.glob("store/data/*"))


def test_explain_prints_one_json_document_with_stages_costs_and_notes(tables: str) -> None:
    given = ["--tables", tables, "--engine", "duckdb", "--materialize", "every-join"]
    done = run_cli("explain", JOINED, *given, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(done.stdout)
    assert document.keys() == {"format", "query", "name", "capacity", "plans", "notes"}
    (chosen,) = (plan for plan in document["plans"] if plan["chosen"])
    assert chosen["estimated_seconds"] > 0
    assert all(stage["sql"] for stage in chosen["stages"])


def test_explain_leaves_rewrites_out_and_names_them_when_one_is_unknown(
    tables: str, complaint: Complain
) -> None:
    from ebbflow.planners.query.planner import REWRITE_NAMES

    given = ["explain", JOINED, "--tables", tables, "--engine", "duckdb"]
    assert run_cli(*given, "--without", "merging,factoring", "--without", "hints").returncode == 0
    said = complaint(*given, "--without", "merging,no-such")
    assert said == f"no rewrite is called 'no-such'; they are {', '.join(REWRITE_NAMES)}"
    help_text = " ".join(CliRunner().invoke(cli.app, ["explain", "--help"]).output.replace("│", " ").split())
    assert f"by commas: {', '.join(REWRITE_NAMES)}." in help_text


@pytest.mark.parametrize("command", ["query", "explain"])
def test_a_report_of_another_ending_is_refused(command: str, tables: str, complaint: Complain) -> None:
    said = complaint(command, JOINED, "--tables", tables, "--engine", "duckdb", "--report", "plans.pdf")
    assert said == (
        "report must name files that end in .html (the page) or .json (the data); got 'plans.pdf'"
    )


def test_json_is_short_for_the_format_and_excludes_another(tables: str, complaint: Complain) -> None:
    done = run_cli("query", "SELECT count(*) AS n FROM orders", *duckdb(tables), "--json", "-q")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == [{"n": 600}]
    given = ["query", JOINED, *duckdb(tables), "--format", "csv", "--json"]
    assert "--json means --format json; got --format csv, too" in complaint(*given)


@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        ("3 cores", "capacity must look like cores=3,memory=6GiB,nodes=3,interruption_rate=2; got '3 cores'"),
        ("cores=0", "cores must be > 0; got 0"),
        ("memory=lots", "memory must be a positive size such as 6GiB or 512m; got 'lots'"),
        ("nodes=1.5", "nodes must be a whole number from 1 to 1,000,000; got '1.5'"),
        ("interruption_rate=-1", "interruption_rate must be >= 0; got -1"),
        ("gpus=1", "capacity must look like .*; got 'gpus=1'"),
    ],
)
def test_a_bad_capacity_is_explained(capacity: str, message: str, tables: str, complaint: Complain) -> None:
    assert re.match(message, complaint("explain", JOINED, "--tables", tables, "--capacity", capacity))


# --- the rest ---------------------------------------------------------------------------------------------


def test_doctor_names_what_is_there() -> None:
    shown = CliRunner().invoke(cli.app, ["doctor"])
    checks = doctor.examine()
    assert shown.exit_code == int(any(c.required and not c.ok for c in checks))
    for name in ("python", "prefect", "duckdb", "pyspark", "java", "machine", "checkpoints"):
        assert name in shown.output


def test_doctor_prints_its_checks_as_json() -> None:
    shown = CliRunner().invoke(cli.app, ["doctor", "--json"])
    found = json.loads(shown.stdout)
    assert found["ready"] is (shown.exit_code == 0)
    assert {"name", "ok", "found", "remedy", "required"} == set(found["checks"][0])


def test_doctor_knows_the_packages_of_every_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    ours = set(project["optional-dependencies"]) - {"dev", "docs"}
    assert set(doctor._EXTRAS.values()) == ours


def test_doctor_says_how_to_get_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from ebbflow.infra.errors import EngineUnavailableError
    from ebbflow.infra.spark import java

    def none() -> None:
        raise EngineUnavailableError("Java is missing: install a JRE")

    monkeypatch.setattr(java, "find_java", none)
    monkeypatch.setenv("EBBFLOW_HOME", "/proc/none")
    shown = CliRunner().invoke(cli.app, ["doctor"])
    assert shown.exit_code == 1
    assert "Java is missing: install a JRE" in shown.output
    assert "EBBFLOW_HOME" in shown.output
    assert "ready" not in shown.output


def test_doctor_refuses_a_fastapi_that_breaks_prefect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "version", lambda name: "0.152.0" if name == "fastapi" else "1.0")
    shown = CliRunner().invoke(cli.app, ["doctor"])
    assert shown.exit_code == 1
    assert "fastapi>=0.139,<0.151" in shown.output


@pytest.mark.parametrize(
    "command", [["status"], ["add", "gpu"], ["down"], ["kill", "gpu-1"], ["notice", "gpu-1"]]
)
def test_a_local_command_without_a_fleet_says_how_to_start_one(
    command: list[str], complaint: Complain
) -> None:
    said = complaint("local", *command, "--name", "mine", status=1)
    assert "there is no local fleet 'mine'" in said
    assert "ebbflow local up --spark 2 --gpu 2 --name mine" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--query", "3"], "query must be one of 5, 7, 8, 9; got 3"),
        (["--scale", "0"], r"scale must be in \(0, 1000\]; got 0"),
        (["--data-dir", "/proc/none"], "--data-dir cannot write to '/proc/none'"),
    ],
)
def test_a_demo_that_cannot_run_is_explained(arguments: list[str], message: str, complaint: Complain) -> None:
    assert re.match(message, complaint("demo", *arguments))


@pytest.mark.prefect
def test_a_query_on_a_prefect_server_is_recorded_there(tables: str, prefect_server: str) -> None:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.sorting import FlowRunSort

    given = ["--tables", tables, "--engine", "duckdb", "--materialize", "every-join"]
    done = run_cli("query", JOINED, *given, PREFECT_API_URL=prefect_server)  # --runner auto
    assert done.returncode == 0
    assert f"in a Prefect flow run on {prefect_server}" in done.stderr
    assert "6 rows" in done.stderr
    assert len(done.stdout.splitlines()) == 2 + 6
    with get_client(sync_client=True) as client:
        run = client.read_flow_runs(sort=FlowRunSort.START_TIME_DESC, limit=1)[0]
    assert run.state is not None
    assert run.state.is_completed()
    assert run.name.startswith("query SELECT name, count(*)")


@pytest.mark.prefect
@pytest.mark.parametrize("runner", ["plain", "prefect"])
def test_a_failed_query_is_one_line_on_standard_error(runner: str, tables: str, prefect_server: str) -> None:
    """Neither Prefect's trace nor DuckDB's complaints at exit are shown."""
    sql = "SELECT CAST(name AS INT) FROM nation"
    given = ["--tables", tables, "--engine", "duckdb", "--dialect", "duckdb", "--runner", runner, "-q"]
    done = run_cli("query", sql, *given, PREFECT_API_URL=prefect_server)
    assert done.returncode == 1
    assert re.fullmatch(r"error: .*Conversion Error.*\n", done.stderr)


@pytest.mark.prefect
@pytest.mark.usefixtures("prefect_home")
def test_ctrl_c_ends_a_query_on_a_temporary_server_soon_and_quietly(tables: str, tmp_path: Path) -> None:
    """Ctrl-C reaches the server as well; Prefect's client would ask it for minutes if it obeyed."""
    joins = " ".join(f"JOIN orders o{i} ON o{i - 1}.price < o{i}.price + 1" for i in range(1, 6))
    given = [f"SELECT count(*) FROM orders o0 {joins}", "--tables", tables, "--engine", "duckdb"]
    log = tmp_path / "output.txt"
    with log.open("wb") as output:
        query = subprocess.Popen(
            [*COMMAND, "query", *given, "--runner", "prefect"],
            env={**os.environ, "PREFECT_HOME": str(with_database(tmp_path / "prefect"))},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        eventually(lambda: "▸" in log.read_text() or query.poll() is not None)
        os.killpg(query.pid, signal.SIGINT)
        assert query.wait(150) == 130
    finally:
        with suppress(ProcessLookupError):
            os.killpg(query.pid, signal.SIGKILL)
    said = log.read_text()
    assert said.endswith("interrupted; finished stages are kept, the same command resumes from them\n")
    assert not re.search("traceback|nanobind|error", said, re.I)


def test_an_interrupt_anywhere_in_an_import_ends_with_its_status_and_not_by_a_signal(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(
        "from ebbflow.flows import cli\n"
        "def app():\n"
        "    try:\n"
        "        exec('raise KeyboardInterrupt')\n"
        "    except KeyboardInterrupt:\n"
        "        raise SystemExit(130) from None\n"
        "cli.app = app\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-m", "interrupted"], cwd=tmp_path, timeout=120, check=False)
    assert done.returncode == 130
