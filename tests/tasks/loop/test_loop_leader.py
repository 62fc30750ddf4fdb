"""Does a loop lead? Also to those whose clock was set while the loop ran."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import PipelineRunError
from ebbflow.infra.ledger import Ledger
from ebbflow.tasks.loop.leader import leads
from ebbflow.tasks.loop.status import wait_for_end
from ebbflow.tasks.pipeline.site import _check_led


class Off(SystemClock):
    """A clock that is off by some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._offset += seconds


@contextmanager
def led(path: Path, seconds: float, *, renewed: bool) -> Iterator[Ledger]:
    """Lead by a clock that is off; yield the ledger of somebody whose clock is right."""
    over = threading.Event()
    with Ledger.open(str(path), clock=Off(seconds)) as theirs, Ledger.open(str(path)) as ours:
        lead = theirs.lead("a loop", 3.0)

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
                thread.join(30)


@pytest.mark.parametrize("seconds", [0.0, -3600.0, 3600.0])
def test_a_loop_that_renews_its_lead_leads_whatever_clocks_say(seconds: float, tmp_path: Path) -> None:
    with led(tmp_path / "ledger.db", seconds, renewed=True) as ledger:
        assert leads(ledger, ledger.clock)
        _check_led(ledger, ledger.clock)


def test_a_loop_that_is_gone_does_not_lead(tmp_path: Path) -> None:
    with led(tmp_path / "ledger.db", -3600.0, renewed=False) as ledger:
        assert not leads(ledger, ledger.clock)
        ledger.lead("another", 600.0).resign()
        assert not leads(ledger, ledger.clock)
        with pytest.raises(PipelineRunError, match="no capacity loop leads"):
            _check_led(ledger, ledger.clock)


def test_the_end_of_a_lead_is_seen_whatever_clocks_say(tmp_path: Path) -> None:
    path = tmp_path / "ledger.db"
    with led(path, -3600.0, renewed=True) as ledger:
        assert not wait_for_end(ledger, 1, 1.0)
        ledger.lead("another", 600.0, take_over=True)
        assert wait_for_end(ledger, 1, 30.0)
