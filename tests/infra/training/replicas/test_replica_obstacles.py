"""What a script asks for or does by itself that processes which come and go would break, and how that is found."""

import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau, SequentialLR, StepLR

from ebbflow.infra.training.prepared import Options, PreparedTraining, prepare
from ebbflow.infra.training.process.channel import Report
from ebbflow.infra.training.process.world import World
from ebbflow.infra.training.replicas.groups import collectives, second_of_two
from ebbflow.infra.training.replicas.obstacles import GROUPS, later_obstacle, obstacle
from ebbflow.infra.training.replicas.parallel import Replicas
from ebbflow.infra.training.replicas.world import ReplicaWorld
from ebbflow.planners.aggregation.membership import Membership
from ebbflow.planners.model.trainings import RunSettings
from tests.infra.training.service.team import Board, Seat
from tests.infra.training.workforces import make_workforce


@pytest.fixture
def world() -> Iterator[ReplicaWorld]:
    """Return the only process of a training, with a process group of its own."""
    seat: Any = Seat(Board(Membership(range(1))), 0)
    made = ReplicaWorld(seat, seat, 0, 1, torch.device("cpu"))
    made.form(alone=True)
    try:
        yield made
    finally:
        dist.destroy_process_group()


def asked(world: ReplicaWorld, model: torch.nn.Module, *, untested: bool = False, **options: Any) -> str:
    return obstacle(world, model, Options(batch_size=8, **options), planned=False, untested=untested)


class Bound(torch.nn.Linear):  # type: ignore[misc]
    """A layer that keeps a process group."""

    def __init__(self) -> None:
        super().__init__(2, 1)
        self.group = dist.group.WORLD


def test_a_plain_model_has_no_obstacle_and_what_keeps_a_group_has(world: ReplicaWorld) -> None:
    plain = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert asked(world, plain) == ""
    assert asked(world, torch.nn.SyncBatchNorm.convert_sync_batchnorm(plain)).startswith("a SyncBatchNorm in")
    assert asked(world, torch.nn.Sequential(Bound())) == "a Bound in the model belongs to one process group"
    assert asked(world, plain, ddp={"static_graph": True}).startswith("DDP's option static_graph")


def test_values_that_a_script_exchanges_before_it_prepares_are_found_unless_it_must_stay(
    world: ReplicaWorld,
) -> None:
    plain = torch.nn.Linear(2, 1)
    dist.all_reduce(torch.ones(1))
    assert asked(world, plain) == "the script exchanges values among its processes before it prepares"
    assert asked(world, plain, untested=True) == ""


def test_groups_of_the_script_are_found_whenever_it_makes_them(world: ReplicaWorld) -> None:
    made = prepared(torch.nn.Linear(2, 1))
    assert later_obstacle(made) == ""
    dist.new_group([0])
    assert later_obstacle(made) == GROUPS
    assert asked(world, made.inner) == GROUPS


def prepared(model: torch.nn.Module, **options: Any) -> PreparedTraining:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return prepare(World(), model, optimizer, Options(8, **options), RunSettings(), lambda _: None)


@pytest.mark.parametrize("make", [lambda one: StepLR(one, 3), ReduceLROnPlateau])
def test_a_scheduler_is_handed_over_only_where_the_run_knows_it(world: ReplicaWorld, make: Any) -> None:
    made = prepared(torch.nn.Linear(2, 1))
    own = make(made.optimizer)
    assert "scheduler of learning rates" in later_obstacle(made)
    made.extra = {"schedule": own}
    assert later_obstacle(made) == ""
    del own
    made = prepared(torch.nn.Linear(2, 1), scheduler=lambda one: StepLR(one, 3))
    assert later_obstacle(made) == ""
    own = make(made.optimizer)
    assert "scheduler of learning rates" in later_obstacle(made), "one that is prepared knows nothing of it"
    del own


def test_the_parts_of_a_scheduler_that_is_handed_over_are_handed_over_with_it(world: ReplicaWorld) -> None:
    def sequence(one: torch.optim.Optimizer) -> SequentialLR:
        return SequentialLR(
            one, [StepLR(one, 3), SequentialLR(one, [StepLR(one, 2), StepLR(one, 4)], [4])], [2]
        )

    assert later_obstacle(prepared(torch.nn.Linear(2, 1), scheduler=sequence)) == ""
    made = prepared(torch.nn.Linear(2, 1))
    made.extra = {"schedule": sequence(made.optimizer)}
    assert later_obstacle(made) == ""


def test_a_scheduler_may_keep_no_optimizer(world: ReplicaWorld) -> None:
    class Bare(LRScheduler):  # type: ignore[misc]
        def __init__(self) -> None: ...

    own = Bare()
    assert later_obstacle(prepared(torch.nn.Linear(2, 1))) == ""
    del own


def test_the_script_of_a_process_that_joins_does_not_take_itself_for_the_first(world: ReplicaWorld) -> None:
    world._dissolve()
    second_of_two()
    assert (dist.get_rank(), dist.get_world_size()) == (1, 2)
    dist.barrier()
    assert collectives(world.device) == 0
    world.form(alone=True)
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)


def test_only_what_others_than_the_run_exchange_is_found(world: ReplicaWorld) -> None:
    dist.all_reduce(torch.ones(1))  # the run's own, before training
    world.watch()
    for _ in range(3):
        with world.within():
            dist.all_reduce(torch.ones(1))
    assert world._group.found == ""
    dist.barrier()
    with world.within():
        pass
    assert world._group.found == "the script exchanges values among its processes by itself"
    assert world.elastic, "until all have agreed on it"


def test_a_group_that_could_not_be_made_is_no_exchange_of_the_script(
    world: ReplicaWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.watch()
    with world.within():
        dist.all_reduce(torch.ones(1))
    monkeypatch.setattr(dist, "init_process_group", broken)
    world._group.epoch = 1
    world.form(alone=True)
    assert not world.whole
    with world.within():
        pass
    assert world._group.found == ""
    monkeypatch.undo()
    world.form(alone=True)


def broken(*_: object, **__: object) -> None:
    raise RuntimeError("connection closed by peer")


def test_a_model_keeps_the_names_of_its_parameters_and_takes_them_with_ddps_prefix_too() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model = Replicas(inner, {}, broken)
    names = list(inner.state_dict())
    assert list(model.state_dict()) == names
    outer = torch.nn.ModuleDict({"inner": model})
    assert list(outer.state_dict()) == [f"inner.{name}" for name in names]
    for prefix in ("", "module."):
        changed = {f"{prefix}{name}": value + 1 for name, value in inner.state_dict().items()}
        expected = {name: value + 1 for name, value in inner.state_dict().items()}
        model.load_state_dict(changed)
        assert all(torch.equal(value, expected[name]) for name, value in inner.state_dict().items())
    outer.load_state_dict(outer.state_dict())


def test_a_model_may_have_a_part_that_is_called_module() -> None:
    inner = torch.nn.Module()
    inner.module = torch.nn.ModuleDict({"fc": torch.nn.Linear(2, 2)})  # before the other of this name
    inner.fc = torch.nn.Linear(2, 2)
    model = Replicas(inner, {}, broken)
    state = inner.state_dict()
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for prefix in ("", "module."):
        changed = {f"{prefix}{name}": value + 1 for name, value in state.items()}
        expected = {name: value + 1 for name, value in state.items()}
        model.load_state_dict(changed)
        assert all(torch.equal(value, expected[name]) for name, value in inner.state_dict().items())


def test_parameters_have_the_names_of_the_state_and_a_pickle_is_the_model_itself() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    model = Replicas(inner, {}, threading.Lock().acquire)
    named = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    assert sorted(named) == sorted(model.state_dict())
    assert list(model.named_parameters(prefix="a")) == list(inner.named_parameters(prefix="a"))
    assert [id(one) for one in model.parameters()] == [id(one) for one in inner.parameters()]
    found = pickle.loads(pickle.dumps(model))
    assert type(found) is torch.nn.Sequential
    assert all(torch.equal(value, inner.state_dict()[name]) for name, value in found.state_dict().items())


def test_the_launcher_hears_whether_members_may_change_and_whether_the_first_must_stay() -> None:
    def said(kind: Any, **content: str) -> Report:
        return Report(kind, 0, 0.0, 1, content)

    workforce = make_workforce("a", "b")
    workforce.begun = False
    assert not workforce.hear(said("started", fixed=""))
    assert not workforce.changes, "the script may yet do what processes that come and go break"
    other = make_workforce("a", "b")
    other.begun = False
    other.end_node("b")
    assert other.meeting.membership.view.members == (0,), "what is left can end its step, and save"
    assert not workforce.hear(said("members", fixed="", first="it has asked"))
    assert workforce.changes
    assert [workforce.must_stay(name) for name in ("a", "b")] == ["it has asked", ""]
    lost = [workforce.recovery(name, 1, 1, stopping=False, script_failed=False) for name in ("a", "b")]
    assert [one.in_place for one in lost] == [False, True]
    assert lost[0].reason == "it has asked"
    assert not workforce.hear(said("members", fixed="it has groups", first=""))
    assert not workforce.changes
    assert workforce.first == "it has asked"
    workforce.take_in("c", "key", 1)
    assert workforce.hear(said("members", fixed="it has groups", first="")), "one waits to join"
