"""Which nodes a run has, and which of them it uses."""

import re
import threading
from collections.abc import Iterable, Mapping
from math import floor

from ebbflow.planners.training.replicas import least_whole, whole_replicas

Placement = dict[str, int]  # node -> slots

_NUMBERED = re.compile(r"node-(\d+)")


class Nodes:
    """The nodes of one run as they come and go, until it is asked to leave. Safe for several threads.

    A name is never used twice.

    Args:
        nodes: slots by name.
        most: slots that are used at most.
        least: slots without which the run waits; ``Nodes.least`` is the multiple of ``replica`` that it takes.
        replica: slots that hold one replica of the model; a multiple of it is used.
    """

    def __init__(self, nodes: Mapping[str, int], most: int, least: int = 1, *, replica: int = 1) -> None:
        self._nodes = dict(nodes)
        self._most, self._replica = most, replica
        self.least = least_whole(max(least, 1), replica)
        self._names = set(nodes)
        self._each = max(nodes.values(), default=1)
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.stop_by: float | None = None  # s since the Unix epoch; None: within the run's own grace

    def stop(self, deadline: float | None = None) -> None:
        """Ask the run to save and leave before ``deadline`` (seconds since the Unix epoch), or within its grace."""
        self.stop_by = deadline
        self._stop.set()

    @property
    def stopped(self) -> bool:
        """Return whether the run has been requested to leave."""
        return self._stop.is_set()

    def restart(self) -> None:
        """Let a run begin again that was requested to leave."""
        self._stop.clear()
        self.stop_by = None

    @property
    def slots(self) -> int:
        """Return the slots of all nodes that are there."""
        with self._lock:
            return sum(self._nodes.values())

    def there(self) -> Placement:
        """Return the nodes that are there."""
        with self._lock:
            return dict(self._nodes)

    def add(self, count: int) -> list[str]:
        """Take ``count`` more nodes in, as large as the largest so far, and return their names."""
        with self._lock:
            return [self._fresh(self._each) for _ in range(count)]

    def remove(self, names: Iterable[str]) -> None:
        """Take note that nodes are gone, or about to be."""
        with self._lock:
            for name in names:
                self._nodes.pop(name, None)

    def give_up(self, names: Iterable[str]) -> None:
        """Take note that nodes did not start; they are tried again with the next generation, if it has them."""

    def adopt(self, nodes: Mapping[str, int]) -> None:
        """Take note of nodes that somebody else has started."""
        with self._lock:
            for name, slots in nodes.items():
                if name not in self._names:
                    self._names.add(name)
                    self._nodes[name] = slots

    def become(self, nodes: Mapping[str, int]) -> None:
        """Set the nodes to exactly these."""
        with self._lock:
            self._nodes = dict(nodes)
            self._names |= set(nodes)

    def deadline(self, placement: Mapping[str, int]) -> float | None:
        """Return when all but ``placement`` must be free, seconds since the Unix epoch; ``None``: no deadline."""
        return None

    def newest(self, count: int) -> list[str]:
        """Return the nodes that came last."""
        with self._lock:
            return list(self._nodes)[len(self._nodes) - min(count, len(self._nodes)) :]

    def shrink(self, count: int) -> None:
        """Take note that so many nodes are released, the newest first."""
        self.remove(self.newest(count))

    def replace_nodes(self, names: Iterable[str]) -> None:
        """Replace nodes by new ones of the same size."""
        with self._lock:
            for name in names:
                if name in self._nodes:
                    self._fresh(self._nodes.pop(name))

    def placement(self, memory: float = 1.0) -> Placement | None:
        """Return the nodes to use: all, up to the most GPUs; ``None`` where there are fewer than the least.

        ``memory`` times as much of it for each process means fewer processes a node. Replicas are whole, and none
        spans two nodes that has room on one.
        """
        there = {name: max(1, floor(slots / memory + 1e-9)) for name, slots in self.there().items()}
        chosen = whole_replicas(there, self._replica, self._most)
        return chosen if sum(chosen.values()) >= self.least else None

    def enough(self, placement: Mapping[str, int]) -> bool:
        """Return whether a run may continue with ``placement`` alone."""
        slots = sum(placement.values())
        return slots >= self.least and slots % self._replica == 0

    def preflight(self, ranks: int, spread: int) -> Placement:
        """Return where a preflight of ``ranks`` ranks runs, on ``spread`` nodes where there are as many."""
        there = self.there()
        if self._replica > 1:
            return whole_replicas(there, self._replica, ranks)
        names = list(there)[: max(spread, 1)]
        if len(names) == 1:
            return {names[0]: min(ranks, there[names[0]])}
        return dict.fromkeys(names[:ranks], 1)

    def _fresh(self, slots: int) -> str:
        numbers = [int(found[1]) for name in self._names if (found := _NUMBERED.fullmatch(name))]
        name = f"node-{max(numbers, default=0) + 1}"
        self._names.add(name)
        self._nodes[name] = slots
        return name
