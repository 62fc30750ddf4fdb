"""The thread that carries out faults on purpose."""

import threading
from collections.abc import Iterator

import pytest

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import ClusterError
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.faults import Fault, Grammar, Schedule, scripted


def test_what_cannot_be_done_is_said_and_the_rest_is_done() -> None:
    done, said = [], []

    def do(fault: Fault) -> None:
        if fault.target == "gone":
            raise ClusterError("there is no node 'gone'")
        done.append(fault.target)

    clock = SystemClock()
    faults = [Fault(0.0, "kill", "a"), Fault(0.01, "kill", "gone"), Fault(0.02, "kill", "b")]
    with Schedule(clock, scripted(clock, faults, do, said.append)) as schedule:
        schedule.begin()
        schedule.begin()
        schedule.wait()
    assert done == ["a", "b"]
    assert said == ["fault not injected: there is no node 'gone'"]


def test_time_runs_from_the_beginning_of_the_schedule() -> None:
    clock, moments = SystemClock(), []
    script = scripted(
        clock, [Fault(0.0, "kill", "a"), Fault(0.1, "kill", "b")], moments.append, moments.append
    )
    clock.sleep(0.2)
    began = clock.now()
    assert next(script) >= began
    assert next(script) >= began + 0.1
    assert [fault.target for fault in moments] == ["a"]


def test_what_has_not_happened_by_the_end_does_not_happen() -> None:
    clock, done = SystemClock(), []
    schedule = Schedule(clock, scripted(clock, [Fault(3600.0, "kill", "a")], done.append, done.append))
    schedule.wait()  # nothing has begun
    schedule.begin()
    schedule.end()
    schedule.wait()
    schedule.begin()
    assert done == []


def test_an_act_that_hangs_does_not_keep_the_end() -> None:
    clock, goes_on, hangs = SystemClock(), threading.Event(), threading.Event()

    def script() -> Iterator[float]:
        yield clock.now()
        hangs.set()
        goes_on.wait(150)

    schedule = Schedule(clock, script(), timeout=0.05)
    schedule.begin()
    assert hangs.wait(150)
    schedule.end()  # returns
    goes_on.set()
    schedule.wait()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (" 1s:kill:a ", Fault(1.0, "kill", "a")),
        ("1:notice:a:2s", Fault(1.0, "notice", "a", 2.0)),
        ("1s:add:a", Fault(1.0, "add", "a")),
        ("1s:add:a:3", Fault(1.0, "add", "a", count=3)),
        ("1s:resize:3", Fault(1.0, "resize", count=3)),
        ("1s:recommend:a", Fault(1.0, "recommend", "a", 120.0)),
        ("fit+1s:kill:a", Fault(1.0, "kill", "a", step="fit")),
    ],
)
def test_a_verb_says_what_follows_it(text: str, fault: Fault) -> None:
    assert GRAMMAR.parse(text) == fault


@pytest.mark.parametrize(
    "text",
    ["1s:kill", "1s:kill:", "1s:kill:a:b", "1s:notice:a", "1s:add:a:4", "1s:resize:0", "1s:burn:a", "1s::a"],
)
def test_what_does_not_follow_the_verb_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=r"^a fault of a test is .*; its verbs are kill:NODE, .*; got '"):
        GRAMMAR.parse(text)


def test_a_time_that_is_none_is_told_with_the_form() -> None:
    with pytest.raises(OptionError, match=r"; got 'x:kill:a': must be a duration"):
        GRAMMAR.parse("x:kill:a")
    assert GRAMMAR.parse("2m:kill:a").after == 120.0


GRAMMAR = Grammar(
    "a test",
    ("kill", "notice", "recommend", "add", "resize"),
    "1s:kill:a",
    max_count=3,
    pools=True,
    steps=True,
)
