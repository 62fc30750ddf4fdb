"""Does a loop lead? Also to those whose clock was set while the loop ran."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import LedgerUnavailableError, PipelineRunError
from ebbflow.infra.ledger import LeaderLease, Ledger
from ebbflow.tasks.capacity.leadership import leads
from ebbflow.tasks.capacity.status import wait_for_end
from ebbflow.tasks.pipeline.site import _check_led


class Off(SystemClock):
    """A clock that is off by some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._offset += seconds


@contextmanager
def led(path: Path, seconds: float, *, renewed: bool) -> Iterator[Ledger]:
    """Leadership by a clock that is off; yield the ledger of somebody whose clock is right."""
    over = threading.Event()
    with Ledger.open(str(path), clock=Off(seconds)) as theirs, Ledger.open(str(path)) as ours:
        lead = theirs.lead("a loop", 60.0 if renewed else 3.0)

        def renew() -> None:
            while not over.wait(0.3):
                lead.renew()

        thread = threading.Thread(target=renew, daemon=True)
        if renewed:
            thread.start()
        try:
            yield ours
        finally:
            over.set()
            if renewed:
                thread.join(150)


@pytest.mark.parametrize("seconds", [0.0, -3600.0, 3600.0])
def test_a_loop_that_renews_its_lead_leads_whatever_clocks_say(seconds: float, tmp_path: Path) -> None:
    said: list[str] = []
    with led(tmp_path / "ledger.db", seconds, renewed=True) as ledger:
        assert leads(ledger, ledger.clock)
        _check_led(ledger, ledger.clock, said.append)


def test_a_loop_that_is_gone_does_not_lead(tmp_path: Path) -> None:
    with led(tmp_path / "ledger.db", -3600.0, renewed=False) as ledger:
        assert not leads(ledger, ledger.clock)
        ledger.lead("another", 0.5).resign()
        assert not leads(ledger, ledger.clock)
        said: list[str] = []
        with pytest.raises(
            PipelineRunError, match=r"no capacity loop is the leader .*; the last was another; start one"
        ):
            _check_led(ledger, ledger.clock, said.append)
        assert said == [
            "the capacity loop another has left; waiting for it or another, for the time of a lead"
        ]


class Scripted:
    """A ledger and its clock: who leads changes at set times, and it may not answer for a while."""

    cluster = address = "lab"

    def __init__(
        self, *then: tuple[float, LeaderLease | None], away: tuple[float, float] = (0.0, 0.0)
    ) -> None:
        self.time, self._then, self._away = 0.0, then, away

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def leader(self) -> LeaderLease | None:
        if self._away[0] <= self.time < self._away[1]:
            raise LedgerUnavailableError("away")
        return next((lead for at, lead in reversed(self._then) if self.time >= at), None)


def late(token: int = 1, until: float = -0.1) -> LeaderLease:
    return LeaderLease(token, f"loop {token}", until, 15.0)


@pytest.mark.parametrize("at", [1.0, 7.0, 14.0])
def test_a_loop_whose_heartbeat_is_late_by_less_than_a_lead_fails_nothing(at: float) -> None:
    ledger = Scripted((0.0, late()), (at, late(until=at + 15.0)))
    said: list[str] = []
    _check_led(ledger, ledger, said.append)  # type: ignore[arg-type]
    assert said == ["the capacity loop loop 1 is late; waiting for it or another, for the time of a lead"]
    assert ledger.time < at + 0.5


@pytest.mark.parametrize("until", [-0.1, 0.0])
def test_a_loop_that_another_follows_within_a_lead_fails_nothing(until: float) -> None:
    ledger = Scripted((0.0, late(until=until)), (9.0, late(2, 24.0)))
    _check_led(ledger, ledger, lambda _: None)  # type: ignore[arg-type]
    left = Scripted((0.0, late()), (3.0, late(until=0.0)), (12.0, late(2, 27.0)))
    _check_led(left, left, lambda _: None)  # type: ignore[arg-type]


def test_a_ledger_that_is_away_while_it_is_watched_fails_nothing() -> None:
    ledger = Scripted((0.0, late()), (8.0, late(until=23.0)), away=(0.05, 10.0))
    assert leads(ledger, ledger)  # type: ignore[arg-type]


@pytest.mark.parametrize("last", [late(), late(until=0.0), None])
def test_what_is_gone_is_given_up_within_the_time_of_a_lead(last: LeaderLease | None) -> None:
    ledger = Scripted((0.0, last))
    with pytest.raises(PipelineRunError, match="no capacity loop is the leader"):
        _check_led(ledger, ledger, lambda _: None)  # type: ignore[arg-type]
    assert ledger.time < 17.0 if last is not None else ledger.time == 0.0


def test_the_end_of_a_lead_is_seen_whatever_clocks_say(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with led(path, -3600.0, renewed=True) as ledger:
        assert not wait_for_end(ledger, 1, 1.0)
        ledger.lead("another", 600.0, take_over=True)
        assert wait_for_end(ledger, 1, 30.0)
