"""Queries in sessions of Spark Connect: the rows of DuckDB, a server that is lost, and what is the caller's."""

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.errors import (
    EngineLostError,
    EngineUnavailableError,
    StageCancelledError,
    StageFailedError,
)
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.spark import relations
from ebbflow.infra.spark.connect import engine as connect_engine
from ebbflow.infra.spark.connect.engine import ConnectEngine
from ebbflow.infra.spark.connect.session import end_session, hurry, open_session
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.query.listening import NullQueryListener
from ebbflow.tasks.query.opening import engine_in, request_in
from ebbflow.tasks.query.planning import read_history
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, QueryOutcome, execute
from tests.connect.conftest import ConnectServer
from tests.infra.query.contract import make_job
from tests.tpch_tables import tpch_tables

pytestmark = pytest.mark.spark

Q5 = (Path(__file__).parents[2] / "flows/tpch/q5.sql").read_text()


@pytest.fixture(scope="module", name="tpch")
def _tpch() -> str:
    return str(tpch_tables(0.01))


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


@pytest.fixture(name="waits")
def _waits(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Return the seconds that each thread waits between tries, as they come."""
    from pyspark.sql.connect.client.retries import RetryPolicyState

    found: dict[int, float] = defaultdict(float)
    original = RetryPolicyState.next_attempt

    def counted(policy: RetryPolicyState, exception: BaseException | None = None) -> int | None:
        wait = original(policy, exception)
        found[threading.get_ident()] += (wait or 0) / 1_000
        return wait

    monkeypatch.setattr(RetryPolicyState, "next_attempt", counted)
    return found


def test_a_server_that_is_lost_ends_the_query_and_the_next_run_takes_its_stages(
    server: ConnectServer, tpch: str, tmp_path: Path, waits: dict[int, float]
) -> None:
    given = open_session(server.url, {})
    views = QueryRequest("SELECT 1 AS x", catalog=True)
    request_in(given, views)
    request = QueryRequest(
        Q5, tables=tpch, master=server.url, store=str(tmp_path / "store"), materialize="every-join"
    )
    asking = ConnectEngine(given)
    killer = Killer(server)
    with pytest.raises(EngineUnavailableError, match=r"does not answer any more.*finished stages are kept"):
        execute(request, PlainOrchestrator(killer))
    assert killer.ended >= 1
    assert waits[threading.get_ident()] < 5, "seconds for a server that is known to be gone; a stage waits 20"
    with pytest.raises(EngineUnavailableError, match=r"no Spark Connect server at sc://127\.0\.0\.1"):
        execute(request)
    hurry(asking._session)
    with pytest.raises(EngineLostError, match="does not answer any more"):
        asking.tables(["t"])
    asking.close()
    server.start()
    for _ in range(2):
        with pytest.raises(EngineLostError, match=r"was restarted, or has ended the session.*a new session"):
            request_in(given, views)
    with pytest.raises(EngineLostError, match="was restarted, or has ended the session"):
        ConnectEngine(given)
    end_session(given)
    outcome = execute(request)
    expected = execute(QueryRequest(Q5, tables=tpch, engine="duckdb", store=str(tmp_path / "other")))
    assert rows(outcome) == rows(expected)
    report = outcome.report
    assert len(report.with_status("reused")) >= 1
    assert len(report.with_status("completed")) >= 1
    assert (report.engine, report.master) == ("spark", server.url)
    assert read_history(ParquetCheckpointStore(request.store_place), request) == [], "no times are known"
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


def test_both_sessions_are_kept_while_a_query_runs_and_its_watcher_alone_tells_the_server_of_a_cancellation(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.sql.connect.client import SparkConnectClient

    asked: set[str] = set()
    told: set[str] = set()
    config, interrupt = SparkConnectClient.config, SparkConnectClient.interrupt_all

    def counted(client: SparkConnectClient, operation: Any) -> Any:
        if threading.current_thread().name.startswith("watch-"):
            asked.add(client._session_id)
        return config(client, operation)

    def noted(client: SparkConnectClient) -> Any:
        told.add(threading.current_thread().name)
        return interrupt(client)

    monkeypatch.setattr(SparkConnectClient, "config", counted)
    monkeypatch.setattr(SparkConnectClient, "interrupt_all", noted)
    monkeypatch.setattr(connect_engine, "_KEPT", -1.0)
    policies = session.client.get_retry_policies()
    progress = threading.Event()
    errors: list[Exception] = []
    with closing(ConnectEngine(session)) as engine:
        job = make_job("SELECT count(*) AS n FROM range(0, 100000000000000)", out=tmp_path)

        def run() -> None:
            try:
                engine.run(job, lambda _: progress.set())
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert progress.wait(150)
        for _ in range(600):
            if {session.client._session_id, engine._session.client._session_id} <= asked:
                break
            time.sleep(0.25)
        engine.cancel(job.id)
        thread.join(150)
    assert {session.client._session_id, engine._session.client._session_id} <= asked
    assert [type(error) for error in errors] == [StageCancelledError]
    assert told == {f"watch-{job.id}"}
    assert session.client.get_retry_policies() == policies, "the caller's own"
    assert session.sql("SELECT 1 AS x").toArrow().to_pylist() == [{"x": 1}]


def test_a_server_that_may_not_write_is_told_how_to_share(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyspark.errors.exceptions.connect import SparkException

    def denied(frame: Any, job: Any) -> None:
        raise SparkException(
            "org.apache.hadoop.security.AccessControlException: Permission denied: user=spark"
        )

    monkeypatch.setattr(relations, "write", denied)
    with (
        closing(ConnectEngine(session)) as engine,
        pytest.raises(StageFailedError, match=r"Permission denied.*EBBFLOW_SHARE=group.*install -d -m 2770"),
    ):
        engine.run(make_job("SELECT 1 AS x", out=tmp_path))
