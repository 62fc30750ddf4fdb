"""Secrets in the environment, in addresses and in requests: none of them may be written or shown anywhere."""

import logging
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import EbbflowError
from ebbflow.planners.model.ledger import AppEntered, AppSpec
from ebbflow.tasks.capacity.request import CapacityRequest
from ebbflow.tasks.pipeline.file.read import parse_pipeline
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute
from ebbflow.tasks.report.delivery import deliver

CANARY = "cAnArY7q2Z"  # in every secret below; no file, log or message may hold it
SECRETS = {
    "AWS_ACCESS_KEY_ID": f"AKIA{CANARY}",
    "AWS_SECRET_ACCESS_KEY": f"secret/{CANARY}",
    "AWS_SESSION_TOKEN": f"token-{CANARY}",
    "PGPASSWORD": f"pg-{CANARY}",
    "PREFECT_API_KEY": f"pnu_{CANARY}",
    "HF_TOKEN": f"hf_{CANARY}",
}
ADDRESS = f"postgresql://ebb:pass-{CANARY}@127.0.0.1:9/ledger"

PIPELINE = """
name: canary
cluster:
  existing: {ledger: "${env:CANARY_LEDGER}"}
trainings:
  fit:
    script: fit.py
    environment: {HF_TOKEN: "${env:HF_TOKEN}"}
"""


@pytest.fixture(autouse=True)
def _secrets(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CANARY_LEDGER", ADDRESS)
    caplog.set_level(logging.DEBUG)


def leaks(folder: Path) -> list[str]:
    """Return the files below ``folder`` that hold the canary."""
    found = []
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and CANARY.encode() in path.read_bytes():
            found.append(str(path.relative_to(folder)))
    return found


def messages(error: BaseException | None) -> str:
    """Return the texts of an error and of those behind it that would be shown."""
    said = ""
    while error is not None:
        said += f"{error} {error!r} "
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return said


def test_a_query_writes_nothing_of_its_environment(
    tables: str,
    tmp_path: Path,
    home: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    request = QueryRequest(
        "SELECT nation, count(*) AS n FROM customer GROUP BY nation",
        tables=tables,
        engine="duckdb",
        conf={"spark.hadoop.fs.s3a.secret.key": f"conf-{CANARY}"},
        store=str(tmp_path / "store"),
        output=str(tmp_path / "out.parquet"),
        report=(str(tmp_path / "report.json"), str(tmp_path / "report.html")),
    )
    outcome = deliver(execute(request, PlainOrchestrator()), request)
    assert (tmp_path / "report.html").stat().st_size > 1000
    assert CANARY not in outcome.report.to_json() + repr(outcome.report)
    assert leaks(tmp_path) == []
    assert CANARY not in caplog.text + "".join(capfd.readouterr())


def _nowhere(folder: Path) -> QueryRequest:
    return QueryRequest("SELECT * FROM t", tables=str(folder), engine="duckdb", store=str(folder / "store"))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda folder: Ledger.open(ADDRESS),
        lambda folder: Ledger.open(ADDRESS.replace("postgresql", "oracle")),
        lambda folder: Ledger.open(ADDRESS.replace("/ledger", "")),
        lambda folder: Ledger.open(f"postgresql://ebb:{CANARY}@[::1/ledger"),
        lambda folder: Ledger.open(f"postgresql://ebb@127.0.0.1:9/ledger?password={CANARY}"),
        lambda folder: execute(_nowhere(folder), PlainOrchestrator()),
        lambda folder: QueryRequest("SELECT 1", tables=str(folder), engine="mysql", conf={"k": CANARY}),
    ],
    ids=["away", "kind", "no database", "broken", "query", "no tables", "engine"],
)
def test_errors_show_no_secret(
    wrong: Callable[[Path], object], tmp_path: Path, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(EbbflowError) as caught:
        wrong(tmp_path)
    assert CANARY not in messages(caught.value)
    assert CANARY not in caplog.text
    assert leaks(tmp_path) == []


def test_a_request_of_a_loop_shows_no_password() -> None:
    assert CANARY not in repr(CapacityRequest(ledger=ADDRESS))


def test_a_pipelines_secrets_are_references_until_they_are_needed(tmp_path: Path) -> None:
    (tmp_path / "fit.py").write_text("")
    pipeline = parse_pipeline(PIPELINE, "pipeline.yaml", str(tmp_path))
    assert CANARY not in repr(pipeline)
    assert "${env:HF_TOKEN}" in repr(pipeline)
    with pytest.raises(EbbflowError) as caught:
        parse_pipeline(PIPELINE.replace("script: fit.py", "script: none.py"), "pipeline.yaml", str(tmp_path))
    assert CANARY not in messages(caught.value)


def test_a_ledger_holds_what_apps_say_and_nothing_of_their_environment(tmp_path: Path) -> None:
    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
        ledger.write([AppEntered(AppSpec("fit", "training", gpus=1, resume={"script": "fit.py"}))])
        assert "fit" in ledger.state().apps
    with sqlite3.connect(tmp_path / "ledger.db") as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    assert leaks(tmp_path) == []


@pytest.mark.processes
def test_a_training_that_fails_writes_nothing_of_its_environment(
    tmp_path: Path, home: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    from ebbflow.tasks.report.training import deliver
    from ebbflow.tasks.training.request import TrainingRequest
    from ebbflow.tasks.training.run import run_training

    script = tmp_path / "fails.py"
    script.write_text(
        "import os\n"
        "from ebbflow.infra.training import ElasticRun\n"
        "with ElasticRun.start() as run:\n"
        "    assert os.environ['HF_TOKEN']  # a script may read it\n"
        "    raise ValueError('no such data')\n"
    )
    request = TrainingRequest(
        str(script),
        run_id="fails",
        runs_dir=str(tmp_path / "runs"),
        report=(str(tmp_path / "report.json"), str(tmp_path / "report.html")),
    )
    report = run_training(request)
    deliver(report, request)
    assert (tmp_path / "report.html").stat().st_size > 1000
    assert report.state == "failed"
    assert "no such data" in report.reason
    assert os.environ["HF_TOKEN"] == SECRETS["HF_TOKEN"]
    assert CANARY not in report.to_json()
    assert leaks(tmp_path) == []
    assert CANARY not in caplog.text + "".join(capfd.readouterr())
