"""Chooses the batch of a live job by predicted goodput (Pollux, OSDI 2021, 4.1), and reports it to the scheduler.

Runs in one process of the job, beside training; what it decides is the same for all.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from ebbflow.planners.errors import OptionError
from ebbflow.planners.training.speed.batch_agent import GoodputAgent
from ebbflow.planners.training.speed.batch_size import BatchLimits, BatchSplit, first_split
from ebbflow.planners.training.speed.goodput import GoodputModel, GradientStatistics
from ebbflow.planners.training.speed.job_report import JobReport
from ebbflow.planners.training.speed.throughput import MedianMeasurements, Observation

EVERY = 30.0  # seconds between two checks of the batch
IMPROVEMENT = 1.05  # of predicted goodput: less is not worth a change
LEAST_STEPS = 16  # seen before the first change: the averages of fewer say little
GROWTH = 2  # times the most GPUs ever held: how far beyond them a job asks for

Placement = tuple[int, int]  # nodes, GPUs


class BatchTuner:
    """The batch of one job on whatever it holds, from measured steps and the gradient's statistics.

    The total never falls below ``limits.initial``. ``adaptive`` false keeps it there. ``clock`` gives seconds.

    Raises ``OptionError``.
    """

    def __init__(
        self,
        limits: BatchLimits,
        *,
        adaptive: bool = True,
        every: float = EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if not every >= 0:
            raise OptionError(f"seconds between two checks of the batch must be >= 0; got {every}")
        self.limits = limits
        self.adaptive = adaptive
        self._profile = MedianMeasurements()
        self._agent = GoodputAgent(
            limits, fixed_total=None if adaptive else limits.initial, profile=self._profile
        )
        self._statistics = GradientStatistics(1.0, 0.0)
        self._every = every
        self._clock = clock
        self._looked = clock()
        self._steps = 0
        self._most_held = 1
        self._placement: Placement | None = None
        self._split: BatchSplit | None = None
        self._model: GoodputModel | None = None  # as of the last look: a fit takes its time
        self._reported: float | None = None

    def observe(
        self,
        nodes: int,
        gpus: int,
        split: BatchSplit,
        step: float,
        sync: float,
        statistics: GradientStatistics,
    ) -> None:
        """Take note of a step whose last pass took ``step`` seconds, ``sync`` of them for synchronization.

        The first steps after a change should be ignored: they pay for caches, buffers and compilation. Raises
        ``OptionError`` for times outside 0 <= sync < step.
        """
        self._statistics = statistics
        self._most_held = max(self._most_held, gpus)
        self._steps += 1
        self._agent.observe(nodes, gpus, split.batch, split.accumulation, step, sync, *statistics)

    def split(self, nodes: int, gpus: int) -> BatchSplit:
        """Return the batch to train with from now on; another one than before at most every 30 s.

        On another number of GPUs or nodes the best known batch is taken at once. A restart does not begin the 30 s
        from scratch. Raises ``OptionError`` where
        ``limits.largest`` leaves a GPU without work.
        """
        moved = self._placement is not None and self._placement != (nodes, gpus)
        now = self._clock()
        if self._split is None or self._placement is None or moved:
            self._placement = (nodes, gpus)
            self._split = self._best(nodes, gpus)
            self._looked = now
        elif now - self._looked >= self._every and self._steps >= LEAST_STEPS:
            self._looked = now
            best, model = self._best(nodes, gpus), self._agent.model
            if (
                model
                and self.adaptive
                and model.at(nodes, gpus, best) > IMPROVEMENT * model.at(nodes, gpus, self._split)
            ):
                self._split = best
            self._model = model
        return self._split

    def adopt(self, nodes: int, gpus: int, split: BatchSplit) -> None:
        """Take over what the tuner of another process chose."""
        self._placement, self._split = (nodes, gpus), split

    @property
    def total(self) -> int | None:
        """Return the examples of a step as it was chosen last, also by an earlier process; ``None`` before."""
        if not self.adaptive:
            return self.limits.initial
        if self._placement is None or self._split is None:
            return None
        return self._split.total(self._placement[1])

    def news(self) -> JobReport | None:
        """Return the report to the scheduler where one is due: every 30 s, once enough steps were measured."""
        now = self._clock()
        early = self._reported is not None and now - self._reported < self._every
        if early or self._steps < LEAST_STEPS:
            return None
        self._reported = now
        if not self.adaptive:  # the batch is not tuned
            self._model = self._agent.model
        return self.report()

    def report(self) -> JobReport:
        """Return what the scheduler wants to know, as of the last look, or of now where there was none.

        Raises ``OptionError`` before the first ``split``.
        """
        if self._placement is None or self._split is None:
            raise OptionError("a job reports when it has a batch")
        nodes, gpus = self._placement
        limits = self.limits if self.adaptive else replace(self.limits, largest=self.limits.initial)
        self._model = model = self._model or self._agent.model
        return JobReport(
            limits,
            self._statistics,
            None if model is None else model.speed,
            nodes,
            gpus,
            self._split,
            max(1, min(limits.most_gpus, GROWTH * self._most_held)),
            max((one.nodes for one in self._agent.observations), default=0),
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the profile, the statistics and the batch, as plain values."""
        return {
            "observations": [list(o) for o in self._agent.observations],
            "statistics": list(self._statistics),
            "steps": self._steps,
            "since_look": self._clock() - self._looked,
            "most_held": self._most_held,
            "placement": None if self._placement is None else list(self._placement),
            "split": None if self._split is None else list(self._split),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what an earlier process knew; its batch is kept only on the same nodes and GPUs."""
        self._profile.restore(
            Observation(int(n), int(k), int(m), *times) for n, k, m, *times in state["observations"]
        )
        self._statistics = GradientStatistics(*state["statistics"])
        if state["observations"]:
            self._agent.restore(self._statistics)
        self._steps = int(state["steps"])
        self._looked = self._clock() - float(state["since_look"])
        self._most_held = int(state["most_held"])
        if state["placement"] is not None and state["split"] is not None:
            nodes, gpus = state["placement"]
            self._placement, self._split = (int(nodes), int(gpus)), BatchSplit(*map(int, state["split"]))

    def _best(self, nodes: int, gpus: int) -> BatchSplit:
        known = self._steps >= LEAST_STEPS or not self.adaptive
        found = self._agent.split(nodes, gpus) if known else first_split(gpus, self.limits)
        if found.total(gpus) >= self.limits.initial:
            return found
        # cut to the largest total, which K GPUs cannot share evenly; the learning rate was made for M0 at the least
        return BatchSplit(ceil(self.limits.initial / gpus / (found.accumulation + 1)), found.accumulation)
