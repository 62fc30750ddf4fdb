"""``python -m tests.benchmarks.sql``: Ebbflow compared with plain Spark SQL on a local cluster, from a checkout."""

import gc
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ebbflow.planners.errors import EbbflowError, OptionError

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
console = Console()
errors = Console(stderr=True)

_SQL_HELP = """Compare Ebbflow with plain Spark SQL while workers come and go.

[b]Examples[/b]

    ebbflow data tpch --scale 5

    python -m tests.benchmarks.sql --suite tpch --scale 5 --output bench5

    python -m tests.benchmarks.sql --suite tpch --scale 5 --output bench5      (again: resumes where it stopped)

    python -m tests.benchmarks.sql --output bench5 --summary-only

    python -m tests.benchmarks.sql --suite tpch,tpcds --queries tpch:9,tpcds:25 --schedules none,volatile --pairs 3

[b]What is compared[/b], in turns, on the same warm cluster, application and files:

    spark      Spark SQL with Spark's own SQL settings, adaptive execution on

    spark-cbo  the same with cost-based optimiser, column statistics and join reordering on, and graceful \
decommissioning where a notice is given

    spark-tuned, spark-tuned-cbo  the same two with 8 shuffle partitions and broadcasts up to 64 MB; after a case's \
first round only the plain Spark that was fastest there continues

    ebbflow    planner qoop, an empty store, statistics cached beforehand

[b]What happens meanwhile[/b], scaled by the time that the first plain Spark of --systems takes undisturbed, or
ebbflow where it runs alone (measured first):

    none             nothing

    kill             one worker is killed at half of that time

    notice           the same, announced a tenth of that time before

    volatile         3 → 1 → 3 → 2 → 1 → 3 workers, again and again, at random times drawn from --seed, \
at least 10 to 20 s apart

    volatile-notice  the same, with a notice before every loss

The time of a run is from the SQL text to the complete Parquet result, which is compared with DuckDB's. Before \
its first timed run every system runs each of its plans once, so that no code is still to be compiled, and Spark \
keeps all of it (its default is 100 classes). All executors load Spark's classes from one archive, so that those \
that come are of use sooner. Each run is added to DIR/runs.jsonl at once; DIR/sql.json and DIR/sql-cdf.svg sum \
them up. Queries should take 10 to 60 s: choose --scale so. Memory: workers times --memory, and 3 GiB.
"""


@app.command(help=_SQL_HELP)
def sql_command(
    suite: Annotated[str, typer.Option(metavar="LIST", help="tpch, tpcds or both, by commas.")] = "tpch",
    tables: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Folder of Parquet tables; for two suites tpch=DIR,tpcds=DIR. Default: by --scale.",
        ),
    ] = None,
    scale: Annotated[
        float, typer.Option(help="Scale factor of the tables that ebbflow data has made in ~/.cache/ebbflow.")
    ] = 1.0,
    queries: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="5,7,9 or tpch:5,tpcds:25. Default: the suite's joins of 3 and more."
        ),
    ] = None,
    schedules: Annotated[
        str, typer.Option(metavar="LIST", help="none, kill, notice, volatile, volatile-notice; by commas.")
    ] = "none,kill,notice,volatile,volatile-notice",
    systems: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="spark, spark-cbo, spark-tuned, spark-tuned-cbo, ebbflow; by commas."
        ),
    ] = "spark,spark-cbo,spark-tuned,spark-tuned-cbo,ebbflow",
    stages: Annotated[
        Literal["spark", "native", "auto"], typer.Option(help="How Ebbflow runs its stages.")
    ] = "auto",
    pairs: Annotated[int, typer.Option(help="Rounds per query and schedule.")] = 5,
    workers: Annotated[int, typer.Option(help="Workers, each of one Spark core.")] = 3,
    cores_per_worker: Annotated[
        float, typer.Option(help="CPUs of this machine that back a worker's core (needs control groups).")
    ] = 0.5,
    memory: Annotated[str, typer.Option(help="Memory of each worker.")] = "2g",
    seed: Annotated[
        int, typer.Option(help="What the volatile schedules and all victims are drawn from.")
    ] = 1,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Directory of the runs and the summary.")
    ] = Path("ebbflow-bench"),
    time_limit: Annotated[
        float | None, typer.Option(metavar="MINUTES", help="Start no round that would end later.")
    ] = None,
    conf: Annotated[
        list[str] | None, typer.Option(help="A Spark setting for all systems, key=value. Repeatable.")
    ] = None,
    first_runs: Annotated[
        bool, typer.Option("--first-runs", help="Time each query's first run, without schedules.")
    ] = False,
    summary_only: Annotated[
        bool, typer.Option("--summary-only", help="Run nothing; sum up what is in DIR.")
    ] = False,
) -> None:
    from ebbflow.flows.runs.command import interruptible
    from ebbflow.flows.runs.options import parse_settings
    from ebbflow.infra.clock import SystemClock
    from ebbflow.infra.storage.files import home
    from tests.benchmarks.sql.cases import Plan, chosen_queries
    from tests.benchmarks.sql.class_archive import java_options
    from tests.benchmarks.sql.rig import RigOptions
    from tests.benchmarks.sql.runner import Bench

    if summary_only:
        _sum_up(output)
        return
    if time_limit is not None and not time_limit > 0:
        raise OptionError(f"time-limit must be > 0 minutes; got {time_limit}")
    _calm_logging()
    suites = _words(suite)
    chosen = chosen_queries(suites, _words(queries or ""))
    plan = Plan(chosen, _words(schedules), _words(systems), pairs, workers, seed)  # type: ignore[arg-type]
    if first_runs and plan.schedules != ("none",):
        raise OptionError(f"--first-runs needs --schedules none; got {schedules}")
    settings = parse_settings(conf or [])
    folders = _folders(suites, tables, scale)
    rig = RigOptions(workers, cores_per_worker, memory, settings, java_options(home()))
    with (
        interruptible(errors, f"runs that ended are kept; the same command resumes (in {output})"),
        _BenchProgress() as shown,
    ):
        bench = Bench(
            plan, folders, rig, output, SystemClock(), shown.step,  # type: ignore[arg-type]
            float("inf") if time_limit is None else 60 * time_limit, stages, 0 if first_runs else 2,
        )  # fmt: skip
        complete = bench.run()
    _sum_up(output)
    if not complete:
        console.print("[yellow]the time limit was reached: the same command resumes[/]")


def _calm_logging() -> None:
    """Keep PySpark from printing stack traces when Ctrl-C reaches it in the middle of a call."""
    import logging

    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    interrupts = (KeyboardInterrupt, BrokenPipeError)
    handler.addFilter(lambda r: not (r.exc_info and r.exc_info[0] and issubclass(r.exc_info[0], interrupts)))
    logging.getLogger().addHandler(handler)


class _BenchProgress:
    """Progress on a terminal: a line for each run that ended, and a bar."""

    def __init__(self) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[eta]}"),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, eta="")

    def __enter__(self) -> "_BenchProgress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, step: object) -> None:
        from ebbflow.tasks.drawing.wording import seconds_text
        from tests.benchmarks.sql.runner import Step
        from tests.benchmarks.sql.terminal import record_line

        assert isinstance(step, Step)
        if step.record is not None:
            self._bar.console.print(record_line(step.record), highlight=False, soft_wrap=True)
        elif not console.is_terminal:
            console.print(escape(step.words), highlight=False, soft_wrap=True)
        eta = "" if step.eta is None else f"{seconds_text(step.eta)} left"
        words = {"description": escape(step.words)} if step.words else {}
        self._bar.update(self._task, completed=step.done, total=step.total, eta=eta, **words)  # type: ignore[arg-type]


def _sum_up(output: Path) -> None:
    from tests.benchmarks.sql.records import Journal
    from tests.benchmarks.sql.summary import summarise
    from tests.benchmarks.sql.terminal import print_summary, write_summary

    journal = Journal(output)
    if not journal.records:
        raise OptionError(
            f"{journal.path} holds no runs yet; run python -m tests.benchmarks.sql --output {output} first"
        )
    summary = summarise(journal)
    print_summary(summary, console)
    for path in write_summary(summary, output):
        console.print(f"written: {path}", soft_wrap=True)


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def _folders(suites: tuple[str, ...], tables: str | None, scale: float) -> dict[str, Path]:
    """Return each suite's folder; that it exists is checked here, for a helpful answer."""
    from ebbflow.infra.storage.files import home

    found = {suite: home() / suite / f"sf{scale:g}" for suite in suites}
    if tables and "=" not in tables:
        if len(suites) > 1:
            raise OptionError(
                f"for several suites give --tables {suites[0]}=DIR,{suites[1]}=DIR; got {tables!r}"
            )
        found[suites[0]] = Path(tables).expanduser()
    elif tables:
        for part in _words(tables):
            suite, _, folder = part.partition("=")
            if suite not in suites or not folder:
                raise OptionError(f"--tables must be SUITE=DIR for a suite in --suite; got {part!r}")
            found[suite] = Path(folder).expanduser()
    for suite, folder in found.items():
        if not folder.is_dir():
            raise OptionError(f"there is no folder {folder}; make it: ebbflow data {suite} --scale {scale:g}")
    return {suite: folder.absolute() for suite, folder in found.items()}


if __name__ == "__main__":
    gc.set_threshold(20_000)  # as the command line does
    try:
        app()
    except EbbflowError as error:
        errors.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
