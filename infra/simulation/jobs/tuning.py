"""Hyper-parameter apps under a GPU scheduler: gangs placed job by job, pauses on changed GPUs, beliefs for bids.

Themis (NSDI 2020), sections 3 to 5 and 8. A tuner moves GPUs among the jobs of a phase so that all of them end
together, as far as their own limits allow; it packs gangs, first on single nodes, then in racks, then anywhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil, inf

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.jobs.plain import Locality
from ebbflow.infra.simulation.traces.workloads import Job
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.scheduling import App, Bidder, Placement

CHECKPOINT = 7.5  # s, mean of the testbed (NSDI 2020, section 6.2.3)
CONTAINER = 35.0  # s to change a container, median of the same


@dataclass(frozen=True, slots=True)
class Pause:
    """What a changed set of GPUs costs, s: a checkpoint of what ran before, then new containers."""

    checkpoint: float = CHECKPOINT
    container: float = CONTAINER
    whole: bool = False  # the whole app waits, not only the jobs whose GPUs changed

    def __post_init__(self) -> None:
        if not (0 <= self.checkpoint < inf and 0 <= self.container < inf):
            raise OptionError(f"pauses must be >= 0 s, finite; got {self.checkpoint}, {self.container}")


NO_PAUSE = Pause(0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Stage:
    """A phase: jobs that run side by side, each on up to ``tasks`` GPUs."""

    work: float  # GPU-s of all jobs, without slowdown
    longest: float  # GPU-s of the longest job
    jobs: int = 1
    tasks: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.longest <= self.work < inf and self.jobs >= 1 and self.tasks >= 1):
            raise WorkloadError(
                "a phase needs 0 <= longest <= work GPU-s, finite, and at least one job and task;"
                f" got {self.longest}, {self.work}, {self.jobs}, {self.tasks}"
            )

    @property
    def demand(self) -> int:
        """Return the most GPUs that make it any shorter: all jobs' gangs, fewer if one job outlasts the others."""
        if not self.longest:
            return 1
        return max(1, min(self.jobs * self.tasks, ceil(self.tasks * self.work / self.longest - 1e-9)))

    def seconds(self, gpus: int) -> float:
        """Return the time on ``gpus`` well-placed GPUs; infinite without any."""
        if gpus < 1:
            return inf
        return max(self.work / min(gpus, self.jobs * self.tasks), self.longest / min(gpus, self.tasks))

    def scaled(self, factor: float) -> "Stage":
        """Return the phase with ``factor`` times the work."""
        return Stage(self.work * factor, self.longest * factor, self.jobs, self.tasks)


@dataclass(frozen=True, slots=True)
class Tuning:
    """One app: how it truly goes, and how its tuner forecasts phases that have not begun."""

    stages: tuple[Stage, ...]
    locality: Locality = field(default_factory=Locality)
    forecast: tuple[Stage, ...] = ()  # one for each of `stages`; empty: as it truly goes
    band: float = 1.0  # longest curve within the error band over the true one at the start of a phase

    def __post_init__(self) -> None:
        if not self.stages:
            raise WorkloadError("an app needs at least one phase")
        if self.forecast and len(self.forecast) != len(self.stages):
            raise WorkloadError(f"{len(self.stages)} phases need as many forecasts; got {len(self.forecast)}")
        if not self.band >= 1:
            raise OptionError(f"the band must be >= 1; got {self.band}")

    @property
    def work(self) -> float:
        """Return the budget B, GPU-s."""
        return sum(stage.work for stage in self.stages)

    @property
    def demand(self) -> int:
        """Return the most GPUs that make any phase shorter: app_demand_max."""
        return max(stage.demand for stage in self.stages)

    def scaled(self, factor: float) -> "Tuning":
        """Return the app with ``factor`` times the work."""
        stages, forecast = ([s.scaled(factor) for s in part] for part in (self.stages, self.forecast))
        return Tuning(tuple(stages), self.locality, tuple(forecast), self.band)


class _Speed:
    """The believed speed of an app: one unit of what remains is one GPU-second of work."""

    __slots__ = ("_model",)

    def __init__(self, model: "TunedApp") -> None:
        self._model = model

    def iteration_time(self, gpus: int) -> float:
        """Return seconds per GPU-second of work that is left, on ``gpus`` well-placed GPUs."""
        left = self._model.remaining_stages()
        work = sum(stage.work for stage in left)
        return sum(stage.seconds(gpus) for stage in left) / work if work else 1.0 / gpus


def gang_rates(
    placement: Placement, nodes: Mapping[str, Node], tasks: int, jobs: int, locality: Locality
) -> list[float]:
    """Return the speed of each gang that the placement holds, in GPUs without slowdown, the fastest first.

    Whole gangs of ``tasks`` GPUs are cut out of single nodes, then of single racks, then out of what is left; fewer
    GPUs than a gang at the end run one more job. At most ``jobs`` gangs can be used.
    """
    rates: list[float] = []
    rest: dict[str, list[tuple[str, int]]] = {}
    for node, gpus in placement:
        whole, left = divmod(gpus, tasks)
        rates += [tasks / locality.node] * whole
        if left:
            rest.setdefault(nodes[node].rack, []).append((node, left))
    spread: list[tuple[str, str, int]] = []
    for rack, parts in rest.items():
        parts.sort(key=lambda part: (-part[1], part[0]))
        whole = sum(left for _, left in parts) // tasks
        rates += [tasks / locality.rack] * whole
        spread += [(rack, node, left) for node, left in _after(parts, whole * tasks)]
    whole = sum(left for _, _, left in spread) // tasks
    rates += [tasks / locality.cluster] * whole
    parts = [(f"{rack}/{node}", left) for rack, node, left in sorted(spread, key=lambda s: (-s[2], s[1]))]
    last = _after(parts, whole * tasks)
    if last:
        racks = {name.rpartition("/")[0] for name, _ in last}
        slow = locality.node if len(last) == 1 else locality.rack if len(racks) == 1 else locality.cluster
        rates.append(sum(left for _, left in last) / slow)
    return sorted(rates, reverse=True)[:jobs]


def _after(parts: list[tuple[str, int]], gpus: int) -> list[tuple[str, int]]:
    """Return what is left of ``parts`` once ``gpus`` are taken from the front."""
    left = []
    for node, count in parts:
        taken = min(count, gpus)
        gpus -= taken
        if count > taken:
            left.append((node, count - taken))
    return left


class TunedApp:
    """True progress of one app. ``cluster_gpus`` is R_C of its time alone (NSDI 2020, equation 2)."""

    __slots__ = (
        "_before",
        "_done",
        "_during",
        "_gpus",
        "_nodes",
        "_paused",
        "_placement",
        "_rates",
        "_saved",
        "_speed",
        "bidder",
        "cluster_gpus",
        "done",
        "pause",
        "phase",
        "steady",
        "tuning",
    )

    def __init__(self, tuning: Tuning, cluster_gpus: int, pause: Pause = NO_PAUSE) -> None:
        self.tuning, self.cluster_gpus, self.pause = tuning, cluster_gpus, pause
        self.bidder: Bidder | None = None
        self.phase, self._done = 0, 0.0  # and the share of it that is done
        self._saved = (0, 0.0)
        self._placement: Placement = ()
        self._nodes: Mapping[str, Node] = {}
        self._before: dict[str, int] = {}  # GPUs that jobs run on, pauses over
        self._during: list[float] = []  # speeds while some jobs pause
        self._rates: list[float] = []
        self._paused = 0.0  # s left
        self._gpus = 0
        self._speed = _Speed(self)
        self.done = False
        self.steady = False  # up to the end of a phase only

    @property
    def stage(self) -> Stage:
        """Return the present phase."""
        return self.tuning.stages[self.phase]

    def place(self, placement: Placement, nodes: Mapping[str, Node]) -> None:
        """Continue with ``placement``; jobs whose GPUs changed pause first."""
        self._nodes = nodes
        self._gpus = sum(gpus for _, gpus in placement)
        if not placement:
            self._placement = ()
            return
        ran, now = self._before, dict(placement)
        kept = tuple((node, min(gpus, ran[node])) for node, gpus in placement if node in ran)
        alone = self.stage.jobs == 1
        if (alone or self.pause.whole) and ran != now:
            kept = ()
        grown = sum(gpus for _, gpus in kept) < self._gpus
        pause = self.pause.container + (self.pause.checkpoint if ran else 0.0)
        self._paused = pause if grown else 0.0
        self._before = dict(kept) if self._paused else now
        self._placement = placement
        self._cut(kept)

    def _cut(self, during: Placement) -> None:
        stage, locality = self.stage, self.tuning.locality
        self._rates = gang_rates(self._placement, self._nodes, stage.tasks, stage.jobs, locality)
        self._during = []
        if self._paused:
            self._during = gang_rates(during, self._nodes, stage.tasks, stage.jobs, locality)

    def _seconds(self, rates: list[float]) -> float:
        """Return the time that the whole present phase takes at these speeds."""
        if not rates:
            return inf
        return max(self.stage.work / sum(rates), self.stage.longest / rates[0])

    def advance(self, seconds: float, interference: float = 0.0) -> float:
        """Work from phase to phase, through the pause first."""
        if not self._placement or self.done:
            return 0.0
        left = seconds
        while left > 0 and not self.done:
            paused = self._paused > 0
            phase = self._seconds(self._during if paused else self._rates) / (1 - interference)
            span = min(left, self._paused) if paused else left
            needs = (1 - self._done) * phase
            if needs > span:
                self._done += span / phase
            else:
                span = needs
                self._next()
            left -= span
            if paused:
                self._paused -= span
                if self._paused <= 1e-9:
                    self._paused = 0.0
                    self._before = dict(self._placement)
        return seconds - max(left, 0.0)

    def _next(self) -> None:
        self.phase, self._done = self.phase + 1, 0.0
        self.done = self.phase >= len(self.tuning.stages)
        if not self.done:
            self._cut(tuple(self._before.items()))

    def horizon(self, interference: float = 0.0) -> float:
        """Return the seconds to the end of the phase, when demand and speed change."""
        if not self._placement or interference >= 1:
            return inf
        if self.done:
            return 0.0
        left = 1 - self._done
        if self._paused > 0:
            slow = self._seconds(self._during) / (1 - interference)
            if left * slow <= self._paused:
                return left * slow
            left -= self._paused / slow
        return self._paused + left * self._seconds(self._rates) / (1 - interference)

    def complete(self) -> None:
        """End the phase: what was left of it was rounding."""
        self._next()

    def save(self) -> None:
        """Remember phase and progress."""
        self._saved = (self.phase, self._done)

    def lose(self, kept: Placement) -> Placement:
        """Go back to the checkpoint; the jobs whose GPUs stay continue."""
        self.phase, self._done = self._saved
        return kept

    def remaining_stages(self) -> tuple[Stage, ...]:
        """Return the phases that are left as the tuner forecasts them, the present one first."""
        if self.done:
            return ()
        left = 1 - self._done
        later = (self.tuning.forecast or self.tuning.stages)[self.phase + 1 :]
        return (self.stage.scaled(left * (1 + (self.tuning.band - 1) * left)), *later)

    def report(self, app: App) -> None:
        """Set the work left in GPU-s, the speed, the bidder and the most GPUs that the present phase can use."""
        if self.done:
            return
        if not app.held:
            self._before = {}
        app.remaining, app.speed = sum(stage.work for stage in self.remaining_stages()), self._speed
        app.min_gpus, app.max_gpus = 1, self.stage.demand
        app.bidder = self.bidder

    def alone(self) -> float:
        """Return T_cluster: the budget over the whole cluster, or over all GPUs that it can use, without slowdown."""
        return self.tuning.work / min(self.cluster_gpus, self.tuning.demand)

    def score(self) -> float:
        """Return the speed over that of as many well-placed GPUs: 1/S, averaged over gangs."""
        used = 0 if self.done else min(self._gpus, self.stage.jobs * self.stage.tasks)
        return min(sum(self._rates) / used, 1.0) if used else 1.0


def tuned_apps(
    tunings: Mapping[str, Tuning],
    cluster_gpus: int,
    pause: Pause = NO_PAUSE,
    bidder: Callable[[Job, TunedApp], Bidder | None] = lambda job, model: None,
) -> Callable[[Job], TunedApp]:
    """Return what makes the model of one app; ``bidder`` makes what it answers auctions with."""

    def model(job: Job) -> TunedApp:
        if job.id not in tunings:
            raise WorkloadError(f"app {job.id} is not among the {len(tunings)} whose phases are known")
        made = TunedApp(tunings[job.id], cluster_gpus, pause)
        made.bidder = bidder(job, made)
        return made

    return model
