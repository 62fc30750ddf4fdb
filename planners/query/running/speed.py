"""What a run tells of its own speed: the cores that it has had, and how long its stages took."""

from collections.abc import Sequence

from ebbflow.planners.model import Measured, Share
from ebbflow.planners.model.capacity import ARRIVAL
from ebbflow.planners.query.costs.fitting import q_error
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.planners.query.plan.state import RunningStage
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


def deviates(stage: Stage, rows: int) -> bool:
    """Tell whether a stage's ``rows`` are so far from those expected that plans are to be made anew."""
    estimate, actual = max(stage.rows, 1.0), max(float(rows), 1.0)
    return max(estimate / actual, actual / estimate) > _DEVIATION
