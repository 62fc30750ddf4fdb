"""The command line: ``ebbflow --help`` lists the commands."""

import sys
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from ebbflow.flows import elastic as elastic_cli
from ebbflow.flows import report as report_cli
from ebbflow.flows import simulation as simulate_cli
from ebbflow.flows.bench import cli as bench_cli
from ebbflow.flows.capacity import cli as capacity_cli
from ebbflow.flows.fleet import cli as fleet_cli
from ebbflow.flows.ledger import cli as ledger_cli
from ebbflow.flows.nodes import cli as nodes_cli
from ebbflow.flows.nodes import spark as cluster_cli
from ebbflow.flows.pipeline import cli as pipeline_cli
from ebbflow.flows.runs.option_checks import CheckedGroup
from ebbflow.flows.runs.options import AllowFunctions, Runner, wants_prefect
from ebbflow.flows.setup import data as data_cli
from ebbflow.flows.setup import deployments as prefect_cli
from ebbflow.flows.training import cli as train_cli
from ebbflow.flows.tuning import cli as tune_cli
from ebbflow.planners.errors import EbbflowError

app = typer.Typer(
    name="ebbflow",
    cls=CheckedGroup,
    help="SQL pipelines on capacity that comes and goes.\n\n"
    "[b]First steps[/b]: ebbflow doctor, ebbflow demo, ebbflow query --help",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cluster_cli.app, name="cluster")
app.add_typer(nodes_cli.app, name="nodes")
app.add_typer(data_cli.app, name="data")
app.add_typer(bench_cli.app, name="bench")
app.add_typer(simulate_cli.app, name="simulate")
app.add_typer(fleet_cli.app, name="fleet")
app.add_typer(ledger_cli.app, name="ledger")
app.add_typer(capacity_cli.app, name="capacity")
app.add_typer(prefect_cli.app, name="prefect")
train_cli.register(app)
tune_cli.register(app)
elastic_cli.register(app)
pipeline_cli.register(app)
report_cli.register(app)
console = Console()
errors = Console(stderr=True)


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"ebbflow {version('prefect-ebbflow')}")
        raise typer.Exit


@app.callback()
def _about(
    number: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None: ...


class Engine(StrEnum):
    spark = "spark"
    duckdb = "duckdb"


class Policy(StrEnum):
    qoop = "qoop"
    clarinet = "clarinet"
    volcano = "volcano"
    single = "single"


class Cuts(StrEnum):
    cost = "cost"
    every_join = "every-join"
    none = "none"


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


@app.command(help=_QUERY_HELP)
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
    json: Annotated[str | None, typer.Option(help="Write the report as JSON.", metavar="FILE")] = None,
    report: Annotated[
        str | None, typer.Option(help="Write the report as one HTML page.", metavar="FILE")
    ] = None,
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
    runner: Annotated[
        Runner,
        typer.Option(
            metavar="HOW",
            help="prefect records the run on a Prefect server, plain does not; auto if one is configured.",
        ),
    ] = Runner.auto,
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
        master=cluster_cli.resolve_master(master),
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


@app.command(help=_EXPLAIN_HELP)
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


@app.command("calibrate", help=_CALIBRATE_HELP)
def calibrate_command(
    engine: Annotated[Engine, typer.Option(help="spark or duckdb.")] = Engine.spark,
    master: Annotated[str, typer.Option(help="Spark master, or 'cluster'.")] = "local[2]",
    store: Store = None,
) -> None:
    from ebbflow.flows.query.command import calibrate_engine
    from ebbflow.tasks.query.request import default_store

    calibrate_engine(engine.value, cluster_cli.resolve_master(master), store or default_store(), console)


@app.command()
def doctor() -> None:
    """Show what is installed, which versions, what is missing and how to get it.

    [b]Example[/b]

        ebbflow doctor && ebbflow demo

    Leaves with status 1 when something that the main job needs is missing.
    """
    from ebbflow.flows.setup.doctor import examine, print_checks

    checks = examine()
    print_checks(checks, console)
    if any(not c.ok and c.required for c in checks):
        raise typer.Exit(1)


_DEMO_HELP = """Run the main job for real: two queries and two trainings of two teams on nodes that come and go.

[b]Examples[/b]

    ebbflow demo

    ebbflow demo --query 9 --scale 1      one TPC-H query on Spark workers that come and go

It generates TPC-H data (kept for the next time), brings up Spark workers and GPU nodes of this machine, gives nodes \
notice and kills some, plans again, holds auctions, rents and gives back nodes, compares the results with DuckDB's, \
writes a report, and leaves no process behind. Wants about 8 GiB of memory and two minutes.

Status: 0 all right, 2 wrong input, 3 a step failed or a result was wrong, 130 interrupted.
"""


@app.command(help=_DEMO_HELP)
def demo(
    query: Annotated[
        int | None, typer.Option(help="Run this TPC-H query alone, as one Prefect flow: 5, 7, 8 or 9.")
    ] = None,
    scale: Annotated[
        float | None, typer.Option(help="TPC-H scale factor. Default: 0.1, with --query 1.")
    ] = None,
    report: Annotated[str, typer.Option(help="HTML report to write.", metavar="FILE")] = "ebbflow-demo.html",
    json: Annotated[str | None, typer.Option(help="JSON report to write.", metavar="FILE")] = None,
    data: Annotated[Path | None, typer.Option(help="Where the data is cached.", metavar="DIR")] = None,
    cuts: Annotated[
        Cuts | None,
        typer.Option(help="With --query: where plans are cut; every-join, as in QOOP, shows more switching."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="A parameter of the demo's pipeline, NAME=VALUE.", metavar="NAME=VALUE"),
    ] = None,
    runner: Annotated[
        Runner,
        typer.Option(
            metavar="HOW",
            help="prefect records the run on a Prefect server, plain does not; auto if one is configured. With "
            "--query always prefect.",
        ),
    ] = Runner.auto,
) -> None:
    from ebbflow.flows.setup.demo import run_demo, run_demo_pipeline
    from ebbflow.planners.errors import OptionError

    if query is not None:
        if set_:
            raise OptionError("--set is for the demo's pipeline; with --query there is none")
        right = run_demo(
            query, 1.0 if scale is None else scale, report, json, data, (cuts or Cuts.cost).value, console
        )
    else:
        if cuts is not None:
            raise OptionError("--cuts is for one query: name it by --query N")
        right = run_demo_pipeline(
            0.1 if scale is None else scale, report, json, data, set_ or [], console, wants_prefect(runner)
        )
    if not right:
        raise typer.Exit(3)


def _title(sql: str) -> str:
    path = sql.strip()
    return Path(path).stem if path.endswith(".sql") and "\n" not in path else ""


def _release(error: BaseException | None) -> None:
    """Drop the frames that an error's chain holds: Prefect keeps it, and DuckDB complains at exit of what lives."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def main() -> None:
    """Run the command line; errors of our own family become one message and status 2."""
    try:
        app()
    except EbbflowError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        _release(error)
        sys.exit(2)
    except SystemExit as end:  # typer makes one of an interrupt, too
        _release(end)
        # Under -m, CPython ends itself by SIGINT, whatever the status, once an interrupt came up inside an exec of
        # a text, such as a dataclass's while modules are imported; the next exec clears that mark.
        exec("")  # noqa: S102
        raise


if __name__ == "__main__":
    main()
