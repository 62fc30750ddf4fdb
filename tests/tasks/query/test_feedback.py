"""The resource-feedback task: every settled change once, bursts as one, failures of the source outlived."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.errors import EngineLostError, EngineUnavailableError
from ebbflow.planners.model import Capacity, Node
from ebbflow.tasks.query.feedback import Feedback, FeedbackIntervals

PACE = FeedbackIntervals(interval=0.5, quiet=0.25, longest=1.0)


def capacity(*ids: str) -> Capacity:
    return Capacity(1, tuple(Node(i, 1, 1.0) for i in sorted(ids)))


class Timer:
    """A clock that waiting moves, and that sets every event waited for once ``end`` is reached."""

    def __init__(self, end: float) -> None:
        self.time = 0.0
        self.end = end

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def wait(self, event: threading.Event, timeout: float) -> bool:
        self.time += timeout
        if self.time >= self.end:
            event.set()
        return event.is_set()


@dataclass
class Source:
    """A ``CapacitySource`` that follows a script of (from when, what)."""

    clock: Timer
    script: Sequence[tuple[float, Capacity | Exception]]

    def capacity(self) -> Capacity:
        now = [what for at, what in self.script if at <= self.clock.now()][-1]
        if isinstance(now, Exception):
            raise now
        return now


def watch(
    script: Sequence[tuple[float, Capacity | Exception]], end: float = 20.0
) -> list[tuple[float, list[str], str]]:
    """Run a feedback over ``script``; return (when, node ids, change) of all that was published."""
    clock = Timer(end)
    published: list[tuple[float, list[str], str]] = []
    feedback = Feedback(
        Source(clock, script),
        clock,
        lambda seen, change: published.append((clock.now(), [n.id for n in seen.nodes], change)),
        PACE,
    )
    assert feedback.run(threading.Event()) == len(published)
    return published


def test_a_change_is_published_once_with_what_changed() -> None:
    ((at, nodes, change),) = watch([(0, capacity("a", "b")), (2.6, capacity("b", "c"))])
    assert nodes == ["b", "c"]
    assert change == "arrived: c; left: a"
    assert 2.6 <= at <= 2.6 + PACE.interval + PACE.quiet


def test_nothing_is_published_while_nothing_changes() -> None:
    assert watch([(0, capacity("a"))]) == []


def test_a_burst_is_one_event_and_its_newest_state_wins() -> None:
    burst = [
        (0, capacity("a")),
        (3, capacity("a", "b")),
        (3.2, capacity("a", "b", "c")),
        (3.4, capacity("c")),
    ]
    published = watch(burst)
    assert [(nodes, change) for _, nodes, change in published] == [(["c"], "arrived: c; left: a")]


def test_a_burst_that_does_not_end_is_published_after_the_longest_wait_all_the_same() -> None:
    forever = [(0, capacity("a")), *((3 + i / 10, capacity("a", f"b{i}")) for i in range(100))]
    published = watch(forever)
    assert published[0][0] <= 3 + PACE.interval + PACE.longest + PACE.quiet
    gaps = [b[0] - a[0] for a, b in pairwise(published)]
    assert max(gaps) <= PACE.interval + PACE.longest + PACE.quiet + 1e-9


def test_a_change_that_reverts_within_the_burst_is_not_published() -> None:
    assert watch([(0, capacity("a")), (3, capacity("a", "b")), (3.1, capacity("a"))]) == []


def test_a_source_that_fails_keeps_what_was_known_until_it_answers_again() -> None:
    gone = EngineUnavailableError("no answer")
    assert watch([(0, capacity("a")), (3, gone), (6, capacity("a"))]) == []
    ((at, nodes, _),) = watch([(0, capacity("a")), (3, gone), (6, capacity("b"))])
    assert at >= 6
    assert nodes == ["b"]


def test_a_source_that_fails_in_the_middle_of_a_burst_does_not_lose_the_change() -> None:
    published = watch([(0, capacity("a")), (3, capacity("b")), (3.1, EngineUnavailableError("no answer"))])
    assert [nodes for _, nodes, _ in published] == [["b"]]


def test_a_source_that_never_answers_ends_the_watch_before_it_begins() -> None:
    with pytest.raises(EngineUnavailableError):
        watch([(0, EngineUnavailableError("no answer"))])


def test_an_engine_that_is_lost_is_told_and_not_waited_for() -> None:
    clock, told = Timer(60.0), list[Exception]()
    lost = EngineLostError("dropped")
    source = Source(clock, [(0, capacity("a")), (3, lost), (4, capacity("a"))])
    feedback = Feedback(source, clock, lambda *_: None, PACE, failed=told.append)
    with pytest.raises(EngineLostError):
        feedback.run(threading.Event())
    assert told == [lost]


def test_whoever_plans_on_capacity_is_told_when_the_watch_breaks() -> None:
    clock, told = Timer(20.0), list[Exception]()
    source = Source(clock, [(0, capacity("a")), (3, KeyError("a mistake"))])
    feedback = Feedback(source, clock, lambda *_: None, PACE, failed=told.append)
    with pytest.raises(KeyError):
        feedback.run(threading.Event())
    assert [type(e) for e in told] == [KeyError]


def test_stopping_does_not_wait_for_the_next_look() -> None:
    clock, stop = SystemClock(), threading.Event()
    source = Source(Timer(1.0), [(0, capacity("a"))])
    feedback = Feedback(source, clock, lambda *_: None, FeedbackIntervals(interval=3600))
    thread = threading.Thread(target=feedback.run, args=(stop,), daemon=True)
    thread.start()
    stop.set()
    thread.join(150)
    assert not thread.is_alive()


def test_nothing_is_published_after_the_stop() -> None:
    assert watch([(0, capacity("a")), (3, capacity("b"))], end=3.1) == []


_states = st.lists(st.tuples(st.floats(0.05, 3), st.sets(st.sampled_from("abcd"), min_size=1)), max_size=30)


@given(_states)
def test_what_was_published_last_is_what_is_there_once_things_are_quiet(
    changes: list[tuple[float, set[str]]],
) -> None:
    at, script = 0.0, [(0.0, capacity("a"))]
    for gap, nodes in changes:
        at += gap
        script.append((at, capacity(*nodes)))
    published = watch(script, end=at + 10)
    last = published[-1][1] if published else ["a"]
    assert last == [n.id for n in script[-1][1].nodes]
    for (_, before, _), (_, after, _) in pairwise(published):
        assert before != after
