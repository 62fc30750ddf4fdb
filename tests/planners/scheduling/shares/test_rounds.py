"""Rounds: who is due, what is owed, and how the policy fits other engines."""

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.simulation.engine import simulate
from ebbflow.infra.simulation.rounds.setting import python_generator
from ebbflow.infra.simulation.traces.cluster import Cluster
from ebbflow.infra.simulation.traces.workloads import Job, Workload
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Capacity, Node, Notice
from ebbflow.planners.model.scheduling import App, Decision, Run, View, gpus_of
from ebbflow.planners.scheduling.shares.allox import AlloX
from ebbflow.planners.scheduling.shares.least_rho import FinishTimeProgramme
from ebbflow.planners.scheduling.shares.max_min import MaxMin, MaxSum
from ebbflow.planners.scheduling.shares.rounds import RoundBased, shuffle
from ebbflow.planners.scheduling.shares.rules import Array, Demand
from ebbflow.planners.scheduling.shares.simple import GandivaFair, Isolated


@dataclass(frozen=True)
class Told:
    """A rule that answers what it is told."""

    table: dict[str, float]
    work_conserving: bool = True
    name: str = "told"
    fastest_first: bool = True

    def shares(self, demand: Demand, memory: Any) -> tuple[Array, Any]:
        return np.array([[self.table[app] for _ in demand.types] for app in demand.apps]), None


def cluster(**gpus: int) -> Capacity:
    nodes = (
        Node(f"{gpu}-{i}", 0, 0.0, instance_type=gpu, gpus=1) for gpu, n in gpus.items() for i in range(n)
    )
    return Capacity(0, tuple(nodes))


def apps(count: int, gpus: int = 1, **speeds: float) -> list[App]:
    return [
        App(id=f"a{i}", number=i, gpus=gpus, remaining=1e6, throughputs=speeds or {"v100": 1.0})
        for i in range(count)
    ]


def running(decision: Decision) -> set[str]:
    return {app for app, grant in decision.grants.items() if grant.placement}


RNG = np.random.default_rng(0)


def test_over_many_rounds_everyone_gets_its_share() -> None:
    policy = RoundBased(Told({"a0": 1.0, "a1": 0.5, "a2": 0.5}), 100.0, 1e9)
    crew, room, memory = apps(3), cluster(v100=2), None
    ran: list[Run] = []
    got = dict.fromkeys(("a0", "a1", "a2"), 0)
    for number in range(100):
        decision = policy.decide(View(100.0 * number, crew, room, ran), memory, RNG)
        memory = decision.memory
        ran = [Run(app, "v100", 100.0) for app in sorted(running(decision))]
        for run in ran:
            got[run.app] += 1
    assert got["a0"] >= 98
    assert abs(got["a1"] - got["a2"]) <= 2


def test_equal_priorities_fall_to_the_deficit_then_to_submission() -> None:
    policy = RoundBased(Told({"a0": 0.5, "a1": 0.5, "a2": 0.5}), 100.0, 100.0)
    crew, room = apps(2), cluster(v100=1)
    first = policy.decide(View(0.0, crew, room), None, RNG)
    assert running(first) == {"a0"}
    late = [*crew, App(id="a2", number=2, throughputs={"v100": 1.0})]
    second = policy.decide(View(100.0, late, room, [Run("a0", "v100", 100.0)]), first.memory, RNG)
    assert second.notes["allocated"] == 1  # a0 is owed -50 s, a1 50 s, a2 nothing
    assert second.memory.deficits["v100"] == {"a0": -50.0, "a1": 50.0, "a2": 0.0}
    assert running(second) == {"a1"}


def test_newcomers_wait_for_the_next_allocation_but_are_counted() -> None:
    policy = RoundBased(Told({"a0": 0.1, "a1": 1.0}), 100.0, 1000.0)
    crew, room = apps(2), cluster(v100=2)
    first = policy.decide(View(50.0, crew[:1], room), None, RNG)
    second = policy.decide(View(150.0, crew, room, [Run("a0", "v100", 100.0)]), first.memory, RNG)
    assert running(second) == {"a0"}
    assert "next allocation" in second.grants["a1"].reason
    third = policy.decide(View(1050.0, crew, room, [Run("a0", "v100", 100.0)]), second.memory, RNG)
    assert running(third) == {"a0", "a1"}


def test_when_everybody_waits_the_allocation_does_not() -> None:
    policy = RoundBased(Told({"a0": 1.0, "a1": 1.0}), 100.0, 1e6)
    crew, room = apps(2), cluster(v100=1)
    memory = policy.decide(View(50.0, crew[:1], room), None, RNG).memory
    gone = policy.decide(View(150.0, crew[1:], room, [Run("a0", "v100", 100.0)]), memory, RNG)
    assert running(gone) == set()
    again = policy.decide(View(150.0, crew[1:], room), gone.memory, RNG)
    assert running(again) == {"a1"}


def test_a_rule_that_does_not_conserve_work_leaves_gpus_idle() -> None:
    crew, room = apps(2), cluster(v100=2)
    for conserving, expected in ((True, {"a0", "a1"}), (False, {"a0"})):
        policy = RoundBased(Told({"a0": 1.0, "a1": 0.0}, work_conserving=conserving))
        assert running(policy.decide(View(0.0, crew, room), None, RNG)) == expected


def test_gangs_are_whole_and_large_ones_are_passed() -> None:
    crew = [*apps(1, gpus=3), App(id="a1", number=1, throughputs={"v100": 1.0})]
    decision = RoundBased(Told({"a0": 1.0, "a1": 0.1})).decide(View(0.0, crew, cluster(v100=2)), None, RNG)
    assert {app: gpus_of(grant.placement) for app, grant in decision.grants.items()} == {"a0": 0, "a1": 1}


def test_types_without_throughput_are_skipped_and_fast_ones_come_first() -> None:
    crew = apps(3, v100=2.0, k80=1.0)
    crew[2].throughputs = {"v100": 2.0, "k80": 0.0}
    policy = RoundBased(Told(dict.fromkeys(("a0", "a1", "a2"), 1.0)))
    decision = policy.decide(View(0.0, crew, cluster(v100=1, k80=2)), None, RNG)
    assert decision.grants["a0"].placement == (("v100-0", 1),)
    assert decision.grants["a1"].placement == (("k80-0", 1),)
    assert not decision.grants["a2"].placement


def test_who_runs_again_keeps_its_nodes() -> None:
    crew, room = apps(2), cluster(v100=3)
    crew[1].held = (("v100-2", 1),)
    decision = RoundBased(GandivaFair()).decide(View(0.0, crew, room), None, RNG)
    assert decision.grants["a1"].placement == (("v100-2", 1),)


@given(st.integers(0, 2**31), st.integers(0, 9))
def test_shuffle_is_pythons(seed: int, length: int) -> None:
    mine = [str(i) for i in range(length)]
    pythons, rng, random = mine.copy(), python_generator(seed), Random(seed)
    for _ in range(5):
        shuffle(mine, rng)
        random.shuffle(pythons)
        assert mine == pythons


def test_type_orders_of_gavels_seed() -> None:
    rng, orders = python_generator(5), []
    for _ in range(8):
        types = ["v100", "p100", "k80"]
        shuffle(types, rng)
        orders.append("".join(t[0] for t in types))
    assert orders == ["vpk", "vpk", "pvk", "kvp", "pvk", "pkv", "vkp", "kpv"]


def test_decisions_repeat_and_memory_is_left_alone() -> None:
    crew, room, policy = apps(4), cluster(v100=2), RoundBased(MaxMin())
    memory = policy.decide(View(0.0, crew, room), None, RNG).memory
    view = View(120.0, crew, room, [Run("a0", "v100", 119.0), Run("a1", "v100", 118.0)])
    one, two = (policy.decide(view, memory, np.random.default_rng(3)) for _ in range(2))
    assert one == two


@pytest.mark.parametrize(
    "rule", [GandivaFair(), Isolated(), AlloX(), MaxMin(), FinishTimeProgramme()], ids=lambda rule: rule.name
)
def test_the_same_policy_runs_in_the_event_driven_engine(rule: Any) -> None:
    jobs = tuple(
        Job(id=f"j{i}", arrival=40.0 * i, gpus=1 + i % 4, duration=100.0 + 70 * i) for i in range(10)
    )
    policy = RoundBased(rule, 120.0, 600.0)
    result = simulate(Workload("ten", jobs), Cluster.grid(2, 4), policy, restart_delay=10.0)
    assert len(result.jobs) == 10
    assert result.summary()["restarts_mean"] > 0 or rule.name == "allox"


@pytest.mark.parametrize(("option", "value"), [("round_s", 0.0), ("reset_s", -1.0)])
def test_bad_options_are_refused(option: str, value: float) -> None:
    with pytest.raises(OptionError, match=option):
        RoundBased(GandivaFair(), **{option: value})


@pytest.mark.parametrize(
    "rule", [MaxSum(), MaxMin(), FinishTimeProgramme(), GandivaFair(), AlloX()], ids=repr
)
def test_while_all_nodes_leave_nothing_is_shared_out_and_then_everything_anew(rule) -> None:
    policy, crew, room = RoundBased(rule, 100.0, 300.0), apps(2), cluster(v100=2)
    leaving = Capacity(1, room.nodes, tuple(Notice(node.id, 450.0) for node in room.nodes))
    first = policy.decide(View(100.0, crew, room), None, RNG)
    none = policy.decide(View(400.0, crew, leaving), first.memory, RNG)
    again = policy.decide(View(500.0, crew, replace(room, revision=2)), none.memory, RNG)
    assert [running(decision) for decision in (first, none, again)] == [{"a0", "a1"}, set(), {"a0", "a1"}]
