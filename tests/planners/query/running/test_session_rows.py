"""What is decided when a stage has other rows than it was planned with."""

from dataclasses import replace

import pytest

from ebbflow.planners.model import Measured, Work
from ebbflow.planners.query.costs.cost import DUCKDB
from ebbflow.planners.query.costs.fitting import q_error
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.planners.query.running.execution import Start
from ebbflow.planners.query.running.session import Decided
from tests.planners.query.replanning_cases import plan, stage
from tests.planners.query.running.test_session import Drawn, decisions, rows, seen, session, started


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (replace(stage("ABC", ("AB",)), work=Work(joined_rows=9.0)), "stay"),  # of what it reads with itself
        (stage("ABC", ("AB",), memory=99.0), "switch"),  # more than there is
    ],
)
def test_other_plans_are_made_though_only_one_relation_is_left_to_read(last: Stage, kind: str) -> None:
    first, usual = replace(stage("AB"), rows=10), stage("ABC", ("AB",), key="usual")
    planner = Drawn(plan("q", first, usual))
    query = session(planner)
    query.begin({}, 0.0)
    planner.plans = (plan("q", first, last), plan("other", first, usual))
    actions = query.on_finished(first, rows("AB", 1000), 1.0)
    assert len(planner.asked) == 2
    assert decisions(actions) == [kind]


@pytest.mark.parametrize(("found", "counted"), [(1, True), (100, False)])
def test_times_of_a_stage_whose_input_an_earlier_run_has_left_with_other_rows_are_no_error_of_times(
    found: int, counted: bool
) -> None:
    work = Work(scanned_rows=1e9)
    due = DUCKDB.core_seconds(work)
    last = replace(stage("ABC", ("AB",), duration=due), work=work, engine="duckdb")
    query = session(Drawn(plan("q", stage("AB"), last, stage("ABCD", ("ABC",)))))
    query.begin({"AB": rows("AB", found)}, 0.0)
    slow = Measured("duckdb", work, 8 * due, 8 * due, 4, 2.0)
    query.on_finished(last, rows("ABC", 1), 1.0, measured=slow)
    assert query.measured == query._speed.comparable == [slow] * counted
    assert query._speed.error == q_error([8.0] * counted)


@pytest.mark.parametrize(
    ("expected", "found", "anew"),
    [(10, 20, False), (10, 21, True), (10, 5, False), (10, 4, True), (0, 2, False)],
)
def test_plans_are_made_anew_when_rows_are_off_by_more_than_a_factor_of_two(
    expected: int, found: int, anew: bool
) -> None:
    first = replace(stage("AB"), rows=expected)
    planner = Drawn(plan("q", first, replace(stage("ABC", ("AB",)), tables=("C",))))
    query = session(planner)
    query.begin({}, 0.0)
    actions = query.on_finished(first, rows("AB", found), 1.0)
    assert (len(planner.asked) == 2) is anew
    assert decisions(actions) == (["stay"] if anew else [])
    assert started(actions) == ["ABC"]
    if anew:
        assert planner.asked[-1][1:] == ({"AB": rows("AB", found)}, ("q",))
        assert planner.contrasts == [False, False], "the capacity is what it was"
        (told,) = (a.decision for a in actions if isinstance(a, Decided))
        assert told.trigger == f"AB: {found} rows, {expected} expected"


def test_what_a_surprising_output_makes_ready_starts_once_and_in_the_form_that_fits_it() -> None:
    first = replace(stage("AB"), rows=10)
    narrow = replace(stage("ABC", ("AB",), duration=8.0), tables=("C",))
    wide = replace(narrow, tasks=8, duration=1.0, physical_key="wide")
    planner = Drawn(plan("q", first, narrow))
    query = session(planner)
    query.begin({}, 0.0)
    planner.plans = (plan("q", first, wide), plan("other", stage("AC"), replace(wide, inputs=("AC",))))
    actions = query.on_finished(first, rows("AB", 1000), 1.0)
    assert [a for a in actions if not isinstance(a, Decided)] == [Start(wide)]


def test_stages_that_have_ended_together_are_weighed_together() -> None:
    one, other, third = (replace(stage(fp), rows=10) for fp in ("AB", "CD", "EF"))
    planner = Drawn(plan("q", one, other, third, stage("ABCDEF", ("AB", "CD", "EF"))))
    query = session(planner, cores=4)
    query.begin({}, 0.0)
    assert query.on_finished(one, rows("AB", 1000), 1.0, more=True) == []
    assert query.on_finished(other, rows("CD", 10), 1.0, more=True) == []
    actions = query.on_finished(third, rows("EF", 1), 1.0)
    assert [told for told, *_ in planner.asked[1:]] == [query.share]
    (made,) = (a.decision for a in actions if isinstance(a, Decided))
    assert made.trigger == "AB: 1,000 rows, 10 expected; EF: 1 rows, 10 expected"
    assert started(actions) == ["ABCDEF"]


@pytest.mark.parametrize(
    ("joined", "duration", "anew"), [("C", 1.0, True), ("C", 0.02, False), ("", 1.0, False)]
)
def test_no_other_plans_are_made_where_none_could_save_more_than_times_are_off(
    joined: str, duration: float, anew: bool
) -> None:
    """What is left is costed with the actual rows all the same."""
    first = replace(stage("AB"), rows=10)
    last = replace(stage("ABC", ("AB",), duration=duration), tables=(joined,) if joined else ())
    planner = Drawn(plan("q", first, last))
    query = session(planner)
    query.begin({}, 0.0)
    costed = replace(last, rows=77.0)
    planner.plans = (plan("q", first, costed), plan("other", replace(first, output_fp="AC")))
    actions = query.on_finished(first, rows("AB", 1000), 1.0)
    assert (len(planner.asked) == 2) is anew
    assert decisions(actions) == ["stay"]
    assert [a for a in actions if isinstance(a, Start)] == [Start(costed)]


@pytest.mark.parametrize(("planning", "kind"), [(0.0, "switch"), (4.0, "stay")])
def test_a_switch_saves_more_than_this_run_takes_to_plan(planning: float, kind: str) -> None:
    first = replace(stage("AB"), rows=10)
    slow = replace(stage("ABC", ("AB",), duration=9.0), tables=("C",))
    fast = replace(slow, duration=6.0, physical_key="fast")
    planner = Drawn(plan("q", first, slow))
    query = session(planner, cores=1)
    query.see(seen(1))
    query.begin({}, 0.0)
    query.planned(9.0)  # of a decision before which no plans were made
    query.on_capacity("as before", 0.0)
    query.planned(planning)
    planner.plans = (*planner.plans, plan("other", first, fast))
    made = [a.decision for a in query.on_finished(first, rows("AB", 100), 1.0) if isinstance(a, Decided)]
    assert [decision.kind for decision in made] == [kind]
    if kind == "stay":
        assert "33 % sooner, but not by more than 4.04 s" in made[0].reason


@pytest.mark.parametrize(("read", "kept"), [(1, True), (100, False)])
def test_costs_are_not_fitted_to_a_stage_that_has_read_other_rows_than_it_was_planned_with(
    read: int, kept: bool
) -> None:
    first, last = replace(stage("AB"), rows=1), replace(stage("ABC", ("AB",)), rows=1)
    query = session(Drawn(plan("q", first, last)), "clarinet")
    query.begin({}, 0.0)
    query.on_finished(first, rows("AB", read), 1.0)
    done = Measured("duckdb", Work(scanned_rows=1.0), 1.0, 1.0, 1, 1.0)
    query.on_finished(last, rows("ABC", 1), 2.0, measured=done)
    assert query.measured == [done] * kept
