"""How many nodes one job rents, against the worked figures of Pollux' evaluation."""

from math import inf

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.planners.errors import OptionError
from ebbflow.planners.fleet.scaling.per_gpu import goodput_per_gpu, nodes_wanted
from ebbflow.planners.training.speed.batch_size import BatchLimits
from ebbflow.planners.training.speed.goodput import GoodputModel, GradientStatistics
from ebbflow.planners.training.speed.throughput import ThroughputParameters

IMAGENET = ThroughputParameters(0.0638, 0.00449, 0.307, 0.00666, 1e-8, 0.0515, 2.67)
LIMITS = BatchLimits(200, 12_800, 20, 200)


def imagenet(noise: float) -> GoodputModel:
    if noise == inf:
        return GoodputModel(IMAGENET, GradientStatistics(1.0, 1.0), LIMITS, adaptive=False)
    return GoodputModel(IMAGENET, GradientStatistics(1.0, noise / 200), LIMITS)


@pytest.mark.parametrize(("noise", "nodes"), [(928, 2), (5590, 8), (11_400, 12), (14_300, 14), (28_600, 16)])
def test_count_nearest_to_half_the_goodput_of_one_gpu_grows_with_the_noise(noise: float, nodes: int) -> None:
    assert nodes_wanted(imagenet(noise), 1, 16, 4, trigger=0.5, target=0.5) == nodes


def test_by_throughput_alone_the_job_takes_everything_at_once() -> None:
    ratios = goodput_per_gpu(imagenet(inf), 16, 4)
    assert ratios[-1] == pytest.approx(0.868, abs=0.002)
    assert nodes_wanted(imagenet(inf), 1, 16, 4) == 16


def test_it_stays_where_it_is_below_the_trigger() -> None:
    ratios = goodput_per_gpu(imagenet(928), 16, 4)
    assert ratios[3] < 2 / 3
    assert nodes_wanted(imagenet(928), 4, 16, 4) == 4


class Table:
    """Goodput by GPUs on several nodes."""

    def __init__(self, values: dict[int, float]) -> None:
        self.values = values

    def best(self, nodes: np.ndarray, gpus: np.ndarray) -> np.ndarray:
        return np.array([self.values[int(count)] for count in gpus])


@given(st.floats(0.0, 1.0), st.integers(1, 8), st.integers(8, 12))
def test_never_fewer_nodes_and_never_more_than_there_are(loss: float, now: int, most: int) -> None:
    table = Table({count: count / (1 + loss * (count - 1)) for count in range(1, 2 * most + 1)})
    assert now <= nodes_wanted(table, now, most, 2) <= most


@pytest.mark.parametrize(
    ("now", "most", "trigger", "target"), [(0, 4, 0.7, 0.5), (5, 4, 0.7, 0.5), (1, 4, 0.4, 0.5)]
)
def test_bad_numbers_are_refused(now: int, most: int, trigger: float, target: float) -> None:
    with pytest.raises(OptionError, match="must"):
        nodes_wanted(imagenet(928), now, most, 4, trigger=trigger, target=target)


def test_without_goodput_on_one_gpu_there_is_nothing_to_compare_with() -> None:
    with pytest.raises(OptionError, match="single GPU"):
        goodput_per_gpu(Table(dict.fromkeys(range(1, 9), 0.0)), 2, 4)
