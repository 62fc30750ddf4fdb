"""Where tensors of several trainings are to be on the aggregators of a running service.

A training begins on any aggregators, is measured there, and is then placed by the heuristic on those that serve
already; idle ones are taken only where it does not fit (AutoPS 5.3, 5.6, 5.8 and 5.9 of its reference). Aggregators
are not started here: an idle one stands for one that would be allocated.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ebbflow.planners.aggregation.assignment import RECOMMENDED, HeuristicOptions, assign_job, by_execution
from ebbflow.planners.aggregation.model import AggregationTask, AggregatorPool, JobProfile
from ebbflow.planners.aggregation.scaling import consolidate, evacuate, squeeze

TensorKey = tuple[str, str]  # training, tensor


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What a running service is known to be.

    Args:
        aggregators: names of those that serve.
        leaving: those of them that end soon, and must be empty by then.
        hosts: aggregator of each tensor.
        profiles: trainings that were measured, by id.
        placed: trainings that the heuristic has placed.
        exited: whether a training has ended since tensors were placed last.
        mirrors: aggregators that have a copy of a tensor already, and cannot be its host, too.
        squeezed: aggregators that each training lacks which was placed above the limit; it is placed again where
            one is idle.
    """

    aggregators: Collection[str]
    leaving: Collection[str] = ()
    hosts: Mapping[TensorKey, str] = field(default_factory=dict)
    profiles: Mapping[str, JobProfile] = field(default_factory=dict)
    placed: Collection[str] = ()
    exited: bool = False
    mirrors: Mapping[TensorKey, Collection[str]] = field(default_factory=dict)
    squeezed: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Where tensors move.

    Args:
        hosts: new aggregator of each tensor that moves.
        placed: trainings that the heuristic has placed, those of before included.
        reasons: why, a sentence for each decision.
        missing: aggregators that are lacking for trainings to stay under the loss limit.
        squeezed: how many each training lacks that more aggregators would help.
    """

    hosts: Mapping[TensorKey, str]
    placed: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()
    missing: int = 0
    squeezed: Mapping[str, int] = field(default_factory=dict)


def plan_placement(state: ServiceState, options: HeuristicOptions = RECOMMENDED) -> PlacementPlan:
    """Return where tensors of a service move: off aggregators that leave, and to where new trainings fit best.

    Tensors of trainings that are not measured yet move only off aggregators that leave. Nothing moves where no
    aggregator stays.

    Args:
        state: of the service.
        options: of the heuristic.
    """
    if not set(state.aggregators) - set(state.leaving):
        missing = 1 if state.hosts else 0
        return PlacementPlan({}, tuple(sorted(state.placed)), missing=missing, squeezed=state.squeezed)
    idle = set(state.aggregators) - set(state.leaving) - set(state.hosts.values())
    for hosts in state.mirrors.values():
        idle -= set(hosts)
    again = set(state.squeezed) & state.profiles.keys() if idle else set()
    if again:
        kept = {job: count for job, count in state.squeezed.items() if job not in again}
        state = replace(state, placed=sorted(set(state.placed) - again), squeezed=kept)
    work = _Placing(state, options)
    for name in sorted(set(state.leaving) & set(state.aggregators)):
        work.empty(name)
    for job in sorted(state.profiles.keys() - set(state.placed)):
        work.place(job)
    if state.exited:
        work.consolidate()
    return work.plan()


class _Placing:
    """A pool of what the state says, whose aggregators have names."""

    def __init__(self, state: ServiceState, options: HeuristicOptions) -> None:
        self._state, self._options = state, options
        self._pool = AggregatorPool()
        self._names: dict[int, str] = {}
        self._placed = {job for job in state.placed if job in state.profiles}
        self._unmeasured = {key: host for key, host in state.hosts.items() if key[0] not in state.profiles}
        self._reasons: list[str] = []
        self._missing = 0
        self._squeezed = {job: count for job, count in state.squeezed.items() if job in self._placed}
        self._moved: dict[TensorKey, str] = {}
        for job in sorted(self._placed):
            self._pool.register(state.profiles[job])
        tasks = {task.key: task for job in self._placed for task in state.profiles[job].tasks}
        ids: dict[str, int] = {}
        for key, host in sorted(state.hosts.items()):
            if key not in tasks or host not in state.aggregators:
                continue
            if host not in ids:
                ids[host] = self._pool.allocate()
                self._names[ids[host]] = host
            self._pool.aggregators[ids[host]].add(tasks[key])

    def place(self, job: str) -> None:
        profile = self._state.profiles[job]
        own = {host for (one, _), host in self._state.hosts.items() if one == job}
        spare = sorted(self._spare(), key=lambda name: (name not in own, name))
        limit = min(profile.requested_servers, len(spare))
        result = assign_job(self._pool, profile, self._options, max_new=limit)
        if result is not None:
            self._name(result.allocated, spare)
            new = f", {len(result.allocated)} of them idle before" if result.allocated else ""
            used = len(set(result.where.values()))
            self._reasons.append(f"{job} fits {used} aggregators under the loss limit{new}")
        else:
            self._pool.register(profile)
            self._name([self._pool.allocate() for _ in range(limit)], spare)
            squeeze(self._pool, profile, by_execution(profile.tasks))
            self._missing += max(profile.requested_servers - limit, 1)
            if profile.requested_servers > limit:
                self._squeezed[job] = profile.requested_servers - limit
            self._reasons.append(
                f"{job} is placed above the loss limit: {limit} aggregators were idle, and it may ask for"
                f" {profile.requested_servers}"
            )
        self._placed.add(job)

    def empty(self, name: str) -> None:
        one = next((key for key, own in self._names.items() if own == name), None)
        spare = sorted(self._spare())
        if one is not None:
            result = evacuate(self._pool, one, self._options, max_new=len(spare))
            if result is not None:
                self._name(result.allocated, spare)
            else:
                self._squeeze_out(one, spare)
            self._pool.release([one])
            del self._names[one]
            self._reasons.append(f"{name} leaves")
        counts = {
            other: sum(1 for host in self._unmeasured.values() if host == other) for other in self._staying()
        }
        for key in sorted(key for key, host in self._unmeasured.items() if host == name):
            target = min(counts, key=lambda other: (counts[other], other))
            counts[target] += 1
            self._moved[key] = target
            self._unmeasured[key] = target

    def consolidate(self) -> None:
        result = consolidate(self._pool, self._options)
        for one in result.released:
            self._reasons.append(f"{self._names.pop(one)} is not needed after a training has ended")

    def plan(self) -> PlacementPlan:
        hosts = dict(self._moved)
        for key, one in self._pool.where().items():
            if self._state.hosts.get(key) != self._names[one]:
                hosts[key] = self._names[one]
        hosts = {key: host for key, wanted in hosts.items() if (host := self._beside_mirrors(key, wanted))}
        return PlacementPlan(
            hosts, tuple(sorted(self._placed)), tuple(self._reasons), self._missing, self._squeezed
        )

    def _squeeze_out(self, one: int, spare: list[str]) -> None:
        tasks: dict[str, list[AggregationTask]] = {
            job: list(own.values()) for job, own in self._pool.aggregators[one].tasks.items()
        }
        for own in tasks.values():
            for task in own:
                self._pool.aggregators[one].remove(task)
        left = self._pool.aggregators.pop(one)
        self._name([self._pool.allocate() for _ in spare], spare)
        for job, own in tasks.items():
            squeeze(self._pool, self._state.profiles[job], by_execution(own))
        self._pool.aggregators[one] = left
        self._missing += 1
        if tasks:
            most = max(tasks, key=lambda job: (sum(task.execution_us for task in tasks[job]), job))
            self._squeezed[most] = max(self._squeezed.get(most, 0), 1)

    def _beside_mirrors(self, key: TensorKey, wanted: str) -> str:
        """Return where a tensor moves in place of one of its mirrors; empty where it stays."""
        mirrors = set(self._state.mirrors.get(key, ()))
        if wanted not in mirrors:
            return wanted
        free = self._staying() - mirrors if self._state.hosts.get(key) in self._state.leaving else ()
        return min(free, default="")

    def _staying(self) -> set[str]:
        return set(self._state.aggregators) - set(self._state.leaving)

    def _spare(self) -> set[str]:
        """Return aggregators that stay and have no tensor but those of trainings that are to be placed.

        Where no aggregator can be shared and none is idle, those that trainings begin on have to do.
        """
        unused = self._staying() - set(self._names.values())
        shared = set(self._names.values()) & self._staying()
        return unused - set(self._unmeasured.values()) or (set() if shared else unused)

    def _name(self, allocated: Iterable[int], spare: Iterable[str]) -> None:
        self._names.update(zip(allocated, spare, strict=False))
