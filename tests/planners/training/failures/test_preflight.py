"""The gate before a gang, and what its trial says."""

from dataclasses import replace

import pytest

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.failures.failures import Failure, FailureClass
from ebbflow.planners.training.failures.preflight import GateQuestion, plan, should_gate, verdict

BIG = GateQuestion(gpus=32, ranks=2, early_failures=0.1, attempts=3, time_to_failure=90.0)


def test_worked_example() -> None:
    assert should_gate(BIG) == (True, "it would save 14.4 GPU-min on average and cost at most 10.0")
    assert should_gate(replace(BIG, gpus=8)) == (
        False,
        "it would save 3.6 GPU-min on average and cost at most 10.0",
    )
    assert should_gate(replace(BIG, gpus=8, free=True)).gate
    assert not should_gate(replace(BIG, wait_cost=300.0)).gate


def test_what_needs_no_trial() -> None:
    assert not should_gate(replace(BIG, resumes=True)).gate
    with pytest.raises(OptionError):
        should_gate(replace(BIG, early_failures=1.5))


def test_one_rank_alone_two_on_two_nodes() -> None:
    assert (plan(1, 1).ranks, plan(1, 1).nodes) == (1, 1)
    assert (plan(8, 1).ranks, plan(8, 1).nodes) == (2, 1)
    assert (plan(8, 4).ranks, plan(8, 4).nodes) == (2, 2)
    for wrong in ((0, 1), (2, 3), (2, 0)):
        with pytest.raises(OptionError):
            plan(*wrong)
    with pytest.raises(OptionError):
        plan(1, 1, steps=0)


def failed(kind: FailureClass) -> Failure:
    return Failure("some-reason", kind, "abc")


def test_verdicts() -> None:
    assert verdict(None, 20, timed_out=False).outcome == "pass"
    assert verdict(None, 3, timed_out=True).outcome == "pass"
    assert verdict(None, 0, timed_out=True) == ("inconclusive", True, "no step within the limit")
    for kind in (FailureClass.USER, FailureClass.DATA, FailureClass.RESOURCE):
        assert verdict(failed(kind), 5, timed_out=False).outcome == "fail"
    for kind in (FailureClass.INFRASTRUCTURE, FailureClass.COMMUNICATION, FailureClass.SCHEDULER):
        assert verdict(failed(kind), 5, timed_out=False).outcome == "repeat"
        assert verdict(failed(kind), 5, timed_out=False, repeated=True).admitted
    assert verdict(failed(FailureClass.ENGINE), 0, timed_out=False).outcome == "repeat"
    assert not verdict(failed(FailureClass.ENGINE), 0, timed_out=False, repeated=True).admitted
