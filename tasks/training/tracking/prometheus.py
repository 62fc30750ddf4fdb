"""What a training tells Prometheus while it runs, where it was asked to (``--metrics``)."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ebbflow.infra.clock import Clock
from ebbflow.infra.machine.metrics_server import metric, serving
from ebbflow.infra.machine.page_server import PageServer
from ebbflow.tasks.training.listening import NullTrainingListener
from ebbflow.tasks.training.report import EventReport, PointReport
from ebbflow.tasks.training.request import TrainingRequest

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_SILENT = (
    300.0  # s without a step after which a run does not count as healthy, where none is known to be slower
)
_GAUGES = {
    "gpus": ("gpus", "GPUs that the run trains on."),
    "nodes": ("nodes", "Nodes that it trains on."),
    "batch": ("batch_examples", "Examples of a step."),
    "step": ("step", "Optimizer steps of the whole run; falls when steps are lost."),
    "epoch": ("epoch", "Epoch under way."),
    "loss": ("loss", "Mean loss over the examples of the last step."),
    "throughput": ("examples_per_second", "Throughput."),
    "goodput": ("goodput_examples_per_second", "Examples at the initial batch worth as much, per second."),
    "noise_scale": ("noise_scale_examples", "Gradient noise scale."),
    "step_seconds": ("step_seconds", "Duration of the last pass."),
    "sync_seconds": ("sync_seconds", "Of it, waiting for other processes."),
    "learning_rate": ("learning_rate", "Learning rate of the first group of parameters."),
}  # of a point -> metric
_COUNTERS = {
    "lost_steps": ("lost_steps", "Steps done twice, after losses."),
    "skipped": ("skipped_steps", "Steps ignored because the gradient was not finite."),
    "dollars": ("dollars", "Price of its nodes so far."),
}


class RunMetrics(NullTrainingListener):
    """Keeps what was told last. A listener; safe for several threads."""

    def __init__(self, request: TrainingRequest, clock: Clock) -> None:
        self._own = (request.run_id,)
        self._clock = clock
        self._lock = threading.Lock()
        self._point: PointReport | None = None
        self._stepped = clock.now()
        self._steps = 0  # done, those included that were lost and done again
        self._events: Counter[tuple[str, ...]] = Counter()
        self._reported: dict[tuple[str, ...], float] = {}

    def point(self, point: PointReport) -> None:
        with self._lock:
            if self._point is None or point.step != self._point.step:
                self._stepped = self._clock.now()
            self._point = point
            self._steps = max(self._steps, point.step + point.lost_steps)

    def metrics(self, step: int, epoch: int, values: Mapping[str, float]) -> None:
        with self._lock:
            self._reported |= {(*self._own, name): value for name, value in values.items()}

    def event(self, event: EventReport) -> None:
        with self._lock:
            self._events[(*self._own, event.kind)] += 1

    def look(self) -> tuple[Iterator["Metric"], str]:
        """Return the run's metrics, and why it is not healthy; empty where it is."""
        with self._lock:
            point, events, reported = self._point, dict(self._events), dict(self._reported)
            steps, silent = self._steps, self._clock.now() - self._stepped
        usual = max(_SILENT, 10 * point.step_seconds if point is not None else 0.0)
        why = f"no step has ended for {silent:.0f} s" if silent > usual else ""
        return self._metrics(point, steps, silent, events, reported), why

    def _metrics(
        self,
        point: PointReport | None,
        steps: int,
        silent: float,
        events: Mapping[tuple[str, ...], float],
        reported: Mapping[tuple[str, ...], float],
    ) -> Iterator["Metric"]:
        text = "Time since the last step that was told of, or since the run began."
        yield metric("run_step_age_seconds", text, ["run"], {self._own: silent})
        text = "Events of the run: generations, nodes that were lost, ..."
        yield metric("run_events", text, ["run", "kind"], events, "counter")
        yield metric("run_metric", "What the script reported last.", ["run", "name"], reported)
        if point is None:
            return
        for field, (name, text) in _GAUGES.items():
            yield metric(f"run_{name}", text, ["run"], {self._own: getattr(point, field)})
        text = "Optimizer steps done, those done twice included."
        yield metric("run_steps", text, ["run"], {self._own: steps}, "counter")
        for field, (name, text) in _COUNTERS.items():
            yield metric(f"run_{name}", text, ["run"], {self._own: getattr(point, field)}, "counter")
        if point.tokens:
            rows = {self._own: point.throughput * point.tokens}
            yield metric("run_tokens_per_second", "Throughput in tokens.", ["run"], rows)
            rows = {self._own: point.goodput * point.tokens}
            yield metric("run_goodput_tokens_per_second", "Goodput in tokens.", ["run"], rows)


@contextmanager
def serving_run(metrics: RunMetrics, address: str) -> Iterator[PageServer | None]:
    """Serve ``/metrics`` and ``/healthz`` of a run meanwhile. Raises ``OptionError`` and ``InfraError``."""
    with serving(address, metrics.look) as server:
        yield server
