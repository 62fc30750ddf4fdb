"""The arithmetic of task time, on answers shaped as Spark's status API gives them."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.sql.metrics import ApiSnapshot, contributing, covered, duration, measure, seconds

BEGAN = 1_790_000_000.0


def at(offset: float) -> str:
    from datetime import UTC, datetime

    moment = datetime.fromtimestamp(BEGAN + offset, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}GMT"


def task(partition: int, launched: float, spent: float | None, status: str = "SUCCESS") -> dict[str, Any]:
    found = {
        "partitionId": partition,
        "index": partition,
        "launchTime": at(launched),
        "status": status,
        "schedulerDelay": 100,
    }
    return found if spent is None else found | {"duration": spent * 1000}


def stage(number: int, rdds: list[int], tasks: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
    return {
        "stageId": number,
        "attemptId": 0,
        "status": "COMPLETE",
        "rddIds": rdds,
        "submissionTime": at(1.0),
        "firstTaskLaunchedTime": at(1.5),
        "completionTime": at(4.0),
        "tasks": {str(i): t for i, t in enumerate(tasks)},
        **others,
    }


def job(number: int, stages: list[int], group: str = "g", submitted: float = 1.0) -> dict[str, Any]:
    return {"jobId": number, "stageIds": stages, "jobGroup": group, "submissionTime": at(submitted)}


def figures(stages: list[dict[str, Any]], jobs: list[dict[str, Any]] | None = None, **options: Any) -> Any:
    jobs = jobs or [job(0, [s["stageId"] for s in stages])]
    return measure(ApiSnapshot(jobs, stages, []), BEGAN, BEGAN + 10.0, **options)


def test_without_faults_nothing_is_wasted() -> None:
    found = figures([stage(0, [1], [task(0, 1.5, 2.0), task(1, 1.5, 1.0)])])
    assert found.task_seconds == pytest.approx(3.0)
    assert found.wasted == 0
    assert found.useful == pytest.approx(3.0)


def test_failed_and_killed_tasks_are_wasted() -> None:
    tasks = [task(0, 1, 2.0, "FAILED"), task(0, 3, 1.0), task(1, 1, 0.5, "KILLED"), task(1, 2, 1.0)]
    found = figures([stage(0, [1], tasks)])
    assert found.wasted == pytest.approx(2.5)
    assert found.failed_tasks == 2


def test_a_task_that_vanished_counts_until_the_end() -> None:
    found = figures([stage(0, [1], [task(0, 4.0, None, "RUNNING"), task(0, 5.0, 1.0)])])
    assert found.wasted == pytest.approx(6.0)


def test_output_that_was_computed_again_is_wasted_the_first_time() -> None:
    first = stage(0, [1, 2], [task(0, 1, 2.0), task(1, 1, 2.0)])
    again = stage(0, [1, 2], [task(1, 5, 1.5)], attemptId=1)
    found = figures([first, again])
    assert found.wasted == pytest.approx(2.0)
    assert found.retried == 1


def test_work_repeated_under_another_stage_number_is_recognised_by_its_data_sets() -> None:
    found = figures([stage(0, [1, 2], [task(0, 1, 2.0)]), stage(7, [2, 1], [task(0, 5, 3.0)])])
    assert found.wasted == pytest.approx(2.0)
    other = figures([stage(0, [1, 2], [task(0, 1, 2.0)]), stage(7, [3], [task(0, 5, 3.0)])])
    assert other.wasted == 0


def test_statements_that_led_nowhere_are_wasted_whole() -> None:
    stages = [stage(0, [1], [task(0, 1, 2.0)]), stage(1, [2], [task(0, 1, 3.0)])]
    jobs = [job(0, [0], "cancelled"), job(1, [1], "kept")]
    found = figures(stages, jobs, useful=lambda group: group == "kept")
    assert found.wasted == pytest.approx(2.0)


def test_wall_is_planning_idle_and_stages() -> None:
    stages = [
        stage(0, [1], [], submissionTime=at(1.0), completionTime=at(4.0)),
        stage(1, [2], [], submissionTime=at(3.0), completionTime=at(5.0)),
        stage(2, [3], [], submissionTime=at(7.0), completionTime=at(9.0)),
    ]
    found = figures(stages)
    assert found.planning == pytest.approx(1.0, abs=2e-3)
    assert found.idle == pytest.approx(3.0, abs=5e-3)  # 5 to 7, and 9 to 10
    assert found.wall == 10.0
    assert found.waiting == pytest.approx(0.5 + 0 + 0, abs=2e-3)


def test_a_run_without_any_job_is_all_planning() -> None:
    found = measure(ApiSnapshot([], [], []), BEGAN, BEGAN + 2.0)
    assert (found.planning, found.idle, found.task_seconds) == (2.0, 0.0, 0.0)


def test_broadcast_times_are_summed() -> None:
    metrics = [
        {"name": "time to collect", "value": "240 ms"},
        {"name": "time to build", "value": "1.5 s"},
        {"name": "data size", "value": "64.0 MiB"},
    ]
    nodes = [
        {"nodeName": "BroadcastExchange", "metrics": metrics},
        {"nodeName": "Exchange", "metrics": metrics},
    ]
    found = measure(ApiSnapshot([], [], [{"id": 0, "nodes": nodes}]), BEGAN, BEGAN + 1)
    assert found.broadcast == pytest.approx(1.74)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("3 ms", 0.003), ("2.0 m", 120.0), ("1.50 h", 5400.0), ("1,234.5 s", 1234.5), ("", 0)],
)
def test_durations_are_read(text: str, expected: float) -> None:
    assert duration(text) == pytest.approx(expected)


def test_moments_are_read_in_utc() -> None:
    assert seconds("1970-01-01T00:00:01.500GMT") == 1.5
    assert seconds(None) is None


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50))))
def test_covered_is_the_length_of_the_union(spans: list[tuple[int, int]]) -> None:
    cells = {cell for a, b in spans for cell in range(a, b)}
    assert covered((float(a), float(b)) for a, b in spans) == len(cells)


def test_statements_are_followed_back_from_the_result() -> None:
    outputs = {"a": "/s/1", "b": "/s/2", "c": "/s/22", "d": "/s/3"}
    inputs = {"a": (), "b": ("/t/x.parquet",), "c": (), "d": ("/s/1/part-0.parquet", "/s/2/part-0.parquet")}
    assert contributing(outputs, inputs, ["/s/3"]) == {"a", "b", "d"}
    assert contributing(outputs, inputs, ["/s/3/part-0.parquet", "/s/22/part-1.parquet"]) == {
        "a",
        "b",
        "c",
        "d",
    }
    assert contributing(outputs, inputs, ["/elsewhere"]) == frozenset()
