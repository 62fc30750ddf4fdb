"""Does it pay to change plans in a live run? The same system with its plan frozen, on nodes that come and go.

    python -m tests.benchmarks.switching --tables ~/.cache/ebbflow/tpch/sf1 --out docs/benchmarks       (as root)

A local fleet of nodes of a third of a core on limited links; real workers are killed and started while a query runs.
Policies take turns within each query: ``qoop`` plans anew at every change, ``clarinet`` keeps what the same planner
picks at the start. The capacity grows (1 node, then 5) or falls and returns (6, 2, 6); ``--schedules`` names others,
as nodes at the start and faults, or ``none``. Tables that come with queries (``ebbflow data skewed``) run these.
One join a stage, as in QOOP's engine: a plan of one statement has nothing to switch between. Beside wall seconds,
which the load of the machine moves, stand the bytes on the links, the stages run and reused, and how long each stage
was expected to take. Every answer is compared with DuckDB's. Nodes read tables from this machine's disk, unless
``--over-links tables``, or ``all`` for the store too, serves them as object storage at this machine's end of links.
Twenty minutes; ``--minutes`` ends it earlier.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pyarrow.fs import copy_files

from ebbflow.infra.clock import SystemClock
from ebbflow.infra.local_fleet import LocalFleet, LocalPool
from ebbflow.infra.machine.network.plan import parse_rates
from ebbflow.infra.query.checkpoints import ParquetCheckpointStore
from ebbflow.infra.storage.files import home, write_text
from ebbflow.infra.storage.places import StorageLocation
from ebbflow.planners.errors import OptionError
from ebbflow.planners.model import Measured
from ebbflow.planners.query.plan.qep import Stage
from ebbflow.tasks.nodes import FAULTS, schedule_of
from ebbflow.tasks.query.listening import NullQueryListener
from ebbflow.tasks.query.opening import OpenedEngine, opened_engine
from ebbflow.tasks.query.planning import read_history
from ebbflow.tasks.query.report import QueryReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator, execute
from tests.benchmarks.link_bytes import Links
from tests.benchmarks.object_store import CREDENTIALS, ObjectStore
from tests.benchmarks.sql.class_archive import java_options

POLICIES = ("qoop", "clarinet")
SCHEDULES = ("1/1s:add:spark:4", "6/3s:remove:spark:4,20s:add:spark:4")
CPUS = 1 / 3  # of this machine behind the one core of a node
_MOST = 6  # nodes
_MEMORY = 1.5  # GiB of a node
_ARRIVAL = 240.0  # s for nodes to come and go between runs
_LOOK = 0.25
# for nodes that vanish without a word: with Spark's 120 s, tasks wait that long for one
_SPOT = {
    "spark.network.timeout": "30s",
    "spark.network.timeoutInterval": "10s",
    "spark.executor.heartbeatInterval": "5s",
}
CLOCK = SystemClock()


@dataclass(frozen=True)
class Schedule:
    """How many nodes there are at the start, and what happens after that."""

    nodes: int
    faults: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Schedule":
        """Return a schedule such as ``1/1s:add:spark:4``. Raises ``OptionError``."""
        nodes, _, faults = text.partition("/")
        if not nodes.isdigit() or not 1 <= int(nodes) <= _MOST or not faults:
            raise OptionError(f"a schedule must be NODES/FAULT,... with 1 to {_MOST} nodes; got {text!r}")
        found = () if faults == "none" else tuple(faults.split(","))
        for fault in found:
            FAULTS.parse(fault)
        return cls(int(nodes), found)

    def __str__(self) -> str:
        return f"{self.nodes}/{','.join(self.faults) or 'none'}"


class Beginning(NullQueryListener):
    """Begins the faults when the query's first stage starts."""

    def __init__(self, begin: Callable[[], None]) -> None:
        self._begin = begin

    def stage_started(self, stage: Stage) -> None:
        self._begin()


def ready(fleet: LocalFleet, opened: OpenedEngine, nodes: int) -> None:
    """Bring the fleet to so many nodes, each of which the query's application may use. Raises ``SystemExit``."""
    planned = fleet.state.plans["spark"].nodes
    if planned > nodes:
        fleet.remove("spark", planned - nodes)
    elif planned < nodes:
        fleet.add("spark", nodes - planned)
    end = CLOCK.now() + _ARRIVAL
    # Spark's driver notices late that a machine is silent: until then it would give it tasks
    while len(opened.source.capacity().usable) != nodes or getattr(opened.source, "held", nodes) != nodes:
        if CLOCK.now() > end:
            raise SystemExit(f"{nodes} nodes were to be there; there are {opened.source.capacity().usable}")
        CLOCK.sleep(_LOOK)


def run(
    fleet: LocalFleet, opened: OpenedEngine, number: int, policy: str, schedule: Schedule, given: Any
) -> dict[str, Any]:
    """Run one query once and return its row."""
    assert fleet.state.network is not None
    ready(fleet, opened, schedule.nodes)
    store = given.store.under("run")
    given.store.remove_folder("run")
    # statistics of the tables, and how fast stages were before
    _copy(given.store.under("cache"), store.under("cache"))
    request = QueryRequest(
        _text(number, given.folder),
        tables=given.tables,
        engine="spark",
        master=fleet.spark_master,
        planner=policy,  # type: ignore[arg-type]
        materialize="every-join",
        stages=given.stages,
        store=str(store),
        reuse=False,
        verify=True,
        interruption_rate=0.05,
    )
    before = len(_history(store, request))
    faults = schedule_of(map(FAULTS.parse, schedule.faults), fleet, lambda line: None, CLOCK)
    with Links(fleet.state.network.tag).counting() as links, faults:
        report = execute(request, PlainOrchestrator(Beginning(faults.begin)), opened=opened).report
    _copy(store.under("cache"), given.store.under("cache"))
    return {
        "query": number,
        "schedule": str(schedule),
        "policy": policy,
        "seconds": round(report.seconds, 2),
        "megabytes": round(links.megabytes("sent"), 1),
        "received": round(links.megabytes("received"), 1),
        "verified": report.verified,
        "stages": _stages(report, _history(store, request)[before:]),
        "capacity": [[round(c.at, 1), c.nodes] for c in report.capacity],
        "switches": [{"at": round(s.at, 1), "reason": s.reason} for s in report.switches],
        "load": os.getloadavg()[0],
    }


@contextmanager
def served(given: Any, host: str) -> Iterator[None]:
    """Serve at ``host`` what nodes are to have over their links only, and let ``given`` name it there."""
    if given.over_links == "none":
        yield
        return
    with ObjectStore.start(host, {"tables": given.folder}) as server:
        os.environ.update(server.environment)
        given.tables = "s3://tables"
        if given.over_links == "all":
            given.store = StorageLocation("s3://store/benchmark")
        yield


def _copy(source: StorageLocation, target: StorageLocation) -> None:
    if source.entries():
        copy_files(source.root, target.root, source.fs(), target.fs())


def _text(number: int, tables: Path) -> str:
    own = tables / "queries" / f"q{number}.sql"
    return (own if own.exists() else files("ebbflow.flows").joinpath("tpch", f"q{number}.sql")).read_text()


def _history(store: StorageLocation, request: QueryRequest) -> list[Measured]:
    return read_history(ParquetCheckpointStore(store), request)


def _stages(report: QueryReport, measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return the stages, with what costs are fitted to where all that ended were measured."""
    ended = [s for s in report.stages if s.status == "completed"]
    figures = {id(s): asdict(m) for s, m in zip(ended, measured, strict=False)}
    if len(ended) != len(measured):
        figures = {}
    return [
        {
            "name": s.name,
            "status": s.status,
            "seconds": round(s.seconds, 2),
            "expected": None if s.estimated_seconds is None else round(s.estimated_seconds, 2),
            "tasks": s.tasks,
            "started": round(s.started, 2),
            "note": s.note,
            "rows": s.rows,
            "expected_rows": s.estimated_rows or 0.0,
            "measured": figures.get(id(s)),
        }
        for s in report.stages
    ]


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return, for each query and schedule, the frozen plan's time and bytes over those of re-planning: medians."""
    found = []
    for query, schedule in dict.fromkeys((r["query"], r["schedule"]) for r in rows):
        of = {
            policy: [r for r in rows if (r["query"], r["schedule"], r["policy"]) == (query, schedule, policy)]
            for policy in POLICIES
        }
        if all(of.values()):
            each = {
                measure: {p: statistics.median(r[measure] for r in of[p]) for p in POLICIES}
                for measure in ("seconds", "megabytes", "received")
            }
            found.append(
                {
                    "query": query,
                    "schedule": schedule,
                    "pairs": min(len(found) for found in of.values()),
                    "switches": sum(len(r["switches"]) for r in of["qoop"]),
                    "frozen over re-planned": round(each["seconds"]["clarinet"] / each["seconds"]["qoop"], 3),
                    "bytes, frozen over re-planned": round(
                        each["megabytes"]["clarinet"] / max(each["megabytes"]["qoop"], 1e-3), 3
                    ),
                    "received, frozen over re-planned": round(
                        each["received"]["clarinet"] / max(each["received"]["qoop"], 1e-3), 3
                    ),
                }
            )
    return found


def q_errors(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return by how much stages' expected times were off: the larger of the quotients. Stages in whose time the
    capacity changed, or others ran, are left out, and those of which other rows were expected: nobody expected that
    of them."""
    errors = sorted(
        max(s["seconds"] / s["expected"], s["expected"] / s["seconds"])
        for r in rows
        for s in r["stages"]
        if s["status"] == "completed"
        and s["expected"]
        and s["seconds"]
        and undisturbed(s, r)
        and foreseen(s, r)
    )
    if not errors:
        return {}
    return {
        "stages": len(errors),
        "median": round(statistics.median(errors), 2),
        "95th percentile": round(errors[min(int(0.95 * len(errors)), len(errors) - 1)], 2),
    }


def undisturbed(stage: dict[str, Any], row: dict[str, Any]) -> bool:
    """Tell whether nothing else ran beside a stage and no node came or went."""
    begun, ended = stage["started"], stage["started"] + stage["seconds"]
    changed = any(begun < at < ended for at, _ in row["capacity"])
    others = [s for s in row["stages"] if s is not stage and s["status"] != "reused"]
    return not changed and not any(
        s["started"] < ended and begun < s["started"] + s["seconds"] for s in others
    )


def foreseen(stage: dict[str, Any], row: dict[str, Any]) -> bool:
    """Tell whether a stage had the rows that it was planned with; a plan that is kept has those of the beginning for
    what its stages read, too."""
    kept = row["policy"] != "qoop"
    read = [s for s in row["stages"] if kept and s["started"] + s["seconds"] <= stage["started"]]
    return all(
        max(known, 1.0) <= 2.0 * max(found, 1.0) and max(found, 1.0) <= 2.0 * max(known, 1.0)
        for known, found in ((s["expected_rows"], s["rows"]) for s in (stage, *read))
    )


def main() -> None:
    """Run and write ``switching.json``, or ``switching_skewed.json``, into ``--out``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tables", required=True, help="folder of tables of TPC-H or skewed ones (ebbflow data makes them)"
    )
    parser.add_argument("--queries", default="7,8,9", help="queries by number, by commas")
    parser.add_argument(
        "--schedules", nargs="+", default=list(SCHEDULES), help="NODES/FAULT,... of a pool called spark"
    )
    parser.add_argument("--stages", default="auto", help="what runs stages: auto, native or spark")
    parser.add_argument("--network", default="200mbit", help="rate of a node's link")
    parser.add_argument(
        "--over-links",
        choices=("none", "tables", "all"),
        default="none",
        help="what nodes have over links only",
    )
    parser.add_argument("--rounds", type=int, default=3, help="pairs of each query and schedule")
    parser.add_argument("--minutes", type=float, default=20.0, help="after which no pair begins")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    given = parser.parse_args()
    schedules = [Schedule.parse(text) for text in given.schedules]
    end = CLOCK.now() + 60.0 * given.minutes
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ebbflow-bench-") as folder:
        given.store, given.folder = StorageLocation(folder), Path(given.tables).expanduser()
        if given.over_links != "none":  # nodes have them from us
            os.environ.update(CREDENTIALS)
        # workers that come are of use sooner: the first compiler, and classes from an archive
        os.environ["JDK_JAVA_OPTIONS"] = java_options(home(), "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        pool = LocalPool("spark", "spark", memory=_MEMORY, initial=_MOST, max_nodes=_MOST, cpus_per_slot=CPUS)
        network = parse_rates(given.network)
        with (
            LocalFleet.start([pool], f"switching-{os.getpid()}", network=network, wait=300.0) as fleet,
            served(given, fleet.state.network.host if fleet.state.network is not None else ""),
        ):
            first = QueryRequest(
                "SELECT 1", tables=given.tables, engine="spark", master=fleet.spark_master, conf=_SPOT
            )
            with opened_engine(first) as opened:
                for number, schedule, turn in _order(given, schedules):
                    if CLOCK.now() > end:
                        break
                    # a first run warms up and tells how fast stages are
                    for policy in POLICIES if turn % 2 else POLICIES[::-1] if turn else POLICIES[1:]:
                        row = run(fleet, opened, number, policy, schedule, given) | {"round": turn}
                        print(json.dumps(row), flush=True)
                        rows += [row] if turn else []
    suite = "skewed" if (given.folder / "queries").is_dir() else "tpch"
    name = "switching" if suite == "tpch" else f"switching_{suite}"
    name += "" if given.over_links == "none" else "_over_links"
    result = {
        "benchmark": name,
        "suite": suite,
        "tables": given.folder.name,
        "arguments": " ".join(sys.argv[1:]).replace(str(Path.home()), "~"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "network": given.network,
        "stages": given.stages,
        "over_links": given.over_links,
        "summary": summary(rows),
        "q_error": q_errors(rows),
        "runs": rows,
    }
    write_text(given.out / f"{name}.json", json.dumps(result, indent=1) + "\n")
    print(json.dumps({"summary": result["summary"], "q_error": result["q_error"]}, indent=1))
    raise SystemExit(not all(row["verified"] for row in rows))


def _order(given: Any, schedules: Sequence[Schedule]) -> Iterator[tuple[int, Schedule, int]]:
    """Yield query, schedule and round; round 0 once for each query."""
    numbers = [int(number) for number in given.queries.split(",")]
    yield from ((number, schedules[0], 0) for number in numbers)
    for turn in range(1, given.rounds + 1):
        for schedule in schedules:
            yield from ((number, schedule, turn) for number in numbers)


if __name__ == "__main__":
    main()
