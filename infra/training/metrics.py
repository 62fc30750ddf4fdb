"""What a run measures of itself while it trains."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any, Self

from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.saving.data_order import Share

Tokens = int | Callable[[Any], float]
"""Tokens of each sample, or a function that returns those of a batch."""

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
    tokens: float = 0.0  # of an example, the mean while the rates were measured; 0: the script does not say
    stall_seconds: float = 0.0  # that the last checkpoint held training up
    compute_seconds: tuple[float, ...] = field(default=())  # of the last pass, by rank

    def to_json(self) -> dict[str, Any]:
        """Return plain values; a loss that is not a number becomes ``None``."""
        values = asdict(self)
        values["loss"] = self.loss if self.loss == self.loss else None
        return values


class TokenCount:
    """Counts the tokens of the batches that a process trains on in one step; ``of`` says what they are."""

    def __init__(self) -> None:
        self.of: Tokens | None = None
        self.step = 0.0

    def counting(self, tokens: Tokens | None) -> Self:
        """Let ``tokens`` say what the tokens of batches are from now on; ``None``: they are not counted."""
        self.of = tokens
        return self

    def read(self, batch: Any, share: Share, *, first: bool, part: float = 1.0) -> None:
        """Count ``part`` of a batch, the ``first`` of a step or not; one without examples of its own does not count.

        Raises ``OptionError`` for what cannot be a number of tokens.
        """
        if first:
            self.step = 0.0
        if self.of is None or not share.weight:
            return
        found = float(self.of(batch) if callable(self.of) else self.of * (share.stop - share.start))
        if not (isfinite(found) and found >= 0):
            raise OptionError(f"tokens of a batch must be a number >= 0; got {found}")
        self.step += part * found


class Rates:
    """Examples and progress per second, and tokens of an example, over the time between reports."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._since: float | None = None
        self._samples = self._gained = self._tokens = 0.0
        self.throughput = self.progress_rate = self.tokens = 0.0

    def add(self, samples: float, gained: float, seconds: float, tokens: float = 0.0) -> bool:
        """Count a step that took ``seconds``; return whether to report, with the rates recomputed.

        The first step is reported at once.
        """
        now = self._clock.now()
        begun = now - seconds if self._since is None else self._since
        self._samples += samples
        self._gained += gained
        self._tokens += tokens
        if self._since is not None and now - begun < REPORT_EVERY:
            return False
        passed = max(now - begun, 1e-9)
        self.throughput, self.progress_rate = self._samples / passed, self._gained / passed
        self.tokens = self._tokens / self._samples if self._samples else 0.0
        self._since, self._samples, self._gained, self._tokens = now, 0.0, 0.0, 0.0
        return True
