"""Telling a running Spark driver which of its executors are gone.

A machine that vanishes closes no connection. Spark counts on its executors until their heartbeats have been missing
for ``spark.network.timeout``, 120 s, and every task on them is waited for that long; who provides the machines knows
it at once. An executor that is told to be gone loses its tasks, which run again elsewhere and count as nobody's
failures, and what was written for others on its host counts as lost.
"""

import logging
from collections.abc import Iterable
from typing import Any

from ebbflow.infra.spark.failures import first_line
from ebbflow.infra.spark.master_api import Executor

_log = logging.getLogger(__name__)


class LostExecutors:
    """Tells the driver of ``context`` of executors that are gone, each once."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._told: set[str] = set()

    def tell(self, executors: Iterable[Executor]) -> None:
        """Have the driver remove ``executors``. Raises nothing: it finds out by itself, though later."""
        new = [one for one in executors if one.id not in self._told]
        if not new:
            return
        try:
            backend, jvm = self._context._jsc.sc().schedulerBackend(), self._context._jvm
            for one in new:
                reason = jvm.org.apache.spark.scheduler.ExecutorProcessLost(
                    "its machine is gone", jvm.scala.Option.apply(one.host), False
                )
                backend.removeExecutor(one.id, reason)
                self._told.add(one.id)
        except Exception as error:  # a driver that is going, or a scheduler without executors
            _log.debug("the driver was not told of lost executors: %s", first_line(error))
        else:
            _log.info("executors %s are gone with their machines", ", ".join(one.id for one in new))
