"""An app's line to a real ledger, with a loop that does as it is told."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from app_loops import Outage, ScriptedLoop, until

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import LeaseError, LedgerError, RunLockedError
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.storage.locks import RunLock
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.model.ledger import AppMoved, AppSpec, Decided, Saved
from ebbflow.tasks.apps.agent import AgentIntervals, AppAgent
from ebbflow.tasks.apps.allocation import AllocationStatus
from ebbflow.tasks.apps.lease_table import Rules

PACE = AgentIntervals(look=0.02, report=0.1, entry=150.0, parting=150.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def loop(path: Path) -> Iterator[ScriptedLoop]:
    with ScriptedLoop(path, {"a": 2, "b": 2}) as loop:
        yield loop


@pytest.fixture
def ledger(path: Path, loop: ScriptedLoop) -> Iterator[Ledger]:
    with Ledger.open(str(path)) as ledger:
        yield ledger


def agent_of(ledger: Any, **options: Any) -> AppAgent:
    spec = AppSpec("t", "training", gpus=2, min_gpus=1, max_gpus=4)
    options = {"pace": PACE, "rules": Rules(fence=60.0), **options}
    return AppAgent(ledger, spec, **options)


def entered(agent: AppAgent) -> bool:
    """Tell whether the app could enter on a GPU."""
    try:
        agent.lease_table.enter("u", "a", 1)
    except LeaseError:
        return False
    return True


def test_an_app_enters_hears_of_leases_and_lets_go(loop: ScriptedLoop, ledger: Ledger) -> None:
    standings: list[AllocationStatus] = []
    with agent_of(ledger, changed=standings.append) as agent:
        assert loop.phase("t") == "waiting"
        first, second = loop.grant("t", ("a", 0), ("b", 1))
        until(lambda: agent.standing.placement == {"a": 1, "b": 1}, "leases")
        agent.moved("running", "on 2 GPUs")
        agent.lease_table.enter("u", "a", 1)
        until(lambda: loop.phase("t") == "running", "phase")
        loop.recall(first, seconds=300.0)
        until(lambda: agent.standing.leaving, "recall")
        assert agent.standing.placement == {"b": 1}
        until(lambda: standings and standings[-1].leaving, "call back")
        by = standings[-1].deadline
        assert by is not None
        assert 0.0 < by - time.time() <= 300.0
        assert first in loop.report("t").holds
        assert not loop.ended(first), "its processes are still there"
        agent.left("u")
        until(lambda: loop.ended(first), "end of the lease")
        agent.release((second,))
        until(lambda: loop.ended(second), "end of what was given back")
        agent.moved("finished", "done")
    assert loop.phase("t") == "finished"
    assert loop.state.apps["t"].reason == "done"
    assert loop.report("t").phase == "finished"
    assert not loop.ledger.verify()


def test_a_clean_stop_gives_everything_back_at_once(loop: ScriptedLoop, ledger: Ledger) -> None:
    with agent_of(ledger) as agent:
        leases = loop.grant("t", ("a", 0), ("a", 1))
        until(lambda: len(agent.standing.leases) == 2, "leases")
        agent.moved("stopped", "for today")
    report = loop.report("t")
    assert (report.holds, report.released) == ((), leases)
    until(lambda: loop.ended(*leases), "end of the leases")


def test_what_still_runs_is_not_given_back(loop: ScriptedLoop, ledger: Ledger) -> None:
    agent = agent_of(ledger).__enter__()
    kept, given = loop.grant("t", ("a", 0), ("b", 0))
    until(lambda: len(agent.standing.leases) == 2, "leases")
    agent.lease_table.enter("u", "a", 1)
    agent.__exit__(RuntimeError, RuntimeError("the script is gone"), None)
    assert loop.phase("t") == "failed"
    assert loop.state.apps["t"].reason == "the script is gone"
    until(lambda: loop.ended(given), "end of the free one")
    assert loop.report("t").holds == (kept,)


def test_what_an_app_says_is_in_the_ledger(loop: ScriptedLoop, ledger: Ledger) -> None:
    with agent_of(ledger) as agent:
        agent.update_metrics(progress=0.5, step=7, job={"loss": 1.0})
        agent.saved("file:///x/step-7", 7)
        agent.decided("replan", "another plan", inputs={"seconds": 3.0}, outcome={"chosen": "p2"})
        until(lambda: loop.state.apps["t"].checkpoint, "checkpoint")
        until(lambda: loop.report("t").progress == 0.5, "figures")
        agent.update_metrics(progress=float("nan"))
        at = loop.report("t").at
        until(lambda: loop.report("t").at > at, "a report in spite of a figure that cannot be kept")
        agent.update_metrics(progress=0.75)
    kinds = [type(e.change) for e in loop.ledger.events(app="t", kinds=[Saved, Decided, AppMoved])]
    assert kinds == [Saved, Decided, AppMoved]


def test_a_ledger_that_is_away_is_survived_and_told_once(loop: ScriptedLoop, ledger: Ledger) -> None:
    told: list[str] = []
    outage = Outage(ledger)
    with agent_of(outage, notify=told.append, rules=Rules(fence=0.2)) as agent:
        (number,) = loop.grant("t", ("a", 0))
        until(lambda: agent.standing.leases, "lease")
        outage.away = True
        until(lambda: agent.away is not None, "outage")
        agent.moved("running", "meanwhile")
        agent.saved("file:///one")
        agent.saved("file:///two")
        until(lambda: agent.lease_table.silence > 0.2, "silence")
        assert agent.standing.placement == {"a": 1}, "what it has, it keeps"
        with pytest.raises(LeaseError, match="has not responded"):
            agent.lease_table.enter("u", "a", 1)
        outage.away = False
        until(lambda: loop.phase("t") == "running", "what was said meanwhile")
        until(lambda: agent.away is None, "end of the outage")
        until(lambda: entered(agent), "a fresh look")
        agent.left("u")
        assert number in loop.state.leases
    assert loop.state.apps["t"].checkpoint == "file:///two"
    assert [text.split(";")[0].split(" after")[0] for text in told] == [
        "the ledger does not respond",
        "the ledger is available again",
    ]
    assert len(loop.ledger.events(app="t", kinds=[Saved])) == 1


def test_the_ledger_may_be_away_when_an_app_enters(loop: ScriptedLoop, ledger: Ledger) -> None:
    outage = Outage(ledger)
    outage.away = True
    threading.Timer(0.2, lambda: setattr(outage, "away", False)).start()
    with agent_of(outage):
        assert loop.phase("t") == "waiting"
    outage.away = True
    with pytest.raises(LedgerError, match="for a test"):
        agent_of(outage, pace=AgentIntervals(look=0.02, entry=0.1)).__enter__()


def test_an_app_taken_for_lost_enters_again(loop: ScriptedLoop, ledger: Ledger) -> None:
    told: list[str] = []
    with agent_of(ledger, notify=told.append) as agent:
        (number,) = loop.grant("t", ("a", 0))
        until(lambda: agent.standing.leases, "lease")
        agent.lease_table.enter("u", "a", 1)
        agent.moved("running")
        until(lambda: loop.phase("t") == "running", "phase")
        loop.end(number)
        loop.move("t", "lost")
        until(lambda: loop.phase("t") == "running", "the app again")
        assert agent.standing.leaving == {number: 0.0}, "its GPU may be another's: at once"
        agent.left("u")
    assert any("lost" in text for text in told)
    assert loop.phase("t") == "finished"


def test_without_a_loop_leases_are_kept_beyond_their_end(path: Path) -> None:
    rules = Rules(grace=600.0, leave=0.2)
    with (
        ScriptedLoop(path, {"a": 1}, lead=0.3) as loop,
        Ledger.open(str(path)) as ledger,
        agent_of(ledger, rules=rules) as agent,
    ):
        (number,) = loop.grant("t", ("a", 0))
        until(lambda: agent.standing.leases, "lease")
        loop.extend(number, seconds=1.0)
        loop.die()
        end = ledger.state().leases[number].until
        until(lambda: time.time() > end and not agent.standing.led, "end of lease and lead")
        assert agent.standing.placement == {"a": 1}
        assert agent.lease_table.account() == ((number,), ())


def test_a_lease_that_a_live_loop_lets_end_is_let_go(loop: ScriptedLoop, ledger: Ledger) -> None:
    with agent_of(ledger, rules=Rules(grace=600.0, leave=0.2)) as agent:
        (number,) = loop.grant("t", ("a", 0))
        until(lambda: agent.standing.leases, "lease")
        loop.extend(number, seconds=0.5)
        until(lambda: loop.ended(number), "end of the lease")


class Off(SystemClock):
    """A clock that is wrong."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def now(self) -> float:
        return super().now() + self.seconds


@pytest.mark.parametrize("seconds", [-3600.0, 3600.0])
def test_a_loop_whose_clock_is_wrong_can_be_lived_with(path: Path, seconds: float) -> None:
    with (
        ScriptedLoop(path, {"a": 2}, clock=Off(seconds)) as loop,
        Ledger.open(str(path)) as ledger,
        agent_of(ledger) as agent,
    ):
        until(lambda: agent._skew.look(None, 0.0), "the difference")
        assert agent._skew.look(None, 0.0) == pytest.approx(seconds, abs=160.0)
        first, second = loop.grant("t", ("a", 0), ("a", 1))
        until(lambda: len(agent.standing.leases) == 2, "leases")
        agent.lease_table.enter("u", "a", 2)
        loop.recall(first, seconds=300.0)
        by = until(lambda: agent.standing.deadline, "recall")
        assert by - ledger.clock.now() == pytest.approx(300.0, abs=160.0), "by one's own clock"
        agent.left("u")
        until(lambda: loop.ended(first), "end of the lease")
        assert second in loop.state.leases


def test_one_process_at_a_time_speaks_for_an_app(loop: ScriptedLoop, ledger: Ledger, tmp_path: Path) -> None:
    first = agent_of(ledger, lock=RunLock(StorageLocation(tmp_path / "app"), "t"))
    with first:
        loop.grant("t", ("a", 0))
        until(lambda: first.standing.leases, "lease")
        with pytest.raises(RunLockedError, match="'t' is being run"):
            agent_of(ledger, lock=RunLock(StorageLocation(tmp_path / "app"), "t")).__enter__()
        assert loop.phase("t") == "waiting", "the second has said nothing"
        assert first.standing.leases


def test_leases_of_an_earlier_self_wait_until_it_is_gone(loop: ScriptedLoop, ledger: Ledger) -> None:
    earlier = agent_of(ledger)
    earlier.__enter__()
    kept, called = loop.grant("t", ("a", 0), ("a", 1))
    until(lambda: len(earlier.standing.leases) == 2, "leases")
    earlier._stop.set()  # it dies: no last words
    earlier._thread.join()
    loop.recall(called)
    gone = threading.Event()
    seen: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    def settle() -> None:
        until(lambda: loop.report("t").at > began, "report while it settles")
        seen.append((loop.report("t").holds, loop.report("t").released))
        gone.set()

    began = loop.report("t").at
    with agent_of(ledger, settle=settle) as agent:
        assert gone.is_set()
        until(lambda: loop.ended(called), "end of the one that was called back")
        assert [lease.number for lease in agent.standing.leases] == [kept]
    assert seen == [((kept, called), ())]


def test_a_defect_in_the_app_does_not_silence_it(loop: ScriptedLoop, ledger: Ledger) -> None:
    def broken(standing: AllocationStatus) -> None:
        raise ZeroDivisionError

    with agent_of(ledger, changed=broken, notify=broken) as agent:
        loop.grant("t", ("a", 0))
        until(lambda: agent.standing.leases, "lease")
        at = loop.report("t").at
        until(lambda: loop.report("t").at > at, "another report")
