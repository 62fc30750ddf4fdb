"""The journal survives crashes and refuses to mix what cannot be compared."""

from dataclasses import replace
from pathlib import Path

import pytest

from ebbflow.planners.errors import OptionError
from tests.benchmarks.sql.cases import Plan, Query, Run
from tests.benchmarks.sql.records import ClusterEvent, Journal, Record

RECORD = Record(
    "tpch", 5, "kill", 0, "spark", 0, True, 12.5, True,
    metrics={"wasted": 1.0}, happenings=(ClusterEvent(6.0, "kill", "worker-2", 2),),
)  # fmt: skip
SETUP = {"tables": {"tpch": "sf1"}, "workers": 3, "cpus": 0.5, "seed": 1}


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add_setup(SETUP)
    journal.add_span(Query("tpch", 5), 10.0)
    journal.add_baseline(replace(RECORD, schedule="none", pair=-1))
    journal.add(RECORD)
    again = Journal(tmp_path)
    assert again.records == {RECORD.key: RECORD}
    assert again.spans == {"tpch-q5": 10.0}
    assert again.setup == SETUP
    assert len(again.baselines["tpch-q5"]) == 1


def test_a_record_has_the_key_of_its_run() -> None:
    run = Run(Query("tpch", 5), "kill", 0, "spark")
    assert Record.of(run, None, order=0, ok=True, wall=1.0).key == run.key == RECORD.key
    assert run.case == RECORD.case


def test_a_torn_line_is_passed_over_and_does_not_swallow_the_next(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add(RECORD)
    with journal.path.open("a") as file:
        file.write('{"kind": "run", "sui')
    later = replace(RECORD, pair=1)
    Journal(tmp_path).add(later)
    assert set(Journal(tmp_path).records) == {RECORD.key, later.key}


def test_half_a_round_is_not_done(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    (runs,) = Plan((Query("tpch", 5),), ("kill",), ("spark", "ebbflow"), pairs=1).rounds()
    journal.add(RECORD)
    assert not journal.done(runs)
    journal.add(replace(RECORD, system="ebbflow"))
    assert journal.done(runs)


def test_the_latest_of_two_equal_runs_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.add(RECORD)
    journal.add(replace(RECORD, wall=3.0))
    assert Journal(tmp_path).records[RECORD.key].wall == 3.0


@pytest.mark.parametrize(
    "change",
    [
        {"workers": 4},
        {"seed": 2},
        {"cpus": 0.6},
        {"tables": {"tpch": "sf5"}},
        {"memory": "3g"},
        {"class_archive": True},
        {"scaled_by": "spark-tuned"},
    ],
)
def test_runs_under_other_conditions_need_another_folder(tmp_path: Path, change: dict[str, object]) -> None:
    Journal(tmp_path).add_setup(SETUP)
    with pytest.raises(OptionError, match="name another folder"):
        Journal(tmp_path).add_setup(SETUP | change)


def test_wrong_and_failed_runs_never_complete() -> None:
    assert RECORD.seconds == 12.5
    assert replace(RECORD, ok=False).seconds == float("inf")
    assert replace(RECORD, right=False).seconds == float("inf")
    assert replace(RECORD, right=None).seconds == 12.5
