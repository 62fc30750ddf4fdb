"""Carries out a schedule on a cluster while a query runs."""

import random
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ebbflow.infra.clock import Clock
from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
from ebbflow.planners.errors import EbbflowError
from ebbflow.tasks.faults import Schedule
from tests.benchmarks.sql.records import ClusterEvent
from tests.benchmarks.sql.schedules import Change

_END = 180.0  # seconds to wait for what is going on when a run ends
_ARRIVAL = 60.0  # seconds for the executor of a worker that has come
_LOOK = 0.2


class Faults:
    """Makes the cluster's size follow ``changes`` from ``begin`` to ``end``, in a thread of its own.

    Who leaves is drawn from ``seed`` among the workers that are up, so it is the same for every system as long
    as they have the same workers. ``notices``: whether Spark and Ebbflow are told of a notice; without, who has
    one just vanishes at its end. A worker that is wanted back is started at the change and takes its time; a
    change's time runs from when the one before had been carried out, which ``serving`` tells for the workers that
    have come: a level of the schedule is one of executors that can work.
    """

    def __init__(
        self,
        cluster: LocalSparkCluster,
        changes: Iterator[Change],
        clock: Clock,
        *,
        serving: Callable[[Collection[str]], bool],
        seed: str,
        notices: bool,
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._dice = random.Random(f"victims/{seed}")
        self._notices = notices
        self._serving = serving
        self._schedule = Schedule(clock, self._script(changes), timeout=_END)
        self._began = 0.0
        self._up: list[str] = []
        self.happenings: list[ClusterEvent] = []
        self.problem = ""

    def begin(self, began: float) -> None:
        """Start the schedule; ``began`` is when the query was handed over, in seconds since the Unix epoch."""
        self._began = began
        self._up = up(self._cluster)
        self._schedule.begin()

    def end(self) -> None:
        """Stop what has not happened yet; waits, bounded, for what is going on."""
        self._schedule.end()

    def _script(self, changes: Iterator[Change]) -> Iterator[float]:
        """Yield the moments to wait for, and do what is due then."""
        try:
            since = 0.0
            for change in changes:
                yield from self._carry_out(change, since + change.after)
                since = self._now()
        except EbbflowError as error:
            self.problem = str(error)

    def _carry_out(self, change: Change, at: float) -> Iterator[float]:
        leaving = self._dice.sample(self._up, max(0, len(self._up) - change.workers))
        if leaving and change.notice and self._notices:
            yield self._began + at - change.notice
            self._each(leaving, lambda node: self._warn(node, at, len(self._up) - len(leaving)))
        yield self._began + at
        self._up = [node for node in self._up if node not in leaving]
        self._each(leaving, self._kill)
        if len(self._up) < change.workers:
            self._each(range(change.workers - len(self._up)), lambda _: self._add())
            self._up.sort(key=node_number)
            yield from self._arrival()

    def _arrival(self) -> Iterator[float]:
        """Wait for the executors; the schedule goes on when they do not come, too."""
        end = self._now() + _ARRIVAL
        while not self._serving(self._up) and self._now() < end:
            yield self._clock.now() + _LOOK
        self._note("serving", "", len(self._up))

    def _each(self, items: Collection[Any], act: Callable[[Any], None]) -> None:
        """Do the same to each item, all at once."""
        if items:
            with ThreadPoolExecutor(len(items)) as pool:
                list(pool.map(act, items))

    def _warn(self, node: str, deadline: float, left: int) -> None:
        self._note("notice", node, left)
        self._cluster.notice(node, max(0.0, deadline - self._now()))

    def _kill(self, node: str) -> None:
        self._note("kill", node, len(self._up))
        self._cluster.kill(node)

    def _add(self) -> None:
        self._note("add", "", len(self._up))
        node = self._cluster.add()
        self._up.append(node)
        self._note("up", node, len(self._up))

    def _note(self, what: str, node: str, workers: int) -> None:
        self.happenings.append(ClusterEvent(round(self._now(), 3), what, node, workers))

    def _now(self) -> float:
        return self._clock.now() - self._began


def up(cluster: LocalSparkCluster) -> list[str]:
    """Return the workers that are up and stay, in the order in which they came."""
    nodes = cluster.status().nodes
    return sorted((n.id for n in nodes if n.state == "alive"), key=node_number)


def node_number(node: str) -> int:
    return int(node.rpartition("-")[2])
