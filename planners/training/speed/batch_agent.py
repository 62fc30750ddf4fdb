"""What runs beside a job under Pollux: it learns the job's speed and chooses its batch (OSDI 2021, section 4.1)."""

from functools import lru_cache

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.scheduling import App
from ebbflow.planners.training.speed.batch_size import BatchLimits, BatchSplit, first_split, split
from ebbflow.planners.training.speed.goodput import GoodputModel, GradientStatistics
from ebbflow.planners.training.speed.throughput import (
    FirstMeasurements,
    Observation,
    Profile,
    ThroughputParameters,
    fit,
)


class GoodputAgent:
    """What one job knows of itself. Implements ``planners.model.scheduling.Agent``, simulated or live.

    ``fixed_total`` is for a job whose total batch its user wants kept, and ``most_gpus`` for one that must not grow
    beyond so many; its speed is learnt all the same. ``profile`` says which measurements count; by default the first
    of each configuration, which is enough where one is like another. A live job takes medians.
    """

    def __init__(
        self,
        limits: BatchLimits,
        fixed_total: int | None = None,
        most_gpus: int | None = None,
        profile: Profile | None = None,
    ) -> None:
        self.limits = limits
        self.fixed_total = fixed_total
        self.most_gpus = limits.most_gpus if most_gpus is None else min(most_gpus, limits.most_gpus)
        self._profile = FirstMeasurements() if profile is None else profile
        self._statistics: GradientStatistics | None = None
        self._model: GoodputModel | None = None
        self._splits: dict[tuple[bool, int], BatchSplit] = {}

    @property
    def adaptive(self) -> bool:
        """Return whether the batch follows what is learnt."""
        return self.fixed_total is None

    @property
    def observations(self) -> tuple[Observation, ...]:
        """Return what was measured, a configuration each, in the order in which they came up."""
        return self._profile.observations

    @property
    def model(self) -> GoodputModel | None:
        """Return the goodput that the job believes in; ``None`` before it ran."""
        if self._model is None and self._statistics is not None:
            self._model = GoodputModel(_fitted(self.observations), self._statistics, self.limits)
        return self._model

    def restore(self, statistics: GradientStatistics) -> None:
        """Take over the gradient's statistics of an earlier process; the profile is its measurements.

        Raises ``OptionError`` for an empty profile.
        """
        if not self.observations:
            raise OptionError("an agent restores statistics together with at least one observation; got none")
        self._statistics = statistics
        self._model = None
        self._splits.clear()

    def observe(
        self, nodes: int, gpus: int, local: int, passes: int, step: float, sync: float, sqr: float, var: float
    ) -> None:
        """Take note of a configuration that runs, and of the gradient's latest statistics.

        ``step`` is the seconds of a pass with synchronization, ``sync`` those of it that synchronization took.
        """
        statistics = GradientStatistics(sqr, var)
        new = self._profile.add(Observation(nodes, gpus, local, step, sync))
        if not new and statistics == self._statistics:
            return
        self._statistics = statistics
        self._model = None
        self._splits.clear()

    def split(self, nodes: int, gpus: int) -> BatchSplit:
        """Return the batch to train with on ``gpus`` GPUs of ``nodes`` nodes."""
        key = (nodes > 1, gpus)
        found = self._splits.get(key)
        if found is None:
            found = self._splits[key] = self._choose(nodes, gpus)
        return found

    def report(self, app: App) -> None:
        """Set on ``app`` the goodput that the job believes in and how many GPUs it can use."""
        app.goodput = self.model
        app.min_gpus = 1
        app.max_gpus = self.most_gpus

    def _choose(self, nodes: int, gpus: int) -> BatchSplit:
        if self.fixed_total is not None:
            return split(self.fixed_total, gpus, self.limits)
        if self.model is None:
            return first_split(gpus, self.limits)
        return self.model.best_split(nodes, gpus)[1]


@lru_cache(maxsize=4096)
def _fitted(observations: tuple[Observation, ...]) -> ThroughputParameters:
    """Return the fit; jobs of one application often pass through the same configurations."""
    return fit(observations)
