"""Settings of optimizers that differ between processes are noticed before a step is taken."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.infra.errors import TrainingError
from ebbflow.infra.training.prepared import Options, prepare
from ebbflow.infra.training.process import hyperparameters
from ebbflow.infra.training.process.hyperparameters import (
    are_equal,
    difference,
    digest_pair,
    settings_of,
)
from ebbflow.infra.training.process.world import World
from ebbflow.infra.training.stepper import Stepper, StepPlan
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.training.saving.data_order import DataPosition, Share


def adam(**more: Any) -> torch.optim.Optimizer:
    layer = torch.nn.Linear(2, 1)
    groups = [{"params": [layer.weight], "lr": 0.1}, {"params": [layer.bias]}]
    return torch.optim.AdamW(groups, **{"lr": 0.01, **more})


@given(st.lists(st.integers(0, 2**20 - 1), min_size=1, max_size=40))
def test_sums_of_digests_tell_whether_all_are_equal(digests: list[int]) -> None:
    squares = sum(float(one * one) for one in digests)
    assert are_equal(len(digests), float(sum(digests)), squares) == (len(set(digests)) == 1)


def test_one_of_8192_whose_digest_is_another_by_one_is_seen() -> None:
    largest = float(2**20 - 1)
    for odd, equal in ((largest, True), (largest - 1, False)):
        digests = torch.full((8192,), largest, dtype=torch.float64)
        digests[77] = odd
        assert are_equal(8192, float(digests.sum()), float((digests * digests).sum())) is equal


def test_what_is_set_counts_and_how_it_is_computed_does_not() -> None:
    same = [
        adam(),
        adam(lr=torch.tensor(0.01, dtype=torch.float64)),
        adam(foreach=True),
        adam(betas=[0.9, 0.999]),
    ]
    assert len({digest_pair(settings_of(one)) for one in same}) == 1
    other = [adam(lr=0.02), adam(weight_decay=0.0), adam(betas=(0.9, 0.99)), adam(amsgrad=True)]
    assert len({digest_pair(settings_of(one)) for one in (*same, *other)}) == 5
    mine = adam()
    mine.param_groups[1]["of the script"] = "a"
    mine.param_groups[1]["unknown"] = object()
    assert settings_of(mine)[1]["of the script"] == "a"
    assert "unknown" not in settings_of(mine)[1]


def test_differences_are_told_with_group_values_and_processes() -> None:
    plain, other = settings_of(adam()), settings_of(adam(lr=0.02, weight_decay=0.5))
    assert difference([plain, plain]) == ""
    assert difference([plain, other, plain]) == (
        "weight_decay of group 0 is 0.01 in processes 0, 2 and 0.5 in process 1 (and 2 more)"
    )
    assert difference([plain, plain[:1]]) == "the number of groups is 2 in process 0 and 1 in process 1"
    more = settings_of(adam())
    more[1]["warm"] = True
    assert difference([more, plain]) == "warm of group 1 is True in process 0 and nothing in process 1"
    assert "and 6 more" in difference([*[plain] * 10, other])


class Pair(World):
    """Two processes, of which another one has the settings that the test says."""

    other: hyperparameters.Settings | None = None
    told = 0

    def sum_step(self, values: Sequence[float]) -> list[float]:
        summed = [2 * one for one in values]
        digest, square = digest_pair(self.other or [])
        summed[5] += digest - values[5]
        summed[6] += square - values[6]
        return summed

    def from_all(self, value: object) -> list[Any]:
        Pair.told += 1
        return [value, self.other]


def test_a_step_is_not_taken_where_another_process_has_another_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = prepare(World(), model, optimizer, Options(batch_size=8), RunSettings(), lambda _: None)
    monkeypatch.setattr(Pair, "other", settings_of(optimizer))
    monkeypatch.setattr(Pair, "told", 0)
    stepper = Stepper(Pair(size=2), made, nullcontext())

    def step() -> None:
        stepper.begin(Share(0, 4, 1.0), True, StepPlan(8, DataPosition(), 1))
        stepper.backward(made.model(torch.ones(4, 2)).square().mean())
        stepper.step((False, False))

    step()
    assert (made.progress.step, Pair.told) == (1, 0)
    before = model.weight.clone()
    optimizer.param_groups[0]["lr"] = 0.05
    with pytest.raises(
        TrainingError, match=r"so step 2 is not taken: lr of group 0 is 0\.05 in process 0 and 0\.1"
    ):
        step()
    assert torch.equal(model.weight, before)
    assert made.progress.step == 1
