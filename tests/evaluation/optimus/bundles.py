"""What Optimus is compared with on parameter servers: bundles of one server and one worker (EuroSys 2018, section 6).

Fair shares (DRF) spread over machines, and short jobs first packed tightly (Tetris).
"""

from collections.abc import Mapping, Sequence

from ebbflow.planners.errors import OptionError
from tests.evaluation.optimus.optimus_tasks import Placed, PsJob, Tasks


def fair_bundles(jobs: Sequence[PsJob], capacity: Mapping[str, float]) -> dict[str, Tasks]:
    """Deal bundles one by one to the job with the fewest, in order, until none fits (progressive filling)."""
    return _dealt(jobs, capacity, None)


def short_bundles(jobs: Sequence[PsJob], capacity: Mapping[str, float], most: int) -> dict[str, Tasks]:
    """One bundle each, then up to ``most`` to the job with the least remaining time, and so on.

    The remaining time is what one server and one worker would take. Raises ``OptionError`` for ``most`` < 1.
    """
    if most < 1:
        raise OptionError(f"most must be >= 1; got {most}")
    order = sorted(jobs, key=_time)
    first = _dealt(order, capacity, 1)
    room = dict(capacity)
    for job in order:
        _take(room, job, first.get(job.id, Tasks(0, 0)).servers)
    granted = dict(first)
    for job in order:
        while job.id in granted and granted[job.id].servers < most and _fits(room, job):
            _take(room, job, 1)
            granted[job.id] = Tasks(granted[job.id].servers + 1, granted[job.id].workers + 1)
    return granted


def _time(job: PsJob) -> float:
    return job.remaining / job.speed(1, 1) if job.speed else float("inf")


def _dealt(jobs: Sequence[PsJob], capacity: Mapping[str, float], rounds: int | None) -> dict[str, Tasks]:
    room = dict(capacity)
    granted: dict[str, Tasks] = {}
    open_ = list(jobs)
    while open_ and rounds != 0:
        fitting = []
        for job in open_:
            if not _fits(room, job):
                continue
            _take(room, job, 1)
            before = granted.get(job.id, Tasks(0, 0))
            granted[job.id] = Tasks(before.servers + 1, before.workers + 1)
            fitting.append(job)
        open_ = fitting
        rounds = None if rounds is None else rounds - 1
    return granted


def _fits(room: Mapping[str, float], job: PsJob) -> bool:
    names = {*job.server, *job.worker}
    return all(job.server.get(n, 0) + job.worker.get(n, 0) <= room.get(n, 0) + 1e-9 for n in names)


def _take(room: dict[str, float], job: PsJob, bundles: int) -> None:
    for name in {*job.server, *job.worker}:
        room[name] = room.get(name, 0) - bundles * (job.server.get(name, 0) + job.worker.get(name, 0))


def place_singly(
    granted: Mapping[str, Tasks],
    free: Mapping[str, float],
    size: Mapping[str, tuple[float, float]],
    *,
    pack: bool,
) -> dict[str, Placed]:
    """Place servers and workers in turn, each on the emptiest machine that holds it; with ``pack`` on the fullest.

    What fits nowhere is left out, and with it a job without a server and a worker. Arguments as
    ``optimus_tasks.place``.
    """
    room = dict(free)
    placed: dict[str, Placed] = {}
    for job, tasks in granted.items():
        dealt: dict[str, list[int]] = {}
        for turn in range(2 * max(tasks)):
            kind, needs = turn % 2, size[job][turn % 2]
            if turn // 2 >= tasks[kind]:
                continue
            fits = [machine for machine, left in room.items() if left + 1e-9 >= needs]
            if not fits:
                continue
            machine = min(fits, key=lambda m: ((room[m] if pack else -room[m]), m))
            room[machine] -= needs
            dealt.setdefault(machine, [0, 0])[kind] += 1
        total = Tasks(sum(one[0] for one in dealt.values()), sum(one[1] for one in dealt.values()))
        if all(total):
            placed[job] = Placed(total, {machine: Tasks(*one) for machine, one in dealt.items()})
            continue
        for machine, one in dealt.items():
            room[machine] += one[0] * size[job][0] + one[1] * size[job][1]
    return placed
