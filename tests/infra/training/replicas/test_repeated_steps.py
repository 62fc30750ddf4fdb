"""A step that is repeated because members were lost leaves nothing behind of its first try."""

import copy
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ebbflow.infra.training.data.feeding import Feed
from ebbflow.infra.training.data.samples import Samples
from ebbflow.infra.training.prepared import Options, PreparedTraining, prepare
from ebbflow.infra.training.process.link import Link
from ebbflow.infra.training.process.world import ViewChangedError, World
from ebbflow.infra.training.replicas.joining import ReplicaMembers
from ebbflow.infra.training.replicas.parallel import Replicas
from ebbflow.infra.training.stepper import Stepper
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.training.saving.data_order import DataOrder


class Breaking(World):
    """One process, whose group breaks at the end of some passes over a step."""

    breaks: frozenset[int] = frozenset()
    ends = 0

    def repeat_broken(self) -> None:
        Breaking.ends += 1
        if Breaking.ends in self.breaks:
            raise ViewChangedError


class Nobody:
    """Members of whom none comes or goes."""

    begun = view = 0

    def stay(self) -> None: ...

    def welcome(self) -> None: ...

    def stepped(self) -> None: ...


def prepared(model: torch.nn.Module) -> PreparedTraining:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = Options(batch_size=8, max_local=4)
    return prepare(World(), model, optimizer, options, RunSettings(adaptive=False), lambda _: None)


def trained(monkeypatch: pytest.MonkeyPatch, breaks: set[int]) -> dict[str, torch.Tensor]:
    """Return the state of a model with buffers after steps of two passes, some of which are repeated."""
    torch.manual_seed(1)
    made = prepared(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)))
    monkeypatch.setattr(Breaking, "breaks", frozenset(breaks))
    monkeypatch.setattr(Breaking, "ends", 0)
    world = Breaking()
    stepper = Stepper(world, made, nullcontext(), Nobody())
    samples = Samples(torch.randn(40, 3, generator=torch.Generator().manual_seed(2)))
    made.progress.bind(samples.length)
    for x in Feed(world, made, stepper, samples, DataOrder(samples.length, 3)).batches():
        stepper.backward(made.model(x).square().mean())
        stepper.step((False, False))
    assert Breaking.ends == 5 + len(breaks)
    return {name: value.clone() for name, value in made.inner.state_dict().items()}


def test_buffers_move_once_in_a_step_that_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    once, again = trained(monkeypatch, set()), trained(monkeypatch, {2, 3, 6})
    assert once["1.num_batches_tracked"] == 10
    for name, value in once.items():
        assert torch.equal(value, again[name]), name


def test_a_copy_of_the_model_is_without_what_reduces_gradients() -> None:
    model = Replicas(torch.nn.Linear(3, 1), {"find_unused_parameters": True}, threading.Lock().acquire)
    model.eval()
    made = copy.deepcopy({"average": model, "module": model.module})
    average = made["average"]
    assert made["module"] is average.module is not model.module
    assert torch.equal(average.weight, model.weight)
    assert average.weight.data_ptr() != model.weight.data_ptr()
    assert (average.parallel, average.training, average.lost) == (None, False, model.lost)


def test_members_of_a_training_whose_state_cannot_travel_stay_as_they_are() -> None:
    class Odd(torch.nn.Linear):  # type: ignore[misc]
        def get_extra_state(self) -> object:
            return self.said

        def set_extra_state(self, state: object) -> None: ...

        said: Any = 7

    class Founders:
        later, epoch = False, 0
        fixed = others = ""

        def watch(self) -> None: ...

        def fix(self, reason: str) -> None:
            self.fixed = reason

        def from_all(self, value: str) -> list[str]:
            return [value, self.others]

    mine, others = "a process that joins cannot be given the training's state", "it cannot be given another's"
    for said, others_say, reason in ((7, "", ""), ({1, 2}, "", mine), (7, others, others)):
        model = Odd(3, 1)
        model.said = said
        world: Any = Founders()
        world.others = others_say
        ReplicaMembers(world, {"seed": 3}, Link(None, 0, 30.0)).begin(prepared(model))
        assert world.fixed.startswith(reason)
        assert bool(world.fixed) == bool(reason)
