"""``ebbflow query``, ``explain`` and ``calibrate``."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ebbflow.flows.nodes.spark import resolve_master
from ebbflow.flows.runs.options import (
    AllowFunctions,
    Cuts,
    JsonOut,
    ReportOut,
    Runner,
    RunnerOption,
    wants_prefect,
)

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
Tables = Annotated[
    str | None,
    typer.Option(
        help="Folder of Parquet files, or of folders of them: DIR or s3://bucket/prefix.", metavar="DIR"
    ),
]
Store = Annotated[
    str | None,
    typer.Option(
        help="Where checkpoints live, DIR or s3://bucket/prefix; it must outlive every node. "
        "Default: store/ in ~/.cache/ebbflow.",
        metavar="DIR",
    ),
]
Dialect = Annotated[str, typer.Option(help="SQL dialect of the query, as sqlglot names it.")]

_QUERY_HELP = """Run a query that re-plans itself while capacity changes.

[b]Try it in seconds, without a JVM[/b]

    ebbflow query "SELECT count(*) FROM t" --tables data/ --engine duckdb

[b]On Spark in this process[/b]

    ebbflow query report.sql --tables data/ --out result.parquet

[b]On a local cluster whose plugs you can pull while it runs[/b]

    ebbflow cluster up --workers 3

    ebbflow query report.sql --tables data/ --master cluster --report run.html

    ebbflow cluster kill worker-2     (in another terminal)

The same command again resumes from finished stages, also after a crash.

Status: 0 done, 2 wrong input or a query that failed, 3 the result is not DuckDB's (--verify), 130 interrupted.
"""


def query(
    sql: Sql,
    tables: Tables = None,
    catalog: Annotated[
        bool, typer.Option("--catalog", help="Use the tables that the Spark session's catalogue knows.")
    ] = False,
    engine: Annotated[Engine, typer.Option(help="spark, or duckdb: embedded, needs no Java.")] = Engine.spark,
    master: Annotated[
        str,
        typer.Option(
            help="Spark master: local[2], spark://host:7077, ...; 'cluster' is the one of cluster up."
        ),
    ] = "local[2]",
    policy: Annotated[
        Policy,
        typer.Option(
            metavar="NAME",
            help="qoop re-plans at each change; clarinet and volcano choose once; single runs one statement.",
        ),
    ] = Policy.qoop,
    cuts: Annotated[
        Cuts,
        typer.Option(
            metavar="WHERE", help="Where plans are cut into stages: by cost, after every-join, or none."
        ),
    ] = Cuts.cost,
    dialect: Dialect = "spark",
    out: Annotated[
        str | None, typer.Option(help="Write the result to this Parquet file.", metavar="FILE")
    ] = None,
    json: JsonOut = None,
    report: ReportOut = None,
    store: Store = None,
    reuse: Annotated[bool, typer.Option(help="Take finished stages of earlier runs.")] = True,
    hysteresis: Annotated[
        float, typer.Option(help="Fraction of the remaining time by which another plan must be sooner.")
    ] = 0.15,
    hazard: Annotated[
        float | None, typer.Option(help="Expected losses per node-hour. Default: learnt from what happens.")
    ] = None,
    weight: Annotated[
        float,
        typer.Option(help="Of this query among those that share the cluster: a share is weight over sum."),
    ] = 1.0,
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure the engine first if nothing is known of its speed.")
    ] = False,
    executor_memory: Annotated[str | None, typer.Option(help="Heap of an executor, such as 1400m.")] = None,
    conf: Annotated[list[str] | None, typer.Option(help="A Spark setting, key=value. Repeatable.")] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Compare the result with DuckDB's.")] = False,
    allow_functions: AllowFunctions = None,
    runner: RunnerOption = Runner.auto,
) -> None:
    from ebbflow.flows.query.command import run_on_terminal
    from ebbflow.flows.query.summary import print_summary
    from ebbflow.flows.query.terminal import show_result
    from ebbflow.flows.runs.command import interruptible
    from ebbflow.flows.runs.options import parse_settings
    from ebbflow.planners.query.sql.forbidden import checked_functions
    from ebbflow.tasks.query.request import QueryRequest, default_store

    request = QueryRequest.of(
        sql,
        tables=tables,
        catalog=catalog,
        engine=engine.value,
        master=resolve_master(master),
        policy=policy.value,
        cuts=cuts.value,
        dialect=dialect,
        store=store or default_store(),
        reuse=reuse,
        hysteresis=hysteresis,
        hazard=hazard,
        weight=weight,
        calibrate=calibrate,
        executor_memory=executor_memory,
        conf=parse_settings(conf or []),
        out=out,
        json=json,
        report=report,
        title=_title(sql),
        verify=verify,
        allow_functions=checked_functions(allow_functions),
    )
    with interruptible(errors, "finished stages are kept, the same command resumes from them"):
        outcome = run_on_terminal(request, console, prefect=wants_prefect(runner))
    print_summary(outcome.report, console)
    show_result(outcome.result, console)
    if outcome.report.verified is False:
        raise typer.Exit(3)


_EXPLAIN_HELP = """Show the candidate plans of a query side by side, without running anything.

[b]Examples[/b]

    ebbflow explain report.sql --tables data/ --html plans.html

    ebbflow explain report.sql --tables data/ --capacity cores=3,memory=6GiB

    ebbflow explain report.sql --tables data/ --capacity cores=3,hazard=60

More nodes at risk (hazard, losses per node-hour) make more checkpoints pay.
"""


def explain(
    sql: Sql,
    tables: Tables = None,
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
    dialect: Dialect = "spark",
    store: Store = None,
    html: Annotated[
        str | None, typer.Option(help="Draw the plans into this HTML page.", metavar="FILE")
    ] = None,
    sql_text: Annotated[
        bool, typer.Option("--sql", help="Print the SQL of the chosen plan's stages.")
    ] = False,
    allow_functions: AllowFunctions = None,
) -> None:
    from ebbflow.flows.query.summary import print_candidates
    from ebbflow.flows.runs.options import parse_capacity
    from ebbflow.infra.storage.files import write_text
    from ebbflow.planners.query.sql.forbidden import checked_functions
    from ebbflow.tasks.query.request import QueryRequest, default_store
    from ebbflow.tasks.query.run import explain as explain_request
    from ebbflow.tasks.report.query import explain_html

    request = QueryRequest.of(
        sql,
        tables=tables,
        engine=engine.value,
        policy=policy.value,
        cuts=cuts.value,
        dialect=dialect,
        store=store or default_store(),
        allow_functions=checked_functions(allow_functions),
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


def calibrate(
    engine: Annotated[Engine, typer.Option(help="spark or duckdb.")] = Engine.spark,
    master: Annotated[str, typer.Option(help="Spark master, or 'cluster'.")] = "local[2]",
    store: Store = None,
) -> None:
    from ebbflow.flows.query.command import calibrate_engine
    from ebbflow.tasks.query.request import default_store

    calibrate_engine(engine.value, resolve_master(master), store or default_store(), console)


def _title(sql: str) -> str:
    path = sql.strip()
    return Path(path).stem if path.endswith(".sql") and "\n" not in path else ""


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("query", help=_QUERY_HELP)(query)
    app.command("explain", help=_EXPLAIN_HELP)(explain)
    app.command("calibrate", help=_CALIBRATE_HELP)(calibrate)
