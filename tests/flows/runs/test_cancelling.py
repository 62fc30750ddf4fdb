"""Work that ends in order when the thread that waits for it is interrupted."""

import contextvars
import os
import signal
import threading

import pytest

from ebbflow.flows.runs.cancelling import Attended, attended

TIMEOUT = 150.0  # s


def test_what_the_work_returns_or_raises_comes_back() -> None:
    assert attended(lambda: 7, lambda: None) == 7
    with pytest.raises(ZeroDivisionError):
        attended(lambda: 1 / 0, lambda: None)


def test_the_work_sees_the_context_of_who_waits() -> None:
    run = contextvars.ContextVar("run", default="")
    run.set("this one")
    assert attended(run.get, lambda: None) == "this one"


def test_a_termination_lets_the_work_end_and_is_then_passed_on() -> None:
    stop, begun, ended = threading.Event(), threading.Event(), threading.Event()

    class Terminated(BaseException):
        pass

    def raising(*_: object) -> None:
        raise Terminated

    def work() -> None:
        begun.set()
        assert stop.wait(TIMEOUT)
        ended.set()

    def signalled() -> None:
        assert begun.wait(TIMEOUT)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, raising)
    try:
        threading.Thread(target=signalled).start()
        with pytest.raises(Terminated):
            attended(work, stop.set)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ended.is_set()


def test_a_termination_while_the_work_begins_lets_it_end_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, ended = threading.Event(), threading.Event()

    def work() -> None:
        assert stop.wait(TIMEOUT)
        ended.set()

    attending = Attended(work, stop.set)
    start = attending._thread.start

    def interrupted() -> None:
        start()
        raise KeyboardInterrupt

    monkeypatch.setattr(attending._thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attending.wait()
    assert ended.is_set()


def test_work_that_does_not_end_is_left_after_its_time() -> None:
    never = threading.Event()

    def stop() -> None:
        asked.append(True)

    asked: list[bool] = []
    begun = threading.Event()

    def work() -> None:
        begun.set()
        never.wait(TIMEOUT)

    def signalled() -> None:
        assert begun.wait(TIMEOUT)
        os.kill(os.getpid(), signal.SIGTERM)

    def raising(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, raising)
    try:
        threading.Thread(target=signalled).start()
        with pytest.raises(KeyboardInterrupt):
            attended(work, stop, timeout=0.1)
    finally:
        signal.signal(signal.SIGTERM, before)
        never.set()
    assert asked == [True]
