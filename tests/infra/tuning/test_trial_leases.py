"""Leases on trials: one process at a time has each, and those of a process that is gone go to others."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import LedgerError, LedgerUnavailableError
from ebbflow.infra.ledger.address import Address, parse
from ebbflow.infra.tuning.database import open_storage
from ebbflow.infra.tuning.leases import DatabaseLeases, SoleLeases
from tests.infra.ledger.postgres import Server, server

TIMEOUT = 40.0  # s, much longer than a test
PATIENCE = 60.0
_studies = itertools.count()


class StoppedClock(SystemClock):
    """The clock of a process that does nothing until it is let go on."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def wait(self, event: threading.Event, timeout: float) -> bool:
        while not self.go_on.wait(0.01):
            if event.is_set():
                return True
        return super().wait(event, timeout)


@pytest.fixture(scope="module")
def postgres() -> Iterator[Server]:
    with server() as found:
        yield found


@pytest.fixture(params=["sqlite", "postgresql"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> Address:
    if request.param == "sqlite":
        return parse(str(tmp_path / "study.db"))
    return parse(request.getfixturevalue("postgres").url)


@pytest.fixture
def process(address: Address) -> Iterator[Callable[..., DatabaseLeases]]:
    """Return a function that makes the leases of one more process, of the same study."""
    study = f"study-{next(_studies)}"
    made: list[DatabaseLeases] = []

    def make(clock: SystemClock | None = None, timeout: float = TIMEOUT) -> DatabaseLeases:
        made.append(DatabaseLeases(address, study, timeout, clock or SystemClock()))
        return made[-1]

    yield make
    for one in made:
        one.close()


def until(reached: Callable[[], Any]) -> None:
    end = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_each_trial_is_claimed_by_one_of_many(process: Callable[..., DatabaseLeases]) -> None:
    everybody = [process(timeout=60.0) for _ in range(4)]

    def claim_all(one: DatabaseLeases) -> list[int]:
        return [trial for trial in range(12) if one.claim(trial)]

    with ThreadPoolExecutor(4) as threads:
        claimed = list(threads.map(claim_all, everybody))
    assert sorted(itertools.chain(*claimed)) == list(range(12))
    for one, trials in zip(everybody, claimed, strict=True):
        assert one.taken() == frozenset(range(12))
        assert [trial for trial in range(12) if one.confirm(trial)] == trials


def test_a_trial_that_is_given_back_is_free_at_once(process: Callable[..., DatabaseLeases]) -> None:
    one, other = process(timeout=60.0), process(timeout=60.0)
    assert one.claim(3)
    assert not one.claim(3), "it has it already"
    assert not other.claim(3)
    other.release(3)  # which is not its to give
    assert one.confirm(3)
    one.release(3)
    assert other.claim(3)
    assert not one.confirm(3)
    other.close()
    assert one.taken() == frozenset()


class Time:
    """The time of the database, moved on by a test, as the processes see it."""

    def __init__(self, *processes: DatabaseLeases) -> None:
        self._processes = [(one, one._now) for one in processes]
        self._ahead = 0.0

    def pass_by(self, seconds: float) -> None:
        self._ahead += seconds
        for one, now in self._processes:
            one._now = f"({now} + {self._ahead})"

    def renew(self, *processes: DatabaseLeases) -> None:
        """Let a timeout pass in which these processes, and no others, renew in time."""
        for _ in range(6):
            self.pass_by(TIMEOUT / 5)
            for one in processes:
                one.renew()


def test_a_process_that_stands_still_loses_its_trials_and_hears_of_it(
    process: Callable[..., DatabaseLeases],
) -> None:
    clock = StoppedClock()
    still, other = process(clock), process(StoppedClock())
    time_ = Time(still, other)
    assert still.claim(0)
    assert still.claim(1)
    time_.pass_by(3 * TIMEOUT)
    assert not other.claim(0), "it may have been renewed while the other was not there to see it"
    assert other.taken() == {0, 1}
    other.renew()
    time_.renew(other)
    assert other.claim(0)
    assert other.taken() == {0}
    assert other.confirm(0)
    assert not still.confirm(0)
    assert still.lost() == frozenset(), "it does not know yet"
    clock.go_on.set()
    until(lambda: 0 in still.lost())
    assert not still.claim(0)


def test_a_process_that_lives_keeps_its_trials(process: Callable[..., DatabaseLeases]) -> None:
    one, other = process(StoppedClock()), process(StoppedClock())
    time_ = Time(one, other)
    assert one.claim(0)
    for _ in range(3):
        time_.renew(one, other)
        assert not other.claim(0)
        assert other.taken() == {0}
    assert one.confirm(0)
    assert one.lost() == frozenset()
    time_.renew(other)
    assert other.claim(0), "it was the renewals that kept it"


def test_nobody_loses_a_trial_to_who_wakes_up_first(process: Callable[..., DatabaseLeases]) -> None:
    one, other = process(StoppedClock()), process(StoppedClock())
    time_ = Time(one, other)
    assert one.claim(0)
    time_.renew(one, other)
    time_.renew(one, other)
    time_.pass_by(3600.0)  # a suspended machine, in which clocks of processes stand still
    assert not other.claim(0)
    assert other.taken() == {0}
    other.renew()
    assert not other.claim(0)
    one.renew()
    time_.renew(one, other)
    assert one.confirm(0)


def test_a_lease_that_its_process_does_not_know_of_or_cannot_give_back_runs_out(
    process: Callable[..., DatabaseLeases], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = process(StoppedClock()), process(StoppedClock())
    time_ = Time(one, other)
    assert one.claim(0)
    assert one.claim(1)
    one._held.discard(0)  # as after a claim whose answer was lost
    assert one.taken() == {1}, "it can try again"

    def away(*_: Any, **__: Any) -> None:
        raise LedgerUnavailableError("away")

    with monkeypatch.context() as patched:
        patched.setattr(one._database, "transact", away)
        with pytest.raises(LedgerUnavailableError):
            one.release(1)
    assert other.taken() == {0, 1}
    time_.renew(one, other)
    assert other.taken() == frozenset()
    assert other.claim(0)
    assert one.claim(1), "it takes it up again"
    assert one.confirm(1)


def test_connections_of_optuna_notice_a_network_that_is_gone(postgres: Server) -> None:
    storage = open_storage(parse(postgres.url), SystemClock())
    connection = storage.engine.raw_connection()
    given = connection.driver_connection.info.get_parameters()
    connection.close()
    storage.engine.dispose()
    assert {name: given[name] for name in ("keepalives_idle", "keepalives_count", "tcp_user_timeout")} == {
        "keepalives_idle": "5",
        "keepalives_count": "3",
        "tcp_user_timeout": "15000",
    }
    assert "statement_timeout" in given["options"]


def test_a_database_that_cannot_be_reached_is_an_error_of_ours(tmp_path: Path) -> None:
    address = parse(f"postgresql://nobody@localhost/none?host={tmp_path}")
    with pytest.raises(LedgerError, match="cannot make the table of leases"):
        DatabaseLeases(address, "s", 1.0, SystemClock())


def test_the_only_process_has_what_it_claims() -> None:
    leases = SoleLeases()
    assert leases.claim(1)
    assert not leases.claim(1)
    assert leases.taken() == {1}
    assert leases.confirm(1)
    leases.release(1)
    assert not leases.confirm(1)
    leases.claim(2)
    leases.close()
    assert leases.taken() == frozenset()
