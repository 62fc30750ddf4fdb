"""The macro-benchmark: many queries on one cluster, seven ways to schedule and to plan them (QOOP, section 8)."""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Resources
from ebbflow.planners.query.running.replanner import validate_options
from tests.evaluation.qoop.carbyne import Carbyne
from tests.evaluation.qoop.cluster import ClusterSimulator
from tests.evaluation.qoop.drf import DRF
from tests.evaluation.qoop.fairness import percentile
from tests.evaluation.qoop.ledger import Scheduler
from tests.evaluation.qoop.maxmin import MaxMinFair
from tests.evaluation.qoop.orderings import CARBYNE_C, CARBYNE_V, DRF_C, DRF_V, QOOP, SJF_V, TETRIS_V, held
from tests.evaluation.qoop.runs import Run, Submission
from tests.evaluation.qoop.sjf import SJF
from tests.evaluation.qoop.tetris import Tetris
from tests.evaluation.qoop.workloads import Family, Testbed

WINDOW = 60.0  # seconds that Jain's index is taken over


@dataclass(frozen=True, slots=True)
class System:
    """A scheduler of tasks and a chooser of plans."""

    name: str
    scheduler: Callable[[], Scheduler]
    policy: str  # of ``baselines.POLICIES``
    feedback: bool = False  # queries are told their shares while they run


SYSTEMS: tuple[System, ...] = (
    System(DRF_V, DRF, "volcano"),
    System(TETRIS_V, Tetris, "volcano"),
    System(SJF_V, SJF, "volcano"),
    System(CARBYNE_V, Carbyne, "volcano"),
    System(DRF_C, DRF, "clarinet"),
    System(CARBYNE_C, Carbyne, "clarinet"),
    System(QOOP, MaxMinFair, "qoop", feedback=True),
)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """How queries arrive: drawn uniformly from the families, at exponential gaps."""

    jobs: int = 200
    mean_gap: float = 80.0  # seconds (QOOP, section 8)
    containers: int = 600  # of one core

    def __post_init__(self) -> None:
        if self.jobs < 1 or self.containers < 1 or not 0 < self.mean_gap < float("inf"):
            raise OptionError(
                "jobs and containers must be >= 1 and mean_gap > 0 seconds; "
                f"got {self.jobs}, {self.containers} and {self.mean_gap}"
            )

    def draw(self, families: Sequence[Family], seed: int) -> list[Submission]:
        """Return the queries of ``seed``, the same for every system."""
        rng = np.random.default_rng(seed)
        at = np.cumsum(rng.exponential(self.mean_gap, self.jobs))
        chosen = rng.integers(0, len(families), self.jobs)
        return [
            Submission(f"{n}-{families[f].name}", families[f].plans, float(t))
            for n, (f, t) in enumerate(zip(chosen, at, strict=True))
        ]

    def machines(self, bed: Testbed) -> list[Resources]:
        """Return the containers on machines of the testbed, the last of them smaller if need be."""
        full, rest = divmod(self.containers, bed.per_machine)
        sizes = [bed.per_machine] * full + ([rest] if rest else [])
        return [Resources(n, n * bed.memory) for n in sizes]

    def offered_load(self, submissions: Sequence[Submission]) -> float:
        """Return the core-seconds of the queries' least-work plans over those offered while they arrive."""
        return sum(_least_work(s.plans) for s in submissions) / (self.containers * submissions[-1].at)


def run_macro(
    families: Sequence[Family],
    *,
    jobs: int = 200,
    mean_gap: float = 80.0,
    containers: int = 600,
    seeds: Sequence[int] = (1, 2, 3, 4, 5),
    load: float | None = 0.7,
    hysteresis: float = 0.15,
    progress: Callable[[str, int, int], None] | None = None,
    processes: int = 2,
) -> dict[str, Any]:
    """Run all systems on the same arrivals and return figures by system, as JSON-able values.

    Stored queries may be far too small to contend for ``containers`` at ``mean_gap`` seconds. ``load``
    therefore multiplies all times of all families by one factor, so that the least-work plans of the families
    need that fraction of the cluster on average; ``None`` leaves the times alone. The factor, and the load
    that each seed really offered, are part of the result. Estimates are exact and switching is free, as in the
    source's analysis. ``progress`` is called with what is done, its number and the total. With ``processes`` 1
    all runs in this process. Equal inputs give equal figures, except for the seconds of deciding, which are
    wall-clock seconds of this machine.

    Raises ``OptionError`` for options outside their rules and for tasks that fit no machine.
    """
    validate_options(hysteresis, 0.0, 0.0)
    if not families or not seeds or processes < 1:
        raise OptionError(
            "families and seeds must not be empty and processes be >= 1; "
            f"got {len(families)}, {len(seeds)} and {processes}"
        )
    arrivals, bed = Arrivals(jobs, mean_gap, containers), Testbed()
    factor = _factor(families, arrivals, load)
    scaled = tuple(f.scaled(factor) for f in families) if factor != 1.0 else tuple(families)
    work = [(seed, number) for seed in seeds for number in range(len(SYSTEMS))]
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for done, (key, figures) in enumerate(_runs(scaled, arrivals, hysteresis, work, processes), 1):
        found[key] = figures
        if progress is not None:
            progress(f"seed {key[0]}, {SYSTEMS[key[1]].name}", done, len(work))
    return _result(scaled, arrivals, bed, seeds, load, factor, hysteresis, found)


# --- one run ----------------------------------------------------------------------------------------------


def _simulate(
    families: Sequence[Family], arrivals: Arrivals, hysteresis: float, seed: int, system: System
) -> dict[str, Any]:
    submissions = arrivals.draw(families, seed)
    run = ClusterSimulator(
        submissions,
        arrivals.machines(Testbed()),
        system.scheduler(),
        system.policy,
        feedback=system.feedback,
        hysteresis=hysteresis,
        window=WINDOW,
        timer=time.perf_counter,
    ).run()
    return _figures(run, arrivals.containers)


def _figures(run: Run, containers: int) -> dict[str, Any]:
    seconds = [o.seconds for o in run.outcomes]
    return {
        "mean_seconds": sum(seconds) / len(seconds),
        "p50_seconds": percentile(seconds, 0.5),
        "p90_seconds": percentile(seconds, 0.9),
        "jain": run.jain,
        "jain_honoured": run.honoured,
        "jain_windows": run.jain_windows,
        "makespan_seconds": run.makespan,
        "switches": sum(o.switches for o in run.outcomes),
        "most_switches": max(o.switches for o in run.outcomes),
        "used_core_seconds": run.used,
        "aborted_core_seconds": sum(o.aborted for o in run.outcomes),
        "utilisation": run.used / (containers * run.makespan),
        "active": run.active,
        "tasks": run.tasks,
        "decisions": run.decisions,
        "planner_seconds": run.planner_seconds,
        "scheduler_seconds": run.scheduler_seconds,
    }


_workload: tuple[tuple[Family, ...], Arrivals, float] | None = None  # of a worker process


def _prepare(families: tuple[Family, ...], arrivals: Arrivals, hysteresis: float) -> None:
    global _workload  # noqa: PLW0603 a worker process is given its workload once, not with every run
    _workload = (families, arrivals, hysteresis)


def _in_worker(key: tuple[int, int]) -> dict[str, Any]:
    assert _workload is not None
    families, arrivals, hysteresis = _workload
    return _simulate(families, arrivals, hysteresis, key[0], SYSTEMS[key[1]])


def _runs(
    families: tuple[Family, ...],
    arrivals: Arrivals,
    hysteresis: float,
    work: Sequence[tuple[int, int]],
    processes: int,
) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
    """Yield the figures of every run as it ends."""
    if processes == 1:
        for seed, number in work:
            yield (seed, number), _simulate(families, arrivals, hysteresis, seed, SYSTEMS[number])
        return
    # a fresh interpreter: the caller may hold threads, which a forked one would inherit in the middle of things
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        processes, context, initializer=_prepare, initargs=(families, arrivals, hysteresis)
    ) as pool:
        keys = {pool.submit(_in_worker, key): key for key in work}
        try:
            for future in as_completed(keys):
                yield keys[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


# --- the result -------------------------------------------------------------------------------------------


def _result(
    families: Sequence[Family],
    arrivals: Arrivals,
    bed: Testbed,
    seeds: Sequence[int],
    load: float | None,
    factor: float,
    hysteresis: float,
    found: Mapping[tuple[int, int], dict[str, Any]],
) -> dict[str, Any]:
    per_seed = [{s.name: found[seed, n] for n, s in enumerate(SYSTEMS)} for seed in seeds]
    means = {
        s.name: {figure: _mean([seed[s.name][figure] for seed in per_seed]) for figure in per_seed[0][s.name]}
        for s in SYSTEMS
    }
    whole = bed.share(arrivals.containers)
    return {
        "parameters": asdict(arrivals)
        | {
            "seeds": list(seeds),
            "machines": len(arrivals.machines(bed)),
            "containers_per_machine": bed.per_machine,
            "container_memory_gib": bed.memory,
            "families": len(families),
            "plans_per_family": _mean([len(f.plans) for f in families]),
            "load": load,
            "time_factor": factor,
            "mean_least_work_core_seconds": _mean([_least_work(f.plans) for f in families]),
            "mean_best_seconds_alone": _mean([f.best_seconds(whole) for f in families]),
            "hysteresis": hysteresis,
            "jain_window_seconds": WINDOW,
        },
        "offered_load": [arrivals.offered_load(arrivals.draw(families, seed)) for seed in seeds],
        "systems": [
            {
                "name": s.name,
                "policy": s.policy,
                **means[s.name],
                "times_qoop": means[s.name]["mean_seconds"] / means[QOOP]["mean_seconds"],
                "seeds": [{"seed": seed, **found[seed, n]} for seed in seeds],
            }
            for n, s in enumerate(SYSTEMS)
        ],
        "orderings": held(per_seed, means),
    }


def _factor(families: Sequence[Family], arrivals: Arrivals, load: float | None) -> float:
    """Return by what to multiply all times so that the families offer ``load`` on average."""
    if load is None:
        return 1.0
    if not 0 < load < float("inf"):
        raise OptionError(f"load must be > 0 and finite, a fraction of the cluster; got {load}")
    offered = _mean([_least_work(f.plans) for f in families]) / (arrivals.containers * arrivals.mean_gap)
    if not (offered > 0 and isfinite(offered)):
        raise OptionError(f"families must do some work, and not without bounds; their load is {offered}")
    return load / offered


def _least_work(plans: Sequence[Any]) -> float:
    return float(min(plan.total_work for plan in plans))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
