"""Jobs that progress as AdaptDL's simulator lets them (Pollux, OSDI 2021): epochs, goodput, batch splits."""

from collections.abc import Callable, Mapping
from math import inf, nan

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.jobs.profiles import Profile
from ebbflow.infra.simulation.traces.workloads import Job, nearest
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.scheduling import Agent, App, Placement


def packed(gpus: int, per_node: int) -> tuple[int, ...]:
    """Return the counts of ``gpus`` GPUs on full nodes, the rest on one more."""
    whole, rest = divmod(gpus, per_node)
    return (per_node,) * whole + ((rest,) if rest else ())


class KnownSpeed:
    """The true seconds per iteration of a fixed total batch on well-placed GPUs."""

    def __init__(self, profile: Profile, batch: int, per_node: int) -> None:
        self._profile, self._batch, self._per_node = profile, batch, per_node
        self._times: dict[int, float] = {}

    def iteration_time(self, gpus: int) -> float:
        """Return seconds per iteration; a single GPU always accumulates at least one pass."""
        found = self._times.get(gpus)
        if found is None:
            local, passes = self._profile.split(self._batch, gpus, spare_one=True)
            found = self._profile.iteration_time(packed(gpus, self._per_node), local, passes)
            self._times[gpus] = found
        return found


class FixedBatch:
    """An agent that keeps the total batch of the job's user, and whose job knows its speed (an oracle)."""

    adaptive = False

    def __init__(self, profile: Profile, batch: int, speed: KnownSpeed) -> None:
        self._profile, self._batch, self._speed = profile, batch, speed
        self._splits: dict[int, tuple[int, int]] = {}

    def split(self, nodes: int, gpus: int) -> tuple[int, int]:
        """Return the split of the fixed batch."""
        found = self._splits.get(gpus)
        if found is None:
            found = self._splits[gpus] = self._profile.split(self._batch, gpus)
        return found

    def observe(
        self, nodes: int, gpus: int, local: int, passes: int, step: float, sync: float, sqr: float, var: float
    ) -> None:
        """Learn nothing: everything is known."""

    def report(self, app: App) -> None:
        """Set the speed, and as a cap the GPUs that each get the smallest measured batch."""
        app.speed = self._speed
        app.min_gpus = 1
        app.max_gpus = max(1, self._batch // self._profile.local_min)
        if self._profile.most_gpus is not None:
            app.max_gpus = min(app.max_gpus, self._profile.most_gpus)


AgentOf = Callable[[Job, Profile], Agent]


class AdaptdlJob:
    """True progress of one job, in iterations at the application's smallest batch."""

    __slots__ = (
        "_agent",
        "_batch",
        "_counts",
        "_epoch",
        "_gpus",
        "_job",
        "_local",
        "_passes",
        "_per_node",
        "_profile",
        "_progress",
        "_reported",
        "_saved",
        "_whole_seconds",
        "done",
        "steady",
    )

    def __init__(
        self, job: Job, profile: Profile, batch: int, agent: Agent, per_node: int, whole_seconds: bool
    ) -> None:
        self._job, self._profile, self._agent, self._batch = job, profile, agent, batch
        self._per_node, self._whole_seconds = per_node, whole_seconds
        self._progress, self._epoch = 0.0, 0
        self._saved = (0.0, 0)
        self._counts: tuple[int, ...] = ()
        self._gpus = self._local = self._passes = 0
        self._reported = -1
        self.done = False
        self.steady = not agent.adaptive

    @property
    def epoch(self) -> int:
        """Return the epoch being trained, from 0."""
        return self._epoch

    @property
    def progress(self) -> float:
        """Return iterations at the smallest batch that were done."""
        return self._progress

    def place(self, placement: Placement, nodes: Mapping[str, Node]) -> None:
        """Take the placement and split the batch anew."""
        self._counts = tuple([gpus for _, gpus in placement])
        self._gpus = sum(self._counts)
        if self._counts:
            self._local, self._passes = self._agent.split(len(self._counts), self._gpus)

    def _rate(self, interference: float) -> float:
        """Return iterations at the smallest batch per second, telling the agent what a pass took."""
        profile, local, passes = self._profile, self._local, self._passes
        step, sync = profile.speed(self._counts, local)
        total = self._gpus * local * (passes + 1)
        sqr, var = profile.gradient(total, self._epoch)
        self._agent.observe(len(self._counts), self._gpus, local, passes, step, sync, sqr, var)
        gain = (var + sqr) / (var / (total / profile.first_batch) + sqr)
        return gain / (step + passes * (step - sync)) * (1 - interference)

    def advance(self, seconds: float, interference: float = 0.0) -> float:
        """Train; an epoch ends on a whole second where the job was made so."""
        if not self._counts or self.done:
            return 0.0
        left = seconds
        boundaries = self._profile.boundaries
        while left > 0 and not self.done:
            rate = self._rate(interference)
            boundary = boundaries[self._epoch]
            if self._progress + rate * left < boundary:
                self._progress += rate * left
                left = 0.0
            else:
                took = (boundary - self._progress) / rate
                left -= round(took) if self._whole_seconds else min(took, left)
                self._progress = boundary
                self._epoch += 1
                self.done = self._epoch >= self._profile.epochs
            self._local, self._passes = self._agent.split(len(self._counts), self._gpus)
        return seconds - left

    def horizon(self, interference: float = 0.0) -> float:
        """Return the seconds to the end at the present split, or to the epoch's end for an adaptive agent."""
        if not self._counts:
            return inf
        profile = self._profile
        step, sync = profile.speed(self._counts, self._local)
        total = self._gpus * self._local * (self._passes + 1)
        time = (step + self._passes * (step - sync)) / (1 - interference) if interference < 1 else inf
        last = profile.epochs if self.steady else min(self._epoch + 1, profile.epochs)
        seconds, start = 0.0, self._progress
        for epoch in range(self._epoch, last):
            seconds += (profile.boundaries[epoch] - start) * time / profile.gain(total, epoch)
            start = profile.boundaries[epoch]
        return seconds

    def complete(self) -> None:
        """Close the epoch, and with it the job if it was the last or the agent is steady."""
        last = self._profile.epochs - 1 if self.steady else self._epoch
        self._progress = self._profile.boundaries[last]
        self._epoch = last + 1
        self.done = self._epoch >= self._profile.epochs
        if not self.done:
            self._local, self._passes = self._agent.split(len(self._counts), self._gpus)

    def save(self) -> None:
        """Remember progress and epoch."""
        self._saved = (self._progress, self._epoch)

    def lose(self, kept: Placement) -> Placement:
        """Go back to the checkpoint; data-parallel training can't continue with part of its GPUs."""
        self._progress, self._epoch = self._saved
        self.place((), {})
        return ()

    def report(self, app: App) -> None:
        """Set the remaining iterations at the user's batch, from the end of this epoch, and the agent's part."""
        if self._reported != self._epoch:
            self._reported = self._epoch
            last = self._profile.epochs - 1
            app.remaining = 1.0
            if self._epoch < last:
                app.remaining = self._profile.iterations(self._batch, last) - self._profile.iterations(
                    self._batch, self._epoch
                )
        app.goodput_left = (self._profile.boundaries[-1] - self._progress) * self._profile.first_batch
        self._agent.report(app)

    def alone(self) -> float:
        """Return the seconds on the GPUs and batch of the job's request, packed on as few nodes as possible.

        NaN if that configuration was not measured.
        """
        profile = self._profile
        gpus = self._job.gpus
        local, passes = profile.split(self._batch, gpus)
        try:
            time = profile.iteration_time(packed(gpus, self._per_node), local, passes)
        except WorkloadError:
            return nan
        total = gpus * local * (passes + 1)
        starts = [0.0, *profile.boundaries]
        return sum(
            (profile.boundaries[epoch] - starts[epoch]) * time / profile.gain(total, epoch)
            for epoch in range(profile.epochs)
        )

    def score(self) -> float:
        """Return the time of an iteration packed on as few nodes as possible, over its time where it runs; at most 1.

        Where the packed one was not measured: the fewest nodes over the nodes used.
        """
        if not self._counts:
            return 1.0
        best = packed(self._gpus, self._per_node)
        if len(best) == len(self._counts):
            return 1.0
        here = self._profile.iteration_time(self._counts, self._local, self._passes)
        try:
            return min(1.0, self._profile.iteration_time(best, self._local, self._passes) / here)
        except WorkloadError:
            return len(best) / len(self._counts)


def adaptdl_jobs(
    profiles: Mapping[str, Profile],
    *,
    agent: AgentOf | None = None,
    per_node: int = 4,
    whole_seconds: bool = True,
) -> Callable[[Job], AdaptdlJob]:
    """Return what makes the model of one job of an AdaptDL workload.

    ``agent`` chooses batches; ``None`` keeps the user's. ``per_node`` GPUs make a full node. With ``whole_seconds``
    epochs end on whole seconds inside an interval, as in AdaptDL's simulator; without, when they end.
    """
    speeds: dict[tuple[str, int], KnownSpeed] = {}

    def model(job: Job) -> AdaptdlJob:
        if job.model not in profiles:
            close = nearest(job.model, profiles)
            raise WorkloadError(
                f"job {job.id}: no profile of application {job.model!r}; the nearest is {close!r}"
            )
        profile = profiles[job.model]
        batch = job.batch if job.batch is not None else profile.first_batch
        if not profile.first_batch <= batch <= profile.last_batch:
            raise WorkloadError(
                f"job {job.id}: total batch {batch} of {job.model} was not measured;"
                f" sizes are {profile.first_batch} to {profile.last_batch}"
            )
        speed = speeds.setdefault((job.model, batch), KnownSpeed(profile, batch, per_node))
        chosen = agent(job, profile) if agent else FixedBatch(profile, batch, speed)
        return AdaptdlJob(job, profile, batch, chosen, per_node, whole_seconds)

    return model
