"""What is decided of a training before it begins."""

from dataclasses import replace
from typing import Any

import pytest

from ebbflow.planners.errors import OptionError
from ebbflow.planners.hazard import hazard
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.training.failures.canary import CanaryPlan
from ebbflow.planners.training.failures.failures import FailureTable
from ebbflow.planners.training.failures.retries import BlindRetry, RetryPolicy
from ebbflow.planners.training.plan import TrainingPlan

TABLE = FailureTable.parse({"rule": [{"reason": "r", "class": "user", "patterns": ["x"]}]})


def plan(settings: RunSettings | None = None, **terms: Any) -> TrainingPlan:
    usual: dict[str, Any] = {
        "placement": {"a": 2, "b": 2}, "max_gpus": 4, "hazard": None, "canary": "auto", "canary_steps": 20,
        "retries": "by-class", "back_off": 120.0, "free": True, "resumes": False,
    }  # fmt: skip
    return TrainingPlan.of(settings or RunSettings(), TABLE, **(usual | terms))


def test_settings_are_those_asked_for_with_the_hazard() -> None:
    asked = RunSettings(grace=5.0, keep=3, hazard=9.0, spill="/spill", restart=True)
    assert plan(asked, hazard=0.5).settings == replace(asked, hazard=0.5)
    assert plan(asked).settings == replace(asked, hazard=hazard(0, 0.0))
    assert plan(asked).table is TABLE
    assert plan(seed=7).seed == 7


def test_a_stated_hazard_stays_another_follows_what_happens() -> None:
    stated, learnt = plan(hazard=0.0), plan(hazard=None)
    assert (stated.learns, learnt.learns) == (False, True)
    assert stated.hazard(3, 3600.0) == stated.settings.hazard == 0.0
    assert learnt.hazard(0, 0.0) == learnt.settings.hazard
    assert learnt.hazard(3, 7200.0) == hazard(3, 7200.0) > learnt.settings.hazard


@pytest.mark.parametrize(
    ("terms", "trial", "why"),
    [
        ({"canary": "never"}, None, ""),
        ({"placement": {}, "canary": "always"}, None, ""),
        ({"canary": "always"}, CanaryPlan(2, 2, 20), "asked for"),
        ({"canary": "always", "canary_steps": 5, "placement": {"a": 1}}, CanaryPlan(1, 1, 5), "asked for"),
        ({"canary": "always", "max_gpus": 1}, CanaryPlan(1, 1), "asked for"),
        ({}, CanaryPlan(2, 2), "the trial costs nothing"),
        ({"max_gpus": 2}, None, "the run is no larger than a trial"),
        ({"placement": {"a": 1}}, None, "the run is no larger than a trial"),
        ({"resumes": True}, None, "it resumes from a checkpoint: it has run before"),
        ({"resumes": True, "canary": "always"}, CanaryPlan(2, 2), "asked for"),
        ({"free": False}, None, "it would save 1.8 GPU-min on average and cost at most 10.0"),
        ({"free": False, "placement": {"a": 32}, "max_gpus": 32}, CanaryPlan(2, 1),
         "it would save 14.4 GPU-min on average and cost at most 10.0"),
    ],
)  # fmt: skip
def test_the_trial_that_comes_first(terms: dict[str, Any], trial: CanaryPlan | None, why: str) -> None:
    found = plan(**terms)
    assert (found.canary, found.why) == (trial, why)


def test_a_trial_has_steps() -> None:
    with pytest.raises(OptionError, match="steps >= 1"):
        plan(canary_steps=0)


def test_retries_by_name_and_delays_that_keep_their_order() -> None:
    assert plan(retries="blind").retries == BlindRetry()
    assert plan(back_off=0.0).retries == RetryPolicy(first_delay=0.0)
    assert plan(back_off=3600.0).retries == RetryPolicy(first_delay=3600.0, most_delay=3600.0)
