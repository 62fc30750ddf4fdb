"""What benchmarks beside DuckDB alone and with more workers say on the page."""

from typing import Any

import pytest

from tests.benchmarks import document_native, document_sql
from tests.benchmarks.native_stages import over_alone

ROWS = [
    {"query": 1, "wall": {"alone": 2.0, "duckdb": 2.2}, "cpu": {"alone": 1.0, "duckdb": 2.0}},
    {"query": 2, "wall": {"alone": 0.5, "duckdb": 0.9}, "cpu": {"alone": 1.0, "duckdb": 8.0}},
    {"query": 3, "wall": {"alone": 0.5, "duckdb": 0.6}, "cpu": {"alone": 1.0, "duckdb": 1.0}},
]


def test_long_queries_are_compared_by_ratio_and_short_ones_by_what_comes_on_top() -> None:
    told = over_alone(ROWS, "duckdb")
    assert told["cpu"] == {"geometric_mean": pytest.approx(2.52), "worst": 8.0, "worst_query": 2}
    assert told["wall_long"] == {"geometric_mean": 1.1, "worst": 1.1, "worst_query": 1}
    assert told["more_short"] == {"median": 0.25, "worst": 0.4, "worst_query": 2}


def test_without_a_short_or_a_long_query_nothing_is_said_of_them() -> None:
    assert over_alone(ROWS[:1], "duckdb")["more_short"]["worst"] is None
    found = {
        "systems": ["duckdb", "alone"],
        "tables": "sf5",
        "rounds": 3,
        "machine": "2 cores",
        "queries": [row | {"equal": row["query"] == 2, "load": 1.0} for row in ROWS[1:]],
        "over_alone": {"duckdb": over_alone(ROWS[1:], "duckdb")},
    }
    text = document_native.stages(found)
    assert "| embedded engine | 2.83 (worst 8.00, Q2) | – | 250 (worst 400, Q2) |" in text
    assert "Answers differ: Q3." in text
    assert document_native.more_stages(found).startswith("### At scale factor 5\n\n`python -m")


def test_ten_longest_queries_on_few_and_on_many_workers() -> None:
    def found(workers: int, *seconds: tuple[float, float]) -> dict[str, Any]:
        cases = [
            {
                "suite": "tpch",
                "query": number,
                "schedule": "none",
                "better": "spark-tuned",
                "systems": {"ebbflow": {"seconds": ours}, "spark-tuned": {"seconds": theirs}},
            }
            for number, (ours, theirs) in enumerate(seconds, 1)
        ]
        setup = {"workers": workers, "tables": {}, "pairs": 1, "cpus": 0.5, "memory": "2g", "seed": 1}
        return {"cases": cases, "setup": setup | {"conf": {}, "cap": "held", "machine": "2 cores"}}

    short = [(1.0, 1.0)] * 8
    text = document_sql.scaling(
        found(1, (0.5, 9.0), (9.0, 30.0), (8.0, 20.0), *short),
        found(4, (0.5, 9.0), (3.0, 15.0), (2.0, 10.0), *short),
    )
    assert "| tpch Q2 | 9.00 | 3.00 | 3.00 | 30.00 | 15.00 | 2.00 |" in text
    assert "tpch Q1 " not in text  # the shortest
    assert "4 workers are 1.00 times as fast in the median" in text


def test_what_a_query_takes_longer_than_a_session_with_the_same_statement() -> None:
    seconds = {"ebbflow": [7.0, 8.0, 9.0], "spark": [6.0, 6.5, 7.0]}
    found = {"seconds": seconds, "pairs": 3, "workers": 2, "machine": "2 cores", "load": 1.0}
    text = document_native.start(found | {"more": {"median": 1.5, "worst": 2.0, "goal": 1.5}})
    assert "8.0 s from the start" in text
    assert "same statement, 6.5 s" in text
    assert "pairs is 1.50 s (worst 2.00)" in text


def test_runs_that_lose_a_worker_stand_beside_undisturbed_ones() -> None:
    setup = {"tables": {"tpch": "sf20"}, "pairs": 2, "workers": 3, "cpus": 0.5, "memory": "2g", "seed": 1}
    case = {"suite": "tpch", "query": 9, "schedule": "none", "better": "spark-tuned"}
    beside = case | {"systems": {"ebbflow": {"seconds": 11.0}, "spark-tuned": {"seconds": 60.0}}}
    alone = [
        {"suite": "tpch", "query": 9, "schedule": schedule, "seconds": seconds}
        for schedule, seconds in (("none", 10.0), ("kill", 15.0), ("notice", 12.0))
    ]
    found = {"cases": [], "alone": alone, "setup": setup | {"conf": {}}}
    text = document_sql.faults(found, {"cases": [beside]})
    assert "| tpch Q9 | 60.00 | 10.00 | 15.00 | 0.25 | 12.00 | 0.20 |" in text
    assert "--queries tpch:9 --schedules none,kill,notice" in text
