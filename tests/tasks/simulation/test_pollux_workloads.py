"""Pollux with its agents in the simulator, on the first jobs of the authors' workloads."""

from pathlib import Path

import pytest

from ebbflow.infra.simulation.engine import Result, simulate
from ebbflow.infra.simulation.jobs.adaptdl import adaptdl_jobs
from ebbflow.infra.simulation.jobs.profiles import Profiles
from ebbflow.infra.simulation.traces.cluster import Cluster
from ebbflow.infra.simulation.traces.workloads import read_adaptdl
from ebbflow.planners.scheduling.goodput.genetic import Genetic
from ebbflow.planners.scheduling.goodput.pollux import Pollux
from ebbflow.planners.training.speed.batch_size import BatchLimits
from ebbflow.tasks.simulation.scenarios import goodput_agent, limits_of

DATA = Path(__file__).parents[2] / "fixtures" / "training" / "adaptdl"


@pytest.fixture(scope="module")
def profiles() -> Profiles:
    return Profiles(DATA / "traces")


def run(
    profiles: Profiles, policy: Pollux, jobs: int, nodes: int, seed: int = 0, workload: int = 1
) -> Result:
    return simulate(
        read_adaptdl(DATA / "workloads" / f"workload-{workload}.csv", profiles).first(jobs),
        Cluster.grid(nodes, 4),
        policy,
        models=adaptdl_jobs(profiles, agent=goodput_agent),
        tick=60,
        restart_delay=30,
        seed=seed,
    )


def test_limits_come_from_the_measured_sizes(profiles):
    assert limits_of(profiles["cifar10"]) == BatchLimits(128, 4096, 32, 1024)
    assert limits_of(profiles["yolov3"]).largest_local == 8
    assert goodput_agent(None, profiles["ncf"]).split(1, 1) == (16384, 1)
    assert goodput_agent(None, profiles["ncf"]).most_gpus == 1
    assert goodput_agent(None, profiles["imagenet"]).most_gpus == 640


def test_the_first_twenty_jobs_beat_the_public_tiresias(profiles):
    """Tiresias takes 3015.8 s on average, Optimus 3911.4 s; rules and sizes of the small case of both."""
    result = run(profiles, Pollux(), jobs=20, nodes=8)
    figures = result.summary()
    assert len(result.jobs) == 20
    assert 2100 < figures["avg_jct_s"] < 2500
    assert 1 < figures["restarts_mean"] < 6


def test_equal_seeds_give_equal_runs(profiles):
    one, other = (run(profiles, Pollux(), jobs=6, nodes=4, seed=3, workload=3) for _ in range(2))
    assert [job.finish for job in one.jobs] == [job.finish for job in other.jobs]


def test_the_genetic_search_runs_a_workload_too(profiles):
    genetic = Pollux(search="genetic", genetic=Genetic(population=20, generations=10))
    few = run(profiles, genetic, jobs=5, nodes=4, workload=3)
    best = run(profiles, Pollux(), jobs=5, nodes=4, workload=3)
    assert few.summary()["avg_jct_s"] == pytest.approx(best.summary()["avg_jct_s"], rel=0.25)
    assert few.notes["fitness"] > 0
