"""A check finds all that can be known of a pipeline without starting anything, and so does a run before it starts."""

from pathlib import Path
from typing import Any

import pytest
from pipelines import changed, content, text_of

from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import EbbflowError, OptionError, PipelineFileError
from ebbflow.tasks.pipeline import run as running
from ebbflow.tasks.pipeline.run import CheckedPipeline, PipelineRequest, check_pipeline, run_steps


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep runs and stores in a directory of the test's own."""
    monkeypatch.setenv("EBBFLOW_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    return tmp_path / "home"


def check(plain: dict[str, Any], place: Path, **request: Any) -> CheckedPipeline:
    file = place / "shop.yaml"
    file.write_text(text_of(plain))
    return check_pipeline(PipelineRequest(str(file), **request))


def line_of(folder: Path, words: str) -> int:
    """Return the first line of the file that holds ``words``, from 1."""
    lines = (folder / "shop.yaml").read_text().splitlines()
    return next(n for n, line in enumerate(lines, 1) if words in line)


def test_a_right_file_is_right_and_all_of_it_was_checked(tmp_path: Path, home: Path) -> None:
    checked = check(content(tmp_path), tmp_path)
    assert checked.unchecked == ()
    assert list(checked.pipeline.steps) == ["orders", "fit", "tune"]
    assert not home.exists()


@pytest.mark.parametrize(
    ("path", "value", "near", "rule"),
    [
        ("queries.orders.sql", "SELEC 1", "sql:", "SQL does not parse|only queries"),
        ("queries.orders.sql", "SELECT x FROM pairz", "sql:", "unknown table 'pairz'; did you mean 'pairs'"),
        ("queries.orders.sql", "SELECT twise FROM pairs", "sql:", "unknown column 'twise'; did you mean 'twice'"),
        ("queries.orders.sql", "SELECT 1; SELECT 2", "sql:", "exactly one query is needed"),
        ("queries.orders.tables", "fit.py", "tables:", "no Parquet|fit.py"),
        ("trainings.fit.gpus", 99, "gpus: 99", "needs 99 GPUs; the pools of kind gpu have 3 at most"),
        ("trainings.fit.script", "gone.py", "script: gone", "script must be a Python file; there is none"),
        ("trainings.fit.environment", {"KEY": "${env:NO_SUCH_KEY}"}, "KEY:", "NO_SUCH_KEY; set it first"),
        ("trainings.fit.failure_rules", "fit.py", "failure_rules:", "is no failure table"),
        ("tunings.tune.gpus", 3, "gpus: 3", "needs 3 GPUs; the quota of team research is 2"),
        ("loop.policy", "no:policy", "policy:", "--allow-policy no:policy"),
        ("loop.policy", "thems", "policy:", "the nearest is 'themis'"),
        ("quotas.pools", {"gpx": {"max_nodes": 1}}, "gpx:", "there is no pool 'gpx'; pools are gpu"),
        ("store", "fit.py/below", "store:", "cannot write to 'fit.py/below'"),
        ("trainings.fit.spill_dir", "fit.py", "spill_dir:", "cannot write to 'fit.py'"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_found_with_its_line(
    path: str, value: Any, near: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    plain = changed(content(tmp_path), path, value)
    with pytest.raises(PipelineFileError, match=rule) as found:
        check(plain, tmp_path)
    lines = {int(line.split("shop.yaml:")[1].split(":")[0]) for line in str(found.value).splitlines()}
    section = path.split(".")[-2] if "." in path else path
    assert lines <= {line_of(tmp_path, near), line_of(tmp_path, f"{section}:")}
    assert not home.exists()

    # a run says the same, before anything is made or started
    monkeypatch.setattr(running, "opened_site", lambda *_, **__: pytest.fail("a site was opened"))
    with pytest.raises(PipelineFileError, match=rule):
        run_steps(PipelineRequest(str(tmp_path / "shop.yaml")))
    assert not home.exists()


def test_all_findings_are_said_at_once(tmp_path: Path) -> None:
    plain = content(tmp_path)
    plain["queries"]["orders"]["sql"] = "SELECT nothing FROM pairs"
    plain["trainings"]["fit"] |= {"gpus": 99, "environment": {"KEY": "${env:NO_SUCH_KEY}"}}
    plain["tunings"]["tune"]["script"] = "gone.py"
    with pytest.raises(PipelineFileError) as found:
        check(plain, tmp_path)
    said = str(found.value).splitlines()
    assert len(said) == 4
    assert [int(line.split("shop.yaml:")[1].split(":")[0]) for line in said] == sorted(
        int(line.split("shop.yaml:")[1].split(":")[0]) for line in said
    )


def test_a_query_on_anothers_result_is_checked_against_its_columns(tmp_path: Path) -> None:
    plain = content(tmp_path)
    plain["queries"]["orders"]["sql"] = "SELECT x, twice AS double FROM pairs"
    plain["queries"]["more"] = {
        "team": "sales",
        "sql": "SELECT dubble FROM orders",
        "tables": "${queries.orders.path}",
    }
    with pytest.raises(
        PipelineFileError, match=r"queries\.more\.sql: unknown column 'dubble'; did you mean 'double'"
    ):
        check(plain, tmp_path)
    plain["queries"]["more"]["sql"] = "SELECT double FROM orders"
    assert check(plain, tmp_path).unchecked == ()
    plain["queries"]["more"]["tables"] = ["${queries.orders.path}", str(tmp_path / "tables")]
    plain["queries"]["orders"]["output"] = "pairs"
    plain["queries"]["more"]["sql"] = "SELECT double FROM pairs"
    with pytest.raises(PipelineFileError, match="tables must have different names; pairs is in"):
        check(plain, tmp_path)


def test_what_could_not_be_checked_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = content(tmp_path)
    plain["queries"]["orders"] |= {"tables": "s3://lake/tpch", "sql": "SELECT a FROM b"}
    (why,) = check(plain, tmp_path).unchecked
    assert "queries.orders" in why
    assert "s3://lake/tpch is not on this machine" in why
    plain["queries"]["orders"]["sql"] = "SELECT FROM WHERE"
    with pytest.raises(PipelineFileError, match="SQL does not parse"):
        check(plain, tmp_path)


def test_the_ledger_of_a_cluster_that_is_there_already_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = content(tmp_path)
    plain["cluster"] = {"existing": {"ledger": "${env:NO_SUCH_KEY}", "fleet": "nothing"}}
    with pytest.raises(PipelineFileError) as found:
        check(plain, tmp_path)
    assert "NO_SUCH_KEY; set it first" in str(found.value)
    assert "there is no local fleet 'nothing'" in str(found.value)
    monkeypatch.setenv("NO_SUCH_KEY", str(tmp_path / "ledger.db"))
    plain["cluster"] = {"existing": {"ledger": "${env:NO_SUCH_KEY}"}}
    del plain["trainings"]["fit"]["arguments"]
    with pytest.raises(PipelineFileError, match=r"trainings\.fit: trainings and elastic jobs need nodes"):
        check(plain, tmp_path)
    del plain["trainings"], plain["tunings"]
    with pytest.raises(PipelineFileError, match=r"there is no ledger .*ledger\.db"):
        check(plain, tmp_path)
    Ledger.open(str(tmp_path / "ledger.db"), cluster="local").close()
    check(plain, tmp_path)
    monkeypatch.setenv("NO_SUCH_KEY", "postgresql://somebody@nowhere.invalid/ebbflow")
    assert any("nowhere.invalid" in one for one in check(plain, tmp_path).unchecked)


def test_places_that_cannot_be_written_and_an_id_that_is_taken_are_refused(
    tmp_path: Path, home: Path
) -> None:
    plain = content(tmp_path)
    for name in ("page.html", "outcome.json"):
        with pytest.raises(OptionError, match="report: cannot write to"):
            check(plain, tmp_path, report=(str(tmp_path / "fit.py" / name),))
    with pytest.raises(OptionError, match="runs_dir: cannot write to"):
        check(plain, tmp_path, runs_dir=str(tmp_path / "fit.py"))
    assert not home.exists()
    taken = tmp_path / "runs" / "mine"
    taken.mkdir(parents=True)
    (taken / "run.json").write_text("{}")
    with pytest.raises(EbbflowError, match="there is a run 'mine' already"):
        check(plain, tmp_path, runs_dir=str(tmp_path / "runs"), run_id="mine")
