"""How long planning takes: from SQL text to a chosen plan, and a re-plan decision, by number of relations.

Run from the repository root: ``python -m tests.benchmarks.planning --out DIR``. Writes ``planning.json`` and
``planning.svg`` and prints a table; exits with 1 when a figure breaks its bound. Planning has one thread and
waits for nothing, so its processor time is what is measured: the time on a machine with a core to spare.
"""

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from ebbflow.planners.model import Catalogue, ColumnStatistics, Share, Table, TableStatistics
from ebbflow.planners.query.costs.cost import SPARK
from ebbflow.planners.query.plan.state import ExecutionState, StageOutput
from ebbflow.planners.query.planner import QueryPlanner
from ebbflow.planners.query.running.execution import Execution
from ebbflow.planners.query.running.replanner import Replanner
from ebbflow.tasks.drawing.charts import bars_svg

QUERIES = Path(__file__).parent.parent / "fixtures" / "tpch"
SHARE = Share.uniform(16, 64, nodes=4, hazard=0.5)
SMALLER = Share.uniform(8, 32, nodes=2, revision=1, hazard=0.5)
NOW = datetime(2026, 1, 1, tzinfo=UTC)
PLAN_MS = {8: 100.0, 12: 1000.0}  # bound on the median by number of relations
DECISION_MS = 50.0
MEMORY_MIB = 300.0


@dataclass(frozen=True)
class Figure:
    """Medians over repetitions of one query."""

    query: str
    relations: int
    plans: int
    plan_ms: float  # from text to the chosen plan, statistics being known
    again_ms: float  # candidates anew from actual sizes, on a smaller share
    decide_ms: float  # the decision among the candidates

    @property
    def bound_ms(self) -> float:
        """Return the bound on ``plan_ms`` and ``again_ms``."""
        return next((ms for most, ms in PLAN_MS.items() if self.relations <= most), float("inf"))

    @property
    def kept(self) -> bool:
        """Tell whether every bound is kept."""
        return max(self.plan_ms, self.again_ms) <= self.bound_ms and self.decide_ms <= DECISION_MS


def shaped(shape: str, relations: int) -> tuple[str, Catalogue]:
    """Return a chain, star or clique query over ``relations`` tables, and its tables."""
    pairs = {
        "chain": [(i, i + 1) for i in range(relations - 1)],
        "star": [(0, i) for i in range(1, relations)],
        "clique": [(i, j) for i in range(relations) for j in range(i + 1, relations)],
    }[shape]
    rng = random.Random(relations)
    columns: dict[int, list[str]] = {i: ["v"] for i in range(relations)}
    for i, j in pairs:
        columns[i].append(f"k{i}_{j}")
        columns[j].append(f"k{i}_{j}")
    tables = {}
    for i, names in columns.items():
        rows = 10.0 ** rng.uniform(3, 7)
        known = {n: ColumnStatistics(distinct=rows ** rng.uniform(0.4, 1.0), low=0, high=rows) for n in names}
        tables[f"t{i}"] = Table(
            f"t{i}", tuple((n, "bigint") for n in names), "1", TableStatistics(rows, rows * 40.0, known)
        )
    joins = " AND ".join(f"t{i}.k{i}_{j} = t{j}.k{i}_{j}" for i, j in pairs)
    text = f"SELECT t0.v, sum(t1.v) AS s FROM {', '.join(tables)} WHERE {joins} AND t0.v > 10 GROUP BY t0.v"
    return text, Catalogue(tables)


def tpch() -> Catalogue:
    """Return TPC-H's tables with their statistics at scale factor 1."""
    tables = {}
    for name, known in json.loads((QUERIES / "statistics.json").read_text()).items():
        columns = {
            column: ColumnStatistics(float(distinct), 0.0, low, high)
            for column, _, distinct, low, high in known["columns"]
        }
        kinds = tuple((column, kind) for column, kind, *_ in known["columns"])
        tables[name] = Table(name, kinds, "1", TableStatistics(known["rows"], known["bytes"], columns))
    return Catalogue(tables)


def cases() -> Iterator[tuple[str, str, Catalogue]]:
    """Yield (name, text, tables)."""
    for shape in ("chain", "star", "clique"):
        for relations in range(3, 13):
            yield f"{shape} {relations}", *shaped(shape, relations)
    known = tpch()
    for path in sorted(QUERIES.glob("q*.sql"), key=lambda p: int(p.stem[1:])):
        yield f"TPC-H {path.stem}", path.read_text(), known


def measure(name: str, text: str, tables: Catalogue, repeat: int) -> Figure:
    """Plan, plan anew and decide ``repeat`` times."""
    plan, again, decide = [], [], []
    for _ in range(repeat):
        began = time.process_time()
        planner, execution, count = chosen(text, tables)
        plan.append(time.process_time() - began)
        current = execution.plan
        first = current.stages[0]
        outputs = {first.output_fp: StageOutput(first.output_fp, int(3 * first.rows) + 1, 10_000)}
        began = time.process_time()
        anew = planner.candidates(SMALLER, outputs, also=(current.id,))
        again.append(time.process_time() - began)
        state = ExecutionState(next(p for p in anew if p.id == current.id))
        replanner = Replanner(anew)
        began = time.process_time()
        replanner.decide(state, SMALLER, 1.0, "a node left")
        decide.append(time.process_time() - began)
    medians = (1000.0 * statistics.median(seconds) for seconds in (plan, again, decide))
    return Figure(name, planner.relations_planned, count, *medians)


def chosen(text: str, tables: Catalogue) -> tuple[QueryPlanner, Execution, int]:
    """Plan from text to the chosen plan and the SQL of the stages that can start, as a session does."""
    planner = QueryPlanner(text, tables, SPARK, now=NOW, salt="run")
    plans = planner.candidates(SHARE, contrasts=False)
    execution = Execution(plans, None, "qoop", Replanner(plans), 4)
    execution.begin(SHARE, {}, 0.0)
    assert all(stage.statement.spark for stage in execution.running)
    return planner, execution, len(plans)


def peak_memory() -> float:
    """Return MiB by which planning every case raises the peak memory of a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_grown)


def _grown() -> float:
    before = _peak_mib()
    for _, text, tables in cases():
        planner, *_ = chosen(text, tables)
        planner.candidates(SMALLER)
    return _peak_mib() - before


def _peak_mib() -> float:
    """Return this process' own peak; ``getrusage`` would count its parent's, from before it was started."""
    status = Path("/proc/self/status").read_text()
    return float(status.split("VmHWM:")[1].split()[0]) / 1024.0


def picture(figures: Sequence[Figure]) -> str:
    """Draw planning time by number of relations, a bar a shape."""
    names = ("chain", "star", "clique", "TPC-H")
    sizes = sorted({f.relations for f in figures if f.relations >= 3})
    series: dict[str, list[float | None]] = {name: [] for name in names}
    for name in names:
        for size in sizes:
            of_size = [f.plan_ms for f in figures if f.relations == size and f.query.startswith(name)]
            series[name].append(statistics.median(of_size) if of_size else None)
    groups = [f"{size} relations" for size in sizes]
    return bars_svg("Planning time, from text to the chosen plan (median)", groups, series, unit="ms")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=7)
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    figures = []
    print(f"{'query':12} {'relations':>9} {'plans':>5} {'plan ms':>9} {'again ms':>9} {'decide ms':>9}")
    for name, text, tables in cases():
        figure = measure(name, text, tables, given.repeat)
        figures.append(figure)
        mark = "" if figure.kept else "  over its bound"
        print(
            f"{name:12} {figure.relations:9} {figure.plans:5} {figure.plan_ms:9.1f} {figure.again_ms:9.1f} "
            f"{figure.decide_ms:9.2f}{mark}",
            flush=True,
        )
    memory = peak_memory()
    print(f"peak memory of planning: {memory:.0f} MiB (bound {MEMORY_MIB:.0f})")
    found = {"memory_mib": memory, "figures": [asdict(f) for f in figures]}
    (given.out / "planning.json").write_text(json.dumps(found, indent=1) + "\n")
    (given.out / "planning.svg").write_text(picture(figures))
    return 0 if memory <= MEMORY_MIB and all(figure.kept for figure in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
