"""Faults of a ledger: killed writers, racing loops, full disks, locked files, forks."""

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection

from ebbflow.infra.errors import LedgerError, LedgerUnavailableError
from ebbflow.infra.ledger import Ledger, audit
from ebbflow.infra.ledger.database import database
from ebbflow.infra.ledger.database import sqlite as forks
from ebbflow.planners.model.ledger import FENCED, AppMoved, AppReport, CapacityChanged, Granted, LoopBegan
from tests.infra.ledger import ledger_child
from tests.infra.ledger.conftest import Place
from tests.infra.ledger.ledger_values import SetClock, app, until

ROOT = Path(__file__).parents[3]


def child(*arguments: str, **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-P", "-m", ledger_child.__name__, *arguments]
    return subprocess.Popen(command, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, **options)


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
        assert process.wait(150) == -signal.SIGKILL
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
    monkeypatch.setattr(database, "LOCK_TIMEOUT", 0.2)
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
    monkeypatch.setattr(database, "LOCK_TIMEOUT", 0.2)
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
    thread.join(150)
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
    with pytest.raises(LedgerError, match="cannot be a ledger: it is a directory"):
        Ledger.open(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot be a ledger: Not a directory"):
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
            thread.join(150)
        assert len(ledger.state().apps) == 5
        assert ledger.verify() == []


@pytest.mark.processes
def test_a_process_that_forked_in_the_middle_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_TIMEOUT", 0.1)
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
