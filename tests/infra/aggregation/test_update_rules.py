"""Update rules against PyTorch's optimizers over 200 steps, fp32 and bf16 gradients, one worker and several."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from ebbflow.infra.aggregation.rules import (
    Adam,
    OptimizerState,
    Sgd,
    as_bfloat16,
    as_float32,
    gradient_sum,
    item_size,
    rule_from,
    rule_values,
    squared_norm,
)
from ebbflow.infra.errors import AggregationError
from ebbflow.planners.errors import OptionError

STEPS = 200
SIZE = 40_003  # more than a block, and an odd end
BOUND = {"rtol": 2e-6, "atol": 2e-6}  # parameters are about 1

RULES: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "sgd": ({"name": "sgd", "lr": 0.01}, lambda p: torch.optim.SGD(p, lr=0.01)),
    "decayed": (
        {"name": "sgd", "lr": 0.01, "weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, lr=0.01, weight_decay=0.1),
    ),
    "momentum": ({"name": "momentum", "lr": 0.01}, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)),
    "dampened": (
        {"name": "momentum", "lr": 0.01, "dampening": 0.1},
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, dampening=0.1),
    ),
    "nesterov": (
        {"name": "momentum", "lr": 0.01, "nesterov": True, "weight_decay": 1e-4},
        lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4),
    ),
    "adam": (
        {"name": "adam", "lr": 1e-3, "weight_decay": 0.01},
        lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01),
    ),
    "adam-far": (
        {"name": "adam", "lr": 1e-3, "beta1": 0.3, "beta2": 0.9},
        lambda p: torch.optim.Adam(p, lr=1e-3, betas=(0.3, 0.9)),
    ),
    "adamw": ({"name": "adamw", "lr": 1e-3}, lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.01)),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # its threads spin for each other where processors are few
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RULES)
def test_parameters_follow_torch(name: str, dtype: str) -> None:
    values, optimizer_of = RULES[name]
    rule, state = rule_from(values), OptimizerState()
    torch.manual_seed(1)
    reference = torch.nn.Parameter(torch.randn(SIZE))
    ours = reference.detach().numpy().copy()
    optimizer = optimizer_of([reference])
    for _ in range(STEPS):
        sent = torch.randn(SIZE).to(getattr(torch, dtype))
        bits = sent.view(torch.int16).numpy() if dtype == "bfloat16" else sent.numpy()
        reference.grad = sent.float()
        optimizer.step()
        rule.update(ours, as_float32(bits.tobytes(), dtype), state)
    np.testing.assert_allclose(ours, reference.detach().numpy(), **BOUND)
    assert state.step == STEPS
    assert set(state.moments) == set(rule.moments)


def test_several_workers_are_one_with_the_sum_of_their_weighted_gradients() -> None:
    rule, state = Adam(), OptimizerState()
    torch.manual_seed(2)
    reference = torch.nn.Parameter(torch.randn(1000))
    ours = reference.detach().numpy().copy()
    optimizer = torch.optim.Adam([reference], lr=1e-3)
    for _ in range(STEPS):
        gradients = torch.randn(4, 1000)
        reference.grad = gradients.mean(0)
        optimizer.step()
        rule.update(ours, gradient_sum(list((gradients / 4).numpy())), state)
    np.testing.assert_allclose(ours, reference.detach().numpy(), **BOUND)


def test_nothing_is_lost_where_no_sum_is_rounded() -> None:
    """Whole gradients and rates that are powers of two: equal to the bit, whatever the processor fuses."""
    rule, state = Sgd(lr=0.25, momentum=0.5), OptimizerState()
    rng = np.random.default_rng(3)
    reference = torch.nn.Parameter(torch.zeros(5000))
    ours = np.zeros(5000, np.float32)
    optimizer = torch.optim.SGD([reference], lr=0.25, momentum=0.5)
    for _ in range(8):
        gradients = [rng.integers(-3, 4, 5000).astype(np.float32) for _ in range(4)]
        reference.grad = torch.from_numpy(sum(gradients) / np.float32(4))
        optimizer.step()
        rule.update(ours, gradient_sum([one / np.float32(4) for one in gradients]), state)
    assert ours.tobytes() == reference.detach().numpy().tobytes()


def test_the_learning_rate_of_a_step_and_a_state_that_moved() -> None:
    rule = Adam(lr=1e-3, weight_decay=0.1, decoupled=True)
    rng = np.random.default_rng(4)
    stays, moves = np.ones(100, np.float32), np.ones(100, np.float32)
    first, second = OptimizerState(), OptimizerState()
    for i in range(10):
        gradient = rng.standard_normal(100).astype(np.float32)
        rule.update(stays, gradient, first, lr=1e-3 * (i + 1))
        rule.update(moves, gradient, second, lr=1e-3 * (i + 1))
        moves = moves.copy()
        second = OptimizerState(second.step, {name: one.copy() for name, one in second.moments.items()})
    assert stays.tobytes() == moves.tobytes()
    assert second.nbytes == 2 * stays.nbytes


def test_bfloat16_is_rounded_as_torch_rounds() -> None:
    values = torch.cat([torch.randn(10_000), torch.tensor([0.0, -0.0, float("inf"), 1.00390625, 1.01171875])])
    bits = as_bfloat16(values.numpy())
    assert bits.tobytes() == values.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
    assert np.isnan(as_float32(as_bfloat16(np.array([np.nan], np.float32)).tobytes(), "bfloat16")).all()
    assert as_float32(np.array([1.5], np.float16).tobytes(), "float16").tolist() == [1.5]
    assert [item_size(one) for one in ("float32", "float16", "bfloat16")] == [4, 2, 2]


def test_gradients_are_added_and_their_square_is_that_of_all_blocks() -> None:
    gradients = [np.full(3, 1, np.float32), np.full(3, 4, np.float32)]
    assert gradient_sum(gradients).tolist() == [5, 5, 5]
    assert squared_norm(np.full(100_000, 2, np.float32)) == 400_000
    with pytest.raises(AggregationError, match="at least one gradient"):
        gradient_sum([])
    with pytest.raises(AggregationError, match=r"one length, not \[3, 2\]"):
        gradient_sum([gradients[0], gradients[1][:2]])


def test_what_does_not_fit_changes_nothing() -> None:
    rule, state, parameters = Adam(), OptimizerState(), np.ones(4, np.float32)
    with pytest.raises(AggregationError, match=r"gradient must have 4 elements like its tensor, not \(3,\)"):
        rule.update(parameters, np.ones(3, np.float32), state)
    with pytest.raises(AggregationError, match="parameters must be flat float32, not float64"):
        rule.update(np.ones(4), np.ones(4, np.float32), state)  # type: ignore[arg-type]
    assert (state.step, state.moments, parameters.tolist()) == (0, {}, [1, 1, 1, 1])
    with pytest.raises(AggregationError, match="multiple of 4 bytes, not 7"):
        as_float32(b"1234567", "float32")
    with pytest.raises(AggregationError, match="one of float32, float16, bfloat16, not 'int8'"):
        as_float32(b"", "int8")


@pytest.mark.parametrize("rule", [Sgd(lr=0.1, momentum=0.9, nesterov=True), Adam(decoupled=True)])
def test_a_rule_survives_as_values(rule: Sgd | Adam) -> None:
    assert rule_from(rule_values(rule)) == rule


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "lamb"}, "must be one of sgd, momentum, adam, adamw, not 'lamb'"),
        ({"name": "sgd", "beta1": 0.9}, "option of sgd must be one of lr, momentum"),
        ({"name": "adam", "lr": "fast"}, "lr of adam must be a number, not 'fast'"),
        ({"name": "adam", "lr": True}, "lr of adam must be a number, not True"),
        ({"name": "adam", "decoupled": 1}, "decoupled of adam must be true or false, not 1"),
        ({"name": "adam", "lr": float("nan")}, "lr of adam must be at least 0, not nan"),
        ({"name": "adam", "beta2": 1.0}, "beta2 of adam must be at least 0 and below 1, not 1.0"),
        ({"name": "sgd", "nesterov": True}, "nesterov of sgd must come with momentum above 0"),
    ],
)
def test_rules_refuse_what_breaks_them(values: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        rule_from(values)
