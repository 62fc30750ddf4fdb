"""What is decided when a stage of a running query fails, or counts otherwise than it was planned."""

from dataclasses import replace

import pytest

from ebbflow.planners.model import Work
from ebbflow.planners.query.costs.cost import NATIVE
from ebbflow.planners.query.plan.qep import Stage, Text
from ebbflow.planners.query.running.execution import Start
from ebbflow.planners.query.running.session import Notify, Session, StageFailure
from tests.planners.query.replanning_cases import output, plan, stage
from tests.planners.query.running.test_session import BROKEN, Drawn, divided, session, started


def failing(*stages: Stage) -> tuple[Session, Stage]:
    """Return a query whose last stage runs, and that stage."""
    query = session(Drawn(plan("q", *stages)))
    query.begin({}, 0.0)
    for one in stages[:-1]:
        query.on_finished(one, output(one.output_fp), 1.0)
    return query, stages[-1]


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (StageFailure("cancelled", "killed"), "was cancelled from outside; running it again"),
        (replace(BROKEN, moved=True), "failed while capacity changed; trying again (broken)"),
        (replace(BROKEN, lost=frozenset({"AB"})), "has lost what it reads, which is computed again"),
        (StageFailure("broadcast", "full", moved=True), "failed while capacity changed; trying again (full)"),
        (StageFailure("broadcast", "too large"), ""),  # it had none that could be left out
        (BROKEN, ""),
        (StageFailure("other", "disk full", moved=True), ""),
    ],
)  # fmt: skip
def test_only_what_another_run_may_mend_is_run_again(failure: StageFailure, said: str) -> None:
    query, sink = failing(stage("AB"), stage("ABC", ("AB",)))
    assert query.remedy(sink, failure) == said
    actions = query.on_failed(sink, failure, 2.0)
    assert actions == ([Notify(f"ABC {said}"), Start(sink)] if said else None)


def test_what_is_lost_is_computed_again_first() -> None:
    query, sink = failing(stage("AB"), stage("ABC", ("AB",)))
    gone = frozenset({"AB"})
    actions = query.on_failed(sink, replace(BROKEN, lost=gone, gone=gone), 2.0)
    assert actions is not None
    assert started(actions) == ["AB"]


def test_what_was_drawn_at_random_is_not_drawn_again() -> None:
    query, sink = failing(stage("AB", volatile=True), stage("ABC", ("AB",)))
    gone = frozenset({"AB"})
    assert query.on_failed(sink, replace(BROKEN, lost=gone, gone=gone, moved=True), 2.0) is None


def test_a_broadcast_that_does_not_fit_is_left_out_once() -> None:
    hinted = replace(stage("AB"), statement=Text("SELECT /*+ BROADCAST(b) */ 1", "SELECT 1"))
    query, sink = failing(hinted)
    failure = StageFailure("broadcast", "too large")
    assert not query.fallback(sink)
    said = "AB has a broadcast that did not fit; running it again with shuffled joins"
    assert query.on_failed(sink, failure, 1.0) == [Notify(said), Start(sink)]
    assert query.fallback(sink)
    assert query.on_failed(sink, failure, 2.0) is None


def test_a_stage_is_given_up_at_its_third_failure_unless_it_gets_on() -> None:
    query, sink = failing(divided(stage("AB")))
    moved = replace(BROKEN, moved=True)
    assert query.on_failed(sink, moved, 1.0)
    assert query.on_failed(sink, moved, 2.0)
    query.on_slices("AB", 0.25)
    assert query.on_failed(sink, moved, 3.0)
    query.on_slices("AB", 0.25)  # no more than there was
    assert query.on_failed(sink, moved, 4.0)
    assert query.on_failed(sink, moved, 5.0) is None


def test_an_engine_that_counts_tasks_bit_by_bit_is_not_thought_to_be_nearly_done() -> None:
    one = replace(stage("AB", tasks=8), work=Work(tasks=40))
    query, sink = failing(one)
    query.on_progress(sink, 0, 0, None, 1.0)
    assert query.execution.state(1.0).running["AB"].tasks_total == 8
    query.on_progress(sink, 10, 9, 1, 2.0)
    assert query.execution.state(2.0).running["AB"].tasks_total == 40
    query.on_progress(sink, 50, 50, 0, 3.0)
    assert query.execution.state(3.0).running["AB"].tasks_total == 51


def test_native_tasks_are_not_those_that_spark_sql_would_have() -> None:
    for planned in ("native", "duckdb"):
        query, sink = failing(replace(stage("AB", tasks=8), work=Work(tasks=40), engine=planned))
        query.planner.rivals = (NATIVE,)
        query.on_progress(sink, 2, 1, 1, 2.0, native=True)
        assert query.execution.state(2.0).running["AB"].tasks_total == 2
        query.on_progress(sink, 2, 2, 0, 3.0, native=True)  # a merge may follow
        assert query.execution.state(3.0).running["AB"].tasks_total == 3
        assert query.execution.state(3.0).running["AB"].seconds_seen == 1.0
        query.on_progress(sink, 9, 9, 0, 4.0)  # Spark SQL has taken it over
        assert query.execution.state(4.0).running["AB"].tasks_total == 40
        assert query.execution.state(4.0).running["AB"].seconds_seen == 0, "wasted work"
