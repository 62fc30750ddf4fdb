"""The demos, for real: a pipeline of two teams, or one TPC-H query, on nodes that come and go."""

import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from rich.console import Console

from ebbflow.flows.pipeline.cli import run_on_terminal as run_on_terminal_pipeline
from ebbflow.flows.query.command import run_on_terminal
from ebbflow.flows.query.summary import print_summary
from ebbflow.flows.runs.command import interruptible, quiet_prefect
from ebbflow.flows.runs.exit_status import ExitStatus
from ebbflow.flows.setup.data import tpch_tables
from ebbflow.infra.clock import Clock, SystemClock
from ebbflow.infra.spark.cluster.cluster import LocalSparkCluster
from ebbflow.infra.storage.files import home
from ebbflow.planners.errors import OptionError
from ebbflow.planners.query.planner import CutPolicy
from ebbflow.tasks.faults import Schedule, scripted
from ebbflow.tasks.pipeline.file.parameters import parse_set
from ebbflow.tasks.pipeline.run import PipelineRequest
from ebbflow.tasks.query.request import QueryRequest

QUERIES = (5, 7, 8, 9)
WORKERS = 3


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that happens to the cluster ``after`` seconds of running."""

    after: float
    words: str
    act: Callable[[LocalSparkCluster], object]


SCHEDULE = (
    Fault(1.5, "notice to worker-1: it leaves in 3 s", lambda c: c.notice("worker-1", 3.0)),
    Fault(3.0, "a new worker is asked for", lambda c: c.add()),
    Fault(6.0, "worker-2 is killed without notice", lambda c: c.kill("worker-2")),
)
# The schedule's own rate: two of three nodes lost within six seconds. In production it is estimated.
HAZARD = 2 / (WORKERS * 6.0 / 3600.0)


def schedule_of(cluster: LocalSparkCluster, say: Callable[[str], None], clock: Clock) -> Schedule:
    """Return the demo's schedule on ``cluster``; ``say`` hears of everything."""

    def tell(line: str) -> None:
        say(f"[bold magenta]demo[/]: {line}")

    def do(fault: Fault) -> None:
        tell(fault.words)
        fault.act(cluster)

    return Schedule(clock, scripted(clock, SCHEDULE, do, tell))


def run_demo(
    query: int,
    scale: float,
    reports: tuple[str, ...],
    data: Path | None,
    materialize: CutPolicy,
    console: Console,
) -> ExitStatus:
    """Run the demo of one query and return the status to end with. Raises ``OptionError``."""
    check_query(query, scale)
    clock = SystemClock()
    with interruptible(console, "the cluster is stopped"):
        tables = tpch_tables(scale, (data or home() / "tpch") / f"sf{scale:g}", console)
        console.print(f"[bold]Spark[/]: starting a master and {WORKERS} workers of one core and 2 GiB")
        quiet_prefect()
        with ThreadPoolExecutor(1) as pool:  # importing Prefect takes seconds too
            imported = pool.submit(__import__, "ebbflow.flows.query.flow")
            cluster = LocalSparkCluster.start(
                f"demo-{uuid.uuid4().hex[:6]}", workers=WORKERS, cores=1, memory="2g"
            )
            with cluster:
                imported.result()
                for line in (f"{cluster.master_url}, page {cluster.master_ui}", cluster.status().cap):
                    console.print(f"  {line}", highlight=False, soft_wrap=True)
                return _run(cluster, query, tables, reports, materialize, clock, console)


def check_query(query: int, scale: float) -> None:
    """Raise ``OptionError`` for a query that the demo does not have, or a scale factor that is none."""
    if query not in QUERIES:
        raise OptionError(f"query must be one of {', '.join(map(str, QUERIES))}; got {query}")
    if not 0 < scale <= 1000:
        raise OptionError(f"scale must be in (0, 1000]; got {scale}")


def run_demo_pipeline(
    scale: float,
    reports: tuple[str, ...],
    data: Path | None,
    parameters: Sequence[str],
    console: Console,
    prefect: bool,
) -> ExitStatus:
    """Run the demo's pipeline, results compared with DuckDB's, and return the status to end with.

    ``parameters`` are ``NAME=VALUE`` of its file.

    Raises ``OptionError``.
    """
    if not 0 < scale <= 1000:
        raise OptionError(f"scale must be in (0, 1000]; got {scale}")
    given = parse_set(list(parameters))
    with interruptible(console, "nothing is left running"):
        if "tables" not in given:
            tables = tpch_tables(scale, (data or home() / "tpch") / f"sf{scale:g}", console)
            given = {"tables": str(tables.absolute()), **given}
        request = PipelineRequest(
            str(files("ebbflow.flows.setup") / "demo_files" / "pipeline.yaml"),
            parameters=given,
            report=reports,
        )
        outcome = run_on_terminal_pipeline(request, console, prefect=prefect)
    if outcome.state == "stopped":
        return ExitStatus.INTERRUPTED
    return ExitStatus.DONE if outcome.state == "finished" else ExitStatus.FAILED


def _run(
    cluster: LocalSparkCluster,
    query: int,
    tables: Path,
    reports: tuple[str, ...],
    materialize: CutPolicy,
    clock: Clock,
    console: Console,
) -> ExitStatus:
    console.print(f"[bold]TPC-H Q{query}[/]: the Prefect flow run_query; workers will come and go")
    faults = schedule_of(cluster, console.print, clock)
    request = QueryRequest(
        sql=(files("ebbflow.flows") / "tpch" / f"q{query}.sql").read_text(),
        tables=str(tables),
        master=cluster.master_url,
        store=str(home() / "demo-store"),
        reuse=False,  # a demo that finds everything finished shows nothing
        materialize=materialize,
        interruption_rate=HAZARD,
        calibrate=True,
        report=reports,
        name=f"tpch-q{query}",
        verify=True,
        store_budget=2.0,
    )
    try:
        outcome = run_on_terminal(request, console, prefect=True, also=lambda _: faults.begin())
    finally:
        faults.end()
    console.print()
    print_summary(outcome.report, console)
    for path in reports:
        console.print(f"\nreport: [bold]{Path(path).resolve()}[/]", soft_wrap=True)
    return ExitStatus.DONE if outcome.report.verified else ExitStatus.DIFFERENT
