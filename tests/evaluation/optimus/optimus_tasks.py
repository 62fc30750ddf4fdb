"""Optimus with parameter servers: two kinds of task by marginal gain, and their placement (EuroSys 2018, section 4).

A speed model f(p, w), steps/s with ``p`` parameter servers and ``w`` workers, is whatever a job fitted or measured.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf
from typing import Literal, NamedTuple

from ebbflow.planners.errors import OptionError

SpeedOf = Callable[[int, int], float]
"""Steps/s with (parameter servers, workers)."""

OnFull = Literal["stop", "skip"]
"""What to do when the best task does not fit: end (the paper and its code), or drop it and go on with others."""


class Tasks(NamedTuple):
    """Tasks of one job."""

    servers: int
    workers: int


@dataclass(frozen=True, slots=True)
class PsJob:
    """A job that trains with parameter servers, in order of arrival."""

    id: str
    remaining: float  # steps
    speed: SpeedOf | None  # None: no model yet, it keeps one server and one worker
    server: Mapping[str, float]  # demand of one parameter server, by resource
    worker: Mapping[str, float]
    factor: float = 1.0  # on its gains: below 1 while its predictions are young


class Step(NamedTuple):
    """One grant: what a job got and the gain that won it, s per share of its dominant resource."""

    job: str
    servers: int
    workers: int
    gain: float


_KINDS = (Tasks(1, 0), Tasks(0, 1), Tasks(1, 1))  # of equal gain, a server comes before a worker

_Offer = tuple[
    float, int, int, int
]  # minus gain, order of the job, kind, how often the job was granted before


def allocate(
    jobs: Sequence[PsJob], capacity: Mapping[str, float], *, on_full: OnFull = "stop", pairs: bool = True
) -> tuple[dict[str, Tasks], list[Step]]:
    """Return the tasks of each job that got any, and the grants beyond the first server and worker in order.

    Each job gets one server and one worker in the given order while capacity lasts; then the task with the largest
    drop in remaining time per share of its dominant resource is granted, again and again, while a gain is positive.
    With ``pairs`` a server and a worker are tried together where neither alone helps.

    Raises:
        OptionError: a demand for a resource that ``capacity`` lacks, or a negative one.
    """
    room = dict(capacity)
    costs = [(_dominant(job, job.server, capacity), _dominant(job, job.worker, capacity)) for job in jobs]
    granted: dict[str, Tasks] = {}
    grants = [0] * len(jobs)
    heap: list[_Offer] = []
    for number, job in enumerate(jobs):
        if not _take(room, job, 1, 1):
            continue
        granted[job.id] = Tasks(1, 1)
        heap += _offers(job, number, granted[job.id], costs[number], pairs, 0)
    heapify(heap)
    steps: list[Step] = []
    while heap:
        gain, number, kind, stamp = heappop(heap)
        if stamp != grants[number]:
            continue
        job, (servers, workers) = jobs[number], _KINDS[kind]
        if not _take(room, job, servers, workers):
            if on_full == "stop":
                break
            continue
        grants[number] += 1
        before = granted[job.id]
        granted[job.id] = Tasks(before.servers + servers, before.workers + workers)
        steps.append(Step(job.id, servers, workers, -gain))
        for offer in _offers(job, number, granted[job.id], costs[number], pairs, grants[number]):
            heappush(heap, offer)
    return granted, steps


def _dominant(job: PsJob, demand: Mapping[str, float], capacity: Mapping[str, float]) -> float:
    """Return the largest share of capacity that one task takes."""
    if any(amount > 0 and name not in capacity for name, amount in demand.items()) or any(
        amount < 0 for amount in demand.values()
    ):
        raise OptionError(f"job {job.id} demands {dict(demand)}; the cluster has {dict(capacity)}")
    shares = [
        amount / capacity[name] if capacity[name] > 0 else inf
        for name, amount in demand.items()
        if amount > 0
    ]
    if not shares:
        raise OptionError(f"job {job.id}: a task must demand something; got {dict(demand)}")
    return max(shares)


def _take(room: dict[str, float], job: PsJob, servers: int, workers: int) -> bool:
    names = {*job.server, *job.worker}
    need = {name: servers * job.server.get(name, 0) + workers * job.worker.get(name, 0) for name in names}
    if any(amount > room.get(name, 0) + 1e-9 for name, amount in need.items()):
        return False
    for name, amount in need.items():
        room[name] = room.get(name, 0) - amount
    return True


def _offers(
    job: PsJob, number: int, held: Tasks, costs: tuple[float, float], pairs: bool, stamp: int
) -> list[_Offer]:
    """Return the next steps that help."""
    speed = job.speed
    if speed is None:
        return []
    now = job.remaining / speed(*held)
    helping: list[_Offer] = []
    for kind, (more, cost) in enumerate(zip(_KINDS, (*costs, sum(costs)), strict=True)):
        if kind == 2 and (helping or not pairs):
            break
        then = job.remaining / speed(held.servers + more.servers, held.workers + more.workers)
        if then < now:
            helping.append((-(now - then) * job.factor / cost, number, kind, stamp))
    return helping


@dataclass(frozen=True, slots=True)
class Placed:
    """Where one job's tasks run: tasks by server machine; fewer than asked for if it had to shrink."""

    tasks: Tasks
    machines: Mapping[str, Tasks]


def place(
    granted: Mapping[str, Tasks], free: Mapping[str, float], size: Mapping[str, tuple[float, float]]
) -> dict[str, Placed]:
    """Place jobs on as few machines as possible, servers and workers dealt evenly (EuroSys 2018, section 4.2).

    Smallest jobs come first; for each, the machines with most room, one, two, three, … until an even deal fits. A job
    that no even deal fits shrinks to what can be dealt one by one; without a server and a worker it is left out.

    Args:
        granted: tasks by job.
        free: units of the scarce resource by machine.
        size: units of (one server, one worker) by job.
    """
    room = dict(free)
    order = sorted((-left, machine) for machine, left in room.items())
    placed: dict[str, Placed] = {}
    for job in sorted(granted, key=lambda job: sum(granted[job])):
        # no job uses more machines than it has tasks
        machines = [machine for _, machine in order[: sum(granted[job])]]
        dealt = _even(granted[job], machines, room, size[job]) or _one_by_one(
            granted[job], machines, room, size[job]
        )
        if dealt is None:
            continue
        for machine, tasks in dealt.items():
            del order[bisect_left(order, (-room[machine], machine))]
            room[machine] -= tasks.servers * size[job][0] + tasks.workers * size[job][1]
            insort(order, (-room[machine], machine))
        total = Tasks(sum(t.servers for t in dealt.values()), sum(t.workers for t in dealt.values()))
        placed[job] = Placed(total, dealt)
    return placed


def _even(
    tasks: Tasks, machines: Sequence[str], room: Mapping[str, float], size: tuple[float, float]
) -> dict[str, Tasks] | None:
    for count in range(1, len(machines) + 1):
        dealt = {
            machine: Tasks(*(total // count + (at < total % count) for total in tasks))
            for at, machine in enumerate(machines[:count])
        }
        if all(room[m] + 1e-9 >= t.servers * size[0] + t.workers * size[1] for m, t in dealt.items()):
            return {machine: tasks for machine, tasks in dealt.items() if sum(tasks)}
    return None


def _one_by_one(
    tasks: Tasks, machines: Sequence[str], room: Mapping[str, float], size: tuple[float, float]
) -> dict[str, Tasks] | None:
    left = {machine: room[machine] for machine in machines}
    dealt: dict[str, Tasks] = {}
    counts = [0, 0]
    for turn in range(2 * max(tasks)):
        kind = turn % 2
        if counts[kind] >= tasks[kind]:
            continue
        machine = next((m for m in machines if left[m] + 1e-9 >= size[kind]), None)
        if machine is None:
            continue
        left[machine] -= size[kind]
        counts[kind] += 1
        before = dealt.get(machine, Tasks(0, 0))
        dealt[machine] = Tasks(before.servers + (kind == 0), before.workers + (kind == 1))
    return dealt if all(counts) else None
