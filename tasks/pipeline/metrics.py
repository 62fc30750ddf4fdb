"""What a pipeline tells Prometheus of its steps and its cluster, where it was asked to (``--metrics``)."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import TYPE_CHECKING

from ebbflow.infra.clock import Clock
from ebbflow.infra.ledger import Ledger
from ebbflow.infra.machine.metrics_server import metric, serving
from ebbflow.infra.machine.page_server import PageServer
from ebbflow.tasks.capacity.metrics import ClusterMetrics
from ebbflow.tasks.pipeline.outcome import ENDED, StepOutcome

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Steps = Callable[[], tuple[StepOutcome, ...]]


class PipelineMetrics:
    """Where the steps of a run stand. May be asked in any thread."""

    def __init__(self, run: str, steps: Steps, clock: Clock) -> None:
        self._run, self._steps, self._clock = run, steps, clock
        self._began = clock.now()

    def metrics(self) -> Iterator["Metric"]:
        """Yield the run's metrics; each has the label ``pipeline``."""
        steps, own, now = self._steps(), (self._run,), self._clock.now()
        text = "Time since this process began the run or resumed it."
        yield metric("pipeline_seconds", text, ["pipeline"], {own: now - self._began})
        text = "Steps by kind and state: waiting, running, finished, stopped, failed, skipped."
        states = Counter((*own, one.kind, one.state) for one in steps)
        yield metric("pipeline_steps", text, ["pipeline", "kind", "state"], states)
        labels = ["pipeline", "step", "kind", "team"]
        keys = {one.name: (*own, one.name, one.kind, one.team) for one in steps}
        attempts = {keys[one.name]: one.attempts for one in steps}
        text = "Attempts at a step that were begun."
        yield metric("pipeline_step_attempts", text, labels, attempts, "counter")
        text = "Time since a step began, until it ended."
        took = {
            keys[one.name]: None if one.began is None else (one.ended or now) - one.began for one in steps
        }
        yield metric("pipeline_step_seconds", text, labels, took)
        text = "Time until a step's deadline; negative once it is over."
        left = {
            keys[one.name]: one.deadline - now
            for one in steps
            if one.deadline is not None and one.state not in ENDED
        }
        yield metric("pipeline_step_deadline_seconds", text, labels, left)


@contextmanager
def serving_pipeline(
    address: str, run: str, steps: Steps, ledger: Ledger, clock: Clock
) -> Iterator[PageServer | None]:
    """Serve ``/metrics`` and ``/healthz`` of a pipeline and of its cluster meanwhile; nothing without an address.

    Args:
        address: see ``address_of``; "": none.
        run: ID of the run.
        steps: returns where its steps stand; called in any thread.
        ledger: of its cluster.
        clock: the time.

    Raises ``OptionError`` for an address that is none, and ``InfraError`` for a port that is taken.
    """
    own = PipelineMetrics(run, steps, clock)
    with ClusterMetrics(lambda: nullcontext(ledger)) as cluster:

        def look() -> tuple[Iterator["Metric"], str]:
            found, why = cluster.look()
            return chain(own.metrics(), found), why

        with serving(address, look) as server:
            yield server
