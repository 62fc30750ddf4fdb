"""Adam's moments when the batch changes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.infra.training.gradients.preconditioner import rescale_moments
from ebbflow.planners.training.speed.goodput import GradientStatistics


def trained(kind, gradient, deviation, scale, steps, seed=0):
    torch.manual_seed(seed)
    parameter = torch.nn.Parameter(torch.zeros(500))
    optimizer = kind([parameter])
    for _ in range(steps):
        parameter.grad = gradient + deviation / scale**0.5 * torch.randn(500)
        optimizer.step()
    return optimizer, optimizer.state[parameter]


@pytest.mark.parametrize(("before", "after"), [(1.0, 16.0), (8.0, 2.0)])
def test_second_moments_reach_the_level_of_the_other_batch(before, after):
    gradient, deviation = torch.full((500,), 0.5), torch.full((500,), 2.0)
    optimizer, state = trained(torch.optim.AdamW, gradient, deviation, before, 400)
    factor2 = (1 - 0.999**400) / state["exp_avg_sq"]  # P squared
    statistics = GradientStatistics(
        float((factor2 * gradient**2).sum()), float((factor2 * deviation**2).sum())
    )
    first = state["exp_avg"].clone()
    assert rescale_moments(optimizer, statistics, before, after) != 1.0
    expected = (0.25 + 4.0 / after) * (1 - 0.999**400)
    assert float(state["exp_avg_sq"].mean()) == pytest.approx(expected, rel=0.02)
    assert torch.equal(state["exp_avg"], first)
    assert float(state["step"]) == 400


@given(st.floats(1e-6, 1e3), st.floats(0, 1e3), st.floats(1, 64), st.floats(1, 64))
@settings(deadline=None, max_examples=30)
def test_rescaling_there_and_back_changes_nothing(sqr, var, before, after):
    optimizer, state = trained(torch.optim.Adam, torch.ones(500), torch.ones(500), 1.0, 2)
    moment = state["exp_avg_sq"].clone()
    statistics = GradientStatistics(sqr, var)
    rescale_moments(optimizer, statistics, before, after)
    least, most = sorted((1.0, before / after))
    assert (state["exp_avg_sq"] >= moment * least * (1 - 1e-5)).all()
    assert (state["exp_avg_sq"] <= moment * most * (1 + 1e-5)).all()
    rescale_moments(optimizer, statistics, after, before)
    torch.testing.assert_close(state["exp_avg_sq"], moment)


def test_other_optimizers_are_left_alone():
    optimizer, state = trained(
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), torch.ones(500), torch.ones(500), 1.0, 3
    )
    momentum = state["momentum_buffer"].clone()
    assert rescale_moments(optimizer, GradientStatistics(1.0, 1.0), 1.0, 2.0) == 1.0
    assert torch.equal(state["momentum_buffer"], momentum)
