"""What a tuning run found, and its JSON form."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ebbflow.tasks.drawing.codec import to_text

FORMAT = 3

TrialEnd = Literal["complete", "pruned", "failed", "stopped"]
TuningEnd = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class TrialReport:
    """One trial."""

    number: int
    run: str  # id of its training, in the tuning run's directory
    parameters: Mapping[str, Any]
    state: TrialEnd
    value: float | None  # the metric, as last reported
    epochs: int = 0
    steps: int = 0
    seconds: float = 0.0
    gpu_seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ResizeReport:
    """Other GPUs for a trial that ran."""

    at: float  # s since the tuning run began
    run: str
    before: int  # GPUs
    after: int
    reason: str


@dataclass(frozen=True)
class TuningReport:
    """One tuning run, as far as one process saw it; trials that ended before are listed as the study has them."""

    id: str
    directory: str
    metric: str
    maximize: bool
    state: TuningEnd
    reason: str
    started: float  # seconds since the Unix epoch
    seconds: float
    trials: tuple[TrialReport, ...] = ()
    best: TrialReport | None = None
    gpu_seconds: float = 0.0
    remaining_work: tuple[Mapping[str, float], ...] = field(default=())  # over time
    resizes: tuple["ResizeReport", ...] = ()  # of trials that ran, as far as GPUs move to the promising

    def to_json(self) -> str:
        """Return the report as JSON text; infinite and undefined numbers are ``null``."""
        return to_text(self, FORMAT)
