"""``ebbflow query``, ``explain`` and ``calibrate``."""

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ebbflow.flows.nodes.masters import resolve_master
from ebbflow.flows.runs.answers import fail
from ebbflow.flows.runs.exit_status import ExitStatus
from ebbflow.flows.runs.options import (
    AllowFunctions,
    AsJson,
    Materialize,
    Quiet,
    Runner,
    RunnerOption,
    wants_prefect,
)
from ebbflow.flows.runs.request_options import with_options_of
from ebbflow.planners.errors import OptionError
from ebbflow.tasks.query.request import QueryRequest, default_store

errors = Console(stderr=True)


class Engine(StrEnum):
    """What runs the SQL of stages."""

    spark = "spark"
    duckdb = "duckdb"


class Planner(StrEnum):
    """Which plans a query is planned in, and when it changes them."""

    qoop = "qoop"
    clarinet = "clarinet"
    volcano = "volcano"
    single = "single"


Sql = Annotated[
    str, typer.Argument(help="The query, or the path of a file that holds it.", metavar="SQL|FILE")
]
_QUERY_HELP = """Run a query that re-plans itself while capacity changes.

[b]Try it in seconds, without a JVM[/b]

    ebbflow query "SELECT count(*) FROM t" --tables data/

[b]On Spark in this process[/b]

    ebbflow query report.sql --tables data/ --engine spark

[b]For another program[/b]

    ebbflow query report.sql --tables data/ --format csv > result.csv

[b]On a local cluster, losing a worker while it runs[/b]

    ebbflow local up --spark 3

    ebbflow query q.sql --tables data/ --master local-fleet --report run.html

    ebbflow local kill spark-2        (in another terminal)

The rows go to standard output; progress, notes and a one-line summary go to standard error.

The same command again resumes from finished stages, also after a crash.

Exit status: 0 done, 1 the query failed, 2 usage error (an option, the SQL), 3 the result differs from DuckDB's \
(--verify), 130 interrupted.
"""
_INPUT, _OUTPUT, _PLANNING, _RUN = "Input", "Output", "Planning", "Engine and run"
_PANELS = {
    **dict.fromkeys(("tables", "catalog", "at", "dialect", "allow_functions"), _INPUT),
    **dict.fromkeys(
        (
            "format",
            "json",
            "limit",
            "verbose",
            "quiet",
            "output",
            "into",
            "into_mode",
            "into_key",
            "into_partition",
            "into_format",
            "metrics",
            "report",
            "verify",
        ),
        _OUTPUT,
    ),
    **dict.fromkeys(
        ("planner", "materialize", "hysteresis", "interruption_rate", "weight", "calibrate"), _PLANNING
    ),
    **dict.fromkeys(
        (
            "engine",
            "stages",
            "master",
            "executor_memory",
            "conf",
            "runner",
            "store",
            "durable",
            "memory_tier",
            "reuse",
        ),
        _RUN,
    ),
}


class Format(StrEnum):
    """How a result is printed or written."""

    table = "table"
    csv = "csv"
    json = "json"
    parquet = "parquet"


@with_options_of(
    QueryRequest,
    shown=True,
    before=dict.fromkeys(("format", "json", "limit", "verbose", "quiet"), "output"),
    panels=_PANELS,
)
def query(
    sql: Sql,
    *,
    format: Annotated[
        Format,
        typer.Option(
            metavar="NAME",
            help="Format of the rows on standard output: table, csv, json (a list of objects) or parquet (not on a "
            "terminal). With json, errors are JSON too.",
        ),
    ] = Format.table,
    json: Annotated[bool, typer.Option("--json", help="Short for --format json.")] = False,
    limit: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="ROWS",
            help="Maximum number of rows on standard output, 0 for all; --output always has all. Default: 20 for a "
            "table, else 0.",
        ),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="The full report on standard error: capacity, stages, decisions."
        ),
    ] = False,
    quiet: Quiet = False,
    conf: Annotated[
        list[str] | None,
        typer.Option(help="Spark setting, key=value. Repeatable.", metavar="KEY=VALUE"),
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
    if json and format not in (Format.table, Format.json):
        raise OptionError(f"--json means --format json; got --format {format.value}, too")
    chosen = "json" if json else format.value
    check_format(chosen, terminal=sys.stdout.isatty())
    given |= {
        "master": resolve_master(given["master"]),
        "conf": parse_settings(conf or []),
        "name": _name(sql),
        "allow_functions": checked_functions(allow_functions),
    }
    request = QueryRequest.of(sql, **given)
    messages = Console(stderr=True, quiet=quiet)
    with (
        interruptible(errors, "finished stages are kept, the same command resumes from them"),
        without_native_output(),
    ):
        outcome = run_on_terminal(request, messages, prefect=wants_prefect(runner))
    show_result(outcome.result, messages, format=chosen, limit=limit)
    (print_summary if verbose else print_line)(outcome.report, messages)
    if outcome.report.verified is False:
        fail(f"not verified: {outcome.report.verification}", ExitStatus.DIFFERENT, "NotVerified")


_EXPLAIN_HELP = """Show the candidate plans of a query side by side, without running anything.

[b]Examples[/b]

    ebbflow explain report.sql --tables data/ --report plans.html

    ebbflow explain report.sql --tables data/ --capacity cores=3,memory=6GiB

    ebbflow explain report.sql --tables data/ \\
        --capacity cores=3,interruption_rate=60

    ebbflow explain report.sql --tables data/ --without merging --json

The higher the interruption rate (per node-hour), the more checkpoints pay.
"""


@with_options_of(
    QueryRequest,
    only=("tables", "at", "stages", "dialect", "report", "store"),
    shown=True,
    before={"capacity": "engine", "without": "dialect", "json": "report", "sql_text": "report"},
    panels={
        **dict.fromkeys(("tables", "at", "dialect", "allow_functions"), _INPUT),
        **dict.fromkeys(
            ("capacity", "engine", "stages", "planner", "materialize", "without", "store"), _PLANNING
        ),
        **dict.fromkeys(("json", "sql_text", "report"), _OUTPUT),
    },
)
def explain(
    sql: Sql,
    *,
    capacity: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Capacity to plan for, by commas: any of cores, memory, nodes (else one per core) and "
            "interruption_rate (interruptions per node-hour, else 0.05).",
        ),
    ] = "cores=3,memory=6GiB",
    engine: Annotated[
        Engine, typer.Option(help="Engine whose costs the planner estimates: spark or duckdb.")
    ] = Engine.spark,
    planner: Annotated[
        Planner, typer.Option(metavar="NAME", help="Planner of the query: qoop, clarinet, volcano or single.")
    ] = Planner.qoop,
    materialize: Annotated[
        Materialize,
        typer.Option(
            metavar="WHERE",
            help="Materialization of intermediate results as checkpoints: where it pays (cost), after every-join, or "
            "none.",
        ),
    ] = Materialize.cost,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="REWRITE[,REWRITE]",
            help="Rewrites of the query that the planner leaves out, by commas: conditions, outer-joins, merging, "
            "restriction, shared-joins, factoring, reduction, hints. Repeatable. Default: none.",
        ),
    ] = None,
    json: AsJson = False,
    sql_text: Annotated[
        bool, typer.Option("--sql", help="SQL of the chosen plan's stages after the table.")
    ] = False,
    allow_functions: AllowFunctions = None,
    given: dict[str, Any],
) -> None:
    from ebbflow.flows.query.explaining import explain_on_terminal
    from ebbflow.flows.runs.options import parse_capacity
    from ebbflow.planners.query.sql.forbidden import checked_functions

    request = QueryRequest.of(
        sql,
        engine=engine.value,
        planner=planner.value,
        materialize=materialize.value,
        name=_name(sql),
        allow_functions=checked_functions(allow_functions),
        **given,
    )
    share = parse_capacity(capacity)
    names = frozenset(filter(None, (name.strip() for text in without or () for name in text.split(","))))
    explain_on_terminal(request, share, capacity, names, as_json=json, sql_text=sql_text)


_CALIBRATE_HELP = """Measure the speed of an engine on this machine or cluster, for better estimates: about 15 s.

[b]Examples[/b]

    ebbflow calibrate --engine duckdb

    ebbflow calibrate --master local-fleet

Estimates start from built-in rates and improve with every finished stage; a calibration gives them a head start.
"""


@with_options_of(QueryRequest, only=("store",))
def calibrate(
    *,
    engine: Annotated[Engine, typer.Option(help="Engine to measure: spark or duckdb.")] = Engine.spark,
    master: Annotated[
        str,
        typer.Option(
            help="Spark master: local[2], spark://host:7077, ..., or local-fleet[:NAME], that of ebbflow local up."
        ),
    ] = "local[2]",
    json: AsJson = False,
    given: dict[str, Any],
) -> None:
    from ebbflow.flows.query.command import calibrate_engine

    store = given.get("store") or default_store()
    calibrate_engine(engine.value, resolve_master(master), store, as_json=json)


def _name(sql: str) -> str:
    """Return the display name of a query: its file's name without ending; empty for a text."""
    path = sql.strip()
    return Path(path).stem if path.endswith(".sql") and "\n" not in path else ""


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("query", help=_QUERY_HELP)(query)
    app.command("explain", help=_EXPLAIN_HELP)(explain)
    app.command("calibrate", help=_CALIBRATE_HELP)(calibrate)
