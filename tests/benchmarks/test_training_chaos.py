"""Runs of more seeds beside those that a file of results has."""

from typing import Any

from tests.benchmarks.training_chaos import added_to, seeds_of, spans, summarised


def run(seed: int, *happened: str, wrong: str = "") -> dict[str, Any]:
    return {
        "mode": "fsdp", "seed": seed, "seconds": 10.0 + seed, "steps": 100, "generations": 2,
        "happened": list(happened), "restarts": ["sharded"], "wrong": wrong,
    }  # fmt: skip


def row(*runs: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = summarised(runs, ["fsdp"])["modes"]["fsdp"]
    return found


def test_runs_of_other_seeds_are_added() -> None:
    first = row(run(0, "kill+grow"), run(1, "kill"))
    more = row(run(2, "notice"), run(5, "kill", wrong="TimeoutError: no steps"))
    found = added_to(first, more)
    assert found["seeds"] == [[0, 2], [5, 5]]
    assert (found["runs"], found["whole"], found["two_at_once"], found["steps"]) == (4, 3, 1, 400)
    assert found["events"] == {"grow": 1, "kill": 3, "notice": 1}
    assert found["wrong"] == ["5: TimeoutError: no steps"]
    assert found["restarts"] == {"sharded": 4}
    assert found["run_s"] == 13.5
    assert seeds_of(found) == {0, 1, 2, 5}


def test_where_one_has_none_the_other_stays() -> None:
    first = row(run(0, "kill"))
    assert added_to(first, row()) == added_to({}, first) == first
    assert seeds_of({}) == set()


def test_spans_are_of_numbers_that_follow_one_another() -> None:
    assert spans([7, 1, 2, 2, 3]) == [[1, 3], [7, 7]]
    assert spans([]) == []
