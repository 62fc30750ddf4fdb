"""The state machine of a running query."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Share
from ebbflow.planners.query.plan.qep import QueryExecutionPlan
from ebbflow.planners.query.running.execution import Action, Cancel, Execution, Finish, Reuse, Start
from ebbflow.planners.query.running.progress import spent
from ebbflow.planners.query.running.replanner import Replanner
from tests.planners.query.replanning_cases import Engine, fig_2_4, output, plan, queries, share, shares, stage

PLANS = fig_2_4()
LEFT_DEEP, BUSHY, WIDE = PLANS
NOTHING = share(0, 0, nodes=0)


def execution(
    policy: str = "qoop",
    chosen: QueryExecutionPlan | None = None,
    parallel: int = 0,
    plans: tuple[QueryExecutionPlan, ...] = PLANS,
    **options: float,
) -> Execution:
    return Execution(plans, chosen, policy, Replanner(plans, **options), parallel)  # type: ignore[arg-type]


def started(actions: list[Action]) -> list[str]:
    return [a.stage.output_fp for a in actions if isinstance(a, Start)]


def test_a_query_starts_its_leaves_then_what_they_feed_and_finishes_with_the_sink() -> None:
    query = execution()
    assert started(query.begin(share(2), {}, 0)) == ["AB", "CD"]
    assert query.on_finished(output("CD"), 3) == []
    assert started(query.on_finished(output("AB"), 3)) == ["ABCD"]
    assert query.on_finished(output("ABCD"), 7) == [Finish(output("ABCD"))]
    assert query.finished
    assert [d.kind for d in query.decisions] == ["start"]


def test_what_an_output_makes_ready_may_wait_for_other_plans() -> None:
    query = execution(plans=(LEFT_DEEP,))
    query.begin(share(2), {}, 0)
    assert query.on_finished(output("AB"), 3, starts=False) == []
    assert query.running == ()
    renewed = plan(
        LEFT_DEEP.id, *(replace(s, tasks=2, physical_key=f"{s.name} anew") for s in LEFT_DEEP.stages)
    )
    assert query.on_candidates([renewed], 3, "sizes") == [Start(renewed.by_fp["ABC"])]
    assert started(query.on_finished(output("ABC"), 6)) == ["ABCD"]
    assert query.on_finished(output("ABCD"), 7, starts=False) == [Finish(output("ABCD"))]


def test_a_stage_runs_from_when_it_was_started_and_not_from_when_that_was_decided() -> None:
    query = execution(plans=(plan("q", stage("A", tasks=2, duration=4, latency=1)),))
    query.begin(share(2), {}, 0)
    assert query.state(2.5).running["A"].task_seconds_spent == 1.5
    query.on_start("A", 2.0)
    seen = query.state(2.5).running["A"]
    assert (seen.started, seen.task_seconds_spent) == (2.0, 0.0)
    assert query.state(3.5).running["A"].task_seconds_spent == 0.5


def test_at_most_the_allowed_stages_run_longest_path_first() -> None:
    plans = (
        plan("q", stage("A"), stage("B", duration=2), stage("C", duration=3), stage("ABC", ("A", "B", "C"))),
    )
    query = execution(plans=plans, parallel=2)
    assert started(query.begin(share(8), {}, 0)) == ["C", "B"]
    assert started(query.on_finished(output("B"), 2)) == ["A"]


def test_checkpoints_of_earlier_runs_are_reused_and_what_they_hide_is_not_run() -> None:
    query = execution(chosen=LEFT_DEEP)
    actions = query.begin(share(2), {"ABC": output("ABC"), "AC": output("AC")}, 0)
    assert actions == [Reuse(LEFT_DEEP.by_fp["ABC"], output("ABC")), Start(LEFT_DEEP.sink)]


def test_a_result_that_exists_already_finishes_the_query_at_once() -> None:
    query = execution()
    actions = query.begin(share(2), {"ABCD": output("ABCD")}, 0)
    assert [type(a) for a in actions] == [Reuse, Finish]
    assert query.on_share(share(4, revision=1), 1, "late") == []


def test_volatile_checkpoints_of_earlier_runs_are_ignored() -> None:
    plans = (plan("q", stage("A", volatile=True), stage("AB", ("A",))),)
    assert started(execution(plans=plans).begin(share(1), {"A": output("A")}, 0)) == ["A"]


def test_a_switch_cancels_what_is_not_shared_and_starts_the_new_plan() -> None:
    query = execution()
    query.begin(share(2), {}, 0)
    actions = query.on_share(share(4, revision=1), 1, "arrived: w2")
    assert [(type(a), a.stage.output_fp) for a in actions if not isinstance(a, Finish)] == [
        (Cancel, "AB"),
        (Cancel, "CD"),
        (Start, "AC"),
        (Start, "BD"),
    ]
    assert isinstance(actions[0], Cancel)
    assert actions[0].reason == "(AB)(CD) was left for (AC)(BD)"
    assert query.plan is WIDE
    assert query.decisions[-1].kind == "switch"


def shared_stage_plans() -> tuple[QueryExecutionPlan, ...]:
    narrow = plan("narrow", stage("AB", duration=8), stage("ABC", ("AB",), duration=40))
    wide = plan("wide", stage("AB", duration=8), stage("ABC", ("AB",), tasks=8, duration=10, key="wide"))
    return narrow, wide


def test_a_switch_keeps_running_stages_that_both_plans_need() -> None:
    query = execution(plans=shared_stage_plans())
    assert started(query.begin(share(1), {}, 0)) == ["AB"]
    assert query.plan.id == "narrow"
    assert query.on_share(share(8, revision=1), 4, "arrived") == []
    assert query.plan.id == "wide"
    (start,) = query.on_finished(output("AB"), 8)
    assert isinstance(start, Start)
    assert start.stage.physical_key == "wide"


def test_backtracking_resumes_a_plan_from_its_checkpoints() -> None:
    query = execution(hysteresis=0.1)
    query.begin(share(2), {}, 0)
    query.on_share(share(4, revision=1), 1, "arrived")
    query.on_finished(output("AC"), 2)
    query.on_finished(output("AB"), 2, late=True)
    assert query.plan is WIDE
    actions = query.on_share(share(1, revision=2), 2.5, "left")
    assert query.plan is LEFT_DEEP
    assert Reuse(LEFT_DEEP.by_fp["AB"], output("AB")) not in actions  # announced when it arrived
    assert started(actions) == ["ABC"]
    assert {a.stage.output_fp for a in actions if isinstance(a, Cancel)} == {"BD"}


def test_a_late_result_of_a_cancelled_stage_is_kept_as_a_checkpoint() -> None:
    query = execution()
    query.begin(share(2), {}, 0)
    query.on_share(share(4, revision=1), 1, "arrived")
    query.on_finished(output("CD"), 2, late=True)
    assert "CD" in query.checkpoints
    assert query.on_finished(output("CD"), 2, late=True) == []


def twin_plans() -> tuple[QueryExecutionPlan, ...]:
    """Two forms of the last join; the narrow one is better on one core, the wide one on eight."""
    narrow = plan("narrow", stage("AB", duration=40, key="narrow"))
    wide = plan("wide", stage("AB", tasks=8, duration=10, key="wide"))
    return narrow, wide


def test_a_running_stage_gives_way_to_a_better_form_and_a_late_result_ends_the_twin() -> None:
    query = execution(plans=twin_plans())
    query.begin(share(1), {}, 0)
    actions = query.on_share(share(8, revision=1), 5, "arrived")
    assert [type(a) for a in actions] == [Cancel, Start]
    assert [s.physical_key for s in query.running] == ["wide"]
    actions = query.on_finished(output("AB"), 6, late=True)
    assert [type(a) for a in actions] == [Reuse, Cancel, Finish]
    assert query.running == ()


def test_a_late_result_cancels_work_that_it_makes_superfluous() -> None:
    query = execution(chosen=BUSHY, policy="single")
    query.begin(share(2), {}, 0)
    actions = query.on_finished(output("ABCD"), 1, late=True)
    assert [type(a) for a in actions] == [Reuse, Cancel, Cancel, Finish]


def test_a_nearly_finished_stage_may_end_before_the_plan_changes() -> None:
    slow = plan("slow", stage("AB", duration=10), stage("ABC", ("AB",), duration=90))
    fast = plan(
        "fast", stage("BC", tasks=8, duration=5), stage("ABC", ("BC",), tasks=8, duration=2, key="fast")
    )
    query = execution(plans=(slow, fast), chosen=slow, switch_cost=1.5)
    query.begin(share(1), {}, 0)
    actions = query.on_share(share(8, revision=1), 9, "arrived")  # AB has 1 s left
    assert query.plan is fast
    assert [type(a) for a in actions] == [Start]
    assert {s.output_fp for s in query.running} == {"AB", "BC"}
    assert query.on_finished(output("AB"), 10) == []
    assert "AB" in query.checkpoints


def test_without_capacity_the_query_waits_and_what_runs_is_left_alone() -> None:
    query = execution()
    query.begin(share(2), {}, 0)
    assert query.on_share(replace(NOTHING, revision=1), 1, "left: w1, w2") == []
    assert query.decisions[-1].kind == "wait"
    assert query.waiting
    assert {s.output_fp for s in query.running} == {"AB", "CD"}
    assert query.on_finished(output("AB"), 2) == []
    assert query.on_finished(output("CD"), 2) == []
    assert started(query.on_share(share(2, revision=2), 3, "arrived")) == ["ABCD"]


def test_a_query_that_began_without_capacity_chooses_its_plan_when_nodes_arrive() -> None:
    query = execution("clarinet")
    assert query.begin(NOTHING, {}, 0) == []
    assert query.decisions[-1].kind == "wait"
    assert started(query.on_share(share(4, revision=1), 60, "arrived")) == ["AC", "BD"]
    assert [d.kind for d in query.decisions] == ["wait", "start"]


@pytest.mark.parametrize("policy", ["clarinet", "volcano", "single"])
def test_other_policies_never_change_their_plan(policy: str) -> None:
    query = execution(policy)
    query.begin(share(2), {}, 0)
    first = query.plan
    assert query.on_share(share(64, revision=1), 1, "arrived") == []
    query.on_share(replace(NOTHING, revision=2), 2, "left")
    query.on_candidates(PLANS, 3, "sizes")
    assert query.plan is first
    assert {d.kind for d in query.decisions} == {"start", "stay", "wait"}
    assert f"policy {policy} keeps" in query.decisions[1].reason
    assert query.decisions[2].reason == "wait: there is no usable node"


def test_a_share_of_an_older_revision_is_dropped() -> None:
    query = execution()
    query.begin(share(2, revision=5), {}, 0)
    assert query.on_share(share(4, revision=4), 1, "late") == []
    assert query.share.revision == 5
    assert len(query.decisions) == 1


def test_small_changes_are_noted_without_weighing_plans_until_they_add_up() -> None:
    query = execution(chosen=BUSHY)
    query.begin(share(100), {}, 0)
    query.on_share(share(96, revision=1), 1, "left")
    assert query.decisions[-1].reason == "stay: the share changed by less than 5 %"
    query.on_share(share(93, revision=2), 2, "left")
    assert query.decisions[-1].estimates
    query.on_share(share(94, revision=3), 3, "arrived")
    assert not query.decisions[-1].estimates


def test_a_failed_stage_is_started_again_and_counted() -> None:
    query = execution()
    query.begin(share(2), {}, 0)
    assert started(query.on_failed("AB", 1)) == ["AB"]
    assert query.failures == {"AB": 1}
    assert query.on_failed("XY", 1) == []


def test_better_cardinalities_update_estimates_and_may_switch() -> None:
    query = execution()
    query.begin(share(2), {}, 0)
    ab, cd, last = BUSHY.stages
    slower = replace(BUSHY, stages=(ab, cd, replace(last, tasks=40)))
    actions = query.on_candidates((LEFT_DEEP, slower, WIDE), 1, "AB has more rows than expected")
    assert query.decisions[-1].trigger == "AB has more rows than expected"
    assert query.plan is LEFT_DEEP
    assert [a.stage.output_fp for a in actions if isinstance(a, Cancel)] == ["CD"]


def test_better_cardinalities_of_the_current_plan_apply_to_its_running_stages() -> None:
    query = execution("single")
    query.begin(share(2), {}, 0)
    slower = tuple(replace(s, duration=10.0) for s in LEFT_DEEP.stages)
    query.on_candidates((replace(LEFT_DEEP, stages=slower), BUSHY, WIDE), 1, "sizes")
    assert query.expected(1).estimate.seconds == 29
    with pytest.raises(OptionError, match=r"must include the current plan \(\(AB\)C\)D"):
        query.on_candidates((BUSHY, WIDE), 2, "sizes")


def test_new_estimates_apply_to_a_running_stage_that_would_now_have_other_partitions() -> None:
    query = execution("single")
    query.begin(share(2), {}, 0)
    slower = tuple(replace(s, duration=10.0, physical_key=f"{s.physical_key}, 8") for s in LEFT_DEEP.stages)
    query.on_share(share(8, revision=1), 1, "arrived", (replace(LEFT_DEEP, stages=slower),))
    assert query.expected(1).estimate.seconds == 29
    assert query.expected(1).remaining.foreign == ()


def test_progress_shortens_the_expected_time() -> None:
    plans = (plan("q", stage("A", tasks=8, duration=4)),)
    query = execution(plans=plans)
    query.begin(share(2), {}, 0)
    assert query.expected(0).estimate.seconds == 16
    query.on_progress("A", 8, 4, 8, 2)
    assert query.expected(9).estimate.seconds == 7
    query.on_progress("unknown", 1, 1, 9)


def test_an_engine_that_does_not_count_running_tasks_is_assumed_to_run_as_many_as_fit() -> None:
    query = execution(plans=(plan("q", stage("A", tasks=8, duration=4)),))
    query.begin(share(2), {}, 0)
    query.on_progress("A", 8, 4, 8)
    assert query.expected(9).estimate.seconds == 7


def test_a_stage_that_the_engine_holds_back_has_all_its_tasks_before_it() -> None:
    query = execution(plans=(plan("q", stage("A", tasks=2, duration=4)),))
    query.begin(share(2), {}, 0)
    query.on_progress("A", 2, 0, 3, 0)
    assert query.expected(3).estimate.seconds == 4
    query.on_progress("A", 2, 0, 3, 2)  # now they run
    assert query.expected(5).estimate.seconds == 2


def test_what_went_into_a_stage_does_not_shrink_when_one_of_its_tasks_finishes() -> None:
    query = execution(plans=(plan("q", stage("A", tasks=6, duration=30)),))
    query.begin(share(6), {}, 0)
    query.on_progress("A", 6, 0, 0, 6)
    before = spent(query.state(24).running["A"])
    query.on_progress("A", 6, 1, 25, 5)
    after = spent(query.state(25).running["A"])
    assert (before, after, spent(query.state(27).running["A"])) == (144, 150, 160)
    query.on_loss("A", 0.5)  # half of the nodes
    query.on_progress("A", 6, 1, 27, 5)
    assert spent(query.state(27).running["A"]) == 85
    query.on_share(replace(NOTHING, revision=1), 27, "left")
    query.on_share(share(6, revision=2), 90, "arrived")  # nothing has run meanwhile
    assert spent(query.state(90).running["A"]) == 85


def test_native_tasks_that_were_in_vain_have_not_gone_into_a_stage() -> None:
    query = execution(plans=(plan("q", stage("A", tasks=6, duration=30)),))
    query.begin(share(6), {}, 0)
    query.on_progress("A", 2, 0, 0, 2, native=True)
    query.on_progress("A", 2, 1, 10, 1, native=True)
    assert query.state(10).running["A"].seconds_seen == 20
    query.on_loss("A", 0.5)
    query.on_progress("A", 6, 1, 12, 5)  # Spark SQL has taken it over
    after = query.state(14).running["A"]
    assert (after.seconds_seen, after.tasks_lost, after.task_seconds_spent) == (10, 0, 2)


def test_an_overdue_task_is_expected_a_tenth_of_its_age_later() -> None:
    query = execution(plans=(plan("q", stage("A", duration=4)),))
    query.begin(share(1), {}, 0)
    assert query.expected(40).estimate.seconds == pytest.approx(4)


def test_tasks_that_lost_all_nodes_begin_again_when_nodes_return() -> None:
    query = execution(plans=(plan("q", stage("A", duration=4)),))
    query.begin(share(1), {}, 0)
    query.on_share(replace(NOTHING, revision=1), 3, "left")
    query.on_share(share(1, revision=2), 100, "arrived")
    assert query.expected(100).estimate.seconds == 4


def test_options_and_plans_are_checked() -> None:
    with pytest.raises(OptionError, match="policy must be one of"):
        execution("greedy")
    with pytest.raises(OptionError, match="one of the candidates; got other"):
        execution(chosen=plan("other", stage("A")))
    with pytest.raises(OptionError, match="max_parallel_stages"):
        execution(parallel=-1)


class Chaos:
    """Reports events in any order and checks every action."""

    def __init__(self, query: Execution, limit: int) -> None:
        self.query, self.limit = query, limit
        self.running: dict[str, str] = {}  # output_fp -> physical_key
        self.zombies: set[str] = set()  # cancelled, but may still deliver
        self.known: set[str] = set()
        self.runs: Counter[str] = Counter()
        self.result = ""

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            assert not self.result
            match action:
                case Start(s):
                    assert s.output_fp not in self.running
                    assert s.output_fp not in self.known
                    assert set(s.inputs) <= self.known
                    assert s in self.query.plan.stages
                    assert self.query.share.total.cores > 0
                    self.running[s.output_fp] = s.physical_key
                case Cancel(s, reason):
                    assert self.running.pop(s.output_fp) == s.physical_key
                    assert reason
                    self.zombies.add(s.output_fp)
                case Reuse(s, out):
                    assert out.fingerprint == s.output_fp
                    assert s.output_fp in self.known
                case Finish(out):
                    assert out.fingerprint == self.query.plan.sink.output_fp
                    self.result = out.fingerprint
        if self.limit:
            assert len(self.running) <= self.limit
        assert {s.output_fp for s in self.query.running} == set(self.running)

    def finish(self, fp: str, now: float, *, late: bool = False) -> None:
        assert fp not in self.known
        self.known.add(fp)
        self.runs[fp] += 1
        if not late:
            del self.running[fp]
        self.apply(self.query.on_finished(output(fp), now, late=late))
        assert fp not in self.running


@settings(max_examples=100)
@given(
    queries(),
    st.sampled_from(["qoop", "clarinet", "volcano", "single"]),
    st.sampled_from([0, 1, 2]),
    st.tuples(st.sampled_from([0.0, 0.15]), st.sampled_from([0.0, 1.0])),
    st.data(),
)
def test_any_order_of_events_leads_to_the_result_by_legal_steps(
    plans: tuple[QueryExecutionPlan, ...],
    policy: str,
    limit: int,
    options: tuple[float, float],
    data: st.DataObject,
) -> None:
    replanner = Replanner(plans, *options, min_share_delta=0)
    query = Execution(plans, None, policy, replanner, limit)
    every = sorted({s.output_fp for p in plans for s in p.stages})
    chaos = Chaos(query, limit)
    chaos.known = data.draw(st.sets(st.sampled_from(every), max_size=1))
    now, revision = 0.0, 0
    capacity = data.draw(st.one_of(shares(), st.just(NOTHING)))
    chaos.apply(query.begin(capacity, {fp: output(fp) for fp in chaos.known}, now))
    for _ in range(data.draw(st.integers(0, 25))):
        if chaos.result:
            break
        now += data.draw(st.sampled_from([0, 0.25, 1, 7]))
        event = data.draw(st.sampled_from(["finish", "fail", "share", "old", "late", "progress", "sizes"]))
        fps, late = sorted(chaos.running), sorted(chaos.zombies - chaos.known)
        if event == "finish" and fps and query.share.total.cores > 0:
            chaos.finish(data.draw(st.sampled_from(fps)), now)
        elif event == "late" and late:
            chaos.finish(data.draw(st.sampled_from(late)), now, late=True)
        elif event == "fail" and fps:
            fp = data.draw(st.sampled_from(fps))
            del chaos.running[fp]
            chaos.apply(query.on_failed(fp, now))
        elif event == "progress" and fps:
            done = data.draw(st.integers(0, 9))
            query.on_progress(
                data.draw(st.sampled_from(fps)), 9, done, now, data.draw(st.sampled_from([None, 0, 2]))
            )
        elif event == "share":
            revision += 1
            capacity = data.draw(st.one_of(shares(), st.just(NOTHING)))
            chaos.apply(query.on_share(replace(capacity, revision=revision), now, "share"))
        elif event == "old" and revision:
            before = query.plan
            assert query.on_share(share(8, 16, revision=revision - 1), now, "old") == []
            assert query.plan is before
        elif event == "sizes":
            factor = data.draw(st.sampled_from([0.5, 2]))
            renewed = tuple(
                replace(p, stages=tuple(replace(s, duration=s.duration * factor) for s in p.stages))
                for p in plans
            )
            chaos.apply(query.on_candidates(renewed, now, "sizes"))
    if not chaos.result:
        chaos.apply(query.on_share(share(8, 16, revision=revision + 1), now, "plenty"))
    for _ in range(len(every) + 1):
        if chaos.result:
            break
        assert chaos.running, "stuck"
        now += 1
        chaos.finish(data.draw(st.sampled_from(sorted(chaos.running))), now)
    assert query.finished
    assert max(chaos.runs.values(), default=1) == 1
    assert not chaos.running
    if policy != "qoop":
        launched = [d.chosen for d in query.decisions if d.kind in ("start", "stay")]
        assert len(set(launched)) == 1
    assert all(d.reason.startswith(f"{d.kind}: ") for d in query.decisions)


@given(queries(), st.lists(st.tuples(st.integers(1, 20), st.one_of(shares(), st.just(NOTHING))), max_size=6))
def test_a_query_finishes_on_any_capacity_that_is_eventually_there(
    plans: tuple[QueryExecutionPlan, ...], changes: list[tuple[int, Share]]
) -> None:
    engine = Engine(Execution(plans, None, "qoop", Replanner(plans)), share(2, 8))
    engine.begin()
    now = 0.0
    for revision, (wait, capacity) in enumerate(changes, 1):
        now += wait / 4
        engine.run(until=now)
        if engine.result is None:
            engine.resize(replace(capacity, revision=revision))
    if engine.result is None:
        engine.resize(share(8, 16, revision=99))
    engine.run()
    assert engine.result == output(plans[0].sink.output_fp)
    assert engine.finished_at == max(engine.completed.values())
