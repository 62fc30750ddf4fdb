"""Collectives over NCCL that wait for processes that are gone, on groups that only note what is asked of them."""

import threading
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ebbflow.infra.training import ElasticRun
from ebbflow.infra.training.channel.messages import StopRequest
from ebbflow.infra.training.ending import ProcessExit
from ebbflow.infra.training.process import nccl
from ebbflow.infra.training.process.world import World, peer_lost
from ebbflow.infra.training.replicas.world import ReplicaWorld
from ebbflow.infra.training.saver import Costs


class Error(Enum):
    SUCCESS = 0
    TIMEOUT = 1


class Communicators:
    """What carries a group's tensors of GPUs."""

    def __init__(self) -> None:
        self.did: list[str] = []
        self.error = Error.SUCCESS

    def abort(self) -> None:
        self.did.append("abort")

    def get_error(self) -> Error:
        return self.error


class Group:
    def __init__(self, communicators: Any = None) -> None:
        self._communicators = communicators

    def _get_backend(self, device: torch.device) -> Any:
        if self._communicators is None:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return self._communicators


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Communicators]]:
    """Return what carries tensors of GPUs in two of three groups."""
    found = [Communicators(), Communicators()]
    groups = [Group(found[0]), Group(), Group(found[1])]
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Communicators, raising=False)
    monkeypatch.setattr(dist.distributed_c10d, "_world", SimpleNamespace(pg_names=dict.fromkeys(groups, "")))
    nccl.begun()
    yield found
    nccl.begun()


def test_all_groups_are_aborted_together_once_and_what_they_gave_is_void(made: list[Communicators]) -> None:
    nccl.check()
    assert nccl.abort() == nccl.abort() == 2
    assert [one.did for one in made] == [["abort"], ["abort"]]
    with pytest.raises(dist.DistBackendError, match="aborted: other processes were lost") as caught:
        nccl.check()
    assert peer_lost(caught.value), "the others save, and the step is not taken"
    nccl.begun()
    nccl.check()


def test_what_the_watchdog_has_aborted_is_void(made: list[Communicators]) -> None:
    made[1].error = Error.TIMEOUT
    with pytest.raises(dist.DistBackendError, match="aborted: TIMEOUT"):
        World(device=torch.device("cuda")).check_reduced()
    World().check_reduced()


def test_without_groups_over_nccl_there_is_nothing_to_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "ProcessGroupNCCL", raising=False)
    assert nccl.abort() == 0
    nccl.check()
    nccl.finish(torch.device("cpu"))


def test_a_loss_has_a_second_to_show_by_itself(
    made: list[Communicators], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(nccl.time, "monotonic", lambda: now)
    world, lost = World(0, 2), StopRequest("node-1 was lost", lost=True)
    for stop in (None, StopRequest("resize"), lost):
        world.heard(stop)
        now += 1.0
    world.heard(lost)
    assert not made[0].did, "connections that end make collectives fail earlier"
    now += 0.1
    world.heard(StopRequest("resize"))
    world.heard(lost)
    assert not made[0].did
    now += 1.1
    for _ in range(3):
        world.heard(lost)
    assert made[0].did == ["abort"]


def test_groups_that_wait_for_each_others_collectives_are_aborted(
    made: list[Communicators], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = threading.Barrier(2, timeout=150)
    monkeypatch.setattr(nccl, "_CLOSING", 150.0)
    for one in made:
        monkeypatch.setattr(one, "abort", lambda one=one: (both.wait(), one.did.append("abort")))
    nccl.abort()
    assert [one.did for one in made] == [["abort"], ["abort"]]


def test_errors_abort_communicators_at_once_and_end_no_process_unless_the_user_says_so() -> None:
    environment = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    own = dict(environment)
    nccl.prepare(environment)
    assert environment == {**own, "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0"}
    environment.clear()
    nccl.prepare(environment)
    assert environment["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"  # CleanUpOnly
    assert (
        environment["TORCH_NCCL_DUMP_ON_TIMEOUT"] == environment["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] == "0"
    )


def test_a_step_whose_collectives_were_aborted_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = torch.nn.Linear(2, 1), [-1]
    before: list[torch.Tensor] = []

    def fail(world: World) -> None:
        if seen[0] == 2:
            raise dist.DistBackendError("NCCL communicator was aborted")

    def train() -> None:
        with ElasticRun.start(directory=tmp_path) as run:
            called, _ = run.prepare(model, lambda p: torch.optim.SGD(p, lr=0.1), batch_size=4)
            for _ in run.epochs(1):
                for x in run.batches(torch.ones(40, 2)):
                    run.backward(called(x).square().mean())
                    before[:] = [one.clone() for one in model.parameters()]
                    seen[0] = run.progress.step
                    run.step()

    monkeypatch.setattr(World, "check_reduced", fail)
    with pytest.raises(dist.DistBackendError):
        train()
    assert seen == [2]
    assert all(map(torch.equal, before, model.parameters()))


def test_groups_that_do_not_end_hold_no_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    freed = threading.Event()
    monkeypatch.setattr(dist, "destroy_process_group", lambda: freed.wait(150))
    monkeypatch.setattr(nccl, "_CLOSING", 0.01)
    nccl.close()
    freed.set()
    assert "did not end" in caplog.text


def test_a_group_that_does_not_end_lets_its_process_start_again(
    made: list[Communicators], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = ReplicaWorld(SimpleNamespace(), SimpleNamespace(), 0, 1, torch.device("cuda"))  # type: ignore[arg-type]
    freed, destroyed = threading.Event(), list[str]()
    monkeypatch.setattr(dist, "is_initialized", lambda: not destroyed)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=object()))
    monkeypatch.setattr("ebbflow.infra.training.replicas.world.await_release", lambda group: True)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: freed.wait(150))
    monkeypatch.setattr(nccl, "_CLOSING", 0.01)
    with pytest.raises(dist.DistBackendError, match="does not end") as caught:
        world._dissolve()
    freed.set()
    assert not world.lost(caught.value), "a step that is repeated would wait for it again"
    assert peer_lost(caught.value)
    monkeypatch.setattr(nccl, "_CLOSING", 150.0)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: destroyed.append("all"))
    world._dissolve()
    assert destroyed == ["all"]
    nccl.check()


def test_a_save_at_the_last_moment_keeps_the_time_that_aborting_may_take(
    made: list[Communicators], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    link = SimpleNamespace(before_deadline=lambda reserve, act: asked.append(reserve))
    generation, saver = (
        SimpleNamespace(link=link, trial=False, clock=None),
        SimpleNamespace(costs=Costs(0.1, 4.0)),
    )
    end = ProcessExit(generation, saver)  # type: ignore[arg-type]
    end.watch()
    monkeypatch.delattr(dist, "ProcessGroupNCCL")
    end.watch()
    assert asked == [1.0 + 5.0 + 8.0, 1.0 + 8.0]
