"""How long a query waits at its start for executors."""

import threading

import pytest

from ebbflow.planners.model import Capacity, Node
from ebbflow.tasks.query.opening import arrived_capacity


class Arriving:
    """A clock, and a source whose executors have so many cores after so many seconds."""

    def __init__(self, cores: int, arrivals: dict[float, int], *, of_cluster: bool) -> None:
        self.time = 1000.0
        self._cores = cores
        self._arrivals = arrivals
        self.of_cluster = of_cluster

    @property
    def held(self) -> int:
        return max((n for at, n in self._arrivals.items() if 1000.0 + at <= self.time), default=0)

    def capacity(self) -> Capacity:
        cores = self._cores if self.of_cluster else self.held
        return Capacity(1, tuple(Node(f"n{i}", 1, 1.0) for i in range(cores)), at=self.time)

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def wait(self, event: threading.Event, timeout: float) -> bool:
        self.time += timeout
        return event.is_set()


@pytest.mark.parametrize(
    ("arrivals", "of_cluster", "least", "most"),
    [
        ({0.0: 3}, True, 0.0, 0.0),  # all that can come
        ({1.0: 1, 2.0: 3}, True, 2.0, 2.5),
        ({1.0: 2}, True, 2.5, 3.0),  # somebody else has the rest
        ({1.0: 3}, False, 2.5, 3.0),  # nothing tells that no more come
        ({}, True, 45.0, 46.0),
    ],
)
def test_a_query_waits_until_all_executors_that_can_come_have_or_no_more_do(
    arrivals: dict[float, int], of_cluster: bool, least: float, most: float
) -> None:
    world = Arriving(3, arrivals, of_cluster=of_cluster)
    arrived_capacity(world, world)
    assert least <= world.time - 1000.0 <= most
