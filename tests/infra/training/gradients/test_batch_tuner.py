"""The batch of a live job: when it changes, to what, and what the scheduler is told."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.training.gradients.tuner import LEAST_STEPS, BatchTuner
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.speed.batch_size import BatchLimits, BatchSplit
from ebbflow.planners.training.speed.goodput import GoodputModel, GradientStatistics
from ebbflow.planners.training.speed.job_report import JobReport
from ebbflow.planners.training.speed.throughput import ThroughputParameters, step_time, sync_time

LIMITS = BatchLimits(128, 4096, 8, 1024)
TRUTH = ThroughputParameters(0.02, 0.0005, 0.2, 0.01, 0.03, 0.004, 1.5)
NOISY, QUIET = GradientStatistics(1.0, 80.0), GradientStatistics(1.0, 0.01)


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Time()


def train(tuner, clock, nodes, gpus, seconds, statistics, slow=1.0):
    """Train so long; return the splits that were used, in order."""
    used, until = [], clock.now + seconds
    while clock.now < until:
        split = tuner.split(nodes, gpus)
        if not used or used[-1] != split:
            used.append(split)
        taken = slow * float(step_time(TRUTH, nodes, gpus, split.batch))
        sync = slow * float(sync_time(TRUTH, nodes, gpus))
        tuner.observe(nodes, gpus, split, taken, min(sync, 0.9 * taken) if gpus > 1 else 0.0, statistics)
        clock.now += taken * (split.accumulation + 1)
    return used


def test_the_batch_begins_at_the_initial_one_and_changes_after_thirty_seconds(clock):
    tuner = BatchTuner(LIMITS, clock=clock)
    assert train(tuner, clock, 1, 2, 29.0, NOISY) == [(64, 0)]
    later = train(tuner, clock, 1, 2, 60.0, NOISY)
    assert len(later) >= 2
    assert later[1].total(2) > 128


def test_the_batch_goes_where_goodput_is_best(clock):
    tuner = BatchTuner(LIMITS, clock=clock)
    last = train(tuner, clock, 1, 4, 600.0, NOISY)[-1]
    best, _ = (truth := GoodputModel(TRUTH, NOISY, LIMITS)).best_split(1, 4)
    assert truth.at(1, 4, last) > best / 1.06


def test_a_gradient_without_noise_keeps_the_initial_batch(clock):
    tuner = BatchTuner(LIMITS, clock=clock)
    assert train(tuner, clock, 1, 4, 200.0, QUIET) == [(32, 0)]


def test_little_better_is_not_worth_a_change(clock):
    tuner = BatchTuner(LIMITS, clock=clock)
    before = train(tuner, clock, 1, 4, 300.0, NOISY)[-1]
    model = tuner._agent.model
    assert model is not None
    for slightly in (1.02, 0.98):
        statistics = GradientStatistics(NOISY.sqr * slightly, NOISY.var)
        assert train(tuner, clock, 1, 4, 100.0, statistics) == [before]


def test_few_steps_say_little(clock):
    tuner = BatchTuner(LIMITS, clock=clock)
    split = tuner.split(1, 2)
    for n in range(LEAST_STEPS - 1):
        tuner.observe(1, 2, split, 0.1, 0.01, NOISY)
        clock.now += 100.0
        assert tuner.split(1, 2) == split, n
    tuner.observe(1, 2, split, 0.1, 0.01, NOISY)
    clock.now += 100.0
    assert tuner.split(1, 2) != split


def test_a_step_that_was_held_up_does_not_count(clock):
    tuner = BatchTuner(LIMITS, clock=clock)
    split = tuner.split(1, 2)
    tuner.observe(1, 2, split, 30.0, 0.01, NOISY)
    for _ in range(20):
        tuner.observe(1, 2, split, 0.1, 0.01, NOISY)
    (observation,) = tuner._agent.observations
    assert observation == pytest.approx((1, 2, 64, 0.1, 0.01))


def test_another_number_of_gpus_gets_its_best_batch_at_once(clock):
    tuner = BatchTuner(LIMITS, clock=clock)
    small = train(tuner, clock, 1, 1, 200.0, NOISY)[-1]
    large = tuner.split(1, 8)
    assert large.total(8) > small.total(1)
    assert tuner.split(1, 1) == tuner._agent.split(1, 1)


def test_a_fixed_batch_stays_and_is_reported_as_such(clock):
    tuner = BatchTuner(LIMITS, adaptive=False, clock=clock)
    assert train(tuner, clock, 1, 2, 120.0, NOISY) == [(64, 0)]
    assert train(tuner, clock, 2, 3, 60.0, NOISY) == [(43, 0)]
    report = tuner.report()
    assert report.limits.largest == 128
    assert report.model is not None
    assert report.model.best_split(1, 2)[1] == (64, 0)


def test_a_new_process_goes_on_with_what_the_old_one_knew(clock):
    old = BatchTuner(LIMITS, clock=clock)
    train(old, clock, 1, 2, 120.0, NOISY)
    state = json.loads(json.dumps(old.state_dict()))
    same, other = BatchTuner(LIMITS, clock=clock), BatchTuner(LIMITS, clock=clock)
    same.load_state_dict(state)
    other.load_state_dict(state)
    assert same.split(1, 2) == old.split(1, 2)
    assert same.report() == old.report()
    model = GoodputModel(same._agent.model.speed, NOISY, LIMITS)
    assert other.split(1, 4) == model.best_split(1, 4)[1]
    fresh = BatchTuner(LIMITS, clock=clock)
    fresh.load_state_dict(BatchTuner(LIMITS, clock=clock).state_dict())
    assert fresh.split(1, 2) == (64, 0)


def test_restarts_do_not_put_the_next_look_off(clock):
    tuner = BatchTuner(LIMITS, clock=clock)
    used = []
    for _ in range(5):  # each process lives for 9 s
        used += train(tuner, clock, 1, 2, 9.0, NOISY)
        state = json.loads(json.dumps(tuner.state_dict()))
        tuner = BatchTuner(LIMITS, clock=clock)
        tuner.load_state_dict(state)
    assert used[0] == (64, 0)
    assert used[-1].total(2) > 128


def test_a_move_after_a_few_steps_keeps_the_initial_batch(clock):
    tuner = BatchTuner(LIMITS, clock=clock)
    split = tuner.split(1, 1)
    for _ in range(LEAST_STEPS - 1):
        tuner.observe(1, 1, split, 0.1, 0.0, NOISY)
    assert tuner.split(1, 4) == (32, 0)
    tuner.observe(1, 4, BatchSplit(32, 0), 0.1, 0.05, NOISY)
    assert tuner.split(1, 2).total(2) > 128


def test_the_report_travels_as_json(clock):
    tuner = BatchTuner(LIMITS, clock=clock)
    with pytest.raises(OptionError, match="when it has a batch"):
        tuner.report()
    tuner.split(1, 1)
    assert tuner.report().model is None
    assert tuner.report().max_gpus == 2
    train(tuner, clock, 1, 4, 60.0, NOISY)
    report = tuner.report()
    assert report.max_gpus == 8  # twice the most that it held
    train(tuner, clock, 1, 1, 60.0, NOISY)
    assert tuner.report().max_gpus == 8
    said = json.loads(json.dumps(report.to_dict()))
    assert JobReport.from_dict(said) == report
    assert said["goodput"] == pytest.approx(report.model.at(1, 4, report.split))
    assert said["throughput"] >= said["goodput"]
    assert said["noise_scale"] == pytest.approx(128 * 80)
    with pytest.raises(OptionError, match="not a job's report"):
        JobReport.from_dict({"limits": {}})
    with pytest.raises(OptionError, match=r"0 <= sync < step; got 0\.2, 0\.1"):
        tuner.observe(1, 1, BatchSplit(64, 0), 0.1, 0.2, NOISY)
    with pytest.raises(OptionError, match="must be >= 0; got -1"):
        BatchTuner(LIMITS, every=-1)


@pytest.mark.parametrize("adaptive", [True, False])
def test_the_scheduler_hears_every_thirty_seconds(clock, adaptive):
    tuner = BatchTuner(LIMITS, adaptive=adaptive, clock=clock)
    assert tuner.news() is None
    heard = []
    for _ in range(1000):
        clock.now += 0.125
        split = tuner.split(1, 4)
        tuner.observe(1, 4, split, 0.125, 0.01, NOISY)
        if (news := tuner.news()) is not None:
            heard.append((clock.now, news))
    times = [at for at, _ in heard]
    assert times[0] == 0.125 * LEAST_STEPS
    assert [later - sooner for sooner, later in pairwise(times)] == [30.0] * 4
    assert all(news.model is not None for _, news in heard)
    again = BatchTuner(LIMITS, adaptive=adaptive, clock=clock)
    again.load_state_dict(tuner.state_dict())
    assert again.news() is not None, "who goes on knows enough at once"


@given(
    st.integers(1, 300), st.integers(0, 3000), st.integers(1, 8), st.integers(1, 16), st.booleans(), st.booleans(),
    st.floats(0.0, 100.0), st.floats(1e-6, 1000.0),
)  # fmt: skip
def test_the_total_never_falls_below_the_initial_batch(
    initial, more, least, gpus, several, adaptive, sqr, var
):
    limits = BatchLimits(initial, initial + more, min(least, initial), max(least, 64))
    if gpus > limits.most_gpus:
        return
    nodes = 2 if several and gpus > 1 else 1
    clock = Time()
    tuner = BatchTuner(limits, adaptive=adaptive, clock=clock)
    for _ in range(3):
        split = tuner.split(nodes, gpus)
        assert split.total(gpus) >= initial
        # K GPUs share evenly, in equal passes: at most one example more for each
        assert split.total(gpus) < limits.largest + gpus * (split.accumulation + 1)
        for _ in range(LEAST_STEPS):
            tuner.observe(nodes, gpus, split, 0.05, 0.01, GradientStatistics(sqr, var))
        clock.now += 31.0


def test_all_processes_know_the_batch_of_the_first(clock):
    first, second = BatchTuner(LIMITS, clock=clock), BatchTuner(LIMITS, clock=clock)
    assert first.total is None
    chosen = train(first, clock, 1, 2, 120.0, NOISY)[-1]
    second.split(1, 2)
    second.adopt(1, 2, chosen)
    saved = BatchTuner(LIMITS, clock=clock)
    saved.load_state_dict(second.state_dict())
    assert saved.total == second.total == first.total == chosen.total(2)
    assert BatchTuner(LIMITS, adaptive=False, clock=clock).total == 128
