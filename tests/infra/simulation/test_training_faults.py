"""Seeded failures and slow nodes, and what the simulator makes of them."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.simulation.engine import simulate
from ebbflow.infra.simulation.faults import Failures, Stragglers, slow_nodes, slowed, with_failures
from ebbflow.infra.simulation.jobs.plain import plain_jobs
from ebbflow.infra.simulation.protocols import Saves
from ebbflow.infra.simulation.traces.cluster import Cluster
from ebbflow.infra.simulation.traces.node_traces import NodeEvent, presences, with_trace
from ebbflow.infra.simulation.traces.workloads import Job, Workload
from ebbflow.planners.errors import OptionError
from ebbflow.planners.scheduling.gangs.ordered import best_effort

WEEK = 7 * 86_400.0


def test_failures_come_at_their_rate_and_last_as_long_as_the_repair() -> None:
    cluster = with_failures(Cluster.grid(50, 4), Failures(0.05, 600), 1, WEEK)
    losses = sum(len(change.remove) for change in cluster.changes)
    expected = 50 * WEEK / (3600 / 0.05 + 600)
    assert losses == pytest.approx(expected, rel=0.15)
    down: dict[str, float] = {}
    for change in cluster.changes:
        for id_ in change.remove:
            down[id_] = change.at
        for node in change.add:
            assert change.at - down.pop(node.id) == pytest.approx(600)


def test_equal_seeds_give_equal_failures_whatever_else_is_there() -> None:
    few, many = (with_failures(Cluster.grid(n, 4), Failures(0.1), 7, WEEK) for n in (3, 9))
    assert presences(few) == [one for one in presences(many) if one.node.id in {"node-0", "node-1", "node-2"}]
    assert presences(few) != presences(with_failures(Cluster.grid(3, 4), Failures(0.1), 8, WEEK))


@given(st.floats(1e4, 1e6), st.floats(1.0, 4.0))
def test_a_longer_horizon_only_adds_later_failures(horizon: float, more: float) -> None:
    cluster, failures = Cluster.grid(2, 4), Failures(0.2)
    short = [one.end for one in presences(with_failures(cluster, failures, 3, horizon)) if one.end < inf]
    long = [
        one.end for one in presences(with_failures(cluster, failures, 3, horizon * more)) if one.end < inf
    ]
    assert sorted(end for end in long if end < horizon) == sorted(short)


def test_a_spot_node_fails_only_while_it_is_there_and_is_told_again_when_it_is_back() -> None:
    events = [NodeEvent(1000, "add", "s"), NodeEvent(500_000, "remove", "s")]
    spot = with_trace(Cluster(()), events, Cluster.grid(1, 4).nodes[0], notice=400_000)
    found = presences(with_failures(spot, Failures(0.2, 1800), 0, WEEK))
    assert len(found) > 5
    assert found[0].start == 1000
    assert found[-1].end == 500_000
    assert all(a.end < b.start for a, b in pairwise(found))
    assert all(one.deadline == 500_000 and one.notice >= one.start for one in found if one.start > 100_000)


def test_a_failure_costs_the_work_since_the_last_checkpoint() -> None:
    jobs = Workload("w", (Job("a", 0.0, 4, 7200.0),))
    events = [NodeEvent(5000, "remove", "node-0"), NodeEvent(6000, "add", "node-0")]
    cluster = with_trace(Cluster.grid(1, 4), events, Cluster.grid(1, 4).nodes[0])
    run = simulate(jobs, cluster, best_effort(), restart_delay=0.0, saves=Saves(every=1800.0))
    (job,) = run.jobs
    assert job.finish == 6000 + (7200 - 3600)
    assert job.lost_gpu_seconds == 4 * 1400


def test_jobs_run_at_the_pace_of_their_slowest_node() -> None:
    jobs = Workload("w", (Job("a", 0.0, 2, 1000.0), Job("b", 0.0, 4, 1000.0)))
    cluster = Cluster.grid(2, 3)
    run = simulate(
        jobs, cluster, best_effort(), models=slowed(plain_jobs(), {"node-1": 2.0}), restart_delay=0.0
    )
    times = {job.name: job.finish for job in run.jobs}
    assert times == {"a": 1000.0, "b": 2000.0}


def test_slow_nodes_are_as_many_as_wanted_and_depend_on_the_seed_and_their_names() -> None:
    cluster = Cluster.grid(400, 4)
    slow = slow_nodes(cluster, Stragglers(0.1, 3.0), 5)
    assert 20 <= len(slow) <= 60
    assert set(slow.values()) == {3.0}
    assert slow_nodes(cluster, Stragglers(0.1, 3.0), 6).keys() != slow.keys()
    assert slow_nodes(cluster, Stragglers(0.0), 5) == {}
    assert len(slow_nodes(cluster, Stragglers(1.0), 5)) == 400


@pytest.mark.parametrize(
    "make",
    [
        lambda: Failures(-1),
        lambda: Failures(inf),
        lambda: Failures(0.1, 0),
        lambda: Stragglers(1.5),
        lambda: Stragglers(0.5, 0.5),
        lambda: Stragglers(0.5, inf),
    ],
)
def test_impossible_rates_are_refused(make) -> None:
    with pytest.raises(OptionError, match="need"):
        make()


def test_an_endless_horizon_is_refused() -> None:
    with pytest.raises(OptionError, match="finite; got inf"):
        with_failures(Cluster.grid(1, 4), Failures(0.1), 0, inf)
