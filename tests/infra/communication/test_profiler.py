"""The profiler takes iterations down as they were, and a sweep measures nothing that cannot be."""

import threading

import pytest
import torch

from ebbflow.infra.communication.measuring import Sweep, sizes_for
from ebbflow.infra.communication.payloads import Exchanged, Summed
from ebbflow.infra.communication.profiler import WARM_UP, IterationProfiler
from ebbflow.planners.communication.costs import Choice
from ebbflow.planners.communication.recorded import Block, Submission, Wait, merge_profiles
from ebbflow.planners.errors import OptionError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


GRADIENTS = Summed(torch.zeros(10))
ROWS = Exchanged(torch.zeros(4), torch.zeros(4), [2, 2], [2, 2])


def one_iteration(profiler: IterationProfiler, clock: Clock, forward: float = 3.0) -> None:
    profiler.begin()
    clock.now += forward
    profiler.mark("forward")
    for k in range(2):
        clock.now += 1.0
        profiler.submitted(f"bucket/{k}", GRADIENTS)
    clock.now += 0.5  # of the reduction
    profiler.waited()
    clock.now += 0.25
    profiler.mark("agreement", shared=True)
    clock.now += 0.125


def test_an_iteration_is_taken_down() -> None:
    clock = Clock()
    profiler = IterationProfiler(clock, keep=4)
    for k in range(WARM_UP + 5):
        one_iteration(profiler, clock, 3.0 + (k == WARM_UP + 2))
        assert profiler.ready == (k >= WARM_UP + 4)
    found = profiler.profile(0, 1).iteration
    assert found.blocks == (
        Block("forward", 3.0),
        Block("before bucket/0", 1.0),
        Block("before bucket/1", 1.0),
        Block("agreement", 0.25, shared=True),
        Block("end", 0.125),
    )
    assert found.submissions[1] == Submission("bucket/1", "all-reduce", 40.0, "before bucket/1")
    assert found.waits == (Wait("bucket/0", "agreement"), Wait("bucket/1", "agreement"))
    assert found.seconds == 5.875
    assert merge_profiles([profiler.profile(0, 1)]).dag.compute_seconds == 5.375
    profiler.forget()
    assert not profiler.ready


def test_an_exchange_may_be_waited_for_an_iteration_later() -> None:
    clock = Clock()
    profiler = IterationProfiler(clock, keep=3)
    profiler.begin()
    profiler.submitted("data", ROWS)
    for _ in range(WARM_UP + 4):
        profiler.begin()
        clock.now += 1.0
        profiler.submitted("data", ROWS)
        clock.now += 2.0
        since = clock.now
        clock.now += 0.5
        profiler.waited("data", since=since)
        thread = threading.Thread(target=profiler.submitted, args=("loaded", ROWS))
        thread.start()
        thread.join()
        clock.now += 4.0
    found = profiler.profile(0, 2).iteration
    assert [(one.name, one.seconds) for one in found.blocks] == [
        ("before data", 1.0),
        ("until data", 2.0),
        ("end", 4.0),
    ]
    assert found.waits == (Wait("data", "end", 1),)
    assert [(one.op, one.kind, one.after) for one in found.submissions] == [
        ("data", "all-to-all", "before data"),
        ("loaded", "all-to-all", ""),
    ]


def test_an_interrupted_iteration_is_forgotten() -> None:
    clock = Clock()
    profiler = IterationProfiler(clock, keep=1)
    for _ in range(WARM_UP):
        one_iteration(profiler, clock)
    profiler.begin()
    profiler.abandon()
    profiler.submitted("bucket/0", GRADIENTS)
    profiler.waited()
    profiler.mark("forward")
    profiler.begin()
    assert not profiler.ready


def test_sizes_enclose_the_payloads() -> None:
    assert sizes_for([8e6]) == (1_000_000, 8_000_000)
    assert sizes_for([526_336, 1_071_144]) == (65_792, 1_071_144)
    assert sizes_for([]) == ()
    assert sizes_for([1000, 8_000_000, 64_000]) == (1000, 20000, 400000, 8_000_000)
    assert sizes_for([1.0]) == (4,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seconds": 0.0}, "seconds > 0 and repeats >= 1; got 0.0"),
        ({"sizes": {"all-reduce": []}}, r"must rise from 4 to 1073741824 bytes; got \[\]"),
        ({"sizes": {"all-reduce": [8, 4]}}, r"got \[8, 4\]"),
        ({"choices": {}}, "a sweep of all-reduce needs a choice; got none"),
    ],
)
def test_a_sweep_that_is_none_is_refused(given: dict[str, object], message: str) -> None:
    whole = {"sizes": {"all-reduce": [4]}, "choices": {"all-reduce": [Choice()]}}
    with pytest.raises(OptionError, match=message):
        Sweep(**whole | given)  # type: ignore[arg-type]
