"""Which of a job's tasks goes where: packing inside one job (Grandl et al., Tetris, SIGCOMM 2014, 3.2)."""

import heapq
from collections.abc import Callable, Iterable
from math import inf
from typing import TypeAlias

from ebbflow.planners.query.running.packing import alignment
from tests.evaluation.qoop.ledger import Job, Ledger, Pool

Limit: TypeAlias = Callable[[Pool], int]  # most tasks of a pool to place in a row
Packer: TypeAlias = Callable[[Ledger, Job, Limit], int]

_TIE = 1e-12  # alignments closer than this are equal


def aligned(ledger: Ledger, job: Job, limit: Limit) -> int:
    """Start tasks of the stage of ``job`` that aligns best with a machine; return how many, 0 if none fits.

    The pair of a task and a machine with the largest D·(R_m − U_m), normalised by the mean machine, decides
    about the stage (QOOP, pseudocode 1); ties go to the larger upward rank, then to the topological index, then
    to the machine's number. Up to ``limit`` of that stage's tasks follow at once, each on the machine that aligns
    best, if they demand no less of anything than the job's other tasks, which then never align better.
    """
    best: tuple[float, float, float, int] | None = None
    chosen: tuple[Pool, int] | None = None
    machines = ledger.open
    for pool in job.pools:
        if pool.pending == 0 or limit(pool) <= 0:
            continue
        for m in machines:
            if ledger.fits(pool.demand, m):
                key = (alignment(pool.demand, ledger.free[m]), pool.rank, -pool.index, -m)
                if best is None or _beats(key, best):
                    best, chosen = key, (pool, m)
    if chosen is None:
        return 0
    pool, m = chosen
    tasks = min(limit(pool), pool.pending) if _keeps_ahead(pool, job.pools) else 1
    if tasks == 1:
        ledger.place(job, pool, m)
        return 1
    return spread(ledger, job, pool, tasks, machines)


def first_fit(ledger: Ledger, job: Job, limit: Limit) -> int:
    """Start tasks of the longest-path stage of ``job`` that fits, on the first machines that fit."""
    machines = ledger.open
    for pool in sorted(job.pools, key=lambda p: (-p.rank, p.index)):
        wanted = min(limit(pool), pool.pending)
        placed = 0
        for m in machines:
            if placed >= wanted:
                break
            tasks = min(ledger.room(pool.demand, m), wanted - placed)
            if tasks > 0:
                ledger.place(job, pool, m, tasks)
                placed += tasks
        if placed:
            return placed
    return 0


def all_of(pool: Pool) -> int:
    """Place as many tasks as wait."""
    return pool.pending


def spread(ledger: Ledger, job: Job, pool: Pool, tasks: int, machines: Iterable[int]) -> int:
    """Place up to ``tasks`` of ``pool``, each where it aligns best at that moment; return how many."""
    room = {m: ledger.room(pool.demand, m) for m in machines}
    room = {m: n for m, n in room.items() if n}
    if sum(room.values()) <= tasks:
        counts = room
    else:
        counts = dict.fromkeys(room, 0)
        # another task on the same machine aligns less by D·D; on another machine it does not
        slope = alignment(pool.demand, list(pool.demand))
        heap = [(-alignment(pool.demand, ledger.free[m]), m) for m in room]
        heapq.heapify(heap)
        for _ in range(tasks):
            value, m = heap[0]
            counts[m] += 1
            heapq.heapreplace(heap, (value + slope if counts[m] < room[m] else inf, m))
    for m, n in counts.items():
        if n:
            ledger.place(job, pool, m, n)
    return sum(counts.values())


def _keeps_ahead(pool: Pool, pools: Iterable[Pool]) -> bool:
    return all(
        d >= e for other in pools if other.pending for d, e in zip(pool.demand, other.demand, strict=True)
    )


def _beats(key: tuple[float, float, float, int], best: tuple[float, float, float, int]) -> bool:
    if abs(key[0] - best[0]) > _TIE:
        return key[0] > best[0]
    return key[1:] > best[1:]
