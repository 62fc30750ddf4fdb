"""What the agent on a node tells Prometheus, where it was asked to (``--metrics``)."""

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

from ebbflow.infra.clock import Clock
from ebbflow.infra.machine.metrics_server import metric, serving
from ebbflow.planners.errors import EbbflowError

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_SILENT = 30.0  # s without a look after which the agent does not count as healthy


log = logging.getLogger("ebbflow.agent")


class Departure(Protocol):
    """When the node will be gone."""

    @property
    def deadline(self) -> float:
        """Return the time, seconds since the Unix epoch."""
        ...


class Looking(Protocol):
    """An agent that looks for notices."""

    @property
    def leaving(self) -> Departure | None:
        """Return why and when the node will be gone; ``None``: it stays."""
        ...

    def step(self) -> None:
        """Look once."""
        ...


class AgentMetrics:
    """Counts the looks of an agent. ``look`` may be called in any thread."""

    def __init__(self, agent: Looking, clock: Clock) -> None:
        self._agent, self._clock = agent, clock
        self._lock = threading.Lock()
        self._looks = self._failures = 0
        self._looked = clock.now()

    def step(self) -> None:
        """Let the agent look once. Raises what it raises."""
        try:
            self._agent.step()
        except Exception:
            with self._lock:
                self._failures += 1
            raise
        with self._lock:
            self._looks += 1
            self._looked = self._clock.now()

    def look(self) -> tuple[Iterator["Metric"], str]:
        """Return the agent's metrics, and why it is not healthy; empty where it is."""
        now = self._clock.now()
        with self._lock:
            looks, failures, silent = self._looks, self._failures, now - self._looked
        why = f"the agent has not looked for {silent:.0f} s" if silent > _SILENT else ""
        leaving = self._agent.leaving
        left = None if leaving is None else max(leaving.deadline - now, 0.0)
        return self._metrics(looks, failures, silent, left), why

    def _metrics(self, looks: int, failures: int, silent: float, left: float | None) -> Iterator["Metric"]:
        yield metric("node_looks", "Looks for notices.", [], {(): looks}, "counter")
        yield metric("node_look_failures", "Looks that failed.", [], {(): failures}, "counter")
        yield metric("node_look_age_seconds", "Time since the last look.", [], {(): silent})
        yield metric("node_draining", "1 once the node is about to leave.", [], {(): float(left is not None)})
        yield metric("node_seconds_left", "Time until it will be gone.", [], {(): left})


@contextmanager
def serving_agent(agent: AgentMetrics, address: str) -> Iterator[None]:
    """Serve ``/metrics`` and ``/healthz`` of an agent meanwhile, see ``serving``.

    Where that cannot be, it is logged: an agent that does not look for notices costs work, one without metrics none.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(serving(address, agent.look))
        except EbbflowError as error:
            log.error("metrics are not served: %s", error)
        yield
