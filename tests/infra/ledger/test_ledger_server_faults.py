"""Faults of a ledger on a PostgreSQL server: connections that are cut, silence, locks, refusals."""

import os
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy import Connection

from ebbflow.infra.errors import LedgerError, LedgerUnavailableError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.ledger.database import database
from ebbflow.planners.model.ledger import AppMoved, AppReport
from tests.infra.ledger.ledger_values import app, until
from tests.infra.ledger.postgres import PASSWORD, Server


@pytest.fixture
def on_server(postgres: Server, request: pytest.FixtureRequest) -> Iterator[Ledger]:
    with Ledger.open(postgres.url, cluster=re.sub(r"[^\w.-]", "-", request.node.name)) as ledger:
        yield ledger


def test_a_server_that_goes_and_comes_is_told_of_and_used_again(postgres: Server, on_server: Ledger) -> None:
    ledger = on_server
    ledger.write([app("a")])
    lead = ledger.lead("loop")
    postgres.stop("fast")
    try:
        for attempt in (ledger.state, ledger.reports, lead.renew, lambda: ledger.write([app("b")])):
            with pytest.raises(LedgerUnavailableError) as told:
                attempt()
            assert not told.value.unsure
        with pytest.raises(LedgerUnavailableError):
            Ledger.open(postgres.url)
    finally:
        postgres.start()
    assert set(ledger.state().apps) == {"a"}
    ledger.write([app("b")])
    lead.renew()
    assert ledger.verify() == []


def test_connections_that_were_cut_are_made_again_unnoticed(postgres: Server, on_server: Ledger) -> None:
    ledger = on_server
    ledger.write([app("a")])
    others = "usename = 'tester' AND pid <> pg_backend_pid()"
    cut = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"
    for n in range(3):
        postgres.sql(cut)
        assert ledger.state().number == n + 1
        postgres.sql(cut)
        ledger.write([app(f"b{n}")])
    assert ledger.verify() == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_connection_lost_while_committing_neither_loses_nor_repeats(
    when: str, on_server: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = on_server
    lead = ledger.lead("loop")
    real = Connection.commit
    cuts: list[int] = []

    def commit(connection: Connection) -> None:
        if cuts:
            real(connection)
            return
        if when == "after":
            real(connection)
        cuts.append(1)
        _cut(connection)
        connection.exec_driver_sql("SELECT 1") if when == "after" else real(connection)

    monkeypatch.setattr(Connection, "commit", commit)
    ledger.write([app("a")])
    assert cuts
    cuts.clear()
    lead.write([app("b"), AppMoved("b", "running")])
    cuts.clear()
    second = ledger.lead("loop")
    assert (second.token, ledger.state().token) == (2, 2)
    assert [e.number for e in ledger.events()] == [1, 2, 3, 4, 5]
    assert ledger.verify() == []


def test_a_commit_that_the_server_is_still_busy_with_is_waited_for(
    postgres: Server, on_server: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection is lost while the server makes a change final, which takes it a second."""
    cluster = on_server.cluster
    body = "BEGIN PERFORM pg_sleep(1); RETURN NULL; END"
    postgres.sql(
        f"CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $${body}$$; "
        "CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON ledger_events DEFERRABLE INITIALLY DEFERRED "
        f"FOR EACH ROW WHEN (NEW.cluster = '{cluster}' AND NEW.number = 1) EXECUTE FUNCTION slow()",
        "ledger",
    )
    assert on_server.state().number == 0
    real, cuts = Connection.commit, list[threading.Timer]()

    def commit(connection: Connection) -> None:
        if not cuts:
            cuts.append(threading.Timer(0.3, _cut, (connection,)))
            cuts[0].start()
        real(connection)

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "commit", commit)
            on_server.write([app("a")])
    finally:
        cuts[0].join()
        postgres.sql("DROP FUNCTION slow CASCADE", "ledger")
    assert [e.number for e in on_server.events()] == [1]
    assert on_server.verify() == []


def test_a_commit_whose_fate_is_unknown_says_so(
    postgres: Server, on_server: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Connection.commit
    assert on_server.state().number == 0

    def commit(connection: Connection) -> None:
        real(connection)
        postgres.stop("fast")
        connection.exec_driver_sql("SELECT 1")

    try:
        with monkeypatch.context() as patch:
            patch.setattr(Connection, "commit", commit)
            with pytest.raises(LedgerUnavailableError) as told:
                on_server.write([app("a")])
        assert told.value.unsure
    finally:
        postgres.start()
    assert set(on_server.state().apps) == {"a"}


def _cut(connection: Connection) -> None:
    raw: Any = connection.connection.driver_connection
    with socket.socket(fileno=os.dup(raw.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)


@pytest.mark.processes
def test_a_server_that_falls_silent_is_given_up(postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "SILENCE", dict.fromkeys(database.SILENCE, 2.0))
    monkeypatch.setattr(database, "CONNECT", 4.0)
    with Ledger.open(postgres.url, cluster="silent") as ledger:
        ledger.write([app("a")])
        for attempt in (ledger.state, lambda: ledger.write([app("b")])):
            with postgres.silent(), pytest.raises(LedgerUnavailableError):
                attempt()
        until(lambda: _answers(ledger))
        assert ledger.verify() == []


def _answers(ledger: Ledger) -> bool:
    try:
        ledger.state()
    except LedgerUnavailableError:
        return False
    return True


def test_a_row_that_stays_locked_is_told_of(postgres: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "LOCK_TIMEOUT", 0.2)
    with Ledger.open(postgres.url, cluster="locked") as ledger:
        ledger.write([app("a")])
        inside, leave = threading.Event(), threading.Event()

        def slow(connection: Connection) -> None:
            connection.exec_driver_sql("SELECT 1 FROM ledger_clusters WHERE cluster = 'locked' FOR UPDATE")
            inside.set()
            leave.wait(150)

        thread = threading.Thread(target=ledger._database.transact, args=("be slow", slow))
        thread.start()
        assert inside.wait(150)
        with pytest.raises(LedgerUnavailableError, match="held the cluster's row for too long"):
            ledger.write([app("b")])
        ledger.report("a", AppReport(1.0))  # does not wait for it
        leave.set()
        thread.join(150)
        ledger.write([app("b")])


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("postgresql://secretive:wrong%2Fpass@/ledger?host={folder}", "password"),
        ("postgresql://secretive@/ledger?host={folder}&password=wrong%2Fpass", "password"),
        ("postgresql://tester:wrong%2Fpass@/nothing-there?host={folder}", "nothing-there"),
        ("postgresql://tester:wrong%2Fpass@127.0.0.1:1/ledger?connect_timeout=3", "refused"),
    ],
)
def test_a_server_that_refuses_is_told_of_without_the_password(
    postgres: Server, address: str, said: str
) -> None:
    with pytest.raises(LedgerError, match=said) as told:
        Ledger.open(address.format(folder=postgres.folder))
    error: BaseException | None = told.value
    while error is not None:
        for text in (str(error), repr(error)):
            assert "wrong/pass" not in text
            assert "wrong%2Fpass" not in text
        error = error.__cause__ or error.__context__


def test_a_role_with_a_password_may_use_the_ledger_but_not_show_it(
    postgres: Server, caplog: pytest.LogCaptureFixture
) -> None:
    from urllib.parse import quote

    postgres.sql(
        "GRANT ALL ON SCHEMA public TO secretive; GRANT CREATE ON DATABASE ledger TO secretive", "ledger"
    )
    postgres.sql("GRANT ALL ON ALL TABLES IN SCHEMA public TO secretive", "ledger")
    caplog.set_level("DEBUG")
    address = f"postgresql://secretive:{quote(PASSWORD, safe='')}@/ledger?host={postgres.folder}"
    with Ledger.open(address, cluster="secretive") as ledger:
        ledger.write([app("a")])
        lead = ledger.lead("x")
        shown = [
            repr(ledger),
            str(ledger.address),
            repr(ledger.address),
            repr(lead),
            repr(ledger.overview()),
            caplog.text,
        ]
    for text in shown:
        assert PASSWORD not in text
        assert quote(PASSWORD, safe="") not in text
