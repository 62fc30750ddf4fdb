"""Steps of a pipeline as task runs: whoever waits for one hears of it when Prefect gives it up before it begins."""

import concurrent.futures
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from prefect.futures import PrefectConcurrentFuture
from prefect.states import Crashed

from ebbflow.flows.pipeline import flow as pipeline
from ebbflow.tasks.pipeline.coordinator import AttemptResult

STEP: Any = SimpleNamespace(name="fit", label="training fit", kind="training")


def away(_: Any) -> PrefectConcurrentFuture[Any]:
    raise RuntimeError("the API is away")


def raised(_: Any) -> PrefectConcurrentFuture[Any]:
    return future_of(lambda one: one.set_exception(RuntimeError("the API is away")))


def crashed(_: Any) -> PrefectConcurrentFuture[Any]:
    return future_of(lambda one: one.set_result(Crashed(message="the API is away")))


def cancelled(_: Any) -> PrefectConcurrentFuture[Any]:
    return future_of(lambda one: one.cancel())


def ran_and_crashed(work: Any) -> PrefectConcurrentFuture[Any]:
    work()
    return raised(work)


def future_of(end: Any) -> PrefectConcurrentFuture[Any]:
    wrapped: concurrent.futures.Future[Any] = concurrent.futures.Future()
    end(wrapped)
    return PrefectConcurrentFuture(uuid4(), wrapped)


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (away, ["its task run could not be submitted: the API is away"]),
        (raised, ["its task run did not begin: the API is away"]),
        (crashed, ["its task run did not begin: the API is away"]),
        (cancelled, ["its task run did not begin: CancelledError"]),
        (ran_and_crashed, []),
    ],
)
def test_a_task_that_never_begins_is_told_as_lost(
    engine: Any, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_step = SimpleNamespace(submit=lambda name, kind, work: engine(work))
    monkeypatch.setattr(pipeline, "run_step", run_step)
    lost, worked = list[str](), list[bool]()

    def work() -> AttemptResult:
        worked.append(True)
        return AttemptResult("finished")

    background = pipeline.PrefectBackground()
    background.submit(STEP, work, lost.append)
    background.settle(0.0)
    assert lost == told
    assert worked == [True] * (not told)
