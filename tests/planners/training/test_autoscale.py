"""Auto-scaling of one large job: ImageNet as the authors measured it."""

import pytest

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.autoscale import nodes_worth, utilities
from ebbflow.planners.training.batch_size import BatchLimits
from ebbflow.planners.training.goodput import GoodputModel, GradientStatistics
from ebbflow.planners.training.throughput import ThroughputParameters

IMAGENET = ThroughputParameters(
    alpha_grad=0.0638,
    beta_grad=0.00449,
    alpha_local=1e-8,
    beta_local=0.0515,
    alpha_node=0.307,
    beta_node=0.00666,
    gamma=2.67,
)


def model(phi: float, adaptive: bool = True) -> GoodputModel:
    return GoodputModel(
        IMAGENET, GradientStatistics(1.0, phi / 200), BatchLimits(200, 12800, 20, 200), adaptive
    )


@pytest.mark.parametrize(
    ("phi", "nodes"), [(928, 2), (5590, 8), (11400, 12), (14300, 14), (28600, 16), (1e6, 16)]
)
def test_nodes_grow_with_the_noise(phi, nodes):
    worth = utilities(model(phi), 4, 16)
    assert abs(worth - 0.5).argmin() + 1 == nodes
    if worth[0] > 2 / 3:
        assert nodes_worth(model(phi), 4, 16) == nodes


def test_throughput_alone_takes_everything_at_once():
    rule = model(928, adaptive=False)
    assert utilities(rule, 4, 16)[15] == pytest.approx(0.868, abs=0.002)
    assert nodes_worth(rule, 4, 16) == 16


def test_a_job_never_shrinks():
    assert nodes_worth(model(928), 4, 16, held=5) == 5
    assert nodes_worth(model(1e6), 4, 16, held=16) == 16


@pytest.mark.parametrize(
    "bad", [{"held": 0}, {"held": 17}, {"target": 0.9}, {"target": 0.0}, {"node_gpus": 0}]
)
def test_options_outside_their_rule_are_refused(bad):
    options = {"node_gpus": 4, "most_nodes": 16, **bad}
    with pytest.raises(OptionError, match="got"):
        nodes_worth(model(928), **options)
