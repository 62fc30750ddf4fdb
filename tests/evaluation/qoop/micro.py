"""The micro-benchmarks: one query alone on a changing capacity, QOOP against Clarinet (QOOP, section 8)."""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from ebbflow.planners.query.plan.qep import Stage
from tests.evaluation.qoop.settings import ProfileName, Settings
from tests.evaluation.qoop.simulator import Options, Outcome, run
from tests.evaluation.qoop.volatility import CLASSES, VolatilityClass
from tests.evaluation.qoop.workloads import Family
from tests.evaluation.qoop.world import World, build

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Variant:
    """One way of running every query: what differs from the settings."""

    name: str
    profile: ProfileName = "spot"
    kinds: tuple[VolatilityClass, ...] = CLASSES
    workload: str = "tpcds"
    error: float = 0.0  # most by which the planner's demands and durations err, as a fraction
    options: Mapping[str, Any] = field(default_factory=dict)  # of the simulator, for QOOP
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Cell:
    variant: Variant
    kind: VolatilityClass
    query: int


@dataclass(frozen=True, slots=True)
class _Setting:
    """A variant's settings and what follows from them."""

    settings: Settings
    world: World


def compare(variants: Sequence[Variant], settings: Settings, progress: Progress) -> list[dict[str, Any]]:
    """Run every query ``settings.runs`` times with Clarinet and with QOOP, for each variant and class.

    Both see the same capacities. Returns one record a variant and class, with one value a query: the mean
    over its runs. A class that the profile has no region of is left out.
    """
    known = {}
    for v in variants:
        own = replace(settings, **v.settings)
        progress(f"{v.name}: workload", 0, 1)
        known[v.name] = _Setting(own, build(v.profile, v.workload, own))
    cells = [
        _Cell(v, kind, query)
        for v in variants
        for kind in v.kinds
        if kind in known[v.name].world.regions
        for query in range(len(known[v.name].world.families))
    ]
    rows: dict[tuple[str, VolatilityClass], list[dict[str, Any]]] = {}
    found = _each(cells, known, settings.processes)
    for number, (cell, row) in enumerate(zip(cells, found, strict=True), 1):
        rows.setdefault((cell.variant.name, cell.kind), []).append(row)
        progress(f"{cell.variant.name}, {cell.kind}", number, len(cells))
    by_name = {v.name: v for v in variants}
    return [_record(by_name[name], kind, done, known[name]) for (name, kind), done in rows.items()]


_known: Mapping[str, _Setting] = {}  # of a worker process


def _prepare(known: Mapping[str, _Setting]) -> None:
    global _known  # noqa: PLW0603 a worker process is given its workloads once, not with every cell
    _known = known


def _in_worker(cell: _Cell) -> dict[str, Any]:
    return _measure(cell, _known[cell.variant.name])


def _each(cells: Sequence[_Cell], known: Mapping[str, _Setting], processes: int) -> Iterator[dict[str, Any]]:
    if processes == 1 or len(cells) < 8:
        for cell in cells:
            yield _measure(cell, known[cell.variant.name])
        return
    # a fresh interpreter: the caller may hold threads, which a forked one would inherit in the middle of things
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, initializer=_prepare, initargs=(known,)) as pool:
        try:
            yield from pool.map(_in_worker, cells, chunksize=5)
        finally:
            pool.shutdown(cancel_futures=True)


def _measure(cell: _Cell, setting: _Setting) -> dict[str, Any]:
    variant, settings, world = cell.variant, setting.settings, setting.world
    family = world.families[cell.query]
    pairs: list[tuple[Outcome, Outcome]] = []
    for number in range(settings.runs):
        profile = world.profile(cell.kind, cell.query, number)
        known, true = family, {}
        if variant.error:
            rng = np.random.default_rng([settings.seed, 8, cell.query, number])
            known, true = mistaken(family, variant.error, rng)
        fixed = run(known, profile, Options("clarinet"), testbed=settings.testbed, true=true)
        options = Options(**{"policy": "qoop", "hysteresis": settings.hysteresis, **variant.options})
        moving = run(known, profile, options, testbed=settings.testbed, true=true, timer=time.process_time)
        pairs.append((fixed, moving))
    return _row(family, pairs)


def mistaken(family: Family, error: float, rng: np.random.Generator) -> tuple[Family, dict[str, Stage]]:
    """Return the family as the planner believes it to be, and the stages as they are.

    Every stage's demand and duration is off by a factor of 1 + X, X uniform in ±``error``, each drawn
    anew (QOOP, section 2.6.3).
    """
    true = {s.physical_key: s for p in family.plans for s in p.stages}

    def believed(stage: Stage) -> Stage:
        demand, duration = 1 + rng.uniform(-error, error, 2)
        wanted = stage.demand._replace(
            cores=stage.demand.cores * float(demand), memory=stage.demand.memory * float(demand)
        )
        return replace(stage, demand=wanted, duration=stage.duration * float(duration))

    return family.with_stages(believed), true


def _row(family: Family, pairs: Sequence[tuple[Outcome, Outcome]]) -> dict[str, Any]:
    fixed, moving = [a for a, _ in pairs], [b for _, b in pairs]

    def mean(values: Iterable[float]) -> float:
        return round(float(np.mean(list(values))), 6)

    seconds = mean(a.seconds for a in fixed), mean(b.seconds for b in moving)
    return {
        "query": family.name,
        "joins": family.joins,
        "clarinet": seconds[0],
        "qoop": seconds[1],
        "improvement": round(seconds[0] / seconds[1], 6),
        "runs": [round(a.seconds / b.seconds, 4) for a, b in pairs],
        "switches": [len(b.switches) for b in moving],
        "depths": [max((s.depth for s in b.switches), default=0) for b in moving],
        "throughput": [mean(o.tasks / o.seconds for o in side) for side in (fixed, moving)],
        "occupied": [mean(o.used / o.seconds for o in side) for side in (fixed, moving)],
        "bushy": [mean(o.bushy / max(o.stages, 1) for o in side) for side in (fixed, moving)],
        "lost": [mean(float(o.lost) for o in side) for side in (fixed, moving)],
        "aborted": mean(float(b.aborted) for b in moving),
        "decisions": mean(float(b.decisions) for b in moving),
        "overhead": mean(b.planning / b.seconds for b in moving),
    }


def _record(
    variant: Variant, kind: VolatilityClass, rows: Sequence[dict[str, Any]], setting: _Setting
) -> dict[str, Any]:
    gains = np.array([r["improvement"] for r in rows])
    single = np.array([x for r in rows for x in r["runs"]])
    switches = [n for r in rows for n in r["switches"]]
    world = setting.world
    return {
        "variant": variant.name,
        "profile": variant.profile,
        "class": kind,
        "workload": variant.workload,
        "error": variant.error,
        "options": dict(variant.options),
        "settings": dict(variant.settings),
        "level": round(world.level, 2),
        "regions": len(world.regions[kind]),
        "median": float(np.median(gains)),
        "mean": float(gains.mean()),
        "p90": float(np.quantile(gains, 0.9)),
        "largest": float(gains.max()),
        "smallest": float(gains.min()),
        "improved": float((gains > 1.001).mean()),
        "worse": float((gains < 0.999).mean()),
        "runs_improved": float((single > 1.001).mean()),
        "runs_worse": float((single < 0.999).mean()),
        "runs_p99": float(np.quantile(single, 0.99)),
        "switches": {str(n): switches.count(n) for n in sorted(set(switches))},
        "overhead": float(np.mean([r["overhead"] for r in rows])),
        "queries": list(rows),
    }


# --- what is run --------------------------------------------------------------------------------------------


def benchmark(settings: Settings, progress: Progress) -> dict[str, Any]:
    """Run figures 2.6 to 2.12: both profiles, all classes, TPC-DS and random queries."""
    variants = [
        Variant(f"{load} on {profile}", profile, workload=load)
        for load, profile in product(("tpcds", "synthetic"), ("spot", "cluster"))
    ]
    return {"settings": settings.shown(), "records": compare(variants, settings, progress)}


HYSTERESIS = (0.0, 0.05, 0.1, 0.15, 0.25, 0.5, 0.9)
ERRORS = (0.0, 0.05, 0.1, 0.25)
JOB_SECONDS = (125.0, 250.0, 500.0, 1000.0, 2000.0, 4000.0)
GRAIN_WORK = (1.0, 1.15, 1.3, 1.5)


def sweeps(settings: Settings, progress: Progress) -> dict[str, Any]:
    """Run figures 2.13 to 2.15 and our own sweeps of job length and of what parallelism costs.

    In both workloads, on the profile and in the classes that the source shows them for.
    """
    loads = ("tpcds", "synthetic")
    groups: dict[str, list[Variant]] = {
        "hysteresis": [
            Variant(f"{load} on {p}, h {h:.0%}", p, ("high",), load, options={"hysteresis": h})
            for load, p, h in product(loads, ("spot", "cluster"), HYSTERESIS)
        ],
        "errors": [
            Variant(f"{load}, error {e:.0%}", "spot", workload=load, error=e)
            for load, e in product(loads, ERRORS)
        ],
        "backtracking": [
            Variant(f"{load}, backtracking {word}", "cluster", workload=load, options={"backtracking": on})
            for load, (word, on) in product(loads, (("on", True), ("off", False)))
        ],
        "length": [
            Variant(
                f"{load}, {s:g} s",
                "spot",
                ("high",),
                load,
                settings={"mean_seconds": s, "minutes": int(s / 5)},
            )
            for load, s in product(loads, JOB_SECONDS)
        ],
        "parallelism": [
            Variant("tpcds, as planned", "spot", ("high",), "tpcds", settings={"grains": (1.0,)}),
            *(
                Variant(f"{load}, work x{w:g}", "spot", ("high",), load, settings={"grain_work": w})
                for load, w in product(loads, GRAIN_WORK)
            ),
        ],
    }
    out: dict[str, Any] = {"settings": settings.shown()}
    for name, variants in groups.items():
        records = compare(
            variants, settings, lambda what, n, of, name=name: progress(f"{name}: {what}", n, of)
        )
        for record in records:
            del record["queries"]
        out[name] = records
    return out
