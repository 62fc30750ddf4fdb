"""The order of work, and where queries come from."""

from collections import Counter
from pathlib import Path

import pytest

from ebbflow.planners.errors import OptionError
from tests.benchmarks.sql.cases import QUERIES, SYSTEMS, Plan, Query, System, chosen_queries, query_text

TWO = (Query("tpch", 5), Query("tpch", 7))


def test_every_round_has_every_system_once() -> None:
    plan = Plan(TWO, ("none", "kill"), pairs=3)
    rounds = list(plan.rounds())
    assert len(rounds) == 2 * 2 * 3
    for runs in rounds:
        assert sorted(r.system for r in runs) == sorted(SYSTEMS)
        assert len({(r.query, r.schedule, r.pair) for r in runs}) == 1


def test_each_system_begins_equally_often_in_every_case() -> None:
    plan = Plan(TWO, ("none", "kill"), pairs=10)
    first = Counter((runs[0].query, runs[0].schedule, runs[0].system) for runs in plan.rounds())
    assert set(first.values()) == {2}


def test_every_disturbed_case_has_its_first_round_before_any_has_a_second() -> None:
    plan = Plan(TWO, ("kill", "none", "notice"), pairs=2)
    pairs = [runs[0].pair for runs in plan.rounds() if runs[0].schedule != "none"]
    assert pairs == [0, 0, 0, 0, 1, 1, 1, 1]


def test_undisturbed_rounds_come_before_any_executor_is_lost() -> None:
    plan = Plan(TWO, ("kill", "none"), pairs=2)
    assert [runs[0].schedule for runs in plan.rounds()] == ["none"] * 4 + ["kill"] * 4


def test_systems_of_a_round_share_their_seed_and_rounds_do_not() -> None:
    plan = Plan(TWO, ("volatile",), pairs=2)
    seeds = [{plan.seed_of(r) for r in runs} for runs in plan.rounds()]
    assert all(len(s) == 1 for s in seeds)
    assert len(set.union(*seeds)) == len(seeds)


@pytest.mark.parametrize(
    ("systems", "scaled_by"),
    [
        (("ebbflow", "spark-tuned-cbo", "spark-tuned"), "spark-tuned-cbo"),
        (("spark-tuned",), "spark-tuned"),
        (("ebbflow",), "ebbflow"),
        (SYSTEMS, "spark"),
    ],
)
def test_schedules_are_scaled_by_the_first_plain_spark_that_takes_part(
    systems: tuple[System, ...], scaled_by: System
) -> None:
    assert Plan(TWO, systems=systems).scaled_by == scaled_by


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pairs": 0}, "pairs must be >= 1; got 0"),
        ({"systems": ("hive",)}, "'hive'"),
        ({"schedules": ("storm",)}, "'storm'"),
        ({"queries": ()}, "at least one query"),
        ({"workers": 1}, "at least 2 workers"),
    ],
)
def test_bad_plans_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Plan(**({"queries": TWO} | options))  # type: ignore[arg-type]


def test_queries_are_asked_by_number_or_with_their_suite() -> None:
    assert chosen_queries(["tpch"], ["5", " 7", "5"]) == TWO
    assert chosen_queries(["tpch", "tpcds"], ["tpch:5", "tpcds:25"]) == (Query("tpch", 5), Query("tpcds", 25))
    assert chosen_queries(["tpch", "tpcds"], ["3"]) == (Query("tpch", 3), Query("tpcds", 3))
    assert [q.number for q in chosen_queries(["tpcds"])] == list(QUERIES["tpcds"])


@pytest.mark.parametrize("word", ["0", "23", "x", "tpcds:3", "5;7"])
def test_a_word_that_is_no_query_is_named(word: str) -> None:
    with pytest.raises(OptionError, match=repr(word)):
        chosen_queries(["tpch"], [word])


def test_texts_beside_the_tables_are_translated_for_spark(tmp_path: Path) -> None:
    (tmp_path / "queries").mkdir()
    (tmp_path / "queries" / "q3.sql").write_text('SELECT a AS "b c" FROM t;\n')
    tables = tmp_path / "sf1"
    tables.mkdir()
    assert "`b c`" in query_text(Query("tpcds", 3), tables)
    with pytest.raises(OptionError, match="tpcds-q4 has no text"):
        query_text(Query("tpcds", 4), tables)
    (tmp_path / "queries" / "q5.sql").write_text("SELECT 1; SELECT 2")
    with pytest.raises(OptionError, match="not one statement"):
        query_text(Query("tpcds", 5), tables)


def test_tpch_texts_come_with_the_package() -> None:
    assert "lineitem" in query_text(Query("tpch", 5), Path("/nowhere"))


def test_after_the_first_round_only_the_best_plain_spark_goes_on() -> None:
    first, second = Plan(TWO[:1], ("none",), pairs=2).rounds()
    seconds = {"spark": 9.0, "spark-cbo": 8.0, "spark-tuned": 4.0, "spark-tuned-cbo": 5.0, "ebbflow": 3.0}
    plan = Plan(TWO[:1])
    assert plan.narrowed(first, seconds) == first
    assert sorted(run.system for run in plan.narrowed(second, seconds)) == ["ebbflow", "spark-tuned"]
