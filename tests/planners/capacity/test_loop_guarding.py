"""Quotas, budgets and unsaved work: what the guard refuses, and for how long."""

from dataclasses import replace

import pytest
from ledger_worlds import World, app, node

from ebbflow.planners.capacity.values import Settings, Team
from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.limits import Limits
from ebbflow.planners.model.scheduling import Decision, Grant
from ebbflow.planners.scheduling.live import live_policy

GANGS = Settings(policy=live_policy("best-effort"), lease_s=60, interval_s=10, termination_grace_s=10)


class NewestFirst:
    """All GPUs to the app that came last."""

    name, elastic = "newest-first", True

    def decide(self, view, memory, rng):
        grants = {}
        for one in view.apps[-1:]:
            whole = tuple((n.id, n.gpus) for n in view.capacity.nodes)
            grants[one.id] = Grant(whole, reason="it came last")
        return Decision(grants)


def test_a_team_gets_no_more_than_its_quota_and_others_get_the_rest():
    world = World(replace(GANGS, teams={"red": Team(gpus=4)}), [node("n1", 8)])
    for id_, team in (("a", "red"), ("b", "red"), ("c", "blue")):
        world.enter(app(id_, 4, team=team))
    world.steps(3)
    assert (world.live("a"), world.live("b"), world.live("c")) == (4, 0, 4)
    assert world.said("guard") == ["b gets no GPUs: team red may hold 4 GPUs, its other apps hold 4"]
    world.finish("a")
    world.steps(3)
    assert world.live("b") == 4


def test_an_elastic_app_is_capped_to_what_its_team_has_left():
    world = World(Settings(interval_s=10, teams={"red": Team(gpus=5)}), [node("n1", 8)])
    world.enter(app("a", 4, 1, 8, team="red"))
    world.steps(30)
    assert world.live("a") <= 5
    world.enter(app("b", 2, 1, 4, team="red"))
    world.steps(60)
    assert (world.live("a"), world.live("b")) == (3, 2)


def test_a_teams_dollars_per_hour_limit_its_gpus():
    world = World(replace(GANGS, teams={"red": Team(dollars_per_hour=1.0)}), [node("n1", 4, price=2.0)])
    world.enter(app("a", 2, team="red"))
    world.enter(app("b", 1, team="red"))
    world.steps(3)
    assert (world.live("a"), world.live("b")) == (2, 0)
    assert "team red may spend $1/h, its other apps spend $1/h" in world.said("guard")[0]


@pytest.mark.parametrize("whose", ["app", "pipeline", "team", "run"])
def test_a_spent_budget_ends_the_lease_and_is_not_overspent(whose):
    more = {
        "app": {"budget": 1.0},
        "pipeline": {"pipeline": "p1", "pipeline_budget": 1.0},
        "team": {"team": "red"},
        "run": {"pipeline": "p1"},
    }[whose]
    rules = replace(GANGS, teams={"red": Team(budget=1.0)} if whose == "team" else {})
    if whose == "run":
        rules = replace(rules, limits=Limits(dollars_per_run=1.0))
    world = World(rules, [node("n1", 4, price=60.0)])  # $0.25 a minute for a GPU
    world.enter(app("a", 2, **more))
    world.enter(app("b", 1), work=50.0)
    world.steps(200)
    record = world.state.apps["a"]
    assert not world.state.held("a")
    assert 0.85 < record.dollars <= 1.0
    assert world.state.apps["b"].phase == "finished"
    assert len([why for why in world.said("guard") if why.startswith("a ")]) == 1
    assert "budget of $1.00 is exhausted" in world.said("guard")[0]


def test_the_loop_wakes_when_a_budget_will_be_spent():
    world = World(GANGS, [node("n1", 4, price=3600.0)])  # $0.25 a second for a GPU
    world.enter(app("a", 1, budget=5.0))
    cycle = world.step()
    assert cycle.wake <= world.now + 10.0 + 0.01  # 20 s of money, 10 of them to save


def test_an_app_with_unsaved_work_is_spared_for_a_while_but_not_for_a_notice():
    rules = replace(GANGS, policy=NewestFirst(), unsaved_work_s=100, preempt_exempt_s=50)
    world = World(rules, [node("n1", 4), node("n2", 4)])
    world.enter(app("a", 4, 1, 8))
    world.steps(150)
    world.enter(app("b", 4, 1, 8))
    world.steps(40)
    assert world.live("a") == 8
    assert "s of unsaved work" in world.said("guard")[0]
    world.steps(30)
    assert (world.live("a"), world.live("b")) == (0, 8)


def test_an_app_that_has_just_saved_is_not_spared():
    rules = replace(GANGS, policy=NewestFirst(), unsaved_work_s=100, preempt_exempt_s=50)
    world = World(rules, [node("n1", 4)])
    living = world.enter(app("a", 4, 1, 8))
    world.steps(150)
    living.fields["saved_at"] = world.now - 10
    world.enter(app("b", 4, 1, 8))
    world.steps(8)
    assert (world.live("a"), world.live("b")) == (0, 4)


def test_a_notice_spares_nobody():
    rules = replace(GANGS, policy=NewestFirst(), unsaved_work_s=10, preempt_exempt_s=500)
    world = World(rules, [node("n1", 4)])
    world.enter(app("a", 4, 1, 8))
    world.steps(50)
    world.notice("n1", 60)
    world.steps(10)
    assert not world.state.held("a")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"weight": 0.0}, "weight of a team must be > 0"),
        ({"gpus": -1}, "gpus of a team must be >= 0"),
        ({"budget": float("nan")}, "budget of a team must be >= 0"),
    ],
)
def test_quotas_that_make_no_sense_are_refused(values, said):
    with pytest.raises(OptionError, match=said):
        Team(**values)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lease_s": 0.0}, "lease_s must be > 0 s"),
        ({"termination_grace_s": -1.0}, "termination_grace_s must be >= 0 s"),
        ({"heartbeat_timeout_s": float("inf")}, "heartbeat_timeout_s must be > 0 s and finite"),
        ({"deadline_priority_boost_max": 0.5}, "deadline_priority_boost_max must be >= 1"),
    ],
)
def test_settings_outside_their_rules_are_refused(values, said):
    with pytest.raises(OptionError, match=said):
        Settings(**values)


@pytest.mark.parametrize(
    ("more", "teams", "kept"),
    [
        ({"team": "red"}, {"red": Team(budget=1.0)}, {"teams": {"red": 1.0}}),
        ({"pipeline": "p1", "pipeline_budget": 1.0}, {}, {"pipelines": {"p1": 1.0}}),
    ],
)
def test_what_apps_have_cost_counts_when_the_ledger_has_forgotten_them(more, teams, kept):
    world = World(replace(GANGS, teams=teams), [node("n1", 4, price=60.0)])
    for name, sums in kept.items():
        getattr(world.state, name).update(sums)
    world.enter(app("a", 2, **more))
    world.enter(app("b", 1))
    world.steps(5)
    assert (world.live("a"), world.live("b")) == (0, 1)
    assert "budget of $1.00 is exhausted: $1.00 spent" in world.said("guard")[0]
