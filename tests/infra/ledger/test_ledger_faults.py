"""Killed writers, racing loops, full disks, locked files, and servers that stop, hang or lose connections."""

import os
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from ebbflow.infra.errors import LedgerError, LedgerUnavailableError
from ebbflow.infra.ledger import Ledger, audit, database, forks
from ebbflow.planners.model.ledger import (
    FENCED,
    AppMoved,
    AppReport,
    CapacityChanged,
    Granted,
    LoopBegan,
)
from tests.infra.ledger import ledger_child
from tests.infra.ledger.conftest import Place
from tests.infra.ledger.ledger_values import SetClock, app, until
from tests.infra.ledger.postgres import PASSWORD, Server

CHILD = str(Path(ledger_child.__file__))


def child(*arguments: str, **options: Any) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, CHILD, *arguments], text=True, **options)


@pytest.mark.processes
def test_a_writer_killed_at_any_point_leaves_a_whole_ledger(place: Place, tmp_path: Path) -> None:
    rng = random.Random(20)
    told = tmp_path / "told"
    told.touch()
    seen = 0
    for round_ in range(2 if place.sqlite else 1):
        process = child("write", place.url, place.cluster, str(told), str(round_))
        wanted = seen + rng.randint(1, 60)
        until(lambda wanted=wanted, process=process: process.poll() is not None or _lines(told) >= wanted)  # type: ignore[misc]
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == -signal.SIGKILL
        seen = _lines(told)
        ledger = place.open()
        last = int(told.read_text().split("\n")[seen - 1])
        assert ledger.state().number >= last, "a write that had returned is gone"
        assert ledger.verify() == []
        assert audit(ledger.events(limit=100_000)) == []
        ledger.close()
    assert seen


def _lines(path: Path) -> int:
    return path.read_text().count("\n")


@pytest.mark.processes
def test_of_two_loops_that_race_only_the_one_that_leads_writes(place: Place) -> None:
    ledger = place.open()
    processes = [child("race", place.url, place.cluster, name, "40") for name in ("left", "right")]
    assert [process.wait(240) for process in processes] == [0, 0]
    leader, tokens = "", []
    for event in ledger.events(limit=100_000):
        change = event.change
        if isinstance(change, LoopBegan):
            leader = change.holder
            tokens.append(change.token)
        elif isinstance(change, Granted):
            assert {lease.reason for lease in change.leases} == {leader}
        elif isinstance(change, FENCED) and not isinstance(change, CapacityChanged):
            assert change.reason == leader
    assert tokens == list(range(1, len(tokens) + 1))
    assert len(tokens) > 2, "they never raced"
    assert ledger.verify() == []
    assert audit(ledger.events(limit=100_000)) == []


@pytest.mark.processes
def test_a_full_disk_leaves_nothing_half_written(tmp_path: Path) -> None:
    path = str(tmp_path / "ledger.db")
    process = child("fill", path, "local", stdout=subprocess.PIPE)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    assert "refused: cannot write to the ledger" in said
    assert "disk" in said
    assert said.endswith("verified\n")
    with Ledger.open(path) as ledger:
        assert ledger.verify() == []
        assert audit(ledger.events(limit=100_000)) == []


def test_a_file_that_stays_locked_is_told_of_and_used_again_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PATIENCE", 0.2)
    ledger = Ledger.open(str(tmp_path / "ledger.db"))
    other = sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    for attempt in (
        lambda: ledger.write([app("a")]),
        lambda: ledger.report("a", AppReport(1.0)),
        lambda: ledger.lead("x"),
    ):
        with pytest.raises(LedgerUnavailableError, match="locked"):
            attempt()
    assert ledger.state().number == 0  # reading goes on
    assert ledger.reports() == {}
    other.execute("ROLLBACK")
    other.close()
    ledger.write([app("a")])
    assert ledger.verify() == []
    ledger.close()


def test_a_thread_that_writes_for_too_long_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PATIENCE", 0.2)
    ledger = Ledger.open(str(tmp_path / "ledger.db"))
    inside, leave = threading.Event(), threading.Event()

    def slow(connection: Connection) -> None:
        inside.set()
        leave.wait(60)

    thread = threading.Thread(target=ledger._database.transact, args=("be slow", slow))
    thread.start()
    assert inside.wait(60)
    with pytest.raises(LedgerUnavailableError, match="another thread has been writing"):
        ledger.write([app("a")])
    leave.set()
    thread.join(60)
    ledger.write([app("a")])
    ledger.close()


@pytest.mark.parametrize(
    "content",
    [b"no database at all, but long enough to be looked at" * 40, b"SQLite format 3\x00" + b"\xff" * 4096],
)
def test_a_file_that_is_no_ledger_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    path.write_bytes(content)
    with pytest.raises(LedgerError, match=r"no SQLite database|damaged"):
        Ledger.open(str(path))
    assert path.read_bytes() == content


def test_a_folder_is_no_ledger(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match="cannot open the ledger"):
        Ledger.open(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerUnavailableError, match="cannot make"):
        Ledger.open(str(tmp_path / "file" / "ledger.db"))


@pytest.mark.parametrize("after", ["moved", "moved and begun anew", "removed"])
def test_a_file_that_goes_while_it_is_open_is_noticed(after: str, tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger.open(str(path)) as ledger:
        lead = ledger.lead("loop")
        for name in os.listdir(tmp_path):
            if after == "removed":
                (tmp_path / name).unlink()
            else:
                (tmp_path / name).rename(tmp_path / f"old-{name}")
        other = Ledger.open(str(path)) if after == "moved and begun anew" else None
        said = "was replaced" if other is not None else "removed or replaced"
        for attempt in (ledger.state, lambda: lead.write([app("a")])):
            with pytest.raises(LedgerError, match=said):
                attempt()
        if other is not None:
            assert other.state().number == 0
            other.close()


@pytest.mark.processes
def test_a_process_that_forked_may_go_on_with_its_ledger(place: Place) -> None:
    ledger = place.open()
    ledger.write([app("a")])

    def work() -> None:
        ledger.write([AppMoved("a", "running", "by the child")])
        ledger.report("a", AppReport(3.0))

    assert _forked(work) == 0
    ledger.write([AppMoved("a", "finished")])
    assert [e.number for e in ledger.events()] == [1, 2, 3]
    assert ledger.reports()["a"].at == 3.0
    assert ledger.verify() == []


@pytest.mark.processes
def test_a_fork_waits_for_transactions_and_inherits_no_connection(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with Ledger.open(str(path)) as ledger:
        over = threading.Event()

        def poll() -> None:
            while not over.is_set():
                ledger.state()

        threads = [threading.Thread(target=poll) for _ in range(4)]
        for thread in threads:
            thread.start()

        def work() -> None:
            files = {os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")}
            assert not any(file.startswith(str(path)) for file in files), files
            ledger.write([app(f"child-{os.getpid()}")])

        assert [_forked(work) for _ in range(5)] == [0] * 5
        over.set()
        for thread in threads:
            thread.join(60)
        assert len(ledger.state().apps) == 5
        assert ledger.verify() == []


@pytest.mark.processes
def test_a_process_that_forked_in_the_middle_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_PATIENCE", 0.1)
    with Ledger.open(str(tmp_path / "ledger.db")) as ledger:

        def work() -> None:
            with pytest.raises(LedgerError, match="forked while"):
                ledger.state()

        assert ledger._database.read("fork", lambda connection: _forked(work)) == 0
        ledger.write([app("a")])


def _forked(work: Callable[[], object]) -> int:
    """Return the exit status of a child that does ``work``."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- PostgreSQL ---------------------------------------------------------------------------------------------


@pytest.fixture
def on_server(postgres: Server, request: pytest.FixtureRequest) -> Iterator[Ledger]:
    with Ledger.open(postgres.url, cluster=request.node.name) as ledger:
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
    monkeypatch.setattr(database, "SILENCE", dict.fromkeys(database.SILENCE, 1.0))
    monkeypatch.setattr(database, "CONNECT", 2.0)
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
    monkeypatch.setattr(database, "PATIENCE", 0.2)
    with Ledger.open(postgres.url, cluster="locked") as ledger:
        ledger.write([app("a")])
        inside, leave = threading.Event(), threading.Event()

        def slow(connection: Connection) -> None:
            connection.exec_driver_sql("SELECT 1 FROM ledger_clusters WHERE cluster = 'locked' FOR UPDATE")
            inside.set()
            leave.wait(60)

        thread = threading.Thread(target=ledger._database.transact, args=("be slow", slow))
        thread.start()
        assert inside.wait(60)
        with pytest.raises(LedgerUnavailableError, match="held the cluster's row for too long"):
            ledger.write([app("b")])
        ledger.report("a", AppReport(1.0))  # does not wait for it
        leave.set()
        thread.join(60)
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


def test_a_file_that_others_write_to_is_switched_to_its_log_once_they_are_done(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("CREATE TABLE theirs (x)")
    other.execute("BEGIN IMMEDIATE")
    other.execute("INSERT INTO theirs VALUES (1)")

    class Busy(SetClock):
        """While it lets no time pass, the other goes on for many attempts."""

        attempts = 0

        def sleep(self, seconds: float) -> None:
            self.attempts += 1
            if self.attempts == 300:
                other.execute("COMMIT")

    clock = Busy()
    with Ledger.open(str(path), clock=clock) as ledger:
        assert clock.attempts == 300
        ledger.write([app("a")])
    other.close()
