"""Which nodes a run has, and which of them it uses."""

import re
import threading
from collections.abc import Iterable, Mapping
from math import floor

Placement = dict[str, int]  # node -> slots

_NUMBERED = re.compile(r"node-(\d+)")


class Nodes:
    """The nodes of one run as they come and go, until it is asked to leave. Safe for several threads.

    A name is never used twice.
    """

    def __init__(self, nodes: Mapping[str, int], most: int, least: int = 1) -> None:
        self._nodes = dict(nodes)
        self._most, self._least = most, least
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

        ``memory`` times as much of it for each process means fewer processes a node.
        """
        chosen: Placement = {}
        with self._lock:
            left = self._most
            for name, slots in self._nodes.items():
                take = min(max(1, floor(slots / memory + 1e-9)), left)
                if take > 0:
                    chosen[name] = take
                    left -= take
        return chosen if sum(chosen.values()) >= self._least else None

    def enough(self, placement: Mapping[str, int]) -> bool:
        """Return whether a run may continue with ``placement`` alone."""
        return sum(placement.values()) >= max(self._least, 1)

    def preflight(self, ranks: int, spread: int) -> Placement:
        """Return where a preflight of ``ranks`` ranks runs, on ``spread`` nodes where there are as many."""
        with self._lock:
            names = list(self._nodes)[: max(spread, 1)]
            if len(names) == 1:
                return {names[0]: min(ranks, self._nodes[names[0]])}
            return dict.fromkeys(names[:ranks], 1)

    def _fresh(self, slots: int) -> str:
        numbers = [int(found[1]) for name in self._names if (found := _NUMBERED.fullmatch(name))]
        name = f"node-{max(numbers, default=0) + 1}"
        self._names.add(name)
        self._nodes[name] = slots
        return name
