"""Queries in sessions of Spark Connect: the rows of DuckDB, a server that is lost, and what is the caller's."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.errors import EngineUnavailableError
from ebbflow.infra.spark.connect.engine import ConnectEngine
from ebbflow.infra.spark.connect.session import end_session, open_session
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.query.listening import NullQueryListener
from ebbflow.tasks.query.opening import engine_in, request_in
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, QueryOutcome, execute
from tests.connect.conftest import ConnectServer

pytestmark = pytest.mark.spark

Q5 = (Path(__file__).parents[2] / "flows/tpch/q5.sql").read_text()


@pytest.fixture(scope="module", name="tpch")
def _tpch(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tpch")
    command = [str(Path(sys.executable).with_name("tpchgen-cli")), "parquet", "-s", "0.01"]
    subprocess.run([*command, "--output-dir", str(folder)], check=True, capture_output=True, timeout=120)
    return str(folder)


@pytest.fixture(name="session")
def _session(server: ConnectServer) -> Iterator[Any]:
    """Return a session as a caller may have it: with settings of its own."""
    session = open_session(server.url, {"spark.sql.ansi.enabled": "false"})
    session.conf.set("spark.sql.session.timeZone", "America/New_York")
    yield session
    end_session(session)


def rows(outcome: QueryOutcome) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = outcome.to_arrow().to_pylist()
    return found


class Killer(NullQueryListener):
    """Ends the server once a stage is done."""

    def __init__(self, server: ConnectServer) -> None:
        self._server = server
        self.ended = 0

    def stage_ended(self, stage: object, report: Any) -> None:
        self.ended += report.status == "completed"
        if self.ended == 1 and report.status == "completed":
            self._server.kill()


def test_a_server_that_is_lost_ends_the_query_and_the_next_run_takes_its_stages(
    server: ConnectServer, tpch: str, tmp_path: Path
) -> None:
    request = QueryRequest(
        Q5, tables=tpch, master=server.url, store=str(tmp_path / "store"), materialize="every-join"
    )
    killer = Killer(server)
    with pytest.raises(EngineUnavailableError, match=r"does not answer any more.*finished stages are kept"):
        execute(request, PlainOrchestrator(killer))
    assert killer.ended >= 1
    with pytest.raises(EngineUnavailableError, match=r"no Spark Connect server at sc://127\.0\.0\.1"):
        execute(request)
    server.start()
    outcome = execute(request)
    expected = execute(QueryRequest(Q5, tables=tpch, engine="duckdb", store=str(tmp_path / "other")))
    assert rows(outcome) == rows(expected)
    report = outcome.report
    assert len(report.with_status("reused")) >= 1
    assert len(report.with_status("completed")) >= 1
    assert (report.engine, report.master) == ("spark", server.url)
    told = [note for note in report.problems if "Spark Connect" in note]
    assert told == [
        "Spark Connect tells of no executors, notices or tasks' times: the plan counts on the 2 cores that the "
        "server has now, whatever becomes of them",
        "all stages run on Spark SQL: Spark Connect runs SQL only",
    ]


def test_views_and_tables_of_a_given_session_are_read_with_its_settings_and_it_runs_on(
    session: Any, tpch: str, tmp_path: Path
) -> None:
    session.sql("CREATE DATABASE IF NOT EXISTS sales")
    session.sql("DROP TABLE IF EXISTS sales.kept")
    session.sql("CREATE TABLE sales.kept USING parquet AS SELECT * FROM VALUES (1, 10), (2, 20) AS t(k, v)")
    session.sql(
        "SELECT * FROM VALUES (1, 'one'), (2, 'two'), (2, 'deux') AS t(k, name)"
    ).createOrReplaceTempView("names")
    before = dict(session.conf.getAll)

    def run(sql: str, **options: Any) -> QueryOutcome:
        asked = QueryRequest(sql, store=str(tmp_path / "store"), materialize="every-join", **options)
        request = request_in(session, asked)
        with engine_in(session, request) as opened:
            return execute(request, opened=opened)

    text = (
        "SELECT n.name, sum(kept.v) AS v, max(kept.v / 0) AS nothing FROM sales.kept JOIN names n ON kept.k = n.k "
        "GROUP BY n.name"
    )
    assert sorted(rows(run(text, catalog=True)), key=lambda row: row["name"]) == [
        {"name": "deux", "v": 20, "nothing": None},
        {"name": "one", "v": 10, "nothing": None},
        {"name": "two", "v": 20, "nothing": None},
    ]
    of_files = run(Q5, tables=tpch)
    assert rows(of_files) == rows(
        execute(QueryRequest(Q5, tables=tpch, engine="duckdb", store=str(tmp_path / "other")))
    )
    assert dict(session.conf.getAll) == before
    assert session.sql("SELECT count(*) AS n FROM names").toArrow().to_pylist() == [{"n": 3}]
    with pytest.raises(OptionError, match="master is the session's own"):
        request_in(session, QueryRequest("SELECT 1 AS x", catalog=True, master="spark://h:7077"))


def test_what_a_session_cannot_be_given_is_refused(server: ConnectServer) -> None:
    with pytest.raises(OptionError, match=r"spark\.executor\.memory where its server is started"):
        open_session(server.url, {"spark.executor.memory": "1g"})
    with pytest.raises(OptionError, match=r"does not take spark\.sql\.warehouse\.dir"):
        open_session(server.url, {"spark.sql.warehouse.dir": "/nowhere"})
    session = open_session(server.url, {})
    with (
        closing(ConnectEngine(session)) as engine,
        pytest.raises(EngineUnavailableError, match=r"no client for s3://.*spark\.jars\.packages"),
    ):
        engine.confine([], [StorageLocation("s3://bucket/store")])
    end_session(session)
    stopped = open_session(server.url, {})
    end_session(stopped)
    with pytest.raises(OptionError, match="session has been stopped"):
        request_in(stopped, QueryRequest("SELECT 1 AS x", catalog=True))
