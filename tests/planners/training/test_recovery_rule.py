"""When a training that lost workers continues in place, and when it begins again."""

from dataclasses import replace

import pytest

from ebbflow.planners.training.failures.recovery import WorkerLoss, recovery_of

LOSS = WorkerLoss(service=True, formed=True, left=2, minimum=1)


def test_the_others_train_on_over_aggregators() -> None:
    assert recovery_of(LOSS).in_place
    assert recovery_of(LOSS).reason == "2 slots continue"


def test_the_others_train_on_by_all_reduce_where_the_script_allows_it() -> None:
    replicas = replace(LOSS, service=False, replicas=True)
    assert recovery_of(replicas).in_place
    found = recovery_of(replace(replicas, obstacle="communication is planned"))
    assert (found.in_place, found.reason) == (False, "communication is planned")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"service": False}, "all of its processes"),
        ({"formed": False}, "had not met"),
        ({"left": 0}, "0 slots are left, 1 are needed"),
        ({"stopping": True}, "was to end"),
        ({"script_failed": True}, "script itself failed"),
    ],
)
def test_otherwise_a_generation_ends(changes: dict[str, object], reason: str) -> None:
    found = recovery_of(replace(LOSS, **changes))  # type: ignore[arg-type]
    assert not found.in_place
    assert reason in found.reason
