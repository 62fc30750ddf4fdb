"""What a run measures of itself while it trains."""

from dataclasses import asdict, dataclass, field
from typing import Any

from ebbflow.infra.clock import Clock, SystemClock

REPORT_EVERY = 0.5  # seconds


@dataclass(frozen=True, slots=True)
class RunStatistics:
    """Figures of the last step, and rates since the last report."""

    step: int = 0  # optimizer steps of the whole run
    epoch: int = 0
    progress: float = 0.0  # iterations at the initial batch
    samples: int = 0  # used by complete steps
    skipped: int = 0  # steps ignored because the gradient was not finite
    loss: float = float("nan")  # mean over all examples of the step
    batch: int = 0  # examples of the step on all processes
    passes: int = 1  # accumulation passes of the step
    gpus: int = 1  # processes
    nodes: int = 1
    gain: float = 0.0  # iterations at the initial batch that the step was worth
    factor: float = 1.0  # on the learning rate
    learning_rate: float = 0.0  # of the first parameter group, without the factor
    noise_scale: float = 0.0  # examples
    step_seconds: float = 0.0  # of the last pass, with synchronization
    sync_seconds: float = 0.0  # of it, waiting for others
    throughput: float = 0.0  # examples/s
    goodput: float = 0.0  # examples/s at the initial batch that would have made the same progress
    stall_seconds: float = 0.0  # that the last checkpoint held training up
    compute_seconds: tuple[float, ...] = field(default=())  # of the last pass, by rank

    def to_json(self) -> dict[str, Any]:
        """Return plain values; a loss that is not a number becomes ``None``."""
        values = asdict(self)
        values["loss"] = self.loss if self.loss == self.loss else None
        return values


class Rates:
    """Examples and progress per second, over the time between reports."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._since: float | None = None
        self._samples = self._gained = 0.0
        self.throughput = self.progress_rate = 0.0

    def add(self, samples: float, gained: float, seconds: float) -> bool:
        """Count a step that took ``seconds``; return whether to report, with the rates recomputed.

        The first step is reported at once.
        """
        now = self._clock.now()
        begun = now - seconds if self._since is None else self._since
        self._samples += samples
        self._gained += gained
        if self._since is not None and now - begun < REPORT_EVERY:
            return False
        passed = max(now - begun, 1e-9)
        self.throughput, self.progress_rate = self._samples / passed, self._gained / passed
        self._since, self._samples, self._gained = now, 0.0, 0.0
        return True
