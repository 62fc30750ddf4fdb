"""What is decided when a stage has other rows than it was planned with."""

from dataclasses import replace

import pytest

from ebbflow.planners.model import Measured, Work
from ebbflow.planners.query.costs.cost import DUCKDB
from ebbflow.planners.query.costs.fitting import q_error
from ebbflow.planners.query.plan.qep import Stage
from tests.planners.query.replanning_cases import plan, stage
from tests.planners.query.running.test_session import Drawn, decisions, rows, session


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
