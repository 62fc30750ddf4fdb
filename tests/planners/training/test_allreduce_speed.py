"""Speed learnt from measured iterations, alone and in the simulator under Optimus."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.sim.adaptdl import adaptdl_jobs, packed
from ebbflow.infra.sim.cluster import Cluster
from ebbflow.infra.sim.engine import simulate
from ebbflow.infra.sim.profiles import Profile, Profiles
from ebbflow.infra.sim.workloads import Job, read_adaptdl
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import App
from ebbflow.planners.scheduling.optimus import Optimus
from ebbflow.planners.training.allreduce_speed import AllReduceSpeed, SpeedAgent

DATA = Path(__file__).parents[2] / "fixtures" / "training" / "adaptdl"
TRIALS = (1, 2, 3, 4, 5, 8, 12)


def true_time(theta, batch: float, gpus: int, per_node: int = 4) -> float:
    return float(np.dot(theta, [batch / gpus, 1, (gpus - 1) / gpus, gpus, gpus > per_node]))


@given(st.lists(st.floats(0.01, 2), min_size=5, max_size=5), st.floats(1, 100))
def test_clean_times_are_recovered(theta, batch):
    speed = AllReduceSpeed(batch, per_node=4)
    for gpus in TRIALS:
        speed.add(-(-gpus // 4), gpus, true_time(theta, batch, gpus))
    assert min(speed.theta) >= 0
    for gpus in (6, 7, 10, 16):
        assert speed.iteration_time(gpus) == pytest.approx(true_time(theta, batch, gpus), rel=1e-4)


def test_measurements_override_and_repeat_by_their_mean():
    speed = AllReduceSpeed(8.0, per_node=4)
    for seconds in (2.0, 4.0):
        speed.add(1, 2, seconds)
    assert speed.iteration_time(2) == pytest.approx(3)
    assert speed.samples == 1
    assert speed.iteration_time(4) > 0


@pytest.mark.parametrize("sample", [(1, 1, 0.0), (1, 1, float("inf")), (0, 1, 1.0), (3, 2, 1.0)])
def test_impossible_samples_are_refused(sample):
    with pytest.raises(OptionError):
        AllReduceSpeed(1.0).add(*sample)


def test_an_agent_needs_a_trial_and_learns_as_it_runs():
    with pytest.raises(OptionError, match="trial"):
        SpeedAgent(lambda n, g: (1, 0), 8.0, [], most_gpus=4)
    agent = SpeedAgent(lambda n, g: (1, 0), 8.0, [(1, 1, 1.0)], most_gpus=4)
    agent.observe(1, 2, 4, 1, step=0.5, sync=0.1, sqr=1, var=1)
    app = App("a")
    agent.report(app)
    assert app.speed is not None
    assert app.speed.iteration_time(2) == pytest.approx(0.9)
    assert (app.min_gpus, app.max_gpus) == (1, 4)


def learning(job: Job, profile: Profile) -> SpeedAgent:
    """Return an agent that tried a few counts, each time with an error of up to 5 %."""
    rng = np.random.default_rng(len(job.id))
    batch = job.batch or profile.first_batch
    most = min(max(1, batch // profile.local_min), profile.most_gpus or 64)
    trials = []
    for gpus in (count for count in TRIALS if count <= most):
        counts = packed(gpus, 4)
        seconds = profile.iteration_time(counts, *profile.split(batch, gpus, spare_one=True))
        trials.append((len(counts), gpus, seconds * float(rng.uniform(0.95, 1.05))))
    return SpeedAgent(
        lambda nodes, gpus: profile.split(batch, gpus), batch, trials, most_gpus=most, per_node=4
    )


def test_optimus_with_fitted_speeds_comes_near_the_oracle():
    profiles = Profiles(DATA / "traces")
    jobs = read_adaptdl(DATA / "workloads" / "workload-1.csv", profiles).first(20)

    def average(agent) -> float:
        models = adaptdl_jobs(profiles, agent=agent)
        return simulate(jobs, Cluster.grid(8, 4), Optimus(), models=models, tick=60).summary()["avg_jct_s"]

    assert average(learning) == pytest.approx(average(None), rel=0.3)
