"""What is decided when a stage has other rows than it was planned with."""

from dataclasses import replace

import pytest

from ebbflow.planners.model import Work
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
