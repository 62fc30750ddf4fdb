"""Goodput, batch choice and the agent: worked examples, probes of the public profiles, invariants."""

import csv
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import App
from ebbflow.planners.training.speed.batch_agent import GoodputAgent
from ebbflow.planners.training.speed.batch_size import BatchLimits, BatchSplit, candidates, first_split, split
from ebbflow.planners.training.speed.goodput import (
    GoodputModel,
    GradientStatistics,
    efficiency,
    efficiency_at,
    gain,
)
from ebbflow.planners.training.speed.throughput import Observation, ThroughputParameters, fit

PROFILE = Path(__file__).parents[3] / "fixtures" / "training" / "adaptdl" / "traces" / "cifar10"
LIMITS = BatchLimits(128, 4096, 32, 1024)
CIFAR10 = ThroughputParameters(
    alpha_grad=0.0174,
    beta_grad=0.0007,
    alpha_local=0.0278,
    beta_local=0.00513,
    alpha_node=0.121,
    beta_node=0.00264,
    gamma=2.03,
)
noises = st.floats(0.0, 1e7)
totals = st.floats(128, 1e6)


def noisy(phi: float) -> GradientStatistics:
    return GradientStatistics(1.0, phi / 128)


def model(phi: float) -> GoodputModel:
    return GoodputModel(CIFAR10, noisy(phi), LIMITS)


@pytest.mark.parametrize(
    ("phi", "total", "worth", "steps"),
    [
        (128, 256, 0.6667, 1.3333),
        (1000, 1024, 0.5573, 4.4585),
        (10000, 4096, 0.7185, 22.992),
        (0, 256, 0.5, 1.0),
    ],
)
def test_efficiency_and_gain_of_the_worked_examples(phi, total, worth, steps):
    assert efficiency(noisy(phi), total / 128) == pytest.approx(worth, abs=1e-4)
    assert efficiency_at(phi, 128, total) == pytest.approx(worth, abs=1e-4)
    assert gain(noisy(phi), total / 128) == pytest.approx(steps, abs=1e-3)


@given(noises, totals, totals)
def test_efficiency_falls_with_the_batch_and_rises_with_noise(phi, one, other):
    small, large = sorted((one, other))
    assert efficiency(noisy(phi), 1.0) == pytest.approx(1.0)
    assert efficiency(noisy(phi), large / 128) <= efficiency(noisy(phi), small / 128) * (1 + 1e-12)
    assert efficiency(noisy(2 * phi), large / 128) >= efficiency(noisy(phi), large / 128) * (1 - 1e-12)
    assert 128 / large * (1 - 1e-9) <= efficiency(noisy(phi), large / 128) <= 1.0 + 1e-12


@given(noises, totals)
def test_a_gain_lies_between_one_and_the_scale(phi, total):
    scale = total / 128
    assert 1 - 1e-9 <= gain(noisy(phi), scale) <= scale * (1 + 1e-9)
    assert gain(noisy(phi), scale) / scale == pytest.approx(float(efficiency(noisy(phi), scale)))


def test_the_noise_scale_is_clipped():
    assert GradientStatistics(2.0, 4.0).noise_scale(128) == 256
    assert GradientStatistics(0.0, 1.0).noise_scale(128) == 1e9


@pytest.mark.parametrize(
    ("phi", "nodes", "gpus", "goodput", "chosen", "total"),
    [
        (72.5, 1, 4, 2346.2, (37, 0), 148),
        (1000, 1, 1, 1196.3, (128, 0), 128),
        (1000, 2, 8, 3381.9, (166, 0), 1328),
        (10000, 1, 1, 1262.5, (350, 1), 700),
        (10000, 4, 16, 11727.3, (256, 0), 4096),
    ],
)
def test_batches_of_the_worked_examples(phi, nodes, gpus, goodput, chosen, total):
    found, batch = model(phi).best_split(nodes, gpus)
    assert found == pytest.approx(goodput, abs=0.05)
    assert batch == chosen
    assert batch.total(gpus) == total


def test_one_full_node_can_beat_two():
    alone, both = model(1000).best(np.array([1, 2]), np.array([4, 8]))
    assert (alone, both) == pytest.approx((3396.6, 3381.9), abs=0.05)


@given(noises, st.integers(1, 64), st.integers(1, 2))
def test_a_table_holds_the_best_of_every_batch(phi, gpus, nodes):
    nodes = min(nodes, gpus)
    one, chosen = model(phi).best_split(nodes, gpus)
    assert model(phi).best(np.array([nodes]), np.array([gpus]))[0] == pytest.approx(one)
    assert 32 <= chosen.batch <= 1024
    assert chosen.total(gpus) <= 4096


def test_tables_know_their_edges():
    few = GoodputModel(CIFAR10, noisy(1000), BatchLimits(128, 256, 64, 1024))
    found = few.best(np.array([0, 1, 1, 1]), np.array([0, 4, 5, 64]))
    assert found[0] == 0
    assert found[1] > 0
    assert (found[2:] == 0).all()
    with pytest.raises(OptionError, match="5 GPUs"):
        few.best_split(1, 5)
    assert few.best(np.array([], int), np.array([], int)).shape == (0,)


def test_a_job_that_does_not_adapt_counts_every_example_alike():
    rigid = GoodputModel(CIFAR10, noisy(1.0), LIMITS, adaptive=False)
    assert rigid.best(np.array([1]), np.array([1])) > model(1.0).best(np.array([1]), np.array([1]))
    assert rigid.best_split(4, 16)[1].total(16) == 4096


@pytest.mark.parametrize(
    ("total", "gpus", "limits", "expected"),
    [
        (2048, 6, LIMITS, (342, 0)),
        (2048, 1, LIMITS, (1024, 1)),
        (32768, 1, BatchLimits(256, 32768, 32, 32768), (16384, 1)),
        (320, 6, BatchLimits(20, 640, 10, 80), (54, 0)),
        (6400, 32, BatchLimits(200, 12800, 20, 200), (200, 0)),
    ],
)
def test_splits_of_the_yardstick(total, gpus, limits, expected):
    assert split(total, gpus, limits) == expected


@given(st.integers(128, 4096), st.integers(1, 64))
def test_a_split_holds_the_batch_and_no_more_than_the_largest(total, gpus):
    found = split(total, gpus, LIMITS)
    assert found.batch <= 1024
    assert found.total(gpus) <= 4096
    assert found.total(gpus) > total - gpus * (found.accumulation + 1)


def test_the_first_batch_is_the_initial_one_or_the_least_that_gpus_share():
    assert first_split(1, LIMITS) == BatchSplit(128, 0)
    assert first_split(8, LIMITS) == BatchSplit(32, 0)


def test_few_examples_a_gpu_where_memory_is_no_limit():
    limits = BatchLimits(8, 64)
    assert split(8, 2, limits) == (4, 0)
    assert (candidates(limits, 8).accumulation >= 0).all()


def test_candidates_grow_to_the_largest_total():
    tried = candidates(LIMITS, 8)
    assert (np.diff(tried.total, axis=1) >= 0).all()
    assert tried.total[:, -1].tolist() == [4096, 4096, 4098, 4096, 4100, 4098, 4102, 4096]
    assert tried.total[0, 0] == 128


@pytest.mark.parametrize("bad", [(0, 10, 1, 1), (20, 10, 1, 1), (1, 10, 5, 4), (1, 10, 0, 4)])
def test_limits_that_contradict_each_other_are_refused(bad):
    with pytest.raises(OptionError, match="batch limits need"):
        BatchLimits(*bad)


@pytest.mark.parametrize("bad", [(0.0, 0.0), (-1.0, 1.0), (float("nan"), 1.0)])
def test_statistics_that_cannot_be_are_refused(bad):
    with pytest.raises(OptionError, match="gradient statistics"):
        GoodputModel(CIFAR10, GradientStatistics(*bad), LIMITS)


def measured(placement: str, batch: int) -> Observation:
    with (PROFILE / "placements.csv").open() as file:
        rows = sorted(
            (int(row["local_bsz"]), float(row["step_time"]), float(row["sync_time"]))
            for row in csv.DictReader(file)
            if row["placement"] == placement
        )
    sizes, steps, syncs = zip(*rows, strict=True)
    gpus = [int(digit) for digit in placement]
    return Observation(
        len(gpus),
        sum(gpus),
        batch,
        float(np.interp(batch, sizes, steps)),
        float(np.interp(batch, sizes, syncs)),
    )


def statistics(epoch: int) -> GradientStatistics:
    with (PROFILE / "validation-128.csv").open() as file:
        row = list(csv.DictReader(file))[epoch]
    return GradientStatistics(float(row["grad_sqr"]), float(row["grad_var"]))


@pytest.fixture(scope="module")
def four() -> list[Observation]:
    return [measured(*where) for where in (("1", 128), ("2", 96), ("4", 200), ("44", 300))]


def test_the_fit_of_the_public_profile(four):
    expected = (0.0152166, 0.000686709, 0.0468623, 0.00471253, 0.00842104, 0.00181554, 1.13172)
    assert fit(four) == pytest.approx(expected, rel=1e-4)
    alone = fit(four[:1])
    assert alone.alpha_grad == pytest.approx(0.051295, rel=1e-4)
    assert alone.beta_grad == pytest.approx(0.000402636, rel=0.01)
    assert max(alone[2:6]) < 1e-6
    assert alone.gamma == pytest.approx(1.001, abs=1e-4)


@pytest.mark.parametrize(
    ("epoch", "nodes", "gpus", "goodput", "chosen"),
    [
        (0, 1, 1, 1241.33, (128, 0)),
        (0, 1, 4, 2768.41, (32, 0)),
        (0, 2, 8, 1499.47, (36, 0)),
        (60, 1, 1, 1269.28, (264, 1)),
        (60, 1, 4, 4565.34, (249, 0)),
        (60, 2, 8, 6485.43, (308, 0)),
    ],
)
def test_best_batches_of_the_public_profile(four, epoch, nodes, gpus, goodput, chosen):
    found, batch = GoodputModel(fit(four), statistics(epoch), LIMITS).best_split(nodes, gpus)
    assert found == pytest.approx(goodput, rel=1e-4)
    assert batch == chosen


def test_an_agent_learns_every_configuration_once(four):
    agent = GoodputAgent(LIMITS)
    assert agent.model is None
    assert agent.split(1, 1) == (128, 0)
    for nodes, gpus, batch, step, sync in four:
        agent.observe(nodes, gpus, batch, 0, step, sync, *statistics(0))
    first = agent.observations
    assert list(first) == four
    agent.observe(1, 1, 128, 0, 99.0, 1.0, *statistics(60))
    assert agent.observations == first
    assert agent.model is not None
    assert agent.model.speed == pytest.approx(fit(four))
    assert agent.split(2, 8) == (308, 0)


def test_an_agent_keeps_its_model_while_nothing_is_new(four):
    agent = GoodputAgent(LIMITS)
    nodes, gpus, batch, step, sync = four[0]
    agent.observe(nodes, gpus, batch, 0, step, sync, *statistics(0))
    model = agent.model
    agent.observe(nodes, gpus, batch, 0, step, sync, *statistics(0))
    assert agent.model is model
    agent.observe(nodes, gpus, batch, 0, step, sync, *statistics(1))
    assert agent.model is not model


def test_an_agent_reports_what_policies_read(four):
    app = App("a", gpus=8, min_gpus=8, max_gpus=8)
    agent = GoodputAgent(LIMITS)
    agent.report(app)
    assert (app.goodput, app.min_gpus, app.max_gpus) == (None, 1, 128)
    agent.observe(1, 1, 128, 0, four[0].step, four[0].sync, *statistics(0))
    agent.report(app)
    assert app.goodput is agent.model


def test_a_fixed_total_is_kept():
    agent = GoodputAgent(BatchLimits(256, 32768, 32, 32768), fixed_total=32768, most_gpus=1)
    assert not agent.adaptive
    assert agent.split(1, 1) == (16384, 1)
    agent.observe(1, 1, 16384, 1, 0.02, 0.001, 1.0, 5.0)
    assert agent.split(1, 1) == (16384, 1)
    app = App("ncf")
    agent.report(app)
    assert app.max_gpus == 1
