"""Multi-resource packing with a bias to short jobs (Grandl et al., Tetris, SIGCOMM 2014, section 3)."""

from collections.abc import Sequence
from math import ceil

from ebbflow.planners.errors import OptionError
from ebbflow.planners.query.running.packing import alignment
from tests.evaluation.qoop.ledger import Job, Ledger, Pool


class Tetris:
    """Each machine takes the task with the best score A − ε·p until nothing fits it any more.

    A is the alignment of the task's demand with the machine's free room, p the job's remaining work
    Σ(Σ_r D_r/C_r)·τ, and ε = mean(A)/mean(p) over the candidates of a round. Of the jobs with waiting tasks,
    only the ⌈(1−f)·n⌉ furthest below their fair share are served as long as something of theirs fits
    (``fairness`` f). Tasks of stages that are more than ``barrier`` done come before all others, since the
    next stage waits for them. Input is remote for every task alike here, so that the paper's penalty for it
    changes no order and is left out. Defaults are the paper's.
    """

    def __init__(self, fairness: float = 0.25, barrier: float = 0.9) -> None:
        if not 0 <= fairness < 1:
            raise OptionError(f"fairness must be in [0, 1); got {fairness}")
        if not 0 < barrier <= 1:
            raise OptionError(f"barrier must be in (0, 1]; got {barrier}")
        self.fairness = fairness
        self.barrier = barrier

    def assign(self, ledger: Ledger, jobs: Sequence[Job], now: float) -> None:
        """See ``Scheduler``."""
        hungry = [job for job in jobs if job.hungry]
        first = ceil((1 - self.fairness) * len(hungry))
        hungry.sort(key=lambda j: (round(j.load, 9), j.order))
        self._pack(ledger, hungry[:first])
        self._pack(ledger, hungry[first:])

    def _pack(self, ledger: Ledger, jobs: Sequence[Job]) -> None:
        epsilon = _epsilon(ledger, jobs)
        waiting = [(job, pool) for job in jobs for pool in job.pools if pool.pending]
        gates = {pool: self._gates(pool) for _, pool in waiting}
        for machine in ledger.open:
            room = ledger.free[machine]
            while True:
                fitting = [(j, p) for j, p in waiting if p.pending and ledger.fits(p.demand, machine)]
                if not fitting:
                    break
                job, pool = max(
                    fitting,
                    key=lambda x: (
                        gates[x[1]],
                        round(alignment(x[1].demand, room) - epsilon * x[0].work_left, 12),
                        -x[0].order,
                        x[1].rank,
                        -x[1].index,
                    ),
                )
                ledger.place(job, pool, machine)

    def _gates(self, pool: Pool) -> bool:
        """Tell whether the pool is the tail of a stage that others wait for."""
        return pool.done > self.barrier * (pool.done + pool.running + pool.pending)


def _epsilon(ledger: Ledger, jobs: Sequence[Job]) -> float:
    """Return mean(A)/mean(p) over the tasks that fit some machine now."""
    alignments: list[float] = []
    work: list[float] = []
    machines = ledger.open
    for job in jobs:
        for pool in job.pools:
            found = [
                alignment(pool.demand, ledger.free[m])
                for m in machines
                if pool.pending and ledger.fits(pool.demand, m)
            ]
            if found:
                alignments.append(max(found))
                work.append(job.work_left)
    return sum(alignments) / sum(work) if sum(work) > 0 else 0.0
