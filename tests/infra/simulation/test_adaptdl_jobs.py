"""AdaptDL jobs by events: the same progress as by ticks, alone times, lost work, and agents that change batches."""

from pathlib import Path

import pytest

from ebbflow.infra.simulation.engine import simulate
from ebbflow.infra.simulation.jobs.adaptdl import FixedBatch, KnownSpeed, adaptdl_jobs, packed
from ebbflow.infra.simulation.jobs.profiles import Profiles
from ebbflow.infra.simulation.protocols import Saves
from ebbflow.infra.simulation.traces.cluster import CapacityChange, Cluster
from ebbflow.infra.simulation.traces.workloads import Job, Workload, read_adaptdl
from ebbflow.planners.scheduling.gangs.optimus import Optimus
from ebbflow.planners.scheduling.gangs.tiresias import Tiresias
from ebbflow.planners.scheduling.placement import most_free_first

DATA = Path(__file__).parents[2] / "fixtures" / "training" / "adaptdl"


@pytest.fixture(scope="module")
def profiles() -> Profiles:
    return Profiles(DATA / "traces")


def las() -> Tiresias:
    return Tiresias([57_600], order="insertion", placer=most_free_first)


def one(model: str = "cifar10", gpus: int = 6, batch: int = 2048) -> Workload:
    return Workload("one", (Job("a", 0.0, gpus, model=model, batch=batch),))


@pytest.mark.parametrize(
    ("model", "gpus", "batch"),
    [("cifar10", 6, 2048), ("bert", 1, 48), ("ncf", 1, 32768), ("imagenet", 32, 6400)],
)
def test_a_job_alone_takes_its_time_alone_and_the_delay(profiles, model, gpus, batch):
    workload = one(model, gpus, batch)
    models = adaptdl_jobs(profiles, whole_seconds=False)
    result = simulate(workload, Cluster.grid(16, 4), las(), models=models)
    assert result.jobs[0].jct == pytest.approx(30 + models(workload.jobs[0]).alone())
    assert result.jobs[0].rho == pytest.approx(result.jobs[0].jct / result.jobs[0].alone)
    assert result.decisions <= 2
    ticks = simulate(workload, Cluster.grid(16, 4), las(), models=models, tick=60)
    assert ticks.jobs[0].finish == pytest.approx(60 + result.jobs[0].finish)


def test_events_end_a_little_earlier_than_ticks(profiles):
    jobs = read_adaptdl(DATA / "workloads" / "workload-1.csv", profiles).first(40)
    models = adaptdl_jobs(profiles, whole_seconds=False)
    averages = [
        simulate(jobs, Cluster.grid(16, 4), las(), models=models, tick=tick).summary()["avg_jct_s"]
        for tick in (None, 60.0)
    ]
    assert 10 <= averages[1] - averages[0] <= 120


class Doubling(FixedBatch):
    """An agent that trains at the first batch until it saw the statistics of 50 epochs, and then at twice that."""

    adaptive = True

    def __init__(self, profile) -> None:
        super().__init__(profile, profile.first_batch, KnownSpeed(profile, profile.first_batch, 4))
        self.profile, self.seen = profile, set()

    def split(self, nodes, gpus):
        return self.profile.split(self.profile.first_batch * (1 if len(self.seen) < 50 else 2), gpus)

    def observe(self, nodes, gpus, local, passes, step, sync, sqr, var):
        self.seen.add((sqr, var))


def test_an_agent_may_change_the_batch_while_a_job_runs(profiles):
    """By events the engine looks again at every epoch's end: the change is one epoch late at most."""
    workload = one("cifar10", 4, 128)
    finishes = {}
    for name, agent in {"fixed": None, "doubling": lambda job, profile: Doubling(profile)}.items():
        models = adaptdl_jobs(profiles, agent=agent, whole_seconds=False)
        finishes[name] = (
            simulate(workload, Cluster.grid(1, 4), las(), models=models, restart_delay=0).jobs[0].finish
        )
    profile = profiles["cifar10"]
    local, passes = profile.split(128, 4)
    slow = profile.iteration_time((4,), local, passes)
    local, passes = profile.split(256, 4)
    fast = profile.iteration_time((4,), local, passes)
    starts = [0.0, *profile.boundaries]
    spans = [(profile.boundaries[epoch] - starts[epoch], epoch) for epoch in range(profile.epochs)]

    def expected(change: int) -> float:
        return sum(
            span * (slow / profile.gain(128, epoch) if epoch < change else fast / profile.gain(256, epoch))
            for span, epoch in spans
        )

    assert expected(49) * (1 - 1e-6) <= finishes["doubling"] <= expected(51) * (1 + 1e-6)
    assert finishes["doubling"] < 0.95 * finishes["fixed"]


def test_a_lost_node_costs_the_work_since_the_checkpoint(profiles):
    workload = one()
    models = adaptdl_jobs(profiles, whole_seconds=False)
    alone = models(workload.jobs[0]).alone()
    cluster = Cluster(Cluster.grid(4, 4).nodes, (CapacityChange(330, remove=("node-1",)),))
    for every, lost in ((float("inf"), 300), (200.0, 130)):
        result = simulate(workload, cluster, las(), models=models, saves=Saves(every=every))
        assert result.jobs[0].jct == pytest.approx(alone + 60 + lost)
        assert result.jobs[0].lost_gpu_seconds == pytest.approx(6 * lost)


def test_optimus_shrinks_jobs_when_nodes_leave(profiles):
    jobs = read_adaptdl(DATA / "workloads" / "workload-1.csv", profiles).first(10)
    changes = tuple(CapacityChange(600.0 * (at + 1), remove=(f"node-{at}",)) for at in range(3))
    cluster = Cluster(Cluster.grid(4, 4).nodes, changes)
    for tick in (None, 60.0):
        result = simulate(jobs, cluster, Optimus(), models=adaptdl_jobs(profiles), tick=tick)
        assert len(result.jobs) == 10
        assert result.usage.held.at(2000) <= 4


def test_packed_counts():
    assert packed(10, 4) == (4, 4, 2)
    assert packed(8, 4) == (4, 4)
    assert packed(3, 4) == (3,)
