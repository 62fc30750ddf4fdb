"""The loop in its threads: outages, two at once, being asked to stop, back-pressure."""

import threading
from dataclasses import replace

import pytest
from loopcases import (
    FAST,
    FakeSource,
    FlakyLedger,
    Recorder,
    ScriptedApp,
    double_bookings,
    node,
    nodes,
    settings,
    until,
)

from ebbflow.infra.errors import LedgerError, LedgerUnavailableError, StaleLoopError
from ebbflow.infra.ledger import Ledger
from ebbflow.planners.model.ledger import CapacityChanged
from ebbflow.planners.scheduling.leased.simple import equal_share
from ebbflow.tasks.apps.loop_report import LOOP, STOP, LoopStatusRecord, stop_request
from ebbflow.tasks.capacity import cycle as loop_module
from ebbflow.tasks.capacity.loop import CapacityLoop
from ebbflow.tasks.capacity.status import wait_for_end


class Running:
    """A loop in a thread, with what became of it."""

    def __init__(self, ledger, source, *, take_over=False, pace=FAST, interval_s=20.0, **options):
        rules = settings(policy=equal_share(1.0), interval_s=interval_s)
        self.loop = CapacityLoop(ledger, None, source, rules, pace=pace, **options)
        self.stop = threading.Event()
        self.end, self.error = None, None
        self._take_over = take_over
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        try:
            self.end = self.loop.run(self.stop, take_over=self._take_over)
        except Exception as error:
            self.error = error

    def close(self):
        self.stop.set()
        self.thread.join(150)
        assert not self.thread.is_alive()


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(str(tmp_path / "ledger.db")) as made:
        yield made


@pytest.fixture
def start(request):
    """Return a function that starts loops; they are ended with the test."""
    begun = []

    def one(*given, **options):
        begun.append(Running(*given, **options))
        return begun[-1]

    yield one
    for running in begun:
        running.close()


def held(ledger, app):
    return len(ledger.state().held(app))


def test_an_arrival_is_answered_at_once(ledger, start):
    start(ledger, FakeSource(*nodes(2)), interval_s=3600.0)
    until(lambda: ledger.state().nodes, "the first look")
    app = ScriptedApp(ledger, "a", 2).enter()
    until(lambda: held(ledger, "a") == 2, "the first lease, not at the next interval", app.step)


def test_a_node_that_dies_is_noticed_at_once(ledger, start):
    source = FakeSource(*nodes(2))
    start(ledger, source, interval_s=3600.0)
    app = ScriptedApp(ledger, "a", 4).enter()
    until(lambda: held(ledger, "a") == 4, "the leases", app.step)
    source.take("n0")
    until(lambda: held(ledger, "a") == 2, "the end of the lost leases, not at the next interval")


def test_a_ledger_that_is_away_is_waited_for(ledger, start, caplog):
    flaky, source, recorder = FlakyLedger(ledger), FakeSource(*nodes(1)), Recorder()
    running = start(flaky, source, listener=recorder)
    app = ScriptedApp(ledger, "a", 2).enter()
    until(lambda: held(ledger, "a") == 2, "the leases", app.step)
    with caplog.at_level("WARNING"):
        flaky.away = True
        until(lambda: flaky.refused >= 5, "attempts")
        looks = source.looks
        source.add(node("late", 2))
        until(lambda: source.looks > looks + 5, "looks at the capacity")  # it goes on observing
        assert "late" not in ledger.state().nodes
        assert held(ledger, "a") == 2  # apps keep what they hold
        flaky.away = False
        until(lambda: "late" in ledger.state().nodes, "the node that came meanwhile", app.step)
        until(lambda: "is available again" in caplog.text, "the word that it is back")
    assert sum("the ledger does not respond" in record.message for record in caplog.records) == 1
    assert sum("is available again" in record.message for record in caplog.records) == 1
    ScriptedApp(ledger, "b", 2).enter()
    until(lambda: held(ledger, "b") == 2, "leases after the outage", app.step)
    running.close()
    assert running.error is None
    assert running.loop.metrics.outages == 1
    assert any("is available again" in event.text for event in recorder.events if event.kind == "recovered")
    assert double_bookings(ledger) == []


def test_a_ledger_that_stays_away_ends_the_loop(ledger, start):
    flaky = FlakyLedger(ledger)
    running = start(flaky, FakeSource(*nodes(1)), pace=replace(FAST, ledger_timeout=0.5))
    until(lambda: ledger.state().nodes, "the first look")
    flaky.away = True
    running.thread.join(150)
    assert isinstance(running.error, LedgerUnavailableError)


def test_a_write_whose_answer_was_lost_is_found_in_the_ledger(ledger, start):
    """The connection breaks after the commit: what was granted is granted, and nothing is granted twice."""
    flaky, lost = FlakyLedger(ledger), []
    real = ledger.lead

    def lead(*given, **more):
        leadership = real(*given, **more)
        write = leadership.write

        def torn(changes):
            events = write(changes)
            if any(type(one).__name__ == "Granted" for one in changes) and not lost:
                lost.append(changes)
                raise LedgerUnavailableError("the answer is lost, for a test", unsure=True)
            return events

        leadership.write = torn
        return leadership

    flaky.lead = lead
    start(flaky, FakeSource(*nodes(1)))
    app = ScriptedApp(ledger, "a", 2).enter()
    until(lambda: lost and held(ledger, "a") == 2, "the leases", app.step)
    ScriptedApp(ledger, "b", 2).enter()
    until(lambda: held(ledger, "a") + held(ledger, "b") == 2 and held(ledger, "b"), "a fair split", app.step)
    assert double_bookings(ledger) == []


def test_a_second_loop_waits_and_takes_over_when_the_first_has_gone(ledger, start, caplog):
    with caplog.at_level("WARNING"):
        first = start(ledger, FakeSource(*nodes(1)), holder="first")
        until(lambda: ledger.state().nodes, "the first look")
        second = start(ledger, FakeSource(*nodes(2)), holder="second")
        until(lambda: "waiting for leader election" in caplog.text, "the wait")
    assert set(ledger.state().nodes) == {"n0"}
    first.close()
    assert first.error is None
    until(lambda: len(ledger.state().nodes) == 2, "the second loop's look")
    assert second.error is None


def test_a_loop_that_was_taken_over_stops_at_once(ledger, start):
    first = start(ledger, FakeSource(*nodes(1)), holder="first")
    until(lambda: ledger.state().nodes, "the first look")
    start(ledger, FakeSource(*nodes(2)), holder="second", take_over=True)
    first.thread.join(150)
    assert isinstance(first.error, StaleLoopError)
    until(lambda: len(ledger.state().nodes) == 2, "the second loop's look")
    token = ledger.state().token
    writers = {e.change.holder for e in ledger.events() if type(e.change).__name__ == "LoopBegan"}
    assert (token, writers) == (2, {"first", "second"})


def test_a_loop_ends_when_the_ledger_asks_it_to(ledger, start):
    running = start(ledger, FakeSource(*nodes(1)))
    until(lambda: LOOP in ledger.reports(), "the status row")
    leader = ledger.leader()
    ledger.report(STOP, stop_request(leader.token + 7, ledger.clock.now()))  # meant for another
    row = ledger.reports()[LOOP].at
    until(lambda: ledger.reports()[LOOP].at > row, "another row")
    assert running.thread.is_alive()
    ledger.report(STOP, stop_request(leader.token, ledger.clock.now()))
    assert wait_for_end(ledger, leader.token, 60)
    running.thread.join(150)
    assert running.end.asked
    assert LoopStatusRecord.of(ledger.reports()[LOOP]).phase == "stopped"


def test_changes_during_a_slow_decision_are_merged_and_none_is_lost(ledger, start, monkeypatch):
    real, begun, release = loop_module.decide, threading.Event(), threading.Event()

    def slow(*given):
        begun.set()
        release.wait(150)
        return real(*given)

    source = FakeSource(node("n0"))
    running = start(ledger, source)
    until(lambda: ledger.state().nodes, "the first look")
    monkeypatch.setattr(loop_module, "decide", slow)
    source.add(node("more"))
    until(begun.is_set, "a decision")
    looks = source.looks
    for number in range(200):
        source.add(node(f"more{number}"))
    until(lambda: source.looks > looks + 1, "a look at them")  # which goes on meanwhile
    release.set()
    until(lambda: len(ledger.state().nodes) == 202, "all nodes")
    running.close()
    assert len(ledger.events(kinds=[CapacityChanged])) <= 4  # one by one they would be 202
    assert running.loop.metrics.rested > 0


def test_a_slow_listener_delays_nobody(ledger, start):
    release = threading.Event()

    class Slow:
        def on_event(self, event):
            release.wait(150)

    running = start(ledger, FakeSource(*nodes(1)), listener=Slow())
    for name in ("a", "b"):
        app = ScriptedApp(ledger, name, 1).enter()
        until(lambda name=name: held(ledger, name), "a lease", app.step)
    release.set()
    running.close()


def test_a_loop_gives_its_lead_back_although_its_last_words_are_refused(ledger, start, monkeypatch):
    running = start(ledger, FakeSource(*nodes(1)))
    until(lambda: ledger.state().nodes, "the first look")

    def refuse(*_):
        raise LedgerError("the table of reports is damaged, for a test")

    monkeypatch.setattr(ledger, "report", refuse)
    running.thread.join(150)
    assert "damaged" in str(running.error)
    assert ledger.leader().until == 0


def test_a_renewed_lead_outlives_its_seconds(ledger, start):
    running = start(ledger, FakeSource(*nodes(1)), pace=replace(FAST, leader_lease=0.5))
    until(lambda: ledger.leader() is not None, "the lead")
    first = ledger.leader().until
    until(lambda: ledger.leader().until > first + 1.0, "renewals")
    assert running.error is None
