"""Plan families for the simulators: the alternative plans of one query on a cluster of one-core containers.

A family comes from the planner itself, either for a stored query or for a random one. In the testbed of QOOP's
evaluation every container builds its own broadcast tables, so that a broadcast join shuffles nothing but
needs the memory of several containers a task: plans trade work against demand.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import ceil, inf, isfinite, log
from typing import Any

import numpy as np

from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Catalogue, ColumnStatistics, Resources, Share, Table, TableStatistics, Work
from ebbflow.planners.query.costs.cost import SPARK, CostModel
from ebbflow.planners.query.plan.qep import QueryExecutionPlan, Stage, Text
from ebbflow.planners.query.planner import PlannerOptions, QueryPlanner
from ebbflow.planners.query.running.packing import simulate

NOW = datetime(2026, 1, 1, tzinfo=UTC)  # what clock functions are frozen to
# Tables that every container builds for itself are bounded by its memory only.
TEZ = replace(SPARK, engine="tez", broadcast_limit=inf, broadcast_fraction=0.8)


@dataclass(frozen=True, slots=True)
class Testbed:
    """A cluster of equal machines, cut into one-core containers (QOOP, section 8)."""

    machines: int = 20
    per_machine: int = 30  # containers of one core
    memory: float = 4.0  # GiB a container

    __test__ = False  # no test class

    @property
    def containers(self) -> int:
        """Return the number of containers."""
        return self.machines * self.per_machine

    def share(self, containers: float, revision: int = 0) -> Share:
        """Return a share of ``containers``. A task may take several, up to a whole machine."""
        most = min(containers, float(self.per_machine))
        return Share(
            revision,
            Resources(containers, containers * self.memory),
            Resources(most, most * self.memory),
            ceil(containers / self.per_machine),
        )

    def planning(self, containers: float, width: float) -> Share:
        """Return the share to plan for: tasks of one core that may take the memory of ``width`` containers."""
        return Share(
            0,
            Resources(containers, containers * self.memory),
            Resources(1.0, width * self.memory),
            self.machines,
        )


@dataclass(frozen=True, slots=True)
class Family:
    """The alternative plans of one query. Plans share stages by ``output_fp`` and ``physical_key``."""

    name: str
    plans: tuple[QueryExecutionPlan, ...]
    joins: int = 0  # joins of the query
    alternatives: int = 0  # distinct plans that these were chosen from

    def scaled(self, factor: float) -> "Family":
        """Return the family with every duration and latency times ``factor``."""
        if not 0 < factor < inf:
            raise OptionError(f"factor must be > 0 and finite; got {factor}")
        return self.with_stages(
            lambda s: replace(s, duration=s.duration * factor, latency=s.latency * factor)
        )

    def with_stages(self, change: Callable[[Stage], Stage]) -> "Family":
        """Return the family with ``change`` applied to every stage, once for each physical key."""
        changed: dict[str, Stage] = {}

        def of(stage: Stage) -> Stage:
            if stage.physical_key not in changed:
                changed[stage.physical_key] = change(stage)
            return changed[stage.physical_key]

        plans = tuple(replace(p, stages=tuple(of(s) for s in p.stages)) for p in self.plans)
        return replace(self, plans=plans)

    def best_seconds(self, share: Share) -> float:
        """Return the time of the plan that finishes first on ``share``: seconds."""
        return min(simulate(p, share).seconds for p in self.plans)


@dataclass(frozen=True, slots=True)
class Variety:
    """For which shares a family's plans are made. Their union is thinned to ``keep``."""

    containers: tuple[float, ...] = (24.0, 60.0, 200.0, 600.0)
    widths: tuple[float, ...] = (1.0, 8.0)  # containers' memory that a task may take
    keep: int = 8  # plans a family (QOOP, 5.3)
    trees: int = 6  # join trees a block
    grains: tuple[float, ...] = (0.25, 1.0, 4.0)  # tasks of a stage, times the cost model's number
    grain_work: float = 1.3  # work of a stage cut into 4 times the tasks, over its work as it is


def calibrated(families: Sequence[Family], mean: float, share: Share) -> tuple[Family, ...]:
    """Return the families, all times multiplied by one factor: their best plans take ``mean`` seconds on
    average on ``share``."""
    times = [f.best_seconds(share) for f in families]
    if not times or not all(isfinite(t) and t > 0 for t in times):
        raise OptionError("families must hold a plan that fits the share; some do not")
    factor = mean * len(times) / sum(times)
    return tuple(f.scaled(factor) for f in families)


# --- families from the planner ------------------------------------------------------------------------------


def family(
    name: str,
    text: str,
    catalogue: Catalogue,
    testbed: Testbed | None = None,
    variety: Variety | None = None,
    model: CostModel = TEZ,
) -> Family:
    """Plan ``text`` for every share of ``variety``, one join a stage, and keep plans that differ in cost.

    Kept are, for every capacity of ``variety``, the plan that finishes first, then those with the most
    different completion times over the capacities; plans whose times differ by less than 5 % everywhere
    count as one. Raises the planner's errors.
    """
    bed, wanted = testbed or Testbed(), variety or Variety()
    options = PlannerOptions(cuts="every-join", keep=wanted.keep, trees=wanted.trees)
    planner = QueryPlanner(text, catalogue, model, now=NOW, salt=name, options=options)
    pool: dict[tuple[str, ...], QueryExecutionPlan] = {}
    known: dict[str, Stage] = {}
    for width in wanted.widths:
        for containers in wanted.containers:
            for plan in planner.candidates(bed.planning(containers, width)):
                stages = tuple(known.setdefault(s.physical_key, _bare(s)) for s in plan.stages)
                keys = tuple(sorted(s.physical_key for s in stages))
                pool.setdefault(keys, QueryExecutionPlan("", stages, plan.shape))
    kept = _distinct(list(pool.values()), [bed.share(c) for c in wanted.containers], wanted.keep)
    named = tuple(replace(p, id=f"{name}/{i}") for i, p in enumerate(kept, 1))
    return Family(name, named, max(planner.relations_planned - len(planner.analysis.blocks), 0), len(pool))


def varied(of: Family, testbed: Testbed | None = None, variety: Variety | None = None) -> Family:
    """Return the family with every plan in each degree of parallelism of ``variety``, thinned as in ``family``.

    Physical variants of QOOP's candidates (section 2.4): a stage cut into more tasks ends sooner where there is
    room for them, but each task has to start, to build its own tables and to write its own part of every
    shuffle, so that the work grows.
    """
    bed, wanted = testbed or Testbed(), variety or Variety()
    known: dict[str, Stage] = {}

    def cut(stage: Stage, grain: float) -> Stage:
        made = _cut(stage, grain, wanted.grain_work)
        return known.setdefault(made.physical_key, made)

    pool = [replace(p, stages=tuple(cut(s, g) for s in p.stages)) for p in of.plans for g in wanted.grains]
    kept = _distinct(pool, [bed.share(c) for c in wanted.containers], wanted.keep)
    named = tuple(replace(p, id=f"{of.name}/{i}") for i, p in enumerate(kept, 1))
    return replace(of, plans=named, alternatives=of.alternatives * len(wanted.grains))


def _cut(stage: Stage, grain: float, grain_work: float) -> Stage:
    """Return ``stage`` in ``grain`` times as many tasks; a fourfold cut multiplies its work by ``grain_work``."""
    tasks = max(round(stage.tasks * grain), 1)
    if tasks == stage.tasks:
        return stage
    work = stage.tasks * stage.duration * grain_work ** log(tasks / stage.tasks, 4)
    return replace(stage, physical_key=f"{stage.physical_key}x{tasks}", tasks=tasks, duration=work / tasks)


def _bare(stage: Stage) -> Stage:
    """Return what simulators need of a stage."""
    return replace(stage, statement=Text(""), logical="", covers=frozenset(), tables=(), work=Work())


def _distinct(
    plans: Sequence[QueryExecutionPlan], shares: Sequence[Share], keep: int
) -> list[QueryExecutionPlan]:
    times = [[simulate(p, s).seconds for s in shares] for p in plans]
    fitting = [i for i, t in enumerate(times) if all(isfinite(x) for x in t)]
    best = [min(fitting, key=lambda i: (times[i][k], i)) for k in range(len(shares))]

    def gap(i: int, j: int) -> float:
        return max(abs(a - b) / max(a, b) for a, b in zip(times[i], times[j], strict=True))

    def badness(i: int) -> float:
        return min(times[i][k] / times[best[k]][k] for k in range(len(shares)))

    kept = list(dict.fromkeys(best))
    for i in sorted(fitting, key=lambda i: (badness(i), i)):
        if len(kept) >= keep:
            break
        if all(gap(i, j) >= 0.05 for j in kept):
            kept.append(i)
    return [plans[i] for i in kept]


def synthetic(
    rng: np.random.Generator,
    count: int = 1,
    *,
    relations: tuple[int, int] = (4, 7),
    testbed: Testbed | None = None,
    variety: Variety | None = None,
) -> tuple[Family, ...]:
    """Return the planned families of ``count`` random queries: trees of joins between tables
    of 10^6.5 to 10^8.5 rows.

    ``relations`` bounds the tables of a query, both included. At least two plans a family; ``varied``
    adds degrees of parallelism. Reproducible from ``rng``.
    """
    low, high = relations
    if not 2 <= low <= high <= 12:
        raise OptionError(f"relations must be two numbers from 2 to 12, in order; got {relations}")
    if count < 1:
        raise OptionError(f"count must be >= 1; got {count}")
    out: list[Family] = []
    for _ in range(50 * count):
        text, catalogue = _random_query(rng, int(rng.integers(low, high + 1)))
        made = family(f"synthetic-{len(out) + 1}", text, catalogue, testbed, variety)
        if len(made.plans) > 1:
            out.append(made)
        if len(out) == count:
            return tuple(out)
    raise OptionError(f"relations {relations} give no queries with two plans; allow more")


def _random_query(rng: np.random.Generator, relations: int) -> tuple[str, Catalogue]:
    """Return a query whose join graph is a random tree, and its tables. Every row of the smaller side of an
    edge meets one of the larger, so that results do not explode."""
    rows = [float(round(10 ** rng.uniform(6.5, 8.5))) for _ in range(relations)]
    columns: list[dict[str, ColumnStatistics]] = [
        {"v": ColumnStatistics(100.0, 0.0, 0.0, 100.0)} for _ in range(relations)
    ]
    conditions = []
    for i in range(1, relations):
        parent = int(rng.integers(0, i))
        distinct = max(rows[i], rows[parent])
        for end in (i, parent):
            columns[end][f"k{i}"] = ColumnStatistics(min(rows[end], distinct), 0.0, 0.0, distinct)
        conditions.append(f"t{i}.k{i} = t{parent}.k{i}")
    filtered = [i for i in range(relations) if rng.random() < 0.6]
    conditions += [f"t{i}.v < {int(rng.integers(2, 60))}" for i in filtered]
    tables = {
        f"t{i}": Table(
            f"t{i}",
            tuple((c, "bigint") for c in columns[i]),
            "1",
            TableStatistics(rows[i], rows[i] * float(rng.uniform(20, 120)), columns[i]),
        )
        for i in range(relations)
    }
    text = (
        f"SELECT t0.v, sum(t1.v) AS s FROM {', '.join(tables)} WHERE {' AND '.join(conditions)} GROUP BY t0.v"
    )
    return text, Catalogue(tables)


# --- families as JSON ---------------------------------------------------------------------------------------


def encode(families: Iterable[Family]) -> dict[str, Any]:
    """Return the families as JSON-able values; stages are stored once for each physical key."""
    out = []
    for f in families:
        stages = list({s.physical_key: s for p in f.plans for s in p.stages}.values())
        number = {s.physical_key: i for i, s in enumerate(stages)}
        fps = list(dict.fromkeys(fp for s in stages for fp in (s.output_fp, *s.inputs)))
        short = {fp: i for i, fp in enumerate(fps)}
        out.append(
            {
                "name": f.name,
                "joins": f.joins,
                "alternatives": f.alternatives,
                "stages": [
                    {
                        "name": s.name,
                        "fp": short[s.output_fp],
                        "inputs": [short[fp] for fp in s.inputs],
                        "tasks": s.tasks,
                        "memory": round(s.demand.memory, 4),
                        "duration": round(s.duration, 5),
                        "latency": round(s.latency, 5),
                    }
                    for s in stages
                ],
                "plans": [
                    {"shape": p.shape, "stages": [number[s.physical_key] for s in p.stages]} for p in f.plans
                ],
            }
        )
    return {"families": out}


def decode(document: Mapping[str, Any]) -> tuple[Family, ...]:
    """Return the families that ``encode`` wrote. Raises ``OptionError`` when a part is missing."""
    try:
        return tuple(_decoded(item) for item in document["families"])
    except (KeyError, IndexError, TypeError) as error:
        raise OptionError(f"families must be as encode writes them; {error!r}") from None


def _decoded(item: Mapping[str, Any]) -> Family:
    name = item["name"]
    stages = [
        Stage(
            name=s["name"],
            output_fp=f"{name}:{s['fp']}",
            physical_key=f"{name}:{s['fp']}#{i}",
            inputs=tuple(f"{name}:{fp}" for fp in s["inputs"]),
            tables=(),
            statement=Text(""),
            tasks=s["tasks"],
            demand=Resources(1.0, s["memory"]),
            duration=s["duration"],
            latency=s["latency"],
            rows=0.0,
            bytes=0.0,
            work=Work(),
        )
        for i, s in enumerate(item["stages"])
    ]
    plans = tuple(
        QueryExecutionPlan(f"{name}/{n}", tuple(stages[i] for i in p["stages"]), p["shape"])
        for n, p in enumerate(item["plans"], 1)
    )
    return Family(name, plans, item["joins"], item["alternatives"])
