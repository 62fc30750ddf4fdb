"""The first plan of each policy."""

import pytest
from hypothesis import given

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Share
from ebbflow.planners.query.plan.qep import QueryExecutionPlan
from ebbflow.planners.query.running.baselines import (
    POLICIES,
    clarinet,
    consumption,
    initial,
    policy_named,
    volcano,
)
from ebbflow.planners.query.running.packing import simulate
from tests.planners.query.replanning_cases import fig_2_4, output, plan, queries, share, shares, stage

PLANS = fig_2_4()
LEFT_DEEP, BUSHY, WIDE = PLANS


@pytest.mark.parametrize("cores", [2, 4, 0])
def test_volcano_takes_the_left_deep_plan_of_figure_2_4_whatever_the_share(cores: int) -> None:
    assert volcano(PLANS, share(cores)) is LEFT_DEEP


def test_consumption_is_task_time_weighted_by_the_part_of_the_share_it_holds() -> None:
    one = plan("q", stage("A", tasks=3, duration=2, cores=1, memory=2))
    assert consumption(one, share(4, 16)) == pytest.approx(3 * 2 * (1 / 4 + 2 / 16))


def test_volcano_breaks_ties_towards_the_left_deep_plan_then_the_id() -> None:
    bushy = plan("a", stage("AB"), stage("CD"), stage("ABCD", ("AB", "CD")))
    deep = plan("b", stage("AB"), stage("ABC", ("AB",)), stage("ABCD", ("ABC",)))
    twin = plan("c", *deep.stages)
    assert volcano([twin, bushy, deep], share(4)) is deep


def test_clarinet_takes_the_first_finisher_of_the_present_share() -> None:
    assert clarinet(PLANS, share(2)) is BUSHY
    assert clarinet(PLANS, share(4)) is WIDE


def test_clarinet_counts_checkpoints_of_earlier_runs() -> None:
    assert clarinet(PLANS, share(2), {"ABC": output("ABC")}) is LEFT_DEEP


def test_clarinet_takes_the_least_work_when_nothing_fits() -> None:
    assert clarinet(PLANS, share(0, 0, nodes=0)) is LEFT_DEEP


@given(queries(), shares())
def test_no_plan_finishes_before_clarinets(plans: tuple[QueryExecutionPlan, ...], capacity: Share) -> None:
    chosen = simulate(clarinet(plans, capacity), capacity).seconds
    assert chosen <= min(simulate(p, capacity).seconds for p in plans) + 1e-9


@pytest.mark.parametrize(
    ("policy", "chosen"),
    [("qoop", BUSHY), ("clarinet", BUSHY), ("volcano", LEFT_DEEP), ("single", LEFT_DEEP)],
)
def test_each_policy_starts_with_its_plan_and_says_why(policy: str, chosen: QueryExecutionPlan) -> None:
    decision = initial(PLANS, share(2, revision=3), policy, now=5)
    assert (decision.kind, decision.chosen, decision.revision, decision.at) == ("start", chosen.id, 3, 5)
    assert decision.reason.startswith(f"start: {chosen.id} is the ")
    assert decision.reason.endswith(f"it would finish in {simulate(chosen, share(2)).seconds:.1f} s")
    assert [e.plan_id for e in decision.estimates] == [p.id for p in PLANS]


def test_a_plan_asked_for_goes_before_the_policys() -> None:
    assert initial(PLANS, share(2), "qoop", chosen=WIDE.id).chosen == WIDE.id
    with pytest.raises(OptionError, match="got 'q9'"):
        initial(PLANS, share(2), "qoop", chosen="q9")


def test_a_start_without_nodes_waits() -> None:
    decision = initial(PLANS, share(0, 0, nodes=0), "qoop")
    assert (decision.kind, decision.reason) == ("wait", "wait: there is no usable node")


def test_only_qoop_replans() -> None:
    assert [name for name, policy in POLICIES.items() if policy.replans] == ["qoop"]


def test_an_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(OptionError, match="one of qoop, clarinet, volcano, single; got 'best'"):
        policy_named("best")
