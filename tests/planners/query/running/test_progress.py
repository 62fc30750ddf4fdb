"""Progress propagation."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.query.plan.qep import QueryExecutionPlan
from ebbflow.planners.query.plan.state import ExecutionState, RunningStage
from ebbflow.planners.query.running.progress import (
    drift,
    mean_cores,
    propagate,
    redone,
    repriced,
    spent,
    task_seconds,
    whole,
)
from tests.planners.query.replanning_cases import fig_2_4, output, plan, queries, stage

LEFT_DEEP, BUSHY, WIDE = fig_2_4()


def fps(stages: object) -> list[str]:
    return [r.stage.output_fp for r in stages]  # type: ignore[attr-defined]


def test_without_progress_every_stage_is_needed_in_topological_order() -> None:
    remaining = whole(BUSHY)
    assert fps(remaining.needed) == ["AB", "CD", "ABCD"]
    assert remaining.stages[-1].waits_for == ("AB", "CD")
    assert not remaining.inputs
    assert not remaining.adopted


def test_a_checkpoint_becomes_a_source_and_hides_its_ancestors() -> None:
    state = ExecutionState(LEFT_DEEP, checkpoints={"ABC": output("ABC")})
    remaining = propagate(LEFT_DEEP, state)
    assert fps(remaining.stages) == ["ABCD"]
    assert remaining.inputs == ("ABC",)
    assert remaining.stages[0].waits_for == ()


def test_an_ancestor_read_by_another_stage_too_is_not_hidden() -> None:
    shared = plan("q", stage("A"), stage("AB", ("A",)), stage("AC", ("A",)), stage("ABC", ("AB", "AC")))
    remaining = propagate(shared, ExecutionState(shared, checkpoints={"AB": output("AB")}))
    assert fps(remaining.needed) == ["A", "AC", "ABC"]
    assert remaining.inputs == ("AB",)


def test_a_checkpoint_of_another_plan_counts_when_the_output_is_the_same() -> None:
    state = ExecutionState(LEFT_DEEP, checkpoints={"AB": output("AB")})
    assert propagate(BUSHY, state).inputs == ("AB",)
    assert propagate(WIDE, state).inputs == ()


def test_a_running_stage_is_adopted_in_its_own_form_with_its_remaining_tasks() -> None:
    other = stage("ABCD", ("ABC",), tasks=5, duration=2)
    running = RunningStage(other, 0, tasks_total=5, tasks_done=2, task_seconds_left=1, tasks_running=2)
    remaining = propagate(BUSHY, ExecutionState(plan("x", other), running={"ABCD": running}))
    (adopted,) = remaining.stages
    assert adopted.stage is other
    assert (adopted.tasks, adopted.in_flight, adopted.in_flight_seconds, adopted.seconds) == (1, 2, 1, 2)
    assert remaining.adopted == {"ABCD"}
    assert remaining.foreign == ("ABCD",)


def test_a_refused_running_stage_is_needed_in_the_plans_own_form() -> None:
    other = stage("ABCD", ("ABC",))
    state = ExecutionState(plan("x", other), running={"ABCD": RunningStage(other, 0, 1)})
    remaining = propagate(BUSHY, state, refuse=frozenset({"ABCD"}))
    assert fps(remaining.needed) == ["AB", "CD", "ABCD"]
    assert remaining.stages[-1].stage is BUSHY.sink


def test_unfinished_parents_of_an_adopted_stage_are_needed_in_the_form_it_reads() -> None:
    running = RunningStage(LEFT_DEEP.sink, 0, 1)
    remaining = propagate(BUSHY, ExecutionState(LEFT_DEEP, running={"ABCD": running}))
    assert fps(remaining.stages) == ["AB", "ABC", "ABCD"]


def test_tasks_checkpointed_under_the_physical_key_are_not_repeated() -> None:
    sliced = plan("q", stage("A", tasks=4, key="mine"))
    state = ExecutionState(sliced, done_tasks={"mine": 3, "other": 4})
    assert propagate(sliced, state).stages[0].tasks == 1


def test_a_stage_that_the_engine_cuts_differently_keeps_its_work() -> None:
    four = stage("A", tasks=4, duration=3)
    running = RunningStage(four, 0, tasks_total=12, tasks_done=6)
    remaining = propagate(plan("q", four), ExecutionState(plan("q", four), running={"A": running}))
    (left,) = remaining.stages
    assert task_seconds(running) == 1
    assert left.tasks * left.seconds == 6
    assert left.width == 4


def test_latency_counts_only_until_it_has_passed() -> None:
    slow = stage("A", latency=10)
    state = ExecutionState(plan("q", slow), running={"A": RunningStage(slow, 100, 1)})
    assert propagate(plan("q", slow), state, now=104).stages[0].latency == 6
    assert propagate(plan("q", slow), state, now=111).stages[0].latency == 0
    assert propagate(plan("q", slow), state).stages[0].latency == 0


@given(queries(), st.data())
def test_what_remains_is_exactly_what_the_sink_still_needs(
    plans: tuple[QueryExecutionPlan, ...], data: st.DataObject
) -> None:
    every = sorted({s.output_fp for p in plans for s in p.stages})
    done = data.draw(st.sets(st.sampled_from(every)))
    state = ExecutionState(plans[0], checkpoints={fp: output(fp) for fp in done})
    for candidate in plans:
        remaining = propagate(candidate, state)
        needed = fps(remaining.stages)
        assert not done & set(needed)
        assert set(remaining.inputs) <= done
        if candidate.sink.output_fp in done:
            assert not needed
            continue
        readers = {i for r in remaining.stages for i in r.stage.inputs}
        assert set(needed) | set(remaining.inputs) == readers | {candidate.sink.output_fp}
        for position, r in enumerate(remaining.stages):
            assert set(r.waits_for) == set(r.stage.inputs) - done
            assert set(r.waits_for) <= set(needed[:position])


def test_a_stage_that_is_slower_than_estimated_tells_by_how_much() -> None:
    running = RunningStage(stage("A", tasks=8, duration=4), 0, tasks_total=8, tasks_done=4)
    assert drift([running], 2, 32) == (64 + 5) / (16 + 5)
    assert drift([running], 2, 1) == 1  # too young to tell
    assert drift([], 2, 32) == 1


def test_cores_that_stages_have_not_had_or_cannot_use_do_not_make_them_slow() -> None:
    """One core for 10 s; then five more come, which a stage of a single task cannot use."""
    cores = mean_cores([(0.0, 1.0), (10.0, 6.0)], 0.0, 10.0)
    assert cores == 1.0
    assert mean_cores([(0.0, 1.0), (10.0, 6.0)], 10.0, 20.0) == 6.0
    assert mean_cores([(0.0, 2.0)], 0.0, 0.0) == 2.0
    single = RunningStage(stage("A", tasks=1, duration=40), 0, tasks_total=1)
    assert drift([single], 6, 40) == drift([single], 1, 40) == 1
    two = [RunningStage(stage(fp, tasks=1, duration=40), 0, tasks_total=1) for fp in "AB"]
    assert drift(two, 6, 40) == 1
    assert drift(two, 1, 100) == (100 + 5) / (80 + 5)


def test_what_an_earlier_estimate_counted_as_slow_already_is_not_forgotten() -> None:
    first = RunningStage(stage("A", tasks=8, duration=4, latency=1), 0, tasks_total=8, tasks_done=4)
    slowed = replace(first, stage=stage("A", tasks=8, duration=12, latency=3))
    seconds = first.stage.core_seconds
    assert drift([repriced(slowed, seconds)], 2, 32) == drift([repriced(first, seconds)], 2, 32) > 2
    assert drift([slowed], 2, 32) < 2
    assert repriced(first, 0.0) is first
    nothing = RunningStage(stage("A", duration=0), 0, 1)
    assert repriced(nothing, 1.0) is nothing


def test_what_went_into_a_running_stage_is_done_again_on_as_many_cores_as_it_has_tasks() -> None:
    running = RunningStage(stage("A", tasks=4, duration=3), 0, 4, 1, 2, 2, task_seconds_spent=1)
    assert spent(running) == 5  # a task, and a second of two
    assert [redone([running], cores) for cores in (1, 2, 4, 16)] == [5, 2.5, 1.25, 1.25]
    assert redone([running, running], 4) == 2.5
    assert spent(replace(running, tasks_lost=1)) == 2
    assert spent(replace(running, tasks_running=None)) == 6  # three are left, and nothing tells how many run
    assert spent(replace(running, tasks_running=0)) == 3  # the rest waits for cores
    assert [spent(replace(running, seconds_seen=seen)) for seen in (4.0, 7.0)] == [5, 7]
    wide = RunningStage(stage("A", tasks=1, cores=2, duration=3), 0, 1, 0, 2, 1, task_seconds_spent=1)
    assert [redone([wide], cores) for cores in (2, 4)] == [1, 1]
