"""Random worlds: whatever comes, goes, dies or is slow, the rules of leases hold; ``World`` checks each cycle."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ledger_worlds import World, app, node

from ebbflow.planners.capacity.values import Settings, Team
from ebbflow.planners.model.ledger import OVER, Event
from ebbflow.planners.model.ledger_state import State, fold
from ebbflow.planners.scheduling.live import live_policy

POLICIES = (
    "rho-bounded",
    "themis",
    "best-effort",
    "las",
    "tiresias",
    "pollux",
    "equal-share",
    "max-min",
    "optimus",
)
QUICK = Settings(
    lease_s=40,
    interval_s=10,
    termination_grace_s=6,
    drain_lead_s=5,
    heartbeat_timeout_s=6,
    plan_timeout_s=10,
    teams={"red": Team(gpus=4)},
)

sizes = st.integers(1, 6)
happenings = st.lists(
    st.one_of(
        st.tuples(st.just("enter"), sizes, sizes, st.sampled_from(["", "red"]), st.floats(0.5, 9.0)),
        st.tuples(st.just("die"), st.integers(0, 5)),
        st.tuples(st.just("deaf"), st.integers(0, 5)),
        st.tuples(st.just("finish"), st.integers(0, 5)),
        st.tuples(st.just("notice"), st.integers(0, 3), st.integers(1, 20)),
        st.tuples(st.just("leave"), st.integers(0, 3)),
        st.tuples(st.just("missed"), st.integers(0, 3)),
        st.tuples(st.just("come"), st.integers(1, 4)),
        st.tuples(st.just("wait"), st.integers(1, 25)),
        st.tuples(st.just("forget")),
        st.tuples(st.just("out of reach"), st.integers(0, 3)),
        st.tuples(st.just("back")),
    ),
    min_size=3,
    max_size=14,
)


def play(world: World, story: list[tuple[object, ...]]) -> None:
    """Let the story happen."""
    numbers = iter(range(1000))
    for what, *how in story:
        apps = [living for living in world.apps.values() if not living.over]
        nodes = sorted(world.state.nodes)
        if what == "enter":
            one, two, team, save = how
            least, most = sorted((one, two))
            id_ = f"app{next(numbers)}"
            world.enter(app(id_, most, least, most + least % 3, team=team), save=save, work=60.0 * most)
        elif what == "come":
            world.capacity(came=(node(f"m{next(numbers)}", how[0]),))
        elif what == "wait":
            world.steps(how[0])
        elif what == "forget":
            world.memory = type(world.memory)()
            world.ghosts.clear()  # a loop that begins ends what runs without a lease
        elif what == "back":
            for record in list(world.state.apps.values()):
                if record.phase == "lost":
                    world.enter(record.spec)
        elif apps and what == "die":
            apps[how[0] % len(apps)].dies = 0.0
        elif apps and what == "deaf":
            apps[how[0] % len(apps)].deaf = 0.0
        elif apps and what == "finish":
            world.finish(apps[how[0] % len(apps)].spec.id)
        elif nodes and what == "notice":
            world.notice(nodes[how[0] % len(nodes)], how[1])
        elif nodes and what == "leave":
            world.capacity(left=(nodes[how[0] % len(nodes)],))
        elif nodes and what == "missed":
            there = world.state.nodes[nodes[how[0] % len(nodes)]]
            world.capacity(left=(there.id,))
            world.tick(0.3)
            world.capacity(came=(there,))
            world.tick(0.3)
        elif nodes and what == "out of reach":
            world.unreachable.add(nodes[how[0] % len(nodes)])
        world.step()


@given(st.sampled_from(POLICIES), happenings, st.integers(0, 3))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_the_rules_hold_and_nothing_is_left_over(policy, story, seed):
    world = World(
        replace(QUICK, policy=live_policy(policy, lease_s=30)), [node("n1", 4), node("n2", 4)], seed=seed
    )
    world.enter(app("first", 3, 1, 5))
    play(world, story)
    # everybody finishes or has fallen silent: all leases end, whatever was on its way
    for living in world.apps.values():
        if not living.over and living.dies > 1e9:
            world.finish(living.spec.id)
    world.steps(40, 4.0)
    assert not world.state.leases, f"left over: {world.state.leases}"
    assert all(record.phase in {*OVER, "lost"} for record in world.state.apps.values())
    again = State()
    for event in world.events:
        fold(again, Event(event.number, event.at, event.change))
    assert again.leases == world.state.leases
    assert again.apps == world.state.apps


@given(st.sampled_from(POLICIES), happenings, st.integers(0, 3))
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_whoever_can_run_runs_in_the_end(policy, story, seed):
    """No livelock: once the world is quiet, GPUs that a waiting app could run on do not stay idle."""
    given_ = replace(QUICK, policy=live_policy(policy, lease_s=30), teams={})
    world = World(given_, [node("n1", 4), node("n2", 4)], seed=seed)
    play(world, story)
    for living in world.apps.values():
        living.work = 1e9
        living.deaf = float("inf")
    world.steps(60)
    stuck = set(world.apps)
    for _ in range(60):
        world.step()
        stuck &= idle_for(world)
    assert not stuck, f"{stuck} wait although GPUs are idle all the time: {world.memory.plan}"


def idle_for(world: World) -> set[str]:
    """Return the apps that wait although they could run on what nobody holds."""
    state = world.state
    closed = {n.node_id for n in state.notices.values()}
    free = sum(n.gpus for n in state.nodes.values() if n.id not in closed) - sum(
        lease.node not in closed for lease in state.leases.values()
    )
    found = set()
    for record in state.active():
        id_, spec = record.spec.id, record.spec
        silent = record.phase == "lost" or world.apps[id_].dies < 1e9
        if not silent and not world.live(id_):
            found |= {id_} if free >= (spec.min_gpus if world.settings.elastic else spec.gpus) else set()
    return found


@pytest.mark.parametrize("policy", POLICIES)
def test_two_gangs_that_each_need_all_take_turns_without_a_deadlock(policy):
    """Each holds what the other needs a half of; nobody is ever left with a part."""
    rules = replace(QUICK, policy=live_policy(policy, lease_s=20), teams={})
    world = World(rules, [node("n1", 2), node("n2", 2)])
    world.enter(app("a", 3), work=90.0)
    world.enter(app("b", 3), work=90.0)
    world.steps(200)
    assert {record.phase for record in world.state.apps.values()} == {"finished"}
