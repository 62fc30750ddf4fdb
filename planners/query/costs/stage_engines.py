"""Which of Spark's two ways of running a stage it takes: Spark SQL, or tasks of DuckDB's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ebbflow.planners.model import Measured, Work
from ebbflow.planners.query.costs.cost import NATIVE, SPARK, CostModel
from ebbflow.planners.query.costs.fitting import calibrate

StageEngineName = Literal["spark", "native", "auto"]


@dataclass(frozen=True, slots=True)
class StageEngineChoice:
    """How a stage is to run, and why."""

    native: bool
    reason: str


class StageEngines:
    """Chooses per stage.

    Args:
        asked: ``spark``, ``native`` (each stage that can be), or ``auto`` (each that costs less so).
        history: of finished stages, which the costs of both are fitted to.
    """

    def __init__(self, asked: StageEngineName, history: Sequence[Measured] = ()) -> None:
        self._asked = asked
        self._spark: CostModel = calibrate(SPARK, history)
        self._native: CostModel = calibrate(NATIVE, history)

    def choose(self, work: Work, cores: float, planned: str = "", reason: str = "") -> StageEngineChoice:
        """Return how a stage of this ``work`` is to run on ``cores``.

        ``planned`` is the engine that its plan was costed by, for ``reason``; empty: the plan says nothing.
        """
        if self._asked != "auto":
            return StageEngineChoice(self._asked == "native", f"--stages {self._asked}")
        if planned:
            return StageEngineChoice(planned == "native", reason)
        spark, native = (
            model.latency + model.core_seconds(work) / max(cores, 1.0)
            for model in (self._spark, self._native)
        )
        words = f"{native:.2g} s natively, {spark:.2g} s by Spark SQL expected"
        return StageEngineChoice(native < spark, words)
