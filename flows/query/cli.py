"""``ebbflow query``, ``explain`` and ``calibrate``."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ebbflow.flows.nodes.spark import resolve_master
from ebbflow.flows.runs.asking import asking
from ebbflow.flows.runs.options import (
    AllowFunctions,
    Cuts,
    Runner,
    RunnerOption,
    wants_prefect,
)
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.query.request import QueryRequest, default_store

console = Console()
errors = Console(stderr=True)


class Engine(StrEnum):
    spark = "spark"
    duckdb = "duckdb"


class Policy(StrEnum):
    qoop = "qoop"
    clarinet = "clarinet"
    volcano = "volcano"
    single = "single"


Sql = Annotated[
    str, typer.Argument(help="The query, or the path of a file that holds it.", metavar="SQL|FILE")
]
_QUERY_HELP = """Run a query that re-plans itself while capacity changes.

[b]Try it in seconds, without a JVM[/b]

    ebbflow query "SELECT count(*) FROM t" --tables data/ --engine duckdb

[b]On Spark in this process, for another program[/b]

    ebbflow query report.sql --tables data/ --format csv > result.csv

[b]On a local cluster whose plugs you can pull while it runs[/b]

    ebbflow cluster up --workers 3

    ebbflow query report.sql --tables data/ --master cluster --report run.html

    ebbflow cluster kill worker-2     (in another terminal)

The result goes to standard output, and nothing else; progress, notes and a summary go to standard error.

The same command again resumes from finished stages, also after a crash.

Exit status: 0 done, 2 wrong input or a query that failed, 3 the result is not DuckDB's (--verify), 130 interrupted.
"""
_INPUT, _OUTPUT, _PLANNING, _RUN = "Input", "Output", "Planning", "Engine and run"
_PANELS = {
    **dict.fromkeys(("tables", "catalog", "dialect", "allow_functions"), _INPUT),
    **dict.fromkeys(("format", "limit", "verbose", "quiet", "out", "json", "report", "verify"), _OUTPUT),
    **dict.fromkeys(("policy", "cuts", "hysteresis", "hazard", "weight", "calibrate"), _PLANNING),
    **dict.fromkeys(
        ("engine", "stages", "master", "executor_memory", "conf", "runner", "store", "reuse"), _RUN
    ),
}


class Format(StrEnum):
    table = "table"
    csv = "csv"
    json = "json"
    parquet = "parquet"


@asking(
    QueryRequest,
    shown=True,
    before=dict.fromkeys(("format", "limit", "verbose", "quiet"), "out"),
    panels=_PANELS,
)
def query(
    sql: Sql,
    *,
    format: Annotated[
        Format,
        typer.Option(
            metavar="NAME",
            help="Format of the result on standard output: table, csv, json (a list of objects) or parquet (not on a "
            "terminal). With json, errors are JSON too.",
        ),
    ] = Format.table,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="ROWS",
            help="Rows on standard output at most, 0 for all; --out always has all. Default: 20 for a table, else 0.",
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="The full report on standard error: capacity, stages, decisions."
        ),
    ] = False,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="No messages on standard error, only errors."),
    ] = False,
    conf: Annotated[
        list[str] | None,
        typer.Option(help="A Spark setting, key=value. Repeatable.", metavar="KEY=VALUE"),
    ] = None,
    allow_functions: AllowFunctions = None,
    runner: RunnerOption = Runner.auto,
    given: dict[str, Any],
) -> None:
    from ebbflow.flows.query.command import run_on_terminal
    from ebbflow.flows.query.output import check_format, show_result
    from ebbflow.flows.query.summary import print_line, print_summary
    from ebbflow.flows.runs.command import interruptible
    from ebbflow.flows.runs.options import parse_settings, without_native_output
    from ebbflow.planners.query.sql.forbidden import checked_functions

    if verbose and quiet:
        raise OptionError("--verbose and --quiet exclude each other")
    check_format(format.value, terminal=sys.stdout.isatty())
    given |= {
        "master": resolve_master(given["master"]),
        "conf": parse_settings(conf or []),
        "title": _title(sql),
        "allow_functions": checked_functions(allow_functions),
    }
    request = QueryRequest.of(sql, **given)
    messages = Console(stderr=True, quiet=quiet)
    with (
        interruptible(errors, "finished stages are kept, the same command resumes from them"),
        without_native_output(),
    ):
        outcome = run_on_terminal(request, messages, prefect=wants_prefect(runner))
    show_result(outcome.result, messages, format=format.value, limit=limit)
    (print_summary if verbose else print_line)(outcome.report, messages)
    if outcome.report.verified is False:
        errors.print(f"NOT verified: {escape(outcome.report.verification)}", style="bold red", soft_wrap=True)
        raise typer.Exit(3)


_EXPLAIN_HELP = """Show the candidate plans of a query side by side, without running anything.

[b]Examples[/b]

    ebbflow explain report.sql --tables data/ --html plans.html

    ebbflow explain report.sql --tables data/ --capacity cores=3,memory=6GiB

    ebbflow explain report.sql --tables data/ --capacity cores=3,hazard=60

More nodes at risk (hazard, losses per node-hour) make more checkpoints pay.
"""


@asking(
    QueryRequest,
    only=("tables", "dialect", "store"),
    shown=True,
    before={"capacity": "engine", "html": "allow_functions", "sql_text": "allow_functions"},
)
def explain(
    sql: Sql,
    *,
    capacity: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="What to plan for, by commas: any of cores, memory, nodes (else one for each core) and hazard "
            "(else 0.05).",
        ),
    ] = "cores=3,memory=6GiB",
    engine: Annotated[Engine, typer.Option(help="Whose costs: spark or duckdb.")] = Engine.spark,
    policy: Annotated[
        Policy, typer.Option(metavar="NAME", help="Which policy chooses: qoop, clarinet, volcano or single.")
    ] = Policy.qoop,
    cuts: Annotated[
        Cuts,
        typer.Option(metavar="WHERE", help="Where plans are cut into stages: by cost, every-join or none."),
    ] = Cuts.cost,
    html: Annotated[
        str | None, typer.Option(help="Draw the plans into this HTML page.", metavar="FILE")
    ] = None,
    sql_text: Annotated[
        bool, typer.Option("--sql", help="Print the SQL of the chosen plan's stages.")
    ] = False,
    allow_functions: AllowFunctions = None,
    given: dict[str, Any],
) -> None:
    from ebbflow.flows.query.summary import print_candidates
    from ebbflow.flows.runs.options import parse_capacity
    from ebbflow.infra.storage.files import write_text
    from ebbflow.planners.query.sql.forbidden import checked_functions
    from ebbflow.tasks.query.run import explain as explain_request
    from ebbflow.tasks.report.query import explain_html

    request = QueryRequest.of(
        sql,
        engine=engine.value,
        policy=policy.value,
        cuts=cuts.value,
        allow_functions=checked_functions(allow_functions),
        **given,
    )
    plans, notes = explain_request(request, parse_capacity(capacity))
    print_candidates(plans, console)
    for note in notes:
        console.print(f"note: {escape(note)}")
    if sql_text:
        chosen = next(p for p in plans if p.chosen)
        for stage in chosen.stages:
            console.print(f"\n-- {stage.name} → ckpt_{stage.fingerprint}", style="bold", highlight=False)
            console.print(stage.sql, highlight=False, markup=False, soft_wrap=True)
    if html:
        page = explain_html(plans, query=request.sql, title=_title(sql), capacity=capacity, problems=notes)
        console.print(f"written: {write_text(html, page)}")


_CALIBRATE_HELP = """Measure how fast an engine is on this capacity, for better estimates (some 15 seconds).

[b]Examples[/b]

    ebbflow calibrate --engine duckdb

    ebbflow calibrate --master cluster

Estimates start from built-in figures and learn from every finished stage; this gives them a head start.
"""


@asking(QueryRequest, only=("store",))
def calibrate(
    *,
    engine: Annotated[Engine, typer.Option(help="spark or duckdb.")] = Engine.spark,
    master: Annotated[str, typer.Option(help="Spark master, or 'cluster'.")] = "local[2]",
    given: dict[str, Any],
) -> None:
    from ebbflow.flows.query.command import calibrate_engine

    store = given.get("store") or default_store()
    calibrate_engine(engine.value, resolve_master(master), store, console)


def _title(sql: str) -> str:
    path = sql.strip()
    return Path(path).stem if path.endswith(".sql") and "\n" not in path else ""


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("query", help=_QUERY_HELP)(query)
    app.command("explain", help=_EXPLAIN_HELP)(explain)
    app.command("calibrate", help=_CALIBRATE_HELP)(calibrate)
