"""The demo of a switch: a query on nodes whose number grows, with the plan it began with and re-planned.

What a plan costs depends on how many nodes there are once their links are limited: tables that are sent to one node
are sent to five. Nothing here tells the planner when to switch, nor to which plan. Nodes that come are slow at first
and come at other moments in each run, so both are run in pairs, in turns, and their medians compared.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Literal, cast

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from ebbflow.flows.query.bars import StageBars
from ebbflow.flows.query.summary import print_summary
from ebbflow.flows.query.terminal import TerminalListener
from ebbflow.flows.runs.command import interruptible
from ebbflow.flows.runs.exit_status import ExitStatus
from ebbflow.flows.setup.data import tpch_tables
from ebbflow.flows.setup.demo import check_query
from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.errors import ClusterError
from ebbflow.infra.local_fleet import LocalFleet, LocalPool
from ebbflow.infra.machine.network.plan import parse_rates
from ebbflow.infra.spark.watch import ExecutorWatch
from ebbflow.infra.storage.files import home
from ebbflow.tasks.nodes import FAULTS, schedule_of
from ebbflow.tasks.query.opening import OpenedEngine, opened_engine
from ebbflow.tasks.query.report import QueryReport
from ebbflow.tasks.query.request import QueryRequest
from ebbflow.tasks.query.run import PlainOrchestrator
from ebbflow.tasks.report.delivery import execute

NODES = 5
MEMORY = 1.5  # GiB of a node
FAULT = f"1s:add:spark:{NODES - 1}"
PAIRS = 3
_CHANCE = 0.05  # by which medians of three runs differ by themselves
_POOL = "spark"
_ARRIVAL = 240.0  # s for nodes to come and go between runs
_LOOK = 0.25
# a JVM of a node that comes is of use sooner by the first compiler
_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
# of nodes that go between runs; the default is two minutes
_SPARK = {
    "spark.network.timeout": "30s",
    "spark.network.timeoutInterval": "10s",
    "spark.executor.heartbeatInterval": "5s",
}


@dataclass(frozen=True, slots=True)
class Turn:
    """One of the demo's runs."""

    name: str
    planner: Literal["clarinet", "qoop"]
    nodes: int
    grows: bool


LEARNING = Turn(
    "on all nodes: processes get warm, the planner learns how fast stages are", "clarinet", NODES, False
)
KEPT = Turn("keeps the plan that it began with", "clarinet", 1, True)
REPLANNED = Turn("is re-planned when nodes come", "qoop", 1, True)


@dataclass(frozen=True, slots=True)
class Pair:
    """The reports of two runs, one after the other."""

    kept: QueryReport
    replanned: QueryReport

    @property
    def gain(self) -> float:
        """Return how many times as fast it was re-planned."""
        return self.kept.seconds / max(self.replanned.seconds, 1e-9)


def run_demo_switch(
    query: int,
    scale: float,
    network: str,
    reports: tuple[str, ...],
    data: Path | None,
    console: Console,
) -> ExitStatus:
    """Run the demo and return the status to end with.

    Args:
        query: number of a TPC-H query.
        scale: TPC-H scale factor.
        network: rate of each node's link.
        reports: files for the report of the run that is re-planned.
        data: directory of tables, kept.
        console: where progress is shown.

    Raises ``OptionError``, and ``ClusterError`` where no network can be made.
    """
    check_query(query, scale)
    rates = parse_rates(network)
    clock = SystemClock()
    with (
        interruptible(console, "the nodes are taken down"),
        _java_options(),
        tempfile.TemporaryDirectory() as store,
    ):
        tables = tpch_tables(scale, (data or home() / "tpch") / f"sf{scale:g}", console)
        cpus = (os.cpu_count() or 1) / (NODES + 1)  # the driver has its share, too
        console.print(
            f"[bold]Nodes[/]: {NODES} Spark workers of {cpus:.2g} CPU cores and {MEMORY:g} GiB, "
            f"each on a link of {network} of its own; stages run on Spark SQL, so that they outlast the nodes' start"
        )
        pool = LocalPool(_POOL, "spark", memory=MEMORY, initial=NODES, max_nodes=NODES, cpus_per_slot=cpus)
        with LocalFleet.start([pool], f"demo-{os.getpid()}", network=rates, wait=_ARRIVAL) as fleet:
            request = QueryRequest(
                sql=(files("ebbflow.flows") / "tpch" / f"q{query}.sql").read_text(),
                tables=str(tables),
                engine="spark",
                master=fleet.spark_master,
                store=store,
                reuse=False,  # a demo that finds everything finished shows nothing
                stages="spark",  # native ones end before nodes come, unless there is much more data
                materialize="every-join",  # a plan of one statement has nothing to switch between
                interruption_rate=0.05,
                name=f"tpch-q{query}",
                verify=True,
                conf=_SPARK,
            )
            with opened_engine(request) as opened:
                learned = [_run(LEARNING, request, fleet, opened, (), console, clock)]
                if opened.source.capacity().cold >= 0.5:  # of a core: two runs are enough for most
                    learned.append(_run(LEARNING, request, fleet, opened, (), console, clock))
                pairs = []
                for number in range(PAIRS):
                    console.print(f"\n[bold]Pair {number + 1} of {PAIRS}[/]")
                    turns = (KEPT, REPLANNED) if number % 2 == 0 else (REPLANNED, KEPT)  # which run is first
                    found = {
                        turn.name: _run(turn, request, fleet, opened, reports, console, clock)
                        for turn in turns
                    }
                    pairs.append(Pair(found[KEPT.name], found[REPLANNED.name]))
    print_summary(replace(pairs[-1].replanned, result_path=""), console)  # which is gone by now
    print_comparison(pairs, console)
    for path in reports:
        console.print(f"\nreport of the last re-planned run: [bold]{Path(path).resolve()}[/]", soft_wrap=True)
    every = [*learned, *(report for pair in pairs for report in (pair.kept, pair.replanned))]
    return ExitStatus.DONE if all(report.verified for report in every) else ExitStatus.DIFFERENT


def _run(
    turn: Turn,
    request: QueryRequest,
    fleet: LocalFleet,
    opened: OpenedEngine,
    reports: tuple[str, ...],
    console: Console,
    clock: Clock,
) -> QueryReport:
    console.print(f"\n[bold]{turn.name}[/]")
    _wait_for(fleet, opened, turn.nodes, clock)
    began = time.monotonic()

    def tell(line: str) -> None:
        console.print(f"[bold magenta]demo[/] {time.monotonic() - began:.0f} s: {line}")

    mine = replace(request, planner=turn.planner, report=reports if turn.planner == "qoop" else ())
    faults = schedule_of([FAULTS.parse(FAULT)] if turn.grows else [], fleet, tell, clock)
    with StageBars(console) as bars, faults:
        listener = TerminalListener(bars, lambda _: faults.begin())
        report = execute(mine, PlainOrchestrator(listener), opened=opened).report
    console.print(f"{report.seconds:.1f} s")
    return report


def _wait_for(fleet: LocalFleet, opened: OpenedEngine, nodes: int, clock: Clock) -> None:
    """Bring the fleet to so many nodes, each of which the query's application may use. Raises ``ClusterError``."""
    there = fleet.state.plans[_POOL].nodes
    if there > nodes:
        fleet.remove(_POOL, there - nodes)
    elif there < nodes:
        fleet.add(_POOL, nodes - there)
    watch, end = cast(ExecutorWatch, opened.source), clock.now() + _ARRIVAL
    # Spark's driver notices late that a machine is silent: until then it would give it tasks
    while len((found := watch.capacity()).usable) != nodes or watch.held != found.cores:
        if clock.now() > end:
            raise ClusterError(
                f"{nodes} nodes were to be there within {_ARRIVAL:.0f} s; there are {len(found.usable)} of "
                f"{found.cores} cores, of which the query's executors have {watch.held}"
            )
        clock.sleep(_LOOK)


def print_comparison(pairs: Sequence[Pair], console: Console) -> None:
    """Print what every run took, when its nodes came, and whether re-planning paid in the median."""
    table = Table("", "kept, s", "re-planned, s", "times as fast", "switches", "nodes came after, s")
    table.box, table.header_style = None, "bold"
    for number, pair in enumerate(pairs, 1):
        came = " / ".join(_arrivals(report) for report in (pair.kept, pair.replanned))
        seconds = (f"{report.seconds:.1f}" for report in (pair.kept, pair.replanned))
        table.add_row(f"pair {number}", *seconds, f"{pair.gain:.2f}", str(len(pair.replanned.switches)), came)
    console.print("\n[bold]What re-planning was worth[/]")
    console.print(Padding(table, (0, 0, 0, 2)))
    for line in findings(pairs):
        console.print(f"  {line}", highlight=False)


def findings(pairs: Sequence[Pair]) -> list[str]:
    """Return what the pairs show, as sentences: no more than they do. Pairs without a switch show nothing of it."""
    switched = [pair for pair in pairs if pair.replanned.switches]
    gain, text = _medians(pairs)
    said = [f"medians {text}"]
    if not switched:
        return [*said, "no run changed its plan: what differs is chance"]
    if len(switched) < len(pairs):
        gain, text = _medians(switched)
        said.append(f"{len(switched)} of {len(pairs)} runs changed their plan; their medians {text}")
    if gain >= 1.0 + _CHANCE and all(pair.gain > 1.0 for pair in switched):
        said.append("the switch paid in every run that changed its plan")
    elif gain >= 1.0 + _CHANCE:
        said.append("the switch paid in the median, not in every run")
    elif gain <= 1.0 - _CHANCE:
        said.append("the switch lost here")
    else:
        said.append("the switch did not pay here: runs of one plan differ as much")
    return said


def _medians(pairs: Sequence[Pair]) -> tuple[float, str]:
    """Return how many times as fast the median was re-planned, and a text with both medians."""
    kept, replanned = (
        statistics.median(getattr(pair, name).seconds for pair in pairs) for name in ("kept", "replanned")
    )
    gain, gains = kept / max(replanned, 1e-9), ", ".join(f"{pair.gain:.2f}" for pair in pairs)
    return gain, f"{kept:.1f} and {replanned:.1f} s: {gain:.2f} times as fast re-planned ({gains})"


def _arrivals(report: QueryReport) -> str:
    """Return when the first and the last of the nodes came that were there at the end."""
    times = [c.at for before, c in pairwise(report.capacity) if c.nodes > before.nodes]
    return "none" if not times else f"{times[0]:.0f}-{times[-1]:.0f}"


@contextmanager
def _java_options() -> Iterator[None]:
    before = os.environ.get("JDK_JAVA_OPTIONS")
    os.environ["JDK_JAVA_OPTIONS"] = f"{before or ''} {_JAVA}".strip()
    try:
        yield
    finally:
        if before is None:
            del os.environ["JDK_JAVA_OPTIONS"]
        else:
            os.environ["JDK_JAVA_OPTIONS"] = before
