"""Small applications whose right answer is known, and a whole job in one thread."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ebbflow.infra.elastic.application import Application, Driver, Executor, Key, TaskContext, Value
from ebbflow.infra.elastic.apps.iterative import IterativeDriver
from ebbflow.infra.elastic.master.master import Master
from ebbflow.infra.elastic.settings import Settings
from ebbflow.infra.elastic.wire.messages import MASTER, Join, NodeLoss, Scale
from ebbflow.infra.elastic.wire.transport import Envelope, InProcessNetwork
from ebbflow.infra.elastic.worker.server import Server
from ebbflow.infra.elastic.worker.worker import Worker


class Mixing(Application):
    """Integers that depend on everything read: one update missed, repeated or seen too early changes the end."""

    def __init__(
        self, executors: int = 6, iterations: int = 5, staleness: int | None = 0, keys: int = 5,
        isolated: bool = True, tolerant: bool = False, shards: int = 4,
    ) -> None:  # fmt: skip
        self.executors = executors
        self.iterations = iterations
        self.staleness = staleness
        self.keys = keys
        self.isolated = isolated
        self.tolerant = tolerant
        self.shards = shards

    def driver(self) -> Driver:
        return IterativeDriver(self.executors, self.iterations, self.staleness)

    def executor(self, index: int) -> Executor:
        return MixingExecutor(self, index)

    def parameters(self) -> Mapping[Key, Value]:
        return {("p", key): np.array([key, 0], np.int64) for key in range(self.keys)}


class MixingExecutor(Executor):
    """Its state is the list of its iterations; the second number of every parameter counts updates."""

    def __init__(self, app: Mixing, index: int) -> None:
        self._app = app
        self._index = index
        self.ran: list[int] = []
        self._input: int | None = None

    def load_input(self) -> None:
        self._input = self._index + 1

    def input_state(self) -> Any:
        return self._input

    def set_input(self, data: Any) -> None:
        self._input = data

    def state_dict(self) -> Any:
        return list(self.ran)

    def load_state_dict(self, state: Any) -> None:
        self.ran = list(state)

    async def run(self, context: TaskContext, args: int) -> int:
        assert self._input == self._index + 1
        self.ran.append(args)
        first = (self._index + args) % self._app.keys
        (mine,) = await context.get(("p", first))
        everything = await context.get(*(("p", key) for key in range(self._app.keys)))
        mixed = int(sum(int(value[0]) * (place + 2) for place, value in enumerate(everything)))
        step = (mixed + int(mine[0]) * self._input + args) % 1_000_003
        context.update(("p", first), np.array([step, 1]))
        context.update(("p", (first + 2) % self._app.keys), np.array([step % 97, 1]))
        return 1


class Broken(Mixing):
    """Fails in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def executor(self, index: int) -> Executor:
        return BrokenExecutor(self, index)


class BrokenExecutor(MixingExecutor):
    async def run(self, context: TaskContext, args: int) -> int:
        how = self._app.how  # type: ignore[attr-defined]
        if how == "raise" and args == 2:
            raise ZeroDivisionError("a mistake in the application")
        if how == "read":
            await context.get("nothing")
        if how == "update":
            context.update("nothing", 1)
        return await super().run(context, args)


def same(first: Mapping[Key, Any], second: Mapping[Key, Any]) -> bool:
    return first.keys() == second.keys() and all((first[k] == second[k]).all() for k in first)


def expected(app: Mixing) -> dict[Key, Any]:
    """Return the parameters after a bulk-synchronous run, computed with nothing of the runtime."""
    values = {key: value.copy() for key, value in app.parameters().items()}
    for iteration in range(app.iterations):
        before = {key: value.copy() for key, value in values.items()}
        mixed = sum(int(before["p", key][0]) * (key + 2) for key in range(app.keys))
        for index in range(app.executors):
            first = (index + iteration) % app.keys
            step = (mixed + int(before["p", first][0]) * (index + 1) + iteration) % 1_000_003
            values["p", first] = values["p", first] + [step, 1]
            values["p", (first + 2) % app.keys] = values["p", (first + 2) % app.keys] + [step % 97, 1]
    return values


class InProcessJob:
    """Master, workers and servers on a network whose deliveries are drawn from a seed."""

    def __init__(
        self, app: Application, workers: int, folder: Path, seed: int = 0, settings: Settings | None = None,
        resume: bool = False, restart: bool = False,
    ) -> None:  # fmt: skip
        self.app = app
        self.network = InProcessNetwork(np.random.default_rng(seed))
        self.settings = settings or Settings(snapshot_every=None)
        self.master = Master(
            app, workers, str(folder), self.settings, self.network.sender(MASTER), self.network.now,
            self.network.kill, resume, restart,
        )  # fmt: skip
        self.network.add(self.master)
        self._started = 0
        for _ in range(workers):
            self.join()

    def join(self) -> str:
        self._started += 1
        name = f"n{self._started}"
        server = Server(f"{name}/server", self.network.sender(f"{name}/server"), self.network.now)
        worker = Worker(f"{name}/worker", self.network.sender(f"{name}/worker"), self.network.now)
        self.network.add(server)
        self.network.add(worker)
        worker.send(MASTER, Join(name))
        return name

    def broadcast(self, message: Any) -> None:
        self.master.receive(Envelope(MASTER, 0, message))

    def leave(self, *names: str) -> None:
        self.broadcast(Scale(names))

    def kill(self, name: str) -> None:
        self.network.kill(f"{name}/worker")
        self.network.kill(f"{name}/server")
        self.broadcast(NodeLoss(name, "killed"))

    @property
    def holds_at_end(self) -> list[tuple[int, int]]:
        return list(self.master.holds().values())

    @property
    def members(self) -> list[str]:
        return [n.name for n in self.master.nodes.values() if n.state in {"joining", "active"}]

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.network.step()

    def finish(self, most: int = 20_000) -> dict[Key, Any]:
        for _ in range(most):
            self.network.step()
            if self.master.phase in {"done", "failed"}:
                break
        if self.master.error:
            raise self.master.error
        assert self.master.phase == "done", f"stuck in {self.master.phase}; {self.master.holds()}"
        return self.master.values
