"""A driver for all applications that do the same on every executor, iteration after iteration."""

import copy
from typing import Any

from ebbflow.infra.elastic.application import Completion, Dispatcher, Driver
from ebbflow.infra.elastic.registry import register
from ebbflow.planners.elastic.schedules import AsyncSchedule, Release, SspSchedule

register(SspSchedule)
register(AsyncSchedule)


class IterativeDriver(Driver):
    """Dispatches iterations under bounded staleness; ``staleness`` ``None`` is asynchronous.

    A task's ``args`` is its iteration. ``history`` has the sum of the results (numbers or
    arrays) of each complete iteration.
    """

    def __init__(self, executors: int, iterations: int, staleness: int | None = 0) -> None:
        self._schedule: SspSchedule | AsyncSchedule = (
            AsyncSchedule(executors, iterations)
            if staleness is None
            else SspSchedule(executors, iterations, staleness)
        )
        self._executors = executors
        self._sums: dict[int, tuple[int, Any]] = {}  # by iteration: completions, sum of their results
        self.history: list[Any] = []

    def start(self, job: Dispatcher) -> None:
        self._dispatch(job, self._schedule.start())

    def complete(self, job: Dispatcher, completion: Completion) -> None:
        iteration = completion.task.args
        count, total = self._sums.get(iteration, (0, 0))
        self._sums[iteration] = (count + 1, total + completion.result)
        while self._sums.get(len(self.history), (0,))[0] == self._executors:
            self.history.append(self._sums.pop(len(self.history))[1])
        if isinstance(self._schedule, AsyncSchedule):
            self._dispatch(job, self._schedule.finish(completion.task.executor, iteration))
        else:
            self._dispatch(job, self._schedule.finish(iteration))

    @staticmethod
    def _dispatch(job: Dispatcher, releases: list[Release]) -> None:
        for release in releases:
            job.dispatch(release.executor, release.iteration)

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy({"schedule": self._schedule, "sums": self._sums, "history": self.history})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = copy.deepcopy(state)
        self._schedule, self._sums, self.history = state["schedule"], state["sums"], state["history"]
