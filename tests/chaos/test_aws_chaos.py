"""A chaotic run of a pipeline on emulated AWS; ``tests.benchmarks.aws_pipelines`` does many, with a Spark pool."""

from pathlib import Path

import pytest

from tests.benchmarks.system_chaos import ENDS, run_seed
from tests.chaos.aws_events import KINDS, events_of

LIMIT = 1500.0  # s


def test_a_seed_decides_what_happens() -> None:
    schedules = [events_of(seed, spark=True) for seed in range(50)]
    assert schedules == [events_of(seed, spark=True) for seed in range(50)]
    assert {event.kind for events in schedules for event in events} == set(KINDS)
    assert {event.step for events in schedules for event in events} == {"pairs", "fit", "rates", "groups"}
    assert all(len(events) >= 2 for events in schedules)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(LIMIT + 2 * ENDS)
def test_a_pipeline_on_emulated_aws_loses_and_leaves_nothing(tmp_path: Path) -> None:
    outcome = run_seed(3, tmp_path, "tests.chaos.aws_run", "--no-spark", limit=LIMIT)
    assert outcome["violations"] == []
    assert any(fault["proof"] for fault in outcome["faults"]), outcome
