"""How an elastic job is run, and what it says about itself."""

from dataclasses import dataclass
from typing import Any, Literal

from ebbflow.infra.elastic.application import Application
from ebbflow.infra.elastic.registry import register
from ebbflow.infra.elastic.wire import codec
from ebbflow.infra.errors import ElasticError
from ebbflow.planners.errors import OptionError


@dataclass(frozen=True, slots=True)
class Settings:
    """How a job is run."""

    snapshot_every: float | None = 30.0  # seconds; None: never, a loss then starts from the beginning
    recovery: Literal["global", "partial"] = "global"
    running_every: float = 1.0  # seconds between refreshes of the running checkpoint, for partial recovery
    running_fraction: float = 0.125  # of the parameters' bytes in each refresh
    flush_every: float = 0.1  # seconds that a result waits at most for its worker to run out of tasks
    input_transfer: Literal["auto", "send", "reload"] = (
        "auto"  # auto: a leaving worker does not send its input
    )
    max_losses: int = 20  # of workers, before the job gives up
    keep: int = 2  # snapshots

    def __post_init__(self) -> None:
        rules = {
            "snapshot_every": self.snapshot_every is None or self.snapshot_every > 0,
            "running_every": self.running_every > 0,
            "running_fraction": 0 < self.running_fraction <= 1,
            "flush_every": self.flush_every >= 0,
            "max_losses": self.max_losses >= 0,
            "keep": self.keep >= 1,
            "recovery": self.recovery in {"global", "partial"},
            "input_transfer": self.input_transfer in {"auto", "send", "reload"},
        }
        for name, holds in rules.items():
            if not holds:
                raise OptionError(f"{name} is outside its rule; got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to the job."""

    time: float  # seconds, of the job's clock
    # joined, started, rebalanced, left, lost, restored, patched, snapshot, snapshot failed, long task, finished
    kind: str
    details: dict[str, Any]


def check(application: Application, workers: int, settings: Settings) -> None:
    """Raise ``OptionError`` for an application that cannot run so."""
    if workers < 1:
        raise OptionError(f"workers must be >= 1; got {workers}")
    if application.executors < 1 or application.shards < 1:
        raise OptionError(
            f"executors and shards must be >= 1; got {application.executors} and {application.shards}"
        )
    name = type(application).__name__
    if type(application).__module__ == "__main__":
        raise OptionError(
            f"{name} is defined in the script that runs; workers import it, so move it to a module"
        )
    if "<locals>" in type(application).__qualname__:
        raise OptionError(
            f"{name} is defined in a function; workers import it, so move it to the module's level"
        )
    try:
        codec.encode(register(type(application)) and application)
    except ElasticError as error:
        raise OptionError(f"{name} cannot be sent to workers: {error}") from error
    if settings.recovery == "partial" and not application.tolerant:
        raise OptionError(
            f"partial recovery mixes old and new parameters, which {name} does not allow (tolerant is False)"
        )
