"""What a run tells of its own speed: its cores, how long its stages took, and what costs are fitted to."""

from collections.abc import Sequence
from dataclasses import replace

from ebbflow.planners.model import Measured, Share
from ebbflow.planners.model.capacity import ARRIVAL
from ebbflow.planners.query.costs.cost import CostModel
from ebbflow.planners.query.costs.fitting import calibrate, pace, q_error
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.planners.query.plan.state import RunningStage
from ebbflow.planners.query.planner import QueryPlanner
from ebbflow.planners.query.running.progress import drift, mean_cores

_DEVIATION = 2.0  # actual / estimated rows beyond which plans are made anew (q-error)
_TELLING = (
    1.0  # seconds of tasks, expected or measured, below which a stage tells nothing: noise and fixed costs
)


class RunSpeed:
    """Keeps what has been seen; every ``now`` is in seconds since the Unix epoch, and never earlier than the last."""

    def __init__(self) -> None:
        self._cores: list[tuple[float, float]] = []  # since when there are how many that take tasks
        self._cold: list[tuple[float, float]] = []  # likewise cold ones
        self._came = 0.0  # when the newest share was seen
        self._ratios: list[float] = []  # of task seconds to those expected when stages began
        self.comparable: list[Measured] = []  # stages that took what they were planned for

    @property
    def error(self) -> float:
        """Return how many times longer than expected the next stage may take (``q_error``)."""
        return q_error(self._ratios)

    def seen(self, share: Share, now: float) -> None:
        """Note a share that there is from ``now`` on."""
        total = share.total.cores
        self._came = now
        self._cores = [(at, cores) for at, cores in self._cores if at <= now]
        self._cores.append((now, total - share.absent))
        if share.absent:
            self._cores.append((now + ARRIVAL, total))
        self.warmed(share, now)

    def warmed(self, share: Share, now: float) -> None:
        """Note how many cores of the newest share are cold still; no task meets one before it is there."""
        self._cold = [(at, cold) for at, cold in self._cold if at <= now]
        self._cold.append((now, max(share.cold - share.absent, 0.0)))
        if share.absent:
            self._cold.append((self._came + ARRIVAL, share.cold))

    def arrival(self, now: float) -> float:
        """Return the seconds until what was absent of the newest share takes tasks."""
        return max(self._came + ARRIVAL - now, 0.0)

    def finished(self, stage: Stage, measured: Measured) -> None:
        """Note what ``stage``, as it was expected when it began, took.

        It had the engine and the rows that it was planned with: what rows say is mended by planning with the actual
        ones, and is no error of times.
        """
        expected = stage.core_seconds - stage.waiting + stage.warm_up * measured.cold
        if expected > 0.0 and max(expected, measured.task_seconds) >= _TELLING:
            self._ratios.append(measured.task_seconds / expected)
            self.comparable.append(measured)

    def cold_since(self, since: float) -> float:
        """Return how many cores at most were cold at a time from ``since`` (s) on."""
        before = [cold for at, cold in self._cold if at <= since]
        return max([*before[-1:], *(cold for at, cold in self._cold if at > since)], default=0.0)

    def drift(self, running: Sequence[RunningStage], now: float) -> float:
        """Return how many times slower than expected ``running`` are."""
        since = min((r.started for r in running), default=now)
        cores = mean_cores(self._cores, since, now)
        slowest = max((r.stage.warm_up for r in running), default=0.0)
        return drift(running, cores, now, slowest * min(self.cold_since(since) / max(cores, 1.0), 1.0))


class RunCosts:
    """Keeps the costs of ``planner`` fitted to ``history``, stages of earlier runs at its place, and to this run."""

    def __init__(self, planner: QueryPlanner, history: Sequence[Measured]) -> None:
        self._planner = planner
        self._priors = (planner.model, *planner.rivals)
        self._history = tuple(history)
        if history:
            self.fit((), ())

    def fit(self, measured: Sequence[Measured], comparable: Sequence[Measured]) -> None:
        """Fit the costs to ``measured``, finished stages of this run, too, and then to how fast ``comparable`` ones
        were: those of earlier runs outweigh them in the fit."""
        models = [calibrate(prior, [*self._history, *measured]) for prior in self._priors]
        self._planner.model, self._planner.rivals = models[0], tuple(models[1:])
        self.slow(pace(self.by_engine, comparable))

    def slow(self, factor: float) -> None:
        """Make all that the planner expects take ``factor`` times as long."""
        self._planner.model = self._planner.model.slower(factor)
        self._planner.rivals = tuple(rival.slower(factor) for rival in self._planner.rivals)

    @property
    def by_engine(self) -> dict[str, CostModel]:
        """Return the costs of every way to run a stage."""
        return {model.engine: model for model in (self._planner.model, *self._planner.rivals)}

    def of(self, stage: Stage) -> CostModel:
        """Return the costs that a stage's times are from."""
        return self.by_engine.get(stage.engine, self._planner.model)

    @property
    def latency(self) -> float:
        """Return the seconds that the quickest way to run a stage takes beside its tasks."""
        return min(model.latency for model in self.by_engine.values())


def deviates(stage: Stage, rows: int) -> bool:
    """Tell whether a stage's ``rows`` are so far from those expected that plans are to be made anew."""
    estimate, actual = max(stage.rows, 1.0), max(float(rows), 1.0)
    return max(estimate / actual, actual / estimate) > _DEVIATION


def with_rows(measured: Measured, stage: Stage, rows: int) -> Measured:
    """Return ``measured``, of which the work is that expected of ``stage``, with the work of the ``rows`` it made: of
    writing them, and of its last join where nothing is aggregated after that."""
    work = measured.work
    joined = work.joined_rows
    if joined > 0.0 and not work.aggregated_rows:
        joined = max(joined + rows - stage.rows, 0.0)
    written = work.written_bytes * rows / max(stage.rows, 1.0)
    return replace(measured, work=replace(work, joined_rows=joined, written_bytes=written))
