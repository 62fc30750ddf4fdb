"""Applications that measure the elastic runtime itself."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from ebbflow.infra.elastic.application import Application, Driver, Executor, Key, TaskContext, Value
from ebbflow.infra.elastic.apps.iterative import IterativeDriver
from ebbflow.infra.elastic.apps.mlr import Mlr, MlrExecutor


class Sleeping(Application):
    """Tasks that sleep instead of computing, so that speed-up is not limited by the cores; state of a given size."""

    shards = 4

    def __init__(
        self, executors: int, iterations: int, seconds: float, state: int = 0, staleness: int = 0
    ) -> None:
        self.executors = executors
        self.iterations = iterations
        self.seconds = seconds
        self.state = state  # bytes of each executor
        self.staleness = staleness

    def driver(self) -> Driver:
        return IterativeDriver(self.executors, self.iterations, self.staleness)

    def executor(self, index: int) -> Executor:
        return SleepingExecutor(self)

    def parameters(self) -> Mapping[Key, Value]:
        return {"count": 0}


class SleepingExecutor(Executor):
    """Holds bytes and sleeps."""

    def __init__(self, app: Sleeping) -> None:
        self._app = app
        self._state = np.zeros(app.state, np.uint8)

    def load_input(self) -> None:
        pass

    def state_dict(self) -> Any:
        return self._state if self._app.state else None

    def load_state_dict(self, state: Any) -> None:
        self._state = state

    async def run(self, context: TaskContext, args: Any) -> float:
        await context.get("count")
        time.sleep(self._app.seconds)
        context.update("count", 1)
        return 1.0


class StragglingMlr(Mlr):
    """Every task takes ``seconds`` more; in every iteration one executor, by turns, takes ten times as much."""

    seconds = 0.005

    def executor(self, index: int) -> Executor:
        return StragglingExecutor(self, index)


class StragglingExecutor(MlrExecutor):
    """Sleeps before it computes."""

    async def run(self, context: TaskContext, args: int) -> float:
        slow = args % self._app.executors == self._index
        time.sleep(StragglingMlr.seconds * (10 if slow else 1))
        return await super().run(context, args)
