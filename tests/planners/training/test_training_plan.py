"""What is decided of a training before it begins."""

from dataclasses import replace
from typing import Any

import pytest

from ebbflow.planners.errors import OptionError
from ebbflow.planners.hazard import hazard
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.training.failures.failures import FailureTable
from ebbflow.planners.training.failures.preflight import PreflightPlan
from ebbflow.planners.training.failures.retries import BlindRetry, RetryPolicy
from ebbflow.planners.training.plan import TrainingPlan

TABLE = FailureTable.parse({"rule": [{"reason": "r", "class": "user", "patterns": ["x"]}]})


def plan(settings: RunSettings | None = None, **terms: Any) -> TrainingPlan:
    usual: dict[str, Any] = {
        "placement": {"a": 2, "b": 2}, "max_gpus": 4, "hazard": None, "preflight": "auto", "preflight_steps": 20,
        "retry_policy": "by-class", "retry_backoff": 120.0, "free": True, "resumes": False,
    }  # fmt: skip
    return TrainingPlan.of(settings or RunSettings(), TABLE, **(usual | terms))


def test_settings_are_those_asked_for_with_the_hazard() -> None:
    asked = RunSettings(
        termination_grace=5.0, keep_checkpoints=3, interruption_rate=9.0, spill_dir="/spill", restart=True
    )
    assert plan(asked, hazard=0.5).settings == replace(asked, interruption_rate=0.5)
    assert plan(asked).settings == replace(asked, interruption_rate=hazard(0, 0.0))
    assert plan(asked).table is TABLE
    assert plan(seed=7).seed == 7


def test_a_stated_hazard_stays_another_follows_what_happens() -> None:
    stated, learnt = plan(hazard=0.0), plan(hazard=None)
    assert (stated.learns, learnt.learns) == (False, True)
    assert stated.hazard(3, 3600.0) == stated.settings.interruption_rate == 0.0
    assert learnt.hazard(0, 0.0) == learnt.settings.interruption_rate
    assert learnt.hazard(3, 7200.0) == hazard(3, 7200.0) > learnt.settings.interruption_rate


@pytest.mark.parametrize(
    ("terms", "trial", "why"),
    [
        ({"preflight": "never"}, None, ""),
        ({"placement": {}, "preflight": "always"}, None, ""),
        ({"preflight": "always"}, PreflightPlan(2, 2, 20), "requested"),
        ({"preflight": "always", "preflight_steps": 5, "placement": {"a": 1}}, PreflightPlan(1, 1, 5), "requested"),
        ({"preflight": "always", "max_gpus": 1}, PreflightPlan(1, 1), "requested"),
        ({"preflight": "always", "replica": 4}, PreflightPlan(4, 2), "requested"),
        ({}, PreflightPlan(2, 2), "it costs nothing here: no other app wants these slots"),
        ({"max_gpus": 2}, None, "the run is no larger than a preflight run"),
        ({"placement": {"a": 1}}, None, "the run is no larger than a preflight run"),
        ({"resumes": True}, None, "it resumes from a checkpoint: it has run before"),
        ({"resumes": True, "preflight": "always"}, PreflightPlan(2, 2), "requested"),
        ({"free": False}, None, "it would save 1.8 GPU-min on average and cost at most 10.0"),
        ({"free": False, "placement": {"a": 32}, "max_gpus": 32}, PreflightPlan(2, 1),
         "it would save 14.4 GPU-min on average and cost at most 10.0"),
    ],
)  # fmt: skip
def test_the_trial_that_comes_first(terms: dict[str, Any], trial: PreflightPlan | None, why: str) -> None:
    found = plan(**terms)
    assert (found.preflight, found.why) == (trial, why)


def test_a_trial_has_steps() -> None:
    with pytest.raises(OptionError, match="steps >= 1"):
        plan(preflight_steps=0)


def test_retries_by_name_and_delays_that_keep_their_order() -> None:
    assert plan(retry_policy="blind").retries == BlindRetry()
    assert plan(retry_backoff=0.0).retries == RetryPolicy(first_delay=0.0)
    assert plan(retry_backoff=3600.0).retries == RetryPolicy(first_delay=3600.0, most_delay=3600.0)
