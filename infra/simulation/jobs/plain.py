"""Jobs of plain traces: a duration on a number of GPUs, slower where the placement is wider than it need be."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

from ebbflow.infra.errors import WorkloadError
from ebbflow.infra.simulation.traces.workloads import Job
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model.capacity import Node
from ebbflow.planners.model.scheduling import App, Placement


@dataclass(frozen=True, slots=True)
class Locality:
    """How many times longer an iteration takes by the narrowest level that holds the whole placement (Themis, 5.2).

    A gang that no single node or rack could hold is not slowed by the next level: its duration was measured so.
    """

    node: float = 1.0
    rack: float = 1.0  # several nodes of one rack
    cluster: float = 1.0  # several racks

    def __post_init__(self) -> None:
        if not 1 <= self.node <= self.rack <= self.cluster < inf:
            raise OptionError(
                f"slowdowns must satisfy 1 <= node <= rack <= cluster; got {self.node}, {self.rack}, {self.cluster}"
            )

    def slowdown(self, placement: Placement, nodes: Mapping[str, Node]) -> float:
        """Return the factor on the duration of an iteration."""
        if len(placement) == 1 or self.cluster == 1:
            return self.node
        racks = {nodes[id_].rack for id_, _ in placement}
        largest = max(node.gpus for node in nodes.values())
        needs_more = sum(gpus for _, gpus in placement) > largest
        if len(racks) == 1:
            return self.node if needs_more else self.rack
        if not needs_more:
            return self.cluster
        room = max(
            sum(node.gpus for node in nodes.values() if node.rack == rack)
            for rack in {n.rack for n in nodes.values()}
        )
        return self.rack if sum(gpus for _, gpus in placement) > room else self.cluster


class LinearSpeed:
    """Speed in proportion to GPUs: 1 s per iteration on the number that was asked for."""

    __slots__ = ("_gpus",)

    def __init__(self, gpus: int) -> None:
        self._gpus = gpus

    def iteration_time(self, gpus: int) -> float:
        """Return seconds per iteration on ``gpus`` well-placed GPUs."""
        return self._gpus / gpus


class PlainJob:
    """``duration`` seconds of work at the speed of its own number of GPUs, well placed; linear in GPUs."""

    __slots__ = (
        "_duration",
        "_gpus",
        "_left",
        "_locality",
        "_rate",
        "_saved",
        "_score",
        "_speed",
        "done",
        "steady",
    )

    def __init__(self, gpus: int, duration: float, locality: Locality | None) -> None:
        self._gpus, self._duration, self._locality = gpus, duration, locality
        self._left = self._saved = duration
        self._rate = 0.0
        self._score = 1.0
        self._speed = LinearSpeed(gpus)
        self.done = False
        self.steady = True

    def place(self, placement: Placement, nodes: Mapping[str, Node]) -> None:
        """Run at the placement's speed."""
        if not placement:
            self._rate = 0.0
            return
        held = sum([gpus for _, gpus in placement])
        slowdown = self._locality.slowdown(placement, nodes) if self._locality else 1.0
        self._score = 1 / slowdown
        self._rate = 1 / slowdown if held == self._gpus else held / self._gpus / slowdown

    def advance(self, seconds: float, interference: float = 0.0) -> float:
        """Work the seconds off."""
        rate = self._rate * (1 - interference)
        left = self._left - rate * seconds
        if left > 1e-9 * self._duration:
            self._left = left
            return seconds
        used = min(self._left / rate, seconds) if rate > 0 else 0.0
        self.complete()
        return used

    def horizon(self, interference: float = 0.0) -> float:
        """Return the seconds to the end."""
        rate = self._rate * (1 - interference)
        return self._left / rate if rate > 0 else inf

    def complete(self) -> None:
        """Become done."""
        self._left = 0.0
        self.done = True

    def save(self) -> None:
        """Remember what is left."""
        self._saved = self._left

    def lose(self, kept: Placement) -> Placement:
        """Go back to the checkpoint and hold nothing."""
        self._left = self._saved
        self._rate = 0.0
        return ()

    def report(self, app: App) -> None:
        """Set what is left, as iterations of 1 s on the GPUs asked for, and the speed."""
        app.remaining = self._left
        app.speed = self._speed

    def alone(self) -> float:
        """Return the duration, at the slowdown of a single node."""
        return self._duration * (self._locality.node if self._locality else 1.0)

    def score(self) -> float:
        """Return 1 over the slowdown."""
        return self._score


def plain_jobs(
    locality: Mapping[str, Locality] | None = None, default: Locality | None = None
) -> Callable[[Job], PlainJob]:
    """Return what makes the model of a job with a duration; slowdowns by the job's ``model``, else ``default``."""
    known = locality or {}

    def model(job: Job) -> PlainJob:
        if job.duration is None:
            raise WorkloadError(f"job {job.id} has no duration; a profile of {job.model!r} would have to say")
        return PlainJob(job.gpus, job.duration, known.get(job.model, default))

    return model
