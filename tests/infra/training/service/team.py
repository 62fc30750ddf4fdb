"""Workers of a training over aggregators as threads of one process: all but the launcher and its channel is real."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from ebbflow.infra.aggregation.aggregator import Aggregator
from ebbflow.infra.training.channel import keys
from ebbflow.infra.training.data.feeding import Feed
from ebbflow.infra.training.data.samples import Samples
from ebbflow.infra.training.prepared import Options, PreparedTraining, prepare
from ebbflow.infra.training.process.leaving import RunStopped
from ebbflow.infra.training.service.joining import AGGREGATORS, ServiceMembers
from ebbflow.infra.training.service.world import ServiceWorld
from ebbflow.infra.training.stepper import Stepper
from ebbflow.planners.aggregation.membership import Agreement, Membership, View
from ebbflow.planners.model.trainings import RunSettings
from ebbflow.planners.training.saving.data_order import DataOrder, Share

PATIENCE = 120.0  # s
SEED = 3
Make = Callable[[], torch.nn.Module]
MakeOptimizer = Callable[[torch.nn.Module], torch.optim.Optimizer]


class Lost(Exception):
    """What ends a worker of these tests."""


@dataclass
class Board:
    """The launcher's part: membership, for threads that wait."""

    membership: Membership
    changed: threading.Condition = field(default_factory=threading.Condition)

    def do(self, act: Callable[[Membership], None]) -> None:
        with self.changed:
            act(self.membership)
            self.changed.notify_all()

    def wait(self, found: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(found, PATIENCE)


class Seat:
    """A worker's channel."""

    def __init__(self, board: Board, member: int) -> None:
        self.board, self.member = board, member

    @property
    def newest_view(self) -> int:
        return self.board.membership.view.number

    def enter(self) -> View:
        self.board.do(lambda membership: membership.enter(self.member))
        self.board.wait(lambda: self.member in self.board.membership.view.members)
        return self.board.membership.view

    def view(self) -> View:
        return self.board.membership.view

    def agree(self, view: int, index: int, value: str, *, boundary: bool = False) -> Agreement:
        membership = self.board.membership
        self.board.do(lambda one: one.contribute(self.member, view, index, value, boundary=boundary))
        self.board.wait(lambda: membership.answer(self.member, view, index) is not None)
        found = membership.answer(self.member, view, index)
        assert found is not None
        return found

    def close(self) -> None:
        """Nothing is open."""


@dataclass
class Step:
    """What a worker did in a step that was taken."""

    number: int
    world: int
    share: Share
    rate: float


@dataclass
class Worker:
    """One worker; ``lost_in`` is the step in which it is lost, after the first of its gradients."""

    team: "Team"
    member: int
    later: bool = False
    lost_in: int = -1
    done: list[Step] = field(default_factory=list)
    prepared: PreparedTraining | None = None
    left: str = ""
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self._train()
        except Lost:
            self.team.board.do(lambda membership: membership.leave(self.member))
        except RunStopped as exc:
            self.left = exc.reason
        except BaseException as exc:
            self.error = exc
            self.team.board.do(lambda membership: membership.leave(self.member))

    def _train(self) -> None:
        team, seat = self.team, Seat(self.team.board, self.member)
        world = ServiceWorld(seat, seat, self.member, 1, torch.device("cpu"), later=self.later)  # type: ignore[arg-type]
        if not self.later:
            world.enter()
        members = ServiceMembers(world, {"seed": SEED}, team.settings, team.post)
        model = team.make()
        prepared = self.prepared = prepare(
            world, model, team.make_optimizer(model), team.options, team.settings, lambda _: None, None,
            members.connect,
        )  # fmt: skip
        members.begin(prepared)
        lock = threading.RLock()
        stepper = Stepper(world, prepared, lock, members)
        samples = Samples(team.data)
        order = DataOrder(samples.length, SEED)
        prepared.progress.bind(samples.length)
        while prepared.progress.step < team.steps:
            for x, y in Feed(world, prepared, stepper, samples, order).batches():
                if prepared.progress.step == self.lost_in:
                    self._lose_after_first_gradient(prepared)
                team.before_step(self, prepared.progress.step)
                loss = torch.nn.functional.mse_loss(prepared.model(x).float(), y.float())
                stepper.backward(loss)
                before, share, size = prepared.progress.step, stepper.share, world.size
                if stepper.step((False, False)) is not None:
                    self.done.append(Step(before, size, share, 0.0))
                if prepared.progress.step >= team.steps:
                    break
            prepared.progress.next_epoch()
        with lock:
            prepared.state()
        prepared.close(1.0)

    def _lose_after_first_gradient(self, prepared: PreparedTraining) -> None:
        def lose(name: str, gradient: torch.Tensor) -> None:
            if lose.__dict__.setdefault("seen", name) != name:
                assert prepared.service is not None
                prepared.service._agent.flush()
                raise Lost

        assert prepared.service is not None
        prepared.service.on_push = lose


@dataclass
class Team:
    """A training of some workers, over ``aggregators`` of which ``mirrors`` more hold each tensor."""

    make: Make
    make_optimizer: MakeOptimizer
    data: tuple[torch.Tensor, torch.Tensor]
    steps: int
    options: Options
    settings: RunSettings
    founders: int
    board: Board = field(init=False)
    aggregators: list[Aggregator] = field(default_factory=list)
    workers: list[Worker] = field(default_factory=list)
    before_step: Callable[[Worker, int], None] = lambda worker, step: None
    posted: list[tuple[str, dict[str, Any]]] = field(
        default_factory=list
    )  # to the launcher, which there is none
    _threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.board = Board(Membership(range(self.founders)))

    def post(self, kind: str, step: int, content: dict[str, Any]) -> None:
        self.posted.append((kind, content))

    def begin(self, **lost_in: int) -> None:
        """Start the founders; ``lost_in`` is a step by ``w`` and the member."""
        for member in range(self.founders):
            self.add(Worker(self, member, lost_in=lost_in.get(f"w{member}", -1)))

    def add(self, worker: Worker) -> Worker:
        self.workers.append(worker)
        thread = threading.Thread(target=worker.run, daemon=True)
        self._threads.append(thread)
        thread.start()
        return worker

    def end(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        for worker in self.workers:
            if worker.error is not None:
                raise worker.error


@contextmanager
def aggregators(monkeypatch: pytest.MonkeyPatch, count: int) -> Iterator[list[Aggregator]]:
    """Start aggregators that admit this process, and say where they are."""
    pair = keys.KeyPair.make()
    made = [Aggregator(f"a{i}", threads=1) for i in range(count)]
    try:
        for one in made:
            one.admit("job", {"all": pair.public})
        found = [{"name": one.name, "address": one.address, "public": one.public} for one in made]
        monkeypatch.setenv(AGGREGATORS, json.dumps(found))
        monkeypatch.setenv(keys.SERVER_KEY, pair.public)
        monkeypatch.setenv(keys.NODE_SECRET, pair.secret)
        yield made
    finally:
        for one in made:
            one.close()
