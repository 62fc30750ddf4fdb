"""What a live job tells the scheduler: the parts of its goodput model, as plain values that JSON carries."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.speed.batch_size import BatchLimits, BatchSplit
from ebbflow.planners.training.speed.goodput import GoodputModel, GradientStatistics
from ebbflow.planners.training.speed.throughput import ThroughputParameters, throughput

_LIMITS = ("initial", "largest", "smallest_local", "largest_local")


@dataclass(frozen=True, slots=True)
class JobReport:
    """Pollux' report every 30 s (OSDI 2021, 4.1): θ_sys, the gradient's statistics and what the job may use."""

    limits: BatchLimits  # largest = initial where the batch is fixed
    statistics: GradientStatistics
    speed: ThroughputParameters | None  # None before anything was measured
    nodes: int  # that it holds
    gpus: int
    split: BatchSplit  # that it trains with
    max_gpus: int  # that it dares to use: no more than twice what it ever held
    measured_nodes: int = 0  # the most nodes that ``speed`` was measured on; 0: not said

    @property
    def model(self) -> GoodputModel | None:
        """Return the goodput that the job believes in: what a policy maximises. ``None`` before it is known."""
        return None if self.speed is None else GoodputModel(self.speed, self.statistics, self.limits)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values; ``throughput`` (examples/s), ``goodput`` and ``noise_scale`` are there to be read."""
        found: dict[str, Any] = {
            "limits": asdict(self.limits),
            "statistics": self.statistics._asdict(),
            "speed": None if self.speed is None else self.speed._asdict(),
            "nodes": self.nodes,
            "gpus": self.gpus,
            "split": self.split._asdict(),
            "max_gpus": self.max_gpus,
            "measured_nodes": self.measured_nodes,
            "batch": self.split.total(self.gpus),
            "noise_scale": self.statistics.noise_scale(self.limits.initial),
        }
        if self.speed is not None and self.model is not None:
            found["throughput"] = float(throughput(self.speed, self.nodes, self.gpus, *self.split))
            found["goodput"] = self.model.at(self.nodes, self.gpus, self.split)
        return found

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the report that ``to_dict`` gave. Raises ``OptionError`` for what is none."""
        try:
            return cls(
                BatchLimits(**{name: int(data["limits"][name]) for name in _LIMITS}),
                GradientStatistics(**data["statistics"]),
                None if data["speed"] is None else ThroughputParameters(**data["speed"]),
                int(data["nodes"]),
                int(data["gpus"]),
                BatchSplit(**data["split"]),
                int(data["max_gpus"]),
                int(data.get("measured_nodes", 0)),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise OptionError(f"not a job's report: {exc!r}") from exc
