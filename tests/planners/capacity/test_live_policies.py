"""Policies by name and options for a live cluster."""

import pytest
from ledger_worlds import World, app, node

from ebbflow.planners.capacity.values import Settings
from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.live import DEFAULT, live_options, live_policies, live_policy


@pytest.mark.parametrize("name", [entry.name for entry in live_policies()])
def test_every_policy_can_be_made_and_runs_a_live_cluster(name):
    policy = live_policy(name, lease_s=25.0, services=(100.0, 200.0))
    assert policy.name
    world = World(
        Settings(policy=policy, lease_s=40, interval_s=10, termination_grace_s=5),
        [node("n1", 4), node("n2", 4)],
        seed=1,
    )
    for number in range(3):
        world.enter(app(f"a{number}", 2), work=60.0, mute=number == 1)
        world.steps(3)
    world.steps(60)
    assert not [why for why in world.said("auction") if name in why and ("failed" in why or "broke" in why)]
    assert {record.phase for record in world.state.apps.values()} == {"finished"}


def test_the_default_bounds_rho():
    assert live_policy().name == DEFAULT == "rho-bounded"


def test_options_are_the_policys_own_and_may_be_text():
    assert live_policy("rho-bounded", {"rho": "1.5", "value": 2}).rho == 1.5
    assert live_policy("themis", {"knob": 0.5, "lease_s": 60}, lease_s=30.0).lease_s == 60
    assert live_policy("themis", lease_s=30.0).lease_s == 30.0
    assert live_policy("drf", lease_s=30.0).lease_s == float("inf")
    assert live_policy("tiresias", {"refresh": 5}).refresh == 5.0
    assert "knob" in live_options("themis")


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("themiss", {}, "the nearest is 'themis'"),
        ("themis", {"rho": 1}, "has no option 'rho'; it has kappa"),
        ("themis", {"knob": "much"}, "option knob of policy themis must be a number; got 'much'"),
        ("themis", {"knob": 2}, "within 0 and 1"),
        ("themis", {"leftovers": 3}, "must be text"),
        ("philly", {"attempts": 2.5}, "must be a whole number"),
        ("philly", {"defragment": 1}, "must be bool"),
        ("rho-bounded", {"rho": float("nan")}, "must be a number"),
        ("tiresias-g", {}, "needs the GPU-seconds of apps that have ended"),
    ],
)
def test_what_cannot_be_is_refused_with_the_rule(name, options, said):
    with pytest.raises(OptionError, match=said):
        live_policy(name, options)
