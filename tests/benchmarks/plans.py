"""Does the best plan depend on capacity? Plans x capacities, and what a plan chosen at one capacity costs at another.

    python -m tests.benchmarks.plans --tables ~/.cache/ebbflow/tpch/sf1 --out docs/benchmarks
    python -m tests.benchmarks.plans --tables ... --measure 2,4 --queries 3,18 --rounds 2     (as root)

Of each query four candidates, those that are the best at most capacities first, on 1, 2, 4 and 6 nodes of a third
of a core with two memories, each with and without limits on links, as the cost model has them; statistics of other
scale factors are those of the tables, multiplied. ``--measure`` runs the same plans on local nodes of that number,
with each of the links, within ``--minutes``, and tells by how much predictions are off. Five minutes without
measuring.
"""

import argparse
import itertools
import json
import math
import os
import platform
import shutil
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.spark.settings import ExecutorShape, executor_memory
from ebbflow.infra.storage.files import write_text
from ebbflow.planners.model import Catalogue, Share, Table
from ebbflow.planners.query.costs.cost import SPARK
from ebbflow.planners.query.plan.qep import QueryExecutionPlan
from ebbflow.planners.query.planner import QueryPlanner
from ebbflow.planners.query.running.packing import simulate
from ebbflow.tasks.drawing.charts import bars_svg
from ebbflow.tasks.query.planning import Gathered, gather, planner_of
from ebbflow.tasks.query.request import QueryRequest

NODES = (1, 2, 4, 6)
MEMORIES = ("2500m", "1250m")  # of a node: its worker's
CPUS = 1 / 3  # of this machine behind the one core of a node
KEPT = 4  # candidates of a query


@dataclass(frozen=True)
class Setting:
    """One capacity: nodes of one core, with the memory of each (MiB) and the rate of its link (Mbit/s; 0: none)."""

    nodes: int
    memory: int
    link: float

    @property
    def share(self) -> Share:
        """Return what a query may count on there."""
        usable = ExecutorShape(1, executor_memory(self.memory / 1024)).usable_memory
        network = self.link / 8 * self.nodes
        return Share.uniform(self.nodes, usable * self.nodes, self.nodes, network=network)

    @property
    def name(self) -> str:
        link = f", {self.link:g} Mbit/s" if self.link else ""
        return f"{self.nodes} x {self.memory} MiB{link}"


@dataclass
class Matrix:
    """Seconds of each plan at each capacity; infinite where it does not fit."""

    settings: Sequence[Setting]
    plans: Mapping[str, str]  # shape by id
    seconds: dict[str, list[float]]  # by plan id, in the order of the settings

    def chosen(self, at: int) -> str:
        """Return the plan that is the best at a capacity."""
        return min(self.seconds, key=lambda plan: (self.seconds[plan][at], plan))

    def regrets(self) -> dict[tuple[int, int], float]:
        """Return, by the capacity it was chosen at and the one it runs at, a plan's time over the best one's."""
        found = {}
        for a, b in itertools.permutations(range(len(self.settings)), 2):
            best = self.seconds[self.chosen(b)][b]
            found[a, b] = self.seconds[self.chosen(a)][b] / best if math.isfinite(best) else 1.0
        return found


def scaled(catalogue: Catalogue, factor: float) -> Catalogue:
    """Return the tables as they are at ``factor`` times their scale; nation and region stay as they are."""

    def grown(table: Table) -> Table:
        known = table.statistics
        if known is None or factor == 1.0 or known.rows < 100:
            return table
        columns = {
            name: replace(c, distinct=c.distinct * factor) if c.distinct > known.rows / 50 else c
            for name, c in known.columns.items()
        }
        grown = replace(known, rows=known.rows * factor, bytes=known.bytes * factor, columns=columns)
        return replace(table, statistics=grown)

    return Catalogue({name: grown(table) for name, table in catalogue.tables.items()})


class Query:
    """One query, gathered once."""

    def __init__(self, number: int, tables: str, folder: Path) -> None:
        sql = files("ebbflow.flows").joinpath("tpch", f"q{number}.sql").read_text()
        self.number, self.clock = number, SystemClock()
        self.request = QueryRequest(sql, tables=tables, engine="spark", store=str(folder / "store"))
        self.store = ParquetCheckpointStore(self.request.store_place, clock=self.clock)
        self.gathered = gather(self.request, self.store, self.clock, run_id="plans")

    def planner(self, factor: float) -> QueryPlanner:
        """Return a planner of the tables at ``factor`` times their size, for slow cores."""
        gathered = replace(self.gathered, catalogue=scaled(self.gathered.catalogue, factor))
        planner = planner_of(self.request, gathered, self.store, run_id="plans")
        planner.model = replace(SPARK.slower(1 / CPUS), latency=SPARK.latency)
        return planner


def matrix(planner: QueryPlanner, settings: Sequence[Setting]) -> Matrix:
    """Return the candidates of a query and their seconds at each of ``settings``, as the model has them."""
    votes: Counter[str] = Counter()
    shapes: dict[str, str] = {}
    spare: list[str] = []
    for setting in settings:
        plans = planner.candidates(setting.share)
        shapes |= {plan.id: plan.shape for plan in plans}
        votes[min(plans, key=lambda p: (simulate(p, setting.share).seconds, p.id)).id] += 1
        for measure in ("total_work", "critical_path", "peak_memory"):
            spare.append(min(plans, key=lambda p: (getattr(p, measure), p.id)).id)
    ids = list(dict.fromkeys([*(i for i, _ in votes.most_common()), *spare]))
    chosen: list[str] = []
    for plan_id in ids:  # other trees first: the same tree cut elsewhere is hardly another plan
        if shapes[plan_id] not in {shapes[c] for c in chosen}:
            chosen.append(plan_id)
    chosen = [*chosen, *(i for i in ids if i not in chosen)][:KEPT]
    seconds: dict[str, list[float]] = {plan_id: [] for plan_id in chosen}
    for setting in settings:
        costed = {plan.id: plan for plan in planner.candidates(setting.share, also=chosen)}
        for plan_id in chosen:
            seconds[plan_id].append(simulate(costed[plan_id], setting.share).seconds)
    return Matrix(settings, {i: shapes[i] for i in chosen}, seconds)


def summary(found: Matrix) -> dict[str, Any]:
    """Return a matrix with its regrets, for JSON: what cannot run has no seconds."""
    regrets = found.regrets()
    finite = [r for r in regrets.values() if math.isfinite(r)]
    worst = max(regrets, key=lambda k: regrets[k] if math.isfinite(regrets[k]) else 0.0)
    return {
        "plans": dict(found.plans),
        "settings": [s.name for s in found.settings],
        "seconds": {p: [_number(s) for s in row] for p, row in found.seconds.items()},
        "best": [found.chosen(i) for i in range(len(found.settings))],
        "regret": {
            "median": _number(statistics.median(finite)),
            "share above 1.15": round(sum(r > 1.15 for r in regrets.values()) / len(regrets), 3),
            "worst": _number(regrets[worst]),
            "worst from": found.settings[worst[0]].name,
            "worst at": found.settings[worst[1]].name,
            "cannot run": sum(not math.isfinite(r) for r in regrets.values()),
        },
    }


def _number(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None


# what is measured


def measured(
    queries: Sequence[Query], nodes: int, link: float, rounds: int, found: Mapping[int, Matrix], end: float
) -> Iterator[dict[str, Any]]:
    """Run the candidates on a fleet of ``nodes``, a round that warms up first; yield a row for each plan."""
    from ebbflow.infra.local_fleet import LocalFleet, LocalPool
    from ebbflow.infra.spark.engine import SparkEngine

    clock = SystemClock()
    memory = _mebibytes(MEMORIES[0])
    setting = Setting(nodes, memory, link)
    pool = LocalPool(
        "spark", "spark", cores=1, memory=memory / 1024, initial=nodes, max_nodes=nodes, cpus_per_slot=CPUS
    )
    network = (link * 1e6,) if link else ()
    with LocalFleet.start([pool], f"plans-{os.getpid()}", network=network, wait=300.0) as fleet:
        engine = SparkEngine.start(fleet.spark_master, memory=executor_memory(memory / 1024), cores=1)
        try:
            for query in queries:
                planner = query.planner(1.0)
                planner.candidates(setting.share)
                wanted = found[query.number]
                for other in wanted.settings:
                    planner.candidates(other.share)
                costed = {p.id: p for p in planner.candidates(setting.share, also=list(wanted.plans))}
                seconds: dict[str, list[float]] = {plan_id: [] for plan_id in wanted.plans}
                for _, plan_id in itertools.product(range(rounds + 1), wanted.plans):
                    if clock.now() > end:
                        break
                    began = clock.now()
                    run(query, engine, costed[plan_id], setting.share)
                    seconds[plan_id].append(clock.now() - began)
                for plan_id, times in seconds.items():
                    if len(times) > 1:
                        yield {
                            "query": query.number,
                            "setting": setting.name,
                            "plan": plan_id,
                            "shape": wanted.plans[plan_id],
                            "seconds": round(statistics.median(times[1:]), 2),
                            "predicted": _number(simulate(costed[plan_id], setting.share).seconds),
                            "load": os.getloadavg()[0],
                        }
        finally:
            engine.close()


def run(query: Query, engine: Any, plan: QueryExecutionPlan, share: Share) -> None:
    """Run one plan as the product does, with nothing to switch to."""
    from ebbflow.infra.query.slices import SliceIndex
    from ebbflow.planners.model import Capacity, Node
    from ebbflow.planners.query.running.execution import Execution
    from ebbflow.planners.query.running.replanner import Replanner
    from ebbflow.planners.query.running.session import Session
    from ebbflow.tasks.query.driver import Driver
    from ebbflow.tasks.query.listening import Inbox, NullQueryListener, Threads
    from ebbflow.tasks.query.recorder import RunRecorder
    from ebbflow.tasks.query.stagework import StageWork

    inbox, threads = Inbox(), Threads(8)
    with tempfile.TemporaryDirectory(prefix="ebbflow-bench-") as folder:
        request = replace(query.request, store=folder)
        store = ParquetCheckpointStore(request.store_place, clock=query.clock)
        gathered: Gathered = query.gathered
        execution = Execution([plan], plan, "clarinet", Replanner([plan]), max_parallel_stages=4)
        planner = query.planner(1.0)
        session = Session(planner, share, "clarinet", versions=gathered.versions, execution=execution)
        book = RunRecorder(query.clock.now(), NullQueryListener())
        slices = SliceIndex(store, store.cache("slices"))
        work = StageWork(engine, store, gathered.relations, slices, inbox, reuse=False, since=book.started)
        nodes = tuple(Node(f"n{i}", 1, share.largest.memory) for i in range(share.nodes))
        try:
            Driver(session, work, book, threads, query.clock).run(
                Capacity(1, nodes, at=query.clock.now(), network=share.link)
            )
        finally:
            threads.close()


def _mebibytes(text: str) -> int:
    return int(text.removesuffix("m"))


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def main() -> None:
    """Run and write ``plans.json`` and ``plans.svg`` into ``--out``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", required=True, help="folder of TPC-H tables (ebbflow data makes one)")
    parser.add_argument("--queries", type=_numbers, default=[3, 5, 9, 18, 21])
    parser.add_argument("--scales", type=_numbers, default=[1, 20], help="times the size of the tables")
    parser.add_argument(
        "--links", type=_numbers, default=[0, 100], help="Mbit/s of a node's link; 0: no limit"
    )
    parser.add_argument("--measure", type=_numbers, default=[], help="numbers of nodes to measure on")
    parser.add_argument("--rounds", type=int, default=2, help="how many times each plan is measured")
    parser.add_argument("--minutes", type=float, default=20.0, help="after which nothing more is measured")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    given = parser.parse_args()
    settings = [
        Setting(nodes, _mebibytes(memory), float(link))
        for link, memory, nodes in itertools.product(given.links, MEMORIES, NODES)
    ]
    predicted: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ebbflow-bench-") as folder:
        queries = [Query(number, given.tables, Path(folder)) for number in given.queries]
        first: dict[int, Matrix] = {}
        for scale, query in itertools.product(given.scales, queries):
            found = matrix(query.planner(float(scale)), settings)
            if scale == given.scales[0]:
                first[query.number] = found
            predicted.append({"query": query.number, "scale": scale, **summary(found)})
            print(json.dumps({"query": query.number, "scale": scale, **predicted[-1]["regret"]}), flush=True)
        end = SystemClock().now() + 60.0 * given.minutes
        for nodes, link in itertools.product(given.measure, given.links):
            if SystemClock().now() < end:
                for row in measured(queries, nodes, float(link), given.rounds, first, end):
                    rows.append(row)
                    print(json.dumps(row), flush=True)
        shutil.rmtree(folder, ignore_errors=True)
    errors = [
        max(r["seconds"] / r["predicted"], r["predicted"] / r["seconds"]) for r in rows if r["predicted"]
    ]
    result = {
        "benchmark": "plans",
        "tables": Path(given.tables).name,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load": os.getloadavg()[0],
        "predicted": predicted,
        "measured": rows,
        "q_error": {"median": _number(statistics.median(errors)), "worst": _number(max(errors))}
        if errors
        else {},
    }
    write_text(given.out / "plans.json", json.dumps(result, indent=1) + "\n")
    groups = [f"Q{p['query']}, scale {p['scale']}" for p in predicted]
    series = {
        "worst": [p["regret"]["worst"] for p in predicted],
        "median": [p["regret"]["median"] for p in predicted],
    }
    title = "Plan chosen at one capacity, run at another: time over the best plan's (predicted)"
    write_text(given.out / "plans.svg", bars_svg(title, groups, series, unit="x"))


if __name__ == "__main__":
    main()
