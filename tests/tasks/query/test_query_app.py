"""Queries as apps: no leases, their share by weight, their re-plans and progress in the ledger."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebbflow.infra.errors import StageCancelledError, StorageFullError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.ledger import Decided
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.tasks.apps.agent import AgentIntervals
from ebbflow.tasks.query.app import run_query_app
from ebbflow.tasks.query.app_requests import AppFolder, query_spec
from ebbflow.tasks.query.listening import NullQueryListener
from ebbflow.tasks.query.report import QueryReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, QueryOutcome
from ebbflow.tasks.report.delivery import deliver
from tests.tasks.apps.app_loops import ScriptedLoop, begin, until

PACE = AgentIntervals(look=0.02, report=0.1, parting=150.0)
SQL = (
    "SELECT n_name, count(*) AS orders FROM customer JOIN orders ON c_custkey = o_custkey "
    "JOIN nation ON c_nationkey = n_nationkey GROUP BY n_name"
)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[ScriptedLoop]:
    with ScriptedLoop(tmp_path / "ledger.db", {}) as loop:
        yield loop


def request(tpch: str, tmp_path: Path, **options: object) -> QueryRequest:
    return QueryRequest(SQL, tables=tpch, engine="duckdb", store=str(tmp_path / "store"), **options)  # type: ignore[arg-type]


def test_a_query_enters_runs_and_tells(tpch: str, tmp_path: Path, loop: ScriptedLoop) -> None:
    asked = request(tpch, tmp_path, name="orders by nation")
    spec = query_spec(asked, "q", team="sales", weight=2.0, deadline=9e9)
    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
        outcome = run_query_app(asked, spec, ledger, pace=PACE)
    record = loop.state.apps["q"]
    assert (record.phase, record.reason) == ("finished", f"{outcome.report.rows} rows")
    assert record.spec.deadline == 9e9
    assert (record.spec.gpus, record.spec.max_gpus) == (0, 0)
    assert record.checkpoint == outcome.result.uri
    decisions = [e.change for e in loop.ledger.events(app="q", kinds=[Decided])]
    assert [d.kind for d in decisions if isinstance(d, Decided)] == ["replan"] * len(outcome.report.decisions)
    first = decisions[0]
    assert isinstance(first, Decided)
    assert first.reason == outcome.report.decisions[0].reason
    assert {c["plan"] for c in first.inputs["candidates"]} >= {first.outcome["chosen"]}
    report = loop.report("q")
    assert (report.progress, report.seconds_left, report.phase) == (1.0, 0.0, "finished")
    assert {one["status"] for one in report.job["stages"]} <= {"completed", "reused", "cancelled"}
    assert not list((tmp_path / "store" / "apps").iterdir()), "nothing is left to be started again"


def test_a_query_can_be_stopped_and_goes_on_from_its_stages(
    tpch: str, tmp_path: Path, loop: ScriptedLoop
) -> None:
    asked = request(tpch, tmp_path, materialize="every-join")
    spec = query_spec(asked, "q")
    stop, going = threading.Event(), threading.Event()

    class Stopping(NullQueryListener):
        def stage_started(self, stage: Stage) -> None:
            stop.set()
            going.wait(0.5)  # the driver's thread: the stop comes before the next stage

    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
        run = begin(run_query_app, asked, spec, ledger, PlainOrchestrator(Stopping()), stop=stop, pace=PACE)
        error = run.exception(150)
        if error is not None:  # unless the last stage was faster
            assert isinstance(error, StageCancelledError)
            assert loop.phase("q") == "stopped"
            assert AppFolder(asked.store_place, "q").load().sql == SQL
        again = run_query_app(asked, spec, ledger, pace=PACE)
    assert again.report.rows > 0
    assert loop.phase("q") == "finished"


def test_a_failed_query_is_failed(tpch: str, tmp_path: Path, loop: ScriptedLoop) -> None:
    asked = QueryRequest(
        "SELECT nothing FROM customer", tables=tpch, engine="duckdb", store=str(tmp_path / "store")
    )
    with Ledger.open(str(tmp_path / "ledger.db")) as ledger, pytest.raises(Exception, match="nothing"):
        run_query_app(asked, query_spec(asked, "q"), ledger, pace=PACE)
    until(lambda: loop.phase("q") == "failed", "phase")
    assert "nothing" in loop.state.apps["q"].reason


def test_what_a_query_was_asked_to_write_is_there_before_its_app_has_finished(
    tpch: str, tmp_path: Path, loop: ScriptedLoop
) -> None:
    asked = request(
        tpch, tmp_path, output=str(tmp_path / "rows.parquet"), report=(str(tmp_path / "report.json"),)
    )
    phases: list[str] = []

    def full(outcome: QueryOutcome, request: QueryRequest) -> None:
        raise StorageFullError("no space left")

    def watched(outcome: QueryOutcome, request: QueryRequest) -> None:
        deliver(outcome, request)
        phases.append(loop.phase("q"))

    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:
        with pytest.raises(StorageFullError):
            run_query_app(asked, query_spec(asked, "q"), ledger, pace=PACE, deliver=full)
        until(lambda: loop.phase("q") == "failed", "phase")
        assert AppFolder(asked.store_place, "q").load() == asked
        outcome = run_query_app(asked, query_spec(asked, "q"), ledger, pace=PACE, deliver=watched)
    assert "finished" not in phases
    assert loop.phase("q") == "finished"
    assert QueryReport.from_json((tmp_path / "report.json").read_text()) == outcome.report
    assert (tmp_path / "rows.parquet").is_file()


def test_requests_of_queries_are_kept_without_secrets(tpch: str, tmp_path: Path) -> None:
    conf = {"spark.hadoop.fs.s3a.secret.key": "hush", "spark.executor.cores": "2", "spark.x.token": "hush"}
    asked = QueryRequest(SQL, tables=tpch, engine="spark", store=str(tmp_path / "store"), conf=conf)
    folder = AppFolder(asked.store_place, "q")
    folder.keep(asked)
    path = Path(folder.file.root)
    assert "hush" not in path.read_text()
    assert json.loads(path.read_text())["left_out"] == ["spark.hadoop.fs.s3a.secret.key", "spark.x.token"]
    given = {"spark.x.token": "t", "spark.hadoop.fs.s3a.secret.key": "k"}
    assert folder.load(given).conf == {"spark.executor.cores": "2"} | given
    with pytest.raises(
        OptionError, match=r"holds secrets: spark\.hadoop\.fs\.s3a\.secret\.key; submit the query"
    ):
        folder.load({"spark.x.token": "t"})
    with pytest.raises(
        OptionError, match=r"secret\.key, spark\.x\.token; submit the query again under this id"
    ):
        folder.load()
    with pytest.raises(OptionError, match="id holds letters"):
        AppFolder(asked.store_place, "../q")
    whole = path.read_bytes()
    flipped = whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:]
    for damaged in (b"{", whole.replace(b"SELECT", b"SELECU"), flipped):
        path.write_bytes(damaged)
        with pytest.raises(OptionError, match="is damaged"):
            folder.load(given)
