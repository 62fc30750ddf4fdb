"""Holding a Spark application to its part of a standalone cluster, while it runs.

The master gives an application executors up to a limit that the driver may change at any time (the interface
that dynamic allocation uses). Raising it is all that growth takes. For shrinking, executors beyond the limit are
decommissioned: they take no new tasks, finish those they run, hand their shuffle files to the others and leave,
so no work is lost. Spark's own dynamic allocation follows the backlog of one application and reads its bounds
once; it can neither be told a share nor a change of it.
"""

import logging
import math
import threading
from dataclasses import dataclass
from typing import Any

from ebbflow.infra.spark.failures import first_line
from ebbflow.infra.spark.master_api import Executor, parse_executors
from ebbflow.infra.spark.metrics import StatusApi

_NO_LIMIT = 1_000_000  # executors
_log = logging.getLogger(__name__)
_lock = threading.Lock()
_holds: dict[str, "ExecutorHold"] = {}  # by application id: several queries may run in one application


@dataclass(frozen=True, slots=True)
class _Spark:
    """The few calls of Spark's scheduler that are needed, behind Python's bridge."""

    context: Any

    def limit(self, executors: int) -> None:
        nowhere = getattr(self._jvm.scala.collection.immutable, "Map$")
        self._scala.requestTotalExecutors(executors, 0, getattr(nowhere, "MODULE$").empty())

    def active(self, executor: str) -> bool:
        """Tell whether it takes tasks: it is registered and was neither killed nor decommissioned."""
        return bool(self._scala.schedulerBackend().isExecutorActive(executor))

    def decommission(self, executors: list[str]) -> None:
        jvm = self._jvm
        pairs = self.context._gateway.new_array(jvm.scala.Tuple2, len(executors))
        for i, executor in enumerate(executors):
            why = jvm.org.apache.spark.scheduler.ExecutorDecommissionInfo(
                "its cores are another query's share now", jvm.scala.Option.empty()
            )
            pairs[i] = jvm.scala.Tuple2(executor, why)
        # the limit is set already; the executors are not asked by the machine that they run on
        self._scala.schedulerBackend().decommissionExecutors(pairs, False, False)

    @property
    def _jvm(self) -> Any:
        return self.context._jvm

    @property
    def _scala(self) -> Any:
        return self.context._jsc.sc()


class ExecutorHold:
    """Holds one application to whole executors of ``unit`` cores. Safe for several threads."""

    def __init__(self, spark: Any, api: StatusApi, unit: int) -> None:
        self.unit = unit
        self._spark = spark
        self._api = api
        self._lock = threading.Lock()
        self._wanted: dict[str, float | None] = {}  # cores by query; None: as many as there are
        self._limit = _NO_LIMIT  # what the master was told last

    def hold(self, query: str, cores: float | None) -> None:
        """Hold ``query`` of this application to ``cores``; ``None`` lifts the limit.

        Several queries of one application have the sum. Cheap when nothing is to be done, and to be called
        again and again: executors that the master had started before the limit arrived are found by that.
        """
        with self._lock:
            self._wanted[query] = cores
            self._apply()

    def forget(self, query: str) -> bool:
        """Forget a query that has ended; tell whether it was the last. Its executors stay for the others."""
        with self._lock:
            self._wanted.pop(query, None)
            if self._wanted:
                self._apply()
            return not self._wanted

    def _apply(self) -> None:
        limit = executors(list(self._wanted.values()), self.unit)
        try:
            if limit != self._limit:
                self._spark.limit(limit)
                self._limit = limit
            if limit < _NO_LIMIT:
                self._release(limit)
        except Exception as error:  # a driver that is going; whoever looks next tries again
            _log.debug("cannot hold the application to %d executors: %s", limit, first_line(error))

    def _release(self, limit: int) -> None:
        (answer,) = self._api.get(["executors"])
        there = [e for e in parse_executors(answer) if not e.driver and self._spark.active(e.id)]
        leaving = surplus(there, limit)
        if leaving:
            _log.info("executors %s leave: the query's share is %d", ", ".join(leaving), limit)
            self._spark.decommission(leaving)


def executors(wanted: list[float | None], unit: int) -> int:
    """Return how many executors of ``unit`` cores the queries of one application may have together."""
    if any(cores is None for cores in wanted):
        return _NO_LIMIT
    return max(0, math.floor(sum(cores or 0.0 for cores in wanted) / unit + 1e-9))


def surplus(there: list[Executor], limit: int) -> list[str]:
    """Return which executors beyond ``limit`` leave: idle ones first, then those with the least to hand over,
    the youngest first."""
    order = sorted(there, key=lambda e: (e.tasks, e.shuffled, -int(e.id) if e.id.isdigit() else 0, e.id))
    return [e.id for e in order[: max(0, len(there) - limit)]]


def hold_of(context: Any, api: StatusApi, unit: int) -> ExecutorHold:
    """Return the hold of the application of ``context``; all queries in it share one."""
    with _lock:
        application = context.applicationId
        if application not in _holds:
            _holds[application] = ExecutorHold(_Spark(context), api, unit)
        return _holds[application]


def drop(application: str) -> None:
    """Forget the hold of an application that has ended."""
    with _lock:
        _holds.pop(application, None)
