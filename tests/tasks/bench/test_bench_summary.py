"""Ratios, bars and explanations."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.benchmarks.sql.cases import Query
from tests.benchmarks.sql.records import Journal, Record
from tests.benchmarks.sql.summary import bars, cases, explain_loss, geometric_mean, quantile, summarise
from tests.benchmarks.sql.terminal import picture, print_summary, write_summary

METRICS = {
    "planning": 0.5, "idle": 0.5, "task_seconds": 10.0, "wasted": 0.0, "stages": 5, "retried": 0,
    "failed_tasks": 0, "waiting": 0.0, "scheduler_delay": 0.0, "deserialize": 0.0, "run": 9.0, "cpu": 6.0,
    "gc": 0.0, "fetch_wait": 0.0, "broadcast": 0.0, "input_bytes": 0, "shuffle_bytes": 0, "spilled_bytes": 0,
    "output_bytes": 0,
}  # fmt: skip


def run(
    system: str, wall: float, pair: int = 0, schedule: str = "none", query: int = 5, **others: Any
) -> Record:
    metrics = METRICS | others.pop("metrics", {})
    return Record(
        "tpch", query, schedule, pair, system, 0, others.pop("ok", True), wall, metrics=metrics, **others
    )


def test_the_better_plain_system_is_chosen_by_its_median() -> None:
    records = [
        *(run("spark", w, p) for p, w in enumerate((1.0, 10.0, 10.0))),
        *(run("spark-cbo", w, p) for p, w in enumerate((8.0, 8.0, 8.0))),
        *(run("ebbflow", w, p) for p, w in enumerate((4.0, 4.0, 8.0))),
    ]
    (case,) = cases(records)
    assert case.better == "spark-cbo"
    assert [p.ratio for p in case.pairs] == [0.5, 0.5, 1.0]
    assert case.ratio == 0.5


def test_a_round_without_ebbflow_or_plain_spark_is_no_case() -> None:
    assert cases([run("spark", 1.0), run("ebbflow", 1.0, pair=1)]) == []
    assert cases([run("ebbflow", 1.0)]) == []


@pytest.mark.parametrize(
    ("ours", "theirs", "ratio", "bounded", "gain"),
    [(True, True, 0.5, 0.5, 2.0), (True, False, 0.0, 0.5, 2.0), (False, True, math.inf, math.inf, 0.0),
     (False, False, 1.0, 1.0, 1.0)],
)  # fmt: skip
def test_failed_runs_never_complete_and_are_never_dropped(
    ours: bool, theirs: bool, ratio: float, bounded: float, gain: float
) -> None:
    (case,) = cases([run("spark", 10.0, ok=theirs), run("ebbflow", 5.0, ok=ours)])
    (pair,) = case.pairs
    assert (pair.ratio, pair.bounded, pair.gain) == (ratio, bounded, gain)


def test_a_wrong_answer_of_ours_is_an_infinite_ratio() -> None:
    (case,) = cases([run("spark", 10.0), run("ebbflow", 5.0, right=False)])
    assert case.ratio == math.inf
    assert geometric_mean([case]) == math.inf


def test_bars_over_multi_join_queries() -> None:
    faulty = {"metrics": {"wasted": 5.0}}
    records = [
        run("spark", 10.0), run("ebbflow", 5.0),
        run("spark", 10.0, query=7), run("ebbflow", 12.0, query=7),
        run("spark", 10.0, query=6), run("ebbflow", 99.0, query=6),  # no join: not counted
        run("spark", 20.0, schedule="kill", **faulty), run("ebbflow", 10.0, schedule="kill"),
        run("spark", 40.0, schedule="volatile", **faulty), run("ebbflow", 10.0, schedule="volatile"),
    ]  # fmt: skip
    mean, worst, kill, volatile, gain, wasted = bars(cases(records))
    assert mean.value == pytest.approx(math.sqrt(0.5 * 1.2))
    assert (mean.holds, worst.value, worst.holds) == (True, pytest.approx(1.2), False)
    assert (kill.value, kill.holds) == (0.5, True)
    assert volatile.value == 0.25
    assert (gain.value, gain.holds) == (4.0, True)
    assert wasted.value == 0.0


def test_waste_is_compared_with_the_better_plain_spark() -> None:
    runs = [
        run("spark", 20.0, schedule="kill", metrics={"wasted": 9.0, "task_seconds": 10.0}),
        run("spark-cbo", 10.0, schedule="kill", metrics={"wasted": 4.0, "task_seconds": 12.0}),
        run("ebbflow", 5.0, schedule="kill", metrics={"wasted": 1.0, "task_seconds": 9.0}),
    ]
    *_, wasted = bars(cases(runs))
    assert wasted.value == pytest.approx((1 / 8) / (4 / 8))


def test_what_was_not_measured_holds_nothing() -> None:
    assert all(b.value is None and b.holds is None for b in bars([]))


def test_quantile_is_the_inverse_of_the_distribution() -> None:
    values = [float(v) for v in range(1, 11)]
    assert (quantile(values, 0.9), quantile(values, 1.0), quantile(values, 0.05)) == (9.0, 10.0, 1.0)
    assert quantile([], 0.5) is None


def test_a_loss_names_the_parts_that_grew_largest_first() -> None:
    theirs = {"seconds": 10.0, "failed": [], "wrong": [], **METRICS}
    ours = theirs | {"seconds": 15.0, "planning": 1.0, "idle": 4.0, "cpu": 9.0, "shuffle_bytes": 5 << 20}
    words = explain_loss(ours, theirs, workers=3)
    assert words.startswith("between statements +3.5 s, stages running +1.0 s, planning +0.5 s")
    assert "processor time +1.0 s" in words
    assert "5 MiB more shuffled" in words
    assert explain_loss(ours | {"seconds": math.inf, "failed": ["gone"]}, theirs, 3) == "failed: gone"


def test_the_summary_is_json_and_shows_everywhere(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add_setup({"tables": {"tpch": "sf1"}, "workers": 3, "cpus": 0.5, "seed": 1, "cap": "capped [x]"})
    journal.add_span(Query("tpch", 5), 10.0)
    for record in (
        run("spark", 10.0, ok=False, error="[gave] up"),
        run("ebbflow", 5.0),
        run("spark", 10.0, schedule="kill"),
        run("ebbflow", 5.0, schedule="kill", ok=False, error="lost", started=90_000.0),
    ):
        journal.add(record)
    summary = summarise(journal)
    written, drawn = write_summary(summary, tmp_path)
    assert json.loads(written.read_text()) == summary
    assert {c["schedule"]: c["ratio"] for c in summary["cases"]} == {"none": 0.0, "kill": "inf"}
    assert [s["days"] for s in summary["schedules"]] == [
        ["1970-01-01", "1970-01-01"],
        ["1970-01-01", "1970-01-02"],
    ]
    assert drawn.read_text().startswith("<svg")
    assert "kill" in picture(summary)
    out = io.StringIO()
    print_summary(summary, Console(file=out, width=200))
    text = out.getvalue()
    assert "0 (plain failed)" in text
    assert "∞" in text
    assert "failed: lost" in text


def test_nothing_measured_is_said(tmp_path: Path) -> None:
    out = io.StringIO()
    print_summary(summarise(Journal(tmp_path)), Console(file=out))
    assert "no whole round" in out.getvalue()
