"""Two processes that reduce gradients by ``Replicas``, and by DDP itself. Run by ``test_replica_ranks``."""

import copy
import itertools
import json
import sys
import time
import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ebbflow.infra.training.data.feeding import Feed
from ebbflow.infra.training.data.samples import Samples
from ebbflow.infra.training.gradients.noise import GradientMeter
from ebbflow.infra.training.prepared import Options, prepare
from ebbflow.infra.training.process.world import World, peer_lost
from ebbflow.infra.training.replicas import handover
from ebbflow.infra.training.replicas.groups import await_release
from ebbflow.infra.training.replicas.parallel import Replicas
from ebbflow.infra.training.stepper import Stepper
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.training.saving.data_order import DataOrder
from tests.infra.training.worlds import EXCHANGE, fork_world

STEPS, NEW_GROUP = 6, 3
_groups = itertools.count()


class Model(torch.nn.Module):
    """With buffers, and with a layer that is used in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.norm = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8)
        self.seldom, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, seldom: bool) -> torch.Tensor:
        hidden = self.norm(self.first(x)).relu()
        return self.last(self.seldom(hidden) if seldom else hidden)


def train(rank: int, store: Path, kind: str, unused: bool) -> dict[str, torch.Tensor]:
    """Return the state after some steps; the process group is made anew in the middle."""
    model, options = Model(), {"find_unused_parameters": unused, "gradient_as_bucket_view": True}
    errors: list[BaseException] = []
    called = Replicas(model, options, errors.append) if kind == "replicas" else None
    if called is not None:
        called.form(first=True)
    outer = called or DistributedDataParallel(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    meter = GradientMeter(called.called if called is not None else outer, optimizer, 16, lost=errors.append)
    generator = torch.Generator().manual_seed(7)
    for step in range(STEPS):
        if called is not None and step == NEW_GROUP:
            called.release()
            meter.follow(model)
            assert left() is None, "peers that wait would wait on"
            join(rank, store)
            optimizer.zero_grad()
            called.form()
            called.share_buffers()
            meter.follow(called.called)
        if called is not None:
            called.prepare_step()
        x = torch.randn(16, 6, generator=generator)[rank * 8 : rank * 8 + 8]
        with meter.micro_pass(last=True):
            loss = outer(x, bool(unused and step % 2)).square().mean() * meter.loss_factor
            if not unused:
                loss = loss + 0.0 * sum(p.sum() for p in model.seldom.parameters())
            loss.backward()
        meter.local(16)
        if called is not None:
            called.share_buffers()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        outer(torch.zeros(8, 6), False)  # DDP takes the first process's buffers in the next pass
    assert not errors
    return {name: value for name, value in model.state_dict().items() if "running" not in name}


def accumulate(world: World) -> dict[str, torch.Tensor]:
    """Return the model's state after steps of several passes each, of a world's processes together."""
    errors: list[BaseException] = []
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)).double()
    settings = RunSettings(adaptive=False)

    def wrap(inner: torch.nn.Module, options: Mapping[str, Any]) -> Replicas:
        made = Replicas(inner, {**options, "gradient_as_bucket_view": True}, errors.append)
        made.form(first=True)
        return made

    prepared = prepare(
        world, model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        Options(batch_size=16, max_local=4), settings, lambda _: None, replicas=wrap if world.size > 1 else None,
    )  # fmt: skip
    stepper = Stepper(world, prepared, nullcontext())
    samples = Samples(torch.randn(80, 6, generator=torch.Generator().manual_seed(7)).double())
    prepared.progress.bind(samples.length)
    for x in Feed(world, prepared, stepper, samples, DataOrder(samples.length, 3)).batches():
        stepper.backward(prepared.model(x).square().mean())
        stepper.step((False, False))
    assert stepper.last.passes == 4 / world.size
    assert not errors
    return dict(model.state_dict())


def hand_over(rank: int) -> dict[str, bool]:
    """Return whether all that the first process has is that of the last two, once they were given it, and not of the
    second, which knew the state."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(600, 600), torch.nn.BatchNorm1d(600), torch.nn.Linear(600, 2))
    optimizer = torch.optim.Adam(model.parameters())
    options, settings = Options(batch_size=4), RunSettings(adaptive=False)
    prepared = prepare(World(), model, optimizer, options, settings, lambda _: None)
    if rank < 2:
        model(torch.randn(4, 600)).sum().backward()
        optimizer.step()
    if rank == 0:
        model[0].bias.requires_grad_(False)
    where = [one.data_ptr() for one in model.parameters()]
    before = copy.deepcopy(model.state_dict())
    state = handover.exchange(prepared, {"seed": 3}, (2, 3), knows=rank < 2)
    assert (state is None) == (rank < 2)
    if state is not None:
        handover.take(prepared, state)
    frozen = [one.requires_grad for one in model.parameters()]
    moments = [value for one in optimizer.state.values() for value in one.values()]
    same = {"in place": where == [one.data_ptr() for one in model.parameters()]}
    same["frozen"] = frozen == [True, rank == 1, *[True] * 4]
    same["handed over"] = True
    for value in (*model.state_dict().values(), *moments):
        first = value.clone()
        dist.broadcast(first, 0)
        same["handed over"] &= rank == 1 or torch.equal(first, value)
    if rank == 1:
        same["handed over"] = all(torch.equal(before[name], one) for name, one in model.state_dict().items())
    return same


def leave_out() -> dict[str, bool]:
    """Return whether a parameter without a gradient is an error of the script, and no loss."""
    errors: list[BaseException] = []
    called = Replicas(Model(), {}, errors.append)
    called.form(first=True)
    called(torch.ones(4, 6), False).sum().backward()
    try:
        called.prepare_step()
        said = ""
    except RuntimeError as exc:
        said = str(exc)
    called.release()
    return {"left out": "not used in producing loss" in said and not errors}


def lose(rank: int) -> None:
    """See that a backward pass ends, and says so, when the other process ends within it."""
    model, errors = torch.nn.Linear(4, 4), []
    called = Replicas(model, {"init_sync": False}, errors.append)
    called.form(first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meter = GradientMeter(called.called, optimizer, 2, lost=errors.append)
    with meter.micro_pass(last=True):
        loss = called(torch.ones(1, 4)).sum()
        if rank == 1:
            called.release()
            meter.follow(model)
            alone()
            return
        begun = time.monotonic()
        loss.backward()
    assert time.monotonic() - begun < EXCHANGE.total_seconds() / 2, "the loss shows at once"
    meter.discard()
    assert errors, "the loss was not noticed"
    assert all(peer_lost(error) for error in errors), errors
    called.release()
    meter.follow(model)
    alone()
    called.form()
    assert called.parallel is None
    assert called.called is model
    optimizer.zero_grad()
    called(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.ones(4, 4))


def left() -> object:
    """Leave the process group, and return what is left of it."""
    group = dist.group.WORLD
    alive = weakref.ref(group)
    dist.destroy_process_group()
    await_release(group)
    del group
    return alive()


def alone() -> None:
    left()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def join(rank: int, store: Path) -> None:
    """Make another group; each has a store of its own, whose file goes with it."""
    meeting = dist.FileStore(str(store / f"store-{next(_groups)}"), 2)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=2, timeout=EXCHANGE)


def main(folder: Path) -> None:
    def ranks(rank: int) -> None:
        found = {}
        for unused in (False, True):
            states = [train(rank, folder, kind, unused) for kind in ("ddp", "replicas")]
            found[f"unused {unused}"] = all(
                torch.equal(one, states[1][name]) for name, one in states[0].items()
            )
            left()
            join(rank, folder)
        together, one = accumulate(World(rank, 2)), accumulate(World())
        found["accumulation"] = all(torch.allclose(one[name], value) for name, value in together.items())
        found |= leave_out()
        (folder / f"{rank}.json").write_text(json.dumps(found))
        lose(rank)

    fork_world(lambda rank: (folder / f"given-{rank}.json").write_text(json.dumps(hand_over(rank))), 4)
    fork_world(ranks, 2)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
