"""Norms of gradients in one process, and the noise scale that comes of them."""

import math
from math import inf, nan, sqrt

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.gradients import preconditioner, squares
from ebbflow.infra.training.gradients.noise import GradientMeter
from ebbflow.infra.training.gradients.preconditioner import AdamPreconditioner
from ebbflow.infra.training.gradients.squares import PIECE, SquareSums
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.speed.noise_scale import from_samples


class Weights(torch.nn.Module):
    """Parameters whose gradient a test sets by a linear loss."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.zeros(size) for size in sizes)

    def loss(self, gradient: torch.Tensor) -> torch.Tensor:
        pieces = gradient.split([p.numel() for p in self.parts])
        return torch.stack([(p * piece).sum() for p, piece in zip(self.parts, pieces, strict=True)]).sum()


def step(meter, model, gradients, examples=None, scale=1.0):
    """Train one step whose passes have these mean gradients over so many examples each."""
    examples = examples or [1.0] * len(gradients)
    whole = sum(examples)
    for n, (gradient, count) in enumerate(zip(gradients, examples, strict=True)):
        weight = count / whole
        with meter.micro_pass(last=n == len(gradients) - 1, weight=weight, loss_scale=scale):
            (model.loss(gradient) * weight * scale).backward()
    return meter.local(whole), whole


@pytest.fixture(params=["pieces", "whole lists"])
def way(request, monkeypatch):
    """Work in pieces, as on a processor, and on lists of tensors, as on a GPU."""
    if request.param == "whole lists":
        for module in (squares, preconditioner):
            monkeypatch.setattr(module, "in_pieces", lambda tensor: False)


# sums


@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.booleans(), st.integers(0, 99))
def test_sums_of_squares_are_those_of_double_precision(sizes, scaled, seed):
    torch.manual_seed(seed)
    tensors = [torch.randn(size, 3) for size in sizes]
    factors = [torch.rand_like(t) for t in tensors] if scaled else None
    dense = sum(
        float(((t.double() * (factors[i].double() if factors else 1.0)) ** 2).sum())
        for i, t in enumerate(tensors)
    )
    assert float(SquareSums().of(tensors, factors)) == pytest.approx(dense, rel=1e-5)


def test_sums_over_pieces_lose_no_digits():
    torch.manual_seed(0)
    x = torch.randn(20 * PIECE + 17) + 3.0
    dense = float((x.double() ** 2).sum())
    assert float(SquareSums().of([x])) == pytest.approx(dense, rel=2e-6)
    assert float(SquareSums().of([x], [torch.full_like(x, 0.5)])) == pytest.approx(dense / 4, rel=2e-6)
    assert float(SquareSums().of_sum([x], [x], (0.5, 1.5))) == pytest.approx(4 * dense, rel=2e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_rough_sum_is_finite_where_all_elements_are(dtype, bad):
    torch.manual_seed(0)
    tensors = [torch.randn(PIECE + 3).to(dtype) * 30.0, torch.randn(5, 4).T.to(dtype)]
    dense = sum(float((x.double() ** 2).sum()) for x in tensors)
    assert float(SquareSums().rough(tensors)) == pytest.approx(dense, rel=1e-4)
    tensors[1][2, 3] = bad
    assert not math.isfinite(float(SquareSums().rough(tensors)))


def test_tensors_of_other_layouts_are_paired_element_by_element(way):
    torch.manual_seed(0)
    x = torch.randn(4, 5, 6, 7).to(memory_format=torch.channels_last)
    factor = torch.rand(4, 5, 6, 7)
    dense = float(((x * factor).double() ** 2).sum())
    assert float(SquareSums().of([x], [factor])) == pytest.approx(dense, rel=1e-6)
    alike = factor.to(memory_format=torch.channels_last)
    assert float(SquareSums().of([x], [alike])) == pytest.approx(dense, rel=1e-6)


def test_sixteen_bits_do_not_overflow(way):
    x = torch.full((1000,), 300.0, dtype=torch.float16)
    assert float(SquareSums().of([x])) == pytest.approx(9e7, rel=1e-6)
    assert float(SquareSums().of([x], [torch.full_like(x, 2.0)])) == pytest.approx(3.6e8, rel=1e-6)
    assert float(SquareSums().of([torch.full((PIECE,), 0.25, dtype=torch.bfloat16)])) == pytest.approx(
        PIECE / 16
    )


# samples


def test_passes_of_the_worked_example(way):
    model = Weights(1, 1)
    meter = GradientMeter(model, torch.optim.SGD(model.parameters(), 0.1), 8)
    norms, whole = step(meter, model, [torch.tensor([1.0, 3.0]), torch.tensor([3.0, 1.0])], [4.0, 4.0])
    assert tuple(norms) == pytest.approx((10.0, 2.0, 8.0, 0.0))
    statistics = meter.finish(norms, 1, whole)
    assert statistics == pytest.approx((6.0, 16.0 / 8))
    assert meter.noise_scale == pytest.approx(16 / 6)
    assert torch.cat([p.grad for p in model.parts]).tolist() == [2.0, 2.0]


def test_two_steps_give_what_two_passes_give(way):
    model = Weights(2)
    meter = GradientMeter(model, torch.optim.SGD(model.parameters(), 0.1), 4)
    norms, _ = step(meter, model, [torch.tensor([1.0, 3.0])], [4.0])
    assert meter.finish(norms, 1, 4.0) == (1.0, 0.0)  # one alone says nothing
    model.zero_grad()
    norms, _ = step(meter, model, [torch.tensor([3.0, 1.0])], [4.0])
    assert meter.finish(norms, 1, 4.0) == pytest.approx((6.0, 16.0 / 4))
    assert meter.state_dict()["differenced"]
    model.zero_grad()
    before = meter.state_dict()
    norms, _ = step(meter, model, [torch.tensor([9.0, 9.0])], [4.0])
    meter.finish(norms, 1, 4.0)
    assert meter.state_dict() == before  # the first of the next pair: every example counts once


def test_a_pair_of_unequal_steps_is_weighted(way):
    one, other = torch.tensor([1.0, 3.0]), torch.tensor([3.0, 1.0])
    passes, steps = Weights(2), Weights(2)
    by_pass = GradientMeter(passes, torch.optim.SGD(passes.parameters(), 0.1), 4)
    norms, whole = step(by_pass, passes, [one, other], [6.0, 2.0])
    expected = by_pass.finish(norms, 1, whole)
    by_step = GradientMeter(steps, torch.optim.SGD(steps.parameters(), 0.1), 4)
    for gradient, examples in ((one, 6.0), (other, 2.0)):
        steps.zero_grad()
        norms, _ = step(by_step, steps, [gradient], [examples])
        found = by_step.finish(norms, 1, examples)
    assert found == pytest.approx(expected)


def test_gradients_are_those_of_plain_accumulation():
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    measured = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    measured.load_state_dict(plain.state_dict())
    meter = GradientMeter(measured, torch.optim.SGD(measured.parameters(), 0.1), 12)
    x = torch.randn(12, 5)
    for keep in (False, True):  # whether zeroed gradients are there
        plain.zero_grad()
        measured.zero_grad(set_to_none=not keep)
        (plain(x) ** 2).mean().backward()
        for n, piece in enumerate(x.split([5, 4, 3])):
            weight = len(piece) / 12
            with meter.micro_pass(last=n == 2, weight=weight):
                ((measured(piece) ** 2).mean() * weight).backward()
        norms = meter.local(12)
        for a, b in zip(plain.parameters(), measured.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        dense = sum(float((p.grad.double() ** 2).sum()) for p in plain.parameters())
        assert norms.total == pytest.approx(dense, rel=1e-5)
        assert norms.samples == 3


def test_a_parameter_that_some_passes_do_not_reach():
    class Either(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))

    model = Either()
    meter = GradientMeter(model, torch.optim.SGD(model.parameters(), 0.1), 2)
    for last, parameter in ((False, model.a), (True, model.b)):
        with meter.micro_pass(last=last, weight=0.5):
            (parameter * 4.0 * 0.5).sum().backward()
    norms = meter.local(2)
    assert (norms.local, norms.total) == pytest.approx((16.0, 8.0))
    assert (model.a.grad.item(), model.b.grad.item()) == (2.0, 2.0)


def test_a_pass_without_examples_is_no_sample():
    model = Weights(2)
    meter = GradientMeter(model, torch.optim.SGD(model.parameters(), 0.1), 4)
    norms, whole = step(meter, model, [torch.tensor([1.0, 3.0]), torch.zeros(2)], [4.0, 0.0])
    assert norms.samples == 1
    assert meter.finish(norms, 1, whole) == (1.0, 0.0)


@given(st.floats(1e-3, 6.5e4))
@settings(deadline=None, max_examples=20)
def test_the_loss_scale_is_undone(scale):
    gradients = [torch.tensor([1.0, 3.0]), torch.tensor([3.0, 1.0])]
    for groups in ([gradients], [gradients[:1], gradients[1:]]):  # passes of a step, steps of a pair
        model = Weights(2)
        meter = GradientMeter(model, torch.optim.SGD(model.parameters(), 0.1), 2)
        for factor, group in zip((scale, scale / 2), groups, strict=False):
            model.zero_grad()
            norms, whole = step(meter, model, group, scale=factor)
            found = meter.finish(norms, 1, whole)
        assert found == pytest.approx((6.0, 4.0 / 2), rel=1e-4)


@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize("passes", [1, 3])
def test_gradients_that_are_not_finite_are_told_and_change_nothing(bad, passes):
    model = Weights(3)
    meter = GradientMeter(model, torch.optim.SGD(model.parameters(), 0.1), 4)
    for gradient in ([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]):
        model.zero_grad()
        norms, whole = step(meter, model, [torch.tensor(gradient)] * passes, [4.0] * passes)
        meter.finish(norms, 1, whole)
        assert meter.finite
    before = meter.state_dict()
    broken = torch.tensor([1.0, bad, 0.0])
    model.zero_grad()
    norms, whole = step(meter, model, [torch.ones(3)] * (passes - 1) + [broken], [4.0] * passes)
    meter.finish(norms, 1, whole)
    assert not meter.finite
    assert meter.state_dict() == before


# the noise scale of problems that are known


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_gaussian_gradients_give_their_noise_scale(passes):
    dimensions, local, initial = 400, 8, 32
    rng = np.random.default_rng(3)
    gradient = rng.normal(size=dimensions) / 10
    deviation = rng.uniform(0.2, 2.0, size=dimensions)
    model = Weights(100, 300)
    meter = GradientMeter(model, torch.optim.SGD(model.parameters(), 0.1), initial, every=1)
    for _ in range(2000 // passes):
        model.zero_grad()
        drawn = gradient + deviation / sqrt(local) * rng.normal(size=(passes, dimensions))
        norms, whole = step(meter, model, list(torch.from_numpy(drawn).float()), [local] * passes)
        meter.finish(norms, 1, whole)
    sqr, var = meter.statistics
    assert sqr == pytest.approx(gradient @ gradient, rel=0.08)
    assert var * initial == pytest.approx(deviation @ deviation, rel=0.02)
    assert meter.noise_scale == pytest.approx((deviation @ deviation) / (gradient @ gradient), rel=0.1)


@pytest.mark.parametrize("shares", [(4.0, 4.0, 4.0), (1.0, 2.0, 9.0)])
def test_estimates_are_unbiased_whatever_the_shares(shares):
    gradient, deviation = np.linspace(-1, 1, 30), np.linspace(0.3, 1.5, 30)
    rng = np.random.default_rng(0)
    model = Weights(30)
    meter = GradientMeter(model, torch.optim.SGD(model.parameters(), 0.1), 4)
    found = []
    for _ in range(1000):
        model.zero_grad()
        drawn = [gradient + deviation / sqrt(n) * rng.standard_normal(30) for n in shares]
        norms, whole = step(meter, model, [torch.from_numpy(d).float() for d in drawn], list(shares))
        found.append(from_samples(norms.local, norms.total, 3, whole / 3))
        meter.discard()
    sqr, trace = np.mean(found, axis=0)
    assert sqr == pytest.approx(gradient @ gradient, rel=0.02)
    assert trace == pytest.approx(deviation @ deviation, rel=0.02)


def test_linear_regression_gives_its_noise_scale():
    torch.manual_seed(1)
    x, truth = torch.randn(4096, 20), torch.randn(20, 1)
    y = x @ truth + 0.5 * torch.randn(4096, 1)
    model = torch.nn.Linear(20, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    each = (2 * (x @ model.weight.T - y) * x).detach().double()  # gradients of (wx - y)**2, one a row
    mean = each.mean(dim=0)
    trace, sqr = float(each.var(dim=0, unbiased=False).sum()), float(mean @ mean)
    meter = GradientMeter(model, torch.optim.SGD(model.parameters(), 0.0), 64, every=1)
    for _ in range(600):
        model.zero_grad()
        for last in (False, True):
            drawn = torch.randint(4096, (32,))
            with meter.micro_pass(last=last, weight=0.5):
                (((model(x[drawn]) - y[drawn]) ** 2).mean() * 0.5).backward()
        meter.finish(meter.local(64), 1, 64)
    assert meter.noise_scale == pytest.approx(trace / sqr, rel=0.1)


# Adam


def dense_factors(optimizer, parameter):
    state, group = optimizer.state[parameter], optimizer.param_groups[0]
    moment = state["exp_avg_sq"].double() / (1 - group["betas"][1] ** float(state["step"]))
    return torch.where(moment > 0, 1 / (moment.sqrt() + group["eps"]), 0.0)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("passes", [1, 2])
def test_adam_norms_are_those_of_the_dense_preconditioner(kind, passes, way):
    torch.manual_seed(0)
    model = Weights(6, 5)
    optimizer = kind(model.parameters(), 1e-3)
    meter = GradientMeter(model, optimizer, 2)
    previous = None
    for n in range(12):
        model.zero_grad()
        drawn = [torch.randn(11) * torch.linspace(0, 3, 11) + 1e-3 for _ in range(passes)]
        drawn = [d * (torch.arange(11) > 1) for d in drawn]  # two elements that no gradient ever reaches
        norms, whole = step(meter, model, drawn)
        factors = torch.ones(11).double()
        if n >= 5:
            factors = torch.cat([dense_factors(optimizer, p) for p in model.parts])
            assert factors[:2].tolist() == [0.0, 0.0]
        pair = drawn if passes == 2 else None
        if passes == 1:
            pair = [previous, drawn[0]] if n % 2 else None
            previous = drawn[0]
        if pair is not None:
            scaled = [factors * d.double() for d in pair]
            assert norms.local == pytest.approx(sum(float(s @ s) for s in scaled) / 2, rel=1e-5)
            mean = (scaled[0] + scaled[1]) / 2
            assert norms.total == pytest.approx(float(mean @ mean), rel=1e-5)
        meter.finish(norms, 1, whole)
        optimizer.step()
    assert meter.state_dict()["conditioned"]


def test_the_first_steps_are_forgotten_when_preconditioning_begins():
    torch.manual_seed(0)
    model = Weights(50)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    meter = GradientMeter(model, optimizer, 2)

    def train(steps):
        for _ in range(steps):
            model.zero_grad()
            norms, whole = step(meter, model, [1000 + torch.randn(50) for _ in range(2)])
            meter.finish(norms, 1, whole)
            optimizer.step()

    train(5)
    assert meter.statistics.sqr > 1e7
    train(1)
    assert meter.statistics.sqr == pytest.approx(50, rel=0.1)  # each element is about 1 times its scale
    kept = meter.state_dict()
    optimizer.state.clear()  # as when the batch changes
    train(5)
    assert meter.state_dict() == kept
    train(2)
    assert meter.state_dict() != kept
    assert meter.statistics.sqr == pytest.approx(50, rel=0.1)


def test_factors_are_renewed_as_fast_as_the_moments_change(way):
    model = Weights(4)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    conditioner = AdamPreconditioner(optimizer)
    worst = 0.0
    for n in range(400):
        on = conditioner.begin()
        assert on == (n >= 5)
        if on:
            found = conditioner.of(list(model.parts))[0].double()
            dense = dense_factors(optimizer, model.parts[0])
            worst = max(worst, float((found / dense - 1).abs().max()))
        model.parts[0].grad = torch.full((4,), 1.0 + n / 400)
        optimizer.step()
    assert 0 < worst < 0.06


# state and errors


def test_averages_survive_a_restart_and_a_change_of_estimator():
    model = Weights(2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    meter = GradientMeter(model, optimizer, 8)
    for gradient in ([1.0, 3.0], [3.0, 1.0]):
        model.zero_grad()
        norms, whole = step(meter, model, [torch.tensor(gradient)], [4.0])
        meter.finish(norms, 1, whole)
    again = GradientMeter(model, optimizer, 8)
    again.load_state_dict(meter.state_dict())
    assert again.statistics == meter.statistics
    model.zero_grad()
    norms, whole = step(again, model, [torch.tensor([0.0, 2.0]), torch.tensor([2.0, 0.0])], [4.0, 4.0])
    assert again.finish(norms, 1, whole) == pytest.approx((0.0, 16.0 / 8))  # differences are replaced
    other = GradientMeter(model, optimizer, 16)
    other.load_state_dict(meter.state_dict())
    assert other.statistics == (1.0, 0.0)


def test_norms_of_another_kind_are_not_taken_over():
    model = Weights(2)
    meter = GradientMeter(model, torch.optim.SGD(model.parameters(), 0.1), 8)
    state = {**meter.state_dict(), "sqr": [1.0, 1.0], "var": [1.0, 1.0], "conditioned": True}
    meter.load_state_dict(state)
    assert meter.statistics == (1.0, 0.0)


def test_a_dropped_step_leaves_no_trace():
    model = Weights(2)
    meter = GradientMeter(model, torch.optim.SGD(model.parameters(), 0.1), 8)
    with meter.micro_pass(last=False, weight=0.5):
        model.loss(torch.tensor([5.0, 5.0])).backward()
    meter.discard()
    model.zero_grad()
    norms, _ = step(meter, model, [torch.tensor([1.0, 3.0]), torch.tensor([3.0, 1.0])], [4.0, 4.0])
    assert tuple(norms) == pytest.approx((10.0, 2.0, 8.0, 0.0))


def test_wrong_use_is_refused():
    model = Weights(2)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(TrainingError, match="Adam and AdamW only; got SGD"):
        GradientMeter(model, sgd, 8, preconditioned=True)
    with pytest.raises(OptionError, match="initial and every >= 1"):
        GradientMeter(model, sgd, 0)
    with pytest.raises(TrainingError, match="at least one micro_pass"):
        GradientMeter(model, sgd, 8).local(8)


def test_later_steps_are_measured_now_and_then_and_weigh_more():
    model = Weights(2)
    meter = GradientMeter(model, torch.optim.SGD(model.parameters(), 0.1), 2, smoothing=0.5, every=3)
    measured = []
    for n in range(160):
        model.zero_grad()
        before = meter.state_dict()
        size = float(n + 1)
        norms, whole = step(meter, model, [torch.tensor([size, 0.0]), torch.tensor([0.0, size])])
        assert norms.total == pytest.approx(size**2 / 2)
        assert [p.grad.tolist() for p in model.parts] == [[size / 2, size / 2]]
        meter.finish(norms, 1, whole)
        if meter.state_dict() != before:
            measured.append(n)
            assert norms.samples == 2
    assert measured[:128] == list(range(128))
    assert measured[128:] == [132, 133, 138, 139, 144, 145, 150, 151, 156, 157]
    # the last trace is 158**2, for M0 = 2; after each measured step the past keeps 0.5**3
    assert meter.statistics.var == pytest.approx(
        (158**2 * 7 / 8 + 157**2 * 7 / 64 + 152**2 / 64) / 2, rel=1e-3
    )


def test_what_is_not_finite_is_seen_in_steps_that_are_not_measured():
    for passes in (1, 2):
        model = Weights(2)
        meter = GradientMeter(model, torch.optim.SGD(model.parameters(), 0.1), 2)
        for n in range(144):
            model.zero_grad()
            value = nan if n % 3 == 0 else 1.0
            norms, whole = step(meter, model, [torch.tensor([value, 1.0])] * passes)
            meter.finish(norms, 1, whole)
            assert meter.finite == (n % 3 != 0)
