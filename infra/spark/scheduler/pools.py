"""Scheduler pools: how queries, and the stages of a query, share the cores of one Spark application."""

import heapq
import itertools
import logging
import threading
from typing import Any

from ebbflow.infra.spark.failures import first_line

_numbers = itertools.count()
_log = logging.getLogger(__name__)


class Pools:
    """One query's pools. Spark divides cores among queries by weight, and a query's evenly among its jobs.

    Within one pool Spark runs jobs first come, first served, so every job has one; numbers are used again,
    since Spark keeps every pool it has heard of. The query's own pool is their parent and carries its weight,
    which Spark wants as a whole number. Where parents cannot be made, as in a session that schedules first
    come, first served, the jobs' pools stand side by side.
    """

    def __init__(self, context: Any, weight: float = 1.0) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._name = f"ebbflow-{next(_numbers)}"
        self._free: list[int] = []
        self._count = 0
        self._parent: Any = None
        self._parent = self._add(self._name, max(1, round(weight)))

    def take(self) -> int:
        """Return the number of a pool that no other job has."""
        with self._lock:
            if self._free:
                return heapq.heappop(self._free)
            number, self._count = self._count, self._count + 1
            if self._parent is not None:
                self._add(self.name(number), 1)
            return number

    def give(self, number: int) -> None:
        with self._lock:
            heapq.heappush(self._free, number)

    def name(self, number: int) -> str:
        return f"{self._name}-{number}"

    def close(self) -> None:
        """Take the query's pools out of Spark's list."""
        if self._parent is not None:
            try:
                self._root().removeSchedulable(self._parent)
            except Exception as error:
                _log.debug("cannot remove pool %s: %s", self._name, first_line(error))
            self._parent = None

    def _root(self) -> Any:
        return self._context._jsc.sc().taskScheduler().rootPool()

    def _add(self, name: str, weight: int) -> Any:
        """Make a pool: the query's own, or once that is there, a job's in it."""
        try:
            if self._parent is None:
                self._spark = self._context._jvm.org.apache.spark.scheduler
                self._modes = getattr(getattr(self._spark, "SchedulingMode$"), "MODULE$")
                inner, above = self._modes.FAIR(), self._root()
                if not above.schedulingMode().equals(inner):
                    return None
            else:
                inner, above = self._modes.FIFO(), self._parent
            pool = self._spark.Pool(name, inner, 0, weight)
            above.addSchedulable(pool)
            return pool
        except Exception as error:  # not a part of Spark that it promises to keep
            _log.debug("no pool %s of weight %d: %s", name, weight, first_line(error))
            return None
