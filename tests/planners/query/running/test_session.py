"""What is decided about a running query, told event by event: no engine, no threads."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ebbflow.planners.memory.tiers import Tier
from ebbflow.planners.model import Capacity, Measured, Node, Notice, Share, Work
from ebbflow.planners.model.capacity import ARRIVAL, WARM
from ebbflow.planners.query.costs.cost import DUCKDB, NATIVE
from ebbflow.planners.query.costs.fitting import q_error
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage
from ebbflow.planners.query.plan.state import StageOutput
from ebbflow.planners.query.planner import QueryPlanner
from ebbflow.planners.query.running.execution import Cancel, Finish, Reuse, Start
from ebbflow.planners.query.running.session import (
    Action,
    Decided,
    Session,
    StageFailure,
    planning_share,
)
from tests.planners.query.replanning_cases import fig_2_4, output, plan, share, stage

LEFT_DEEP, BUSHY, WIDE = fig_2_4()
BROKEN = StageFailure("statement", "broken")


class Drawn:
    """A planner whose plans are drawn by hand. It keeps what it is asked for."""

    partial_fps = ("P",)
    rivals = ()

    def __init__(self, *plans: QueryExecutionPlan) -> None:
        self.plans = plans
        self.model = DUCKDB
        self.tier: Tier | None = None
        self.asked: list[tuple[Share, dict[str, StageOutput], tuple[str, ...]]] = []
        self.contrasts: list[bool] = []
        self.divided: dict[str, tuple[str, int]] = {}

    def candidates(
        self,
        share: Share,
        actuals: Mapping[str, StageOutput] | None = None,
        also: Iterable[str] = (),
        contrasts: bool = True,
    ) -> tuple[QueryExecutionPlan, ...]:
        self.asked.append((share, dict(actuals or {}), tuple(also)))
        self.contrasts.append(contrasts)
        return self.plans

    def again(self, plan_id: str, share: Share, actuals: Mapping[str, StageOutput]) -> QueryExecutionPlan:
        return next(plan for plan in self.plans if plan.id == plan_id)

    def single(self, share: Share) -> QueryExecutionPlan:
        return self.plans[0]

    def keep_divided(self, begun: Mapping[str, tuple[str, int]]) -> None:
        self.divided = dict(begun)


def session(planner: Drawn, policy: str = "qoop", cores: float = 2, **options: Any) -> Session:
    return Session(cast(QueryPlanner, planner), share(cores), policy, **options)


def seen(cores: int, revision: int = 1) -> Capacity:
    return Capacity(revision, tuple(Node(f"n{i}", 1, 64.0) for i in range(cores)))


def started(actions: Sequence[Action]) -> list[str]:
    return [a.stage.output_fp for a in actions if isinstance(a, Start)]


def decisions(actions: Sequence[Action]) -> list[str]:
    return [a.decision.kind for a in actions if isinstance(a, Decided)]


def rows(fp: str, count: int) -> StageOutput:
    return StageOutput(fp, count, 8 * count)


LONG = plan("long", stage("A", tasks=8, duration=1.0, key="shuffled"))
OTHER = plan("other", stage("A", tasks=8, duration=0.48, key="broadcast"))
FOUR = seen(4)
NOTICED = Capacity(1, FOUR.nodes, (Notice("n1", 10.0), Notice("n2", 10.0), Notice("n3", 10.0)))


def half_done(planner: Drawn, capacity: Capacity = FOUR, *, native: bool = False) -> Session:
    """Return a session of which a stage of eight tasks has run four on four nodes."""
    query = session(planner, cores=4)
    query.see(capacity)
    query.begin({}, 0.0)
    query.on_progress(query.plan.sink, 8, 4, 0, 1.0, native=native)
    return query


# --- where outputs are kept ---------------------------------------------------------------------------------


def test_another_tier_of_outputs_makes_plans_anew_and_its_name_is_the_trigger() -> None:
    planner = Drawn(LONG, OTHER)
    query = half_done(planner)
    asked = len(planner.asked)
    fast, slower, slow = (Tier("peer memory", 1e-4, rate) for rate in (1e9, 0.8e9, 0.3e9))
    made = [a.decision for a in query.on_tier(fast, 1.0) if isinstance(a, Decided)]
    assert [one.trigger for one in made] == ["stage outputs are kept in peer memory"]
    assert (planner.tier, len(planner.asked)) == (fast, asked + 1)
    assert query.on_tier(slower, 1.1) == []
    assert (planner.tier, len(planner.asked)) == (slower, asked + 1), "measurements vary"
    assert decisions(query.on_tier(slow, 1.2))
    made = [a.decision for a in query.on_tier(None, 1.3) if isinstance(a, Decided)]
    assert [one.trigger for one in made] == ["stage outputs are kept in the store"]
    assert query.on_tier(None, 1.4) == []


def test_a_policy_that_never_replans_takes_note_of_a_tier_only() -> None:
    planner = Drawn(LONG)
    query = session(planner, policy="volcano", cores=4)
    query.see(FOUR)
    query.begin({}, 0.0)
    assert query.on_tier(Tier("peer memory", 1e-4, 1e9), 1.0) == []


# --- what nodes take along --------------------------------------------------------------------------------


def test_what_lost_nodes_have_written_for_others_is_computed_again() -> None:
    query = half_done(Drawn(LONG))
    query.see(seen(1, 2))
    query.on_capacity("three left", 1.0)
    assert query.execution.state(1.0).running["A"].tasks_lost == 3
    assert query.execution.expected(1.0).estimate.seconds == 7.0
    query.on_progress(query.plan.sink, 8, 5, 1, 2.0)  # the engine has not noticed yet
    assert query.execution.expected(2.0).estimate.seconds == 6.0
    query.on_progress(query.plan.sink, 8, 2, 1, 3.0)  # it has: its own count is right again
    assert query.execution.state(3.0).running["A"].tasks_lost == 0


def test_nodes_with_a_notice_pass_on_what_they_have() -> None:
    query = half_done(Drawn(LONG), NOTICED)
    query.see(seen(1, 2))
    assert query.execution.state(1.0).running["A"].tasks_lost == 0


@pytest.mark.parametrize("kept", ["native", "sliced"])
def test_what_is_in_the_store_outlives_nodes(kept: str) -> None:
    planner = Drawn(LONG)
    if kept == "sliced":
        slicing = cast(Any, SimpleNamespace(grid=SimpleNamespace(name="g"), slices=4))
        planner = Drawn(plan("long", replace(LONG.sink, slicing=slicing)))
    query = half_done(planner, native=kept == "native")
    query.see(seen(1, 2))
    assert query.execution.state(1.0).running["A"].tasks_lost == 0


@pytest.mark.parametrize("planned", ["native", "spark"])
def test_what_spark_sql_has_written_is_lost_whatever_was_planned(planned: str) -> None:
    planner = Drawn(plan("long", replace(LONG.sink, engine=planned)))
    planner.rivals = (NATIVE,)
    query = half_done(planner)
    query.see(seen(1, 2))
    assert query.execution.state(1.0).running["A"].tasks_lost == 3


@pytest.mark.parametrize(("capacity", "kind"), [(FOUR, "switch"), (NOTICED, "stay")])
def test_a_form_that_has_lost_its_progress_gives_way_to_a_better_one(capacity: Capacity, kind: str) -> None:
    """Half of it done, the rest takes as long as the better form from the start; had it lost three quarters of that,
    it would take longer by more than it still has."""
    planner = Drawn(LONG)
    query = half_done(planner, capacity)
    planner.plans = (LONG, OTHER)
    query.see(seen(1, 2))
    assert decisions(query.on_capacity("three left", 1.0)) == [kind]


# --- from the first plan to the result --------------------------------------------------------------------


def test_every_decision_is_told_once_and_before_what_follows_from_it() -> None:
    query = session(Drawn(LEFT_DEEP, BUSHY, WIDE))
    first = query.begin({}, 0.0)
    assert isinstance(first[0], Decided)
    assert (first[0].decision.kind, first[0].decision.chosen) == ("start", BUSHY.id)
    assert started(first) == ["AB", "CD"]
    assert query.on_finished(BUSHY.by_fp["CD"], output("CD"), 3.0) == []
    assert query.on_finished(BUSHY.by_fp["AB"], output("AB"), 3.0) == [Start(BUSHY.sink)]
    assert query.on_finished(BUSHY.sink, output("ABCD"), 7.0) == [Finish(output("ABCD"))]


def test_what_earlier_runs_have_left_is_reused() -> None:
    query = session(Drawn(LEFT_DEEP))
    (told, *rest) = query.begin({"ABC": output("ABC")}, 0.0)
    assert isinstance(told, Decided)
    assert rest == [Reuse(LEFT_DEEP.by_fp["ABC"], output("ABC")), Start(LEFT_DEEP.sink)]


def test_a_share_is_a_fraction_of_the_capacity_and_the_first_plans_need_some_node() -> None:
    query = session(Drawn(LEFT_DEEP), fraction=0.5)
    assert query.see(seen(8)).total.cores == query.share.total.cores == 4
    assert planning_share(seen(0)).total.cores == 1
    assert planning_share(seen(6), 0.5).total.cores == 3


def test_a_stage_is_computed_from_the_tables_below_it() -> None:
    below = replace(stage("AB"), tables=("A", "B"))
    above = replace(stage("ABC", ("AB",)), tables=("C",))
    query = session(Drawn(plan("q", below, above)), versions={"a": "1", "B": "2", "c": "3"})
    assert query.sources("AB") == {"a": "1", "b": "2"}
    assert query.sources("ABC") == {"a": "1", "b": "2", "c": "3"}
    assert query.fingerprints == {"AB", "ABC", "P"}


# --- plans anew -------------------------------------------------------------------------------------------


def test_what_waits_for_the_next_finished_stage_starts_though_that_is_one_of_before() -> None:
    one, other = stage("AB"), stage("CD")
    query = session(Drawn(plan("q", one, other, stage("ABCD", ("AB", "CD")))))
    query.begin({"AB": output("AB")}, 0.0)
    assert query.on_finished(other, output("CD"), 1.0, more=True) == []
    assert started(query.on_finished(one, output("AB"), 1.0, late=True)) == ["ABCD"]


def test_the_size_of_the_result_is_no_reason_to_plan_anew() -> None:
    planner = Drawn(plan("q", stage("AB")))
    query = session(planner)
    query.begin({}, 0.0)
    assert query.on_finished(planner.plans[0].sink, rows("AB", 10**6), 1.0) == [Finish(rows("AB", 10**6))]
    assert len(planner.asked) == 1


def test_a_change_of_capacity_has_plans_made_for_the_new_share() -> None:
    planner = Drawn(LEFT_DEEP, BUSHY, WIDE)
    query = session(planner, hysteresis=0.15)
    query.begin({}, 0.0)
    query.see(seen(4))
    actions = query.on_capacity("arrived: n2, n3", 0.0)
    assert planner.asked[-1] == (query.share, {}, (BUSHY.id,))
    assert planner.contrasts == [False, True]
    assert decisions(actions) == ["switch"]
    assert query.plan is WIDE
    assert [a.stage.output_fp for a in actions if isinstance(a, Cancel)] == ["AB", "CD"]
    assert started(actions) == ["AC", "BD"]


def test_a_policy_that_never_replans_keeps_its_plan_and_asks_for_no_other() -> None:
    planner = Drawn(LEFT_DEEP, BUSHY, WIDE)
    query = session(planner, "clarinet")
    query.begin({}, 0.0)
    query.see(seen(4))
    assert decisions(query.on_capacity("arrived: n2, n3", 0.0)) == ["stay"]
    query.on_finished(BUSHY.by_fp["AB"], rows("AB", 10**6), 3.0)
    assert len(planner.asked) == 1
    assert planner.model is DUCKDB


def test_without_a_core_nothing_is_planned_until_some_come() -> None:
    planner = Drawn(LEFT_DEEP)
    query = session(planner)
    query.begin({}, 0.0)
    query.see(seen(0, 1))
    assert decisions(query.on_capacity("left: n0, n1", 1.0)) == ["wait"]
    assert len(planner.asked) == 1
    query.see(seen(2, 2))
    assert decisions(query.on_capacity("arrived: n2, n3", 2.0)) == ["stay"]
    assert len(planner.asked) == 2


def test_costs_are_fitted_to_earlier_runs_and_to_this_one() -> None:
    work = Work(scanned_rows=1e9)
    expected = DUCKDB.core_seconds(work)
    slow = Measured("duckdb", work, 3 * expected, 3 * expected, 4, 2.0)
    planner = Drawn(plan("q", replace(stage("AB"), rows=10), stage("ABC", ("AB",))))
    query = session(planner, history=[slow] * 20)
    before = planner.model.core_seconds(work)
    assert before == pytest.approx(3 * expected, rel=0.2)
    query.begin({}, 0.0)
    slower = replace(slow, task_seconds=9 * expected, wall_seconds=9 * expected)
    for _ in range(200):
        query.measured.append(slower)
    query.on_finished(planner.plans[0].stages[0], rows("AB", 1), 0.5, measured=slower)
    assert query.measured[-1] == slower
    assert planner.model.core_seconds(work) > 2 * before


def test_cold_nodes_are_no_slower_machine_and_get_warm() -> None:
    """Of what running stages lose to nodes that are new nothing is expected of later stages."""
    first = replace(stage("AB", tasks=4, duration=1.0), work=Work(scanned_rows=1e9), warm_up=6.0)
    asked = {}
    for cold in (0.0, 2.0):
        planner = Drawn(plan("q", first, stage("ABC", ("AB",))))
        query = session(planner)
        query.see(replace(seen(2), cold=cold))
        query.begin({}, 0.0)
        query.on_progress(first, 4, 1, 2, 12.0)
        query.see(seen(3, 2))
        query.on_capacity("arrived: n2", 12.0)
        asked[cold] = planner.model.core_seconds(first.work)
    assert asked[2.0] < asked[0.0]

    query = session(Drawn(plan("q", first, stage("ABC", ("AB",)))))
    query.see(replace(seen(2), cold=2.0))
    query.begin({}, 0.0)
    done = Measured("duckdb", first.work, WARM, WARM / 2, 4, 2.0, cold=2.0)
    query.on_finished(first, rows("AB", round(first.rows)), 3.0, measured=done)
    assert query.share.cold == query.execution.share.cold == 1.0  # each core has run tasks for half of it
    assert [query.cold_since(at) for at in (0.0, 2.9, 3.0, 9.0)] == [2.0, 2.0, 1.0, 1.0]


def test_what_this_run_has_in_common_outweighs_earlier_runs() -> None:
    """Twenty stages of before were as expected, each of three of this run took four times as long."""
    work = Work(scanned_rows=1e9)
    due = DUCKDB.core_seconds(work)
    usual = Measured("duckdb", work, due, due, 4, 2.0)
    planner = Drawn(
        plan("q", *(replace(stage(fp), rows=1) for fp in ("A", "B", "C")), stage("D", ("A", "B", "C")))
    )
    query = session(planner, history=[usual] * 20, cores=4)
    query.begin({}, 0.0)
    for number, fp in enumerate("ABC"):
        slow = replace(usual, task_seconds=4 * due, wall_seconds=4 * due)
        query.on_finished(query.plan.by_fp[fp], rows(fp, 1), 0.1 * number, measured=slow)
    query.see(FOUR)
    query.on_capacity("arrived", 0.5)
    assert planner.model.core_seconds(work) > 2 * due


@pytest.mark.parametrize(
    ("engine", "actual", "counted"), [("duckdb", 1, True), ("duckdb", 100, False), ("spark", 1, False)]
)
def test_times_of_other_rows_or_another_engine_than_planned_are_no_error_of_times(
    engine: str, actual: int, counted: bool
) -> None:
    """Two stages were as expected, a third took eight times as long: for its rows, on another engine, or as it is."""
    work = Work(scanned_rows=1e9)
    due = DUCKDB.core_seconds(work)
    parts = [replace(stage(fp, duration=due), rows=1, work=work, engine="duckdb") for fp in "ABC"]
    planner = Drawn(plan("q", *parts, stage("D", ("A", "B", "C"))))
    query = session(planner, cores=4)
    query.begin({}, 0.0)
    plain = Measured("duckdb", work, due, due, 4, 2.0)
    query.on_finished(parts[0], rows("A", 1), 0.1, measured=plain)
    query.on_finished(parts[1], rows("B", 1), 0.2, measured=plain)
    slow = replace(plain, engine=engine, task_seconds=8 * due, wall_seconds=8 * due)
    query.on_finished(parts[2], rows("C", actual), 0.3, measured=slow)
    query.see(FOUR)
    query.on_capacity("arrived", 0.5)
    assert len(query.measured) == 3
    assert query._speed.error == pytest.approx(q_error([1.0, 1.0, 8.0] if counted else [1.0, 1.0]))


def test_a_stage_that_is_under_way_is_discarded_for_more_than_it_has_done() -> None:
    """The rival's stage takes 5 s instead of the 8 s that are left, but 8 s are done."""
    sixteen = plan("sixteen", replace(stage("A", tasks=16, duration=1.0, key="slow"), rows=1))
    rival = plan("rival", replace(stage("A", tasks=16, duration=0.3, key="fast"), rows=1))
    said = {}
    for done in (0, 8):
        planner = Drawn(sixteen, rival)
        planner.plans = (sixteen,)
        query = session(planner, cores=1)
        query.see(seen(1))
        query.begin({}, 0.0)
        planner.plans = (sixteen, rival)
        query.on_progress(query.plan.sink, 16, done, 1, 8.0)
        query.see(replace(seen(1, 2), nodes=(Node("n0", 1, 32.0),)))
        made = [a.decision for a in query.on_capacity("less memory", 8.0) if isinstance(a, Decided)]
        said[done] = made[0]
    assert {done: decision.kind for done, decision in said.items()} == {0: "switch", 8: "stay"}


def test_cores_whose_executors_start_are_not_counted_on_at_once() -> None:
    one, other = (replace(stage(fp, tasks=8, duration=4.0), rows=1) for fp in "AB")
    planner = Drawn(plan("q", one, other, stage("AB", ("A", "B"))))
    query = session(planner, cores=1)
    query.see(replace(seen(1), held=1.0))
    query.begin({}, 0.0)
    query.see(replace(seen(5, 2), held=1.0))
    assert query.share.absent == 4.0
    query.on_capacity("arrived", 1.0)
    assert query.execution.expected(1.0).estimate.seconds > ARRIVAL
    query.on_finished(other, rows("B", 1), 2.0)
    assert query.execution.share.absent == 4.0
    assert query.execution.share.arrival == query.share.arrival == ARRIVAL - 1.0
    query.on_progress(one, 8, 0, 3, 2.5)
    query.on_finished(other, rows("B", 1), 2.5, late=True)
    assert query.execution.share.absent == 2.0  # three of five work
    query.on_progress(one, 8, 2, 1, 2.9)
    query.on_finished(other, rows("B", 1), 3.0, late=True)
    assert query.execution.share.absent == 2.0  # and were there
    query.on_finished(query.plan.by_fp["A"], rows("A", 1), 1.0 + ARRIVAL, late=True)
    assert query.share.absent == query.execution.share.absent == 0.0
    assert query.share.total.cores == 5.0


# --- slices -----------------------------------------------------------------------------------------------


def divided(one: Stage) -> Stage:
    grid = SimpleNamespace(name="l_orderkey", cells=16)
    return replace(one, slicing=SimpleNamespace(grid=grid, slices=4))  # type: ignore[arg-type]


def test_stages_of_which_earlier_runs_have_left_slices_are_divided_as_then() -> None:
    planner = Drawn(LEFT_DEEP)
    query = session(planner)
    planner.plans = (BUSHY,)
    query.divide_as_before({"AB": "l_orderkey"})
    assert planner.divided == {"AB": ("l_orderkey", 8)}
    assert list(query.plans) == [BUSHY.id]
    assert query.plan is BUSHY


def test_stages_that_were_begun_in_slices_stay_divided_in_later_plans() -> None:
    planner = Drawn(plan("q", divided(stage("AB")), stage("ABC", ("AB",))))
    query = session(planner)
    query.begin({}, 0.0)
    query.see(seen(4))
    query.on_capacity("arrived: n2, n3", 1.0)
    assert planner.divided == {"AB": ("l_orderkey", 4)}


def test_a_stage_with_slices_has_the_rest_to_do() -> None:
    query = session(Drawn(plan("q", divided(stage("AB", tasks=8)))))
    query.begin({}, 0.0, {"AB": 0.75})
    assert query.execution.state(0.0).sliced == {"AB": 0.75}
